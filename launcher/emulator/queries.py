"""ListTrainingJobs and Search over the jobs that the emulator knows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from launcher.emulator.operations import AwsError
from launcher.emulator.training_job import TrainingJob

ORDERS = {"Name": "TrainingJobName", "CreationTime": "CreationTime", "Status": "TrainingJobStatus"}

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "Equals": operator.eq,
    "NotEquals": operator.ne,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqualTo": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqualTo": operator.le,
    "Contains": lambda found, wanted: str(wanted) in str(found),
    "In": lambda found, wanted: str(found) in str(wanted).split(","),
}


def list_jobs(jobs: list[TrainingJob], wanted: dict[str, Any]) -> dict[str, Any]:
    """The answer of ListTrainingJobs; newest first unless asked otherwise."""
    found = [summary for summary in (job.summary() for job in jobs) if _is_listed(summary, wanted)]
    key = ORDERS[wanted.get("SortBy", "CreationTime")]
    found.sort(key=lambda summary: summary[key], reverse=wanted.get("SortOrder", "Descending") == "Descending")
    return page("TrainingJobSummaries", found, wanted)


def search(jobs: list[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, Any]:
    """The answer of Search for training jobs."""
    found = [job for job in jobs if _matches(job, wanted.get("SearchExpression", {}))]
    key = wanted.get("SortBy", "LastModifiedTime")
    found.sort(
        key=lambda job: (_member(job, key) is not None, _member(job, key)),
        reverse=wanted.get("SortOrder", "Descending") == "Descending",
    )
    return page("Results", [{"TrainingJob": job} for job in found], wanted)


def page(name: str, entries: list[Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """A part of a list, and the token for the next; the token is the place where it begins."""
    first = int(wanted.get("NextToken") or 0)
    last = first + int(wanted.get("MaxResults") or 100)
    answer: dict[str, Any] = {name: entries[first:last]}
    if last < len(entries):
        answer["NextToken"] = str(last)
    return answer


def _is_listed(summary: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return (
        wanted.get("NameContains", "") in summary["TrainingJobName"]
        and wanted.get("StatusEquals") in (None, summary["TrainingJobStatus"])
        and wanted.get("WarmPoolStatusEquals") in (None, summary.get("WarmPoolStatus", {}).get("Status"))
        and wanted.get("CreationTimeAfter", 0)
        < summary["CreationTime"]
        < wanted.get("CreationTimeBefore", float("inf"))
        and wanted.get("LastModifiedTimeAfter", 0)
        < summary["LastModifiedTime"]
        < wanted.get("LastModifiedTimeBefore", float("inf"))
    )


def _matches(job: dict[str, Any], expression: dict[str, Any]) -> bool:
    """Whether a job fits filters and sub-expressions, all of them unless the operator is Or."""
    results: Iterable[bool] = [_fits(job, entry) for entry in expression.get("Filters", [])]
    results = [*results, *(_matches(job, part) for part in expression.get("SubExpressions", []))]
    if not results:
        return True
    return any(results) if expression.get("Operator") == "Or" else all(results)


def _fits(job: dict[str, Any], entry: dict[str, Any]) -> bool:
    found = _member(job, entry["Name"])
    name, wanted = str(entry.get("Operator", "Equals")), entry.get("Value")
    if name in ("Exists", "NotExists"):
        return (found is not None) == (name == "Exists")
    if found is None:
        return name == "NotEquals"
    if name not in OPERATORS:
        raise AwsError("ValidationException", f"Unknown operator: {name}")
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        wanted = _number(wanted)
    return OPERATORS[name](found, wanted)


def _member(job: dict[str, Any], name: str) -> Any:
    """A value by its dotted name: ResourceConfig.InstanceType, HyperParameters.epochs, Tags.project, Metrics.loss …"""
    if name.startswith("Tags."):
        return next((tag["Value"] for tag in job["Tags"] if tag["Key"] == name[5:]), None)
    if name.startswith("Metrics."):
        metrics = job.get("FinalMetricDataList", [])
        return next((metric["Value"] for metric in metrics if metric["MetricName"] == name[8:]), None)
    value: Any = job
    while name and isinstance(value, dict):
        head, _, rest = name.partition(".")
        value, name = (value[name], "") if name in value else (value.get(head), rest)
    return value


def _number(text: Any) -> float:
    """A filter's value, which is text: a number, or a time as seconds since the epoch."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()

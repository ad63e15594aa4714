"""Whether a job's checkpoint prefix in S3 is what the job takes it for. All requests are read-only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from launcher.aws.upload import split
from launcher.config.issues import Issue
from launcher.planner.plan import Plan
from launcher.record import records

RESUME = "checkpoints: resume"
"""The key of the issue about a run that left nothing to resume from."""

MAX_JOBS = 200
"""The most running jobs that are asked about, one request each."""


def check_content(plan: Plan, uri: str, s3: Any) -> Iterator[Issue]:
    """Issues if the prefix holds anything although the job does not resume a run, or nothing although it does.

    Args:
        s3: a boto3 client.
    """
    if plan.resumes is None and holds_any(uri, s3):
        found, fix = f"{uri} holds objects already, and the job resumes from them", "no change to resume"
        yield Issue(key="checkpoints", level="warning", found=found, fix=f"{fix}; otherwise use another prefix")
    elif plan.resumes is not None and not holds_any(uri, s3):
        found = f"{plan.resumes} left no checkpoint under {uri}"
        if plan.replay_of is not None:  # `launcher resume` asks for that run; `launcher run` resumes where it can
            yield Issue(key=RESUME, found=found, fix=f"launcher replay {plan.resumes} starts from the beginning")
        else:
            anew, fix = f"{found}, so the job starts from the beginning", "no change to start from the beginning"
            yield Issue(key=RESUME, level="warning", found=anew, fix=fix)


def holds_any(uri: str, s3: Any) -> bool:
    """Whether checkpoints lie below a prefix: an object or a folder that was not still being written.

    Args:
        s3: a boto3 client.
    """
    bucket, prefix = split(uri)
    below = f"{prefix.rstrip('/')}/" if prefix else ""
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=below, Delimiter="/"):
        keys = [item["Key"] for item in page.get("Contents", ())]
        folders = [item["Prefix"].rstrip("/") for item in page.get("CommonPrefixes", ())]
        names = [key.removeprefix(below) for key in keys + folders]
        if any(name and not name.startswith(".") for name in names):
            return True
    return False


def check_users(uri: str, region: str, sagemaker: Any) -> Iterator[Issue]:
    """Whether a running job keeps its checkpoints under the same prefix, or one above or below it.

    Jobs of one prefix would overwrite and remove each other's, and SageMaker copies all that is below a prefix to the hosts of its job.

    Args:
        sagemaker: a boto3 client of the region.
    """
    # without MaxResults, which SageMaker applies before StatusEquals:
    # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ListTrainingJobs.html
    pages = itertools.chain.from_iterable(
        sagemaker.get_paginator("list_training_jobs").paginate(StatusEquals=state)
        for state in (records.IN_PROGRESS, records.STOPPING)
    )
    names = (job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"])
    for name in itertools.islice(names, MAX_JOBS):
        kept = sagemaker.describe_training_job(TrainingJobName=name).get("CheckpointConfig", {}).get("S3Uri")
        if kept is not None and _overlap(kept, uri):
            same = _folder(kept) == _folder(uri)
            yield Issue(
                key="checkpoints",
                found=f"{name} is under way and keeps its checkpoints under {uri if same else f'{kept}, this job under {uri}'}",
                valid="a prefix of its own for each job under way, none within another's",
                fix=f"wait until it has ended (launcher attach {name} --region {region} follows it), or use another prefix",
            )
    if next(names, None) is not None:
        found = f"whether a job under way keeps its checkpoints there: more than {MAX_JOBS} are"
        yield Issue(key="checkpoints", level="not checked", found=found, fix="use a prefix that no other job has")


def _overlap(one: str, other: str) -> bool:
    """Whether two prefixes are the same, or one lies below the other."""
    return _folder(one).startswith(_folder(other)) or _folder(other).startswith(_folder(one))


def _folder(uri: str) -> str:
    """A prefix with its slash, which keeps a/b and a/bc apart."""
    return f"{uri.rstrip('/')}/"

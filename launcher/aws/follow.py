"""Bringing what SageMaker knows of a run into the run's folder: status, logs of all hosts, and at the end what it left.

The folder is what everybody reads; it survives expired credentials, a closed laptop and two terminals that follow one run.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import io
import itertools
import re
import tarfile
import time
import zlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher.aws import prices, session
from launcher.aws.upload import split
from launcher.record import failure_causes, records
from launcher.record.records import RunFolder

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
LAST_LINES_SECONDS = 3
"""CloudWatch shows a line some seconds after it was written; the SDK too waits before its last look."""

UNKNOWN_SECONDS = 120
"""How long after its creation a job may still be unknown to DescribeTrainingJob before it counts as gone."""

MAX_EXPLAINED_LINES = 200_000
"""Of each host's log, half from its start and half from its end, that a failure is explained by."""

BROKEN: tuple[type[Exception], ...] = (tarfile.TarError, OSError, EOFError, zlib.error)
"""What an archive that is not whole raises, or a disk that is full."""

KEPT = (
    *("TrainingJobName", "TrainingJobArn", "TrainingJobStatus", "SecondaryStatus", "SecondaryStatusTransitions"),
    *("FailureReason", "CreationTime", "TrainingStartTime", "TrainingEndTime", "LastModifiedTime"),
    *("TrainingTimeInSeconds", "BillableTimeInSeconds", "ModelArtifacts", "FinalMetricDataList"),
    *("ProfilerConfig", "ProfilingStatus", "WarmPoolStatus"),
)
"""What remote.json holds of DescribeTrainingJob's answer."""


def refresh(folder: RunFolder) -> bool:
    """Bring what is new into the run's folder. Where another process is at it, nothing is done.

    Returns:
        Whether anything was new.

    Raises:
        botocore's errors: SageMaker, CloudWatch Logs or S3 did not answer. What was brought until then is kept.
    """
    if folder.outcome.exists():
        return False
    with _alone(folder) as alone:
        if not alone or folder.outcome.exists():
            return False
        plan, known = folder.read(folder.plan), folder.read(folder.remote)
        region = plan["job"]["region"]
        try:
            answer = session.client("sagemaker", region).describe_training_job(TrainingJobName=folder.name)
        except session.errors() as error:
            if not session.is_unknown_job(error):
                raise
            return _is_gone(folder, known)
        described = {name: _plain(answer[name]) for name in KEPT if name in answer}
        changed = any(described.get(name) != known.get(name) for name in KEPT)
        records.write_json(folder.remote, {**known, **described, "asked": _now()})
        if described["TrainingJobStatus"] == records.STOPPING:
            folder.request_stop("asked to elsewhere")
        no_logs = ""
        try:
            changed |= fetch_logs(folder, region, len(plan["hosts"]))
            if described["TrainingJobStatus"] in records.OVER:
                time.sleep(LAST_LINES_SECONDS)
                fetch_logs(folder, region, len(plan["hosts"]))
        except session.errors() as error:
            if session.passes(error):
                raise
            no_logs = f"logs: {session.about(error)[0]}"  # the job can be followed without them
        if described["TrainingJobStatus"] in records.OVER:
            _finish(folder, plan, region, described, [no_logs] if no_logs else [])
        return changed


def _is_gone(folder: RunFolder, known: dict[str, Any]) -> bool:
    """SageMaker does not know the job: it has not been created yet, or it was deleted."""
    if not known or time.time() - known.get("sent", 0) < UNKNOWN_SECONDS:
        return False
    records.write_json(
        folder.outcome, {"state": records.FAILED, "failure": "SageMaker does not know this job, or not any more"}
    )
    return True


def fetch_logs(folder: RunFolder, region: str, hosts: int) -> bool:
    """Append new lines of every host's log stream to logs/<host>.log.

    A job that spot capacity interrupted has several streams for a host, one after the other. How far each was read is
    written after the lines are; lines that a crash left without that mark are cut off and read again.
    """
    client = session.client("logs", region)
    file = folder.path / "logs" / "streams.json"
    file.parent.mkdir(exist_ok=True)
    state = folder.read(file) or {"sizes": {}, "tokens": {}}
    new = False
    try:
        streams = [
            stream["logStreamName"]
            for page in client.get_paginator("describe_log_streams").paginate(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{folder.name}/"
            )
            for stream in page["logStreams"]
        ]
    except client.exceptions.ResourceNotFoundException:
        return False  # the account's first job has not started yet
    for host in (f"algo-{number + 1}" for number in range(hosts)):
        own = [name for name in streams if re.match(rf"{re.escape(folder.name)}/{host}(-|$)", name)]
        with open(folder.log(host), "ab") as log:
            log.truncate(state["sizes"].get(host, 0))
            log.seek(0, io.SEEK_END)
            for stream in sorted(own, key=lambda name: (len(name), name)):
                for token, lines in _events(client, stream, state["tokens"].get(stream)):
                    log.write("".join(line.rstrip("\n") + "\n" for line in lines).encode())
                    log.flush()
                    new |= bool(lines)
                    state["tokens"][stream], state["sizes"][host] = token, log.tell()
                    records.write_json(file, state)
    return new


def _events(client: Any, stream: str, token: str | None) -> Iterator[tuple[str, list[str]]]:
    """The lines of a stream after a token, page by page, each with the token after it."""
    while True:
        more = {"nextToken": token} if token is not None else {}
        page = client.get_log_events(logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **more)
        if page["nextForwardToken"] == token:  # an empty page alone is not the end
            return
        token = page["nextForwardToken"]
        yield token, [event["message"] for event in page["events"]]


def _finish(
    folder: RunFolder, plan: dict[str, Any], region: str, described: dict[str, Any], not_saved: list[str]
) -> None:
    """What the job left, then outcome.json: an outcome means that all is there, or says what is not."""
    hosts = [host["name"] for host in plan["hosts"]]
    output = f"{plan['request']['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{folder.name}/output"
    client = session.client("s3", region)
    state = described["TrainingJobStatus"]
    started, ended = described.get("TrainingStartTime"), described.get("TrainingEndTime")
    seconds = described.get("TrainingTimeInSeconds")
    model = described.get("ModelArtifacts", {}).get("S3ModelArtifacts")
    outcome: dict[str, Any] = {
        "state": state,
        "started": started,
        "ended": ended,
        "seconds": seconds,
        "host_seconds": seconds * len(hosts) if seconds is not None else None,
        "model_uri": model,
        "output_uri": output,
        **prices.bill(plan["request"], (plan.get("price") or {}).get("usd_per_hour"), described),
        "interruptions": interruptions(described),
    }
    if state == records.STOPPED:
        reason = folder.read(folder.stop_request).get("reason", "asked to elsewhere")
        limits = {"MaxRuntimeExceeded": "compute.max_hours", "MaxWaitTimeExceeded": "compute.max_wait_hours"}
        limit = limits.get(described.get("SecondaryStatus", ""))
        outcome["stop_reason"] = f"{limit} is over" if limit else reason
    if state == records.FAILED:
        outcome |= explain_failure(folder, hosts, described.get("FailureReason", ""))
    results = folder.host(hosts[0]) / "output/data"
    for what, save in (
        ("output.tar.gz", lambda: _fetch_archive(client, f"{output}/output.tar.gz", results, folder.path)),
        ("output/data", lambda: _fetch_files(client, f"{output}/data/", results)),  # where compress_output is false
        ("model.tar.gz", lambda: _fetch(client, f"{output}/model.tar.gz", folder.model)),
    ):
        try:
            not_saved += save() or []
        except session.errors() + BROKEN as error:
            if session.code(error) in ("NoSuchKey", "404", "NoSuchBucket"):
                continue  # the script wrote none, or it lies there in the other form
            if session.passes(error):
                raise
            why = session.about(error)[0] if isinstance(error, session.errors()) else repr(error)
            not_saved.append(f"{what}: {why}; it lies in {output}")
    records.merge_metrics(folder, hosts)
    if not_saved:
        outcome["not_saved"] = not_saved
    records.write_json(folder.outcome, {name: value for name, value in outcome.items() if value is not None})


def explain_failure(folder: RunFolder, hosts: list[str], reason: str) -> dict[str, Any]:
    """SageMaker's reason, the first real traceback of any host, the cause and its fix."""
    logs = {host: _lines(folder.log(host)) for host in hosts}
    found: dict[str, Any] = {"failure": reason}
    for host, lines in logs.items():
        traceback = failure_causes.first_traceback(lines)
        if traceback:
            found |= {"failed_host": host, "traceback": traceback}
            break
    code = re.search(r"exit code:? (\d+)", reason)
    if code:
        found["exit_code"] = int(code[1])
    explained = failure_causes.explain(reason, [line for lines in logs.values() for line in lines])
    if explained is not None:
        found |= {"cause": explained.cause, "fix": explained.fix, "evidence": explained.evidence}
    return found


def interruptions(described: dict[str, Any]) -> int | None:
    """How often spot capacity was taken away; None: never."""
    transitions = described.get("SecondaryStatusTransitions", [])
    return sum(transition["Status"] == "Interrupted" for transition in transitions) or None


def _lines(file: Path) -> list[str]:
    """A log's lines; of a very long one, the first and the last."""
    if not file.is_file():
        return []
    half = MAX_EXPLAINED_LINES // 2
    with open(file, encoding="utf-8", errors="replace") as log:
        first = list(itertools.islice(log, half))
        return [line.rstrip("\n") for line in (*first, *collections.deque(log, half))]


def _fetch(client: Any, uri: str, target: Path) -> None:
    bucket, key = split(uri)
    temporary = target.with_name(f".{target.name}.part")
    try:
        client.download_file(bucket, key, str(temporary))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _fetch_archive(client: Any, uri: str, target: Path, folder: Path) -> list[str]:
    """Fetch a tar.gz and unpack it; returns what of it was left out because it would lie elsewhere."""
    archive = folder / "output.tar.gz"
    _fetch(client, uri, archive)
    target.mkdir(parents=True, exist_ok=True)
    left_out = []
    with tarfile.open(archive, mode="r:gz") as members:
        for member in members:
            try:
                members.extract(member, target, filter="data")
            except tarfile.FilterError as error:
                left_out.append(f"output.tar.gz: {member.name}: {error}; it is in {archive}")
    if not left_out:
        archive.unlink()
    return left_out


def _fetch_files(client: Any, uri: str, target: Path) -> None:
    """Fetch everything below a prefix."""
    bucket, prefix = split(uri)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            place = target / item["Key"][len(prefix) :]
            if place.resolve().is_relative_to(target.resolve()) and not item["Key"].endswith("/"):
                place.parent.mkdir(parents=True, exist_ok=True)
                _fetch(client, f"s3://{bucket}/{item['Key']}", place)


@contextlib.contextmanager
def _alone(folder: RunFolder) -> Iterator[bool]:
    """Whether no other process refreshes the run just now."""
    with open(folder.path / "refresh.lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _plain(value: Any) -> Any:
    """Times as ISO 8601 in UTC, at any depth."""
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat(timespec="seconds")
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

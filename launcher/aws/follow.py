"""A run's folder kept up to date from SageMaker: status, the hosts' logs, and at the end the results.

All readers use the folder, so nothing is lost to expired credentials, a closed laptop or a second follower.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import re
import shutil
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher.aws import accounts, prices, session
from launcher.aws.upload import split
from launcher.record import archives, failures, metrics_file, records, trust
from launcher.record.records import RunFolder
from launcher.show.text import counted

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
LAST_LINES_SECONDS = 3
"""CloudWatch shows lines with a delay of seconds. The SDK waits too before its last look."""

UNKNOWN_SECONDS = 120
"""Seconds for which DescribeTrainingJob may not yet know a new job, from the record's `sent` on."""

STOPPED_ELSEWHERE = "stopped by another program"

BROKEN: tuple[type[Exception], ...] = (archives.ArchiveError, OSError)
"""Errors of a damaged archive or a full disk."""

USED_SHARE = 0.9
"""Fraction of the free disk space that the results may take."""

KEPT = (
    *("TrainingJobName", "TrainingJobArn", "TrainingJobStatus", "SecondaryStatus", "SecondaryStatusTransitions"),
    *("FailureReason", "CreationTime", "TrainingStartTime", "TrainingEndTime", "LastModifiedTime"),
    *("TrainingTimeInSeconds", "BillableTimeInSeconds", "ModelArtifacts", "FinalMetricDataList"),
    *("ProfilerConfig", "ProfilingStatus", "WarmPoolStatus", "ResourceConfig"),
)
"""Members of DescribeTrainingJob's answer that remote.json holds."""


@trust.closed_umask()
def refresh(folder: RunFolder) -> bool:
    """Update the run's folder. Does nothing while another process updates it.

    Returns:
        Whether anything was new.

    Raises:
        botocore's errors: SageMaker, CloudWatch Logs or S3 did not answer. The folder keeps what came before.
        UserError: the environment's credentials are of another account than the job.
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
            return _is_gone(folder, region, known)
        described = {name: _plain(answer[name]) for name in KEPT if name in answer}
        changed = any(described.get(name) != known.get(name) for name in KEPT)
        known = {**known, **described, "asked": _now()}
        records.write_json(folder.remote, known)
        if described["TrainingJobStatus"] == records.STOPPING:
            folder.request_stop(STOPPED_ELSEWHERE)
        new, no_logs = fetch_logs(folder, region, len(plan["hosts"]))
        if described["TrainingJobStatus"] in records.OVER:
            time.sleep(LAST_LINES_SECONDS)
            _, no_logs = fetch_logs(folder, region, len(plan["hosts"]))
        if no_logs != known.get("no_logs", ""):
            records.write_json(folder.remote, {**known, "no_logs": no_logs})
        if described["TrainingJobStatus"] in records.OVER:
            _finish(folder, plan, region, described, [no_logs] if no_logs else [])
        return changed or new


def note_sent(folder: RunFolder) -> None:
    """Note in remote.json that the job may have been created as late as now. A disk without room for that keeps the earlier time."""
    with contextlib.suppress(OSError, records.DamagedRecord):
        records.write_json(folder.remote, {**folder.read(folder.remote), "sent": time.time()})


def _is_gone(folder: RunFolder, region: str, known: dict[str, Any]) -> bool:
    """Handle a job that SageMaker does not know: it is not created yet, is in another account, or was deleted.

    Raises:
        UserError: the environment's credentials are of another account.
    """
    if not known or folder.supervisor_lives():
        return False  # it is being created
    if accounts.was_emulated(known):
        failure = "the SageMaker emulator that ran it was closed, which ends its jobs"
    else:
        accounts.refuse_other(region, known)
        if time.time() - known.get("sent", 0) < UNKNOWN_SECONDS:
            return False
        failure = "SageMaker has no such job; it was never created, or was deleted"
    _write_outcome(folder, {"state": records.FAILED, "failure": failure})
    return True


def fetch_logs(folder: RunFolder, region: str, hosts: int) -> tuple[bool, str]:
    """Append new lines of every host's log streams to logs/<host>.log.

    A spot job that was interrupted has several streams for a host, one after the other.

    Returns:
        Whether there were any; and why some host's lines cannot be read, "" if all can. The job is followed in either case.

    Raises:
        botocore's transient errors.
    """
    client = session.client("logs", region)
    (folder.path / "logs").mkdir(exist_ok=True)
    new, problems = False, list[str]()
    with _noted("logs", problems):
        streams = _streams(client, folder.name)
        for host in (f"algo-{index + 1}" for index in range(hosts) if streams):
            own = [name for name in streams if re.match(rf"{re.escape(folder.name)}/{host}(-|$)", name)]
            with _noted(f"logs of {host}", problems):
                new |= _fetch_log(client, folder, host, sorted(own, key=lambda name: (len(name), name)))
    more = f", and {counted(len(problems) - 1, 'more host')}" if len(problems) > 1 else ""
    return new, problems[0] + more if problems else ""


@contextlib.contextmanager
def _noted(what: str, problems: list[str]) -> Iterator[None]:
    """Note a permanent error of AWS. Raise a transient one."""
    try:
        yield
    except session.errors() as error:
        if session.is_transient(error):
            raise
        problems.append(f"{what}: {session.about(error)[0]}")


def _streams(client: Any, job: str) -> list[str]:
    """The names of a job's log streams; [] if the account's first job has not started yet."""
    pages = client.get_paginator("describe_log_streams").paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/")
    try:
        return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
    except session.errors() as error:
        if session.code(error) != "ResourceNotFoundException":
            raise
        return []


def _fetch_log(client: Any, folder: RunFolder, host: str, streams: list[str]) -> bool:
    """Append the new lines of a host, and return whether there were any.

    The position in a stream is a token, which expires after 24 hours and is then refused as an invalid parameter. The host's log is then
    read again from its first line.
    https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html
    """
    file = folder.path / "logs" / "streams.json"
    positions = folder.read(file) or {"sizes": {}, "tokens": {}}
    try:
        return _append(client, folder, host, streams, positions)
    except session.errors() as error:
        if session.code(error) != "InvalidParameterException" or not positions["tokens"].keys() & {*streams}:
            raise
    positions["sizes"][host] = 0
    positions["tokens"] = {stream: token for stream, token in positions["tokens"].items() if stream not in streams}
    records.write_json(file, positions, durable=False)
    return _append(client, folder, host, streams, positions)


def _append(client: Any, folder: RunFolder, host: str, streams: list[str], positions: dict[str, Any]) -> bool:
    """Append a host's lines after its recorded positions, then record the new positions. Returns whether there were any lines.

    Lines that a crash left without a position are truncated and read again.
    """
    new = False
    with open(folder.log(host), "ab") as log:
        log.truncate(positions["sizes"].get(host, 0))
        log.seek(0, io.SEEK_END)
        for stream in streams:
            for token, lines in _events(client, stream, positions["tokens"].get(stream)):
                log.write("".join(line.rstrip("\n") + "\n" for line in lines).encode())
                log.flush()
                new |= bool(lines)
                positions["tokens"][stream], positions["sizes"][host] = token, log.tell()
                records.write_json(folder.path / "logs" / "streams.json", positions, durable=False)  # often
    return new


def _events(client: Any, stream: str, token: str | None) -> Iterator[tuple[str, list[str]]]:
    """The lines of a stream after a token, by page, with the next token."""
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
    """Fetch the results, then write outcome.json, which lists what could not be saved."""
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
        reason = folder.read(folder.stop_request).get("reason", STOPPED_ELSEWHERE)
        limits = {"MaxRuntimeExceeded": "compute.max_hours", "MaxWaitTimeExceeded": "compute.max_wait_hours"}
        limit = limits.get(described.get("SecondaryStatus", ""))
        outcome["stop_reason"] = f"{limit} was reached" if limit else reason
    if state == records.FAILED:
        outcome |= failures.describe(folder, hosts, described.get("FailureReason", ""))
    results = folder.host(hosts[0]) / "output/data"
    for what, save in (
        ("output.tar.gz", lambda: _fetch_archive(client, f"{output}/output.tar.gz", results, folder.path)),
        ("output/data", lambda: _fetch_files(client, f"{output}/data/", results)),  # if compress_output is false
        ("model.tar.gz", lambda: fetch(client, f"{output}/model.tar.gz", folder.model)),
    ):
        try:
            not_saved += save() or []
        except session.errors() + BROKEN as error:
            if session.code(error) in ("NoSuchKey", "404", "NoSuchBucket"):
                continue  # the script wrote none, or it has the other form
            session.raise_if_transient(error, region)
            why = session.about(error)[0] if isinstance(error, session.errors()) else str(error)
            not_saved.append(f"{what}: {why}; it is in {output}")
    metrics_file.merge(folder, hosts)
    if not_saved:
        outcome["not_saved"] = not_saved
    _write_outcome(folder, {name: value for name, value in outcome.items() if value is not None})


def _write_outcome(folder: RunFolder, outcome: dict[str, Any]) -> None:
    """Write outcome.json, with the disk space that was reserved for it."""
    folder.reserve.unlink(missing_ok=True)
    records.write_json(folder.outcome, outcome)


def interruptions(described: dict[str, Any]) -> int | None:
    """Number of spot interruptions; None: none."""
    transitions = described.get("SecondaryStatusTransitions", [])
    return sum(transition["Status"] == "Interrupted" for transition in transitions) or None


def fetch(client: Any, uri: str, target: Path) -> None:
    """Fetch an object, whole or not at all. Raises botocore's and s3transfer's errors."""
    bucket, key = split(uri)
    temporary = target.with_name(f".{target.name}.part")
    try:
        client.download_file(bucket, key, str(temporary))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _fetch_archive(client: Any, uri: str, target: Path, folder: Path) -> list[str]:
    """Fetch and unpack a tar.gz. Returns the members that were left out; the archive then stays."""
    archive = folder / "output.tar.gz"
    fetch(client, uri, archive)
    left_out = archives.unpack(archive, target, int(shutil.disk_usage(folder).free * USED_SHARE))
    if not left_out:
        archive.unlink()
    return [f"{archive.name}: {member}; it is in {archive}" for member in left_out]


def _fetch_files(client: Any, uri: str, target: Path) -> None:
    """Fetch everything below a prefix."""
    bucket, prefix = split(uri)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            place = target / item["Key"][len(prefix) :]
            if place.resolve().is_relative_to(target.resolve()) and not item["Key"].endswith("/"):
                place.parent.mkdir(parents=True, exist_ok=True)
                fetch(client, f"s3://{bucket}/{item['Key']}", place)


@contextlib.contextmanager
def _alone(folder: RunFolder) -> Iterator[bool]:
    """Whether this process alone refreshes the run: no other process does, and it may write to the folder."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(folder.refresh_lock, "ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, *records.CLOSED):
                raise
            yield False  # another process does; or the folder is someone else's, who refreshes it
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

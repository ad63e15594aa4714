"""Files of system metrics in SageMaker Debugger's format: found on disk or in S3, thinned if there are many, and parsed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launcher.config.issues import mistake
from launcher.insight.shapes import LARGEST, LATEST
from launcher.record import trust
from launcher.show.text import counted

NAME = re.compile(r"(?:^|/)system/(?:.+/)?(\d{10})\.(algo-\d+)\.json$")
"""The second at which a file's minute begins, and its host; smdebug's readers expect the same."""

Key = tuple[str, str, str]
"""Type, Name, Dimension."""

AT_ONCE = 16
"""Objects fetched from S3 at the same time, some MB each in memory."""


class SystemFile(NamedTuple):
    """One host's samples of a minute."""

    minute: int
    """Unix seconds at its start."""
    host: str
    size: int
    """Bytes."""
    load: Callable[[], bytes]


@dataclass
class Samples:
    """What files held."""

    series: dict[str, dict[Key, tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    """Host -> (Type, Name, Dimension) -> times and values, by time."""
    unreadable: list[str] = field(default_factory=list)
    """What could not be read of which files, such as the last line of a host that was killed."""


def below(places: Iterable[Path]) -> list[SystemFile]:
    """All files of system metrics below some folders, in order of time."""
    found = []
    for place in places:
        # a profiler-output's parent is not seen from here, and `system` may be the place itself
        for folder, _, names in os.walk(place.absolute()):
            for name in names:
                path = f"{folder}/{name}"
                matching = NAME.search(path)
                if matching:
                    # a broken link is reported when it is read
                    size = os.path.getsize(path) if os.path.exists(path) else 0
                    found.append(
                        SystemFile(int(matching[1]), matching[2], size, functools.partial(trust.content, Path(path)))
                    )
    return sorted(found, key=lambda file: file[:2])


def in_s3(prefix: str) -> list[SystemFile]:
    """All files of system metrics below a prefix, in order of time.

    Raises:
        UserError: boto3 is not installed, or S3 does not answer.
    """
    try:
        import boto3
        import botocore.exceptions
    except ModuleNotFoundError:
        raise mistake(
            "source", "not installed: boto3, which reads S3", "make, or pip install -e '.[aws]', in this kit's folder"
        ) from None
    bucket, _, below_key = prefix.removeprefix("s3://").partition("/")
    no_credentials = (
        botocore.exceptions.NoCredentialsError,
        botocore.exceptions.PartialCredentialsError,
        botocore.exceptions.CredentialRetrievalError,
        botocore.exceptions.ProfileNotFound,
    )

    @contextlib.contextmanager
    def reported() -> Iterator[None]:
        try:
            yield
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            fix = "check the address, and that `aws s3 ls` shows it"
            if isinstance(error, no_credentials):
                fix = "aws configure, or set AWS_PROFILE to a profile that `aws configure list-profiles` shows"
            raise mistake("source", f"{prefix}: {error}", fix) from error

    def fetch(key: str) -> bytes:
        with reported():
            body: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            return body

    found = []
    with reported():
        client = boto3.Session().client("s3")  # with current credentials: the default session keeps its first ones
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=below_key):
            for item in page.get("Contents", ()):
                matching = NAME.search(item["Key"])
                if matching:
                    load = functools.partial(fetch, item["Key"])
                    found.append(SystemFile(int(matching[1]), matching[2], item["Size"], load))
    return sorted(found, key=lambda file: file[:2])


def thin(files: list[SystemFile], max_bytes: int) -> tuple[list[SystemFile], str | None]:
    """About `max_bytes` of the files: the same minutes of every host, evenly over time, including the last one.

    Returns:
        The files to read; and how they were chosen, None if all are taken.
    """
    total = sum(file.size for file in files)
    if total <= max_bytes:
        return files, None
    minutes = sorted({file.minute for file in files})
    each = -(-total // max_bytes)
    kept = set(minutes[::each]) | {minutes[-1]}
    chosen = [file for file in files if file.minute in kept]
    part = sum(file.size for file in chosen)
    note = (
        f"system metrics: {len(kept)} of {len(minutes)} minutes were read, one in {each}, the same for every host "
        f"({part / 1e9:.1f} of {total / 1e9:.1f} GB)"
    )
    return chosen, note


def read(files: Iterable[SystemFile]) -> Samples:
    """The samples of files. Only a few files are in memory at a time, and 16 bytes for each sample."""
    samples = Samples()
    numbers: dict[tuple[str, str, str, str], tuple[array[float], array[float]]] = {}
    unreadable: dict[str, int] = {}
    for file, content in _contents(list(files)):
        if isinstance(content, OSError):
            samples.unreadable.append(f"{file.minute}.{file.host}.json: {content.strerror}")
        elif wrong := _add(content, numbers):
            unreadable[file.host] = unreadable.get(file.host, 0) + wrong
    samples.unreadable += [f"system metrics of {host}: {counted(n, 'line')}" for host, n in unreadable.items()]
    for (host, kind, name, dimension), (times, values) in sorted(numbers.items()):
        when, what = np.frombuffer(times), np.frombuffer(values)
        if (np.diff(when) < 0).any():  # the agent's threads, or a clock that was set
            order = np.argsort(when, kind="stable")
            when, what = when[order], what[order]
        samples.series.setdefault(host, {})[kind, name, dimension] = when, what
    return samples


def _contents(files: list[SystemFile]) -> Iterator[tuple[SystemFile, bytes | OSError]]:
    """Each file with its bytes, or why it cannot be read, in order; some are loaded ahead."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, len(files), AT_ONCE):
            some = files[first : first + AT_ONCE]
            yield from zip(some, pool.map(_content, some))


def _content(file: SystemFile) -> bytes | OSError:
    try:
        return file.load()
    except OSError as error:
        return error


def _add(content: bytes, numbers: dict[tuple[str, str, str, str], tuple[array[float], array[float]]]) -> int:
    """Add a file's samples to the numbers by host and key. Returns the number of lines that are not samples."""
    unreadable = 0
    for event in _events(content):
        try:
            key = (event["NodeId"], event["Type"], event["Name"], event["Dimension"])
            when, value = event["Timestamp"] + 0.0, event["Value"] + 0.0  # refuses what is not a number
            found = numbers.get(key)
            if not (0 <= when < LATEST and -LARGEST <= value <= LARGEST):  # nor nan
                raise ValueError
            if found is None:
                if not all(type(part) is str for part in key):
                    raise TypeError
                found = numbers[key] = (array("d"), array("d"))
        except (KeyError, TypeError, ValueError, OverflowError):
            unreadable += 1
            continue
        found[0].append(when)
        found[1].append(value)
    return unreadable


def _events(content: bytes) -> list[Any]:
    """A file's lines as JSON; None for one that is not."""
    try:  # all lines as one array, which takes a third of the time
        events: list[Any] = json.loads(b"[" + content.strip().replace(b"\n", b",") + b"]")
        return events
    except (ValueError, RecursionError):
        return [_event(line) for line in content.splitlines() if line.strip()]


def _event(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None

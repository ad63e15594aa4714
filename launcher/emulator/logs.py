"""The hosts' output, line by line in CloudWatch Logs, with SageMaker's names of groups and streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

GROUP = "/aws/sagemaker/TrainingJobs"

MAX_EVENTS = 1000
"""Events in one call; CloudWatch Logs accepts 10,000 and 1 MiB.
https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutLogEvents.html"""

LONGEST_EVENT = 256 * 1024 - 26
"""Bytes of one event, without CloudWatch Logs' overhead of 26 (same page)."""


class LogStream:
    """One host's log file and its stream."""

    def __init__(self, client: Any, file: Path, stream: str, read: Callable[[str, float], None]):
        """`read` is called with each line and its time, in seconds since the epoch."""
        self.client, self.stream, self.read = client, stream, read
        self.file = open(file, "rb")  # noqa: SIM115 - read until the job is over
        self.rest = b""
        with contextlib.suppress(ClientError):  # it exists already
            client.create_log_group(logGroupName=GROUP)
        client.create_log_stream(logGroupName=GROUP, logStreamName=stream)

    def pump(self, last: bool = False) -> None:
        """Send the lines that are new.

        Args:
            last: the file is complete, so text without a line end is a line too.
        """
        *lines, self.rest = (self.rest + self.file.read()).split(b"\n")
        if last:
            lines.append(self.rest)
            self.file.close()
        now = time.time()
        texts = [line[:LONGEST_EVENT].decode(errors="replace").rstrip("\r") for line in lines]
        texts = [text for text in texts if text]  # CloudWatch Logs accepts no empty event
        for text in texts:
            self.read(text, now)
        for first in range(0, len(texts), MAX_EVENTS):
            self.client.put_log_events(
                logGroupName=GROUP,
                logStreamName=self.stream,
                logEvents=[
                    {"timestamp": int(now * 1000), "message": text} for text in texts[first : first + MAX_EVENTS]
                ],
            )

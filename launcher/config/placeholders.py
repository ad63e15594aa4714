"""Placeholders for a user's own account in this kit's configs and in documentation, which work for nobody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from launcher.config.issues import Issue
from launcher.config.job import Job

ACCOUNT = "123456789012"
"""The account of AWS's documentation; the SageMaker emulator's too, where every placeholder works."""

BUCKETS = re.compile(r"s3://(amzn-s3-demo-|(my|your|example)-?bucket|bucket(/|$))")
"""AWS's own (https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html), and those of our messages."""

IDENTIFIERS = re.compile(r"(fs|subnet|sg)-0123456789abcdef0")


def is_placeholder(key: str, value: Any) -> bool:
    """Whether a config's value, as it was read, stands for a user's own role (`role`) or bucket (any other key)."""
    if not isinstance(value, str):
        return False
    return f":{ACCOUNT}:" in value if key == "role" else BUCKETS.match(value) is not None


def is_of_this_kit(key: str, value: Any) -> bool:
    """Whether a config's value, as it was read, is a role or a bucket of this kit's own configs."""
    return is_placeholder(key, value) and (key == "role" or value.startswith("s3://amzn-s3-demo-"))


def found(job: Job) -> Iterator[tuple[str, str]]:
    """(config key, value) of every placeholder in a job."""
    if job.role is not None and is_placeholder("role", job.role):
        yield "role", job.role
    if job.image is not None and (job.image.uri or "").startswith(f"{ACCOUNT}."):
        yield "image.uri", str(job.image.uri)
    checkpoints = job.checkpoints.s3 if job.checkpoints is not None else None
    buckets = {**job.written_to, "checkpoints": checkpoints}
    buckets |= {f"inputs.{name}": given.s3 for name, given in job.inputs.items()}
    yield from ((key, uri) for key, uri in buckets.items() if uri is not None and is_placeholder(key, uri))
    identifiers = [("network.subnets", given) for given in job.network.subnets]
    identifiers += [("network.security_groups", given) for given in job.network.security_groups]
    identifiers += [(f"inputs.{name}", given.fsx or given.efs or "") for name, given in job.inputs.items()]
    yield from ((key, given) for key, given in identifiers if IDENTIFIERS.fullmatch(given))


def warnings(job: Job) -> Iterator[Issue]:
    """One warning that names all placeholders of a job."""
    given = list(found(job))
    if given:
        keys = ", ".join(dict.fromkeys(key for key, _ in given))
        yield Issue(
            key=given[0][0],
            level="warning",
            found=f"placeholders of an example: {keys}; AWS itself would refuse the job",
            fix="replace them by yours; they work in launcher emulate only",
        )


def errors(job: Job, account: str) -> list[Issue]:
    """An error for each placeholder of a job in a real AWS account."""
    if account == ACCOUNT:
        return []
    return [Issue(key=key, found=f"{value}: a placeholder", fix="replace it by yours") for key, value in found(job)]

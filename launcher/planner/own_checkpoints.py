"""Where a trial of a study or of a tuning, or a replay, keeps its checkpoints in S3: apart from those of the training and of others."""

from __future__ import annotations

import re
import secrets
from typing import Literal

from launcher.config.job import Job

OWN = re.compile(r"(study|tune|replay)-[0-9a-f]{8}")
"""The name of such a folder."""

Kind = Literal["study", "tune", "replay"]


def own_prefix(prefix: str, kind: Kind) -> str:
    """A prefix for one run beside a job's, `<above>/<kind>-<8 hex digits>/<last>`: below it SageMaker would copy the run's checkpoints to
    the hosts of every later job of that prefix. Below it all the same where that is a bucket, which has nothing beside it."""
    bucket, *folders = prefix.removeprefix("s3://").rstrip("/").split("/")
    if len(folders) > 1 and OWN.fullmatch(folders[-2]):  # of a run that has one
        del folders[-2]
    own = f"{kind}-{secrets.token_hex(4)}"
    return "s3://" + "/".join((bucket, *folders[:-1], own, *folders[-1:]))


def with_own_checkpoints(job: Job, kind: Kind) -> Job:
    """The job of a trial, whose checkpoints lie in a folder of its own beside the job's: one that went on from another's, or from the
    training's, would measure something else, and the training would go on from the trial's.

    Args:
        kind: what it is a trial of.
    """
    if job.checkpoints is None:
        return job
    own = own_prefix(job.checkpoints.s3, kind)
    return job.model_copy(update={"checkpoints": job.checkpoints.model_copy(update={"s3": own})})

"""Where a trial of a study or tuning, or a replay, keeps its checkpoints in S3: apart from the training's and others'."""

from __future__ import annotations

import re
import secrets
from typing import Literal

from launcher.config.job import Job

OWN = re.compile(r"(study|tune|replay)-[0-9a-f]{8}")
"""The name of such a folder."""

Kind = Literal["study", "tune", "replay"]


def own_prefix(prefix: str, kind: Kind) -> str:
    """A prefix for one run beside a job's, `<above>/<kind>-<8 hex digits>/<last>`: below the job's, SageMaker would copy the run's
    checkpoints to the hosts of every later job with that prefix. A bucket has nothing beside it: the run's prefix is then below it."""
    bucket, *folders = prefix.removeprefix("s3://").rstrip("/").split("/")
    if len(folders) > 1 and OWN.fullmatch(folders[-2]):  # of a run that has one already
        del folders[-2]
    own = f"{kind}-{secrets.token_hex(4)}"
    return "s3://" + "/".join((bucket, *folders[:-1], own, *folders[-1:]))


def with_own_checkpoints(job: Job, kind: Kind) -> Job:
    """The job of a trial, with its own checkpoint folder beside the job's: a trial that resumed from another's checkpoints, or from the
    training's, would measure something else, and the training would resume from the trial's.

    Args:
        kind: what it is a trial of.
    """
    if job.checkpoints is None:
        return job
    own = own_prefix(job.checkpoints.s3, kind)
    return job.model_copy(update={"checkpoints": job.checkpoints.model_copy(update={"s3": own})})

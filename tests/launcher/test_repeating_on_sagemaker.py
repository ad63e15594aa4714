"""A SageMaker job that goes on from the checkpoints of an earlier one, against the emulator."""

from __future__ import annotations

import pytest

import launcher
from tests.aws.conftest import nobody  # noqa: F401 - pytest's way to share fixtures
from tests.aws.test_runs import BUCKET, connected, far_side, sagemaker_job, started  # noqa: F401
from tests.launcher.test_repeating import COUNTS


def test_a_job_goes_on_from_the_checkpoints_that_its_failed_one_left_in_s3(sagemaker_job):  # noqa: F811
    first = started(sagemaker_job(COUNTS, checkpoints=f"s3://{BUCKET}/checkpoints/counts"))
    assert first.wait(120) == "Failed"
    second = launcher.run(launcher.resume(first.name))
    assert second.wait(120) == "Completed"
    assert "begins at 1" in [line for _, line in second.logs()]
    with pytest.raises(launcher.UserError, match="had no place in S3 for them\n.*checkpoints: s3://"):
        launcher.resume(first.name, ["checkpoints=null"])

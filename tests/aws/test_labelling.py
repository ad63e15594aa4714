"""A label bank on SageMaker, against the emulator: filled by one training job, and read from its output by others."""

from __future__ import annotations

import pytest

from tests.aws.conftest import BUCKET, REGION, ROLE
from tests.entrypoints.bank_runs import assert_a_bank_is_filled_and_learned_from, config_in


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_job_fills_a_bank_and_others_learn_from_it_with_their_teacher_and_without(connected, tmp_path, hosts):
    sagemaker = {
        "role": ROLE,
        "region": REGION,
        "output": f"s3://{BUCKET}/runs",
        "image": {"framework_version": "2.8.0", "python": "py312"},
        "compute": {"instance_type": "ml.m5.xlarge", "max_hours": 0.5},
    }
    assert_a_bank_is_filled_and_learned_from(config_in(tmp_path, hosts, **sagemaker), "aws")

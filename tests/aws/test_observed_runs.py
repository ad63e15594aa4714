"""A script that knows nothing of this kit, as a training job on the emulator: what the observer saw comes back with its output."""

from __future__ import annotations

import pytest

import launcher
from launcher.insight.measurements import read
from tests.aws.conftest import started
from tests.conftest import TORCH_LOOP


@pytest.mark.slow
def test_a_foreign_scripts_steps_and_its_hosts_metrics_come_back_with_its_output(sagemaker_job):
    job = sagemaker_job(TORCH_LOOP)
    assert "  observed    steps, data loading" in str(launcher.plan(job, on="aws"))
    run = started(job)
    assert run.wait(180) == "Completed", run.outcome()
    measured = read(run.name)
    assert [(steps.rank, steps.host) for steps in measured.ranks] == [(0, "algo-1")]
    assert measured.hosts["algo-1"].cores

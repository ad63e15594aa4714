"""`launcher tune --on docker`, with a real engine: its trials are stopped and read as those of processes are."""

from __future__ import annotations

import json

import pytest

import launcher
from tests.local_mode.conftest import assert_nothing_left
from tests.study.slow_reads import slow_reads


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_of_ones_own_is_tuned_from_outside_its_container(docker_job, tmp_path):
    """As it is, it would take 26 s: its trial is stopped after 15."""
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(docker_job(slow_reads(samples=640, seconds=0.02)).model_dump(exclude_none=True)))
    table = tmp_path / "trials.csv"
    found = launcher.tune(config, on="docker", minutes=4, trials=16, table=table, log=lambda line: None)
    assert found.changes["num_workers"] >= 2 and found.speedup > 1.3, str(found)
    assert all("to the digits printed" in step.losses for step in found.steps if step.kept)
    runs = launcher.runs()
    assert {run.backend for run in runs} == {"docker"} and runs[0].state == "Stopped"
    assert runs[0].outcome()["stop_reason"] == "its 15 s as a trial are over"
    for run in runs:
        assert_nothing_left(run)

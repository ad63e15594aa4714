"""Hosts of other instance groups than those that train: they take no step, and no rule about training counts them."""

from __future__ import annotations

import dataclasses
import textwrap

import numpy as np

import launcher
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Measurements, Series, read
from launcher.insight.rules.table import judge
from tests.conftest import TORCH_LOOP
from tests.insight.planted import plant

STEP = {"data_wait": 0.3, "student_forward": 0.2, "backward": 0.5}


def with_a_host_beside(measured: Measurements, **facts: object) -> Measurements:
    """The same with a second host, whose cores are all full and throttled and whose GPU is idle."""
    [trains] = measured.hosts.values()
    times = next(iter(trains.cores.values())).times
    full, idle = Series(times, np.full(len(times), 100.0)), Series(times, np.zeros(len(times)))
    cores = dict.fromkeys(trains.cores, full)
    beside = dataclasses.replace(trains, name="algo-2", cores=cores, io_wait={}, gpus={"gpu0": idle}, throttled=full)
    hosts = {**measured.hosts, "algo-2": beside}
    return dataclasses.replace(measured, hosts=hosts, facts={**measured.facts, **facts})


def test_a_full_host_that_serves_changes_no_finding():
    alone = plant(phases=STEP, busy=2.0, gpu=60.0)
    findings = judge(Evidence(alone)).findings
    assert findings and judge(Evidence(with_a_host_beside(alone, serving_hosts=["algo-2"]))).findings == findings
    other = Evidence(with_a_host_beside(alone))
    assert judge(other).findings != findings and other.throttled == 1, "as a host that trains it would count"


def test_a_host_outside_the_training_groups_that_takes_steps_is_judged_all_the_same():
    measured = with_a_host_beside(plant(phases=STEP), serving_hosts=["algo-2"])
    stepping = dataclasses.replace(measured.ranks[0], rank=1, host="algo-2")
    evidence = Evidence(dataclasses.replace(measured, ranks=(*measured.ranks, stepping)))
    assert [host.name for host in evidence.hosts] == ["algo-1", "algo-2"]


def test_a_run_of_two_groups_is_diagnosed_by_the_host_that_trains(script_job, tmp_path):
    text = f"""
import os, pathlib, time
trained = pathlib.Path({str(tmp_path / "trained")!r})
if os.environ["SM_CURRENT_INSTANCE_GROUP"] == "cpus":
    while not trained.exists():
        time.sleep(0.05)
    raise SystemExit(0)
{textwrap.dedent(TORCH_LOOP)}
trained.touch()
"""
    groups = [{"name": name, "instance_type": "ml.m5.xlarge", "instance_count": 1} for name in ("cpus", "gpus")]
    compute = {"instance_groups": groups, "training_groups": ["gpus"]}
    run = launcher.run(launcher.plan(script_job(text, distribution="torchrun", compute=compute)))
    assert run.wait(120) == "Completed", run.outcome()
    measured = read(run.name)
    assert measured.facts["serving_hosts"] == ["algo-1"] and [*measured.hosts] == ["algo-1", "algo-2"]
    assert [(steps.rank, steps.host) for steps in measured.ranks] == [(0, "algo-2")]
    assert [host.name for host in Evidence(measured).hosts] == ["algo-2"]
    shown = str(launcher.diagnose(run.name))
    assert "algo-1" in shown and "slow, and all others wait" not in shown, "its use is shown, and not judged"

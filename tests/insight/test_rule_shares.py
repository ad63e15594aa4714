"""A finding's share is of the whole training time: pauses take theirs, and the gain is bounded by what is left."""

from __future__ import annotations

import pytest

from launcher.insight.evidence import Evidence
from launcher.insight.rules.table import judge
from tests.insight.planted import plant
from tests.insight.test_rules import PLANTED

OF_STEPS = {
    "cpu_throttled",
    "communication_bound",
    "data_bound",
    "fp32_compute",
    "host_to_device_bound",
    "main_thread_bound",
    "receiving_bound",
    "servers_network_bound",
    "slow_rank",
    "small_batch",
    "storage_bound",
    "synchronising_calls",
    "teacher_bound",
    "too_few_servers",
    "too_few_workers",
    "too_many_workers",
}
"""Kinds of findings that are about the usual steps."""

CASES = [
    case
    for case, planted in PLANTED.items()
    if case[0] in OF_STEPS and planted["phases"] is not None and "epoch_start" not in planted
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_half_the_time_in_checkpoints_leaves_half_the_share(case):
    planted = {**PLANTED[case], "noise": 0.0}
    if case == ("too_many_workers", "on the CPU, no wait, steps falter"):
        planted["noise"] = PLANTED[case]["noise"]
    whole = Evidence(plant(**planted))
    every = 10 * planted.get("log_every", 10) // 10
    halved = Evidence(plant(**planted, checkpoint=(every, every * whole.step_seconds)))
    before, after = (next(one for one in judge(run).findings if one.kind == case[0]) for run in (whole, halved))
    assert halved.steps_part == pytest.approx(whole.steps_part / 2, rel=0.05)
    assert after.share == pytest.approx(before.share / 2, rel=0.1)
    assert after.gain.share <= 1 and after.gain.share == pytest.approx(before.gain.share / 2, rel=0.1)

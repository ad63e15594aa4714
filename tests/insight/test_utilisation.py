"""How far a run is from its devices' peak, and what takes the rest, by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from launcher.insight import page, timelines, utilisation
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Measurements, Series
from launcher.insight.utilisation import EXCHANGE, IDLE, INPUT, KERNELS, UNKNOWN
from tests.insight.planted import plant

PHASES = {"data_wait": 0.02, "student_forward": 0.06, "backward": 0.11, "grad_sync": 0.02, "optimizer": 0.01}
"""0.2 s a step, of which a tenth waits for data and a tenth for gradients."""

ABOUT = {
    "gflop_per_image": [27.5],
    "peak_tflops": {"bf16": 312.0},
    "peak_source": "https://www.nvidia.com/en-us/data-center/a100/",
    "peak_date": "2026-11-25",
    "why_no_mfu": "",
}


def measured(mfu: float | None, about=ABOUT, **planted) -> Measurements:
    """A run with that utilisation in each window."""
    made = plant(phases=PHASES, noise=0.0, facts={} if about is None else {"arithmetic": about}, **planted)
    more = {"tflops": 90.0} | ({} if mfu is None else {"mfu": mfu})
    ranks = [
        dataclasses.replace(
            steps, extra={**steps.extra, **{name: np.full(len(steps.step), value) for name, value in more.items()}}
        )
        for steps in made.ranks
    ]
    return dataclasses.replace(made, ranks=tuple(ranks))


def with_gpu(made: Measurements, use: float) -> Measurements:
    """The same with that use of its GPUs in every sample, in percent."""
    hosts = {
        name: dataclasses.replace(
            host, gpus={gpu: Series(one.times, np.full(len(one.times), use)) for gpu, one in host.gpus.items()}
        )
        for name, host in made.hosts.items()
    }
    return dataclasses.replace(made, hosts=hosts)


def rest(mfu: float, use: float, **planted) -> dict[str, float]:
    return utilisation.utilisation(Evidence(with_gpu(measured(mfu, gpu=use, ranks=2, **planted), use))).rest


def test_the_rest_of_a_step_is_told_apart_by_hand():
    found = rest(0.3, 70)
    assert found == pytest.approx({KERNELS: 0.3, IDLE: 0.2, INPUT: 0.1, EXCHANGE: 0.1}, abs=1e-6)
    assert [*found][0] == KERNELS and sum(found.values()) == pytest.approx(0.7)


def test_the_mean_is_over_the_time_of_usual_steps():
    """Half the windows wait for data three times as long as a step, with the same arithmetic; one in a hundred takes far longer."""
    late = {step: ("data_wait", 6.0) for step in range(20, 401, 20)} | {200: ("data_wait", 60.0)}
    made = plant(phases=PHASES, noise=0.0, steps=400, slow_steps=late, facts={"arithmetic": ABOUT})
    [steps] = made.ranks
    each = steps.seconds["step"]
    with_mfu = dataclasses.replace(steps, extra={**steps.extra, "mfu": 0.1 / each, "tflops": 31.2 / each})
    evidence = Evidence(dataclasses.replace(made, ranks=(with_mfu,)))
    usual = (0.2 + 0.8) / 2
    assert evidence.mfu == pytest.approx(0.1 / usual, rel=0.03)
    assert utilisation.to_dict(evidence)["tflops"] == pytest.approx(31.2 / usual, rel=0.03)


def test_a_wait_for_data_is_the_devices_only_as_far_as_it_was_idle():
    assert rest(0.3, 95) == pytest.approx({KERNELS: 0.55, EXCHANGE: 0.1, INPUT: 0.05, IDLE: 0.0}, abs=1e-6)


def test_an_idle_device_while_a_checkpoint_is_written_is_no_part_of_a_step():
    made = with_gpu(measured(0.3, gpu=90, checkpoint=(20, 5.0)), 90.0)
    host = made.hosts["algo-1"]
    idle = {}
    for name, one in host.gpus.items():
        values = one.values.copy()
        for stall in made.stalls:
            values[(stall.began <= one.times) & (one.times <= stall.began + stall.seconds)] = 0.0
        idle[name] = Series(one.times, values)
    evidence = Evidence(dataclasses.replace(made, hosts={"algo-1": dataclasses.replace(host, gpus=idle)}))
    found = utilisation.utilisation(evidence).rest
    assert evidence.gpu_idle == pytest.approx(0.1) == found[INPUT] + found[IDLE]


def test_where_the_devices_use_was_not_recorded_what_is_left_is_not_told_apart():
    found = utilisation.utilisation(Evidence(measured(0.3, system=False)))
    assert found.rest == pytest.approx({UNKNOWN: 0.5, INPUT: 0.1, EXCHANGE: 0.1}, abs=0.005)


@pytest.mark.parametrize("mfu", [0.97, 1.0, 1.2])
def test_parts_never_add_up_to_more_than_there_is(mfu):
    found = utilisation.utilisation(Evidence(measured(mfu, gpu=40, ranks=2)))
    assert all(share >= 0 for share in found.rest.values())
    assert sum(found.rest.values()) == pytest.approx(max(0.0, 1 - mfu))


def test_every_form_of_the_report_has_it():
    diagnosis = Diagnosis(with_gpu(measured(0.3, gpu=70, ranks=2), 70.0))
    sentence = (
        "MFU 30 % (peak 312 TFLOP/s in bf16). Rest of a step: 30 % memory-bound or small kernels, 20 % idle device with data there "
        "(launches, copies), 10 % data wait, 10 % gradient exchange"
    )
    assert sentence in " ".join(str(diagnosis).split())
    for shown in (diagnosis._repr_html_(), page.page("a run", "", [(diagnosis.evidence, diagnosis.report)])):
        assert sentence in shown
    found = json.loads(json.dumps(diagnosis.to_dict()))["utilisation"]
    assert found["mfu"] == pytest.approx(0.3) and found["rest"][KERNELS] == pytest.approx(0.3)
    assert found["peak_source"] == ABOUT["peak_source"] and found["peak_date"] == ABOUT["peak_date"]


def test_more_than_the_peak_is_said_to_be_a_mistake():
    assert utilisation.sentence(Evidence(measured(1.2, gpu=70))) == (
        "MFU 120 % (peak 312 TFLOP/s in bf16): more than the peak, so the count of operations or the peak is wrong"
    )


def test_without_a_peak_the_reason_is_said_and_of_other_scripts_nothing():
    lacking = {"gflop_per_image": [27.5], "why_no_mfu": "no peak is known for this device (CPU)"}
    said = utilisation.sentence(Evidence(measured(None, lacking)))
    assert said == "the models' own arithmetic is 90 TFLOP/s a process; no MFU: no peak is known for this device (CPU)"
    silent = Evidence(plant(phases=PHASES))
    assert (
        utilisation.sentence(silent) == ""
        and utilisation.to_dict(silent)["why_no_mfu"] == "the models' operations were not counted"
    )


def test_a_comparison_has_both():
    before, after = Diagnosis(measured(0.21, gpu=70)), Diagnosis(measured(0.38, gpu=70))
    comparison = Comparison(before, after)
    assert "MFU 21 % before, 38 % after" in comparison.sentences()
    assert comparison.to_dict()["mfu"] == pytest.approx([0.21, 0.38])
    mixed = Comparison(before, Diagnosis(measured(None, {"why_no_mfu": "no peak is known for this device (CPU)"})))
    assert "MFU 21 % before, not known after" in mixed.sentences()
    bare = Diagnosis(plant(phases=PHASES))
    assert not [one for one in Comparison(bare, bare).sentences() if "MFU" in one]


START = {
    **{
        "kind": "start",
        "rank": 0,
        "node": "algo-1",
        "settings": {},
        "not_measured": {},
        "world_size": 1,
        "backend": "none",
    },
    **{
        "device": "cuda",
        "device_name": "NVIDIA A100-SXM4-40GB",
        "instance_type": None,
        "torch": "2.14.1",
        "threads": 4,
    },
}


@pytest.mark.parametrize(
    ("line", "is_read"),
    [
        ({"kind": "arithmetic", **ABOUT}, True),
        ({"kind": "arithmetic", "why_no_mfu": "torch 2.0.1 does not count operations: 2.1 and later do"}, True),
        ({"kind": "arithmetic"}, False),
        ({"kind": "arithmetic", **ABOUT, "peak_tflops": {"bf16": 0.0}}, False),
        ({"kind": "arithmetic", **ABOUT, "gflop_per_image": 27.5}, False),
        ({"kind": "arithmetic", **ABOUT, "why_no_mfu": None}, False),
    ],
)
def test_its_line_of_a_timeline_is_read_or_said_to_be_damaged(tmp_path, line, is_read):
    file = tmp_path / "timeline-0.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (START, line)))
    ranks = timelines.read([file], 2**20)
    wanted = {name: value for name, value in line.items() if name != "kind"}
    assert ranks.facts.get("arithmetic") == (wanted if is_read else None)
    assert bool(ranks.unreadable) != is_read

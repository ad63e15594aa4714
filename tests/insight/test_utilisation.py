"""How far a run is from its devices' peak, and what takes the rest, by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from launcher.insight.roofline import EXCHANGE, IDLE, INPUT, KERNELS, UNKNOWN

from launcher.insight import page, roofline, timelines
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Measurements
from tests.insight.planted import plant

PHASES = {"data_wait": 0.02, "student_forward": 0.06, "backward": 0.11, "grad_sync": 0.02, "optimizer": 0.01}
"""0.2 s a step, of which a tenth waits for data and a tenth for gradients."""

ABOUT = {
    "gflop_an_image": [27.5],
    "peak_tflops": {"bf16": 312.0},
    "peak_source": "https://www.nvidia.com/en-us/data-center/a100/",
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


def test_the_rest_of_a_step_is_told_apart_by_hand():
    found = roofline.roofline(Evidence(measured(0.3, gpu=70, ranks=2)))
    assert found.mfu == pytest.approx(0.3) and found.limit == KERNELS
    assert found.rest == pytest.approx({KERNELS: 0.3, IDLE: 0.2, INPUT: 0.1, EXCHANGE: 0.1}, abs=0.005)
    assert found.mfu + sum(found.rest.values()) == pytest.approx(1)


def test_a_wait_for_data_is_the_devices_only_as_far_as_it_was_idle():
    found = roofline.roofline(Evidence(measured(0.3, gpu=95, ranks=2)))
    assert found.rest == pytest.approx({KERNELS: 0.55, EXCHANGE: 0.1, INPUT: 0.05, IDLE: 0.0}, abs=0.005)


def test_where_the_devices_use_was_not_recorded_what_is_left_is_not_told_apart():
    found = roofline.roofline(Evidence(measured(0.3, system=False)))
    assert found.rest == pytest.approx({UNKNOWN: 0.5, INPUT: 0.1, EXCHANGE: 0.1}, abs=0.005)


@pytest.mark.parametrize("mfu", [0.97, 1.0, 1.2])
def test_parts_never_add_up_to_more_than_there_is(mfu):
    found = roofline.roofline(Evidence(measured(mfu, gpu=40, ranks=2)))
    assert all(share >= 0 for share in found.rest.values())
    assert sum(found.rest.values()) == pytest.approx(max(0.0, 1 - mfu))


def test_every_form_of_the_report_has_it():
    diagnosis = Diagnosis(measured(0.3, gpu=70, ranks=2))
    sentence = (
        "MFU 30 % of the peak (312 TFLOP/s in bf16); the rest of a step: 30 % kernels below the peak: bound by memory, small, or no "
        "matrix products; 20 % an idle device while data are there: launching, copies, pauses; 10 %"
    )
    assert sentence in " ".join(str(diagnosis).split())
    for shown in (diagnosis._repr_html_(), page.page("a run", "", [(diagnosis.evidence, diagnosis.report)])):
        assert sentence[:60] in shown
    found = json.loads(json.dumps(diagnosis.to_dict()))["roofline"]
    assert found["mfu"] == pytest.approx(0.3) and found["rest"][KERNELS] == pytest.approx(0.3, abs=0.01)
    assert found["peak_source"] == ABOUT["peak_source"]


def test_without_a_peak_the_reason_is_said_and_of_other_scripts_nothing():
    lacking = {"gflop_an_image": [27.5], "why_no_mfu": "no peak is known for this device (CPU)"}
    said = roofline.said(Evidence(measured(None, lacking)))
    assert said == "the models' own arithmetic is 90 TFLOP/s a process; no MFU: no peak is known for this device (CPU)"
    silent = Evidence(plant(phases=PHASES))
    assert (
        roofline.said(silent) == ""
        and roofline.to_dict(silent)["why_no_mfu"] == "the models' operations were not counted"
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
        ({"kind": "arithmetic", **ABOUT, "gflop_an_image": 27.5}, False),
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

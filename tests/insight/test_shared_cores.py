"""A model on the CPU and its data workers on the same cores: what the workers cost it, and what it gains without them."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.insight.contention import WORKERS, lost_to
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Measurements, Stall
from launcher.insight.rules.table import judge
from tests.insight.planted import BEGAN, plant
from tests.insight.test_neighbours import USUAL, first, with_programs, with_threads


def on_two_cores(*, workers: float, delay: float, busy: float = 1.9, peer: float = 0.6, **settings) -> Measurements:
    """A model on the CPU that hardly waits for data.

    Args:
        workers: cores that its data worker uses.
        peer: cores that the second thread of its operators uses; the training thread uses 0.6.
    """
    phases = {"data_wait": 0.01, "student_forward": 0.05, "backward": 0.13, "optimizer": 0.01}
    given = {"num_workers": 1, "preprocessing": "cpu", "augmentation_load": 12, **settings}
    return with_threads(plant(phases=phases, cores=2, busy=busy, settings=given), delay, 0.6, workers, peer)


def test_images_that_take_the_models_cores_are_found_though_no_step_waits_for_them():
    found = first(on_two_cores(workers=0.7, delay=0.28))
    assert (found.kind, found.title) == (
        "data_bound",
        "Preparing the images takes the cores that the model computes on",
    )
    assert found.fixes[0].setting == "hyperparameters.compose_augmentation" and found.share == pytest.approx(
        0.28, abs=0.05
    )
    assert any("who else uses a host's cores: data workers" in number for number in found.evidence)


@pytest.mark.parametrize("pauses", [0.0, 0.2])
@pytest.mark.parametrize("peer", [0.6, 0.3, 0.0])
def test_the_gain_of_freed_cores_is_that_of_both_threads_by_hand(pauses, peer):
    measured = on_two_cores(workers=0.7, delay=0.28, peer=peer)
    seconds = Evidence(measured).training_seconds
    if pauses:
        stall = Stall(
            kind="checkpoint",
            host="algo-1",
            step=100,
            began=BEGAN + 20,
            seconds=seconds * pauses / (1 - pauses),
            rank=0,
        )
        measured = dataclasses.replace(measured, stalls=(stall,))
    images = 91.5 / 526  # one warp beside twelve rounds: calibration.yaml
    lost, waits = (1 - images) * 0.28, 0.05
    spun = 2 * lost * peer / 0.6  # cores: each of two threads spins while the other waits
    limits = {
        "the training thread": 1 - waits - lost * (1 + peer / 0.6),
        "the cores": (images * 0.7 + 0.6 + peer - spun) / 2,
    }
    left = max(limits.values())
    assert first(measured).gain.expected.value == pytest.approx(1 / (1 - (1 - pauses) * (1 - left)), rel=0.02)


@pytest.mark.parametrize(("delay", "left"), [(0.0, 0.385), (0.1, 0.5), (0.4, 0.6)])
def test_a_teacher_that_goes_leaves_the_steps_what_data_workers_cost_them(delay, left):
    """Twice the training thread's own wait, because its peer waits as often, and at most what workers use of the two cores; where they cost none,
    the cores are the limit."""
    phases = {"data_wait": 0.01, "teacher_forward": 0.7, "student_forward": 0.1, "backward": 0.16, "optimizer": 0.03}
    measured = plant(phases=phases, cores=2, busy=1.9, settings={"num_workers": 1})
    judged = judge(Evidence(with_threads(measured, delay, cpu=0.8, workers=0.3, others=0.8))).findings
    [gain] = [finding.gain for finding in judged if finding.kind == "teacher_bound"]
    assert gain.expected.value == pytest.approx(1 / (1 - 0.9 * (1 - left)), rel=0.03), gain.formula


def test_workers_cost_a_model_no_more_than_the_cores_that_they_use():
    assert lost_to(Evidence(on_two_cores(workers=0.3, delay=0.28)), WORKERS) == pytest.approx(0.15)
    beside = with_programs(on_two_cores(workers=0.7, delay=0.28), ffmpeg=0.7)
    assert lost_to(Evidence(beside), WORKERS) == pytest.approx(0.14, rel=0.01)
    assert lost_to(Evidence(with_threads(plant(phases=USUAL, cores=2, busy=1.9), 0.3)), WORKERS) is None


@pytest.mark.parametrize("peer", [0.4, 0.7, 0.9])
def test_a_program_that_uses_more_cores_than_the_workers_is_what_takes_them(peer):
    """However much the model's own threads use: they have cores of their own where nobody else takes them."""
    beside = judge(Evidence(with_programs(on_two_cores(workers=0.5, delay=0.45, peer=peer), ffmpeg=0.6))).findings
    assert [one.kind for one in beside][:1] == ["noisy_neighbour"]
    hardly = judge(Evidence(with_programs(on_two_cores(workers=0.02, delay=0.45, peer=peer), ffmpeg=0.1))).findings
    assert "noisy_neighbour" not in [one.kind for one in hardly], "a twentieth of the cores"


def test_more_threads_than_cores_wait_for_each_other_and_not_for_the_workers():
    run = on_two_cores(workers=0.3, delay=0.5, peer=0.9)
    many = dataclasses.replace(run, facts={**run.facts, "threads": 16})
    assert lost_to(Evidence(many), WORKERS) == pytest.approx(0.5 * 0.3 / 1.2)
    assert lost_to(Evidence(run), WORKERS) == pytest.approx(0.15)


@pytest.mark.parametrize(
    "other",
    [
        {"workers": 0.7, "delay": 0.05},
        {"workers": 0.15, "delay": 0.28},
        {"workers": 0.7, "delay": 0.28, "busy": 1.5},
    ],
)
def test_images_that_leave_the_model_its_cores_are_not_accused(other):
    report = judge(Evidence(on_two_cores(**other)))
    assert "data_bound" not in [one.kind for one in report.findings]
    assert "another finding explains it" not in [why for _, why in report.not_applicable], "there is none"


def test_without_the_cost_of_cheaper_images_there_is_the_bound_of_their_gain():
    found = first(on_two_cores(workers=0.7, delay=0.28, augmentation_load=0))
    assert found.kind == "data_bound" and found.gain.expected is None
    assert found.gain.at_most == pytest.approx(1 / (1 - 0.7 / 1.9), rel=0.02), "no image costs anything"

"""What follows from a probe's speeds: the limit of a step, which findings hold, and what every form of the report shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training.engine import probe as measured_by_the_script

from launcher.insight import rules
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.measurements import Measurements
from launcher.insight.probe import AS_FAST, INPUT_KINDS, STEP_KINDS, Probe
from tests.insight.planted import plant
from tests.insight.test_rules import CPU, GPU, PLANTED


def probe_of(measured: Measurements, workers: int, alone: dict[int, float], *, cost: float = 0.0, **speeds) -> Probe:
    """A probe whose whole steps are as fast as the run; the other speeds are times that.

    Args:
        alone: by the number of workers; cost: CPU seconds an image, times those that all cores have for it.
    """
    cores = 8.0 if measured.facts["device"] == "cuda" else 2.0
    speed = measured.settings["global_batch_size"] / Diagnosis(measured).evidence.step_seconds
    tried = speeds.pop("with_workers", None)
    values = {
        "as_it_is": [speed, speed],
        **{name: speeds.get(name) and speeds[name] * speed for name in ("one_batch", "one_batch_without_teacher")},
        "input_alone": [
            {"workers": count, "images_per_second": times * speed, "cpu_seconds_per_image": cost * cores / speed}
            for count, times in alone.items()
        ],
        "with_workers": tried and {"workers": tried[0], "images_per_second": tried[1] * speed},
        "workers": workers,
        "worker_kind": speeds.pop("worker_kind", "threads"),
        "cores_per_process": cores,
        "left_out": {},
        "world_size": 1,
        "device": measured.facts["device"],
        "device_name": None,
    }
    return Probe.from_file("x-probe", values)


# (what was observed, workers, the probe's speeds in times those of whole steps) -> bound, best workers, at most, what it says of the
# finding on top
CASES = {
    "one worker where two are twice as fast": (
        PLANTED["too_few_workers", "harsh"], 1, dict(alone={0: 0.9, 1: 1.0, 2: 2.0, 4: 3.9}, one_batch=6.0, with_workers=(4, 3.7)),
        ("input", 4, 3.9, "confirmed: with 4 workers, the speed-up of whole steps is 3.70"),
    ),
    "too few were seen, and more bring nothing": (
        PLANTED["too_few_workers", "harsh"], 1, dict(alone={0: 0.9, 1: 1.0, 2: 1.02, 4: 1.01}, one_batch=6.0),
        ("input", 1, 1.02, "refuted: the speed-up of the input alone is 1.02 with 2 workers"),
    ),
    "KT's, and fewer are faster": (
        PLANTED["too_many_workers", "harsh"], 16, dict(alone={0: 1.0, 1: 1.1, 2: 1.5, 16: 1.1}, one_batch=4.0, with_workers=(2, 1.4)),
        ("input", 2, 1.5, "confirmed: with 2 workers, the speed-up of whole steps is 1.40"),
    ),
    "too many were seen, and fewer are as slow": (
        PLANTED["too_many_workers", "harsh"], 16, dict(alone={1: 0.6, 2: 1.05, 16: 1.0}, one_batch=4.0, with_workers=(2, 1.03)),
        ("input", 16, 1.05, "refuted: with 2 workers, the speed-up of whole steps is 1.03"),
    ),
    "images that cost what the cores have": (
        PLANTED["data_bound", "harsh"], 8, dict(alone={4: 0.8, 8: 1.0}, one_batch=5.0, cost=0.95),
        ("input", 8, 1.0, "confirmed: without input, the speed-up of steps is 5.00"),
    ),
    "images that cost nothing and come slowly": (
        PLANTED["storage_bound", "far storage, no I/O wait"], 4, dict(alone={4: 1.0, 8: 1.02}, one_batch=3.0, cost=0.1),
        ("input", 4, 1.02, "confirmed: without input"),
    ),
    "slow storage was seen, and the input alone is fast": (
        PLANTED["storage_bound", "far storage, no I/O wait"], 4, dict(alone={4: 3.5, 8: 3.4}, one_batch=3.0, cost=0.1),
        ("shared_cores", 4, 3.0, "refuted: the input alone is as fast as the model alone"),
    ),
    "slow storage was seen, and other workers help": (
        PLANTED["storage_bound", "far storage, no I/O wait"], 4, dict(alone={4: 1.0, 8: 2.0}, one_batch=3.0, with_workers=(8, 1.9)),
        ("input", 8, 2.0, "refuted: with 8 workers, the speed-up of whole steps is 1.90"),
    ),
    "each half alone is fast": (
        PLANTED["data_bound", "mild"], 7, dict(alone={7: 1.8}, one_batch=1.6, cost=0.5),
        ("shared_cores", 7, 1.6, "confirmed: without input, the speed-up of steps is 1.60"),
    ),
    "waiting was seen, and goes away by itself": (
        PLANTED["data_bound", "harsh"], 8, dict(alone={8: 1.5}, one_batch=1.05),
        ("model", 8, 1.05, "refuted: without input, the speed-up of steps is 1.05"),
    ),
    "a teacher": (
        PLANTED["teacher_bound", "harsh"], 4, dict(alone={4: 9.0}, one_batch=1.01, one_batch_without_teacher=4.0),
        ("teacher", 4, 1.01, "confirmed: the teacher takes 74 % of a step"),
    ),
    "a teacher that takes nothing": (
        PLANTED["teacher_bound", "mild"], 4, dict(alone={4: 9.0}, one_batch=1.0, one_batch_without_teacher=1.05),
        ("model", 4, 1.0, "refuted: the teacher takes 5 % of a step"),
    ),
    "arithmetic was seen, and it is the input": (
        PLANTED["fp32_compute", "harsh"], 4, dict(alone={4: 1.0}, one_batch=3.0),
        ("input", 4, 1.0, "refuted: without input, the speed-up of steps is 3.00, so everything else takes 33 %"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_speeds_say_what_bounds_a_step_and_which_findings_hold(case):
    observed, workers, speeds, (bound, best, at_most, said) = CASES[case]
    measured = plant(**observed)
    top = Diagnosis(measured).findings[0]
    found = Diagnosis(measured, probe_of(measured, workers, **speeds))
    [now] = [finding for finding in found.findings if finding.kind == top.kind]
    assert (found.probe.bound, found.probe.best_workers) == (bound, best)
    assert found.probe.at_most == pytest.approx(at_most) and now.probe.startswith(said)
    assert now.refuted == said.startswith("refuted") and f"probe     {said[:9]}" in str(found)
    if said.startswith("confirmed: with "):
        assert now.fixes[0].value == best and now.gain.expected.value == pytest.approx(speeds["with_workers"][1])
        assert "measured by the probe" in str(now.gain)
    if now.refuted:
        assert f"{report_share(now)}; refuted" in str(found) and found.headline == found.report.probe.title
    else:
        assert found.headline.startswith(now.title)


def report_share(finding) -> str:
    return f"{finding.share * 100:.0f} % of the time"


def test_a_refuted_finding_comes_after_the_others_and_before_risks():
    measured = plant(
        phases={**GPU, "data_wait": 1.0, "teacher_forward": 0.8},
        busy=7.6,
        gpu=30,
        memory=5,
        memory_growth=10,
        settings={"num_workers": 7},
    )
    before = [finding.kind for finding in Diagnosis(measured).findings]
    assert before[0] == "data_bound" and "teacher_bound" in before and before[-1] == "memory_growth"
    probe = probe_of(measured, 7, {7: 1.5}, one_batch=1.02, one_batch_without_teacher=1.5)
    after = [finding.kind for finding in Diagnosis(measured, probe).findings]
    assert sorted(after) == sorted(before) and after[-2:] == ["data_bound", "memory_growth"]
    assert Diagnosis(measured, probe).headline.startswith(Diagnosis(measured, probe).findings[0].title)


@pytest.mark.parametrize(
    ("speeds", "bound", "at_most", "said"),
    [
        (dict(alone={0: 1.1}, one_batch=3.0), "input", 3.0, "confirmed: without input, the speed-up of steps is 3.00, and servers alone bring"),
        (dict(alone={0: 3.5}, one_batch=3.0), "shared_cores", 3.0, None),
        (dict(alone={0: 3.5}, one_batch=1.05), "model", 1.05, "refuted: without input, the speed-up of steps is 1.05"),
    ],
)  # fmt: skip
def test_a_probe_of_servers_tells_whether_more_of_them_could_help(speeds, bound, at_most, said):
    measured = plant(**PLANTED["too_few_servers", "harsh"])
    found = Diagnosis(measured, probe_of(measured, 0, worker_kind="remote", **speeds))
    [now] = [finding for finding in found.findings if finding.kind == "too_few_servers"]
    assert found.probe.bound == bound and found.probe.at_most == pytest.approx(at_most)
    assert now.probe is None if said is None else now.probe.startswith(said)
    answer = str(found.report.probe)
    assert "input alone, servers, as it is" in answer and "workers" not in answer
    assert (f"More servers can bring a speed-up of at most {at_most:.2f}" in answer) == (bound != "model")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"settings": {"global_batch_size": 512}}, "the run made"),
        ({"facts": {"world_size": 8}}, "by processes: 8"),
        ({"facts": {"device_name": "Tesla V100"}}, "on Tesla V100, the probe on NVIDIA H200"),
    ],
)
def test_a_probe_of_something_else_judges_no_finding(changed, why):
    planted = PLANTED["data_bound", "harsh"]
    probe = probe_of(plant(**planted), 8, {8: 1.5}, one_batch=1.05)
    probe = Probe(**{**vars(probe), "device_name": "NVIDIA H200"})
    settings = {**planted["settings"], **changed.get("settings", {})}
    found = Diagnosis(plant(**{**planted, "settings": settings, "facts": changed.get("facts")}), probe)
    assert found.findings[0].probe is None and not found.findings[0].refuted
    assert "does not judge the findings below" in str(found) and why in " ".join(str(found).split())


def test_a_run_whose_epochs_begin_slowly_is_as_slow_in_the_probe_and_is_judged():
    """A probe's steps are of several epochs, and those that a run is timed by leave out what lies between epochs."""
    measured = plant(**PLANTED["too_many_workers", "harsh"])
    [steps] = measured.ranks
    steps.ended[:] += 40.0 * (steps.epoch - 1)  # as long as the steps of an epoch take
    probe = probe_of(measured, 16, {2: 1.5, 16: 1.1}, one_batch=4.0, with_workers=(2, 1.4))
    slower = Probe(**{**vars(probe), "as_it_is": tuple(0.55 * speed for speed in probe.as_it_is)})
    assert Diagnosis(measured, slower).findings[0].probe.startswith("confirmed")


def test_the_measured_workers_are_the_first_fix_whatever_came_first():
    """On full cores cheaper images come before fewer workers."""
    known = {
        "num_workers": 16,
        "preprocessing": "cpu_reference",
        "augmentation_load": 12,
        "compose_augmentation": False,
    }
    planted = dict(phases={**CPU, "data_wait": 0.6}, cores=2, busy=1.95, cpu_seconds=1.5, worker_cpu_seconds=1.2)
    measured = plant(**planted, settings=known)
    assert Diagnosis(measured).findings[0].fixes[0].setting != "hyperparameters.num_workers"
    probe = probe_of(measured, 16, {0: 1.0, 1: 1.1, 2: 1.5, 16: 1.1}, one_batch=4.0, with_workers=(2, 1.4))
    found = Diagnosis(measured, probe).findings[0]
    assert (found.fixes[0].setting, found.fixes[0].value) == ("hyperparameters.num_workers", 2)
    assert [fix.setting for fix in found.fixes].count("hyperparameters.num_workers") == 1


def test_what_the_probe_gained_in_steps_is_less_of_a_run_with_pauses():
    """Checkpoints take 47 % of the time."""
    planted = dict(
        phases={**GPU, "data_wait": 0.2}, gpu=40, steps=400, cores=16, cpu_seconds=0.4, worker_cpu_seconds=0.35
    )
    measured = plant(**planted, settings={"num_workers": 1}, checkpoint=(50, 20.0))
    probe = probe_of(measured, 1, {1: 1.0, 2: 2.0, 4: 3.0}, one_batch=2.0, with_workers=(2, 1.9))
    [found] = [one for one in Diagnosis(measured, probe).findings if one.kind == "too_few_workers"]
    assert found.gain.expected.value == pytest.approx(1 / (1 - 0.527 * (1 - 1 / 1.9)), rel=0.02)


def test_what_is_as_fast_is_what_the_script_took_for_it():
    assert AS_FAST == measured_by_the_script.AS_FAST


@pytest.mark.parametrize("left_out", [{"with_workers": "0.0 s were left"}, {"input_alone 8": "0.4 s were left"}])
def test_numbers_of_workers_that_were_not_tried_are_not_said_to_help_nothing(left_out):
    measured = plant(**PLANTED["data_bound", "harsh"])
    alone = {0: 0.5, 1: 0.6, 2: 1.0, 4: 1.9 if "with_workers" in left_out else 1.0}
    probe = probe_of(measured, 2, alone, one_batch=3.0, cost=0.95)
    cut = Probe(**{**vars(probe), "left_out": left_out})
    found = Diagnosis(measured, cut)
    assert "No other number" not in str(found) and found.findings[0].probe is None
    tried = Diagnosis(measured, probe_of(measured, 2, {0: 0.5, 1: 0.6, 2: 1.0, 4: 1.0}, one_batch=3.0, cost=0.95))
    assert "No other number" in " ".join(str(tried).split()) and tried.findings[0].probe.startswith("confirmed")


def test_every_form_of_the_report_shows_the_same_probe(tmp_path):
    measured = plant(**PLANTED["too_many_workers", "harsh"])
    probe = probe_of(measured, 16, {0: 1.0, 2: 1.5, 16: 1.1}, one_batch=4.0, with_workers=(2, 1.4))
    found = Diagnosis(measured, Probe(**{**vars(probe), "left_out": {"again": "0.2 s were left"}}))
    page, reported = (
        found.save_html(tmp_path / "page.html").read_text(),
        json.loads(json.dumps(found.to_dict()))["probe"],
    )
    for text in (str(found), page, found._repr_html_()):
        flat = " ".join(text.split())
        assert reported["title"] in flat and "input alone, 16 workers (threads), as it is" in flat and "x-probe" in flat
        assert "Not measured: again (0.2 s were left)." in flat
    assert (
        reported["bound"] == "input"
        and reported["best_workers"] == 2
        and reported["images_per_second"]["input_alone"].keys() == {"0", "2", "16"}
    )
    assert max(len(line) for line in str(found).splitlines()) <= 130
    assert Diagnosis(measured).to_dict()["probe"] is None


def test_what_a_probe_judges_are_findings_that_exist():
    source = "".join(file.read_text() for file in Path(rules.__file__).parent.glob("*.py"))
    assert all(f'"{kind}"' in source for kind in INPUT_KINDS | STEP_KINDS | {"teacher_bound"})


def test_too_little_of_a_probe_is_none():
    assert Probe.from_file("x", {}) is None and Probe.from_file("x", {"as_it_is": [1.0], "one_batch": None}) is None

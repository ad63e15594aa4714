"""A gain is a range: is it as wide as its run is short and its kind was off, does it count the whole job, and does it know the next limit?"""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from launcher.insight import calibration
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.gains import amdahl, bounded, estimated, step_left
from launcher.insight.kept import inside
from launcher.insight.length import job_steps
from launcher.insight.ratio import Ratio
from launcher.insight.rules.table import judge
from tests.conftest import ROOT
from tests.insight.planted import plant
from tests.insight.test_gains import asked

STEP = {"data_wait": 0.002, "student_forward": 0.08, "backward": 0.15, "optimizer": 0.01}


def found(kind: str, **planted) -> Finding:
    [one] = [one for one in judge(Evidence(plant(**planted))).findings if one.kind == kind]
    return one


def width(gain) -> float:
    return gain.expected.high / gain.expected.low


def gain_of(**planted):
    return estimated(Evidence(plant(**{"phases": STEP, **planted})), "slow_rank", 0.5, 0.6, "by hand")


# The range


def test_a_gain_is_a_range_with_its_confidence_and_a_bound_says_why_there_is_no_more():
    gain = gain_of()
    assert re.fullmatch(r"speed-up 1\.\d\d to \d\.\d\d \(90 %\), about 1\.67; by hand", str(gain))
    assert gain.expected.low < 1 / 0.6 < gain.expected.high < 1.3 / 0.6
    reported = gain.to_dict()
    assert reported["expected"]["low"] == gain.expected.low and (reported["confidence"], reported["at_most"]) == (
        0.9,
        2.0,
    )
    assert str(bounded(0.5)) == "speed-up at most 2.00 (1 / (1 - 0.50))"
    assert str(bounded(0.6529)) == "speed-up at most 2.88 (1 / (1 - 0.653))"
    for share in np.linspace(0, 1, 997):
        gain = bounded(float(share))
        printed = float(gain.formula.removeprefix("1 / (1 - ").removesuffix(")"))
        assert gain.text == f"at most {1 / (1 - printed):.2f}", gain
    assert str(bounded(0.5, "not measured")) == "speed-up at most 2.00 (not measured)"


def test_the_gain_of_a_first_fix_that_the_run_has_already_goes_with_it():
    """A compiled job is not told what compiling saves. A fix that was not the first takes none."""
    step = {"data_wait": 0.002, "student_forward": 0.08, "backward": 0.15, "optimizer": 0.01}
    starved = dict(phases=step, steps=400, gpu=60, gpu_memory=80)
    bare = found("gpu_starved", **starved)
    compiled = found("gpu_starved", **starved, settings={"compile": True})
    assert bare.fixes[0].setting == "hyperparameters.compile" and "compiling" in bare.gain.formula
    assert [fix.setting for fix in compiled.fixes] == ["hyperparameters.profile_steps"]
    assert compiled.gain.formula == f"{amdahl(compiled.share)}; how much of it the remaining fixes save is not known"
    assert compiled.gain.share == compiled.share == bare.share and compiled.gain.expected is None
    small = {**starved, "phases": {name: seconds / 8 for name, seconds in step.items()}, "gpu_memory": 30}
    kept = found("small_batch", **small, settings={"compile": True})
    assert kept.fixes[0].setting == "hyperparameters.global_batch_size" and kept.gain.expected is not None, (
        "not its first"
    )


def test_a_shorter_or_noisier_run_has_a_wider_range():
    long, short, noisy = gain_of(steps=400), gain_of(steps=80), gain_of(steps=400, noise=0.4)
    assert width(long) < width(short) and width(long) < width(noisy)
    assert width(gain_of(steps=4000, noise=0.001)) == pytest.approx(calibration.error("slow_rank") ** 2, rel=0.01)


def test_too_few_windows_have_a_point_and_no_range():
    gain = gain_of(steps=20)
    assert gain.expected.low is None and "about 1.67, too few logged windows for a range" in str(gain)


def test_a_kind_that_was_far_off_in_real_runs_has_a_wider_range(monkeypatch):
    pairs = {"slow_rank": [[1.2, 1.21], [2.0, 1.98]], "storage_bound": [[2.0, 1.0], [1.5, 2.9]]}
    monkeypatch.setattr(calibration, "_figures", lambda: {"gains": pairs})
    near, far, unknown = (calibration.error(kind) for kind in ("slow_rank", "storage_bound", "never_run"))
    assert 1 < near < unknown < far


def test_predicted_ranges_hold_a_new_run_of_a_kind_about_as_often_as_they_say(monkeypatch):
    """Kinds whose estimates are off by different amounts, each of which was seen twice."""
    rng, held, trials = np.random.default_rng(0), 0, 3000
    for _ in range(trials // 20):
        spreads = {f"kind {kind}": spread for kind, spread in enumerate(rng.uniform(0.05, 0.15, 20))}
        known = {kind: [float(one) for one in rng.normal(0, spread, 2)] for kind, spread in spreads.items()}
        monkeypatch.setattr(calibration, "errors", lambda known=known: known)
        held += sum(abs(rng.normal(0, spread)) <= math.log(calibration.error(kind)) for kind, spread in spreads.items())
    assert abs(held / trials - calibration.CONFIDENCE) < 0.04, held / trials


def test_ranges_hold_what_is_obtained_of_random_pipelines():
    """More workers, and reads that no longer wait. Fewer workers are left out: full cores hide what storage and taking turns cost."""
    held = []
    for pipeline, finding in asked():
        if finding is None or finding.kind not in ("too_few_workers", "storage_bound") or not finding.gain.expected:
            continue
        changed = {"storage": 0.0} if finding.kind == "storage_bound" else {"workers": finding.fixes[0].value}
        obtained = pipeline.step / dataclasses.replace(pipeline, **changed).step
        assert abs(finding.gain.expected.value / obtained - 1) < 0.2
        held.append(inside(finding.gain, Ratio(obtained, None, None)))
    assert len(held) > 50 and held.count(True) >= 0.9 * len(held)


# What an image costs


def test_an_images_cost_follows_pipeline_and_rounds_of_augmentation():
    twelve = {"preprocessing": "cpu", "augmentation_load": 12}
    assert calibration.image_cost(twelve, {"compose_augmentation": True}) == pytest.approx(91.5 / 526)
    assert calibration.image_cost({**twelve, "preprocessing": "cpu_reference"}, {"preprocessing": "cpu"}) == (
        pytest.approx(25.5 / 91.5)
    )
    few = calibration.image_cost({**twelve, "augmentation_load": 4}, {"compose_augmentation": True})
    assert 91.5 / 526 < few < 1 and calibration.image_cost(twelve, {}) == 1
    assert calibration.image_cost({**twelve, "augmentation_load": 1000}, {"compose_augmentation": True}) > 0
    assert calibration.image_cost(twelve, {"preprocessing": "dali"}) is None
    assert calibration.image_cost({}, {"compose_augmentation": True}) is None


def test_cheaper_images_gain_what_the_slower_of_process_and_workers_leaves():
    planted = dict(
        phases={**STEP, "data_wait": 1.76}, cores=8, busy=7.9, gpu=12, cpu_seconds=15.8, worker_cpu_seconds=15.6
    )
    settings = {"num_workers": 8, "augmentation_load": 12}
    gain = found("data_bound", **planted, settings=settings).gain
    left = max(0.242, 15.6 * 91.5 / 526 / 8, (15.6 * 91.5 / 526 + 0.2) / 8) / 2.002
    assert gain.expected.value == pytest.approx(1 / left, rel=0.05) and "the workers" in gain.formula
    plain = found("data_bound", **planted, settings={"num_workers": 8}).gain
    assert plain.expected is None and "how much cheaper images can be is not known" in str(plain)


# The next limit


def test_reads_that_no_longer_wait_leave_the_workers_own_work():
    planted = dict(phases={**STEP, "data_wait": 0.758}, cores=8, busy=2.0, gpu=24, cpu_seconds=1.4)
    light, heavy = (
        found("storage_bound", **planted, worker_cpu_seconds=theirs, settings={"num_workers": 4}).gain
        for theirs in (0.4, 1.2)
    )
    assert light.expected.value == pytest.approx(1 / 0.242, rel=0.1)
    assert heavy.expected.value < 0.9 * light.expected.value


def test_seconds_of_cpu_are_of_all_steps_as_those_are_that_they_are_compared_with():
    """Workers are busy in the slow steps too, of which none is a usual one."""
    slow = {step: ("data_wait", 3.0) for step in range(60, 200, 40)}
    planted = dict(phases=STEP, cores=2, busy=1.9, noise=0.0, log_every=1, cpu_seconds=0.2, worker_cpu_seconds=0.1)
    evidence = Evidence(plant(**planted, slow_steps=slow, settings={"num_workers": 4}))
    whole = float(np.mean(evidence.ranks[0].seconds["step"][5:]))
    assert whole > 1.2 * evidence.step_seconds
    theirs, own = evidence.mean_extra("worker_cpu_seconds"), evidence.own_cpu
    _, said = step_left(evidence, 0.1, own_cpu=1.0)
    assert (
        said
        == f"max(the training process 0.10, the workers {theirs / 2 / whole:.2f}, the cores {(theirs + own) / 2 / whole:.2f})"
    )


def test_a_cached_teacher_leaves_a_step_that_the_worker_limits():
    planted = dict(phases={**STEP, "teacher_forward": 0.758}, cores=2, busy=1.5, cpu_seconds=1.2)
    free, limited = (
        found("teacher_bound", **planted, worker_cpu_seconds=theirs, settings={"num_workers": 1}).gain
        for theirs in (0.05, 0.6)
    )
    assert free.expected.value == pytest.approx(1 / (1 - 0.758 * 0.9), rel=0.1)
    assert limited.expected.value == pytest.approx(1 / (1 - 0.4 * 0.9), rel=0.1)


def test_a_larger_quota_gains_the_cores_that_the_processes_can_use():
    cpu = {"data_wait": 0.01, "student_forward": 0.3, "backward": 0.6, "optimizer": 0.05}
    planted = dict(phases=cpu, cores=8, usable=2, busy=2.0, throttled=100, settings={"num_workers": 1})
    quarter = found("cpu_throttled", **planted, facts={"threads": 3}).gain
    assert quarter.expected.value == pytest.approx((3 + 1) / 2, rel=0.1)
    assert found("cpu_throttled", **planted, facts={"threads": 32}).gain.expected.value == pytest.approx(8 / 2, rel=0.1)
    assert found("cpu_throttled", **planted).gain.expected is None, "threads are not known"


def test_a_larger_batch_gains_until_the_gpu_is_the_limit():
    small = dict(phases={name: seconds / 8 for name, seconds in STEP.items()}, gpu_memory=24, busy=1.4)
    settings = {"global_batch_size": 16}
    idle, half = (found("small_batch", **small, gpu=gpu, settings=settings).gain for gpu in (10, 50))
    assert idle.expected.value == pytest.approx(4, rel=0.1) and half.expected.value == pytest.approx(2, rel=0.1)


# The whole job


def test_pauses_are_counted_over_the_whole_job_and_one_follows_the_last_step():
    ends = dict(phases=STEP, gpu=90, evaluate=(50, 12.0))
    watched = found("evaluation_stalls", **ends, settings={"max_steps": 200}).gain
    longer = found("evaluation_stalls", **ends, settings={"max_steps": 20_000}).gain
    unknown = found("evaluation_stalls", **ends, settings={"epochs": None}).gain
    assert re.search(r"one in \d+, in a job whose length is not known", str(unknown))
    assert "1 instead of 4 in the whole job" in str(watched) and watched.expected.value < 0.9 * longer.expected.value


def test_a_job_is_as_long_as_its_epochs_or_as_its_steps_where_these_end_before():
    def steps(**settings):
        planted = plant(phases=STEP, settings={"global_batch_size": 32, **settings}, facts={"training_images": 380})
        return job_steps(Evidence(planted))

    assert steps(epochs=10) == 110 and steps(epochs=10, max_steps=100) == 100
    assert steps(epochs=None, max_steps=7) == 7 and steps(epochs=None) is None
    in_its_first_epoch = Evidence(plant(phases=STEP, steps=200, steps_per_epoch=5000, settings={"epochs": 10}))
    assert job_steps(in_its_first_epoch) is None, "an epoch may be far longer"


def test_a_teacher_of_a_job_that_ends_before_its_epochs_runs_in_more_of_them():
    teacher = dict(phases={**STEP, "teacher_forward": 0.8}, gpu=99)
    whole = found("teacher_bound", **teacher, settings={"epochs": 10}).gain
    short = found("teacher_bound", **teacher, settings={"epochs": 10, "max_steps": 100}).gain
    assert "in 1 of 10 epochs" in str(whole) and "in 1 of 2 epochs" in str(short)
    assert short.expected.value < 0.8 * whole.expected.value


def test_the_time_of_compiling_is_reported_over_the_jobs_length():
    idle = dict(phases=STEP, gpu=40, gpu_memory=75, cores=8, busy=2.0)
    known = str(found("gpu_starved", **idle, settings={"max_steps": 14_400}).gain)
    unknown = str(found("gpu_starved", **idle, settings={"epochs": None}).gain)
    assert re.search(r"a minute of it at the start is \d % of this job's \d\d\.?\d? minutes", known)
    assert "nor is the job's length" in unknown


# Told


def test_a_comparison_says_whether_the_obtained_speed_up_lies_in_the_range():
    slow = Diagnosis(plant(phases=STEP, gpu=30, checkpoint=(10, 8.0), settings={"checkpoint_every": 10}))
    advised = slow.findings[0].fixes[0].value
    fast = Diagnosis(plant(phases=STEP, gpu=90, settings={"checkpoint_every": advised}))
    same = Diagnosis(plant(phases=STEP, gpu=30, checkpoint=(10, 8.0), settings={"checkpoint_every": advised}, seed=1))
    [reported] = Comparison(slow, fast).kept()
    assert reported.is_inside is True and f"expected speed-up {reported.gain.text}, obtained" in str(reported)
    [kept] = Comparison(slow, same).to_dict()["fix_kept"]
    assert json.loads(json.dumps(kept))["is_inside"] is False and kept["gain"]["expected"]["low"] > 1


def test_the_page_on_diagnoses_quotes_a_gain():
    page = (ROOT / "docs/diagnosis.md").read_text(encoding="utf-8")
    [quoted] = re.findall(r"^gain +(speed-up .* to .*)$", page, re.MULTILINE)
    gain = found("checkpoint_stalls", phases=STEP, gpu=85, checkpoint=(20, 0.8), settings={"max_steps": 200}).gain
    assert str(gain) == quoted


def test_waits_at_the_start_of_epochs_shrink_as_images_become_cheaper():
    """16 workers that a CPU job starts anew with each short epoch: what they cost there is not in its usual steps."""
    settings = {"num_workers": 16, "preprocessing": "cpu", "augmentation_load": 12, "compose_augmentation": False}
    planted = dict(
        phases={"data_wait": 0.001, "student_forward": 0.1, "backward": 0.2, "optimizer": 0.02},
        cores=2, busy=2.0, pressure=80, noise=0.0, log_every=1, steps_per_epoch=10, cpu_seconds=0.4, worker_cpu_seconds=0.3,
        settings=settings,
    )  # fmt: skip
    short, long = (found("too_many_workers", **{**planted, "epoch_start": seconds}).gain for seconds in (0.0, 3.0))
    assert long.expected.value > 1.2 * short.expected.value
    assert "waits at the start of epochs" in str(long) and "epochs" not in str(short)


def test_slow_reads_and_a_quota_slow_evaluations_as_they_do_steps():
    reads = dict(
        phases={"data_wait": 0.9, "student_forward": 0.05, "backward": 0.05, "optimizer": 0.01},
        busy=0.5,
        noise=0.0,
        cpu_seconds=0.1,
    )
    quota = dict(
        phases={"data_wait": 0.01, "student_forward": 0.3, "backward": 0.6, "optimizer": 0.02}, cores=8, usable=2, busy=2.0,
        throttled=100, noise=0.0, facts={"threads": 32}, cpu_seconds=1.86,
    )  # fmt: skip
    for kind, planted, workers in (("storage_bound", reads, 4), ("cpu_throttled", quota, 1)):
        common = {**planted, "worker_cpu_seconds": 0.02, "settings": {"num_workers": workers}}
        without, beside, checkpoints = (
            found(kind, **common, **more).gain.expected.value
            for more in ({}, {"evaluate": (2, 20.0)}, {"checkpoint": (2, 20.0)})
        )
        assert beside == pytest.approx(without, rel=0.03) and checkpoints < 0.9 * without


@pytest.mark.parametrize(("process", "kind"), [(1.0, "too_few_workers"), (0.45, "storage_bound")])
def test_a_dataset_that_computes_in_threads_of_its_own_is_not_slow_storage(process, kind):
    """Without workers, the training thread waits for both. What tells them apart is the CPU time of its whole process."""
    planted = plant(
        phases={"data_wait": 0.8, "student_forward": 0.06, "backward": 0.12, "optimizer": 0.02}, gpu=40, cores=2, busy=1.0, noise=0.0,
        cpu_seconds=process, settings={"num_workers": 0},
    )  # fmt: skip
    ranks = tuple(
        dataclasses.replace(steps, extra={**steps.extra, "thread_cpu_seconds": 0.2 * steps.seconds["step"]})
        for steps in planted.ranks
    )
    assert judge(Evidence(dataclasses.replace(planted, ranks=ranks))).findings[0].kind == kind

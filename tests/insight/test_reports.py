"""What a diagnosis says besides its findings: what was not measured is never ok, and every fix is a setting that exists."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from training.settings import distillation, scripts, segmentation

from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Host, Measurements, Series
from launcher.insight.rules.table import RULES, judge
from tests.insight.planted import plant
from tests.insight.test_rules import CPU, GPU, HEALTHY, PLANTED

SETTINGS = {
    field.name
    for settings in (
        distillation.DistillationSettings,
        scripts.ClassifierSettings,
        segmentation.SegmentationSettings,
    )
    for field in dataclasses.fields(settings)
}


def test_every_rule_answers_for_every_run():
    for planted in (*PLANTED.values(), *HEALTHY.values()):
        found = judge(Evidence(plant(**planted)))
        answers = (found.findings, found.not_found, found.not_measured, found.not_applicable)
        assert sum(map(len, answers)) == len(RULES) + 1, "and that operators were not recorded"


def test_without_measurements_nothing_is_ok():
    diagnosis = Diagnosis(
        Measurements(source="nothing", not_measured={"steps": "no timeline", "system": "the monitor was off"})
    )
    assert diagnosis.headline == "not measured: neither steps nor hosts were recorded"
    assert not diagnosis.report.not_found and not diagnosis.findings
    assert "the monitor was off" in str(diagnosis) and "no timeline" in str(diagnosis)


def test_without_a_step_timeline_phases_are_not_measured():
    report = judge(Evidence(plant(phases=None, gpu=92)))
    unmeasured = {missing.what for missing in report.not_measured}
    assert {
        "checkpoints",
        "evaluations",
        "copying batches to the device",
        "a teacher that takes much of the step",
    } <= unmeasured
    assert not unmeasured & set(report.not_found)


def test_without_system_metrics_the_cause_of_a_wait_is_not_measured():
    report = judge(
        Evidence(plant(phases={**CPU, "data_wait": 0.5}, system=False, not_measured={"system": "monitor off"}))
    )
    assert report.findings[0].kind == "data_bound" and "not measured: monitor off" in report.findings[0].cause
    assert any(missing.reason == "monitor off" for missing in report.not_measured)


def test_an_exchange_that_was_not_measured_is_reported_with_its_reason():
    report = judge(
        Evidence(plant(phases=GPU, ranks=2, gpu=90, not_measured={"grad_sync": "smddp keeps no record of it"}))
    )
    [missing] = [missing for missing in report.not_measured if missing.what == "exchange of gradients"]
    assert missing.reason == "smddp keeps no record of it"


def test_cores_that_wait_for_disks_do_not_count_as_computing():
    """SageMaker's agent counts the wait as use."""
    evidence = Evidence(plant(phases=GPU, cores=8, busy=1.0, io_wait=4.0))
    assert evidence.busy == pytest.approx(1 / 8, rel=0.1) and evidence.waiting_cores == pytest.approx(4, rel=0.1)


def test_a_core_pegged_at_exactly_100_percent_is_seen():
    assert Evidence(plant(phases=GPU, saturated=1, busy=1.2)).saturated == 1


def test_the_slowest_single_step_of_a_window_is_an_outlier_though_its_mean_is_not():
    planted = plant(phases=GPU, gpu=90, log_every=50, steps=1000, noise=0.01)
    [steps] = planted.ranks
    slowest = steps.seconds["step"] * 1.2
    for window in (5, 9, 12, 17):
        steps.seconds["step"][window] += 9.0 / 50
        steps.seconds["backward"][window] += 9.0 / 50
        slowest[window] = 9.25
    steps.extra["slowest_step"] = slowest
    report = judge(Evidence(planted))
    assert [finding.kind for finding in report.findings] == ["step_outliers"]
    assert "9.25" in report.findings[0].evidence[0]


def test_phases_that_a_window_lacks_did_not_happen_there():
    """Epochs with a full cache have no teacher."""
    planted = plant(phases={**GPU, "teacher_forward": 0.1}, noise=0.0)
    planted.ranks[0].seconds["teacher_forward"][10:] = np.nan
    evidence = Evidence(planted)
    assert evidence.phases["teacher_forward"] == pytest.approx(0.1 * 9 / 19 / 0.35, rel=0.05)


def test_an_exchange_that_a_window_does_not_know_is_that_of_the_others():
    planted = plant(phases={**GPU, "grad_sync": 0.07}, ranks=2, noise=0.0)
    for steps in planted.ranks:
        steps.seconds["grad_sync"][:10] = np.nan
    assert Evidence(planted).phases["grad_sync"] == pytest.approx(0.07 / 0.25, rel=0.05)


@pytest.mark.parametrize("case", PLANTED, ids=" ".join)
def test_every_cure_is_a_setting_that_exists_and_differs(case):
    for finding in judge(Evidence(plant(**PLANTED[case]))).findings:
        assert finding.evidence and finding.cause and finding.fixes
        for fix in finding.fixes:
            kind, _, name = (fix.setting or "").partition(".")
            if kind == "hyperparameters":
                assert name in SETTINGS and fix.value != fix.now
            if kind == "compute":
                assert re.fullmatch(r"instance_groups\.[01]\.instance_count", name) and fix.value > fix.now
            assert kind in ("", "hyperparameters", "distribution", "environment", "compute")


@pytest.mark.parametrize("case", PLANTED, ids=" ".join)
def test_no_gain_is_beyond_what_its_share_allows(case):
    for finding in judge(Evidence(plant(**PLANTED[case]))).findings:
        assert finding.level == "risk" or finding.gain is not None and 0 < finding.share <= 1
        if finding.gain is not None and finding.gain.expected is not None:
            assert 1 <= finding.gain.expected.value <= finding.gain.at_most + 1e-9 and finding.gain.formula


@pytest.mark.parametrize("case", [*PLANTED, *HEALTHY], ids=str)
def test_terminal_json_and_notebook_tell_the_same(case):
    diagnosis = Diagnosis(plant(**(PLANTED.get(case) or HEALTHY[case])))
    reported, shown = diagnosis.to_dict(), diagnosis._repr_html_()
    assert json.loads(json.dumps(reported, allow_nan=False))["headline"] == diagnosis.headline
    text = re.sub(r"\s+", " ", str(diagnosis))
    for finding in reported["findings"]:
        assert finding["title"] in text and finding["title"] in shown.replace("&#x27;", "'")
    assert max(len(line) for line in str(diagnosis).splitlines()) <= 130


def test_windows_that_were_not_read_count_in_the_time_and_are_no_pause():
    """A long record is thinned: stalls are all read, windows are not."""
    planted = plant(phases=GPU, gpu=90, steps=2000, checkpoint=(100, 2.0), noise=0.01)
    [steps] = planted.ranks
    kept = slice(9, None, 10)
    thinned = dataclasses.replace(
        planted,
        ranks=(
            dataclasses.replace(
                steps,
                **{name: getattr(steps, name)[kept] for name in ("step", "epoch", "ended")},
                seconds={name: values[kept] for name, values in steps.seconds.items()},
                extra={"steps": np.full(len(steps.step[kept]), 10.0)},
            ),
        ),
    )
    whole, part = Evidence(planted), Evidence(thinned)
    assert part.training_seconds == pytest.approx(whole.training_seconds, rel=0.06)
    assert [finding.kind for finding in judge(part).findings] == [finding.kind for finding in judge(whole).findings]


def test_time_between_epochs_that_lies_in_no_step_is_found():
    planted = plant(phases=GPU, gpu=70, noise=0.01)
    [steps] = planted.ranks
    steps.ended[:] += 6.0 * (steps.epoch - 1)
    [finding] = judge(Evidence(planted)).findings
    assert finding.kind == "slow_epoch_starts" and finding.share == pytest.approx(18 / 68, rel=0.1)


def test_the_operators_that_take_longest_are_shown_where_they_were_recorded():
    planted = plant(phases=GPU, gpu=95)
    listed = [
        {"name": f"kernel_{number}<float>", "calls": 1, "seconds": 0.1 / 2**number, "share": 0.5**number}
        for number in range(1, 30)
    ]
    recorded = dataclasses.replace(
        planted, facts={**planted.facts, "operators": {"device": "GPU", "steps": 3, "operators": listed}}
    )
    diagnosis = Diagnosis(recorded)
    assert "kernel_5<float>" in str(diagnosis) and "kernel_6<float>" not in str(diagnosis), "KT's top five"
    assert "kernel_5&lt;float&gt;" in diagnosis._repr_html_()
    assert diagnosis.to_dict()["operators"][0] == {"name": "kernel_1<float>", "seconds": 0.05, "share": 0.5}
    both = str(Comparison(Diagnosis(planted), diagnosis))
    assert "kernel_1<float> 50 %" in both
    assert any(missing.what == "operators and kernels" for missing in Diagnosis(planted).report.not_measured)


def test_windows_that_the_profiler_slowed_do_not_count():
    planted = plant(phases=GPU, noise=0.0)
    [steps] = planted.ranks
    steps.extra["profiled"] = np.where(np.arange(20) < 8, 1.0, np.nan)
    steps.seconds["backward"][:8] *= 10
    assert Evidence(planted).phases["backward"] == pytest.approx(0.15 / 0.25, rel=0.01)


def test_a_run_of_first_steps_alone_says_so():
    phases = {"data_wait": 5.0, "student_forward": 1.0, "backward": 2.0}
    few, more = (Diagnosis(plant(phases=phases, steps=steps, log_every=1)) for steps in (4, 7))
    assert "all of them first steps" in str(few) and few.findings == ()
    assert "waiting for data: workers, cores, storage" in [missing.what for missing in few.report.not_measured]
    assert "first steps" not in str(more) and more.findings


SMOKE = dict(
    noise=0.0,
    phases={**CPU, "data_wait": 0.1},
    steps=3,
    log_every=1,
    checkpoint=(3, 0.5),
    evaluate=(3, 0.5),
    throttled=60,
)


def test_a_run_of_three_steps_is_too_short_to_judge_in_every_form():
    found = Diagnosis(plant(**SMOKE))
    assert found.headline == "3 steps in 0.87 s: too short to judge" and found.findings == ()
    assert str(found).startswith(f"planted: {found.headline}\n") and found.headline in repr(found)
    assert f"<h2>{found.headline}</h2>" in found._repr_html_()
    assert (found.to_dict()["too_short"], found.to_dict()["headline"]) == ("3 steps in 0.87 s", found.headline)
    assert f"checkpoints; evaluations; steps that take far longer than the others ({found.headline})" in re.sub(
        r"\s+", " ", str(found)
    )
    assert "checkpoints" not in str(found.report.not_found)


def test_quick_steps_between_long_waits_are_judged_by_the_whole_time():
    quick = {"data_wait": 0.002, "forward": 0.01, "backward": 0.01}
    waits = plant(phases=quick, steps=20, log_every=1, steps_per_epoch=4, epoch_start=10.0)
    assert Diagnosis(waits).findings[0].kind == "slow_epoch_starts"
    assert Diagnosis(plant(phases=quick, steps=20, log_every=1, steps_per_epoch=4)).report.too_short


@pytest.mark.parametrize(
    ("steps", "seconds", "short"),
    [(5, 60.0, True), (6, 8.0, True), (6, 12.0, False), (14, 0.2, True), (15, 0.2, False), (100, 0.009, True), (150, 0.009, False)],
)  # fmt: skip
def test_ten_usual_steps_or_ten_seconds_of_them_are_judged_if_they_take_a_second(steps, seconds, short):
    run = plant(
        phases={"data_wait": seconds / 2, "forward": seconds / 4, "backward": seconds / 4},
        steps=steps,
        log_every=1,
        noise=0.0,
    )
    found = Diagnosis(run)
    assert (found.report.too_short is not None) == short == (not found.findings)


@pytest.mark.parametrize(
    ("more", "kind", "title"),
    [
        ({"facts": {"seconds_to_first_step": 1500.0}}, "slow_start", "The first step came after 1500 s"),
        ({"memory_growth": 55}, "memory_growth", "Memory grows: the memory of algo-1 is full in about "),
    ],
)
def test_what_is_no_share_of_the_steps_is_told_of_a_short_run_too(more, kind, title):
    found = Diagnosis(plant(**{**SMOKE, **more}))
    assert [(one.kind, one.level, one.share, one.gain) for one in found.findings] == [(kind, "risk", None, None)]
    assert found.headline.startswith(f"3 steps in 0.87 s: too short to judge. {title}")


def test_a_few_samples_of_a_host_are_too_few_to_judge():
    hosts = plant(phases=None, busy=7.9, gpu=50).hosts
    for samples, short in ((4, "4 samples of the hosts"), (5, None)):
        cut = {name: Series(one.times[:samples], one.values[:samples]) for name, one in hosts["algo-1"].cores.items()}
        found = Diagnosis(Measurements(source="cut", hosts={"algo-1": Host(name="algo-1", cores=cut)}))
        assert found.report.too_short == short


def test_a_checkpoint_after_the_last_step_alone_is_no_share_of_a_longer_run():
    for due, kinds in ((200, []), (100, ["checkpoint_stalls"])):
        found = judge(Evidence(plant(phases=GPU, gpu=93, checkpoint=(due, 30.0))))
        assert [finding.kind for finding in found.findings] == kinds
    alone = judge(Evidence(plant(phases=GPU, gpu=93, checkpoint=(200, 30.0))))
    assert ("checkpoints", "only after the last step, however many steps a run has") in alone.not_applicable


def test_where_the_model_computes_on_the_same_full_cores_cheaper_images_come_before_fewer_workers():
    planted = {**PLANTED["too_many_workers", "harsh"], "busy": 1.95}
    costly = {**planted, "settings": {**planted["settings"], "augmentation_load": 8, "compose_augmentation": False}}
    [first, second] = Diagnosis(plant(**costly)).findings[0].fixes[:2]
    assert (first.setting, second.setting) == ("hyperparameters.compose_augmentation", "hyperparameters.num_workers")
    [first, *_] = Diagnosis(plant(**planted)).findings[0].fixes
    assert first.setting == "hyperparameters.num_workers"

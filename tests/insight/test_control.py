"""Whether two runs can be compared: the control of each change, corrections by it, and runs that cannot be compared."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from launcher.insight.comparison import Comparison
from launcher.insight.control import MAX_CORRECTED, OUTSIDE
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Measurements, Series
from launcher.insight.phases import order
from launcher.insight.rules.table import judge
from launcher.insight.script import PAUSES, Address, Part, Script
from launcher.insight.speed import training
from launcher.insight.touches import START, TOUCHES, UNKNOWN, touch_of
from tests.insight.planted import plant
from tests.insight.test_neighbours import with_programs as beside_programs
from tests.insight.test_neighbours import with_threads
from tests.insight.test_rules import PLANTED

STEP = {"data_wait": 0.1, "host_to_device": 0.03, "student_forward": 0.08, "backward": 0.15, "optimizer": 0.04}
"""0.4 s."""

QUICK = {**STEP, "data_wait": 0.02, "host_to_device": 0.01}


def slower(phases: dict[str, float], times: float) -> dict[str, float]:
    return {name: seconds * times for name, seconds in phases.items()}


def run(phases: dict[str, float], **values: object) -> Diagnosis:
    """A run on a GPU whose cores are mostly idle."""
    return Diagnosis(plant(**{**dict(phases=phases, gpu=90, noise=0.02, busy=2.0), **values}))


def with_programs(measured: Measurements, cores: float) -> Diagnosis:
    """The run beside other programs, which use so many cores."""
    hosts = {}
    for name, host in measured.hosts.items():
        times = next(iter(host.cores.values())).times[::10]
        hosts[name] = replace(host, other={**host.other, OUTSIDE: Series(times, times * 0 + cores)})
    return Diagnosis(replace(measured, hosts=hosts))


PINNED = {"pin_memory": True}


def test_phases_that_the_change_cannot_touch_are_the_control():
    both = Comparison(run(STEP, settings={"pin_memory": False}), run(QUICK, settings=PINNED, seed=1))
    control = both.comparability.control
    assert control.said.startswith("student_forward, backward and optimizer, which pin_memory cannot touch, took ")
    assert control.times.value == pytest.approx(1, rel=0.02) and str(control.times) in control.said
    assert both.speedup.value == both.measured.value == pytest.approx(0.4 / 0.3, rel=0.02)
    assert both.speedup.low < 0.4 / 0.3 < both.speedup.high < 1.1 * both.speedup.low
    assert both.sentences()[0] == f"speed-up {both.speedup}, in images a second; control: {control.said}"


def test_a_run_under_load_is_not_compared_and_no_fix_is_judged():
    before = run({**STEP, "data_wait": 0.5}, gpu=25, busy=1.3, settings={"num_workers": 1}, worker_cpu_seconds=0.5)
    advised = before.findings[0].fixes[0].value
    after = run(slower({**STEP, "data_wait": 0.02}, 6.2), gpu=25, settings={"num_workers": advised})
    both = Comparison(before, after)
    assert both.speedup is None and both.measured.value < 0.6
    first = str(both).splitlines()[0]
    assert first.startswith(
        "not comparable: host_to_device, student_forward, backward and optimizer, which num_workers cannot touch, took 6."
    )
    assert first.endswith("run both again on a quiet machine, or in alternation")
    [kept] = both.kept()
    assert kept.obtained is None and "not judged" in str(kept) and "obtained" not in str(kept)
    reported = json.loads(json.dumps(both.to_dict(), allow_nan=False))
    assert (
        reported["speedup"] is None
        and reported["fix_kept"][0]["obtained"] is None
        and not reported["comparable"]["possible"]
    )
    assert reported["measured_speedup"]["value"] == both.measured.value and reported["confidence"] == 0.95


@pytest.mark.parametrize("times", [1.25, 1 / 1.25])
def test_what_the_control_drifted_is_taken_out_of_the_gain_and_both_figures_are_shown(times):
    both = Comparison(run(STEP, settings={"pin_memory": False}), run(slower(QUICK, times), settings=PINNED, seed=1))
    assert both.measured.value == pytest.approx(0.4 / 0.3 / times, rel=0.02)
    assert both.speedup.value == pytest.approx(0.4 / 0.3, rel=0.03)
    assert both.speedup.low <= both.measured.value <= both.speedup.high, "the range holds both"
    first = both.sentences()[0]
    assert f"as measured {both.measured}" in first and "corrected: student_forward" in first


def test_a_drift_within_noise_corrects_nothing_and_widens_the_range():
    quiet, drifted = (
        Comparison(run(STEP, settings={"pin_memory": False}), run(slower(QUICK, times), settings=PINNED, seed=1))
        for times in (1.0, 1.06)
    )
    assert not drifted.comparability.is_corrected and drifted.speedup.value == drifted.measured.value
    assert drifted.speedup.high / drifted.speedup.low > 1.05 * quiet.speedup.high / quiet.speedup.low
    corrected = drifted.measured.value * drifted.comparability.control.times.value
    assert drifted.speedup.high > corrected, "what a machine of the same speed would have shown"


def test_a_control_beyond_what_can_be_corrected_is_refused_and_one_below_is_not():
    below, beyond = (
        Comparison(
            run(STEP, settings={"pin_memory": False}), run(slower(QUICK, times * MAX_CORRECTED), settings=PINNED)
        )
        for times in (0.9, 1.1)
    )
    assert below.comparability.is_corrected and not beyond.comparability.possible


def test_workers_that_share_the_cores_touch_every_phase():
    free, full = (
        Comparison(
            run(STEP, busy=busy, settings={"num_workers": 2}), run(QUICK, busy=busy, settings={"num_workers": 4})
        )
        for busy in (2.0, 7.9)
    )
    assert free.comparability.control is not None and full.comparability.control is None
    assert "no control: num_workers can touch every phase" in full.sentences()[0] and full.speedup == full.measured


KEPT = {"data_wait": 0.001, "student_forward": 0.12, "backward": 0.27, "optimizer": 0.03}
FREE = {"data_wait": 0.001, "student_forward": 0.08, "backward": 0.15, "optimizer": 0.02}
"""KT's fault and its fix: a third of the step is a wait for a core."""


def with_workers(number: int, phases: dict[str, float], ranks: int, **values: object) -> Measurements:
    """A run on a GPU, or on eight, with 12 cores a process of which half are in use at most."""
    busy = 0.45 * 12 * ranks if number > 2 else 0.2 * 12 * ranks
    planted = dict(phases=phases, ranks=ranks, gpu=50.0, cores=12 * ranks, busy=busy, saturated=2, noise=0.02)
    return plant(**{**planted, **values}, settings={"num_workers": number})


@pytest.mark.parametrize("ranks", [1, 8])
def test_workers_that_keep_the_training_thread_from_its_core_touch_every_phase_though_cores_are_free(ranks):
    before = Diagnosis(with_threads(with_workers(16, KEPT, ranks), delay=0.35, workers=0.9))
    after = Diagnosis(with_threads(with_workers(2, FREE, ranks, gpu=85.0, seed=1), delay=0.02, workers=0.9))
    assert before.findings[0].kind == "too_many_workers" and before.evidence.full == 0
    both = Comparison(before, after)
    assert both.comparability.why_no_control == "num_workers can touch every phase that was measured"
    assert both.speedup == both.measured and both.speedup.value == pytest.approx(0.421 / 0.251, rel=0.02)
    assert both.kept()[0].is_inside
    assert Comparison(after, before).comparability.control is None, "whichever run it is in"


def test_so_do_workers_that_are_only_suspected_of_it():
    """As in KT's log: nothing recorded who has the cores, but steps swing and the GPU idles."""
    swings = {step: ("backward", 3.0) for step in range(20, 201, 20)}
    before, after = (Diagnosis(with_workers(n, FREE, 1, slow_steps=slow)) for n, slow in ((16, swings), (2, None)))
    assert before.findings[0].title.startswith("Prime suspect")
    assert Comparison(before, after).comparability.control is None


def test_a_core_that_other_programs_take_is_no_reason_against_the_control():
    """It tells by how much the machine was busier."""
    before = Diagnosis(with_threads(with_workers(4, FREE, 1), delay=0.02, workers=0.9))
    taken = with_threads(with_workers(2, slower(FREE, 1.7), 1), delay=0.35, workers=0.9)
    for cores, possible in ((4.0, False), (0.5, True)):
        both = Comparison(before, Diagnosis(beside_programs(taken, ffmpeg=cores)))
        assert (both.speedup is not None) == possible


@pytest.mark.parametrize(
    "settings",
    [{"worker_type": "threads"}, {"preprocessing": "dali"}],
    ids=["threads hold Python's lock", "images are prepared on the device"],
)
def test_workers_that_share_more_than_the_cores_touch_every_phase_too(settings):
    before, after = (run(STEP, settings={"num_workers": number, **settings}) for number in (2, 4))
    assert Comparison(before, after).comparability.control is None


def test_without_its_teacher_a_student_meets_the_workers_that_share_its_cores():
    """Measured: 13 ms of forward pass became 45, while only the teacher's answers came from a cache."""
    taught = {**STEP, "teacher_forward": 0.5}
    cached = {**STEP, "teacher_forward": 0.01, "student_forward": 0.25}
    for busy, comparable in ((7.9, True), (2.0, False)):
        before = run(taught, busy=busy, settings={"teacher_cache": None, "num_workers": 1})
        after = run(cached, busy=busy, settings={"teacher_cache": {"views": 1}, "num_workers": 1})
        assert (Comparison(before, after).speedup is not None) == comparable


def test_the_training_process_that_makes_its_batches_itself_is_disturbed_by_no_worker():
    before = run(STEP, busy=7.9, settings={"num_workers": 0})
    beside = run(QUICK, settings={"num_workers": 2})
    assert "student_forward" in Comparison(before, beside).comparability.control.said


def test_ranks_wait_for_a_late_one_in_the_backward_pass_which_is_no_control():
    before, after = (run(STEP, ranks=2, gpu=90, settings={"num_workers": number}) for number in (2, 4))
    assert Comparison(before, after).comparability.control.said.startswith(
        "host_to_device, student_forward and optimizer,"
    )


def test_a_part_too_small_to_tell_of_the_machine_is_no_control():
    small = {**STEP, "optimizer": 0.005}
    both = Comparison(run(small, settings={"compile": False}), run(small, settings={"compile": True}))
    assert both.comparability.control is None
    assert Comparison(
        run(STEP, settings={"compile": False}), run(STEP, settings={"compile": True})
    ).comparability.control


def test_runs_that_differ_in_pauses_alone_have_whole_steps_as_their_control():
    before, after = (
        run(STEP, checkpoint=(every, 5.0), settings={"checkpoint_every": every}, seed=every) for every in (20, 100)
    )
    both = Comparison(before, after)
    assert both.comparability.control.said.startswith("steps, which checkpoint_every cannot touch, took 1.0")
    assert both.speedup.value == pytest.approx((80 + 50) / (80 + 10), rel=0.02)


def test_the_same_job_twice_shows_whether_the_machine_was_the_same():
    same = {"code": "0123", "inputs": {"train": {"folder": "data"}}}
    twice = Comparison(run(STEP, facts=same), run(STEP, facts=same, seed=1))
    assert not twice.speedup.differs and "steps of the same settings, code and input took 1.0" in twice.sentences()[0]
    busier = Comparison(run(STEP, facts=same), run(slower(STEP, 2), facts=same))
    assert busier.speedup is None and "took 2.0" in busier.sentences()[0]


def test_where_the_code_changed_or_may_have_there_is_no_control():
    known = Comparison(run(STEP, facts={"code": "0123"}), run(QUICK, facts={"code": "4567"}))
    assert known.comparability.why_no_control == "code can touch every phase that was measured"
    unknown = Comparison(run(STEP), run(QUICK))
    assert unknown.comparability.why_no_control == "what changed between the runs was not recorded"
    assert unknown.speedup.value == pytest.approx(0.4 / 0.3, rel=0.02)


def test_a_variable_of_the_environment_may_change_anything():
    before = run(STEP, facts={"code": "0123", "environment": {}})
    after = run(QUICK, facts={"code": "0123", "environment": {"NCCL_ALGO": "Tree"}})
    both = Comparison(before, after)
    assert both.speedup == both.measured and "environment can touch every phase" in " ".join(both.sentences())


@pytest.mark.parametrize(
    ("fact", "before", "after", "reported"),
    [
        (
            "instance_type",
            "ml.g5.xlarge",
            "ml.p4d.24xlarge",
            "instance type ml.g5.xlarge before, ml.p4d.24xlarge after",
        ),
        ("device", "cuda", "cpu", "device cuda before, cpu after"),
        ("device_name", "A10G", "A100", "device name A10G before, A100 after"),
        ("torch", "2.4.0", "2.8.0", "torch 2.4.0 before, 2.8.0 after"),
        ("world_size", 2, 8, "training processes 2 before, 8 after"),
        ("hosts", 1, 2, "hosts 1 before, 2 after"),
        ("training_images", 400, 4000, "training images 400 before, 4000 after"),
    ],
)
def test_other_machines_and_other_inputs_are_not_compared(fact, before, after, reported):
    both = Comparison(run(STEP, facts={fact: before}), run(QUICK, facts={fact: after}))
    assert both.speedup is None and reported in both.sentences()[0]
    assert str(both.measured) in both.sentences()[1] and both.results()


def test_fewer_cores_and_another_model_are_not_compared():
    fewer = Comparison(run(STEP), run(STEP, usable=2.0))
    assert fewer.sentences()[0] == "not comparable: usable cores 8.0 before, 2.0 after"
    model = Comparison(run(STEP, settings={"model": "resnet18"}), run(STEP, settings={"model": "resnet50"}))
    assert model.sentences()[0] == "not comparable: model differs, so these are different jobs"


def observed(phases: dict[str, float], **settings: object) -> Diagnosis:
    """A run of a script that is not the kit's."""
    return Diagnosis(replace(run(phases, settings=settings).measurements, script=Script()))


def test_an_argument_of_a_script_with_a_known_settings_values_and_a_word_of_its_name_is_that_setting():
    before, after = (
        observed(phases, num_workers=number, **{"--data-workers": str(number), "--output-dir": f"out-{number}"})
        for phases, number in ((STEP, 2), (QUICK, 4))
    )
    assert "which num_workers cannot touch" in Comparison(before, after).comparability.control.said
    other = observed(QUICK, num_workers=4, **{"--data-workers": "4", "--output-dir": "out", "--depth": "9"})
    assert Comparison(before, other).comparability.why_no_control.startswith("num_workers and --depth can touch")


@pytest.mark.parametrize(
    ("known", "other", "values"),
    [
        ("pin_memory", "use_amp", (False, True)),
        ("num_workers", "crop_scale", (2, 4)),
        ("num_workers", "num_heads", (2, 4)),
    ],
)
@pytest.mark.parametrize(
    "made", [observed, lambda phases, **settings: run(phases, settings=settings)], ids=["observed", "kit"]
)
def test_another_setting_that_happens_to_change_alike_is_a_change_of_its_own(made, known, other, values):
    quicker = slower(STEP, 0.72)
    before, after = (made(phases, **{known: value, other: value}) for phases, value in zip((STEP, quicker), values))
    both = Comparison(before, after)
    assert other in both.comparability.why_no_control and both.speedup == both.measured


FULL = dict(phases=STEP, cores=2, busy=1.95, noise=0.02)
"""A run on two full cores."""


def beside(before: float, after: float, **values: object) -> Comparison:
    """Runs with 16 and 2 workers, beside programs that use so many cores."""
    runs = (
        with_programs(plant(**{**FULL, **values}, settings={"num_workers": number}), cores)
        for number, cores in ((16, before), (2, after))
    )
    return Comparison(*runs)


def test_where_nothing_else_is_left_cores_that_other_programs_use_are_the_control():
    hogged = beside(0.0, 1.2)
    assert hogged.speedup is None
    assert "programs outside the run used 0.0 of 2 cores before and 1.2 after" in hogged.sentences()[0]
    some = beside(0.0, 0.4)
    assert some.speedup.value == pytest.approx(some.measured.value * 2 / 1.6)
    assert beside(0.1, 0.1).speedup.value == beside(0.1, 0.1).measured.value


def test_programs_that_use_cores_which_the_run_leaves_idle_do_no_harm():
    threads = {"worker_type": "threads"}
    idle, full = (
        Comparison(
            *(
                with_programs(
                    plant(phases=STEP, cores=8, busy=busy, settings={**threads, "num_workers": number}), cores
                )
                for number, cores in ((4, 0.0), (2, 4.0))
            )
        )
        for busy in (2.0, 7.9)
    )
    assert idle.speedup is not None and full.speedup is None


def test_costs_that_a_change_moves_before_the_first_step_count():
    before = run(STEP, settings={"compile": False}, facts={"seconds_to_first_step": 10.0})
    after = run(STEP, settings={"compile": True}, facts={"seconds_to_first_step": 50.0})
    both = Comparison(before, after)
    assert both.measured.value == pytest.approx(80 / (80 + 40), rel=0.02) and "40.0 s more until" in both.sentences()[1]
    earlier = Comparison(after, before)
    assert earlier.measured.value == pytest.approx(1, rel=0.02), "files that the first run left in memory are no gain"
    unable = run(STEP, settings={"pin_memory": True}, facts={"seconds_to_first_step": 50.0})
    assert Comparison(before, unable).measured.value == pytest.approx(1, rel=0.02)


def test_a_fix_that_shows_no_difference_is_said_to_show_none():
    phases = {**STEP, "data_wait": 0.5}
    before = run(phases, gpu=25, busy=1.3, noise=0.3, settings={"num_workers": 1}, worker_cpu_seconds=0.5)
    advised = before.findings[0].fixes[0].value
    after = run(phases, gpu=25, noise=0.3, settings={"num_workers": advised, "precision": "fp32"}, seed=1)
    [kept] = Comparison(before, after).kept()
    assert "no difference shown" in str(kept) and str(kept).endswith("together with precision")


def test_two_runs_of_few_windows_have_a_figure_and_no_range():
    both = Comparison(*(run(phases, steps=20, settings={"pin_memory": phases is QUICK}) for phases in (STEP, QUICK)))
    assert both.speedup.low is None and "too short for a range" in both.sentences()[0]


def test_the_table_names_each_setting_once_and_phases_that_there_are():
    names = Counter(name for touch in TOUCHES for name in touch.names)
    assert max(names.values()) == 1
    assert {phase for touch in TOUCHES for phase in touch.phases or ()} <= {*order(), *PAUSES, START}


def test_every_setting_that_a_fix_changes_is_in_the_table():
    fixes = {
        fix.setting.removeprefix("hyperparameters.")
        for case in PLANTED.values()
        for finding in judge(Evidence(plant(**case))).findings
        for fix in finding.fixes
        if fix.setting is not None and fix.setting.startswith("hyperparameters.")
    }
    assert len(fixes) >= 10 and {name for name in fixes if touch_of(name) is UNKNOWN} == set()


def test_a_control_that_swings_more_than_it_changed_corrects_nothing():
    both = Comparison(
        *(
            run(phases, steps=60, noise=0.6, settings={"pin_memory": pinned}, seed=seed)
            for phases, pinned, seed in ((STEP, False, 0), (slower(STEP, 1.3), True, 3))
        )
    )
    control = both.comparability.control
    assert abs(control.times.value - 1) > 0.1 and control.times.low < 1 < control.times.high
    assert not both.comparability.is_corrected and both.speedup.value == both.measured.value


def test_pauses_and_starts_of_epochs_have_spreads_of_their_own():
    steady = plant(phases=STEP, noise=0.001, evaluate=(50, 10.0), system=False)
    alike, uneven = (
        training(Evidence(replace(steady, stalls=tuple(replace(stall, seconds=seconds) for stall, seconds in pairs))))
        for pairs in (zip(steady.stalls, (10.0,) * 4), zip(steady.stalls, (10.0, 16.0, 10.0, 16.0)))
    )
    assert uneven.value == pytest.approx(alike.value + 12) and uneven.variance > 30 > 1 > alike.variance
    starts = training(Evidence(plant(phases=STEP, noise=0.001, epoch_start=5.0, steps_per_epoch=40, system=False)))
    assert starts.variance**0.5 < 0.5, "four starts of 5 s each: no swing of usual steps"


def test_a_run_of_two_windows_and_four_pauses_has_no_range():
    few = plant(phases=STEP, steps=20, evaluate=(5, 1.0), system=False)
    assert len(few.stalls) == 4 and training(Evidence(few)).degrees_of_freedom == 0


def test_ranks_of_a_sharded_model_wait_in_forward_too():
    """Which so is no control: that batches came late made it longer before."""
    before, after = (
        {**QUICK, "optimizer": 0.1, **one}
        for one in ({"data_wait": 0.15, "forward": 0.35}, {"data_wait": 0.01, "forward": 0.2})
    )
    parts = (
        Part(of="data_parallel", at=Address("train.py", 9, ""), values={"class": "FullyShardedDataParallel"}, via=None),
    )

    def one(phases, workers):
        phases = {name: seconds for name, seconds in phases.items() if name != "student_forward"}
        return replace(
            plant(phases=phases, gpu=90, noise=0.02, ranks=2, settings={"num_workers": workers}),
            script=Script(parts=parts),
        )

    both = Comparison(Diagnosis(one(before, 2)), Diagnosis(one(after, 8)))
    assert both.speedup is not None and "forward" not in str(both.comparability.control.said).split("which")[0]

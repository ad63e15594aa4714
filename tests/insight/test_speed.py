"""The speed-up of two runs: over the part that both did, so that the length of a run is none."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from launcher.insight import windows
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.length import common
from launcher.insight.measurements import Measurements
from launcher.insight.speed import measured, training
from tests.insight.planted import plant

STEP = {"data_wait": 0.002, "host_to_device": 0.003, "student_forward": 0.08, "backward": 0.155, "optimizer": 0.01}
"""0.25 s."""

COMPILES = {5: ("student_forward", 30.0)}
"""In the first window."""


def run(steps: int, **values: object) -> Measurements:
    return plant(**{**dict(phases=STEP, steps=steps, log_every=5, gpu=92, steps_per_epoch=10_000), **values})


def compared(before: Measurements, after: Measurements) -> Comparison:
    return Comparison(Diagnosis(before), Diagnosis(after))


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_longer_is_not_faster(seed):
    """30 s of compiling are a third of the shorter one's time."""
    short, long = (
        run(steps, slow_steps=COMPILES, settings={"max_steps": steps}, seed=seed + steps) for steps in (200, 2000)
    )
    for both in (compared(short, long), compared(long, short)):
        assert both.speedup.low <= 1 <= both.speedup.high, both.speedup
        assert both.speedup.high < 1.1 * both.speedup.low
    first = compared(short, long).sentences()[0]
    assert "in images a second over the first 51,200 of each run; control: steps, which max_steps cannot touch" in first


def test_what_a_change_brings_is_found_beside_a_longer_run_too():
    quick = {**STEP, "backward": 0.055}
    both = compared(run(200, slow_steps=COMPILES), run(2000, phases=quick, slow_steps=COMPILES))
    assert both.measured.value == pytest.approx((30 + 50) / (30 + 30), rel=0.02), "compiling counts once in both"


def test_runs_whose_epochs_are_as_short_as_a_window_have_a_range_too():
    both = compared(*(run(200, steps_per_epoch=5, seed=seed) for seed in (0, 1)))
    assert both.speedup.low < 1 < both.speedup.high < 1.1 * both.speedup.low


def test_too_few_windows_have_no_range_though_some_begin_an_epoch():
    """Three steady ones, of which one does."""
    evidence = Evidence(run(20, steps_per_epoch=15))
    assert training(evidence).degrees_of_freedom == 0


def test_an_evaluation_that_the_shorter_run_did_not_reach_counts_in_neither():
    short, long = (run(steps, evaluate=(200, 30.0), noise=0.001) for steps in (190, 1000))
    assert measured(Evidence(short), Evidence(long)).value == pytest.approx(1, rel=0.01)
    reached = run(300, evaluate=(200, 60.0), noise=0.001)
    assert measured(Evidence(reached), Evidence(long)).value == pytest.approx((75 + 60) / (75 + 30), rel=0.01)


def test_an_evaluation_at_the_end_of_the_shorter_job_counts_in_neither():
    """The longer one has its own later."""
    short, long = run(200, evaluate=(200, 30.0), noise=0.001), run(1000, evaluate=(1000, 30.0), noise=0.001)
    assert measured(Evidence(short), Evidence(long)).value == pytest.approx(1, rel=0.01)


def test_all_of_the_training_of_runs_of_one_length_counts():
    before, after = (Evidence(run(200, evaluate=(50, seconds), slow_steps=COMPILES)) for seconds in (10.0, 1.0))
    assert common(before, after) == (before, after)
    assert measured(before, after).value == pytest.approx(before.training_seconds / after.training_seconds, rel=1e-12)
    assert " of each run" not in compared(run(200), run(200, seed=1)).sentences()[0]


def test_runs_of_other_batches_are_compared_over_the_same_images():
    """Compiling takes as long with any batch."""
    small = run(400, slow_steps=COMPILES, noise=0.001)
    large = {name: 2 * seconds for name, seconds in STEP.items()}
    both = compared(
        small, run(400, phases=large, slow_steps=COMPILES, settings={"global_batch_size": 512}, noise=0.001)
    )
    assert both.measured.value == pytest.approx(1, rel=0.01)
    assert "over the first 102,400 of each run" in both.sentences()[0]
    whole = {name: seconds for name, *seconds in both.course()[1]}["whole"]
    assert whole[0] == pytest.approx(whole[1], rel=0.01), "the picture is of the same part"


def test_where_a_batch_is_not_known_the_same_steps_are_compared():
    short, long = (run(steps, slow_steps=COMPILES) for steps in (200, 2000))
    unknown = replace(
        short, settings={name: one for name, one in short.settings.items() if name != "global_batch_size"}
    )
    assert "in steps a second over the first 200 of each run" in compared(unknown, long).sentences()[0]


def test_a_machine_that_is_slower_after_the_common_part_corrects_nothing():
    later = {step: ("student_forward", 1.25) for step in range(300, 2001, 5)}
    short, long = (run(steps, facts={"code": "0123"}, slow_steps=slow) for steps, slow in ((200, None), (2000, later)))
    both = compared(short, long)
    assert both.speedup.value == both.measured.value == pytest.approx(1, rel=0.03)
    assert dict((name, pair) for name, *pair in both.phases())["step"] == pytest.approx([0.25, 0.25], rel=0.03)


def first(evidence: Evidence, steps: int) -> Evidence:
    """What is compared of it beside a run of so many steps."""
    return common(evidence, Evidence(run(steps)))[0]


def test_a_window_in_which_the_common_part_ends_counts_in_part():
    part = first(Evidence(run(1000, log_every=50, noise=0.0, slow_steps={50: ("student_forward", 30.0)})), 180)
    [steps] = part.ranks
    assert steps.step.tolist() == [50, 100, 150, 180] and windows.steps_done(steps) == 180
    assert part.training_seconds == pytest.approx(180 * 0.25 + 30)
    assert steps.ended[-1] - steps.ended[-2] == pytest.approx(30 * 0.25)
    assert part.period[1] == steps.ended[-1], "records of the hosts end there too"


def test_a_run_that_goes_on_from_a_checkpoint_is_counted_from_there():
    went_on = run(1000, evaluate=(100, 5.0), noise=0.0)
    ranks = tuple(replace(steps, step=steps.step + 4000) for steps in went_on.ranks)
    stalls = tuple(replace(stall, step=stall.step + 4000) for stall in went_on.stalls)
    part = first(Evidence(replace(went_on, ranks=ranks, stalls=stalls)), 250)
    assert part.ranks[0].step[-1] == 4250 and part.training_seconds == pytest.approx(250 * 0.25 + 2 * 5.0)


def test_the_common_part_may_end_among_windows_that_were_not_read():
    whole = run(1000, noise=0.0)
    [steps] = whole.ranks
    read = np.flatnonzero((steps.step <= 100) | (steps.step > 500))
    columns = {name: getattr(steps, name)[read] for name in ("step", "epoch", "ended")}
    thinned = replace(
        steps,
        **columns,
        seconds={name: values[read] for name, values in steps.seconds.items()},
        extra={"steps": np.full(len(read), 5.0)},
    )
    part = first(Evidence(replace(whole, ranks=(thinned,))), 300)
    assert windows.steps_done(part.ranks[0]) == 300 and part.training_seconds == pytest.approx(300 * 0.25)


def test_a_rank_that_ended_early_is_kept_to_its_end():
    whole = run(1000, ranks=2, noise=0.0)
    one, other = whole.ranks
    columns = {name: getattr(other, name)[:20] for name in ("step", "epoch", "ended")}
    early = replace(other, **columns, seconds={name: values[:20] for name, values in other.seconds.items()})
    part = first(Evidence(replace(whole, ranks=(one, early))), 300)
    assert [steps.step[-1] for steps in part.ranks] == [300, 100]


def test_a_run_without_a_step_has_nothing_in_common():
    nothing, some = Evidence(plant(phases=None)), Evidence(run(200))
    assert common(nothing, some) == (nothing, some) and measured(nothing, some) is None
    assert json.dumps(Comparison(Diagnosis(plant(phases=None)), Diagnosis(run(200))).to_dict(), allow_nan=False)


def test_pauses_too_few_for_a_spread_of_their_own_spread_as_steps_do():
    bare, paused = (Evidence(run(400, evaluate=evaluate, noise=0.2)) for evaluate in (None, (200, 50.0)))
    steps, both = training(bare), training(paused)
    assert both.value == pytest.approx(steps.value + 100)
    assert both.variance == pytest.approx(2 * steps.variance, rel=0.06), "as twice the time of steps"
    assert both.degrees_of_freedom == pytest.approx(steps.degrees_of_freedom, rel=0.1)

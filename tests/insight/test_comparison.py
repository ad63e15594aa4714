"""Two runs side by side: KT's result table, phases before and after, and whether a fix brought what was expected."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from launcher.config.issues import UserError
from launcher.insight import summary
from launcher.insight.comparison import Comparison, epochs_done
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Series
from tests.insight.planted import plant

STEP = {"data_wait": 0.01, "student_forward": 0.08, "backward": 0.15, "optimizer": 0.01}


def run(**values) -> Diagnosis:
    return Diagnosis(plant(**{**dict(phases=STEP, gpu=90, noise=0.001), **values}))


def test_the_result_table_has_kts_columns_and_numbers():
    slow = run(phases={**STEP, "backward": 3.0}, ranks=2)
    fast = run(ranks=8)
    before, after = Comparison(slow, fast).results()
    assert (before.devices, after.devices) == (2, 8) and before.spec == "GPU"
    assert before.epochs == after.epochs == 4  # 200 steps of 50
    assert before.hours_per_epoch == pytest.approx(3.1 * 50 / 3600, rel=0.01)
    assert before.reduction_ratio == pytest.approx(3.1 / 0.25, rel=0.01) and after.reduction_ratio == 1
    assert after.device_hours_per_epoch == pytest.approx(8 * 0.25 * 50 / 3600, rel=0.01)


def test_pauses_count_in_the_hours_and_in_the_speed():
    paused = Comparison(run(), run(evaluate=(50, 12.5)))
    assert paused.results()[1].hours == pytest.approx(2 * paused.results()[0].hours, rel=0.01)
    assert paused.speedup.value == pytest.approx(0.5, rel=0.01)


def test_the_table_of_phases_ends_with_the_time_that_usual_steps_leave_out():
    """Else the phases say that nothing changed, beneath a speed-up."""
    rows = dict(next(rows for head, rows in _tables(run(evaluate=(50, 12.5)), run()) if "usual step" in head[0]))
    (*usual, same), (paused, _, ratio) = rows["step"], rows["step, all time counted"]
    assert [*map(float, usual)] == pytest.approx([250, 250], rel=0.01) and same == "1.00"
    assert float(paused) == pytest.approx(500, rel=0.01) and float(ratio) == pytest.approx(0.5, rel=0.01)


def _tables(before: Diagnosis, after: Diagnosis) -> list[tuple[list[str], list[tuple[str, list[str]]]]]:
    """Each table's head, and its rows as (first column, the others)."""
    return [(head, [(row[0], row[1:]) for row in rows]) for head, rows in Comparison(before, after).tables()]


def test_runs_of_a_few_steps_have_no_speed_up_in_the_headline():
    both = Comparison(run(steps=10), run(steps=200))
    assert both.headline == "Too short to compare"
    [said] = both.sentences()
    assert said.startswith("too short to compare: ") and " has 10 steps in 2.5 s; as measured " in said
    assert Comparison(run(), run()).headline.startswith("Speed-up 1.00")


def test_the_json_of_runs_of_a_few_steps_judges_no_fix_either():
    before = run(
        phases={**STEP, "data_wait": 0.72}, gpu=25, busy=1.3, settings={"num_workers": 1}, worker_cpu_seconds=0.95
    )
    both = Comparison(before, run(steps=4, log_every=2, settings={"num_workers": 2}))
    found = both.to_dict()
    assert found["speedup"] is None and found["measured_speedup"] is not None and "has 4 steps" in found["too_short"]
    [kept] = found["fix_kept"]
    assert kept["obtained"] is None and kept["is_inside"] is None and "too short to judge" in kept["why"]
    assert Comparison(run(), run()).to_dict()["too_short"] is None


@pytest.mark.parametrize(
    ("kind", "settings", "lacking"),
    [
        ("checkpoint", {"checkpoint_every": 800, "evaluate_every": None}, "hold no checkpoint"),
        ("evaluate", {"evaluate_every": 50}, "hold no evaluation"),
    ],
)
def test_fewer_pauses_are_not_judged_by_a_part_without_one(kind, settings, lacking):
    planted = dict(steps=1000, steps_per_epoch=1000, **{kind: (100, 12.0)})
    first = {"checkpoint_every": 100, "evaluate_every": None} if kind == "checkpoint" else {"evaluate_every": 1}
    before = run(**planted, settings=first)
    [short] = Comparison(before, run(steps=90, steps_per_epoch=1000, settings=settings)).kept()
    assert short.obtained is None and lacking in str(short) and "the first 90 steps" in str(short)
    [long] = Comparison(before, run(steps=1000, steps_per_epoch=1000, settings=settings)).kept()
    assert long.obtained is not None and long.why == ""


def test_a_cure_that_was_taken_up_is_checked_against_what_was_expected():
    before = run(
        phases={**STEP, "data_wait": 0.72}, gpu=25, busy=1.3, settings={"num_workers": 1}, worker_cpu_seconds=0.95
    )
    advised = before.findings[0].fixes[0].value
    assert before.findings[0].kind == "too_few_workers" and advised > 1
    [kept] = Comparison(before, run(settings={"num_workers": advised - 1})).kept()
    assert (kept.setting, kept.before, kept.after, kept.advised) == (
        "hyperparameters.num_workers",
        1,
        advised - 1,
        advised,
    )
    assert kept.obtained.value == pytest.approx(0.96 / 0.25, rel=0.02) and kept.gain.expected.value == pytest.approx(
        kept.obtained.value, rel=0.25
    )
    assert not Comparison(before, run(settings={"num_workers": 0})).kept(), "the other direction"
    assert not Comparison(before, run(settings={"num_workers": 1, "compile": True})).kept()


def test_a_cache_with_more_settings_than_advised_is_the_cache_that_was_advised():
    before = run(phases={**STEP, "teacher_forward": 0.5})
    cache = {**before.findings[0].fixes[0].value, "top_k": 10, "where": None}
    assert Comparison(before, run(settings={"teacher_cache": cache})).kept()


def test_phases_are_shown_an_image_where_the_batch_differs():
    both = Comparison(
        run(), run(phases={name: 2 * seconds for name, seconds in STEP.items()}, settings={"global_batch_size": 512})
    )
    for _, before, after in both.phases():
        assert after == pytest.approx(before, rel=0.02)
    assert "µs an image" in str(both)
    assert both.speedup.value == pytest.approx(1, rel=0.02)


def test_settings_that_differ_are_reported_and_others_are_not():
    both = Comparison(run(), run(settings={"precision": "tf32"}))
    assert both.changed() == [("precision", "bf16", "tf32")]
    assert json.dumps(both.to_dict(), allow_nan=False)


def test_a_run_without_steps_is_compared_as_far_as_it_goes():
    both = Comparison(run(), Diagnosis(plant(phases=None, gpu=50)))
    assert len(both.results()) == 1 and both.speedup is None and "before" in str(both)
    assert str(Comparison(Diagnosis(plant(phases=None)), Diagnosis(plant(phases=None))))


@pytest.mark.parametrize("steps_per_epoch", [3, 5, 7, 50])
def test_epochs_are_counted_from_whatever_steps_were_logged(steps_per_epoch):
    whole = 400 // steps_per_epoch
    planted = plant(phases=STEP, steps=whole * steps_per_epoch, log_every=1, steps_per_epoch=steps_per_epoch)
    assert epochs_done(Evidence(planted)) == pytest.approx(whole)


def in_the_first_epoch(steps: int, **extra: float) -> Diagnosis:
    """A run that was stopped in an epoch of 10,000 steps; with further numbers of each window."""
    planted = plant(phases=STEP, gpu=90, noise=0.001, steps=steps, steps_per_epoch=10_000)
    [one] = planted.ranks
    more = {name: np.full(len(one.step), value) for name, value in extra.items()}
    return Diagnosis(replace(planted, ranks=(replace(one, extra={**one.extra, **more}),)))


def test_a_part_of_the_first_epoch_is_not_counted_as_a_whole_one():
    """Of an endless dataset, or of a run that was stopped before its records told its number of images."""
    both = Comparison(in_the_first_epoch(100), in_the_first_epoch(400))
    assert epochs_done(both.before.evidence) is None and both.results() == []
    assert "reduction ratio" not in str(both) and both.speedup.value == pytest.approx(1, rel=0.01)


def test_epochs_have_the_length_that_the_observer_recorded():
    both = Comparison(*(in_the_first_epoch(steps, epoch_steps=10_000) for steps in (100, 400)))
    before, after = both.results()
    assert (before.epochs, after.epochs) == (0.01, 0.04)
    assert before.reduction_ratio == pytest.approx(1, rel=0.01)
    assert after.hours_per_epoch == pytest.approx(10_000 * 0.25 / 3600, rel=0.01)


@pytest.mark.parametrize("recorded", [0.0, -1.0, float("nan")])
def test_a_recorded_length_that_no_epoch_can_have_is_none(recorded):
    assert epochs_done(in_the_first_epoch(100, epoch_steps=recorded).evidence) is None


def test_the_picture_of_two_runs_shows_their_phases_and_cores_and_what_was_changed(tmp_path):
    before = run(phases={**STEP, "data_wait": 0.72}, busy=7, settings={"num_workers": 16})
    comparison = Comparison(before, run(settings={"num_workers": 1}))
    text = comparison.plot(tmp_path / "both.svg").read_text()
    picture = ElementTree.fromstring(text)
    reported = [element.text for element in picture.iter() if element.tag.endswith("}text")]
    assert "num_workers: 16 before, 1 after" in reported and reported.count("before") == reported.count("after") == 3
    bars = {title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")}
    assert any(re.fullmatch(r"before, data_wait: 2\.8\d* seconds per 1,000 images", bar) for bar in bars), bars
    assert any(re.fullmatch(r"after, backward: 0\.58\d* seconds per 1,000 images", bar) for bar in bars), bars
    assert "prefers-color-scheme: dark" in text and base64.b64encode(text.encode()).decode() in comparison._repr_html_()


def test_the_picture_of_runs_on_gpus_shows_these_too():
    def without_gpus(diagnosis: Diagnosis) -> Diagnosis:
        [host] = diagnosis.measurements.hosts.values()
        return Diagnosis(replace(diagnosis.measurements, hosts={host.name: replace(host, gpus={})}))

    both, neither = Comparison(run(gpu=40), run(gpu=95)), Comparison(without_gpus(run()), without_gpus(run()))
    titles = [re.findall(r"How busy each (\w+) is", comparison.picture) for comparison in (both, neither)]
    assert titles == [["core", "GPU"], ["core"]]


def test_cores_that_were_sampled_only_once_are_no_map_and_the_picture_says_so():
    def once(diagnosis: Diagnosis) -> Diagnosis:
        [host] = diagnosis.measurements.hosts.values()
        cores = {name: Series(core.times[5:6], core.values[5:6]) for name, core in host.cores.items()}
        return Diagnosis(replace(diagnosis.measurements, hosts={host.name: replace(host, cores=cores, gpus={})}))

    one, both = (Comparison(once(run()), after).picture for after in (run(), once(run())))
    assert "busier (before: sampled only once)" in one and one.count(">before<") == 1 and one.count(">after<") == 3
    assert "no map of the cores: before and after sampled them only once" in both and "busier" not in both


def test_a_picture_of_many_cores_and_a_long_run_stays_small(tmp_path):
    large = run(cores=192, busy=100, steps=3000)
    assert (Comparison(large, large).plot(tmp_path / "both.svg")).stat().st_size < 600_000


def test_runs_whose_steps_were_not_measured_have_no_picture(tmp_path):
    nothing = Diagnosis(plant(phases=None))
    with pytest.raises(UserError, match="no step of either run was measured"):
        Comparison(nothing, nothing).plot(tmp_path / "both.svg")
    assert "<img" not in Comparison(nothing, nothing)._repr_html_()


def test_the_exchange_of_gradients_is_apart_from_the_backward_pass_that_it_is_a_part_of():
    evidence = Diagnosis(
        plant(phases={**STEP, "backward": 0.3, "grad_sync": 0.1}, ranks=2, steps=100, noise=0.0)
    ).evidence
    course = summary.course(evidence)
    assert course["backward"] == pytest.approx(2 * course["grad_sync"], rel=0.01)
    assert sum(course.values()) == pytest.approx(evidence.training_seconds, rel=0.01)
    assert summary.apart({"grad_sync": 1.0, "optimizer": 2.0}) == {"grad_sync": 1.0, "optimizer": 2.0}, (
        "its parent is missing"
    )
    assert summary.apart({"backward": 1.0, "grad_sync": 3.0})["backward"] == 0


def test_all_of_the_training_time_is_in_the_course_also_what_passes_beside_the_steps():
    paused = run(evaluate=(50, 12.5), settings={"global_batch_size": 20})
    unit, rows = Comparison(paused, run(settings={"global_batch_size": 20})).course()
    course = {name: seconds for name, *seconds in rows}
    assert unit == "seconds per 1,000 images" and rows[-1][0] == "whole"
    assert course["backward"] == pytest.approx([7.5, 7.5], rel=0.02), "0.15 s a step of 20 images"
    assert course[summary.PAUSES] == pytest.approx([12.5, 0], abs=0.2), "four of 12.5 s in 200 steps of 20 images"
    assert course["whole"] == pytest.approx([25, 12.5], rel=0.02)
    assert course["whole"][0] == pytest.approx(sum(before for before, _ in list(course.values())[:-1]), rel=1e-6)

"""What a scaling study makes of its trials: figures worked out by hand through its tables, charts and advice."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import launcher
from launcher.config.job import StudySection
from launcher.study.question import Trial
from launcher.study.scaling_advice import Offer, advice, offers
from launcher.study.scaling_measures import MEASURED, measure
from launcher.study.scaling_model import Point, fit
from launcher.study.scaling_question import ScalingQuestion
from launcher.study.scaling_sizes import STRONG, WEAK, Line, Size, lines, sizes
from launcher.study.scaling_study import ScalingStudy
from tests.study import made_up
from tests.study.made_up import scaling as study
from tests.study.made_up import scaling_row as row


@pytest.fixture
def known() -> ScalingStudy:
    return made_up.known()


def test_efficiency_is_images_a_second_a_host_beside_the_smallest_size(known):
    weak, strong = known.lines
    assert (weak.kind, weak.batch, strong.kind, strong.batch) == (WEAK, 8, STRONG, 32)
    assert [size.hosts for size in weak.sizes] == [size.hosts for size in strong.sizes] == [1, 2, 4]
    found = [weak.efficiency(size) for size in weak.sizes]
    assert [each.median for each in found] == pytest.approx([1, 0.95, 0.9])
    assert (found[1].low, found[1].high) == pytest.approx((180 / 99 / 2, 0.95)), "each repeat beside its own"
    assert [strong.efficiency(size).median for size in strong.sizes] == pytest.approx([1, 205 / 220, 360 / 440])
    assert weak.sizes[1].exposed == pytest.approx(0.008 / (16 / 190)) and weak.sizes[1].seconds == 16 / 190
    assert strong.sizes[2] == weak.sizes[2], "one size may be of both"


def test_the_tables_tell_what_it_costs_and_what_was_not_measured(known):
    reported = str(known)
    line = next(line for line in reported.splitlines() if line.startswith("weak, batch 8 per process      2 "))
    # 190 images/s on two hosts at $3.60: 3000 images take 15.79 s, a million 1.462 h of two hosts
    for expected in ("190 (180-196)", "84.2", "95.0 % (90.9-95.0)", "9.5 %", "2.0 %", "15.79", "$0.0316", "$10.53"):
        assert expected in line, line
    assert "MFU" not in reported, "of no size is it known"
    utilised = study([{**each, "mfu": "0.4" if each["hosts"] == "2" else ""} for each in known.table])
    found = {
        line.split()[5]: line for line in str(utilised).splitlines() if line.startswith("weak, batch 8 per process  ")
    }
    assert "  MFU  " in str(utilised) and "  40.0 %  " in found["2"] and "40.0 %" not in found["1"]
    missing = study([{**each, "exposed_seconds": "", "training_images": ""} for each in known.table])
    line = next(line for line in str(missing).splitlines() if line.startswith("weak, batch 8 per process      2 "))
    assert line.count("not measured") == 3 and "exposed exchange" not in str(missing) and "deadline" not in str(missing)
    unpriced = study(known.table)
    unpriced.job = unpriced.job.model_copy(update={"compute": unpriced.job.compute.model_copy(update={"price_per_hour": None, "instance_type": None})})  # fmt: skip
    assert str(unpriced).count("no price known") >= 12 and "by host-hours, as no price is known" in str(unpriced)
    assert "$" not in str(unpriced).replace("US$", "")
    assert str(study([])).startswith("no trial has completed")


def test_hosts_that_share_cores_are_shown_and_not_judged():
    rows = [row(1, 8, 1, 100), row(2, 16, 1, 180, exposed_seconds=0.005), row(4, 32, 1, 190, exposed_seconds=0.02)]
    found = study(rows, "process", mode="weak")
    [line] = found.lines
    assert [size.shares_cores for size in line.sizes] == [False, False, True] and line.efficiency(line.sizes[2]) is None
    shown = next(each for each in str(found).splitlines() if each.startswith("weak, batch 8 per process      4 "))
    assert "shares cores" in shown and "4 hosts" not in found.verdict.splitlines()[0]
    assert [each.point.hosts for each in found.held_out] == [1, 2]
    crowding = found.model is not None and found.model.crowding > 0
    most = 1 if crowding else 2  # hosts that slowed each other say nothing of hosts with a machine each
    assert all(offer.measured == (offer.hosts <= most) for offer in found.offers(line)), "of 4 hosts the model speaks"
    assert crowding and "predicted with a machine per host" in str(found.offers(line)[1])
    assert "hosts share cores</text>" in found.charts()
    crowded = study([{**each, "threads": "2"} for each in rows], "process", mode="weak")
    assert [size.shares_cores for size in crowded.lines[0].sizes] == [False, True, True]
    assert "fewer than two sizes have cores of their own" in crowded.verdict
    fed = study([{**each, "data_workers": "1"} for each in rows], "process", mode="weak")
    assert [size.shares_cores for size in fed.lines[0].sizes] == [False, True, True]
    everything = study([{**each, "threads": "4"} for each in rows], "process", mode="weak")
    assert everything.model is None and everything.lines[0].first is None and "nothing to fit" in str(everything)


def test_a_single_size_is_called_so_and_a_size_that_is_held_out_twice_is_not_counted_as_two(known):
    alone = study([row(1, 8, repeat, 100) for repeat in (1, 2, 3)], hosts=[1], mode="weak")
    assert alone.verdict.splitlines()[0] == "weak, batch 8 per process: no verdict, because only one size was measured"
    assert len(known.sizes) == 5
    assert "its error over 10 predictions of held-out sizes is" in known.verdict


def test_hosts_that_crowd_a_machine_are_told_apart_from_those_that_wait_for_each_other():
    """Alone 10 ms an image, beside another 11; the exchange takes 4 ms a step of 8 or 16 images, and one of 20 MB is bandwidth."""
    rows = [row(1, 8, 1, 100), row(1, 16, 1, 100)]
    rows += [row(2, 16, 1, 16 / 0.092, exposed_seconds=0.004), row(2, 32, 1, 32 / 0.18, exposed_seconds=0.004)]
    found = study(rows, "process", mode="weak", batches=[8, 16])
    assert found.model.crowding == pytest.approx(0.001) and found.model.transfer(2) > 0.0039
    first, second = found.verdict.splitlines()[:2]
    assert "speed-up 1.74 from 1 to 2 hosts, efficiency 87.0 %; 4 % of the step is exposed exchange" in first
    assert "the rest of the step takes 10 % longer than on 1 host" in first
    assert "with a machine per host the model predicts 95.2 %" in first and "97.6 %" in second
    assert "Each further host on this machine adds 1 ms an image" in str(found)
    assert found.model.step(2, 8).seconds == pytest.approx(0.084)


@pytest.mark.parametrize(("address", "neighbours"), [("", [0, 0]), ("http://127.0.0.1:4566", [0, 1])])
def test_hosts_of_an_emulator_are_neighbours_on_one_machine(monkeypatch, address, neighbours):
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    found = study([row(1, 8, 1, 100), row(2, 16, 1, 180, exposed_seconds=0.005)], mode="weak")
    assert [each.point.neighbours for each in found.held_out] == neighbours


def test_repeats_that_differ_much_are_called_noisy(known):
    assert "noisy" not in known.verdict, "nothing differs by more than a tenth"
    known.table += [row(1, 32, 4, 60)]
    assert "noisy: repeats of 1 host, batch 32, differ by 83 %" in study(known.table).verdict


def test_the_advice_answers_deadline_and_budget_by_hand(known):
    """36,000 images: 0.1 h on one host for $0.36, 0.0526 h on two for $0.379, 0.0278 h on four for $0.40."""
    weak = known.lines[0]
    choices = known.offers(weak)
    assert [offer.hosts for offer in choices if offer.measured] == [1, 2, 4] and choices[-1].hosts == 16
    assert [offer.hours for offer in choices if offer.measured] == pytest.approx([0.1, 36000 / 190 / 3600, 1 / 36])
    assert [offer.usd for offer in choices if offer.measured] == pytest.approx([0.36, 0.3789, 0.4], abs=1e-4)
    reported = known.verdict
    assert "weak, batch 8 per process, deadline of 0.06 h: 2 hosts, 0.0526 h, $0.38, measured" in reported
    assert "weak, batch 8 per process, budget of $0.35: no size fits; the cheapest is 1 host, 0.1 h, $0.36" in reported
    assert (
        "weak, batch 8 per process, cheapest: 1 host" in reported
        and "weak, batch 8 per process, fastest: 16 hosts" in reported
    )
    assert "predicted" in reported and "Hours are for 12 epochs" in reported
    strong = known.offers(known.lines[1])
    assert [offer.hosts for offer in strong] == [1, 2, 4, 8, 16], "what 32 images divide by"


def test_advice_names_the_fewest_hosts_in_time_and_the_fastest_in_the_budget():
    made = [Offer(hosts, rate, True, 360_000, 10.0) for hosts, rate in ((1, 100), (2, 190), (4, 320))]
    assert [round(offer.hours, 3) for offer in made] == [1, 0.526, 0.312] and [
        round(offer.usd, 2) for offer in made
    ] == [10, 10.53, 12.5]
    reported = advice(made, 0.6, 11)
    assert reported[0].startswith("deadline of 0.6 h: 2 hosts") and "budget of $11.00: 2 hosts" in reported[1]
    assert reported[2].startswith("cheapest: 1 host,") and reported[3].startswith("fastest: 4 hosts")
    late = advice(made, 0.1, 5)
    assert "no size meets it; the fastest is 4 hosts" in late[0] and "no size fits; the cheapest is 1 host" in late[1]
    unpriced = advice([Offer(1, 100, True, 360_000, None)], None, 5)
    assert "no price known; set compute.price_per_hour" in unpriced[0] and "1 host-hours" in unpriced[1]
    beyond = fit([Point(hosts=1, batch=8, seconds=0.08)], 1e6)
    alone = Line(WEAK, 8, (Size(1, 8, (row(1, 8, 1, 100),)),))
    assert [offer.hosts for offer in offers(alone, beyond, 1, 1000, None)] == [1], "no exchange was measured"


def test_what_the_ranks_recorded_becomes_a_line_of_the_table():
    """Two ranks, windows of five steps: the first is the warm-up; the median of three means over the ranks is told."""

    def rank(*, step: list[float], sync: list[float]) -> dict[str, object]:
        seconds = {
            "step": np.array(step),
            "backward": np.array([0.06] * 4),
            "data_wait": np.array([0.01] * 4),
            "grad_sync": np.array(sync),
        }
        return {"step": np.array([5, 10, 15, 20]), "seconds": seconds, "extra": {"steps": np.array([5.0] * 4), "memory_gib": np.array([1.0, 2, 2, 2])}}  # fmt: skip

    ranks = [
        rank(step=[9, 0.1, 0.3, 0.2], sync=[math.nan, 0.02, 0.02, 0.02]),
        rank(step=[9, 0.1, 0.3, 0.2], sync=[9, 0.04, 0.04, 0.04]),
    ]
    result = {
        "settings": {"global_batch_size": 16, "gradient_compression": "none"},
        "world_size": 2,
        "parameters": 1000,
    }
    facts = {"threads": 1, "num_workers": 0, "backend": "gloo", "device": "cpu"}
    found = measure(ranks, facts, result)
    assert found["images_per_second"] == pytest.approx(80) and found["step_seconds"] == pytest.approx(0.2)
    assert found["exposed_seconds"] == pytest.approx(0.03) and found["backward_seconds"] == pytest.approx(0.03)
    assert (found["counted_steps"], found["gradient_bytes"], found["memory_gib"]) == (15, 4000, 2)
    assert set(found) == set(MEASURED)
    assert found["mfu"] is None and measure(ranks, facts, {**result, "mfu": 0.4})["mfu"] == 0.4
    half = {**result, "settings": {"global_batch_size": 16, "gradient_compression": "bf16"}}
    assert measure(ranks, facts, half)["gradient_bytes"] == 2000
    for each in ranks:
        del each["seconds"]["grad_sync"]
    assert measure(ranks, facts, result)["exposed_seconds"] is measure(ranks, facts, result)["backward_seconds"] is None
    assert measure(ranks[:1], facts, {**result, "world_size": 1})["exposed_seconds"] == 0
    with pytest.raises(launcher.UserError, match="recorded no steps after its 5 warm-up steps"):
        measure([{**ranks[0], "step": np.array([5]), "extra": {"steps": np.array([5.0])}}], facts, result)


def test_sizes_take_turns_and_one_that_is_weak_and_strong_runs_once():
    values = {
        "name": "x",
        "script": "train_segmentation.py",
        "hyperparameters": {"global_batch_size": 16, "max_steps": 3, "log_every": 1},
    }
    job = launcher.from_values(values)
    grid = StudySection(hosts=[1, 2], batches=[8], steps=12, repeats=2)

    def trials(grid: StudySection, on: str = "process", base: launcher.Job = job) -> list[Trial]:
        return list(ScalingQuestion(job=base, base=base, on=on, small=False, grid=grid).trials())

    made = [(trial.key["hosts"], trial.key["global_batch"]) for trial in trials(grid)]
    assert made == [(1, 8), (1, 16), (2, 16), (2, 16), (1, 16), (1, 8)]
    first = trials(grid)[0].job
    assert (first.compute.instance_count, first.study) == (1, None)
    assert first.hyperparameters | {"epochs": 0, "evaluate_every": 0, "checkpoint_every": 0} == {
        "global_batch_size": 8,
        "max_steps": 20,
        "log_every": 5,
        "epochs": 0,
        "evaluate_every": 0,
        "checkpoint_every": 0,
    }
    four = job.model_copy(
        update={"distribution": "torchrun", "compute": job.compute.model_copy(update={"processes_per_host": 4})}
    )
    many = [trial.key["global_batch"] for trial in trials(grid.model_copy(update={"repeats": 1}), base=four)]
    assert many == [32, 16, 64, 16], "four processes a host"
    strong = StudySection(hosts=[1, 2], mode="strong", batches=[], repeats=1)
    assert [trial.key["global_batch"] for trial in trials(strong)] == [16, 16]
    weak = StudySection(hosts=[1, 2], mode="weak", batches=[3, 5], repeats=1)
    assert [trial.key["global_batch"] for trial in trials(weak)] == [3, 5, 6, 10]
    found = sizes([row(hosts, batch, 1, 10) for hosts, batch in ((1, 3), (1, 5), (2, 6), (2, 10))], None)
    assert [(line.batch, [size.hosts for size in line.sizes]) for line in lines(found, [3, 5], 1, None)] == [
        (3, [1, 2]),
        (5, [1, 2]),
    ]


def test_hosts_of_an_emulator_that_run_fewer_processes_than_planned_still_form_a_line():
    """A host of eight GPUs, planned with 4 images each, runs as one process with 32 on a machine without a GPU."""
    found = sizes([row(hosts, 32 * hosts, 1, 10) for hosts in (1, 2)], None)
    [line] = lines(found, [4], 8, None)
    assert (str(line), [size.hosts for size in line.sizes]) == ("weak, batch 32 per process", [1, 2])
    assert line.global_batch(3) == 96 and line.efficiency(line.sizes[1]) is not None


SVG = "{http://www.w3.org/2000/svg}"


def test_the_charts_hold_every_size_with_its_range_and_a_straight_ideal_line(known, tmp_path):
    drawn = ElementTree.fromstring(known.plot(tmp_path / "x.svg").read_text())
    words = [item.text for item in drawn.iter(f"{SVG}text")]
    for expected in (
        "Throughput by the number of hosts",
        "images/s",
        "% of the smallest size's",
        "hosts",
        "weak, batch 8 per process",
    ):
        assert expected in words, expected
    tips = [item.text for item in drawn.iter(f"{SVG}title")]
    assert "weak, batch 8 per process, 2 hosts, measured: 190 images/s, 180 to 196, n = 3" in tips
    assert any(tip.startswith("weak, batch 8 per process, 8 hosts, predicted: ") for tip in tips)
    assert "prefers-color-scheme: dark" in drawn.find(f"{SVG}style").text
    width, height = float(drawn.get("width")), float(drawn.get("height"))
    dots = {
        title.text: (float(dot.get("cx")), float(dot.get("cy")))
        for dot in drawn.iter(f"{SVG}circle")
        if (title := dot.find(f"{SVG}title")) is not None  # the legend's have none
    }
    assert all(0 < x < width and 0 < y < height for x, y in dots.values())
    ideal = [line.get("points") for line in drawn.iter(f"{SVG}polyline") if line.get("stroke-dasharray") == "5 4"]
    start, end = (tuple(map(float, point.split(","))) for point in ideal[0].split())
    one, two = (
        next(
            at
            for tip, at in dots.items()
            if tip.startswith(f"weak, batch 8 per process, {n} hosts, measured") and "images/s" in tip
        )
        for n in (1, 2)
    )
    assert start == pytest.approx(one, abs=0.2)
    slope = (end[1] - start[1]) / (end[0] - start[0])
    assert two[1] - (start[1] + slope * (two[0] - start[0])) > 0.5, "what was lost lies below the ideal line"
    assert (start[1] - two[1]) / (slope * (start[0] - two[0])) == pytest.approx(0.9, rel=0.02), (
        "90 of the next 100 images/s"
    )


def test_a_notebook_shows_charts_tables_and_the_verdict(known):
    page = known._repr_html_()
    assert page.count("<img ") == 1 and page.count("<table>") == 3 and ">190 (180-196)</td>" in page
    assert "no trial has completed" in study([])._repr_html_()

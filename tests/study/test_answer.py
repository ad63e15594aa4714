"""What a study makes of its trials: the post's own figures through our arithmetic, the verdicts, the machines, and the charts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import launcher
from launcher.config.job import StudySection
from launcher.show.spread import Spread
from launcher.study import preprocessing_demand, sizing
from launcher.study.preprocessing_cells import COMPUTE_BOUND, INPUT_BOUND, PARTLY, Cell, cells, improvement
from launcher.study.preprocessing_measures import measure, percentile
from launcher.study.preprocessing_question import PIPELINES, PreprocessingQuestion
from launcher.study.preprocessing_study import PreprocessingStudy
from launcher.study.preprocessing_verdict import sentences
from tests.study import made_up
from tests.study.made_up import JOB
from tests.study.made_up import preprocessing_row as row

PUBLISHED = {
    "resnet18": [48.88, 57.21, 65.95, 72.59],
    "resnet50": [35.37, 40.14, 43.00, 47.76],
    "resnet152": [28.15, 32.08, 30.34, 33.95],
}
"""The post's column of improvements in percent. Of its third row for ResNet152 the seconds give 30.35."""

LOADS = [1, 4, 8, 12]
A, B = "cpu_reference", "dali"


@pytest.fixture
def post() -> PreprocessingStudy:
    return made_up.post()


def test_the_posts_seconds_give_the_posts_improvements(post):
    found = {(cell.model, cell.load, cell.pipeline): cell for cell in post.cells}
    assert len(found) == 24
    for model, percents in PUBLISHED.items():
        for load, percent in zip(LOADS, percents):
            less = improvement(found[model, load, A], found[model, load, B])
            assert less.median == pytest.approx(percent, abs=0.011)
    line = next(line for line in str(post).splitlines() if line.startswith("resnet18") and " 41.67 " in line)
    assert line.split() == ["resnet18", "1", "41.67", "21.30", "48.88"]
    assert "One run has no spread" in str(post) and "may be chance" in post.verdict


def test_repeats_are_reported_as_median_and_range_and_an_overlap_is_no_victory():
    def of(pipeline: str, *seconds: float) -> list[dict[str, str]]:
        return [row("resnet18", pipeline, 1, repeat, value) for repeat, value in enumerate(seconds, 1)]

    apart = cells([*of(A, 10, 12, 11), *of(B, 5, 5.5, 6)], ["resnet18"], [A, B], [1])
    less = improvement(*apart)
    assert (
        less.median == 50 and less.low == pytest.approx(45.45, abs=0.01) and less.high == pytest.approx(54.17, abs=0.01)
    )
    assert sentences(apart, [A, B], JOB)[0].startswith(
        "resnet18, load 1: dali takes 50.00 % less time than cpu_reference ("
    )
    overlapping = cells([*of(A, 10, 12, 11), *of(B, 9.5, 10.5, 10)], ["resnet18"], [A, B], [1])
    assert (
        sentences(overlapping, [A, B], JOB)[0]
        == "resnet18, load 1: no pipeline is clearly faster than cpu_reference, which is input-bound"
    )
    three = [*of(A, 10, 10.1, 10.2), *of(B, 7, 7.5, 10.05), *of("cpu", 8, 8.1, 8.2)]
    assert sentences(cells(three, ["resnet18"], [A, B, "cpu"], [1]), [A, B, "cpu"], JOB)[0].startswith(
        "resnet18, load 1: cpu takes 19.80 % less time than cpu_reference ("
    ), "the fastest overlaps with the first, another does not"
    [cell] = cells(of(A, 10, 12, 11), ["resnet18"], [A, B], [1])
    assert (cell.seconds.median, cell.seconds.low, cell.seconds.high) == (11, 10, 12)


@pytest.mark.parametrize(
    ("rate", "alone", "wait", "expected"),
    [
        (100, 130, 0.0, INPUT_BOUND),
        (100, 110, 0.9, PARTLY),
        (100, 102, 0.6, COMPUTE_BOUND),
        (100, 95, 0.6, COMPUTE_BOUND),
        (100, None, 0.25, INPUT_BOUND),
        (100, None, 0.06, PARTLY),
        (100, None, 0.04, COMPUTE_BOUND),
    ],
)
def test_a_verdict_follows_the_models_own_speed_and_the_waiting_only_without_it(rate, alone, wait, expected):
    """A host that waits for a batch while its GPU still computes loses nothing."""
    line = row("resnet18", A, 1, 1, 9469 / rate, data_wait_share=wait)
    assert Cell("resnet18", A, 1, (line,), None if alone is None else Spread((alone,))).verdict == expected


def test_a_machines_cores_and_the_models_demand_decide_who_is_fed_and_at_which_price(post, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "vision-launcher/prices.json"
    cache.parent.mkdir()
    cache.write_text('{"us-west-2": {"ml.p3.2xlarge": {"usd": 3.6, "read": "2026-11-21"}}}')
    [cell] = [cell for cell in post.cells if (cell.model, cell.load, cell.pipeline) == ("resnet18", 12, A)]
    assert cell.core_rate == pytest.approx(100) and cell.gpu_memory_left == 11.5
    demand = {"V100": sizing.Demand(500, "measured")}
    found = sizing.fit("ml.p3.2xlarge", 100, demand, post.job)
    assert (found.fed, found.share) == (700, 1.0)  # 8 vCPUs, one of them for the training process
    assert found.usd_per_million == pytest.approx(3.6 / 3600 / 500 * 1e6)
    starving = sizing.fit("ml.p3.2xlarge", 50, demand, post.job)
    assert starving.share == 0.7 and starving.usd_per_million == pytest.approx(3.6 / 3600 / 350 * 1e6)
    assert sizing.fit("ml.p3.16xlarge", 50, demand, post.job).usd_per_million is None, "no price was read"
    assert sizing.fit("ml.g5.xlarge", 50, demand, post.job).share is None, "of that GPU nothing is known"
    reported = str(post).splitlines()
    line = next(line for line in reported if line.startswith("resnet18") and "ml.p3.2xlarge" in line)
    assert "473 (measured)" in line and "cpu_reference, dali" in line and "$2.11 / $2.11" in line
    line = next(line for line in reported if line.startswith("resnet152") and "ml.p3.2xlarge" in line)
    assert "82.8 (the post's)" in line
    given = next(line for line in reported if line.startswith("ml.p3.2xlarge")).split()
    assert given == ["ml.p3.2xlarge", "V100", "8", "700", "14000"]
    assert "11.5" in str(post), "GiB left on the GPU"


def test_the_advice_is_the_cheapest_machine_that_feeds_the_model_or_the_nearest(post, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, advice = post.table, post.verdict.splitlines()[-3:]
    assert advice[0] == (
        "instance type for resnet18, load 12: ml.p3.2xlarge, no price known, only with PyTorch 2.6.0 or older, fed by cpu_reference and "
        "dali. Its V100 takes 473 images/s (measured); its CPUs prepare for each GPU 700 with cpu_reference, 14000 with dali"
    )
    assert advice[2].startswith("instance type for resnet152, load 12: ml.p3.2xlarge, no price known, only")
    post.table = [{**line, "gpu": "NVIDIA A10G"} for line in post.table]
    newer = post.verdict.splitlines()[-3]
    assert "PyTorch" not in newer and re.search(r": ml\.g5\.\w+, \$[\d.]+ a million images, fed by", newer), newer
    post.table = before
    slow = [{**line, "input_cpu_seconds_per_image": "0.1" if line["pipeline"] == A else "0.05"} for line in post.table]
    post.table = [{**line, "input_cpu_seconds_per_image": ""} if line["part"] == "model" else line for line in slow]
    starved = post.verdict.splitlines()[-3]
    assert (
        "ml.p3dn.24xlarge, no price known, only with PyTorch 2.6.0 or older, no pipeline feeds it, dali comes closest"
        in starved
    )
    assert "110 with cpu_reference, 220 with dali" in starved
    post.table = [{**line, "gpu": ""} for line in post.table]
    post.job = JOB.model_copy(update={"hyperparameters": {"image_size": 64, "probe_image_size": 224}})
    assert "takes 449 images/s (the post's)" in post.verdict, "the input side alone was measured at the post's size"
    post.job = JOB.model_copy(update={"hyperparameters": {"image_size": 64}})
    assert "1000 images/s need these vCPUs: 100.0 with cpu_reference" in post.verdict
    assert "dali is left out: its CPU load beside a GPU was not measured" in str(post)
    post.table = [{**line, "input_cpu_seconds_per_image": ""} for line in post.table]
    assert post.verdict.splitlines()[-1] == (
        "instance type for resnet152, load 12: unknown, because the input side alone was not measured"
    )


def test_the_posts_speeds_and_cudas_names_of_gpus():
    assert sizing.post_rate("resnet18") == pytest.approx(9469 / 21.08)
    names = {"Tesla V100-SXM2-16GB": "V100", "NVIDIA A100-SXM4-40GB": "A100", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S"}
    names |= {"Tesla T4": "T4", "NVIDIA A10G": "A10G", "NVIDIA RTX PRO 6000 Blackwell": "RTX PRO 6000", "GeForce": None}
    assert {name: sizing.catalog_gpu(name) for name in names} == names
    types = sizing.instance_types()
    assert {"ml.p3.2xlarge", "ml.p3dn.24xlarge", "ml.g5.xlarge", "ml.g5.16xlarge"} <= set(types)
    assert not [name for name in types if name.startswith("ml.p2.")], "no image of PyTorch 2 runs there"


def test_what_is_not_known_is_said_to_be_so(post):
    post.table = [
        {**line, "gpu": "", "gpu_memory_gib": "", "gpu_used_gib": "", "cores": "2.0"}
        for line in post.table
        if line["part"] == "training"
    ]
    reported = str(post)
    assert "There is no GPU: model and preprocessing share the 2 cores" in reported
    assert (
        next(line for line in reported.splitlines() if line.startswith("resnet18") and A in line).count("not measured")
        >= 4
    )
    assert "449 (the post's)" in reported and "(measured)" not in reported
    post.job = post.job.model_copy(update={"hyperparameters": {"image_size": 64}})
    reported = str(post)
    assert (
        "(the post's)" not in reported and "a GPU's speed with resnet18, resnet50, resnet152 at 64 pixels" in reported
    )
    post.table, post.failed = [], ["resnet18, dali, load 1, repeat 1: Failed"]
    assert str(post) == "no trial has completed\nresnet18, dali, load 1, repeat 1: Failed"


def lines_of_a_run() -> list[dict[str, float]]:
    """Two epochs of 10 steps of 32 images, a line every 5 steps; the warm-up and the first epoch are slow."""
    rates = {5: 100, 10: 320, 15: 640, 20: 640}
    common = {"rank": 0, "data_wait_s": 0.01, "cpu_s": 0.08, "memory_gib": 1.0}
    lines = [{**common, "epoch": 1 + (step > 10), "step": step, "images/s": rate} for step, rate in rates.items()]
    return [*lines[:2], {"rank": 0, "epoch": 1, "step": 10, "evaluate_s": 3.0}, *lines[2:]]


def test_an_epochs_seconds_leave_out_warm_up_first_epoch_and_validation():
    result = {
        "settings": {"global_batch_size": 32, "max_steps": None},
        "steps": 20,
        "world_size": 1,
        "training_images": 325,
    }
    found = measure(lines_of_a_run(), {**result, "hardware": {"cores": 4.0}})
    assert found["images_per_second"] == pytest.approx(640) and found["epoch_seconds"] == pytest.approx(325 / 640)
    assert found["first_epoch_seconds"] == pytest.approx(5 * 32 / 100 + 5 * 32 / 320)
    assert found["data_wait_share"] == pytest.approx(0.01 / 0.05) and found["cpu_share_p50"] == pytest.approx(0.4)
    assert (found["evaluate_seconds"], found["counted_steps"], found["gpu"]) == (3.0, 10, None)
    assert found["mfu"] is None and measure(lines_of_a_run(), {**result, "mfu": 0.4})["mfu"] == 0.4
    first_only = measure(lines_of_a_run()[:2], result)
    assert first_only["images_per_second"] == pytest.approx(320), "without a second epoch, the first after its warm-up"
    assert first_only["cpu_share_p50"] is None, "cores are not known"
    with pytest.raises(launcher.UserError, match="logged no speed after its 5 warm-up steps, of 20"):
        measure(lines_of_a_run()[:1], result)


def test_percentiles_lie_between_the_nearest_ranks():
    assert percentile([4, 1, 3, 2], 50) == 2.5 and percentile([1, 2, 3, 4, 5], 90) == pytest.approx(4.6)
    assert percentile([7], 99) == 7 and percentile([], 50) is None


def test_the_grid_takes_turns_and_measures_each_model_alone():
    job = launcher.from_values(
        {
            "name": "x",
            "script": "train_classifier.py",
            "hyperparameters": {"model": "old", "epochs": 2, "augmentation_load": 3},
        }
    )
    grid = StudySection(models=["resnet18"], loads=[1, 12], pipelines=["cpu_reference", "cpu_composed"], repeats=2)
    made = list(PreprocessingQuestion(job=job, base=job, on="process", small=False, grid=grid).trials())
    assert len(made) == 2 * (1 + 2 * 2)
    assert [trial.key["pipeline"] for trial in made] == [
        "",
        A,
        "cpu_composed",
        A,
        "cpu_composed",
        "",
        "cpu_composed",
        A,
        "cpu_composed",
        A,
    ]
    alone, first = made[0].job.hyperparameters, made[4].job.hyperparameters
    assert alone == {"epochs": 2, "model": "resnet18", "preprocessing": A, "repeat_batch": True}
    assert first == {
        "epochs": 2,
        "model": "resnet18",
        "preprocessing": "cpu",
        "compose_augmentation": True,
        "augmentation_load": 12,
        "probe_input_images": 256,
    }
    assert all(trial.job.study is None for trial in made) and set(PIPELINES) >= set(grid.pipelines)


SVG = "{http://www.w3.org/2000/svg}"


def test_the_charts_are_well_formed_and_hold_every_bar_label_and_unit(post, tmp_path):
    drawn = ElementTree.fromstring(post.plot(tmp_path / "post.svg").read_text())
    words = [item.text for item in drawn.iter(f"{SVG}text")]
    for expected in (
        "seconds an epoch",
        "% of an epoch's time",
        "augmentation load",
        A,
        B,
        "resnet18",
        "resnet152",
        "12",
    ):
        assert expected in words, expected
    assert words.count("resnet50") == 2 and "41.7" in words and "72.6" in words
    tips = [item.text for item in drawn.iter(f"{SVG}title")]
    assert len([tip for tip in tips if tip.startswith("resnet")]) == 24 + 12
    assert "resnet18, augmentation load 1, cpu_reference: 41.7 seconds an epoch, 41.7 to 41.7, n = 1" in tips
    assert "prefers-color-scheme: dark" in drawn.find(f"{SVG}style").text
    width, height = float(drawn.get("width")), float(drawn.get("height"))
    bars = [bar for bar in drawn.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    boxes = [tuple(float(bar.get(name)) for name in ("x", "y", "width", "height")) for bar in bars]
    assert all(x >= 0 and x + wide <= width and y >= 0 and y + high <= height for x, y, wide, high in boxes)
    assert len({box[0] for box in boxes[:24]}) == 24, "no bar lies on another"
    by_tip = {bar.find(f"{SVG}title").text: box for bar, box in zip(bars, boxes)}
    heights = {
        value: next(box[3] for tip, box in by_tip.items() if f": {value} seconds" in tip) for value in ("167", "41.7")
    }
    assert heights["167"] / heights["41.7"] == pytest.approx(166.96 / 41.67, rel=0.01), "bars begin at 0"


def test_a_notebook_shows_tables_and_charts(post):
    page = post._repr_html_()
    assert page.count("<table>") == 5 and page.count("<img ") == 1 and "<td>48.88</td>" in page


def test_the_posts_table_is_the_posts():
    rows = [
        (model, load, *pair) for model, by_load in sizing.post()["models"].items() for load, pair in by_load.items()
    ]
    assert len(rows) == 12 and ("resnet50", 8, 81.22, 46.29) in rows and ("resnet152", 12, 173.18, 114.38) in rows


@pytest.mark.parametrize("processes", [1, 4])
def test_a_models_speed_is_that_of_one_gpu(processes):
    measured = {"gpu": "NVIDIA A10G", "gpu_memory_gib": 22.0, "gpu_used_gib": 4.5, "world_size": processes}
    rows = [row("resnet18", part, "1" if part else "", 1, 1.0, **measured) for part in ("cpu", "")]
    grid = StudySection(models=["resnet18"], loads=[1], pipelines=["cpu"], repeats=1)
    found = PreprocessingStudy(JOB, "process", Path("x.csv"), grid, rows)
    demands = preprocessing_demand.demands(found.cells, JOB)["resnet18"]
    assert [round(one.images_per_second) for one in demands.values() if one.source == "measured"] == [9469 // processes]

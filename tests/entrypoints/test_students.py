"""Several students of one pass of the teacher: each learns to the bit what it learns alone, and all are kept and delivered."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from training.engine import memory
from training.engine.memory import Footprint
from training.engine.random_state import RandomNumbers
from training.runtime import metrics
from training.settings import check
from training.settings.distillation import DistillationSettings
from training.settings.students import MAX_STUDENTS

from tests.entrypoints.student_runs import KILLED_AT, STUDENTS, alone, channels, curve, lines, run_all, weights

CPU = torch.device("cpu")

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, STUDENTS),
    "two processes": (2, {}, STUDENTS),
    "two processes, accumulation, mixup": (2, {"batch_size_per_device": 2, "mixup": 0.5}, STUDENTS),
    "two processes, zero, teacher cache": (2, {"zero": True, "teacher_cache": {"views": 1, "top_k": 2}}, STUDENTS),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return channels(tmp_path_factory.mktemp("channels"))


def same(folder: Path, other: Path, name: str, other_name: str) -> None:
    """Curves and weights of a student in two runs are equal to the bit."""
    assert curve(folder, name) == curve(other, other_name) and len(curve(folder, name)) == 10
    first, second = weights(folder, name), weights(other, other_name)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW if "," in case else ()) for case in CASES])
def test_each_student_has_the_curve_and_weights_of_its_own_run_to_the_bit(tmp_path, data, case):
    size, shared, students = CASES[case]
    cached = "teacher_cache" in shared  # a run without a teacher would draw other views than one with a cache of them
    compared = {name: own for name, own in students.items() if not (cached and name == "labels")}
    own = {name: {**shared, **values} for name, values in alone(compared).items()}
    done = run_all(tmp_path, data, {"together": {**shared, "students": students}, **own}, size=size)
    assert [one.returncode for one in done] == [0] * size, done[0].stderr
    assert all(len(curve(tmp_path / "together", name)) == 10 for name in students)
    for name, values in alone(compared).items():
        same(tmp_path / "together", tmp_path / name, name, name if "students" in values else "")
    first, second = (weights(tmp_path / "together", name) for name in [*students][:2])
    assert first.keys() != second.keys(), "they are different models"


@pytest.mark.parametrize("size", [1, 2])
def test_students_that_are_killed_in_mid_epoch_go_on_to_the_bit(tmp_path, data, size):
    whole = {"students": STUDENTS}
    assert [one.returncode for one in run_all(tmp_path, data, {"undisturbed": whole}, size=size)] == [0] * size
    killed = run_all(tmp_path, data, {"resumed": whole}, size=size, killed=True)
    assert -9 in [one.returncode for one in killed]
    assert max(line["step"] for line in lines(tmp_path / "resumed")) == KILLED_AT - 1
    done = run_all(tmp_path, data, {"resumed": whole}, size=size)
    assert "resuming from the checkpoint of step 3" in done[0].stdout, done[0].stderr
    for name in STUDENTS:
        before = {step: values for step, values in curve(tmp_path / "undisturbed", name).items() if step > 3}
        assert curve(tmp_path / "resumed", name) == before and len(before) == 7
        first, second = (weights(tmp_path / run, name) for run in ("undisturbed", "resumed"))
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture(scope="module")
def together(tmp_path_factory, data) -> Path:
    """The folder of a run with three students."""
    folder = tmp_path_factory.mktemp("runs")
    [done] = run_all(folder, data, {"together": {"students": STUDENTS, "export_onnx": True}})
    assert done.returncode == 0, done.stderr
    (folder / "together/log").write_text(done.stdout)
    return folder / "together"


def test_a_checkpoint_of_other_students_is_refused(tmp_path, data, together):
    shutil.copytree(together, tmp_path / "together")
    changed = {**STUDENTS, "shared": {"learning_rate": 0.02}}
    [done] = run_all(tmp_path, data, {"together": {"students": changed}})
    assert done.returncode != 0 and "belongs to another job: students is" in done.stderr


def test_each_student_is_a_model_of_its_own_with_its_card_and_onnx(together):
    assert sorted(path.name for path in (together / "model").iterdir()) == sorted(STUDENTS)
    for name, own in STUDENTS.items():
        folder = together / "model" / name
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert all(torch.equal(value, weights(together, name)[key]) for key, value in loaded.state_dict().items())
        assert type(loaded).__name__ == ("ResNet" if name == "other" else "VisionTransformer")
        card = (folder / "README.md").read_text()
        assert f"| method | {own.get('method', 'kl')} |" in card
        assert (folder / "model.onnx").is_file()


def test_the_result_has_all_students_in_one_table(together):
    result = json.loads((together / "data/algo-1/result.json").read_text())
    assert result["students"].keys() == STUDENTS.keys() and "model" not in result
    assert {own["model"] for own in result["students"].values()} == {"vit_tiny_patch16_224", "resnet10t"}
    last = lines(together)
    for name, own in result["students"].items():
        said = [line[f"{name}/validation_accuracy"] for line in last if f"{name}/validation_accuracy" in line]
        assert own["validation_accuracy"] == said[-1] and own["parameters"] > 0


def test_a_line_says_each_students_loss_and_their_mean_and_sagemaker_finds_them(together):
    import re

    said = [line for line in (together / "log").read_text().splitlines() if line.startswith("epoch ")]
    step, evaluation = said[0], next(line for line in said if "validation_accuracy" in line)
    asked = metrics.sagemaker_metrics([*STUDENTS])
    losses = [float(re.search(asked[f"{name}:loss"], step)[1]) for name in STUDENTS]
    assert float(re.search(asked["loss"], step)[1]) == pytest.approx(sum(losses) / len(losses), abs=2e-4)
    assert len({*losses}) == len(losses) and "teacher_loss" not in step
    for name in STUDENTS:
        assert re.search(asked[f"{name}:validation_accuracy"], evaluation)
    [first, *_] = lines(together)
    assert first["shared/loss"] == pytest.approx((first["shared/label_loss"] + first["shared/teacher_loss"]) / 2)
    assert "labels/teacher_loss" not in first


def test_the_phases_of_a_step_are_sums_over_its_students(together):
    windows = [json.loads(line) for line in (together / "data/algo-1/timeline-0.jsonl").read_text().splitlines()]
    windows = [line for line in windows if line["kind"] == "steps"]
    assert len(windows) == 10
    for window in windows:
        seconds = window["seconds"]
        phases = ("teacher_forward", "student_forward", "loss", "backward", "optimizer")
        assert all(seconds[phase] > 0 for phase in phases)
        assert sum(seconds[phase] for phase in phases) < seconds["step"]


@SLOW
def test_a_probe_measures_the_step_of_all_students(tmp_path, data):
    probed = {"students": STUDENTS, "probe_seconds": 20, "checkpoint_every": None}
    [done] = run_all(tmp_path, data, {"probed": probed})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "probed/data/algo-1/probe.json").read_text())
    assert found["one_batch"] > 0 and found["one_batch_without_teacher"] > 0
    assert {"teacher_forward", "student_forward"} <= found["phases"].keys()


@pytest.mark.parametrize("count", range(1, MAX_STUDENTS + 1))
def test_a_jobs_metrics_stay_within_sagemakers_limits(count):
    names = [f"student_{number:02}" + "x" * 22 for number in range(count)]
    asked = metrics.sagemaker_metrics(names)
    assert len(asked) <= 40
    assert all(f"{name}:validation_accuracy" in asked for name in names)
    assert all(len(name) <= 255 and len(regex) <= 500 for name, regex in asked.items())


def test_students_together_keep_all_weights_and_one_models_activations():
    small = Footprint(weights=10, optimizer=20, average=5, activations=100, casts=7)
    large = Footprint(weights=30, optimizer=0, average=0, activations=40, casts=9)
    both = Footprint(weights=40, optimizer=20, average=5, activations=100, casts=9)
    assert memory.together([small, large]) == both and memory.together([small]) == small


def test_a_models_random_numbers_do_not_depend_on_what_others_draw():
    torch.manual_seed(5)
    undisturbed = torch.rand(4)
    torch.manual_seed(1)
    numbers, before = RandomNumbers(5, CPU), torch.get_rng_state()
    with numbers.drawn():
        first = torch.rand(2)
    torch.rand(3)
    with numbers.drawn():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), undisturbed)
    torch.set_rng_state(before)
    other = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), other), "to make and to use them leaves the process's own numbers alone"


def test_a_mean_over_students_is_said_where_all_have_the_metric():
    found = {"a": {"loss": 1.0, "validation_accuracy": 0.5, "dkd_target": 2.0}, "b": {"loss": 3.0}}
    printed, unprinted = metrics.line_of(found)
    assert printed == {"loss": 2.0, "a/loss": 1.0, "b/loss": 3.0}
    assert unprinted == {"a/validation_accuracy": 0.5, "a/dkd_target": 2.0}
    assert metrics.line_of({"": {"loss": 1.0, "label_loss": math.pi}}) == ({"loss": 1.0, "label_loss": math.pi}, {})


@pytest.mark.parametrize("options", [None, "in_chans", ["in_chans"]])
def test_options_of_a_student_that_are_no_mapping_are_a_mistake_that_is_named(options):
    made, problems = check(
        DistillationSettings, {"students": {"a": {"student": "resnet18", "student_options": options}}}
    )
    assert made is None and [name for name, _, _ in problems] == ["students.a.student_options"]

"""What `compile`, `compile_teacher` and `cuda_graphs` stand for with `auto`."""

from __future__ import annotations

import importlib.util
import shutil
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training.distributed.world import World
from training.engine.compiling import PAYS_FROM, decide_compiling
from training.measure.timeline_record import TimelineRecord
from training.runtime import accelerator
from training.settings.distillation import DistillationSettings, LabellingSettings, TeacherCacheSettings
from training.settings.scripts import ClassifierSettings, TrainingSettings

from launcher.insight import timelines

CUDA, STUDENT = torch.device("cuda", 0), DistillationSettings(student="x")
ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a test")


@dataclass(frozen=True)
class Started:
    """What is asked of a run."""

    settings: TrainingSettings
    world: World
    record: TimelineRecord
    report: Any


@pytest.fixture
def gpu(monkeypatch) -> None:
    """A machine on which everything is there that compiling takes."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(accelerator, "capability", lambda _: (9, 0))
    monkeypatch.setattr(accelerator, "name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name else None)


def decided(
    folder: Path, settings: TrainingSettings, steps: int | tuple[int, int] = PAYS_FROM, **world: Any
) -> tuple[tuple[Any, ...], list[str]]:
    """compile, compile_teacher, cuda_graphs; and what was said."""
    said: list[str] = []
    record = TimelineRecord(folder, ALONE, settings)
    steps = steps if isinstance(steps, tuple) else (steps, steps)
    run = Started(settings, replace(ALONE, **world), record, types.SimpleNamespace(log=said.append))
    chosen, run = decide_compiling(settings, run, trained=steps[0], answered=steps[1])
    assert run.settings is chosen
    names = ("compile", "compile_teacher", "cuda_graphs")
    values = {name: getattr(chosen, name) for name in names if hasattr(chosen, name)}
    read = timelines.read([record.path], 1 << 20).settings
    assert values.items() <= read.items(), "the timeline says what they stand for"
    return tuple(values.values()), said


def test_a_long_run_on_a_gpu_is_compiled_into_graphs_and_says_so(tmp_path, gpu):
    chosen, said = decided(tmp_path, STUDENT, device=CUDA)
    assert chosen == (True, True, True)
    assert said == [
        "compile auto: yes, into CUDA graphs: it pays off over 5,000 steps",
        "compile_teacher auto: yes, into CUDA graphs: it pays off over 5,000 steps",
    ]
    assert decided(tmp_path, ClassifierSettings(model="x"), device=CUDA)[0] == (True, True)


def test_a_short_one_is_not_and_says_why(tmp_path, gpu):
    chosen, said = decided(tmp_path, STUDENT, PAYS_FROM - 1, device=CUDA)
    assert chosen == (False, False, False)
    assert (
        said[0] == "compile auto: no, 4,999 steps are too few for it to pay off; that takes about 5,000"
        and len(said) == 2
    )


def test_a_teacher_that_answers_in_few_steps_is_not_compiled_for_them(tmp_path, gpu):
    chosen, said = decided(tmp_path, STUDENT, (PAYS_FROM, 100), device=CUDA)
    assert chosen == (True, False, True) and said[1].startswith("compile_teacher auto: no, 100 steps")
    chosen, said = decided(tmp_path, replace(STUDENT, compile_teacher=True), (PAYS_FROM, 0), device=CUDA)
    assert chosen == (True, False, True) and len(said) == 2, "there is none"


def test_on_the_cpu_nothing_is_compiled_and_nothing_said(tmp_path):
    assert decided(tmp_path, STUDENT, 10**6) == ((False, False, False), [])


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        (lambda patch: patch.setattr(torch, "__version__", "2.5.1"), "torch 2.5.1 is older than 2.6"),
        (lambda patch: patch.setattr(accelerator, "capability", lambda _: (8, 0)), "it was measured on an H100 only"),
        (lambda patch: patch.setattr(accelerator, "capability", lambda _: (10, 0)), "it was measured on an H100 only"),
        (lambda patch: patch.setattr(importlib.util, "find_spec", lambda _: None), "Triton is not installed"),
        (lambda patch: patch.setattr(shutil, "which", lambda _: None), "there is no C compiler"),
    ],
)
def test_what_compiling_lacks_is_said(tmp_path, gpu, monkeypatch, missing, why):
    missing(monkeypatch)
    chosen, said = decided(tmp_path, STUDENT, device=CUDA)
    assert chosen == (False, False, False) and said[0].startswith(f"compile auto: no, {why}")


def test_what_nobody_measured_is_no_default(tmp_path, gpu):
    chosen, said = decided(tmp_path, STUDENT, device=CUDA, size=2)
    assert chosen == (False, False, False) and said[0] == "compile auto: no, it was not measured on several GPUs"
    chosen, said = decided(tmp_path, replace(STUDENT, compile=True, compile_teacher=True), device=CUDA, size=2)
    assert chosen == (True, True, False) and said == ["cuda_graphs auto: no, it was not measured on several GPUs"]
    everything = replace(STUDENT, compile=True, compile_teacher=True, cuda_graphs=True)
    assert decided(tmp_path, everything, device=CUDA, size=2) == ((True, True, True), [])
    chosen, said = decided(tmp_path, replace(STUDENT, copy_stream=True, teacher_stream=True), device=CUDA)
    assert chosen == (False, False, False) and said[0].startswith(
        "compile auto: no, teacher_stream runs two models at once"
    )


def test_what_is_compiled_by_older_torch_is_launched_as_before(tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    chosen, said = decided(tmp_path, replace(STUDENT, compile=True), device=CUDA)
    assert chosen == (True, False, False) and "cuda_graphs auto: no, torch 2.0.1 is older than 2.6" in said


def test_what_is_set_stays(tmp_path, gpu):
    asked = replace(STUDENT, compile=False, compile_teacher=True)
    labelling = LabellingSettings(student="x", teacher_cache=TeacherCacheSettings(views=1), batch_size_per_device=8)
    assert decided(tmp_path, labelling, (0, PAYS_FROM), device=CUDA)[0] == (False, True, True), "it has no gradients"
    assert decided(tmp_path, asked, 10, device=CUDA)[0] == (False, True, True)
    assert decided(tmp_path, replace(asked, cuda_graphs=False), 10, device=CUDA)[0] == (False, True, False)
    assert decided(tmp_path, replace(STUDENT, compile=True), 10)[0] == (True, False, False), "on the CPU too"
    without = replace(STUDENT, cuda_graphs=False)
    assert decided(tmp_path, without, device=CUDA)[0] == (False, False, False)
    graphs = replace(STUDENT, cuda_graphs=True)
    chosen, said = decided(tmp_path, graphs, 10, device=CUDA)
    assert chosen == (False, False, False) and said[-1].startswith("cuda_graphs true has no effect"), (
        "of nothing compiled"
    )


@pytest.mark.parametrize("changes", [{"batch_size_per_device": 8}, {"students": {"one": {"student": "x"}}}])
def test_gradients_that_wait_for_another_pass_are_kept_from_graphs(tmp_path, gpu, changes):
    chosen, said = decided(tmp_path, replace(STUDENT, **changes), device=CUDA)
    assert chosen == (False, False, False) and "whose gradients CUDA graphs would overwrite" in said[0]
    assert decided(tmp_path, replace(STUDENT, compile=True, **changes), device=CUDA)[0] == (True, False, False)

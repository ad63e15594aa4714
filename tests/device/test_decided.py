"""Each script decides whether to compile by the steps in which its own models run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from training.settings.distillation import LabellingSettings, TeacherCacheSettings
from training.tasks.distillation import teacher_steps

from tests.device.runs import Runs


class Decided(Exception):
    """What a script asked; it goes no further."""


def asked_by(script: str, runs: Runs, monkeypatch: pytest.MonkeyPatch, **values: Any) -> dict[str, int]:
    def decide(settings: Any, run: Any, **steps: int) -> None:
        raise Decided(steps)

    monkeypatch.setattr(importlib.import_module(script), "decide_compiling", decide)
    with pytest.raises(Decided) as found:
        runs(script, **values)
    return {name: steps for name, steps in found.value.args[0].items() if steps}


@pytest.mark.parametrize(
    ("script", "values", "steps"),
    [
        # 24 images, 8 a step, two epochs
        ("train_classifier", {}, {"trained": 6}),
        ("train_kd", {}, {"trained": 6, "answered": 6}),
        ("train_kd", {"hard_label_weight": 1.0}, {"trained": 6}),
        ("train_kd", {"teacher_cache": {"views": 1}}, {"trained": 6, "answered": 3}),
        ("train_kd", {"teacher_cache": {"views": 9}}, {"trained": 6, "answered": 6}),
        ("train_segmentation", {}, {"trained": 6}),
        ("train_segmentation", {"hard_label_weight": 0.5}, {"trained": 6, "answered": 6}),
    ],
)
def test_a_script_counts_the_steps_of_its_models(runs: Runs, monkeypatch, script, values, steps):
    assert asked_by(script, runs, monkeypatch, **values) == steps


def test_a_script_that_labels_counts_the_batches_of_all_views():
    settings = LabellingSettings(student="x", global_batch_size=8, teacher_cache=TeacherCacheSettings(views=3))
    assert teacher_steps(settings, SimpleNamespace(epoch_images=25)) == 3 * 4


@pytest.mark.parametrize(
    ("graphs", "values", "launched"),
    [(True, {}, ["reduce-overhead"] * 2), (False, {"students": {"one": {}, "other": {"seed": 5}}}, [None] * 3)],
)
def test_what_was_decided_reaches_the_models(runs: Runs, monkeypatch, graphs, values, launched):
    """Several students have settings of their own, made from those that were decided."""
    modes: list[str | None] = []
    monkeypatch.setattr("torch.compile", lambda model, *, mode=None, **_: modes.append(mode) or model)
    module = importlib.import_module("train_kd")
    decide = module.decide_compiling

    def compiled(settings: Any, run: Any, **steps: int) -> Any:
        return decide(replace(settings, compile=True, compile_teacher=True, cuda_graphs=graphs), run, **steps)

    monkeypatch.setattr(module, "decide_compiling", compiled)
    run = runs("train_kd", max_steps=1, **values)
    assert all(state.compiled for state in run.states) and modes[: len(launched)] == launched

"""DALI hands its pixels over on the stand-in GPU: the CPU's batches, and no wait for the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.runs import CONVOLUTIONAL, CPU, Runs, left_behind, same_numbers
from tests.device.stand_in import dali
from tests.device.test_runs import EVERYTHING, GRADED

HAND_OVER = "_own_tensor"
"""Waits for DALI's pixels, on a stream of its own."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain views": ("train_classifier", CONVOLUTIONAL),
    "mixup, cutmix and erasing": ("train_classifier", {**CONVOLUTIONAL, **EVERYTHING}),
    "cutmix": ("train_classifier", {**CONVOLUTIONAL, "cutmix": 1.0}),
    "mixup of some": ("train_classifier", {**CONVOLUTIONAL, "mixup": 0.5, "mix_probability": 0.5}),
    "distillation": ("train_kd", {"random_erasing": 1.0, "max_rotation_degrees": 10.0}),
    "teacher cache": ("train_kd", {"teacher_cache": {"views": 1, "top_k": 2}}),
    "images with masks": ("train_segmentation", {"min_scale": 0.5, "max_scale": 1.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_fed_by_dali_has_the_numbers_of_the_cpus(runs: Runs, monkeypatch: pytest.MonkeyPatch, case: str):
    dali.use(monkeypatch)
    script, values = CASES[case]
    values = {**GRADED, **values, "preprocessing": "dali", "worker_type": "auto"}
    on_gpu = runs(script, waits_in=(HAND_OVER,), **values)
    on_cpu = runs(script, CPU, **values)
    same_numbers(on_gpu, on_cpu)
    assert left_behind(on_gpu) == []

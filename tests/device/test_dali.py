"""DALI hands its pixels over on the stand-in GPU: the CPU's batches, and no wait for the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training.distributed import world
from training.runtime import accelerator

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


def test_pixels_come_by_a_stream_that_waits_for_no_other_rank(
    runs: Runs, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """The answer to the ranks' question comes after all that the model was given: what is queued behind it would wait as long."""
    dali.use(monkeypatch)
    used: list[tuple[str, object]] = []
    make, asker = accelerator.side_stream, "pixels"

    def recorded(device: torch.device, purpose: str) -> Any:
        used.append((asker, make(device, purpose)))
        return used[-1][1]

    monkeypatch.setattr(accelerator, "side_stream", recorded)
    runs("train_classifier", waits_in=(HAND_OVER,), **GRADED, **CONVOLUTIONAL, preprocessing="dali", worker_type="auto")
    asker = "answers"
    work = SimpleNamespace(wait=lambda: torch.gpu.current_stream().wait_stream(torch.gpu.default_stream()))
    world._answer(work, torch.ones(1, device=gpu))()
    streams = {who: stream for who, stream in used}
    assert {*streams} == {"pixels", "answers"} and streams["pixels"] is not streams["answers"]

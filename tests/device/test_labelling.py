"""label_images.py on the stand-in GPU: the CPU's label bank, and no wait between two log lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import label_images
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from training.runtime import accelerator
from training.settings.distillation import LabellingSettings, TeacherCacheSettings
from training.settings.features import FeatureSettings

from launcher.labels.bank import Bank
from launcher.labels.export import Exported
from tests.device.runs import COMMON, CPU, SIDE, VIT, Runs
from tests.device.stand_in import no_synchronisation

WAITS = ("_report", "begin_epoch", "lacking", "complete_view", "close")
"""What labelling calls between two batches that may wait for the device."""


@pytest.fixture(autouse=True)
def tf32() -> Iterator[None]:
    """The process's switches as they were, after a test that moves them."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.allow_tf32 for one in switches]
    yield
    for one, allowed in zip(switches, before):
        one.allow_tf32 = allowed


def _assert_counted(folder: Path) -> None:
    """A run's arithmetic is that of its teacher for every image."""
    [file] = folder.rglob("timeline-0.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    [about] = [line for line in lines if line["kind"] == "arithmetic"]
    windows = [line["extra"] for line in lines if line["kind"] == "steps"]
    assert windows and about["teacher_gflop_per_image"][0] > 0
    for one in windows:
        each = one["tflops"] * 1000 / one["images_per_second"]
        assert each == pytest.approx(sum(about["teacher_gflop_per_image"]), rel=1e-4)


@pytest.mark.parametrize(("precision", "features", "copy_stream"), [("fp16", "pooled", False), ("int4", None, True)])
def test_a_bank_that_a_gpu_filled_holds_the_cpus_answers(
    runs: Runs, precision: str, features: str | None, copy_stream: bool
):
    found, copied = [], []
    run = accelerator.SideStream.run
    runs.monkeypatch.setattr(accelerator.SideStream, "run", lambda *given: copied.append(run(*given)) or copied[-1])
    for device in (runs.gpu, CPU):
        folder = runs.folder / f"{device.type}-{precision}"
        folder.mkdir()
        channels = {"TRAIN": "labelled/train", "VALIDATION": "labelled/validation", "TEACHER": "teacher"}
        for name, place in channels.items():
            runs.monkeypatch.setenv(f"SM_CHANNEL_{name}", str(runs.channels / place))
        runs.monkeypatch.chdir(folder)
        runs.monkeypatch.setattr(accelerator, "find", lambda _, device=device: device)
        kept = TeacherCacheSettings(views=2, top_k=2, precision=precision, where=str(folder / "bank"))
        student = {"student": "vit_tiny_patch16_224", "student_options": VIT, "image_size": SIDE}
        student["copy_stream"] = copy_stream
        student["features"] = FeatureSettings(level=features) if features else None
        label = label_images.label

        def watched(teacher, *rest, label=label):
            assert {member.model.mean.device.type for member in getattr(teacher, "__self__", teacher).members} == {
                runs.gpu.type if rest[-1].world.device == runs.gpu else "cpu"
            }
            with no_synchronisation(outside=WAITS):
                return label(teacher, *rest)

        runs.monkeypatch.setattr(label_images, "label", watched)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        with sdpa_kernel(SDPBackend.MATH):
            label_images.main(LabellingSettings(**{**COMMON, **student, "teacher_cache": kept}))
        runs.monkeypatch.setattr(label_images, "label", label)
        for switches in (torch.backends.cuda.matmul, torch.backends.cudnn):
            assert switches.allow_tf32 == (device == CPU), "as training in fp32 has them; a CPU asks for nothing"
        _assert_counted(folder)
        found.append([part for view in (1, 2) for part in Exported(Bank(folder / "bank")).whole_records(view)])
    assert len(copied) == (2 * 3 if copy_stream else 0), "batches of two views"
    for on_gpu, on_cpu in zip(*found):
        assert len(on_gpu["image"]) == 24 and ("features" in on_gpu) == (features is not None)
        for name in on_cpu:
            step = 0.02 if name == "features" else 2e-3  # of 255 in which a vector's numbers are kept
            assert torch.allclose(
                torch.from_numpy(on_gpu[name]).float(), torch.from_numpy(on_cpu[name]).float(), atol=step
            ), name

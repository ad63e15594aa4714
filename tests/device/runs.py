"""Whole runs of the entry scripts in this process, on the stand-in GPU or on the CPU: tiny models, tiny images."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from training.engine.state import TrainingState
from training.models import export, segmenter, timm_models
from training.runtime import accelerator
from training.settings.distillation import DistillationSettings, TeacherCacheSettings
from training.settings.features import FeatureSettings
from training.settings.scripts import ClassifierSettings
from training.settings.segmentation import PixelCacheSettings, SegmentationSettings
from training.teacher.frozen import Teacher

from tests.device.stand_in import no_synchronisation

CLASSES = ("circle", "cross", "stripes")
SIDE = 32
CPU = torch.device("cpu")

VIT = {"img_size": SIDE, "patch_size": 16, "embed_dim": 12, "depth": 1, "num_heads": 2}
RESNET = {"channels": (8, 8, 16, 16), "stem_width": 8}
CONVOLUTIONAL = {"model": "resnet10t", "model_options": RESNET}

COMMON = {
    **{"epochs": 2, "global_batch_size": 8, "log_every": 2, "learning_rate": 0.01, "num_workers": 1, "seed": 3},
    **{"system_monitor": False, "horizontal_flip": True, "precision": "fp32", "worker_type": "threads"},
}
SCRIPTS: dict[str, tuple[type, dict[str, Any]]] = {
    "train_classifier": (
        ClassifierSettings,
        {"model": "vit_tiny_patch16_224", "model_options": VIT, "image_size": SIDE},
    ),
    "train_kd": (DistillationSettings, {"student": "vit_tiny_patch16_224", "student_options": VIT, "image_size": SIDE}),
    "train_segmentation": (
        SegmentationSettings,
        {**CONVOLUTIONAL, "classes": 3, "decoder_channels": 8, "image_size": (SIDE, SIDE), "overlays": 1},
    ),
}

LOG_LINES = ("_read_now", "print_unprinted", "_evaluate", "_save", "_resume", "begin_epoch", "close", "average_buffers")
"""What the loop calls between steps that may wait for the device."""


@dataclass
class Run:
    """What a script left; weights, metrics and result on rank 0 alone. Of several students, weights have `name/` before theirs."""

    folder: Path
    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    states: list[TrainingState]
    task: Any

    @property
    def state(self) -> TrainingState:
        """The only model's."""
        [state] = self.states
        return state

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.metrics if "loss" in line}

    @property
    def validation(self) -> dict[str, float]:
        """Of the last evaluation."""
        return {name: value for line in self.metrics for name, value in line.items() if "validation_" in name}


class Runs:
    """Starts scripts in a test's folder."""

    def __init__(self, gpu: torch.device, channels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.gpu, self.channels, self.folder, self.monkeypatch = gpu, channels, folder, monkeypatch

    def __call__(
        self,
        script: str,
        device: torch.device | None = None,
        *,
        name: str | None = None,
        teacher: str = "teacher",
        waits_in: tuple[str, ...] = (),
        **values: Any,
    ) -> Run:
        """A script's run to its end; between two log lines nothing may wait for the GPU.

        Args:
            device: the stand-in GPU if not given.
            name: of the run's folder, in which an earlier run of the name may have left checkpoints.
            teacher: its channel.
            waits_in: functions that may wait for the device all the same.
        """
        device = device or self.gpu
        folder = self.folder / (name or device.type)
        patch = self.monkeypatch
        data = self.channels / ("pairs" if script == "train_segmentation" else "labelled")
        environment = {
            "SM_CHANNEL_TRAIN": data / "train",
            "SM_CHANNEL_VALIDATION": data / "validation",
            "SM_CHANNEL_TEACHER": self.channels / teacher,
            "SM_OUTPUT_DIR": folder,
        }
        for variable, value in environment.items():
            patch.setenv(variable, str(value))
        folder.mkdir(parents=True, exist_ok=True)
        patch.chdir(folder)  # checkpoints lie below it in a plain shell
        patch.setattr(accelerator, "find", lambda _: device)
        kind, own = SCRIPTS[script]
        cache = values.pop("teacher_cache", None)
        of_cache = PixelCacheSettings if script == "train_segmentation" else TeacherCacheSettings
        extra: dict[str, Any] = {} if cache is None else {"teacher_cache": of_cache(**cache)}
        features = values.pop("features", None)
        extra |= {} if features is None else {"features": FeatureSettings(**features)}
        module, used = importlib.import_module(script), {}
        # the stand-in has this kernel alone, and others add in another order
        with sdpa_kernel(SDPBackend.MATH), self._watched(module, used, (*LOG_LINES, *waits_in)):
            module.main(kind(**{**COMMON, **own, **values, **extra}))
        if not used["states"][0].world.is_first:
            return Run(folder, {}, [], {}, **used)
        output = folder / "data/algo-1"
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((output / "result.json").read_text())
        weights = {
            f"{state.name}/{name}" if state.name else name: value
            for state in used["states"]
            for name, value in load_file(folder / "model" / state.name / "model.safetensors").items()
        }
        return Run(folder, weights, lines, result, **used)

    @contextlib.contextmanager
    def _watched(self, module: ModuleType, used: dict[str, Any], outside: tuple[str, ...]):
        """The script's `train` under `no_synchronisation`; keeps what it was called with."""
        train = module.train

        def watched(task: Any, evaluate: Any, states: Any, *rest: Any) -> Any:
            used.update(task=task, states=states)
            with no_synchronisation(outside=outside):
                return train(task, evaluate, states, *rest)

        module.train = watched
        try:
            yield
        finally:
            module.train = train


def same_numbers(run: Run, other: Run) -> None:
    """Losses, weights and metrics are the same up to rounding."""
    assert run.losses == pytest.approx(other.losses, rel=1e-5)
    assert run.validation == pytest.approx(other.validation, rel=1e-4)
    assert {*run.weights} == {*other.weights}
    for name, value in other.weights.items():
        assert torch.allclose(run.weights[name], value, rtol=1e-4, atol=1e-5), name


def left_behind(run: Run) -> list[str]:
    """The tensors of training that are not on the GPU. A `step` is where its optimizer's kernel wants it."""
    tensors = {f"{state.name} {name}": value for state in run.states for name, value in of_training(state).items()}
    cache = getattr(run.task, "cache", None)
    if getattr(run.task, "teacher", None) is not None and not (cache is not None and cache.complete):
        tensors |= {f"teacher {name}": value for name, value in weights_of(run.task.teacher).items()}
    return [name for name, value in tensors.items() if value.device.type != "gpu"]


def of_training(state: TrainingState) -> dict[str, torch.Tensor]:
    tensors = {f"trainable {name}": value for name, value in state.trainable.state_dict().items()}
    tensors |= {f"model {name}": value for name, value in state.model.named_buffers()}
    if state.average is not None:
        tensors |= {f"average {name}": value for name, value in state.average.module.state_dict().items()}
        tensors |= {f"average {name}": value for name, value in state.average.module.named_buffers()}
    optimizer = getattr(state.optimizer, "optim", state.optimizer)  # a rank's share, with ZeRO
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for values in optimizer.state.values():
        tensors |= {f"optimizer {name}": value for name, value in values.items() if value.ndim or fused}
    if state.scaler is not None:
        tensors["scale"] = state.scaler._scale
    return tensors


def weights_of(teacher: Teacher) -> dict[str, torch.Tensor]:
    return {
        f"{number} {name}": value
        for number, member in enumerate(teacher.members)
        for name, value in [*member.model.state_dict().items(), *member.model.named_buffers()]
    }


def make_channels(root: Path) -> Path:
    """Drawings in three classes, the same with masks, and teachers with random weights."""
    rng = random.Random(0)
    for part, count in (("train", 8), ("validation", 3)):
        for number in range(count * len(CLASSES)):
            label = number % len(CLASSES)
            pixels = np.full((SIDE + 8, SIDE + 8, 3), rng.randrange(90), np.uint8)
            mask = np.zeros(pixels.shape[:2], np.uint8)
            rows, columns = (slice(rng.randrange(4, 12), rng.randrange(20, 36)) for _ in range(2))
            pixels[rows, columns, label], mask[rows, columns] = 250, label
            mask[:2] = 255  # not labelled
            image = root / f"labelled/{part}/{CLASSES[label]}/{number:02}"
            for folder in (image.parent, root / f"pairs/{part}/images", root / f"pairs/{part}/masks"):
                folder.mkdir(parents=True, exist_ok=True)
            ending = "jpg" if number % 2 else "png"
            Image.fromarray(pixels).save(image.with_suffix(f".{ending}"))
            Image.fromarray(pixels).save(root / f"pairs/{part}/images/{number:02}.{ending}")
            Image.fromarray(mask).save(root / f"pairs/{part}/masks/{number:02}.png")
    torch.manual_seed(7)
    described: dict[str, Any] = {"classes": list(CLASSES), "metrics": {}}
    vit = {**VIT, "embed_dim": 24}
    for folder in ("teacher", "ensemble/one", "ensemble/other"):
        model = timm_models.build("vit_tiny_patch16_224", vit, 3)
        export.save(model, root / folder, name="vit_tiny_patch16_224", options=vit, image_size=SIDE, **described)
    pixels = segmenter.build("resnet10t", RESNET, 3, decoder_channels=8)
    described["classes"] = ["0", "1", "2"]
    export.save(
        pixels, root / "pixel_teacher", name="resnet10t", options=RESNET, image_size=(SIDE, SIDE), decoder={"channels": 8}, **described
    )  # fmt: skip
    return root

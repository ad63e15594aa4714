"""Photographs, views of them and their batches, by DALI and by the reference pipeline."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from training.data.augmentation import Augmentation
from training.data.batches import LabelledBatch, TrainingBatches
from training.data.broken import BrokenImages
from training.data.dali.pipeline import DaliBatches, DaliPreprocessor
from training.data.dali.views import ViewsByDali
from training.data.mixing import Mixing
from training.data.sources.folders import LabelledFolder
from training.data.views import TrainingViews, collate_views
from training.data.workers import Workers
from training.distributed.world import World

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
ONE_THREAD = Workers("threads", 1)
STRONG = Augmentation(0.2, True, 3, 15.0, 0.5, load=1)
BOTH = Mixing(0.8, 1.0, 0.75)
UPRIGHT = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""How a camera's picture lies in its file, by EXIF orientation."""


def photograph(number: int, size: tuple[int, int] | None = None) -> Image.Image:
    """china.jpg or flower.jpg of scikit-learn."""
    image = Image.fromarray(load_sample_images().images[number % 2])
    return image if size is None else image.resize(size, Image.Resampling.LANCZOS)


def jpeg(image: Image.Image, orientation: int = 1, **options) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    lying = image if UPRIGHT[orientation] is None else image.transpose(UPRIGHT[orientation])
    lying.save(file, "JPEG", **{"quality": 92, "exif": exif, **options})
    return file.getvalue()


def views(root: Path, augmentation: Augmentation = STRONG, mixing: Mixing = BOTH, size: int = 64, channels: int = 3, broken: BrokenImages | None = None) -> TrainingViews:  # fmt: skip
    how = {"channels": channels, "preprocessor": DaliPreprocessor(), "broken": broken or BrokenImages(fail=True)}
    return TrainingViews(LabelledFolder(root), size, augmentation, mixing, 1, **how)


def batches(world: World = ALONE, size: int = 6, accumulation: int = 1) -> TrainingBatches:
    return TrainingBatches(11, size, world, 1, accumulation=accumulation, views=2)


def epoch(asked: TrainingViews, sampler: TrainingBatches, number: int = 1, first_step: int = 0) -> list[LabelledBatch]:
    sampler.start(number, first_step)
    return list(DaliBatches(ViewsByDali(asked), sampler, ALONE, ONE_THREAD))


def reference(asked: TrainingViews, sampler: TrainingBatches, number: int = 1, first_step: int = 0) -> list[LabelledBatch]:  # fmt: skip
    sampler.start(number, first_step)
    return [collate_views(asked.__getitems__(draws)) for draws in sampler]


def fidelity(one: np.ndarray, other: np.ndarray) -> float:
    """Peak signal to noise, in dB."""
    return 10 * np.log10(255**2 / max(1e-9, np.square(one.astype(float) - other).mean()))


def png(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


SMALL = photograph(0, (80, 60))


def damaged_png() -> bytes:
    """Its header tells nothing of it."""
    file = png(SMALL)
    return file[: len(file) // 2] + bytes([file[len(file) // 2] ^ 255]) + file[len(file) // 2 + 1 :]

"""Small teacher caches, filled and read; processes of their own import all of this."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from training.data.batches import LabelledBatch
from training.distributed.world import World
from training.teacher.cache import TeacherCache
from training.teacher.logit_records import record_layout
from training.teacher.pixel_records import PixelLayout

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a single process")
PARTS = {"teacher weights": "ab" * 32, "transform": "cd" * 32, "data": "ef" * 32, "dtype": "fp32"}
IMAGES, CLASSES = 60, 12
PIXELS = torch.randint(0, 256, (IMAGES, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def opened(where: Path, **changes) -> TeacherCache:
    kept = {"classes": CLASSES, "top_k": 4, "precision": "fp16", "features": None}
    layout = record_layout(**{name: changes.pop(name, value) for name, value in kept.items()})
    values = {"parts": PARTS, "images": IMAGES, "views": 2, "world": ALONE, "layout": layout}
    return TeacherCache.open(where, **{**values, **changes})


def batch_of(numbers, view: int = 1) -> LabelledBatch:
    """A view of images: the same pixels, brighter."""
    numbers = torch.as_tensor(numbers)
    labels = numbers % CLASSES
    return LabelledBatch(
        PIXELS[numbers] // 2 + view,
        labels,
        labels,
        torch.ones(len(numbers)),
        numbers,
        torch.full((len(numbers),), view),
    )


class Model(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, images):
        return self.head(images.flatten(1).float() / 16)


class CountedTeacher:
    """A teacher that tells which batches it saw."""

    def __init__(self):
        self.model, self.seen = Model(1).requires_grad_(False), []

    def __call__(self, images):
        self.seen.append(len(images))
        return self.model(images)


def no_teacher(images):
    raise AssertionError("the teacher was asked")


def filled(where: Path, *, batch_size: int = 10, **changes) -> TeacherCache:
    """A cache that holds all images of its first view."""
    cache, teacher = opened(where, **changes), CountedTeacher()
    cache.begin_epoch([1], np.arange(IMAGES))
    for numbers in torch.randperm(IMAGES, generator=torch.Generator().manual_seed(3)).split(batch_size):
        cache.answers(batch_of(numbers), teacher)
    cache.close()
    return cache


def fill_pixels(where: Path, **changes) -> tuple[TeacherCache, torch.Tensor]:
    """A cache of the answers for a grid of places in all images of its first view, and the teacher's logits."""
    layout = PixelLayout(**{"rows": 3, "columns": 5, "classes": 6, "top_k": 1, "precision": "int4", **changes})
    logits = 4 * torch.randn(IMAGES, 6, 3, 5, generator=torch.Generator().manual_seed(0))
    cache = opened(where, layout=layout)
    cache.begin_epoch([1], np.arange(IMAGES))
    cache.answers(batch_of(np.arange(IMAGES)), lambda images: logits)
    cache.close()
    return cache, logits


def kept(where: Path, **changes) -> torch.Tensor:
    """The first view's logits, without a teacher."""
    cache = opened(where, **changes)
    assert cache.begin_epoch([1], np.arange(IMAGES))
    return cache.answers(batch_of(np.arange(IMAGES)), no_teacher)


def forget(cache: TeacherCache, where: Path, numbers: list[int]) -> None:
    with open(where / "view-0001.bin", "r+b") as file:
        for number in numbers:
            file.seek(number * cache.layout.size)
            file.write(b"\0" * cache.layout.size)


PREAMBLE = """
    import hashlib, random
    from training.teacher.label_bank import ViewFile
    from tests.entrypoints.teacher_caches import *
    def fill(cache, hashes):
        cache.begin_epoch([1], np.arange(IMAGES))
        for step, numbers in enumerate(torch.arange(IMAGES).split(4)):
            logits = cache.answers(batch_of(numbers), CountedTeacher())
            print(step, hashlib.sha256(logits.numpy()).hexdigest(), file=hashes, flush=True)
"""


def has_lines(file: Path, count: int) -> bool:
    return file.is_file() and file.read_bytes().count(b"\n") >= count

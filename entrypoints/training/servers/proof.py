"""What a server must prove before it is used: that it serves the training process's images, and makes them identically."""

from __future__ import annotations

import random

import numpy as np

from training.data.batches import SampleKey
from training.servers.actor import About, Opened, Part, Teacher, made

PROOF = 3
"""Images that a server and this process make first, others each time, since one may be broken: a server is used only if both are equal,
byte for byte."""

OTHER_TEACHER = "its teacher differs from that of the first server found"


class Proof:
    """
    Args:
        opened: the images as the training process has them.
        teacher: the one whose logits servers also give. None: they have none.
    """

    def __init__(self, opened: Opened, teacher: Teacher | None):
        self._opened, self._teacher = opened, teacher
        self._listing: str | None = None
        self._random = random.Random(0)

    def other_images(self, found: About) -> str | None:
        """How a server's images, or its teacher, differ from this process's; None: they do not."""
        images = len(self._opened.images)
        if found.images != images:
            return f"it has {found.images:,} training images, this process {images:,}"
        if self._listing is None:
            self._listing = self._opened.images.listing()
        if found.listing != self._listing:
            return "it has other training images, or the same ones in another order"
        wanted = None if self._teacher is None else self._teacher.about()
        return None if found.teacher == wanted else OTHER_TEACHER

    def draws(self) -> list[SampleKey]:
        """PROOF images that a server is to make."""
        return [(1, self._random.randrange(len(self._opened.images))) for _ in range(PROOF)]

    def other_pixels(self, draws: list[SampleKey], found: Part) -> str | None:
        """Why a server's images of these draws are not this process's; None: they are, byte for byte."""
        own = made(self._opened, draws)  # without the teacher's logits, which come last
        fields = len(own.fields) + (self._teacher is not None)
        same = fields == len(found.fields) and all(
            a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(own.fields, found.fields)
        )
        return (
            None
            if same
            else "it makes different pixels from the same images: its libraries or processor round differently"
        )

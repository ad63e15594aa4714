"""A server: makes parts of batches from its host's training images, and gives a frozen teacher's logits if there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from training.data.batches import SampleKey


class Images(Protocol):
    """Training images that any host makes identically."""

    def __len__(self) -> int: ...

    def __getitem__(self, draw: SampleKey, /) -> Any:
        """An item of a batch. If there is `begin_batch`, what it returns is called for the items of one batch instead."""

    def listing(self) -> str:
        """What identifies these images, in their order."""


class AboutTeacher(NamedTuple):
    """Identifies a teacher."""

    name: str
    parameters: int
    digest: str
    """Of everything but the images that its logits depend on."""


class Teacher(Protocol):
    """A frozen teacher: a server's own, or the servers' as a training process asks them for it."""

    def about(self) -> AboutTeacher: ...

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        """Images uint8 (batch, channels, height, width) -> logits float32 (batch, classes), on the device of the images."""

    def taught(self, batch: Any) -> Any:
        """A batch with its images' logits: a NamedTuple with one more field, the last."""


class Opened(NamedTuple):
    """What a server serves."""

    images: Images
    collate: Callable[[list[Any]], Any]
    """Collates items into a batch: a NamedTuple of tensors whose first dimension is the batch's images."""
    teacher: Callable[[int], Teacher] | None = None
    """Opens the teacher of a server, by the server's index on its host. None: there is none."""


Open = Callable[[], tuple[Any, ...]]
"""Opens what Opened holds, on the host that it is sent to."""


class PartFailed(Exception):
    """A part could not be made; the server is alive. The message says why."""


class ServerFailed(Exception):
    """A server is gone, or did not answer; the message says why."""


class Part(NamedTuple):
    """A part of a batch, as it is sent."""

    seconds: float
    """Time that making it took."""
    teacher_seconds: float
    """Of these, the teacher's."""
    batch: type[Any]
    """The batch's type: a NamedTuple of tensors."""
    fields: list[np.ndarray]
    """The batch's fields; the first dimension is the part's images."""


class About(NamedTuple):
    """A server's description of itself."""

    images: int
    listing: str
    teacher: AboutTeacher | None = None


class Answer(NamedTuple):
    """A teacher's logits for images that came from elsewhere, as they are sent."""

    digest: str
    """Of the teacher."""
    logits: np.ndarray
    """float32 (batch, classes)."""


class ImageServer:
    """Serves one process's worth of a host's cores. Its methods run in several threads at once.

    Args:
        index: among the servers of its host.
    """

    def __init__(self, open_images: Open, index: int = 0):
        torch.set_num_threads(1)  # each of its threads makes a part of its own
        self._opened, self._index = Opened(*open_images()), index
        self._about = About(len(self._opened.images), self._opened.images.listing())
        self._teacher: Teacher | None = None
        self._loading = threading.Lock()

    def about(self) -> About:
        """What is served here, for clients to compare with what they would make.

        Raises:
            ValueError: there is no such teacher as the settings ask for.
        """
        teacher = self._own_teacher()
        return self._about if teacher is None else self._about._replace(teacher=teacher.about())

    def make(self, draws: list[SampleKey]) -> Part:
        """Make a part of a batch."""
        return made(self._opened, draws, self._own_teacher())

    def teach(self, images: np.ndarray) -> Answer:
        """The teacher's logits for images, uint8 (batch, channels, height, width)."""
        teacher = self._own_teacher()
        assert teacher is not None, "a server without a teacher was asked for logits"
        return Answer(teacher.about().digest, teacher(torch.tensor(images)).numpy())

    def _own_teacher(self) -> Teacher | None:
        """The teacher, loaded on first use: if that fails, the caller gets the reason, and not a dead server."""
        with self._loading:
            if self._teacher is None and self._opened.teacher is not None:
                self._teacher = self._opened.teacher(self._index)
        return self._teacher


def made(opened: Opened, draws: list[SampleKey], teacher: Teacher | None = None) -> Part:
    """Make a part of a batch here.

    Args:
        teacher: adds its logits.
    """
    started = time.perf_counter()
    begin = getattr(opened.images, "begin_batch", None)
    item = begin(draws) if begin is not None else opened.images.__getitem__
    batch = opened.collate([item(draw) for draw in draws])
    of_teacher = time.perf_counter()
    if teacher is not None:
        batch = teacher.taught(batch)
    now = time.perf_counter()
    return Part(now - started, now - of_teacher, type(batch), [field.numpy() for field in batch])

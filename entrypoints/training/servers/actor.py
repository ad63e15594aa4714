"""A server: the training images of its host, and parts of batches made of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from training.data.batches import SampleKey


class Images(Protocol):
    """Training images that any host makes alike."""

    def __len__(self) -> int: ...

    def __getitem__(self, draw: SampleKey, /) -> Any:
        """An item of a batch. Where there is `begin_batch`, what that gives is asked instead for the items of one batch."""

    def listing(self) -> str:
        """What tells these images, in their order, from others."""


class Opened(NamedTuple):
    """What a server serves."""

    images: Images
    collate: Callable[[list[Any]], Any]
    """Makes a batch of items: a NamedTuple of tensors, each with the batch's images first."""


Open = Callable[[], tuple[Any, Callable[..., Any]]]
"""Opens the images, and what makes batches of them, on the host where it is called; travels there."""


class PartFailed(Exception):
    """A part could not be made; the server is there. The message says why."""


class ServerFailed(Exception):
    """A server is gone, or did not answer; the message says why."""


class Part(NamedTuple):
    """A part of a batch, as it travels."""

    seconds: float
    """That making it took."""
    batch: type[Any]
    """Of what the batch is: a NamedTuple of tensors."""
    fields: list[np.ndarray]
    """Those of the batch, each with the part's images first."""


class About(NamedTuple):
    """What a server says of itself."""

    images: int
    listing: str


class ImageServer:
    """Serves one process's worth of a host's cores. Its methods run in several threads at once."""

    def __init__(self, open_images: Open):
        torch.set_num_threads(1)  # each of its threads makes a part of its own
        self._opened = Opened(*open_images())
        self._about = About(len(self._opened.images), self._opened.images.listing())

    def about(self) -> About:
        """What is served here, for those who compare it with what they would make."""
        return self._about

    def make(self, draws: list[SampleKey]) -> Part:
        """A part of a batch."""
        return made(self._opened, draws)


def made(opened: Opened, draws: list[SampleKey]) -> Part:
    """A part of a batch, made here."""
    started = time.perf_counter()
    begin = getattr(opened.images, "begin_batch", None)
    item = begin() if begin is not None else opened.images.__getitem__
    batch = opened.collate([item(draw) for draw in draws])
    fields = [field.numpy() for field in batch]
    return Part(time.perf_counter() - started, type(batch), fields)

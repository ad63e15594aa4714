"""A dataset of images that show their number, and loader processes that make batches of it.

Little is imported here: each loader process does it anew, and so does each program that a test starts.
"""

from __future__ import annotations

import multiprocessing
import time

import torch
from training.data.decode.decoding import BrokenImage
from training.data.loader_processes import LoaderProcesses
from training.data.loaders import collate_items


class Numbers:
    """Images that show their number; what is in `fails` raises, and what is in `absent` is left out. A slow one takes a while."""

    def __init__(self, fails: tuple[int, ...] = (), absent: tuple[int, ...] = (), slow: float = 0.0):
        self.fails, self.absent, self.slow = fails, absent, slow

    def __getitem__(self, draw: tuple[int, int]):
        _, number = draw
        time.sleep(self.slow)
        if number in self.fails:
            raise BrokenImage(f"image {number} is broken")
        if number in self.absent:
            return None
        return torch.full((1, 20, 20), number % 256, dtype=torch.uint8), number


def batches_of(*sizes: int) -> list[list[tuple[int, int]]]:
    numbers = iter(range(sum(sizes)))
    return [[(1, next(numbers)) for _ in range(size)] for size in sizes]


def loader(dataset, batches, count: int = 1, *, zero_copy: bool = True, collate=collate_items) -> LoaderProcesses:
    return LoaderProcesses(dataset, batches, collate, count, zero_copy=zero_copy)


def processes() -> list[multiprocessing.Process]:
    return [process for process in multiprocessing.active_children() if process.name == "loader"]

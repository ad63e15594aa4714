"""How training images are shuffled: pure functions of seed, view, epoch and the images, whatever number of processes reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

LANES = 8
"""Streams of shards that every global batch takes equal parts of. Ranks of n hosts read n-th parts of them, so that up to as many
hosts read each shard once. A constant, and not the number of hosts, so that the order does not depend on it."""


class Order(Protocol):
    """A way to shuffle training images."""

    def __hash__(self) -> int: ...

    def of_view(self, seed: int, view: int) -> np.ndarray:
        """All image indices, int64 (images,): the first of them are drawn, and two neighbours are partners in mixing."""

    def of_epoch(self, seed: int, view: int, epoch: int, steps: int, batch_size: int) -> np.ndarray:
        """What an epoch draws, int64 (steps, batch_size): the first of the view, two neighbours always next to each other.

        Epochs that draw the same view draw the same images, in another order.
        """


@dataclass(frozen=True)
class FreeOrder:
    """All images shuffled among each other: for files that are each read by themselves."""

    images: int

    def of_view(self, seed: int, view: int) -> np.ndarray:
        # numpy promises that RandomState's numbers never change (NEP 19); torch.randperm promises nothing between versions
        return np.random.RandomState([seed, view]).permutation(self.images)

    def of_epoch(self, seed: int, view: int, epoch: int, steps: int, batch_size: int) -> np.ndarray:
        drawn = self.of_view(seed, view)[: steps * batch_size]
        pairs = np.random.RandomState([seed, view, epoch]).permutation(-(-len(drawn) // 2))
        return _in_pairs(drawn, pairs).reshape(steps, batch_size)


class ShardOrder:
    """Shards shuffled among each other, and images only within a window of several shards, so that reading is nearly sequential.

    The shuffled shards are dealt out to LANES lanes. A lane goes through its shards window by window, and a window's images are
    shuffled. The lanes take turns, a pair of images each, so that any global batch holds equal parts of them; within a batch,
    images are sorted by lane, so that a rank, which takes a contiguous part of the batch, reads only some of the lanes.

    Args:
        counts: images of each shard, int64 (shards,); a shard's images have neighbouring indices.
        window: shards among which images are shuffled, over all lanes.
    """

    def __init__(self, counts: np.ndarray, window: int):
        self._counts = np.asarray(counts, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])
        self.lanes = max(1, min(LANES, len(self._counts), window))
        self.window_of_lane = -(-window // self.lanes)

    @property
    def images(self) -> int:
        return int(self._starts[-1])

    def of_view(self, seed: int, view: int) -> np.ndarray:
        return self._arranged(seed, view)[0]

    def of_epoch(self, seed: int, view: int, epoch: int, steps: int, batch_size: int) -> np.ndarray:
        order, windows, lanes = self._arranged(seed, view)
        size = steps * batch_size
        pairs = np.arange(-(-size // 2))
        rng, window_of_pair = np.random.RandomState([seed, view, epoch]), windows[:size:2]
        by_window = np.argsort(window_of_pair, kind="stable")
        for places in np.split(by_window, np.flatnonzero(np.diff(window_of_pair[by_window])) + 1):
            pairs[places] = rng.permutation(places)
        drawn = np.stack([order[:size], lanes[:size]])
        order, lanes = (_in_pairs(row, pairs).reshape(steps, batch_size) for row in drawn)
        return np.take_along_axis(order, np.argsort(lanes, axis=1, kind="stable"), axis=1)

    def _arranged(self, seed: int, view: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The view's order; and for every place in it the window, numbered over all lanes, and the lane: int64 (images,) each."""
        rng = np.random.RandomState([seed, view])
        shards = rng.permutation(len(self._counts))
        parts: list[np.ndarray] = []
        turns: list[np.ndarray] = []
        windows: list[np.ndarray] = []
        lanes: list[np.ndarray] = []
        window = 0
        for lane in range(self.lanes):
            own, done = shards[lane :: self.lanes], 0
            for first in range(0, len(own), self.window_of_lane):
                inside = own[first : first + self.window_of_lane]
                indices = np.concatenate([np.arange(self._starts[shard], self._starts[shard + 1]) for shard in inside])
                parts.append(rng.permutation(indices))
                turns.append((done + np.arange(len(indices))) // 2)  # pairs of this lane that come before
                windows.append(np.full(len(indices), window))
                done, window = done + len(indices), window + 1
            lanes.append(np.full(done, lane))
            if done % 2:  # one image is left over: behind all others, where it does not part the pairs of other lanes
                turns[-1][-1] = self.images
        # stable: the lanes in their order, and the two of a pair together
        places = np.argsort(np.concatenate(turns), kind="stable")
        return np.concatenate(parts)[places], np.concatenate(windows)[places], np.concatenate(lanes)[places]


def _in_pairs(values: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Values (n,) in the order of their pairs, a permutation of range(⌈n / 2⌉); where n is odd, the last pair is a single one."""
    places = (2 * pairs[:, None] + [0, 1]).ravel()
    ordered: np.ndarray = values[places[places < len(values)]]
    return ordered

"""Orders of training images: pure functions of seed, view, epoch and images, independent of the number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

LANES = 8
"""Streams of shards; every global batch takes its part of each. With n hosts, each host's ranks read an n-th of them, so up to LANES hosts
read each shard once. A constant rather than the number of hosts, so that the order does not depend on it."""


class Arrangement(NamedTuple):
    """A view's images in order: first those that are drawn, of which neighbours pair up for mixing, then the others."""

    images: np.ndarray
    """int64 (images,), all indices."""
    windows: np.ndarray
    """int64 (images,): only pairs within one window change places when the view is drawn again."""
    streams: np.ndarray
    """int64 (images,): within a batch, the images of one stream share the same places and are sorted by lane there."""
    lanes: np.ndarray
    """int64 (images,)."""


class Order(Protocol):
    """A way to shuffle training images."""

    def __hash__(self) -> int: ...

    @property
    def epoch_images(self) -> int:
        """The most images that an epoch draws."""

    def arranged(self, seed: int, view: int) -> Arrangement: ...

    def description(self) -> dict[str, Any]:
        """What distinguishes this order from others of the same images, JSON-ready."""


def of_view(order: Order, seed: int, view: int) -> np.ndarray:
    """All image indices, int64 (images,): the first are drawn, and neighbouring pairs are mixing partners."""
    return order.arranged(seed, view).images


def of_epoch(order: Order, seed: int, view: int, epoch: int, steps: int, batch_size: int) -> np.ndarray:
    """The indices that an epoch draws, int64 (steps, batch_size): the first of the view, with pairs kept adjacent.

    Epochs that draw the same view draw the same images in a different order.
    """
    found, size = order.arranged(seed, view), steps * batch_size
    pairs = np.arange(-(-size // 2))
    rng, window_of_pair = np.random.RandomState([seed, view, epoch]), found.windows[:size:2]
    by_window = np.argsort(window_of_pair, kind="stable")
    for places in np.split(by_window, np.flatnonzero(np.diff(window_of_pair[by_window])) + 1):
        pairs[places] = rng.permutation(places)
    images, streams, lanes = (
        _in_pairs(row[:size], pairs).reshape(steps, batch_size) for row in (found.images, found.streams, found.lanes)
    )
    if not lanes.any():
        return images
    sorted_by_lane = np.empty_like(images)
    places = np.argsort(streams, axis=1, kind="stable")
    by_lane = np.lexsort((lanes, streams), axis=1)
    np.put_along_axis(sorted_by_lane, places, np.take_along_axis(images, by_lane, axis=1), axis=1)
    return sorted_by_lane


@dataclass(frozen=True)
class FreeOrder:
    """All images shuffled together, for files that are read one by one."""

    epoch_images: int

    def arranged(self, seed: int, view: int) -> Arrangement:
        # numpy promises that RandomState's numbers never change (NEP 19); torch.randperm promises nothing between versions
        shuffled = np.random.RandomState([seed, view]).permutation(self.epoch_images)
        alike = np.zeros(self.epoch_images, np.int64)
        return Arrangement(shuffled, alike, alike, alike)

    def description(self) -> dict[str, Any]:
        return {}


class ShardOrder:
    """Shuffled shards, with images shuffled only within a window of several shards, so that reads are nearly sequential.

    The shuffled shards are dealt out to LANES lanes. A lane goes through its shards window by window and shuffles each window's images.
    The lanes take turns, a pair of images each, and a lane with more images takes more turns, so every global batch holds its part of
    each lane, however unequal the shards are. Within a batch, images are sorted by lane: a rank takes a contiguous part of the batch,
    and so reads only some of the lanes.

    Args:
        counts: images of each shard, int64 (shards,); a shard's images have consecutive indices.
        window: number of shards among which images are shuffled, over all lanes.
    """

    def __init__(self, counts: np.ndarray, window: int):
        self._window = window
        self._counts = np.asarray(counts, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])
        self.lanes = max(1, min(LANES, len(self._counts), window))
        self.window_of_lane = -(-window // self.lanes)

    @property
    def epoch_images(self) -> int:
        return int(self._starts[-1])

    def arranged(self, seed: int, view: int) -> Arrangement:
        rng = np.random.RandomState([seed, view])
        shards = rng.permutation(len(self._counts))
        parts: list[np.ndarray] = []
        turns: list[np.ndarray] = []
        drawn = [int(self._counts[shards[lane :: self.lanes]].sum()) // 2 for lane in range(self.lanes)]
        windows: list[np.ndarray] = []
        lanes: list[np.ndarray] = []
        window = 0
        for lane in range(self.lanes):
            own, done = shards[lane :: self.lanes], 0
            for first in range(0, len(own), self.window_of_lane):
                inside = own[first : first + self.window_of_lane]
                indices = np.concatenate([np.arange(self._starts[shard], self._starts[shard + 1]) for shard in inside])
                if not len(indices):
                    continue  # shards without images
                parts.append(rng.permutation(indices))
                before = (done + np.arange(len(indices))) // 2  # pairs of this lane
                turns.append((before + 0.5) / max(drawn[lane], 1))  # spread over the epoch, however many a lane has
                windows.append(np.full(len(indices), window))
                done, window = done + len(indices), window + 1
            lanes.append(np.full(done, lane))
            if done % 2:  # an unpaired image goes behind all others, where it splits no pair of another lane
                turns[-1][-1] = np.inf
        # stable: keeps the lanes in order and each pair together
        places = np.argsort(np.concatenate(turns), kind="stable")
        images = np.concatenate(parts)[places]
        return Arrangement(
            images, np.concatenate(windows)[places], np.zeros_like(images), np.concatenate(lanes)[places]
        )

    def description(self) -> dict[str, Any]:
        return {"window": self._window, "turns": "even"}


@dataclass(frozen=True)
class JointOrder:
    """Two kinds of images interleaved evenly, pair by pair, so that every batch holds its part of each.

    The second kind comes in parts: each view draws the next part until too few images are left for another; then they are rearranged.
    So all of them are drawn equally often in the end, and shards are read in their order.
    """

    first: Order
    second: Order
    part: int
    """Images of the second kind that a view draws: all of them, or an even number, since two neighbours are partners."""

    @property
    def epoch_images(self) -> int:
        return self.first.epoch_images + self.part

    def arranged(self, seed: int, view: int) -> Arrangement:
        first, own = self.first.arranged(seed, view), self.first.epoch_images
        turn, place = divmod(view - 1, self.second.epoch_images // self.part)
        second = self.second.arranged(seed, 1 + turn)
        drawn = slice(place * self.part, (place + 1) * self.part)
        chosen, others = (
            Arrangement(
                own + second.images[rows],
                1 + first.windows.max() + second.windows[rows],
                1 + second.streams[rows],
                second.lanes[rows],
            )
            for rows in (drawn, np.delete(np.arange(len(second.images)), drawn))
        )
        turns = np.concatenate([_turns(own, self.part), _turns(self.part, own)])
        places = np.argsort(turns, kind="stable")
        both = Arrangement(*(np.concatenate(columns)[places] for columns in zip(first, chosen)))
        if own % 2 and self.part % 2:  # the two left-over images form a pair and stay where they are
            both.windows[-2:] = both.windows.max() + 1
        return Arrangement(*(np.concatenate(columns) for columns in zip(both, others)))

    def description(self) -> dict[str, Any]:
        return {"part": self.part, "first": self.first.description(), "second": self.second.description()}


def _turns(count: int, other: int) -> np.ndarray:
    """Sort keys to interleave N images with those of another kind: int64 (images,). A last one without a neighbour follows all pairs."""
    pairs, others = count // 2, other // 2
    turns = (2 * np.repeat(np.arange(pairs), 2) + 1) * max(others, 1)  # (pair + ½) / pairs, times 2 × pairs × others
    return np.append(turns, 2 * max(pairs, 1) * max(others, 1) + 1) if count % 2 else turns


def _in_pairs(values: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Values (n,) in the order of their pairs, a permutation of range(⌈n / 2⌉); if n is odd, the last pair has one value."""
    places = (2 * pairs[:, None] + [0, 1]).ravel()
    ordered: np.ndarray = values[places[places < len(values)]]
    return ordered

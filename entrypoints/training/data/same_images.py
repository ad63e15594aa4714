"""Checks that all hosts, and a run that resumes from another's checkpoint, have the same images: a sampler's indices mean nothing if they
differ."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol, runtime_checkable

import torch

from training.data.loaders import Data
from training.distributed.world import World


@runtime_checkable
class Listed(Protocol):
    """Images that can be identified by a listing."""

    def listing(self) -> str: ...


def identity(data: Data[Any, Any]) -> dict[str, str]:
    """Identifies a run's training images, their order and their classes by number and names; no image is read."""
    listing = data.training.listing() if isinstance(data.training, Listed) else ""
    names = "" if data.numbered else f" ({_digest(data.classes)[:8]})"
    order = {} if data.order is None else data.order.description()
    return {
        **({"order": json.dumps(order, sort_keys=True)} if order else {}),
        "classes": f"{len(data.classes):,}{names}",
        "training images": f"{len(data.training):,} ({_digest(listing)[:8]})",
    }


def refuse_other_images(data: Data[Any, Any], world: World) -> None:
    """Compare every rank's images with those of rank 0, by number and names; no image is read. A collective.

    If they differed, ranks would take different numbers of steps and wait for each other for ever or, with equal numbers, train on a
    part of the images and write a teacher's answers for one image over those for another.

    Raises:
        ValueError: on every rank, if a host has other images.
    """
    images = {"training": data.training, "held-out": data.held_out}
    counts = world.gather_rows(torch.tensor([[len(part) for part in images.values()]])).tolist()
    listings = {name: part.listing() for name, part in images.items() if isinstance(part, Listed)}
    own = bytearray.fromhex(_digest([data.classes, listings]))
    digests = world.gather_rows(torch.frombuffer(own, dtype=torch.uint8)[None])
    others = [rank for rank in range(world.size) if counts[rank] != counts[0] or not digests[rank].equal(digests[0])]
    if not others:
        return
    named = ", ".join(map(str, others[:8])) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
    have = " and ".join(
        f"{counts[others[0]][part]:,} {name} images instead of {counts[0][part]:,}" for part, name in enumerate(images)
    )
    raise ValueError(
        f"the images of rank {named} differ from rank 0's: rank {others[0]} has {have}"
        f"{' with other names or classes' if counts[others[0]] == counts[0] else ''}. Every host needs the same files: remove `sharded` "
        "from the inputs, or compare the hosts' copies"
    )


def _digest(value: Any) -> str:
    """SHA-256 of a JSON value, hexadecimal."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()

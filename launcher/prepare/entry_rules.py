"""The entry scripts' own code for images, masks and shards, so that prepared data equals what they decode."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

from launcher.config.entrypoints import kit_modules


class EntryRules(NamedTuple):
    """Modules of entrypoints/training/data."""

    decoding: ModuleType
    masks: ModuleType
    folders: ModuleType
    shard_index: ModuleType


@functools.cache
def entry_rules() -> EntryRules:
    """Import the modules, which need numpy and Pillow."""
    names = ("decode.decoding", "decode.masks", "sources.folders", "sources.shard_index")
    with kit_modules(*(f"training.data.{name}" for name in names)) as modules:
        return EntryRules(*modules)

"""How the entry scripts read images, masks and shards: their own code, so that what is prepared is what they would have seen."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

from launcher.hyperparameters import imported
from launcher.package import entrypoints_folder


class EntryRules(NamedTuple):
    """Modules of entrypoints/training/data."""

    decoding: ModuleType
    mask_decoding: ModuleType
    shard_index: ModuleType


@functools.cache
def entry_rules() -> EntryRules:
    """The modules; they need numpy and Pillow."""
    names = [f"training.data.{name}" for name in EntryRules._fields]
    with imported(names, [entrypoints_folder()]) as modules:
        return EntryRules(*modules)

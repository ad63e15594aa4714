"""The scripts' own folder walk and image file suffixes, for the launcher: entrypoints/training/data/sources/file_trees.py."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.config.entrypoints import kit_modules

_LOADING = threading.Lock()  # several threads of the emulator pack models, and an import changes what all of them share


def image_suffixes() -> tuple[str, ...]:
    """Suffixes of image files, in lower case."""
    endings: tuple[str, ...] = _module().IMAGE_ENDINGS
    return endings


def walk(root: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, but follows links, except those that lead up to a folder that contains them."""
    yield from _module().walk(root, onerror)


def masks_among(folders: Iterable[str]) -> set[str]:
    """Names of a folder's folders that hold masks beside their images."""
    found: set[str] = _module().masks_among(folders)
    return found


def _module() -> Any:
    with _LOADING:
        return _loaded()


@functools.cache
def _loaded() -> Any:
    with kit_modules("training.data.sources.file_trees") as (module,):
        return module

"""File trees: which files are images, and the walk that every reader of a tree takes.

Standard library only: the launcher uses it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

Identity = tuple[int, int]
"""Device and inode of a folder, by whatever path it is reached."""


def walk(root: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk that follows links, except those that lead up to a folder in which they lie.

    Such a link, `class/all -> .` or `class/up -> ..`, would show each file below it again, some 40 times until the system refuses the
    path, and files beside the root. A link to any other folder is followed, as often as there are such links.

    Args:
        root: walked in any case, even if it is a link.
        onerror: called with the error of a folder that cannot be listed, which is left out. None: nothing is called.

    Yields:
        (folder, its folders, its files) from the root down. A folder removed from the second is not walked.
    """
    above = {os.fspath(root): _identities([root, *_parents(root)])}
    """Folder -> itself and all folders in which it lies."""
    for place, folders, files in os.walk(root, onerror=onerror, followlinks=True):
        around = above.pop(place)
        own = {name: _identities([os.path.join(place, name)]) for name in folders}
        folders[:] = [name for name in folders if around.isdisjoint(own[name])]
        yield place, folders, files
        above |= {os.path.join(place, name): around | own[name] for name in folders}


def masks_among(folders: Iterable[str]) -> set[str]:
    """Names of a folder's folders that hold masks beside their images, which are no images to learn from: `masks` beside `images`."""
    return {"masks"} if {"images", "masks"} <= {*folders} else set()


def refuse_unlisted(error: OSError) -> None:
    """For `walk`'s onerror: raise the error, except for a missing folder. Otherwise its content would be missing without a word."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _parents(folder: Path) -> set[Path]:
    """The folders in which a folder lies, by the path that names it and by the one without links."""
    return {*Path(os.path.abspath(folder)).parents, *Path(os.path.realpath(folder)).parents}


def _identities(folders: Iterable[str | Path]) -> frozenset[Identity]:
    """Identities of the folders that can be queried; os.walk reports the error of any other."""
    found = set()
    for folder in folders:
        try:
            facts = os.stat(folder)
        except OSError:
            continue
        found.add((facts.st_dev, facts.st_ino))
    return frozenset(found)

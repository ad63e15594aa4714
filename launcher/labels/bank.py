"""A label bank on this machine, read with the entry scripts' own rules, which need only numpy."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from launcher.config.entrypoints import kit_modules
from launcher.config.issues import mistake

VIEW = re.compile(r"view-(?:\d{4}|[1-9]\d{4,})\.bin")
"""A view's file, as the entry scripts' view_file names it; a file manager's `view-0001 (copy).bin` is none."""


@functools.cache
def rules() -> ModuleType:
    """entrypoints/training/teacher/label_bank.py."""
    with kit_modules("training.teacher.label_bank") as (module,):
        return module


class Piece(NamedTuple):
    """Consecutive records of a view."""

    images: np.ndarray
    """int64 (images,), the images' indices."""
    records: np.ndarray
    """uint8 (images, bytes of a record)."""
    held: np.ndarray
    """bool (images,), which are whole and belong to this bank, view and image."""

    @property
    def written(self) -> np.ndarray:
        """bool (images,), which are not all zeros."""
        return np.asarray(self.records.any(1))


class Bank:
    """A folder's label bank.

    Attributes:
        identity: everything that its records depend on, from its manifest.
        records: the format of a record.
        images: how many records a view has room for, one per training image.
        views: the numbers of the views that it has a file for.
        checksums: the SHA-256 of the files of complete views, by name.

    Raises:
        UserError: the folder holds no bank, or one that this version cannot read.
    """

    def __init__(self, folder: str | Path):
        self.folder, own = Path(folder), rules()
        if not (self.folder / own.MANIFEST).is_file():
            fix = "name the folder that launcher label printed, or unpack its run's model.tar.gz"
            raise mistake("FOLDER", f"{folder} holds no {own.MANIFEST}", fix)
        try:
            self.manifest: Mapping[str, Any] = own.read_manifest(self.folder)
            self.identity: Mapping[str, Any] = self.manifest[own.IDENTITY]
            self.checksums: dict[str, str] = own.read_checksums(self.folder)
        except ValueError as error:
            raise mistake("FOLDER", str(error), "copy the bank again, or fill it anew with launcher label") from None
        made = self.identity.get("record format")
        if made != own.FORMAT:
            found = f"{folder} has records of format {made}, and this version reads {own.FORMAT}"
            raise mistake("FOLDER", found, "fill it anew with launcher label")
        self.records = own.record_format(self.identity)
        self.images: int = self.identity["images"]
        begun = (file for file in self.folder.iterdir() if VIEW.fullmatch(file.name) and file.stat().st_size)
        self.views = sorted(int(file.stem.removeprefix("view-")) for file in begun)
        self._seal = own.Seal(own.key_of(self.identity), self.records.size)

    @property
    def images_per_view(self) -> int:
        """How many images one view draws; fewer than `images` in a bank that draws only a part of them."""
        return int(self.manifest["created"].get("images a view", self.images))

    @property
    def digest(self) -> str:
        """SHA-256 that identifies its complete views."""
        return str(rules().digest_of(self.folder))

    def file(self, view: int) -> Path:
        found: Path = rules().view_file(self.folder, view)
        return found

    @property
    def lost(self) -> list[str]:
        """The files of views that were complete and are missing or empty, as after a full disk."""
        files = {name: self.folder / name for name in self.checksums}
        return [name for name, file in files.items() if not file.is_file() or not file.stat().st_size]

    def wrong_size(self, view: int) -> str:
        """What is wrong with the size of a view's file; "" if nothing is."""
        size, expected = self.file(view).stat().st_size, self.images * self.records.size
        return "" if size == expected else f"{self.file(view).name} has {size:,} bytes instead of {expected:,}"

    def pieces(self, view: int) -> Iterator[Piece]:
        """All records of a view, in the order of the images; from a file that is too short, those that are there."""
        size = self.records.size
        step = max(1, rules().PIECE // size)
        with open(self.file(view), "rb") as file:
            for first in range(0, self.images, step):
                read = np.frombuffer(file.read(size * min(step, self.images - first)), np.uint8)
                records = read[: len(read) // size * size].reshape(-1, size)
                images = np.arange(first, first + len(records))
                yield Piece(images, records, self.holds(records, images, view))

    def holds(self, records: np.ndarray, images: np.ndarray, view: int) -> np.ndarray:
        """Which records, uint8 (images, bytes of a record), are whole and belong to these images: bool (images,)."""
        found: np.ndarray = self._seal.holds(records, images, view)
        return found

"""The kit's own files (beside the package in a checkout, inside it in an installed wheel) and its scripts' modules."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def beside_or_inside(name: str) -> Path:
    """A folder of the kit that is package data of a wheel: inside the package there, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def entrypoints_folder() -> Path:
    """The folder of this kit's entry scripts and of PACKAGES."""
    return beside_or_inside("entrypoints")


PACKAGES = ("training", "launcher_observer")
"""Packages shipped with a script: what this kit's scripts share, and what watches any script, which `training` uses too."""


@contextlib.contextmanager
def kit_modules(*names: str) -> Iterator[list[ModuleType]]:
    """Import modules of PACKAGES, as this kit's scripts would, and forget them afterwards. Writes no bytecode."""
    path, bytecode = list(sys.path), sys.dont_write_bytecode
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in PACKAGES}
    sys.path.insert(0, str(entrypoints_folder()))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path[:], sys.dont_write_bytecode = path, bytecode
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.modules.update(before)

"""Where this kit's entry scripts are, beside the package in a checkout, inside it in an installed wheel, and their modules."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def entrypoints_folder() -> Path:
    """The folder of this kit's entry scripts and of PACKAGES."""
    package = Path(__file__).parents[1]
    installed = package / "entrypoints"
    return installed if installed.is_dir() else package.parent / "entrypoints"


PACKAGES = ("training", "launcher_observer")
"""What travels with a script: what this kit's scripts share, and what watches any script, which `training` uses too."""


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

"""Where this kit's entry scripts are: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

from pathlib import Path


def entrypoints_folder() -> Path:
    """The folder of this kit's entry scripts and of `training`, the package that they share."""
    package = Path(__file__).parents[1]
    installed = package / "entrypoints"
    return installed if installed.is_dir() else package.parent / "entrypoints"

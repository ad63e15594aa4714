"""Where this kit's entry scripts lie: in a checkout beside the package, in an installed wheel inside it."""

from __future__ import annotations

from pathlib import Path


def entrypoints_folder() -> Path:
    """The folder of this kit's own entry scripts and of `training`, which travels with them."""
    package = Path(__file__).parents[1]
    installed = package / "entrypoints"
    return installed if installed.is_dir() else package.parent / "entrypoints"

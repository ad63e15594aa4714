"""Which files travel to the training machine, and from where."""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

IGNORE_FILE = ".launcherignore"
"""Shell patterns of files that stay, one a line, beside the script; for a folder that git does not track."""

ALWAYS_STAYS = (
    "__pycache__",
    "*.pyc",
    ".git",
    ".venv",
    ".ipynb_checkpoints",
    ".DS_Store",
    ".pytest_cache",
    IGNORE_FILE,
)


@dataclass(frozen=True)
class TravelFile:
    """A file that travels."""

    path: str
    """Its place in the code folder of the training machine, with forward slashes."""
    source: Path
    """Where it lies on this machine."""
    size: int
    """Bytes."""


def entrypoints_folder() -> Path:
    """This kit's own entry scripts: beside the package in a checkout, inside it in an installed wheel."""
    installed = Path(__file__).parent / "entrypoints"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "entrypoints"


def travelling_files(source: Path) -> list[TravelFile]:
    """The files of a source folder that travel, sorted by path: what git tracks or would track, less the ignore file's patterns.

    A folder of the user's own also gets this kit's `training` package, unless it has a `training` of its own, so that any
    script can use it.
    """
    files = {path: source / path for path in _listed(source)}
    kit = entrypoints_folder()
    if (
        source.resolve() != kit.resolve()
        and not (source / "training").exists()
        and not (source / "training.py").exists()
    ):
        files |= {path: kit / path for path in _listed(kit) if path.startswith("training/")}
    return [TravelFile(path, file, file.stat().st_size) for path, file in sorted(files.items())]


def copy_files(files: list[TravelFile], target: Path) -> None:
    """Copy files to their places below `target`."""
    for file in files:
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.source, place)
        place.chmod(0o755 if file.source.stat().st_mode & 0o100 else 0o644)


def _listed(folder: Path) -> list[str]:
    """Relative paths of a folder's files that are not ignored."""
    tracked = _git_files(folder)
    paths = tracked if tracked is not None else [file.relative_to(folder).as_posix() for file in folder.rglob("*")]
    ignore_file = folder / IGNORE_FILE
    lines = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.is_file() else []
    patterns = [
        *ALWAYS_STAYS,
        *(line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")),
    ]
    return [path for path in paths if (folder / path).is_file() and not _ignored(path, patterns)]


def _git_files(folder: Path) -> list[str] | None:
    """What git tracks or would track in a folder, or None where git does not know it."""
    command = [
        "git",
        "-C",
        str(folder),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--deduplicate",
    ]
    try:
        listing = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return [path for path in listing.decode("utf-8", "surrogateescape").split("\0") if path] or None


def _ignored(path: str, patterns: list[str]) -> bool:
    """Whether a pattern matches the path, or one of the folders or names in it."""
    parts = path.split("/")
    wholes = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (*parts, *wholes))

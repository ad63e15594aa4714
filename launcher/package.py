"""Which files travel to the training machine, and from where."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.findings import Finding

IGNORE_FILE = ".launcherignore"
"""Shell patterns of files that stay, one a line, beside the script; for a folder that git does not track."""

ALWAYS_STAYS = (
    *("__pycache__", "*.pyc", ".git", ".venv", ".ipynb_checkpoints", ".DS_Store", ".pytest_cache", IGNORE_FILE),
    *(".env", ".env.*", "*.pem", "*.p12", ".netrc", ".pypirc", ".aws", ".ssh", "id_rsa*", "id_ed25519*"),  # secrets
)

MAX_FILES = 10_000
"""More files than that are no source folder."""


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


def travelling_files(source: Path) -> tuple[list[TravelFile], list[Finding]]:
    """The files of a source folder that travel, sorted by path: what git tracks or would track, less the ignore file's patterns.

    A folder of the user's own also gets this kit's `training` package, unless it has a `training` of its own, so that any
    script can use it.

    Returns:
        The files; and what keeps the folder from being packed.
    """
    try:
        files = {path: source / path for path in _listed(source)}
    except CannotListError as error:
        return [], [Finding(key="source", found=str(error), cure=error.cure)]
    odd = [path for path in files if not path.isprintable()]
    if odd:
        return [], [Finding(key="source", found=f"a file name that is no plain text: {odd[0]!r}", cure="rename it")]
    kit = entrypoints_folder()
    has_training = (source / "training").exists() or (source / "training.py").exists()
    if source.resolve() != kit.resolve() and not has_training:
        files |= {path: kit / path for path in _listed(kit) if path.startswith("training/")}
    return [TravelFile(path, file, file.stat().st_size) for path, file in sorted(files.items())], []


class CannotListError(Exception):
    """A folder's files cannot be told; `cure` says what to do."""

    def __init__(self, found: str, cure: str):
        super().__init__(found)
        self.cure = cure


def copy_files(files: list[TravelFile], target: Path) -> None:
    """Copy files to their places below `target`."""
    for file in files:
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.source, place)
        place.chmod(0o755 if file.source.stat().st_mode & 0o100 else 0o644)


def _listed(folder: Path) -> list[str]:
    """Relative paths of a folder's files that are not ignored. Raises CannotListError."""
    paths = _git_files(folder)
    if paths is None:
        paths = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not _ignored(name, ALWAYS_STAYS)]
            paths += [(Path(place) / name).relative_to(folder).as_posix() for name in names]
            if len(paths) > MAX_FILES:
                raise CannotListError(f"{folder} holds more than {MAX_FILES} files", "name the script's own folder")
    ignore_file = folder / IGNORE_FILE
    lines = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.is_file() else []
    patterns = [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]
    return [path for path in paths if (folder / path).is_file() and not _ignored(path, [*ALWAYS_STAYS, *patterns])]


def _git_files(folder: Path) -> list[str] | None:
    """What git tracks or would track in a folder, or None where git does not know it. Raises CannotListError."""
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
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    try:
        listing = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    except FileNotFoundError:
        return None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        if "not a git repository" in said:
            return None
        # without git's list, files that .gitignore keeps back would travel
        cure = f"git config --global --add safe.directory {folder}" if "dubious" in said else "mend the repository"
        raise CannotListError(f"git cannot list {folder}: {said.partition(chr(10))[0]}", cure) from None
    return [path for path in listing.decode("utf-8", "surrogateescape").split("\0") if path] or None


def _ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path, or one of the folders or names in it."""
    parts = path.split("/")
    wholes = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (*parts, *wholes))

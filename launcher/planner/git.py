"""A folder's git state: tracked files, commit, uncommitted changes. Nothing that the repository configures as a hook is run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

_COMMAND = (
    *("git", "--no-optional-locks"),  # planning writes nothing
    *("-c", "core.fsmonitor=", "-c", f"core.hooksPath={os.devnull}"),  # both name programs, which git would run
)

_PLAIN = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
"""A patch that `git apply` takes, made by git alone."""


class GitError(Exception):
    """git cannot read a folder."""


class NoRepositoryError(GitError):
    """The folder is in no repository, or git is not installed."""


def tracked_or_new(folder: Path) -> list[str]:
    """Paths of what git tracks or would track in a folder. Raises GitError."""
    return _paths(_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"))


def state(folder: Path) -> dict[str, Any]:
    """The commit around a folder, whether the folder is clean, and its changed files with git's letters.

    Without a repository, a commit or git: {"commit": None, "reason": …}.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
        changes = _git(folder, "status", "--porcelain", "--", ".").decode("utf-8", "replace").splitlines()
    except GitError as error:
        return {"commit": None, "reason": str(error)}
    return {"commit": commit, "clean": not changes, "changed": changes}


def changed(folder: Path) -> list[str]:
    """Paths of a folder's tracked files with uncommitted changes. Raises GitError."""
    return _paths(_git(folder, "diff", "HEAD", "--relative", "--name-only", "-z", "--no-renames", *_PLAIN))


def patch(folder: Path, *pathspecs: str, readable: bool = False) -> bytes:
    """The uncommitted changes of tracked files, as a patch whose paths start at the folder.

    Args:
        pathspecs: which files, in git's words (gitglossary(7), pathspec).
        readable: show binary files as they are; `git apply` does not take such a patch.

    Raises:
        GitError: git cannot make it.
    """
    return _git(folder, "diff", "HEAD", "--relative", *_PLAIN, *(["--text"] if readable else []), "--", *pathspecs)


def _git(folder: Path, *arguments: str) -> bytes:
    """What git prints. Raises GitError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    try:
        done = subprocess.run([*_COMMAND, "-C", str(folder), *arguments], capture_output=True, env=environment)
    except FileNotFoundError:
        raise NoRepositoryError("git is not installed") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["git failed"]
        raise (NoRepositoryError if "not a git repository" in said[0] else GitError)(said[0])
    return done.stdout


def _paths(listing: bytes) -> list[str]:
    """The paths of a listing with NUL after each."""
    return [path for path in listing.decode("utf-8", "surrogateescape").split("\0") if path]

"""A folder's git state: tracked files, commit, uncommitted changes. No program that the repository names is run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

_COMMAND = (
    *("git", "--no-optional-locks"),  # planning writes nothing
    *("-c", "core.fsmonitor=", "-c", f"core.hooksPath={os.devnull}"),  # both name programs, which git would run
    *("-c", f"diff.orderFile={os.devnull}"),  # a missing file would make `status` and `diff` fail
)

_NO_FILES_OF_SUBMODULES = "--ignore-submodules=dirty"
"""A submodule counts by its commit: git would read its files under the submodule's own settings."""

_PLAIN = (
    *("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3"),
    *("--submodule=short", _NO_FILES_OF_SUBMODULES),
)
"""A patch that `git apply` accepts, made by git alone, whatever the settings of `diff`."""

_USERS_SCOPES = ("system", "global")
"""Settings that no repository brings."""

_FILTERS = ("filter.", "lfs.extension.")
"""Settings of programs that git and git-lfs pass a changed file through before they compare it (gitattributes(5), `filter`)."""


OLDEST = "2.31"
"""The first git with all options that are needed: https://git-scm.com/docs/git/2.31.0 (--config-env)"""


class GitError(Exception):
    """git cannot read a folder."""


class OldGitError(GitError):
    """git lacks an option, such as --show-scope or --config-env."""


class NoRepositoryError(GitError):
    """The folder is in no repository, or git is not installed."""


def tracked_or_new(folder: Path) -> list[str]:
    """Paths of what git tracks or would track in a folder. Raises GitError."""
    listed = _paths(_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard"))
    return [*dict.fromkeys(listed)]  # a file with a conflict is listed once for each side


def state(folder: Path) -> dict[str, Any]:
    """The commit that a folder is at, whether the folder is clean, and its changed files with git's letters.

    Without a repository, a commit or git: {"commit": None, "reason": …}.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
        status = _git(folder, "status", "--porcelain", _NO_FILES_OF_SUBMODULES, "--", ".")
    except GitError as error:
        return {"commit": None, "reason": str(error)}
    changes = status.decode("utf-8", "replace").splitlines()
    return {"commit": commit, "clean": not changes, "changed": changes}


def changed(folder: Path) -> list[str]:
    """Paths of a folder's tracked files with uncommitted changes. Raises GitError."""
    return _paths(_git(folder, "diff", "HEAD", "--relative", "--name-only", "-z", "--no-renames", *_PLAIN))


def patch(folder: Path, *pathspecs: str, readable: bool = False) -> bytes:
    """The uncommitted changes of tracked files, as a patch whose paths start at the folder.

    Args:
        pathspecs: which files, as git's pathspecs (gitglossary(7), pathspec).
        readable: show binary files as they are; `git apply` does not accept such a patch.

    Raises:
        GitError: git cannot make it.
    """
    return _git(folder, "diff", "HEAD", "--relative", *_PLAIN, *(["--text"] if readable else []), "--", *pathspecs)


def _git(folder: Path, *arguments: str) -> bytes:
    """What git prints, with the filters in the user's settings and none of the repository's own. Raises GitError."""
    listed = _run("-C", str(folder), "config", "--list", "--show-scope", "-z").decode("utf-8", "surrogateescape")
    entries = listed.split("\0")
    settings = [(scope, *entry.partition("\n")[::2]) for scope, entry in zip(entries[::2], entries[1::2], strict=False)]
    users = {key: value for scope, key, value in settings if scope in _USERS_SCOPES}
    own = {key for scope, key, _ in settings if scope not in _USERS_SCOPES and key.lower().startswith(_FILTERS)}
    variables = {f"VALUE_{number}": key for number, key in enumerate(sorted(own))}
    options = [f"--config-env={key}={name}" for name, key in variables.items()]  # `-c` takes no key with a =
    values = {name: users.get(key, "") for name, key in variables.items()}
    return _run(*options, "-C", str(folder), *arguments, **values)


def _run(*arguments: str, **variables: str) -> bytes:
    """What git prints; it fetches nothing, since a partial clone names the program to fetch with. Raises GitError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= variables | {"LC_ALL": "C", "GIT_ALLOW_PROTOCOL": ""}
    try:
        done = subprocess.run([*_COMMAND, *arguments], capture_output=True, env=environment)
    except FileNotFoundError:
        raise NoRepositoryError("git is not installed") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["git failed"]
        if "unknown option" in said[0]:
            raise OldGitError(f"git is older than {OLDEST} ({said[0]})")
        raise (NoRepositoryError if "not a git repository" in said[0] else GitError)(said[0])
    return done.stdout


def _paths(listing: bytes) -> list[str]:
    """The paths of a NUL-terminated listing."""
    return [path for path in listing.decode("utf-8", "surrogateescape").split("\0") if path]

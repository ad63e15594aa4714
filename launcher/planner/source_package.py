"""The source package: which files go to the training machine, and from where."""

from __future__ import annotations

import fnmatch
import functools
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.defaults import PROJECT_FILE
from launcher.config.entrypoints import PACKAGES, entrypoints_folder
from launcher.config.issues import Issue, mistake
from launcher.config.job import Job
from launcher.config.secret_shapes import secrets_in_text
from launcher.planner import git, not_code

IGNORE_FILE = ".launcherignore"
"""A file in the source folder that excludes others: one shell pattern a line, on top of what git ignores."""

SCHEMA_FILE = "launcher.schema.json"
"""What `launcher init` writes for editors."""

ALWAYS_EXCLUDED = (
    *(
        "__pycache__",
        "*.pyc",
        ".git",
        ".venv",
        ".ipynb_checkpoints",
        ".DS_Store",
        ".pytest_cache",
        IGNORE_FILE,
        SCHEMA_FILE,
        PROJECT_FILE,
    ),
)
"""Patterns of files that no script needs."""

SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".ssh", ".gnupg"),
    *(".aws", ".azure", ".kube", ".boto", ".s3cfg", ".docker/config.json", "*/.docker/config.json", ".dockercfg"),
    *(".git-credentials", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd", ".vault-token"),
    *(".npmrc", ".yarnrc", ".pypirc", ".databrickscfg", "kaggle.json", "*.tfstate"),
    *(
        "credentials.json",
        "client_secret*.json",
        "service*account*.json",
        "secrets.json",
        "secrets.toml",
        "secrets.y*ml",
    ),
)
"""Lowercase patterns of files that tools keep keys and passwords in."""

COMMIT_FILE = "training/source.json"
"""Where a script finds the commit of its source, which the model card names. The launcher writes it."""

SECRET_BY_NAME = "such files hold secrets"
LINK_OUT, LINK_TO_UNLISTED = "a link to outside the folder", "a link to a file that does not travel"
"""Why a file is left out as unsafe."""

LINK_TO_FOLDER, OTHER_REPOSITORY = "a link to a folder", "a repository of its own"
"""Why a folder is left out: only files travel."""

MAX_FILES = 10_000
"""More files than this, and the folder is not a source folder."""

GZIP_LEVEL = 6
"""The gzip command's own. Python's default, 9, takes much longer for hardly fewer bytes of code."""

MAX_ARCHIVE_BYTES = 100 * 2**20
"""More than this is data, which belongs in an input channel: every host fetches the archive before it starts."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the source package."""

    path: str
    """Its path in the code folder of the training machine, with forward slashes."""
    source: Path | None
    """Where it is on this machine; None for a file that the launcher writes."""
    size: int
    """Bytes."""
    content: bytes = b""
    """Of a file that the launcher writes."""

    def read(self) -> bytes:
        return self.content if self.source is None else self.source.read_bytes()

    @property
    def mode(self) -> int:
        """Permissions: executable or not, as in git; nothing else of this machine's."""
        return 0o755 if self.source is not None and self.source.stat().st_mode & 0o100 else 0o644


def source_folder(job: Job) -> Path:
    """The folder that holds the script. Raises UserError if `source` is not a path."""
    if job.source is None:
        return entrypoints_folder()
    try:
        path = Path(job.source).expanduser().absolute()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise mistake("source", f"{job.source[:80]}: {error}", "check the path") from None
    return path


def source_files(source: Path, job: Job | None = None) -> tuple[list[SourceFile], list[Issue]]:
    """The source package of a folder, sorted by path: what git tracks or would track, less the ignore file's patterns.

    Runs do not travel, nor do the data of the job's own inputs, which reach the script as channels; Python files among them do.
    A folder of the user's own also gets this kit's PACKAGES, so that any script can use `training`, unless it has a
    module `training` of its own: a folder of data may have that name. With that package comes a file that names the source's commit.

    Args:
        job: whose code it is; None: no job's, and no inputs are known.

    Returns:
        The files; and what keeps the folder from being packaged, or warnings that name inputs and unsafe files that are left out.
    """
    inputs = not_code.inputs_inside(source, job) if job is not None else {}
    try:
        listed, data = _listed(source, inputs)
        patterns = _ignore_file(source)
    except CannotListError as error:
        return [], [Issue(key="source", found=str(error), fix=error.fix)]
    reasons = {path: why_left_out(source, path, listed, patterns) or _why_no_file(source / path) for path in listed}
    files = {path: source / path for path, reason in reasons.items() if not reason and (source / path).is_file()}
    odd = [path for path in files if not path.isprintable()]
    if odd:
        return [], [Issue(key="source", found=f"a file name with unprintable characters: {odd[0]!r}", fix="rename it")]
    kit = entrypoints_folder()
    has_training = any(re.fullmatch(r"training(/.*)?\.py", path) for path in files)
    found = [SourceFile(path, file, file.stat().st_size) for path, file in files.items()]
    if source.resolve() != kit.resolve() and not has_training:
        found += [file for package in PACKAGES for file in kit_files(package)]
    if source.resolve() == kit.resolve() or not has_training:
        content = _commit(source)
        found.append(SourceFile(COMMIT_FILE, None, len(content), content))
    named = (SECRET_BY_NAME, LINK_OUT, LINK_TO_UNLISTED, LINK_TO_FOLDER, OTHER_REPOSITORY)
    left_out = {path: reason for path, reason in reasons.items() if reason in named}
    issues = [_left_out(left_out)] if left_out else []
    if job is not None:
        unnamed = not_code.not_read_as_channels(
            source / job.script, {path: inputs[path] for path in inputs if path in data}
        )
        missed = {path: unnamed[path] for path in unnamed if not _matches(path, [*ALWAYS_EXCLUDED, *patterns])}
        issues += [not_code.inputs_left_out(missed, IGNORE_FILE)] if missed else []
    return sorted(found, key=lambda file: file.path), issues


def kit_files(package: str) -> list[SourceFile]:
    """The files of one of this kit's packages. Raises UserError if git cannot list them."""
    kit = entrypoints_folder()
    try:
        listed, _ = _listed(kit)
    except CannotListError as error:
        raise mistake("this kit", str(error), error.fix) from None
    return [
        SourceFile(path, kit / path, (kit / path).stat().st_size)
        for path in listed
        if path.startswith(f"{package}/") and (kit / path).is_file() and not why_left_out(kit, path, listed)
    ]


def why_left_out(source: Path, path: str, listed: Collection[str], ignored: Sequence[str] = ()) -> str:
    """Why a file of a source folder stays on this machine, whatever carries the others; "" if it travels.

    Args:
        path: the file's, below `source`.
        listed: the paths that git tracks or would track.
        ignored: the ignore file's patterns.
    """
    target = ""
    if (source / path).is_symlink() and not _matches(path, ignored):
        target = os.path.relpath(os.path.realpath(source / path), os.path.realpath(source))
        if target == os.pardir or target.startswith(os.pardir + os.sep):
            return LINK_OUT
    places = [path, target] if target else [path]
    if any(_matches(place, [*ALWAYS_EXCLUDED, *ignored]) for place in places):
        return "excluded"
    if any(_matches(place.lower(), SECRET_FILES) for place in places):
        return SECRET_BY_NAME
    return LINK_TO_UNLISTED if target and target not in listed and (source / target).is_file() else ""


def _why_no_file(place: Path) -> str:
    """Why a path from git or a walk is no file; "" if it is one, or is gone. Git lists a submodule or nested repository as one path."""
    if not place.is_dir():
        return ""
    return LINK_TO_FOLDER if place.is_symlink() else OTHER_REPOSITORY


def uncommitted(source: Path) -> tuple[dict[str, Any], bytes]:
    """A source folder's git state, and its uncommitted changes as a patch, of files that may travel and hold no secret.

    Returns:
        (the state, with each file that the patch leaves out and the reason under `left_out`; the patch).
    """
    state = git.state(source)
    if state["commit"] is None:
        return state, b""
    try:
        changed, (listed, _) = git.changed(source), _listed(source)
        patterns = _ignore_file(source)
        left_out = {path: why for path in changed if (why := why_left_out(source, path, listed, patterns))}
        if secrets_in_text(git.patch(source, *_all_but(left_out), readable=True)):
            for path in set(changed) - set(left_out):
                found = secrets_in_text(git.patch(source, f":(literal){path}", readable=True))
                left_out |= {path: f"looks like {', '.join(found)}"} if found else {}
        patch = git.patch(source, *_all_but(left_out))
    except (git.GitError, CannotListError) as error:
        return {**state, "left_out": {".": str(error)}}, b""
    return {**state, "left_out": left_out} if left_out else state, patch


def _all_but(paths: Iterable[str]) -> list[str]:
    return [".", *(f":(exclude,literal){path}" for path in paths)]


def _left_out(left: Mapping[str, str]) -> Issue:
    """The warning that names files which stay on this machine, by reason."""
    by_reason = {
        why: sorted(path for path, reason in left.items() if reason == why) for why in sorted({*left.values()})
    }
    named = [
        f"{', '.join(paths[:5])}{f' and {len(paths) - 5} more' if len(paths) > 5 else ''} ({why})"
        for why, paths in by_reason.items()
    ]
    return Issue(
        key="source",
        level="warning",
        found=f"left out: {'; '.join(named)}",
        fix=f"no change needed unless the script reads them: declare keys under `secrets`, rename or copy the rest; "
        f"naming them in {IGNORE_FILE} silences this",
    )


class CannotListError(Exception):
    """A folder's files cannot be listed; `fix` says what to do."""

    def __init__(self, found: str, fix: str):
        super().__init__(found)
        self.fix = fix


def _commit(source: Path) -> bytes:
    """The commit of a source folder and whether it is clean, as JSON; an empty object outside a repository."""
    state = git.state(source)
    known = {name: state[name] for name in ("commit", "clean")} if state["commit"] else {}
    return (json.dumps(known) + "\n").encode()


def copy_files(files: list[SourceFile], target: Path) -> None:
    """Copy files to their places below `target`."""
    for file in files:
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read())
        place.chmod(file.mode)


def recorded_files(folder: Path) -> list[SourceFile]:
    """The files of a source package that was copied to a folder, as `copy_files` does."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [SourceFile(file.relative_to(folder).as_posix(), file, file.stat().st_size) for file in files]


def code_checksum(files: Sequence[SourceFile]) -> str:
    """A checksum of the paths and contents of the source files. COMMIT_FILE is left out, so a commit that changes none of the
    others keeps the checksum.

    Returns:
        The first 16 digits of a SHA-256.
    """
    checksum = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        if file.path != COMMIT_FILE:
            checksum.update(f"{file.path}\0{hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return checksum.hexdigest()[:16]


def archive(files: Sequence[SourceFile]) -> bytes:
    """The files as a tar.gz: the same bytes for the same files, at any time and place."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=GZIP_LEVEL, mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in sorted(files, key=lambda file: file.path):
            content = file.read()
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(content), file.mode
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def check_archive(files: Sequence[SourceFile]) -> list[Issue]:
    """What keeps files from leaving this machine: their size, or text that looks like a secret."""
    issues = []
    total = sum(file.size for file in files)
    if total > MAX_ARCHIVE_BYTES:
        largest = ", ".join(
            f"{file.path} ({file.size / 2**20:.1f} MiB)" for file in sorted(files, key=lambda file: -file.size)[:3]
        )
        issues.append(
            Issue(
                key="source",
                found=f"{total / 2**20:.1f} MiB, most of it {largest}",
                valid=f"at most {MAX_ARCHIVE_BYTES // 2**20} MiB",
                fix=f"list what the script does not need in {IGNORE_FILE}, and pass data as an input",
            )
        )
        return issues
    for file in files:
        content = file.read()
        for kind, start in _secrets_in(content).items():
            line = content[:start].count(b"\n") + 1
            issues.append(
                Issue(
                    key=f"source: {file.path}:{line}",
                    found=f"looks like {kind}, which would be uploaded",
                    fix=f"remove it, or list the file in {IGNORE_FILE}; declare it under `secrets` in the config",
                )
            )
    return issues


_JUDGED: dict[bytes, dict[str, int]] = {}
"""SHA-256 of a file's content -> what in it looks like a secret: a study or a notebook plans the same code again and again."""


def _secrets_in(content: bytes) -> dict[str, int]:
    """As `secrets_in_text`, once per process for each content."""
    digest = hashlib.sha256(content).digest()
    if digest not in _JUDGED:
        _JUDGED[digest] = secrets_in_text(content)
    return _JUDGED[digest]


def _listed(folder: Path, data: Collection[str] = ()) -> tuple[list[str], set[str]]:
    """Relative paths of a folder's files: what git tracks or would track, or all without a repository, but no run and no data.

    Args:
        data: relative paths of folders and files of which only Python files are listed.

    Returns:
        The paths, and which of `data` hold other files.

    Raises:
        CannotListError: git fails, or the files are too many.
    """
    try:
        paths = git.tracked_or_new(folder)
    except git.NoRepositoryError:
        paths = []
    except git.GitError as error:
        # without git's list, the package would hold what .gitignore excludes
        dubious = re.search(r"dubious ownership in repository at '(.*)'", str(error))
        top = shlex.quote(dubious[1]) if dubious else ""
        otherwise = "update git" if isinstance(error, git.OldGitError) else "repair the repository"
        fix = f"git config --global --add safe.directory {top}" if dubious else otherwise
        raise CannotListError(f"git cannot list {folder}: {error}", fix) from None
    runs = not_code.runs_among(folder, paths)
    every = (path for path in paths if not not_code.below(path, runs)) if paths else _walked(folder, data, runs)
    code, left = list[str](), set[str]()
    for path in every:
        among = [one for one in data if not_code.below(path, [one])] if not path.endswith(".py") else []
        left.update(among)
        code += [] if among else [path]
        if not paths and len(code) > MAX_FILES:
            raise CannotListError(f"{folder} holds more than {MAX_FILES:,} files", "name the script's own folder")
    return code, left


def _walked(folder: Path, data: Collection[str], runs: Collection[str]) -> Iterator[str]:
    """Relative paths of all files in a folder, without runs. In a folder of data, the search stops at one without Python files."""
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        kept = not_code.without_runs(Path(place), folders, names, top=Path(place) == folder)
        if kept is None:
            folders.clear()
            continue
        folders[:] = [
            name for name in kept if not _matches(name, ALWAYS_EXCLUDED) and (below / name).as_posix() not in runs
        ]
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from ((below / name).as_posix() for name in (*names, *links))
        if not_code.below(below.as_posix(), data) and not any(name.endswith(".py") for name in names):
            yield from (f"{(below / name).as_posix()}/" for name in folders)  # left out, with all that is in them
            folders.clear()


def _ignore_file(folder: Path) -> list[str]:
    """The patterns of a folder's ignore file. Raises CannotListError."""
    file = folder / IGNORE_FILE
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    patterns = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    negated = [pattern for pattern in patterns if pattern.startswith("!")]
    if negated:
        raise CannotListError(
            f"{IGNORE_FILE}: {negated[0]}: patterns with ! are not supported", "list only what to exclude"
        )
    return patterns


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path, or one of the folders or names in it."""
    parts = path.split("/")
    wholes = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    matched = _any_of(tuple(patterns)).match
    return any(matched(text) for text in {*parts, *wholes})


@functools.cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """A regex that matches any of the shell patterns; without any, nothing."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")

"""The source package: which files go to the training machine, and from where."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.entrypoints import entrypoints_folder
from launcher.config.issues import Issue, mistake
from launcher.config.job import Job

IGNORE_FILE = ".launcherignore"
"""A file in the source folder that excludes others: one shell pattern a line, on top of what git ignores."""

ALWAYS_EXCLUDED = (
    *("__pycache__", "*.pyc", ".git", ".venv", ".ipynb_checkpoints", ".DS_Store", ".pytest_cache", IGNORE_FILE),
    *(".env", ".env.*", "*.pem", "*.p12", ".netrc", ".pypirc", ".aws", ".ssh", "id_rsa*", "id_ed25519*"),  # secrets
)

COMMIT_FILE = "training/source.json"
"""Where a script finds the commit of its source, which the model card names. The launcher writes it."""

MAX_FILES = 10_000
"""More files than this, and the folder is not a source folder."""

MAX_ARCHIVE_BYTES = 100 * 2**20
"""More than this is data, which belongs in an input channel: every host fetches the archive before it starts."""

_SECRETS = {
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html#identifiers-unique-ids
    "an AWS access key": re.compile(rb"(?<![A-Z0-9])A(?:KIA|SIA)[A-Z2-7]{16}(?![A-Z0-9])"),
    # https://huggingface.co/docs/hub/security-tokens and https://docs.github.com/en/authentication (token formats)
    "a Hugging Face token": re.compile(rb"(?<![A-Za-z0-9])hf_[A-Za-z]{34}(?![A-Za-z0-9])"),
    "a GitHub token": re.compile(rb"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{82})"),
}


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
    """The folder that holds the script. Raises UserError where `source` is not a path."""
    if job.source is None:
        return entrypoints_folder()
    try:
        path = Path(job.source).expanduser().absolute()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise mistake("source", f"{job.source[:80]}: {error}", "check the path") from None
    return path


def source_files(source: Path) -> tuple[list[SourceFile], list[Issue]]:
    """The source package of a folder, sorted by path: what git tracks or would track, less the ignore file's patterns.

    A folder of the user's own also gets this kit's `training` package, so that any script can use it, unless it has a
    `training` of its own. With that package comes a file that names the source's commit.

    Returns:
        The files; and what keeps the folder from being packaged.
    """
    try:
        files = {path: source / path for path in _listed(source)}
    except CannotListError as error:
        return [], [Issue(key="source", found=str(error), fix=error.fix)]
    odd = [path for path in files if not path.isprintable()]
    if odd:
        return [], [Issue(key="source", found=f"a file name with unprintable characters: {odd[0]!r}", fix="rename it")]
    kit = entrypoints_folder()
    has_training = (source / "training").exists() or (source / "training.py").exists()
    found = [SourceFile(path, file, file.stat().st_size) for path, file in files.items()]
    if source.resolve() != kit.resolve() and not has_training:
        found += [
            SourceFile(path, kit / path, (kit / path).stat().st_size)
            for path in _listed(kit)
            if path.startswith("training/")
        ]
    if source.resolve() == kit.resolve() or not has_training:
        content = _commit(source)
        found.append(SourceFile(COMMIT_FILE, None, len(content), content))
    return sorted(found, key=lambda file: file.path), []


class CannotListError(Exception):
    """A folder's files cannot be listed; `fix` says what to do."""

    def __init__(self, found: str, fix: str):
        super().__init__(found)
        self.fix = fix


def _commit(source: Path) -> bytes:
    """The commit of a source folder and whether it is clean, as JSON; an empty object outside a repository."""

    def git(*arguments: str) -> str:
        # without optional locks git writes nothing: planning has no effect
        command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True, errors="replace").stdout.strip()

    try:
        known = {"commit": git("rev-parse", "HEAD"), "clean": not git("status", "--porcelain", "--", ".")}
    except (OSError, subprocess.CalledProcessError):
        known = {}
    return (json.dumps(known) + "\n").encode()


def copy_files(files: list[SourceFile], target: Path) -> None:
    """Copy files to their places below `target`."""
    for file in files:
        place = target / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read())
        place.chmod(file.mode)


def code_checksum(files: Sequence[SourceFile]) -> str:
    """A checksum of the paths and contents of the source files. COMMIT_FILE is left out, so a commit that changes none of them
    keeps it.

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
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in sorted(files, key=lambda file: file.path):
            content = file.read()
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode = len(content), file.mode
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def secrets_in_text(content: bytes) -> dict[str, int]:
    """What looks like a secret in a file -> the byte at which it begins."""
    found = {kind: pattern.search(content) for kind, pattern in _SECRETS.items()}
    return {kind: match.start() for kind, match in found.items() if match is not None}


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
        for kind, start in secrets_in_text(content).items():
            line = content[:start].count(b"\n") + 1
            issues.append(
                Issue(
                    key=f"source: {file.path}:{line}",
                    found=f"looks like {kind}, which would be uploaded",
                    fix=f"remove it, or list the file in {IGNORE_FILE}; pass secrets under environment",
                )
            )
    return issues


def _listed(folder: Path) -> list[str]:
    """Relative paths of a folder's files, without ignored ones. Raises CannotListError."""
    paths = _git_files(folder)
    if paths is None:
        paths = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not _ignored(name, ALWAYS_EXCLUDED)]
            paths += [(Path(place) / name).relative_to(folder).as_posix() for name in names]
            if len(paths) > MAX_FILES:
                raise CannotListError(f"{folder} holds more than {MAX_FILES:,} files", "name the script's own folder")
    ignore_file = folder / IGNORE_FILE
    lines = ignore_file.read_text(encoding="utf-8", errors="replace").splitlines() if ignore_file.is_file() else []
    patterns = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    negated = [pattern for pattern in patterns if pattern.startswith("!")]
    if negated:
        raise CannotListError(
            f"{IGNORE_FILE}: {negated[0]}: patterns with ! are not supported", "list only what to exclude"
        )
    return [path for path in paths if (folder / path).is_file() and not _ignored(path, [*ALWAYS_EXCLUDED, *patterns])]


def _git_files(folder: Path) -> list[str] | None:
    """What git tracks or would track in a folder; None outside a repository. Raises CannotListError."""
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
        # without git's list, the package would hold what .gitignore excludes
        fix = f"git config --global --add safe.directory {folder}" if "dubious" in said else "repair the repository"
        raise CannotListError(f"git cannot list {folder}: {said.partition(chr(10))[0]}", fix) from None
    return [path for path in listing.decode("utf-8", "surrogateescape").split("\0") if path] or None


def _ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path, or one of the folders or names in it."""
    parts = path.split("/")
    wholes = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (*parts, *wholes))

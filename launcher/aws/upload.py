"""Uploads before a job starts: data of this machine, the source archive, and the run's record."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launcher.aws import request
from launcher.config.file_trees import walk
from launcher.config.issues import UserError, mistake
from launcher.config.job import Job
from launcher.planner.plan import Plan, Upload
from launcher.planner.source_package import GZIP_LEVEL, archive, check_archive, code_checksum, recorded_files
from launcher.record.checksum import sha256
from launcher.record.records import RunFolder
from launcher.show.text import counted, file_size

THREADS = 8
MAX_FILES = 1_000_000
"""Beyond it, single uploads take too long, or the folder is the wrong one."""
RECORD = "record/record.tar.gz"
"""The run's record below <output>/<run>/, by which another machine attaches to the run."""

SECOND = 10**9
NORMALISED_NS, LONE_NORMALISED_NS = 347_155_200 * SECOND, 946_684_800 * SECOND
"""1981-01-01 and 2000-01-01 UTC. Tools that normalise times write 0 or 1 s (Nix, Bazel) or 1980-01-01 (zip); SOURCE_DATE_EPOCH gives all
files one time: https://reproducible-builds.org/docs/source-date-epoch/"""


def planned_upload(job: Job, channel: str, place: Path) -> Upload:
    """The target in S3 of a folder or file.

    It holds a fingerprint of names, sizes and times, and of the contents of files whose times a tool has normalised: unchanged data is
    uploaded once, and changed data never mixes with old data.

    Raises:
        UserError: the folder holds the user's home, something unreadable, a name that S3 refuses, or more than MAX_FILES files.
    """
    key = f"inputs.{channel}"
    if _holds_home(place):
        found = f"{place} holds your home folder, with its keys and settings, and would be uploaded whole"
        raise mistake(key, found, "name the data's own folder")
    fingerprint = hashlib.sha256()
    files: list[tuple[str, Path, int, int]] = []
    try:
        for relative, file in _files(place, key):
            if not relative.isprintable():
                raise mistake(key, f"a file name with unprintable characters: {relative!r}", "rename it")
            facts = file.stat()
            files.append((relative, file, facts.st_size, facts.st_mtime_ns))
        share_a_time = len(files) > 1 and len({time for *_, time in files}) == 1
        for relative, file, size, time in files:
            fingerprint.update(f"{relative}\0{size}\0{time}\n".encode())
            lone = len(files) == 1 and time < LONE_NORMALISED_NS and time % SECOND == 0
            if share_a_time or lone or time < NORMALISED_NS:
                with open(file, "rb") as opened:
                    fingerprint.update(sha256(opened).encode())
    except OSError as error:
        found = f"{error.filename}: {error.strerror}, and it would be uploaded"
        raise mistake(key, found, "name the data's own folder, or make it readable") from None
    if not files:
        raise mistake(key, f"no file in {place} to upload", "put its data there, or name another folder")
    base = f"{(job.output or '').rstrip('/')}/inputs/{channel}-{fingerprint.hexdigest()[:16]}/"
    total = sum(size for _, _, size, _ in files)
    return Upload(place, base if place.is_dir() else base + place.name, len(files), total)


def _holds_home(place: Path) -> bool:
    """Whether the user's home lies in a folder. False if there is none: HOME is not set, and the user has no entry in /etc/passwd."""
    try:
        return Path.home().resolve().is_relative_to(place.resolve())
    except RuntimeError:
        return False


def recorded_code(folder: RunFolder) -> bytes:
    """The source archive of a run, from its record.

    Raises:
        UserError: it holds what looks like a secret, which was not there when the run was planned.
    """
    files = recorded_files(folder.code)
    issues = check_archive(files)
    if issues:
        raise UserError(issues, "the code, which has changed since it was planned")
    return archive(files)


def planned_code(plan: Plan) -> bytes:
    """The source archive of a plan without a record, from the source folder.

    Raises:
        UserError: the folder no longer holds the code that was planned and checked for secrets.
    """
    fix = "plan again, and upload that plan"
    try:
        packed = archive(plan.files)
        checksum = code_checksum(plan.files)  # after packing, so that a change meanwhile is seen
    except OSError as error:
        raise mistake("source", f"{error.filename}: {error.strerror}; it was there when planned", fix) from None
    if checksum != plan.code_checksum:
        valid = f"the files as they were when {plan.name} was planned"
        raise mistake("source", f"the code in {plan.source} has changed since it was planned", fix, valid)
    return packed


def upload(plan: Plan, code: bytes, client: Any, log: Callable[[str], None]) -> None:
    """Upload a plan's data, then its code. Objects of the same size are not sent again.

    Args:
        code: the source archive, packed already: the upload of data may take hours, in which the source folder may change.
        client: a boto3 client of `s3`.
        log: called with a human-readable line before each part.

    Raises:
        botocore's and s3transfer's errors.
    """
    extra = encryption(plan.job)
    for item in plan.uploads:
        bucket, key = split(item.target)
        there = _sizes(client, bucket, key)
        wanted = [
            (file, key + relative if item.source.is_dir() else key)
            for relative, file in _files(item.source, str(item.source))
        ]
        missing = [(file, name) for file, name in wanted if there.get(name) != file.stat().st_size]
        if not missing:
            log(f"{item.target} is uploaded already")
            continue
        total = sum(file.stat().st_size for file, _ in missing)
        log(f"uploading {item.source}: {counted(len(missing), 'file')}, {file_size(total)}, to {item.target}")
        with _uploads(client, extra) as submit:
            for sent in [submit(file, bucket, name) for file, name in missing]:
                sent.result()
    target = request.code_uri(plan.job, plan.name)
    log(f"uploading the code: {counted(len(plan.files), 'file')}, {file_size(len(code))}, to {target}")
    bucket, key = split(target)
    client.put_object(Bucket=bucket, Key=key, Body=code, **extra)


@contextlib.contextmanager
def _uploads(client: Any, extra: dict[str, str]) -> Iterator[Callable[[Path, str, str], Future[None]]]:
    """Threads that upload files. After an error or Ctrl-C they give up their files and drop the rest: Python waits for its threads
    before it exits.

    Args:
        client: a boto3 client of `s3`.
        extra: further arguments of each upload.

    Yields:
        What uploads a file to a bucket, under a key.
    """
    ended = threading.Event()

    def end(_: int) -> None:  # boto3 calls it about every 256 KiB, and what it raises ends the file's upload
        if ended.is_set():
            raise CancelledError

    def submit(file: Path, bucket: str, key: str) -> Future[None]:
        return pool.submit(client.upload_file, str(file), bucket, key, ExtraArgs=extra, Callback=end)

    pool = ThreadPoolExecutor(THREADS)
    try:
        yield submit
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)


def upload_record(plan: Plan, folder: RunFolder, client: Any) -> None:
    """Upload the run's record beside its output. Raises botocore's errors."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=GZIP_LEVEL) as tar:
        for file in (
            *(folder.job, folder.plan, folder.request, folder.git, folder.git_patch),
            *(folder.versions, folder.files, folder.code),
        ):
            if file.exists():
                tar.add(file, file.name)
    bucket, key = split(f"{str(plan.job.output).rstrip('/')}/{plan.name}/{RECORD}")
    client.put_object(Bucket=bucket, Key=key, Body=packed.getvalue(), **encryption(plan.job))


def encryption(job: Job) -> dict[str, str]:
    """Arguments of an upload with the job's KMS key; {} without one."""
    return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.output_key} if job.output_key else {}


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// address."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def _files(place: Path, key: str) -> Iterator[tuple[str, Path]]:
    """A file, or every file below a folder, sorted; each with its path in the folder. Links are followed as the scripts follow them.

    Args:
        key: the message's config key.

    Raises:
        UserError: more than MAX_FILES.
        OSError: a folder cannot be read.
    """
    if place.is_file():
        yield place.name, place
        return
    found: list[Path] = []
    for at, _, names in walk(place, _raise):
        found += [Path(at) / name for name in names]
        if len(found) > MAX_FILES:
            fix = "name the data's own folder, or upload it (aws s3 sync) and write {s3: …}"
            raise mistake(key, f"{place} holds more than {MAX_FILES:,} files", fix)
    yield from sorted((file.relative_to(place).as_posix(), file) for file in found if file.is_file())


def _raise(error: OSError) -> None:
    raise error


def _sizes(client: Any, bucket: str, prefix: str) -> dict[str, int]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}

"""Transfers between S3 and the hosts' folders: channels down, checkpoints both ways, results up."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from launcher.aws.upload import split
from launcher.backends import local_hosts
from launcher.config.file_trees import walk


class DownloadFailed(Exception):
    """A channel could not be fetched. FailureReason is `Data download failed:` and the message."""


def keys_below(client: Any, bucket: str, prefix: str) -> list[str]:
    """The keys that begin with a prefix, in S3's order, without the empty objects of folders."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    found = itertools.chain.from_iterable(page.get("Contents", []) for page in pages)
    return [entry["Key"] for entry in found if not entry["Key"].endswith("/")]


def channel_files(client: Any, source: dict[str, Any], fast_file: bool, region: str, role: str) -> dict[str, str]:
    """Key -> path below the channel's folder, for an S3DataSource of the type S3Prefix.

    A prefix need not end at a `/`: `data/train` matches `data/train-small/` too. FastFile mode refuses such a prefix.
    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_S3DataSource.html

    Raises:
        DownloadFailed: no objects, or a partial prefix in FastFile mode; the message is AWS's.
    """
    uri = source["S3Uri"]
    bucket, prefix = split(uri)
    trouble = ""
    try:
        keys = keys_below(client, bucket, prefix)
    except ClientError as error:
        keys, trouble = [], f" Error message from S3: {error.response['Error'].get('Message', '')}"
    if not keys:
        raise DownloadFailed(
            f'No S3 objects found under S3 URL "{uri}" given in input data source. Please ensure that the bucket exists in '
            f'the selected region ({region}), that objects exist under that S3 prefix, and that the role "{role}" has '
            f'"s3:ListBucket" permissions on bucket "{bucket}".{trouble}'
        )
    files = {}
    for key in keys:
        whole = key == prefix or prefix == "" or prefix.endswith("/")
        if fast_file and not whole and not key.startswith(prefix + "/"):
            raise DownloadFailed(
                "Failed to download data. For FastFile mode, partial S3 prefix is not supported. S3 prefix has to end with a "
                "full file or folder. Add a trailing '/' to the S3 prefix if it ends with a folder name that is also a "
                f"prefix for other folders. Current S3 prefix: [{prefix}], found S3 object: [{key}]."
            )
        folder = prefix + "/" if key.startswith(prefix + "/") and not whole else prefix[: prefix.rfind("/") + 1]
        files[key] = key.removeprefix(folder)
    return files


def share(keys: Iterable[str], index: int, count: int) -> list[str]:
    """Host `index`'s keys of a channel that is ShardedByS3Key."""
    return sorted(keys)[index::count]


def download(client: Any, bucket: str, key: str, file: Path) -> None:
    """Write an object to a file, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    body = client.get_object(Bucket=bucket, Key=key)["Body"]
    with open(file, "wb") as target:
        shutil.copyfileobj(body, target, 1 << 20)


class Checkpoints:
    """The hosts' checkpoint folders, and the S3 prefix of CheckpointConfig that they share."""

    def __init__(self, client: Any, uri: str, folders: list[Path]):
        self.client, self.folders = client, folders
        self.bucket, prefix = split(uri)
        self.prefix = prefix.rstrip("/") + "/" if prefix else ""
        self.seen: dict[Path, tuple[int, int]] = {}

    def restore(self) -> None:
        """Copy every object below the prefix to every host, before the script starts."""
        for key in keys_below(self.client, self.bucket, self.prefix):
            for folder in self.folders:
                file = folder / key.removeprefix(self.prefix)
                download(self.client, self.bucket, key, file)
                self.seen[file] = _fingerprint(file)

    def save(self, last: bool = False) -> None:
        """Copy new and changed files to S3, and delete there what a host has deleted
        (https://docs.aws.amazon.com/sagemaker/latest/dg/model-checkpoints.html).

        Args:
            last: the files are complete, so one that cannot be stored is an error.
        """
        for file in [file for file in self.seen if not file.exists()]:
            with contextlib.suppress(BotoCoreError, ClientError):
                self.client.delete_object(Bucket=self.bucket, Key=self._key(file))
                del self.seen[file]
        for folder in self.folders:
            for file in files_below(folder):
                try:
                    fingerprint = _fingerprint(file)
                    if self.seen.get(file) == fingerprint:
                        continue
                    self.client.upload_file(str(file), self.bucket, self._key(file))
                except (OSError, Boto3Error, BotoCoreError, ClientError):
                    if last:
                        raise
                    continue
                self.seen[file] = fingerprint

    def _key(self, file: Path) -> str:
        [folder] = [folder for folder in self.folders if file.is_relative_to(folder)]
        return self.prefix + file.relative_to(folder).as_posix()


def files_below(root: Path) -> list[Path]:
    """The files below a folder, sorted; links are followed unless they lead up to a folder that contains them."""
    found = []
    for place, _, names in walk(root):
        found += [Path(place, name) for name in names]
    return sorted(file for file in found if file.is_file())


def save_results(client: Any, roots: list[Path], uri: str, archive: Path | None) -> None:
    """Upload the files of one folder of all hosts, as an archive or singly. For each name the first host's file wins.

    Args:
        roots: the folder on each host.
        uri: the archive's target, or the prefix of the files.
        archive: where to build the .tar.gz; None: upload single files.
    """
    files = local_hosts.merged_files(roots)
    if not files:
        return
    bucket, key = split(uri)
    if archive is None:
        for name, file in files.items():
            client.upload_file(str(file), bucket, f"{key}/{name}")
        return
    local_hosts.pack(files, archive)
    client.upload_file(str(archive), bucket, key)
    archive.unlink()


def _fingerprint(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns

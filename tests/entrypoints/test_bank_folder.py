"""The folder of a label bank that came as an archive: unpacked once, whole or not at all, and never that of another archive."""

from __future__ import annotations

import errno
import os
import tarfile
from pathlib import Path

import pytest
from training.models import files
from training.runtime.environment import Environment
from training.settings.distillation import TeacherCacheSettings
from training.teacher.bank_folder import BANK_ARCHIVE, MARKER, OWN, UNPACKED, bank_folder
from training.teacher.label_bank import CHECKSUMS, MANIFEST

from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.shard_channels import disk_at
from tests.entrypoints.teacher_caches import ALONE

FILES = {MANIFEST, CHECKSUMS, "view-0001.bin", "view-0002.bin"}
KEPT = TeacherCacheSettings(views=2, where="channel:cache")
READ_ONLY = pytest.mark.parametrize("read_only", [False, True])


@pytest.fixture(autouse=True)
def disk(tmp_path, monkeypatch) -> Path:
    """This host's disk."""
    (folder := tmp_path / "disk").mkdir()
    monkeypatch.setattr("training.data.sources.shard_cache.tempfile", disk_at(folder))
    return folder


def job(tmp_path: Path, checkpoints: bool = True) -> Environment:
    """The environment of a job with a channel `cache`."""
    for name in ("cache", "checkpoints"):
        (tmp_path / name).mkdir(exist_ok=True)
    output, kept = tmp_path / "output", tmp_path / "checkpoints" if checkpoints else None
    return Environment("algo-1", output, output, output / "failure", {"cache": tmp_path / "cache"}, kept)


def archive_of(tmp_path: Path, teacher: str) -> Path:
    """An archive in the channel, with a bank of two views; that of another teacher is as large."""
    bank = tmp_path / "bank"
    bank.mkdir(exist_ok=True)
    for name in FILES:
        (bank / name).write_text(f"{name} of {teacher}\n" * 100)
    (archive := tmp_path / "cache" / BANK_ARCHIVE).parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:gz", compresslevel=0) as tar:
        for file in sorted(bank.iterdir()):
            tar.add(file, file.name)
    return archive


def opened(environment: Environment, *, read_only: bool) -> Path:
    return bank_folder(KEPT, environment, ALONE, 1000, read_only=read_only)


def assert_is_bank_of(folder: Path, teacher: str) -> None:
    assert {file.name for file in folder.iterdir()} == {*FILES, MARKER}
    for name in FILES:
        assert (folder / name).read_text() == f"{name} of {teacher}\n" * 100


@READ_ONLY
def test_an_archive_is_unpacked_once_and_its_bank_is_whole(tmp_path, monkeypatch, read_only):
    environment = job(tmp_path)
    archive_of(tmp_path, "one")
    first = opened(environment, read_only=read_only)
    assert_is_bank_of(first, "one")
    monkeypatch.setattr("training.teacher.bank_folder.unpack", None)
    assert opened(environment, read_only=read_only) == first


def test_a_bank_whose_marker_cannot_be_read_is_not_unpacked_anew(tmp_path, monkeypatch):
    """It may hold answers that its archive has not."""
    environment = job(tmp_path)
    archive_of(tmp_path, "one")
    folder = opened(environment, read_only=False)
    (folder / "added").write_text("answers")
    read = Path.read_bytes

    def fails(file: Path) -> bytes:
        if file.name == MARKER:
            raise PermissionError(13, "Permission denied", str(file))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(PermissionError):
        opened(environment, read_only=False)
    assert (folder / "added").read_text() == "answers"


def test_a_bank_that_is_only_read_stays_off_the_checkpoints_which_a_job_may_lack(tmp_path, disk):
    archive_of(tmp_path, "one")
    folder = opened(job(tmp_path), read_only=True)
    assert folder.is_relative_to(disk) and not [*(tmp_path / "checkpoints").iterdir()]
    assert opened(job(tmp_path, checkpoints=False), read_only=True) == folder
    with pytest.raises(ValueError, match="is unpacked among the checkpoints, and the job keeps none"):
        opened(job(tmp_path, checkpoints=False), read_only=False)


@READ_ONLY
def test_of_a_bank_that_s3_restored_in_part_all_is_unpacked_again(tmp_path, read_only):
    """SageMaker copies files in any order, so that the marker may be there before the views."""
    environment = job(tmp_path)
    archive_of(tmp_path, "one")
    folder = opened(environment, read_only=read_only)
    for lost in (*sorted(FILES), MARKER):
        (folder / lost).unlink()
        assert_is_bank_of(opened(environment, read_only=read_only), "one")
    os.truncate(folder / "view-0002.bin", 10)
    assert_is_bank_of(opened(environment, read_only=read_only), "one")
    (folder / MARKER).write_text("{")
    assert_is_bank_of(opened(environment, read_only=read_only), "one")
    for other in sorted(FILES - {MANIFEST}):
        (folder / other).unlink()
    (folder / MARKER).unlink()
    assert_is_bank_of(opened(environment, read_only=read_only), "one")


@READ_ONLY
def test_the_bank_of_another_archive_is_not_taken_for_that_of_this_one(tmp_path, read_only):
    environment = job(tmp_path)
    size = archive_of(tmp_path, "one").stat().st_size
    opened(environment, read_only=read_only)
    assert archive_of(tmp_path, "two").stat().st_size == size
    assert_is_bank_of(opened(environment, read_only=read_only), "two")


def test_what_the_jobs_own_teacher_said_is_neither_taken_for_the_archives_bank_nor_lost(tmp_path):
    environment = job(tmp_path)
    archive_of(tmp_path, "one")
    (own := tmp_path / "checkpoints" / OWN).mkdir()
    (own / MANIFEST).write_text("the manifest alone")
    assert_is_bank_of(opened(environment, read_only=False), "one")
    assert (own / MANIFEST).read_text() == "the manifest alone"


def test_what_a_run_added_to_an_unpacked_bank_is_there_after_a_restart(tmp_path):
    environment = job(tmp_path)
    archive_of(tmp_path, "one")
    folder = opened(environment, read_only=False)
    assert folder == tmp_path / "checkpoints" / UNPACKED
    (folder / "view-0003.bin").write_text("new")
    (folder / CHECKSUMS).write_text("a view's line is away while its file changes")
    view = (folder / "view-0001.bin").read_text().upper()
    (folder / "view-0001.bin").write_text(view)
    assert opened(environment, read_only=False) == folder
    assert (folder / "view-0003.bin").read_text() == "new" and (folder / "view-0001.bin").read_text() == view


@READ_ONLY
def test_a_kill_while_unpacking_leaves_nothing_that_is_trusted_or_kept_for_ever(tmp_path, monkeypatch, read_only, disk):
    environment = job(tmp_path)
    archive_of(tmp_path, "one")

    def killed(*what) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("training.teacher.bank_folder._mark", killed)
        opened(environment, read_only=read_only)
    (tmp_path / "checkpoints/.bank-abc/content").mkdir(parents=True)  # as earlier versions left it
    folder = opened(environment, read_only=read_only)
    assert_is_bank_of(folder, "one")
    assert [*(tmp_path / "checkpoints").iterdir()] == ([] if read_only else [folder])
    assert len([*disk.rglob("*.bin")]) == (2 if read_only else 0)


@READ_ONLY
def test_of_a_damaged_archive_or_on_a_full_disk_nothing_is_left(tmp_path, monkeypatch, read_only):
    environment = job(tmp_path)
    archive = archive_of(tmp_path, "one")
    whole = archive.read_bytes()
    for damaged in (b"", whole[:-20]):
        archive.write_bytes(damaged)
        with pytest.raises(ValueError, match="model.tar.gz is damaged: copy it again"):
            opened(environment, read_only=read_only)
    archive.write_bytes(whole)

    def full(*what) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.shutil, "copyfileobj", full)
    with pytest.raises(ValueError, match=r"no room to unpack the label bank .*: free some space .*compute\.volume_gb"):
        opened(environment, read_only=read_only)
    assert not [*tmp_path.rglob("unpacked_bank"), *(tmp_path / "disk").rglob("bank")]


@pytest.mark.parametrize(
    ("read_only", "mode", "unpacked"), [(False, 0o700, [1, 0, 0]), (True, 0o700, [1, 0, 0]), (True, 0o777, [1, 1, 1])]
)
def test_one_process_of_a_host_unpacks_while_the_others_wait_for_it(tmp_path, read_only, mode, unpacked):
    """Where other users could write to the shared place, each process has one of its own."""
    archive_of(tmp_path, "one")
    job(tmp_path)
    (place := tmp_path / f"tmp/vision-shards-{os.getuid()}").mkdir(parents=True)
    place.chmod(mode)
    script = f"""
        import tempfile
        from tests.entrypoints.test_bank_folder import *
        from training.distributed.world import process_group
        from training.teacher import bank_folder as module
        tempfile.tempdir = str(out / "tmp")
        unpack = module.unpack
        module.unpack = lambda *what: (print("unpacks"), time.sleep(0.5), unpack(*what))
        with process_group() as world:
            folder = bank_folder(KEPT, job(out), world, 1000, read_only={read_only})
            assert_is_bank_of(folder, "one")
    """
    ranks = run_ranks(tmp_path, script, size=3)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], [rank.stderr for rank in ranks]
    assert [rank.stdout.count("unpacks") for rank in ranks] == unpacked

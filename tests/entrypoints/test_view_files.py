"""The records of a view lie on storage that may fail for a moment: they are read again from a file that is opened anew."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from training.data.storage import TRIES, StorageError
from training.teacher.label_bank import ViewFile

IMAGES, SIZE = 6, 8
RECORDS = np.arange(IMAGES * SIZE, dtype=np.uint8).reshape(IMAGES, SIZE)


@pytest.fixture(autouse=True)
def hurried(monkeypatch) -> None:
    monkeypatch.setattr("training.data.storage.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("training.data.storage.LONGEST_PAUSE", 0.001)


@pytest.fixture(params=[False, True], ids=["read-only", "writable"])
def view(request, tmp_path) -> ViewFile:
    filled = ViewFile(tmp_path / "view", IMAGES, SIZE, True)
    filled.write(RECORDS, np.arange(IMAGES))
    return ViewFile(tmp_path / "view", IMAGES, SIZE, request.param)


def test_a_mount_that_was_lost_and_came_back(view, monkeypatch):
    real, asked = os.preadv, []

    def lost(file: int, *where) -> int:
        asked.append(os.fstat(file).st_ino)
        if len(asked) <= 2:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(file, *where)

    # as a mount that came back has it: the same path is another file
    moved = Path(f"{view.path}-before")
    os.rename(view.path, moved)
    view.path.write_bytes(moved.read_bytes())
    monkeypatch.setattr(os, "preadv", lost)
    assert (view.read(np.array([4, 0])) == RECORDS[[4, 0]]).all()
    assert asked[0] == moved.stat().st_ino and {*asked[1:]} == {view.path.stat().st_ino}


def test_what_is_written_after_that_is_in_the_new_file(tmp_path, monkeypatch):
    view, real = ViewFile(tmp_path / "view", IMAGES, SIZE, True), os.preadv
    failures = iter([OSError(errno.EIO, "Input/output error")])

    def once(*what) -> int:
        for failure in failures:
            raise failure
        return real(*what)

    monkeypatch.setattr(os, "preadv", once)
    assert not view.read(np.arange(IMAGES)).any()
    view.write(RECORDS[:2], np.array([5, 1]))
    view.sync()
    assert (ViewFile(tmp_path / "view", IMAGES, SIZE, False).read(np.array([1, 5])) == RECORDS[[1, 0]]).all()


def test_a_file_that_was_cut_short_ends_the_run_by_its_name(view):
    os.truncate(view.path, SIZE * 3)
    assert (view.read(np.array([2])) == RECORDS[2]).all()
    with pytest.raises(StorageError, match=rf"{view.path}: the file ends before this record .EIO., in {TRIES} tries"):
        view.read(np.array([2, 3]))


def test_a_file_system_that_returns_less_than_was_asked(view, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: real(file, [parts[0][:3]], offset))
    assert (view.read(np.array([4, 0])) == RECORDS[[4, 0]]).all()

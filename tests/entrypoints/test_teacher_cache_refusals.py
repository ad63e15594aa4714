"""Teacher caches of something else, too large for the disk, or read-only: refused or used, and reported."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from training.teacher.cache import TeacherCache
from training.teacher.logit_records import record_layout

from tests.entrypoints.teacher_caches import (
    CLASSES,
    IMAGES,
    PARTS,
    CountedTeacher,
    batch_of,
    filled,
    forget,
    kept,
    opened,
)

# --- what is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parts": {**PARTS, "teacher weights": "00" * 32}},
            r"other teacher weights \(there abababababab…, here 000000000000…\)",
        ),
        ({"parts": {**PARTS, "transform": "00" * 32}}, "other transform"),
        ({"parts": {**PARTS, "data": "00" * 32}}, "other data"),
        ({"parts": {**PARTS, "dtype": "bf16"}}, r"other dtype \(there fp32, here bf16\)"),
        ({"images": 61}, r"other images \(there 60, here 61\)"),
        ({"classes": 13}, "other classes"),
        ({"top_k": None}, r"other top_k \(there 4, here None\)"),
        ({"precision": "fp32"}, "other precision"),
        (
            {"top_k": 5, "parts": {**PARTS, "data": "x"}},
            "other data .*, top_k .*: set another teacher_cache.where, or delete",
        ),
    ],
)
def test_a_cache_of_something_else_is_refused_and_the_part_is_named(tmp_path, changes, said):
    filled(tmp_path)
    before = (tmp_path / "view-0001.bin").read_bytes()
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, **changes)
    assert (tmp_path / "view-0001.bin").read_bytes() == before


def test_a_cache_of_another_record_format_is_refused(tmp_path, monkeypatch):
    filled(tmp_path)
    monkeypatch.setattr("training.teacher.bank_identity.FORMAT", 3)
    with pytest.raises(ValueError, match="other record format"):
        opened(tmp_path)


def test_records_of_something_else_are_absent_even_where_nobody_refused_them(tmp_path):
    filled(tmp_path / "foreign", parts={**PARTS, "transform": "older"})
    opened(tmp_path / "own")
    shutil.copy(tmp_path / "foreign/view-0001.bin", tmp_path / "own/view-0001.bin")
    cache, teacher = opened(tmp_path / "own"), CountedTeacher()
    assert not cache.begin_epoch([1], np.arange(IMAGES))
    cache.answers(batch_of(np.arange(IMAGES)), teacher)
    assert cache.misses == IMAGES


def test_more_and_fewer_views_are_the_same_cache_and_all_classes_is_no_top_k(tmp_path):
    filled(tmp_path / "some")
    assert torch.equal(kept(tmp_path / "some", views=1), kept(tmp_path / "some", views=9))
    filled(tmp_path / "all", top_k=CLASSES)
    kept(tmp_path / "all", top_k=None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is not a label bank's: delete"):
        opened(tmp_path)


@pytest.mark.parametrize("top_k", [1, 4, None])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_size_is_reported_beforehand(tmp_path, top_k, precision):
    cache = opened(tmp_path, top_k=top_k, precision=precision, views=2, classes=13)
    for view in (1, 2):
        cache.begin_epoch([view], [0])
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.bin"))
    assert on_disk == cache.size_bytes == 2 * IMAGES * record_layout(13, top_k, precision).size
    assert (
        f"2 views of 60 images, {'all' if top_k is None else f'the {top_k} largest of'} 13 logits in {precision}"
        in cache.summary()
    )
    assert f"{on_disk // 120} bytes each, {on_disk / 1e6:.2f} MB in all" in cache.summary()


def test_imagenets_ten_largest_logits_take_44_bytes_an_image():
    assert record_layout(1000, 10, "fp16").size == 44


def test_a_cache_that_the_disk_cannot_hold_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"will take [\d.]+ GB more in .*, which has [\d.]+ GB free: set a smaller"):
        opened(tmp_path, images=2**40)
    opened(tmp_path)  # nothing of that attempt is left


def test_what_is_written_already_needs_no_room(tmp_path, monkeypatch):
    filled(tmp_path, views=1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    opened(tmp_path, views=1)
    with pytest.raises(ValueError, match="which has 0.00 MB free"):
        opened(tmp_path, views=2)


@contextlib.contextmanager
def full(cache: TeacherCache):
    """While it lasts, the disk of view 1 has no room."""
    own = cache._files[1]._file
    kept = os.dup(own)
    with open("/dev/full", "r+b", buffering=0) as device:
        os.dup2(device.fileno(), own)
    yield
    os.dup2(kept, own)
    os.close(kept)


def test_a_full_disk_ends_labelling_with_the_fix(tmp_path):
    cache = opened(tmp_path)
    cache.begin_epoch([1], np.arange(IMAGES))
    with full(cache), pytest.raises(OSError, match="no room for the label bank: free some space"):
        cache.fill(batch_of([1, 2]), CountedTeacher())
        cache._filling.settle()


def test_a_full_disk_costs_training_records_and_no_step(tmp_path, capsys):
    cache, teacher = opened(tmp_path), CountedTeacher()
    cache.begin_epoch([1], np.arange(IMAGES))
    with full(cache):
        for images in ([1, 2], [3, 4]):
            cache.answers(batch_of(images), teacher)
        cache._filling.settle()
    cache.answers(batch_of([5]), teacher)  # there is room again
    assert not cache.begin_epoch([1], np.arange(IMAGES))
    held = cache._read_view(1, np.arange(IMAGES))[1]
    assert np.flatnonzero(held).tolist() == [5]
    assert capsys.readouterr().out.count(f"no room for the label bank in {tmp_path}: training continues") == 1


# --- read-only


@pytest.fixture
def read_only():
    """Folders of this kind cannot be written while the context lasts, by root neither."""
    folder = Path(tempfile.mkdtemp())

    @contextlib.contextmanager
    def locked():
        for path in [*folder.iterdir(), folder]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)

    yield folder, locked
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_finished_cache_is_read_from_a_folder_that_cannot_be_written(read_only):
    folder, locked = read_only
    filled(folder)
    expected = kept(folder)
    with locked():
        assert torch.equal(kept(folder, views=1), expected)


def test_what_a_read_only_cache_lacks_is_computed_and_said_to_be_computed_again(read_only):
    folder, locked = read_only
    filled(folder)
    forget(opened(folder), folder, [5])
    with locked():
        cache, teacher = opened(folder, views=1), CountedTeacher()
        assert "it is read-only: missing answers are computed on every pass and not stored" in cache.summary()
        for _ in range(2):
            assert not cache.begin_epoch([1], np.arange(IMAGES))
            cache.answers(batch_of(np.arange(10)), teacher)
    assert teacher.seen == [10, 10]


def test_a_read_only_cache_without_all_views_or_of_a_wrong_size_is_refused(read_only):
    folder, locked = read_only
    with locked(), pytest.raises(ValueError, match="holds no label bank, and none can be created there"):
        opened(folder)
    folder.chmod(0o755)
    filled(folder)
    with locked(), pytest.raises(ValueError, match="holds 1 of 2 views: set teacher_cache.views to at most 1"):
        opened(folder)
    os.truncate(folder / "view-0001.bin", 100)
    with locked():
        cache = opened(folder, views=1)
        with pytest.raises(ValueError, match=r"view-0001.bin has 100 bytes instead of 1,\d+: copy it again"):
            cache.begin_epoch([1], [0])

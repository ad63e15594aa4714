"""Archives that a job or a stranger wrote: what is whole comes out as it was, what leads elsewhere does not, what is damaged gives nothing."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from launcher.record import archives

MB = 2**20


def member(name: str, content: bytes = b"", **values) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in values.items():
        setattr(info, key, value)
    return info, content


def link(name: str, goal: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=goal)


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def unpack(tmp_path):
    """Unpacks bytes as an archive into `target`, and returns what was left out."""

    def unpack(packed: bytes, most_bytes: int = 64 * MB) -> list[str]:
        (tmp_path / "output.tar.gz").write_bytes(packed)
        return archives.unpack(tmp_path / "output.tar.gz", tmp_path / "target", most_bytes)

    return unpack


def files(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_archive_comes_out_as_it_was_packed(unpack, tmp_path, form):
    deep = "/".join(["a folder"] * 9) + "/it's ü.json"
    packed = tar(
        member("./", type=tarfile.DIRTYPE),
        member("empty", type=tarfile.DIRTYPE),
        member(deep, b"{}"),
        member("./run.sh", b"#!/bin/sh", mode=0o755),
        member("steps/step-10/weights", bytes(3 * MB)),
        link("steps/latest", "step-10"),
        link("steps/step-10/again", "steps/step-10/weights", tarfile.LNKTYPE),
        link("above", "./steps/../run.sh"),
        form=form,
    )
    assert unpack(gzip.compress(packed)) == []
    target = tmp_path / "target"
    weights = {f"steps/{name}": bytes(3 * MB) for name in ("step-10/weights", "step-10/again")}
    assert files(target) == {deep: b"{}", "run.sh": b"#!/bin/sh", "above": b"#!/bin/sh", **weights}
    assert (target / "steps/latest").readlink() == Path("step-10") and (target / "empty").is_dir()
    assert os.access(target / "run.sh", os.X_OK) and not os.access(target / deep, os.X_OK)
    assert sorted(os.listdir(tmp_path)) == ["output.tar.gz", "target"]


def test_what_was_at_the_target_is_replaced_as_a_whole(unpack, tmp_path):
    unpack(gzip.compress(tar(member("old", b"1"))))
    unpack(gzip.compress(tar(member("new", b"2"))))
    assert files(tmp_path / "target") == {"new": b"2"}


HOSTILE = {
    "an absolute path": [member("/../outside/planted", b"x")],
    "a path upwards": [member("a/../../outside/planted", b"x")],
    "a link upwards, and a file through it": [link("d", "../outside"), member("d/planted", b"x")],
    "an absolute link": [link("latest", "/opt/ml/output/data")],
    "a link to a link": [link("one", "ok"), link("two", "one/../..")],
    "a link whose folder is a link to a higher place": [
        member("top/file", b"1"),
        link("a/b/c/d", "../../../top"),
        link("a/b/c/d/up", "../../../../ok"),
        link("out", "a/b/c/d/../../outside"),
    ],
    "a hard link out": [link("passwd", "../outside/secret", tarfile.LNKTYPE)],
    "an absolute hard link": [link("passwd", "/etc/passwd", tarfile.LNKTYPE)],
    "a link to itself": [link("self", "self")],
    "a link in the place of a folder": [member("d/file", b"1"), link("d", "ok")],
    "a device": [member("zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
    "a pipe": [member("pipe", type=tarfile.FIFOTYPE)],
    "a file where a folder is": [member("d/file", b"1"), member("d", b"2")],
    "a folder where a file is": [member("d", b"1"), member("d/file", b"2")],
    "a name that no disk takes": [member("n" * 300, b"1")],
    "a NUL": [member("ok", b"good"), member("nul", b"1", pax_headers={"path": "a\0b"})],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
def test_what_leads_out_or_is_no_file_is_named_and_left_out(unpack, tmp_path, members):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    before = {"outside/secret": b"secret"}
    left_out = unpack(gzip.compress(tar(member("ok", b"good"), *members, member("last", b"good"))))
    assert left_out and all(": " in line for line in left_out)
    target = tmp_path / "target"
    assert (target / "ok").read_bytes() == (target / "last").read_bytes() == b"good"
    assert_inside(target)
    assert {name: text for name, text in files(tmp_path).items() if name.startswith("outside")} == before


def assert_inside(target: Path) -> None:
    """Everything below a folder is a file, a folder or a link that stays in it."""
    for folder, folders, names in os.walk(target):
        for name in (*folders, *names):
            place = Path(folder, name)
            assert place.resolve().is_relative_to(target.resolve()), place
            assert place.is_file() or place.is_dir()


WHOLE = gzip.compress(tar(*(member(f"weights-{index}", random.Random(index).randbytes(4000)) for index in range(20))))


def test_each_flipped_bit_is_noticed(unpack, tmp_path):
    """Bytes 4 to 9 are gzip's date, level and system, which no checksum covers and nothing reads (RFC 1952)."""
    rng = random.Random(0)
    checked = range(len(WHOLE) - 8, len(WHOLE))  # the byte before them may have bits that stand for nothing
    positions = [*range(4), *(rng.randrange(10, checked.start - 1) for _ in range(48)), *checked]
    assert len(positions) == 60
    for position in positions:
        damaged = bytearray(WHOLE)
        damaged[position] ^= 1 << rng.randrange(8) if position != 3 else 4
        with pytest.raises(archives.ArchiveError, match="damaged"):
            unpack(bytes(damaged))
        assert os.listdir(tmp_path) == ["output.tar.gz"], "and nothing of it came out"


@pytest.mark.parametrize("packed", [b"", b"not an archive", WHOLE[:-1], WHOLE[: len(WHOLE) // 2], WHOLE + b"more"])
def test_no_archive_and_a_cut_one_are_refused(unpack, tmp_path, packed):
    unpack(gzip.compress(tar(member("earlier", b"1"))))
    with pytest.raises(archives.ArchiveError, match="damaged"):
        unpack(packed)
    assert files(tmp_path / "target") == {"earlier": b"1"}


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(lambda: tar(member("zeros", bytes(9 * MB))), id="one member"),
        pytest.param(lambda: tar(*[member(f"zeros-{index}", bytes(MB)) for index in range(9)]), id="all members"),
        pytest.param(lambda: tar(member("zeros")) + bytes(9 * MB), id="behind the end"),
    ],
)
def test_an_archive_that_is_too_large_is_refused(unpack, tmp_path, packed):
    with pytest.raises(archives.ArchiveError, match="too large"):
        unpack(gzip.compress(packed()), most_bytes=8 * MB)
    assert os.listdir(tmp_path) == ["output.tar.gz"]


def test_headers_that_inflate_are_refused_before_they_fill_the_memory(unpack):
    packed = gzip.compress(tar(member("x", b"1", pax_headers={"comment": "c" * 80 * MB})))
    tracemalloc.start()
    try:
        with pytest.raises(archives.ArchiveError, match="damaged .headers"):
            unpack(packed)
        assert tracemalloc.get_traced_memory()[1] < 16 * MB
    finally:
        tracemalloc.stop()


def test_nested_headers_end_in_the_same_error(unpack):
    header = tar(member("x", b"", pax_headers={"comment": "c"}))[:1024]
    with pytest.raises(archives.ArchiveError, match="damaged"):
        unpack(gzip.compress(header * 20_000))


def test_a_sparse_file_is_refused(unpack):
    """Its headers promise more than its bytes."""
    info, content = member("sparse", b"1" * 512)
    info.pax_headers = {"GNU.sparse.size": str(2**60), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,512"}
    with pytest.raises(archives.ArchiveError, match="damaged"):
        unpack(gzip.compress(tar((info, content))))


def test_no_damage_in_the_tar_gives_another_error_or_leads_out(unpack, tmp_path):
    """Its own checksums cover the headers alone; whoever writes an archive can make all of them right."""
    rng = random.Random(0)
    plain = tar(member("a", b"1"), link("b", "a"), member("c" * 200, b"2", pax_headers={"x": "y"}), member("d/e", b"3"))
    refused = 0
    for _ in range(300):
        damaged = bytearray(plain)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(plain))] = rng.choice((0, 0x2F, 0x2E, 0x35, 0x78, 0x80, 0xFF, rng.randrange(256)))
        for start in range(0, len(plain), 512):
            block = damaged[start : start + 512]
            if block[257:262] == b"ustar":
                total = sum(block[:148]) + 8 * 32 + sum(block[156:])
                damaged[start + 148 : start + 156] = b"%06o\0 " % total
        try:
            unpack(gzip.compress(bytes(damaged)))
            assert_inside(tmp_path / "target")
        except archives.ArchiveError:
            refused += 1
    assert 0 < refused < 300


def test_one_file_is_read_from_the_beginning_of_an_archive(tmp_path):
    archive = tmp_path / "model.tar.gz"
    packed = tar(link("config.json", "a"), member("./a/../config.json", b"{}"), member("weights", bytes(9 * MB)))
    archive.write_bytes(gzip.compress(packed)[:-8])  # nobody reads to the end
    assert archives.read_member(archive, "config.json", MB) == b"{}"
    assert archives.read_member(archive, "weights", MB) is None, "it does not end within them"
    assert archives.read_member(archive, "none", MB) is None
    archive.write_bytes(b"no archive")
    with pytest.raises(archives.ArchiveError, match="damaged"):
        archives.read_member(archive, "config.json", MB)

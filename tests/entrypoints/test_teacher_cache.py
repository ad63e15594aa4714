"""The teacher's cache: what it keeps is what the teacher said, or is not there; whoever wrote it, and however they ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training.data.batches import LabelledBatch
from training.distributed.world import World
from training.teacher.cache import TeacherCache, size_of
from training.teacher.logit_records import ViewFile

from tests.conftest import wait_until
from tests.entrypoints.ranks import run_ranks, started_ranks, torchrun_environments

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a single process")
PARTS = {"teacher weights": "ab" * 32, "transform": "cd" * 32, "data": "ef" * 32, "dtype": "fp32"}
IMAGES, CLASSES = 60, 12
PIXELS = torch.randint(0, 256, (IMAGES, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def opened(where: Path, **changes) -> TeacherCache:
    values = {
        "parts": PARTS,
        "images": IMAGES,
        "classes": CLASSES,
        "views": 2,
        "top_k": 4,
        "precision": "fp16",
        "world": ALONE,
    }
    return TeacherCache.open(where, **{**values, **changes})


def batch_of(numbers, view: int = 1) -> LabelledBatch:
    """A view of images: the same pixels, brighter."""
    numbers = torch.as_tensor(numbers)
    labels = numbers % CLASSES
    return LabelledBatch(
        PIXELS[numbers] // 2 + view,
        labels,
        labels,
        torch.ones(len(numbers)),
        numbers,
        torch.full((len(numbers),), view),
    )


class Model(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, images):
        return self.head(images.flatten(1).float() / 16)


class CountedTeacher:
    """A teacher that tells which batches it saw."""

    def __init__(self):
        self.model, self.seen = Model(1).requires_grad_(False), []

    def __call__(self, images):
        self.seen.append(len(images))
        return self.model(images)


def no_teacher(images):
    raise AssertionError("the teacher was asked")


def filled(where: Path, *, batch_size: int = 10, **changes) -> TeacherCache:
    """A cache that holds all images of its first view."""
    cache, teacher = opened(where, **changes), CountedTeacher()
    cache.begin_epoch(1, np.arange(IMAGES))
    for numbers in torch.randperm(IMAGES, generator=torch.Generator().manual_seed(3)).split(batch_size):
        cache.logits(batch_of(numbers), teacher)
    cache.close()
    return cache


def kept(where: Path, **changes) -> torch.Tensor:
    """The first view's logits, without a teacher."""
    cache = opened(where, **changes)
    assert cache.begin_epoch(1, np.arange(IMAGES))
    return cache.logits(batch_of(np.arange(IMAGES)), no_teacher)


# --- training with it


def distilled(
    cache: TeacherCache | None, epochs: int, views: int, teacher, temperature: float = 2.0
) -> tuple[list[float], Model]:
    """A student's losses and weights after some epochs with a teacher that runs, or whose logits are kept."""
    student = Model(2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    losses = []
    for epoch in range(1, epochs + 1):
        view = (epoch - 1) % views + 1
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
        if cache is not None:
            cache.begin_epoch(view, order.numpy())
        for numbers in order.split(10):
            batch = batch_of(numbers, view)
            logits = teacher(batch.images) if cache is None else cache.logits(batch, teacher)
            soft, own = (logits / temperature).log_softmax(1), (student(batch.images) / temperature).log_softmax(1)
            loss = F.kl_div(own, soft, reduction="batchmean", log_target=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, student


def test_with_a_view_an_epoch_it_equals_online_distillation_to_the_precision_of_its_storage(tmp_path):
    online, expected = distilled(None, 3, 3, CountedTeacher())
    exact, student = distilled(
        opened(tmp_path / "exact", views=3, top_k=None, precision="fp32"), 3, 3, CountedTeacher()
    )
    assert exact == online
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in student.state_dict().items())
    half, student = distilled(opened(tmp_path / "half", views=3, top_k=None), 3, 3, CountedTeacher())
    assert half == pytest.approx(online, rel=2e-3) and half != online
    torch.testing.assert_close(student.head.weight, expected.head.weight, rtol=0, atol=1e-3)


def test_a_view_passes_through_the_teacher_once_and_later_epochs_and_runs_need_none(tmp_path):
    cache, teacher = opened(tmp_path), CountedTeacher()
    distilled(cache, 4, 2, teacher)
    assert sum(teacher.seen) == 2 * IMAGES and (cache.hits, cache.misses) == (2 * IMAGES, 2 * IMAGES)
    again, _ = distilled(opened(tmp_path), 4, 2, no_teacher)
    assert again == distilled(cache, 4, 2, no_teacher)[0]


def test_the_temperature_may_change_afterwards(tmp_path):
    cache = opened(tmp_path, top_k=None)
    distilled(cache, 2, 2, CountedTeacher(), temperature=4.0)
    for temperature in (1.0, 8.0):
        online, _ = distilled(None, 2, 2, CountedTeacher(), temperature)
        cached, _ = distilled(opened(tmp_path, top_k=None), 2, 2, no_teacher, temperature)
        assert cached == pytest.approx(online, rel=5e-3)


def test_what_was_written_is_read_in_any_order_by_any_batch_size(tmp_path):
    filled(tmp_path, batch_size=7)
    expected, cache = kept(tmp_path), opened(tmp_path)
    cache.begin_epoch(1, np.arange(IMAGES))
    for numbers in torch.randperm(IMAGES).split(9):
        assert torch.equal(cache.logits(batch_of(numbers), no_teacher), expected[numbers])


def test_the_writing_pass_sees_the_numbers_that_later_ones_read(tmp_path):
    cache = opened(tmp_path)
    cache.begin_epoch(1, np.arange(IMAGES))
    first = cache.logits(batch_of(np.arange(IMAGES)), CountedTeacher())
    cache.sync()
    assert torch.equal(first, kept(tmp_path))


def test_a_batch_that_lacks_one_record_passes_through_the_teacher_whole_and_keeps_what_it_had(tmp_path, monkeypatch):
    """So the shapes, and the order of the sums in them, are those of a run that nobody interrupted."""
    filled(tmp_path)
    cache, before = opened(tmp_path), kept(tmp_path)
    forget(cache, tmp_path, [7])
    assert not cache.begin_epoch(1, np.arange(IMAGES))
    assert cache.begin_epoch(1, np.delete(np.arange(IMAGES), 7)), "an epoch that does not draw the image is complete"
    cache.begin_epoch(1, np.arange(IMAGES))
    teacher, written = CountedTeacher(), []
    write = ViewFile.write
    monkeypatch.setattr(ViewFile, "write", lambda file, *what: (written.extend(what[1].tolist()), write(file, *what)))
    other = cache.logits(batch_of(np.arange(20)), lambda images: teacher(images) + 1)
    cache.sync()
    assert written == [7]
    assert teacher.seen == [20] and (cache.hits, cache.misses) == (19, 1)
    others = [number for number in range(20) if number != 7]
    assert torch.equal(other[others], before[others])
    torch.testing.assert_close(other[7], before[7] + 1, rtol=2**-10, atol=1e-3)


def forget(cache: TeacherCache, where: Path, numbers: list[int]) -> None:
    with open(where / "view-0001.bin", "r+b") as file:
        for number in numbers:
            file.seek(number * cache.layout.size)
            file.write(b"\0" * cache.layout.size)


# --- damage


def test_whatever_happens_to_a_file_its_records_are_right_or_absent_and_come_back(tmp_path):
    filled(tmp_path)
    expected, size = kept(tmp_path), opened(tmp_path).layout.size
    path, rng = tmp_path / "view-0001.bin", random.Random(1)
    whole = path.read_bytes()
    for trial in range(60):
        place = rng.randrange(len(whole))
        damaged = bytearray(whole)
        if trial % 3 == 0:
            damaged = damaged[:place]  # a copy that broke off
        elif trial % 3 == 1:
            damaged[place] ^= 1 << rng.randrange(8)
        else:
            damaged[place : place + rng.randrange(1, 3 * size)] = b""  # everything behind it has moved
        path.write_bytes(damaged)
        cache, teacher = opened(tmp_path), CountedTeacher()
        assert not cache.begin_epoch(1, np.arange(IMAGES)), trial
        seen = torch.cat([cache.logits(batch_of(numbers), teacher) for numbers in torch.arange(IMAGES).split(10)])
        torch.testing.assert_close(seen, expected, rtol=2**-10, atol=1e-3)
        assert cache.hits + cache.misses == IMAGES and cache.misses > 0
        assert cache.begin_epoch(1, np.arange(IMAGES)), "what was lost is back"


def test_a_file_that_grew_gives_its_records(tmp_path):
    filled(tmp_path)
    with open(tmp_path / "view-0001.bin", "ab") as file:
        file.write(b"more")
    kept(tmp_path)


def test_a_record_that_breaks_within_a_complete_epoch_is_mended(tmp_path):
    filled(tmp_path)
    expected, cache = kept(tmp_path), opened(tmp_path)
    assert cache.begin_epoch(1, np.arange(IMAGES))
    forget(cache, tmp_path, [3, 4])
    seen = cache.logits(batch_of(np.arange(10)), CountedTeacher())
    torch.testing.assert_close(seen, expected[:10], rtol=2**-10, atol=1e-3)
    cache.sync()
    assert torch.equal(cache.logits(batch_of(np.arange(10)), no_teacher), seen)


PREAMBLE = """
    import hashlib
    from tests.entrypoints.test_teacher_cache import *
    def fill(cache, hashes):
        cache.begin_epoch(1, np.arange(IMAGES))
        for step, numbers in enumerate(torch.arange(IMAGES).split(4)):
            logits = cache.logits(batch_of(numbers), CountedTeacher())
            print(step, hashlib.sha256(logits.numpy()).hexdigest(), file=hashes, flush=True)
"""


def test_a_run_killed_at_any_moment_goes_on_with_the_same_numbers(tmp_path):
    script = (
        PREAMBLE
        + """
    cache = opened(out / "cache", world=ALONE)
    with open(out / f"hashes-{os.environ['ATTEMPT']}", "w") as hashes:
        while True:
            fill(cache, hashes)
            forget(cache, out / "cache", sorted(random.sample(range(IMAGES), 20)))
    """
    )
    rng, seen = random.Random(7), set()
    for attempt in range(6):
        hashes, wanted = tmp_path / f"hashes-{attempt}", rng.randrange(1, IMAGES)
        with started_ranks(tmp_path, script, size=1, environments=[{"ATTEMPT": str(attempt)}]):
            wait_until(partial(has_lines, hashes, wanted), 60)
        # here it was killed with SIGKILL, wherever it was
        seen |= {line for line in hashes.read_text().splitlines() if len(line) > 64}
    assert len(seen) == IMAGES // 4, "every step gave one and the same result in all attempts"
    cache = opened(tmp_path / "cache")
    cache.begin_epoch(1, np.arange(IMAGES))
    assert cache.logits(batch_of(np.arange(IMAGES)), CountedTeacher()).isfinite().all()


def has_lines(file: Path, count: int) -> bool:
    return file.is_file() and file.read_bytes().count(b"\n") >= count


def test_processes_that_write_the_same_places_at_once_leave_whole_records_of_one_or_the_other(tmp_path):
    script = (
        PREAMBLE
        + """
    rank = int(os.environ["RANK"])
    cache = opened(out / "cache", world=ALONE)
    teacher = lambda images: CountedTeacher()(images) + 10 * rank
    cache.begin_epoch(1, np.arange(IMAGES))
    (out / f"here-{rank}").touch()
    while not (out / f"here-{1 - rank}").exists():
        pass
    for _ in range(30):
        for numbers in torch.arange(IMAGES).split(4):
            forget(cache, out / "cache", numbers.tolist())
            cache.logits(batch_of(numbers), teacher)
    """
    )
    assert [rank.returncode for rank in run_ranks(tmp_path, script)] == [0, 0]
    filled(tmp_path / "alone")
    own, cache, absent = kept(tmp_path / "alone"), opened(tmp_path / "cache"), CountedTeacher()
    cache.begin_epoch(1, np.arange(IMAGES))
    seen = torch.cat([cache.logits(batch_of([number]), lambda images: absent(images)) for number in range(IMAGES)])
    other = (seen - own).mean(1) > 5
    torch.testing.assert_close(seen, own + 10.0 * other[:, None], rtol=2**-9, atol=2e-2)
    assert len(absent.seen) < IMAGES


# --- several ranks and hosts


RANKS = (
    PREAMBLE
    + """
    def digest(logits):
        return hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    def pass_over(cache, world, order, share, teacher):
        print(cache.begin_epoch(1, order))
        found = {}
        for numbers in order.view(-1, world.size, share)[:, world.rank]:
            found.update(zip(numbers.tolist(), map(digest, cache.logits(batch_of(numbers), teacher))))
        (out / f"found-{world.size}-{world.rank}.json").write_text(json.dumps(found))
"""
)


def found_by(tmp_path: Path, size: int) -> dict[str, str]:
    return {
        key: value
        for rank in range(size)
        for key, value in json.loads((tmp_path / f"found-{size}-{rank}.json").read_text()).items()
    }


def test_two_ranks_write_and_three_read_the_same_with_another_batch_size_and_order(tmp_path):
    writing = (
        RANKS
        + """
    with process_group() as world:
        cache = opened(out / "cache", world=world)
        pass_over(cache, world, torch.randperm(IMAGES, generator=torch.Generator().manual_seed(1)), 5, CountedTeacher())
    """
    )
    reading = (
        RANKS
        + """
    with process_group() as world:
        cache = opened(out / "cache", world=world)
        World.gather_rows = None  # a complete epoch has no collective
        pass_over(cache, world, torch.arange(IMAGES), 4, no_teacher)
    """
    )
    for script, size, complete in ((writing, 2, "False"), (reading, 3, "True")):
        for rank in run_ranks(tmp_path, script, size=size):
            assert (rank.returncode, rank.stdout.strip()) == (0, complete), rank.stderr
    assert found_by(tmp_path, 2) == found_by(tmp_path, 3) and len(found_by(tmp_path, 3)) == IMAGES


def test_an_epoch_is_complete_only_where_all_ranks_find_all_of_theirs(tmp_path, monkeypatch):
    filled(tmp_path / "cache")
    forget(opened(tmp_path / "cache"), tmp_path / "cache", [IMAGES - 1])
    script = (
        RANKS
        + """
    with process_group() as world:
        cache = opened(out / "cache", world=world)
        print(cache.begin_epoch(1, torch.arange(IMAGES).chunk(2)[world.rank]))
    """
    )
    assert [rank.stdout.strip() for rank in run_ranks(tmp_path, script)] == ["False", "False"]
    monkeypatch.setattr("training.teacher.cache.SCANNED", 100)  # a few records at once
    assert not opened(tmp_path / "cache").begin_epoch(1, np.arange(IMAGES))


@pytest.mark.parametrize("shared", [True, False])
def test_each_hosts_folder_gets_all_ranks_records_and_a_shared_one_has_a_single_writer(tmp_path, shared):
    script = (
        RANKS
        + f"""
    write = ViewFile.write
    ViewFile.write = lambda self, *what: (print("writes"), write(self, *what))
    with process_group() as world:
        cache = opened(out / ("cache" if {shared} else f"cache-{{world.rank}}"), world=world)
        pass_over(cache, world, torch.arange(IMAGES), 5, CountedTeacher())
    """
    )
    environments = [{**environment, "LOCAL_RANK": "0"} for environment in torchrun_environments(2)]
    ranks = run_ranks(tmp_path, script, environments=environments)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert ["writes" in rank.stdout for rank in ranks] == [True, not shared]
    folders = [tmp_path / "cache"] if shared else [tmp_path / "cache-0", tmp_path / "cache-1"]
    first = kept(folders[0])
    assert all(torch.equal(kept(folder), first) for folder in folders)


def test_a_cache_that_one_rank_refuses_stops_all_of_them(tmp_path):
    filled(tmp_path / "cache-1", precision="fp32")
    script = (
        RANKS
        + """
    with process_group() as world:
        opened(out / f"cache-{world.rank}", world=world)
    """
    )
    ranks = run_ranks(tmp_path, script)
    assert all(rank.returncode == 1 for rank in ranks)
    assert "another process cannot use its teacher cache" in ranks[0].stderr
    assert "other precision (there fp32, here fp16)" in ranks[1].stderr


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
    monkeypatch.setattr("training.teacher.cache.FORMAT", 2)
    with pytest.raises(ValueError, match="other record format"):
        opened(tmp_path)


def test_records_of_something_else_are_absent_even_where_nobody_refused_them(tmp_path):
    filled(tmp_path / "foreign", parts={**PARTS, "transform": "older"})
    opened(tmp_path / "own")
    shutil.copy(tmp_path / "foreign/view-0001.bin", tmp_path / "own/view-0001.bin")
    cache, teacher = opened(tmp_path / "own"), CountedTeacher()
    assert not cache.begin_epoch(1, np.arange(IMAGES))
    cache.logits(batch_of(np.arange(IMAGES)), teacher)
    assert cache.misses == IMAGES


def test_more_and_fewer_views_are_the_same_cache_and_all_classes_is_no_top_k(tmp_path):
    filled(tmp_path / "some")
    assert torch.equal(kept(tmp_path / "some", views=1), kept(tmp_path / "some", views=9))
    filled(tmp_path / "all", top_k=CLASSES)
    kept(tmp_path / "all", top_k=None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is not a teacher cache's: delete"):
        opened(tmp_path)


@pytest.mark.parametrize("top_k", [1, 4, None])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_size_is_told_beforehand(tmp_path, top_k, precision):
    cache = opened(tmp_path, top_k=top_k, precision=precision, views=2, classes=13)
    for view in (1, 2):
        cache.begin_epoch(view, [0])
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.bin"))
    assert on_disk == cache.size_bytes == size_of(IMAGES, 13, 2, top_k, precision)
    assert (
        f"2 views of 60 images, {'all' if top_k is None else f'the {top_k} largest of'} 13 logits in {precision}"
        in cache.say()
    )
    assert f"{on_disk // 120} bytes each, {on_disk / 1e6:.2f} MB in all" in cache.say()


def test_imagenets_ten_largest_logits_take_48_bytes_an_image():
    assert size_of(1_281_167, 1000, 1, 10, "fp16") == 1_281_167 * 48


def test_a_cache_that_the_disk_cannot_hold_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"will take [\d.]+ GB more in .*, where [\d.]+ GB are free: set a smaller"):
        opened(tmp_path, images=2**40)
    opened(tmp_path)  # nothing of that attempt is left


def test_what_is_written_already_needs_no_room(tmp_path, monkeypatch):
    filled(tmp_path, views=1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    opened(tmp_path, views=1)
    with pytest.raises(ValueError, match="where 0.00 MB are free"):
        opened(tmp_path, views=2)


def test_a_full_disk_is_told_with_the_fix(tmp_path):
    cache = opened(tmp_path)
    cache.begin_epoch(1, np.arange(IMAGES))
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), cache._file._file)
    with pytest.raises(OSError, match="no room for the teacher cache: free some space"):
        cache.logits(batch_of([1, 2]), CountedTeacher())
        cache.sync()


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
        assert "it is read-only: missing logits are computed on every pass and not stored" in cache.say()
        for _ in range(2):
            assert not cache.begin_epoch(1, np.arange(IMAGES))
            cache.logits(batch_of(np.arange(10)), teacher)
    assert teacher.seen == [10, 10]


def test_a_read_only_cache_without_all_views_or_of_a_wrong_size_is_refused(read_only):
    folder, locked = read_only
    with locked(), pytest.raises(ValueError, match="holds no teacher cache, and none can be created there"):
        opened(folder)
    folder.chmod(0o755)
    filled(folder)
    with locked(), pytest.raises(ValueError, match="holds 1 of 2 views: set teacher_cache.views to at most 1"):
        opened(folder)
    os.truncate(folder / "view-0001.bin", 100)
    with locked():
        cache = opened(folder, views=1)
        with pytest.raises(ValueError, match=r"view-0001.bin has 100 bytes instead of 1,\d+: copy it again"):
            cache.begin_epoch(1, [0])

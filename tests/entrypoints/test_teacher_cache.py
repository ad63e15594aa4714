"""The teacher's cache: what it keeps is what the teacher said, or is not there; whoever wrote it, and however they ended."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from training.teacher import cache_filling
from training.teacher.cache import TeacherCache
from training.teacher.label_bank import ViewFile

from tests.conftest import wait_until
from tests.entrypoints.ranks import run_ranks, started_ranks, torchrun_environments
from tests.entrypoints.teacher_caches import (
    IMAGES,
    PREAMBLE,
    CountedTeacher,
    Model,
    batch_of,
    filled,
    forget,
    has_lines,
    kept,
    no_teacher,
    opened,
)

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
            cache.begin_epoch([view], order.numpy())
        for numbers in order.split(10):
            batch = batch_of(numbers, view)
            logits = teacher(batch.images) if cache is None else cache.answers(batch, teacher)
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
    cache.begin_epoch([1], np.arange(IMAGES))
    for numbers in torch.randperm(IMAGES).split(9):
        assert torch.equal(cache.answers(batch_of(numbers), no_teacher), expected[numbers])


def test_the_writing_pass_sees_the_numbers_that_later_ones_read(tmp_path):
    cache = opened(tmp_path)
    cache.begin_epoch([1], np.arange(IMAGES))
    first = cache.answers(batch_of(np.arange(IMAGES)), CountedTeacher())
    cache.sync()
    assert torch.equal(first, kept(tmp_path))


def test_a_batch_that_lacks_one_record_passes_through_the_teacher_whole_and_keeps_what_it_had(tmp_path, monkeypatch):
    """So the shapes, and the order of the sums in them, are those of a run that nobody interrupted."""
    filled(tmp_path)
    cache, before = opened(tmp_path), kept(tmp_path)
    forget(cache, tmp_path, [7])
    assert not cache.begin_epoch([1], np.arange(IMAGES))
    assert cache.begin_epoch([1], np.delete(np.arange(IMAGES), 7)), "an epoch that does not draw the image is complete"
    cache.begin_epoch([1], np.arange(IMAGES))
    teacher, written = CountedTeacher(), []
    write = ViewFile.write
    monkeypatch.setattr(ViewFile, "write", lambda file, *what: (written.extend(what[1].tolist()), write(file, *what)))
    other = cache.answers(batch_of(np.arange(20)), lambda images: teacher(images) + 1)
    cache.sync()
    assert written == [7]
    assert teacher.seen == [20] and (cache.hits, cache.misses) == (19, 1)
    others = [number for number in range(20) if number != 7]
    assert torch.equal(other[others], before[others])
    torch.testing.assert_close(other[7], before[7] + 1, rtol=2**-10, atol=1e-3)


def test_a_bank_is_complete_without_records_of_broken_images_which_are_read_once_however_many_there_are(tmp_path):
    images, broken, read = np.arange(1800), range(100, 1300), []

    def stand_in(index: int) -> int:
        read.append(index)
        return 1300 if index in broken else index

    cache = opened(tmp_path, images=len(images), stand_in=stand_in)
    assert not cache.begin_epoch([1], images)
    assert read == [0], "the first readable image without a record is enough"
    for some in np.delete(images, broken).reshape(-1, IMAGES):
        batch = batch_of(np.arange(IMAGES))._replace(indices=torch.from_numpy(some))
        cache.answers(batch, CountedTeacher())
    assert cache.begin_epoch([1], images) and read == [0, *broken]
    assert cache.begin_epoch([1], images) and read == [0, *broken], "nothing is read again"
    for readable in (50, 1300, 1799):
        whole = (tmp_path / "view-0001.bin").read_bytes()
        forget(cache, tmp_path, [readable])
        assert not cache.begin_epoch([1], images), readable
        (tmp_path / "view-0001.bin").write_bytes(whole)
    assert cache.begin_epoch([1], images)


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
        assert not cache.begin_epoch([1], np.arange(IMAGES)), trial
        seen = torch.cat([cache.answers(batch_of(numbers), teacher) for numbers in torch.arange(IMAGES).split(10)])
        torch.testing.assert_close(seen, expected, rtol=2**-10, atol=1e-3)
        assert cache.hits + cache.misses == IMAGES and cache.misses > 0
        assert cache.begin_epoch([1], np.arange(IMAGES)), "what was lost is back"


def test_a_file_that_grew_gives_its_records(tmp_path):
    filled(tmp_path)
    with open(tmp_path / "view-0001.bin", "ab") as file:
        file.write(b"more")
    kept(tmp_path)


def test_a_record_that_breaks_within_a_complete_epoch_is_mended(tmp_path):
    filled(tmp_path)
    expected, cache = kept(tmp_path), opened(tmp_path)
    assert cache.begin_epoch([1], np.arange(IMAGES))
    forget(cache, tmp_path, [3, 4])
    seen = cache.answers(batch_of(np.arange(10)), CountedTeacher())
    torch.testing.assert_close(seen, expected[:10], rtol=2**-10, atol=1e-3)
    cache.sync()
    assert torch.equal(cache.answers(batch_of(np.arange(10)), no_teacher), seen)


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
    cache.begin_epoch([1], np.arange(IMAGES))
    assert cache.answers(batch_of(np.arange(IMAGES)), CountedTeacher()).isfinite().all()


def test_processes_that_write_the_same_places_at_once_leave_whole_records_of_one_or_the_other(tmp_path):
    script = (
        PREAMBLE
        + """
    rank = int(os.environ["RANK"])
    cache = opened(out / "cache", world=ALONE)
    teacher = lambda images: CountedTeacher()(images) + 10 * rank
    cache.begin_epoch([1], np.arange(IMAGES))
    (out / f"here-{rank}").touch()
    while not (out / f"here-{1 - rank}").exists():
        pass
    for _ in range(30):
        for numbers in torch.arange(IMAGES).split(4):
            forget(cache, out / "cache", numbers.tolist())
            cache.answers(batch_of(numbers), teacher)
    """
    )
    assert [rank.returncode for rank in run_ranks(tmp_path, script)] == [0, 0]
    filled(tmp_path / "alone")
    own, cache, absent = kept(tmp_path / "alone"), opened(tmp_path / "cache"), CountedTeacher()
    cache.begin_epoch([1], np.arange(IMAGES))
    seen = torch.cat([cache.answers(batch_of([number]), lambda images: absent(images)) for number in range(IMAGES)])
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
        print(cache.begin_epoch([1], order))
        found = {}
        for numbers in order.view(-1, world.size, share)[:, world.rank]:
            found.update(zip(numbers.tolist(), map(digest, cache.answers(batch_of(numbers), teacher))))
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
        print(cache.begin_epoch([1], torch.arange(IMAGES).chunk(2)[world.rank]))
    """
    )
    assert [rank.stdout.strip() for rank in run_ranks(tmp_path, script)] == ["False", "False"]
    monkeypatch.setattr("training.teacher.missing.PIECE", 100)  # a few records at once
    assert not opened(tmp_path / "cache").begin_epoch([1], np.arange(IMAGES))


@pytest.mark.parametrize(
    "task",
    [
        "Distillation([], teacher, cache, timeline=timeline)",
        "Segmentation(None, teacher, None, world, timeline, cache)",
    ],
    ids=["distillation", "segmentation"],
)
def test_each_rank_checks_what_it_draws_in_the_whole_epoch_and_teachers_leave_together(tmp_path, task):
    filled(tmp_path / "cache")
    script = (
        RANKS
        + f"""
    from training.data.batches import TrainingBatches
    from training.measure.timeline import Timeline
    from training.tasks.distillation import Distillation
    from training.tasks.segmentation import Segmentation
    class Teacher(torch.nn.Module):
        def to(self, device):
            found["leaves"] = True
    read = ViewFile.read
    ViewFile.read = lambda file, images: (found["read"].extend(images.tolist()), read(file, images))[1]
    with process_group() as world:
        cache, teacher, timeline = opened(out / "cache", world=world), Teacher(), Timeline(world.device)
        batches = TrainingBatches(IMAGES, 20, world, 0, accumulation=5, views=1)
        batches.start(1, 2)  # a resume in its middle
        for lost in (None, batches.indices(1)[10]):  # the second rank's, before the resume
            if lost is not None and world.is_first:
                forget(cache, out / "cache", [lost])
            world.any(False)
            found = {{"leaves": False, "read": []}}
            {task}.begin_epoch(1, batches)
            print(json.dumps(found))
    """
    )
    ranks = run_ranks(tmp_path, script)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    whole, lacking = zip(*([json.loads(line) for line in rank.stdout.splitlines()] for rank in ranks))
    assert [len(found["read"]) for found in whole] == [IMAGES // 2] * 2
    assert sorted(whole[0]["read"] + whole[1]["read"]) == [*range(IMAGES)]
    assert [found["leaves"] for found in whole] == [True, True]
    assert [found["leaves"] for found in lacking] == [False, False], "one rank's image keeps all teachers"


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
    assert "another process cannot use its label bank" in ranks[0].stderr
    assert "other precision (there fp32, here fp16)" in ranks[1].stderr


def test_processes_of_a_host_share_the_search_for_what_lacks(tmp_path, monkeypatch):
    """Each looks at its batches, and the sum over ranks has those of all."""
    cache = opened(tmp_path / "cache")
    batches = np.arange(IMAGES).reshape(-1, 10)
    cache.begin_epoch([1], batches.ravel())
    assert cache.lacking(1, batches).tolist() == [True] * 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cache.lacking(1, batches).tolist() == [True, False] * 3
    cache.close()


def test_answers_of_many_ranks_come_in_pieces_with_the_same_records(tmp_path, monkeypatch):
    files = {}
    for piece in (cache_filling.PIECE_BYTES, 100):
        monkeypatch.setattr(cache_filling, "PIECE_BYTES", piece)
        cache, teacher = opened(tmp_path / f"{piece}"), CountedTeacher()
        cache.begin_epoch([1], np.arange(IMAGES))
        for first in range(0, IMAGES, 20):
            cache.fill(batch_of(np.arange(first, first + 20)), teacher)
        cache.complete_view()
        files[piece] = {file.name: file.read_bytes() for file in (tmp_path / f"{piece}").glob("view-*")}
        cache.close()
    one, many = files.values()
    assert one == many and len(one) == 1

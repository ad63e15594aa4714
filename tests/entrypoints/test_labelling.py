"""Label banks as label_images.py fills them: real processes, real images, a tiny teacher; killed, resumed, and read by training runs."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from training.data.batches import LabellingBatches
from training.distributed.world import World
from training.teacher.label_bank import digest_of, read_checksums, sha256_of

from tests.conftest import wait_until
from tests.entrypoints.bank_runs import HEAD, LABEL, VIEWS, channels_in, labelled
from tests.entrypoints.ranks import run_ranks, started_ranks


@pytest.fixture
def channels(tmp_path, monkeypatch) -> Path:
    """Images of three classes, one of them broken, and a teacher of them."""
    for name, place in channels_in(tmp_path).items():
        monkeypatch.setenv(name, place)
    return tmp_path


def files_of(bank: Path) -> dict[str, bytes]:
    """All of a bank but the time in its manifest."""
    return {file.name: file.read_bytes() for file in bank.iterdir() if file.name != "manifest.json"}


def test_three_processes_fill_the_bank_that_one_fills_byte_for_byte(channels):
    one, three = labelled(channels / "one"), labelled(channels / "three", size=3)
    bank = channels / "three/bank"
    for folder, images in (("one", 2), ("three", 6)):
        text = next((channels / folder / "output/data").rglob("timeline-0.jsonl")).read_text()
        windows = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "steps"]
        a_step = {round(line["extra"]["images_per_second"] * line["seconds"]["step"]) for line in windows}
        assert a_step == {images}
    assert files_of(bank) == files_of(channels / "one/bank") and len(files_of(bank)) == VIEWS + 1
    assert one["digest"] == three["digest"] == digest_of(bank)
    assert read_checksums(bank) == {file.name: sha256_of(file) for file in bank.glob("view-*.bin")}
    again = labelled(channels / "three", size=2)
    assert (again["labels_computed"], again["digest"]) == (VIEWS * 4, one["digest"]), (
        "the broken image's batch alone, on either rank"
    )


def test_killed_at_random_moments_and_resumed_it_ends_byte_for_byte_as_one_that_nobody_disturbed(channels):
    slowed = LABEL.replace(
        "import label_images",
        "fill = TeacherCache.fill\n"
        "    TeacherCache.fill = lambda *what: (fill(*what), time.sleep(0.03), print('batch', flush=True))\n"
        "    import label_images",
    )
    labelled(channels / "calm")
    (folder := channels / "killed").mkdir()
    rng = random.Random(5)
    for wanted in (rng.randrange(1, 4), rng.randrange(4, 8), rng.randrange(1, 8)):
        (folder / "stdout-0").unlink(missing_ok=True)  # what the one before said
        with started_ranks(folder, slowed.replace("0.03", "0.2"), size=2) as processes:  # long enough to be seen
            wait_until(partial(_has_batches, folder / "stdout-0", wanted), 60, "a few batches")
            assert all(process.is_alive() for process in processes)
        # here both were killed with SIGKILL, wherever they were
    result = labelled(folder, size=2, text=slowed)
    assert files_of(folder / "bank") == files_of(channels / "calm/bank")
    assert result["labels_found"] >= 8 and result["labels_computed"] < VIEWS * 32, "what was kept is not computed again"


def _has_batches(file: Path, count: int) -> bool:
    return file.is_file() and file.read_text().count("batch\n") >= count


def test_a_bank_serves_any_number_of_processes_the_same_logits_and_losses_without_a_teacher(channels):
    text = (
        HEAD
        + """
    import hashlib, train_kd
    found, answers_of = {}, TeacherCache.answers
    def never(images):
        raise AssertionError("the teacher was asked")
    def watched(self, batch, teacher):
        answers = answers_of(self, batch, never)
        for view, index, answer in zip(batch.views.tolist(), batch.indices.tolist(), answers):
            found[f"{view} {index}"] = hashlib.sha256(answer.numpy()).hexdigest()
        return answers
    TeacherCache.answers = watched
    train_kd.main(DistillationSettings(**common, global_batch_size=10, max_grad_norm=None, teacher_cache=kept))
    pathlib.Path(f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""
    )
    labelled(channels / "bank-of-three", size=3)
    losses, answers = {}, {}
    for size in (1, 2, 5):
        folder = channels / f"of-{size}"
        folder.mkdir()
        (folder / "bank").symlink_to(channels / "bank-of-three/bank")
        for rank in run_ranks(folder, text, size=size):
            assert rank.returncode == 0, rank.stderr
        lines = [json.loads(line) for line in (folder / "output/data/algo-1/metrics.jsonl").read_text().splitlines()]
        losses[size] = [line["loss"] for line in lines if "loss" in line]
        parts = [json.loads(file.read_text()) for file in folder.glob("found-*.json")]
        answers[size] = {key: value for part in parts for key, value in part.items()}
        assert len(parts) == size
    assert answers[1] == answers[2] == answers[5] and len(answers[1]) >= VIEWS * 29
    assert len(losses[1]) == 3 * VIEWS
    for size in (2, 5):
        assert losses[size] == pytest.approx(losses[1], rel=1e-4), "up to the order in which gradients are added"


def test_a_view_that_training_repairs_is_no_longer_called_complete(channels):
    labelled(channels / "one")
    bank = channels / "one/bank"
    with open(bank / "view-0002.bin", "r+b") as file:
        file.write(b"\\0" * 8)
    assert sha256_of(bank / "view-0002.bin") != read_checksums(bank)["view-0002.bin"]
    before = files_of(bank)
    train = (
        HEAD
        + "\n    import train_kd\n    train_kd.main(DistillationSettings(**common, global_batch_size=10, teacher_cache=kept))\n"
    )
    assert run_ranks(channels / "one", train, size=1)[0].returncode == 0
    assert set(read_checksums(bank)) == {"view-0001.bin", "view-0003.bin"}
    labelled(channels / "one")
    assert set(read_checksums(bank)) == {f"view-{view:04d}.bin" for view in (1, 2, 3)}
    assert files_of(bank)["view-0001.bin"] == before["view-0001.bin"]


@pytest.mark.parametrize("size", [1, 3])
def test_the_batches_of_a_view_are_all_its_images_and_ranks_take_equally_many_of_those_asked_for(size):
    def of(rank: int) -> LabellingBatches:
        world = World(rank, size, rank, torch.device("cpu"), "none", "test")
        return LabellingBatches(31, 12, world, 7, accumulation=4 if size == 1 else 2 if size == 3 else 1)

    batches = of(0).of_view(2)
    assert sorted({*batches.ravel().tolist()}) == [*range(31)]
    wanted = np.arange(len(batches)) % 3 != 1
    asked = {tuple(batch) for batch in batches[wanted].tolist()}
    ranks = []
    for rank in range(size):
        own = of(rank)
        own.start_view(2, wanted)
        drawn = [*own]
        assert len(drawn) == len(own) and {view for batch in drawn for view, _ in batch} == {2}
        ranks.append([tuple(index for _, index in batch) for batch in drawn])
    assert {*sum(ranks, [])} == asked and len({len(drawn) for drawn in ranks}) == 1
    own.start_view(2, np.zeros(len(batches), bool))
    assert len(own) == 0 and [*own] == []

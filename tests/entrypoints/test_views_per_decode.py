"""Several views of an image from one decoding: the same pixels as one by one, each image once in as many epochs, kept answers too."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from training.data import views as data_views
from training.data import workers
from training.data.augmentation import Augmentation
from training.data.batches import LabellingBatches, TrainingBatches, parts_of
from training.data.broken import BrokenImages
from training.data.decode import fast, reference
from training.data.decode.decoding import BrokenImage
from training.data.decode.fast import FastPreprocessor
from training.data.decode.image_file import ImageFile, OpenFiles
from training.data.decode.reference import ReferencePreprocessor
from training.data.loaders import open_loaders
from training.data.mixing import Mixing
from training.data.orders import FreeOrder, JointOrder, ShardOrder
from training.data.sources.folders import LabelledFolder
from training.data.threads import ThreadedLoader
from training.data.views import TrainingViews, collate_views, open_data
from training.distributed.world import World
from training.settings import check
from training.settings.distillation import DistillationSettings
from training.settings.scripts import LabelledImageSettings

from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.teachers import CLASSES, OPTIONS, exported

IMAGES, TOGETHER = 22, 3
UNMIXED = Mixing()
ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")

ORDERS = {"files": None, "shards": ShardOrder(np.array([7, 0, 9, 6]), 2)}


def batches(rank: int = 0, ranks: int = 1, *, batch: int = 12, accumulation: int = 1, **values) -> TrainingBatches:
    world = World(rank, ranks, rank, torch.device("cpu"), "none", "test")
    return TrainingBatches(
        IMAGES, batch, world, 5, accumulation=accumulation, **{"together": TOGETHER, "order": ORDERS["files"], **values}
    )


def epoch_of(sampler: TrainingBatches, epoch: int, first_step: int = 0) -> list[list[tuple[int, int]]]:
    sampler.start(epoch, first_step)
    return [*sampler]


# --- which views come when


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_as_many_epochs_as_views_visit_each_image_once_and_its_views_follow_each_other(order):
    sampler, seen = batches(batch=6, order=order), Counter()
    for epoch in (4, 5, 6):  # the second visit
        drawn = sum(epoch_of(sampler, epoch), [])
        for first in range(0, len(drawn), TOGETHER):
            visit = drawn[first : first + TOGETHER]
            assert len({index for _, index in visit}) == 1 and [view for view, _ in visit] == [4, 5, 6]
        seen.update(drawn)
        assert sampler.indices(epoch).tolist() == [index for _, index in drawn[::TOGETHER]]
    assert set(seen.values()) == {1}
    steps = IMAGES // 6
    assert len({index for _, index in seen}) == steps * 6, "what no epoch has a whole batch for is left out, as ever"


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (2, 2), (4, 3), (12, 1)])
def test_batches_are_the_same_at_any_world_size_and_in_any_number_of_parts_from_any_step_on(ranks, accumulation):
    whole = epoch_of(batches(), 2)
    shares = [epoch_of(batches(rank, ranks, accumulation=accumulation), 2) for rank in range(ranks)]
    steps = []
    for step in range(len(whole)):
        parts = slice(step * accumulation, (step + 1) * accumulation)
        steps.append([draw for share in shares for part in share[parts] for draw in part])
    assert steps == whole
    assert epoch_of(batches(), 2, first_step=1) == whole[1:]


def test_with_a_number_of_views_the_same_images_get_the_same_views_again_in_another_order():
    sampler = batches(views=6)
    visits = [sum((epoch_of(sampler, epoch) for epoch in range(first, first + 3)), []) for first in (1, 4, 7)]
    first, second, again = ({draw for batch in visit for draw in batch} for visit in visits)
    assert again == first != second and visits[2] != visits[0]
    assert {view for view, _ in first} == {1, 2, 3} and {view for view, _ in second} == {4, 5, 6}


def test_one_view_a_decode_draws_what_it_always_did():
    """The first draw of each batch, as it was before there was a choice."""
    sampler = batches(batch=5, together=1, views=4)
    drawn = [epoch_of(sampler, epoch) for epoch in (1, 2, 6)]
    assert [batch[0] for batch in drawn[0]] == [(1, 21), (1, 6), (1, 2), (1, 8)]
    assert [batch[0] for batch in drawn[2]] == [(2, 18), (2, 4), (2, 5), (2, 6)]


# --- their pixels


@pytest.fixture
def photographs(tmp_path) -> Path:
    """JPEGs and a PNG, so large that some views decode them smaller, and one that is none."""
    rng = np.random.RandomState(0)
    for number in range(IMAGES):
        folder = tmp_path / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        small = Image.fromarray(rng.randint(0, 256, (20, 30, 3), np.uint8))
        large = small.resize((180 if number % 2 else 60, 120 if number % 2 else 50), Image.Resampling.BICUBIC)
        large.save(folder / f"{number:02}.{'png' if number == 6 else 'jpg'}")
    (tmp_path / "b/04.jpg").write_bytes(b"no image")
    return tmp_path


def views(root: Path, preprocessor, together: int = TOGETHER, mixing: Mixing = UNMIXED) -> TrainingViews:
    augmentation = Augmentation(0.3, True, 2, 10, 0.5, load=1 if isinstance(preprocessor, ReferencePreprocessor) else 0)
    return TrainingViews(
        LabelledFolder(root), 24, augmentation, mixing, 1, channels=3, preprocessor=preprocessor,
        broken=BrokenImages(fail=False), views_per_decode=together,
    )  # fmt: skip


def counted(monkeypatch) -> Counter:
    """Counts what is decoded, by the size of the image's file and what it is decoded to."""
    found: Counter = Counter()
    by_fast, by_pillow = fast.find_decoder()[0], reference.decode

    def decoder(encoded, header, part, grey):
        found[len(encoded), part] += 1
        return by_fast(encoded, header, part, grey)

    def decode(encoded, *rest):
        found[len(encoded), "whole"] += 1
        return by_pillow(encoded, *rest)

    monkeypatch.setattr(fast, "find_decoder", lambda: (decoder, "counted"))
    monkeypatch.setattr(fast, "decode", decode)
    monkeypatch.setattr(reference, "decode", decode)
    return found


@pytest.mark.parametrize("preprocessor", [FastPreprocessor(), FastPreprocessor(compose=True), ReferencePreprocessor()])
@pytest.mark.parametrize("mixing", [Mixing(), Mixing(0.8, 1.0)], ids=["alone", "mixed"])
def test_they_have_the_pixels_of_each_alone_and_their_file_is_decoded_once(photographs, monkeypatch, preprocessor, mixing):  # fmt: skip
    asked = views(photographs, preprocessor, mixing=mixing)
    sampler = batches(order=asked.source.order)
    expected = {draw: asked[draw] for epoch in (1, 2, 3) for batch in epoch_of(sampler, epoch) for draw in batch}
    stand_in = next(index for index in range(IMAGES) if asked.stand_in(index) != index) + 1
    decoded = counted(monkeypatch)
    sampler.start(2)
    loader, drawn = ThreadedLoader(asked, sampler, collate_views, 3), 0
    for batch in loader:
        for image, label, label_b, share, index, view in zip(*batch, strict=True):
            same = expected.get((view.item(), index.item()))
            if same is not None:  # a stand-in's own place may lie in another epoch
                assert torch.equal(image, same.image)
                assert (label, label_b, pytest.approx(share.item())) == (same.label, same.label_b, same.lam)
                drawn += 1
    assert drawn >= 9
    once = {key: times for key, times in decoded.items() if key[0] != len(asked.source.image(stand_in))}
    assert len(once) >= 3 and set(once.values()) == {1}, "but for one that also stands in for the broken image"
    of_one_image = Counter(size for size, _ in decoded)
    assert max(of_one_image.values()) <= (1 if not isinstance(preprocessor, FastPreprocessor) else 4)


def test_partners_in_mixing_are_those_of_the_visit_so_that_they_are_decoded_once_too(photographs):
    asked = views(photographs, FastPreprocessor(), mixing=Mixing(0.8))
    pairs = {view: [asked.partner(view, index)[0] for index in range(IMAGES)] for view in (1, 2, 3, 4)}
    assert pairs[1] == pairs[2] == pairs[3] != pairs[4]
    alone = views(photographs, FastPreprocessor(), 1, Mixing(0.8)).view_description()
    assert asked.view_description() != alone, "a bank of mixed views is another one"
    assert views(photographs, FastPreprocessor()).view_description() == views(photographs, FastPreprocessor(), 1).view_description()  # fmt: skip


def test_a_file_is_kept_from_its_first_view_to_its_last_and_no_longer():
    read, decoded = [], []

    def file(index: int) -> ImageFile:
        return ImageFile(lambda: read.append(index) or b"file", lambda: str(index))

    files = OpenFiles(file, [7, 7, 8])
    for index in (7, 8, 7, 7, 9):
        with files.opened(index) as image:
            assert image.decoded("half", lambda index=index: decoded.append(index) or "pixels") == "pixels"
            assert image.encoded == b"file"
    assert read == decoded == [7, 8, 7, 9] and {*files._files} == {7, 9}, (
        "a third view of 7 and one of 9 were not foreseen"
    )


def test_threads_read_files_side_by_side_and_each_file_once():
    both, read = threading.Barrier(2), []

    def reads(name: str) -> bytes:
        read.append(name)
        both.wait(timeout=20)  # which only two that read at the same time pass
        return b"no image"

    files = [ImageFile(partial(reads, name), partial(str, name)) for name in "ab"]
    with ThreadPoolExecutor(4) as threads:
        headers = [*threads.map(lambda file: file.header, files * 2)]
    assert headers == [None] * 4 and sorted(read) == ["a", "b"]


@pytest.mark.parametrize("sampler", [TrainingBatches, LabellingBatches])
def test_neither_training_nor_labelling_keeps_a_file_beyond_its_batch(photographs, sampler, monkeypatch):
    kept = []
    monkeypatch.setattr(data_views, "OpenFiles", lambda *given: kept.append(OpenFiles(*given)) or kept[-1])
    asked = views(photographs, FastPreprocessor())
    world = World(0, 1, 0, torch.device("cpu"), "none", "test")
    drawing = sampler(IMAGES, 12, world, 5, together=TOGETHER, views=3)
    if sampler is LabellingBatches:
        drawing.start_view(2, np.ones(len(drawing.of_view(2)), bool))
    else:
        drawing.start(1)
    for _ in ThreadedLoader(asked, drawing, collate_views, 2):
        pass
    assert kept and max(len(files._files) for files in kept) <= 1, "but for what stands in for the broken image"


def test_the_views_of_an_image_are_made_in_one_part():
    draws = [(view, index) for index in (5, 3, 9, 1) for view in (1, 2, 3)]
    assert parts_of(draws, 1) == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    assert parts_of(draws, 4) == parts_of(draws, 6) == [range(0, 6), range(6, 12)]
    assert parts_of(draws, 100) == [range(0, 12)] and parts_of([], 4) == []
    alone = [(1, index) for index in range(10)]
    assert [*map(len, parts_of(alone, 4))] == [4, 4, 2]


def test_what_cannot_be_decoded_fails_for_each_view():
    image = ImageFile(lambda: b"no image", lambda: "x.jpg")
    for _ in range(2):
        with pytest.raises(BrokenImage, match="x.jpg"):
            FastPreprocessor().varied(image, 8, 3, Augmentation(), random.Random(0))


def test_the_cost_of_an_image_is_that_of_a_view_where_several_come_from_one_decoding(photographs, monkeypatch):
    decoded, now = counted(monkeypatch), iter([0, 6, 10, 40, 50, 80])  # seconds: when three visits begin and end
    monkeypatch.setattr(workers, "MEASURED", 3)
    monkeypatch.setattr(workers, "REPEATS", 1)
    monkeypatch.setattr(workers, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert workers.milliseconds_per_image(views(photographs, ReferencePreprocessor()), TOGETHER) == 22_000 / TOGETHER
    assert sum(decoded.values()) == 3 and set(decoded.values()) == {1}


def test_the_setting_reaches_the_loader(photographs):
    asked = LabelledImageSettings(
        epochs=3, image_size=24, global_batch_size=12, views_per_decode=TOGETHER, min_crop_area=0.5
    )
    data = open_data(photographs, photographs, asked, 3)
    loaders = open_loaders(data, asked, ALONE, batch_size_per_device=12)
    batch = next(iter(loaders.train))
    assert batch.views.tolist() == [1, 2, 3] * 4 and len(set(batch.indices.tolist())) == 4


@pytest.mark.parametrize(("sampler", "views"), [(TrainingBatches, TOGETHER), (LabellingBatches, 1)])
def test_what_an_image_costs_is_measured_with_as_many_views_as_a_batch_draws_together(photographs, monkeypatch, sampler, views):  # fmt: skip
    measured = []
    monkeypatch.setattr(
        workers, "milliseconds_per_image", lambda _, together, anywhere: measured.append(together) or 1.0
    )
    asked = LabelledImageSettings(epochs=3, image_size=24, global_batch_size=12, views_per_decode=TOGETHER)
    data = open_data(photographs, photographs, asked, 3)
    open_loaders(data, asked, ALONE, batch_size_per_device=12, views=3, sampler=sampler)
    assert measured == [views]


def test_labelled_are_the_images_that_training_draws_of_a_view():
    order = JointOrder(FreeOrder(10), FreeOrder(12), 4)
    common = {"together": 2, "order": order, "views": 6}
    training, labelling = (kind(14, 14, ALONE, 5, **common) for kind in (TrainingBatches, LabellingBatches))
    for epoch in range(1, 7):
        for view in training.views_of(epoch):
            assert set(training.indices(epoch)) <= set(labelling.of_view(view).ravel())


# --- in a run

HEAD = f"""
    from training.settings.distillation import DistillationSettings, LabellingSettings, TeacherCacheSettings
    from training.teacher.cache import TeacherCache
    os.chdir(out)
    common = dict(
        student="vit_tiny_patch16_224", student_options={ {**OPTIONS, "drop_rate": 0.0}!r}, image_size=16, num_workers=0, log_every=1,
        system_monitor=False, max_shift_pixels=2, mixup=0.5, learning_rate=0.01, views_per_decode=2, max_grad_norm=None,
    )
    kept = TeacherCacheSettings(views=4, top_k=None, where=str(out / "bank"), precision="fp32")
"""

LABEL = (
    HEAD
    + """
    import label_images
    label_images.main(LabellingSettings(**common, global_batch_size=12, teacher_cache=kept))
"""
)

TRAIN = (
    HEAD
    + """
    import train_kd
    asked, forward = [], train_kd.load_teacher.__globals__["Teacher"].__call__
    def counted(self, images):
        asked.append(len(images))
        return forward(self, images)
    train_kd.load_teacher.__globals__["Teacher"].__call__ = counted
    train_kd.main(DistillationSettings(**common, global_batch_size=8, epochs=6, evaluate_every=9, teacher_cache=CACHE))
    print("asked", sum(asked))
"""
)


@pytest.fixture
def channels(tmp_path, monkeypatch) -> Path:
    """Images of three classes, and a teacher of them."""
    rng = np.random.RandomState(0)
    for split, count in (("train", IMAGES), ("validation", 6)):
        for number in range(count):
            file = tmp_path / f"data/{split}/{CLASSES[number % 3]}/{number:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.randint(0, 256, (18, 18), np.uint8)).save(file)
    exported(tmp_path / "teacher")
    for name, place in {"TRAIN": "data/train", "VALIDATION": "data/validation", "TEACHER": "teacher"}.items():
        monkeypatch.setenv(f"SM_CHANNEL_{name}", str(tmp_path / place))
    return tmp_path


def trained(folder: Path, cache: str, ranks: int = 1) -> tuple[list[float], int]:
    """The loss of each step, and how many images passed through the teacher, over all ranks and without the evaluation."""
    folder.mkdir(exist_ok=True)
    done = run_ranks(folder, TRAIN.replace("CACHE", cache), size=ranks)
    assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
    lines = [json.loads(line) for line in (folder / "output/data/algo-1/metrics.jsonl").read_text().splitlines()]
    asked = sum(int(line.split()[1]) for rank in done for line in rank.stdout.splitlines() if line.startswith("asked"))
    return [line["loss"] for line in lines if "loss" in line], asked - 6


def test_a_cache_keeps_the_answers_for_views_that_come_together(channels):
    online, asked = trained(channels / "online", "None")
    assert len(online) == 6 * (IMAGES // 8) and asked == 6 * 16
    filling, asked = trained(channels / "filling", "kept")
    assert filling[:8] == online[:8] and filling[8:] != online[8:], "epochs 5 and 6 draw the first two views again"
    assert asked == 4 * 16
    two, asked = trained(channels / "two", "kept", ranks=2)
    assert two == pytest.approx(filling, rel=1e-4) and asked == 4 * 16


def test_a_bank_that_was_filled_view_by_view_serves_views_that_come_together(channels):
    (folder := channels / "labelled").mkdir()
    assert run_ranks(folder, LABEL, size=1)[0].returncode == 0
    kept, asked = trained(folder, "kept")
    assert asked == 0
    online = trained(channels / "online", "None")[0]
    assert kept[:8] == pytest.approx(online[:8], rel=1e-5), (
        "of batches of 12 where the teacher beside the student sees 8"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"preprocessing": "dali"},
        {"global_batch_size": 31},
        {"teacher_cache": {"views": 3}},
        {"views_per_decode": 0},
        {"epochs": 3},
    ],
)
def test_what_does_not_go_with_it_is_refused(changes):
    together = {"student": "x", "global_batch_size": 32, "views_per_decode": 2, "teacher_cache": {"views": 4}}
    assert check(DistillationSettings, together)[1] == []
    assert check(DistillationSettings, {**together, "epochs": 3, "max_steps": 5})[1] == []
    made, problems = check(DistillationSettings, {**together, **changes})
    assert made is None and {problem[0] for problem in problems} == {
        "epochs" if "epochs" in changes else "views_per_decode"
    }

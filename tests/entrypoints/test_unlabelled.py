"""Images that nobody labelled: from any tree of folders or from shards, alone or beside labelled ones, and what is learned from them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from training.data.batches import UNLABELLED, LabelledBatch
from training.data.sources.folders import UnlabelledFolder
from training.data.sources.joint import JointSource, open_training
from training.data.sources.shards import LabelledShards, ShardReading, UnlabelledShards
from training.data.views import open_data
from training.measure.timeline import Timeline
from training.models import export, timm_models
from training.settings.distillation import DistillationSettings, UnlabelledSettings
from training.tasks.distillation import Distillation
from training.tasks.students import Student

import launcher
from launcher.prepare import prepare
from tests.entrypoints.script_runs import script_run
from tests.entrypoints.shard_channels import indexed, picture, settings, write_channel, write_shard
from tests.entrypoints.test_training_runs import finished

pytestmark = pytest.mark.usefixtures("disk")

CPU = torch.device("cpu")


def write_tree(root: Path, *names: str) -> Path:
    """Pictures, numbered from 100 on."""
    for number, name in enumerate(names, start=100):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(number))
    return root


def write_labelled(root: Path, count: int, classes: int = 3) -> Path:
    for number in range(count):
        file = root / f"class {number % classes}" / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    return root


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_tree_of_any_shape_gives_its_images_by_path(tmp_path):
    names = ["b.png", "2024/a.PNG", "2024/05/c.png", "x/y/z/d.png"]
    write_tree(tmp_path, *names, ".hidden.png", ".cache/e.png", "notes.txt")
    opened = UnlabelledFolder(tmp_path)
    assert [opened.name(number) for number in range(len(opened))] == [str(tmp_path / name) for name in sorted(names)]
    assert opened.image(0) == (tmp_path / "2024/05/c.png").read_bytes()
    digest = opened.digest()
    assert UnlabelledFolder(tmp_path).digest() == digest
    (tmp_path / "b.png").write_bytes(picture(5, (20, 20)))
    assert UnlabelledFolder(tmp_path).digest() != digest
    assert UnlabelledFolder(tmp_path).listing() == opened.listing()


def test_masks_beside_their_images_are_no_images(tmp_path):
    found = ["masks/b.png", "site/images/sub/c.png"]  # without images beside them, masks may be images
    write_tree(tmp_path, *found, "site/masks/sub/c.png")
    opened = UnlabelledFolder(tmp_path)
    assert [opened.name(number) for number in range(len(opened))] == [str(tmp_path / name) for name in found]


def test_a_tree_without_an_image_is_refused(tmp_path):
    write_tree(tmp_path, "notes.txt")
    with pytest.raises(ValueError, match="has no images: put some there, in any folders"):
        UnlabelledFolder(tmp_path)


@pytest.mark.parametrize("with_index", [False, True])
def test_labels_and_masks_of_shards_are_left_aside(tmp_path, with_index):
    channel = write_channel(tmp_path, 3, 2) if not with_index else indexed(write_channel(tmp_path, 3, 2, 3))
    if not with_index:
        write_shard(tmp_path / "part-2.tar", {"a.png": picture(5), "b.png": picture(6), "b.cls": b"no number"})
        write_shard(tmp_path / "part-3.tar", {"a.png": picture(7), "a.mask.png": picture(0)})
    opened = UnlabelledShards(channel, ShardReading())
    assert [opened.image(number) for number in range(len(opened))] == [picture(number) for number in range(8)]


def test_shards_without_labels_are_no_labelled_images_and_the_message_says_where_they_belong(tmp_path):
    write_shard(tmp_path / "a.tar", {"a.png": picture(1)})
    with pytest.raises(ValueError, match="a has no label: .*belong in the channel unlabelled"):
        LabelledShards(tmp_path)
    UnlabelledShards(tmp_path, ShardReading())
    with pytest.raises(ValueError, match="a has no label"):  # what another kind of reading kept is not taken
        LabelledShards(tmp_path)


def both(tmp_path, labelled: int = 6, others: int = 9, per_labelled: float | None = None, **values) -> JointSource:
    train = write_labelled(tmp_path / "train", labelled)
    tree = write_tree(tmp_path / "others", *(f"{number % 2}/{number}.png" for number in range(others)))
    return open_training(train, tree, settings(**values), per_labelled)


def test_images_without_labels_come_after_those_with(tmp_path):
    found = both(tmp_path)
    assert len(found) == 15 and found.classes == ["class 0", "class 1", "class 2"]
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2, *[UNLABELLED] * 9]
    assert found.name(5).endswith("train/class 2/005.png") and found.name(6).endswith("others/0/0.png")
    assert found.image(6) == picture(100) and found.labelled_share == 6 / 15
    again = pickle.loads(pickle.dumps(found))
    digest, listing = found.digest(), found.listing()
    assert (again.digest(), again.listing()) == (digest, listing)
    assert "an epoch draws 9 of them beside 6 with labels" in found.notes[-1]
    (tmp_path / "others/0/0.png").unlink()
    changed = open_training(tmp_path / "train", tmp_path / "others", settings())
    assert changed.digest() != digest and changed.listing() != listing


@pytest.mark.parametrize(("per_labelled", "drawn"), [(None, 9), (1, 6), (1.5, 9), (0.5, 2), (0.4, 2)])
def test_an_epoch_draws_as_many_for_each_labelled_image_as_asked(tmp_path, per_labelled, drawn):
    found = both(tmp_path, per_labelled=per_labelled)
    assert found.order.epoch_images == 6 + drawn and found.labelled_share == 6 / (6 + drawn)


@pytest.mark.parametrize("per_labelled", [1.6, 0.01])
def test_more_than_there_are_or_none_are_refused_with_what_is_valid(tmp_path, per_labelled):
    with pytest.raises(ValueError, match=r"per_labelled .* set 0.333 to 1.500, or null for all of them"):
        both(tmp_path, per_labelled=per_labelled)


def test_without_labelled_images_the_held_out_ones_name_the_classes(tmp_path):
    tree = write_tree(tmp_path / "others", "a.png", "b.png")
    held_out = write_labelled(tmp_path / "validation", 6)
    data = open_data(None, held_out, settings(), 1, unlabelled=tree)
    assert data.classes == ["class 0", "class 1", "class 2"] and data.labelled_share == 0
    assert data.training.source.labels.tolist() == [UNLABELLED] * 2 and data.epoch_images == 2


def test_what_the_pixels_of_a_mixed_view_depend_on_names_its_part_of_the_images(tmp_path):
    described = [
        open_data(
            write_labelled(tmp_path / "train", 6), tmp_path / "train", settings(mixup=mixup), 1,
            unlabelled=write_tree(tmp_path / "others", *(f"{number}.png" for number in range(9))), per_labelled=per_labelled,
        ).training.view_description()
        for mixup in (0.0, 0.5) for per_labelled in (1, 1.5)
    ]  # fmt: skip
    assert described[0] == described[1] and described[2] != described[3]


@pytest.mark.parametrize("alone", [False, True])
def test_another_host_opens_the_same_images(tmp_path, monkeypatch, alone):
    train = write_labelled(tmp_path / "train", 6)
    others = write_tree(tmp_path / "others", "a.png", "b/c.png")
    for name, place in {"train": tmp_path / "nowhere" if alone else train, "unlabelled": others}.items():
        monkeypatch.setenv(f"SM_CHANNEL_{name.upper()}", str(place))
    chosen = DistillationSettings(
        student="x",
        image_size=8,
        global_batch_size=2,
        mixup=0.3,
        hard_label_weight=0.0,
        unlabelled=UnlabelledSettings(alone=alone),
    )
    here = open_data(None if alone else train, train, chosen, 1, unlabelled=others)
    there, collate = pickle.loads(pickle.dumps(here.elsewhere))()
    assert there.listing() == here.training.listing() and there.source.classes == here.classes
    draws = [(1, number) for number in range(len(there))]
    for one, other in zip(collate(there.__getitems__(draws)), here.collate_training(here.training.__getitems__(draws))):
        assert torch.equal(one, other)


def test_each_source_hears_of_its_own_images_alone(tmp_path):
    class Ahead:
        def __init__(self):
            self.images, self.counts = [], []

        def __call__(self, images):
            self.images = images.tolist()
            return self.counts.append

    found, ahead = both(tmp_path), (Ahead(), Ahead())
    assert found.announce() is None
    found._labelled.announce, found._unlabelled.announce = (lambda: ahead[0]), (lambda: ahead[1])
    asked_for = found.announce()(np.array([7, 0, 1, 14, 6, 5]))
    assert (ahead[0].images, ahead[1].images) == ([0, 1, 5], [1, 8, 0])
    for count in (2, 4, 6):
        asked_for(count)
    assert (ahead[0].counts, ahead[1].counts) == ([1, 2, 3], [1, 2, 3])


def test_channels_that_are_both_copied_share_the_disk(tmp_path, monkeypatch):
    for module in ("channels", "joint"):
        monkeypatch.setattr(f"training.data.sources.{module}.is_streamed", lambda root: True)
    train, others = write_channel(tmp_path / "train", 4, 4), write_channel(tmp_path / "others", 8)
    found = open_training(train, others, settings(shard_cache_gb=1))
    caches = [found._labelled._cache, found._unlabelled._channel._cache]
    assert [cache.limit for cache in caches] == [5 * 10**8] * 2
    assert (
        open_training(train, write_tree(tmp_path / "tree", "a.png"), settings(shard_cache_gb=1))._labelled._cache.limit
        == 10**9
    )
    assert open_training(train, None, settings(shard_cache_gb=1))._cache.limit == 10**9


# -- what is learned ---------------------------------------------------------------------------------------------------


def batch_of(labels: list[int]) -> LabelledBatch:
    images = torch.randint(
        0, 256, (len(labels), 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    own, numbers = torch.tensor(labels), torch.arange(len(labels))
    return LabelledBatch(images, own, own, torch.ones(len(labels)), numbers, numbers)


class Answers:
    """A teacher of three classes."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 0, :3] / 50

    def to(self, device: torch.device) -> Answers:
        return self


def losses(batch: LabelledBatch, share: float, **values) -> dict[str, torch.Tensor]:
    chosen = DistillationSettings(student="x", **values)
    torch.manual_seed(0)
    student = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    task = Distillation(
        [Student(lambda images: student(images.float() / 255), chosen)],
        Answers(),
        timeline=Timeline(CPU),
        labelled_share=share,
    )
    [found] = task(batch)
    return found


def test_labels_count_as_they_do_among_labelled_images_alone():
    mixed, alone = batch_of([2, UNLABELLED, 0, UNLABELLED]), batch_of([2, 1, 0, 1])
    labelled = LabelledBatch(*(field[[0, 2]] for field in alone))
    assert losses(mixed, 0.5)["label_loss"].item() == pytest.approx(losses(labelled, 1.0)["label_loss"].item())
    assert losses(mixed, 0.5)["teacher_loss"].item() == losses(alone, 1.0)["teacher_loss"].item()
    halves = [LabelledBatch(*(field[rows] for field in mixed)) for rows in ([0, 1], [2, 3])]
    mean = sum(losses(half, 0.5)["label_loss"].item() for half in halves) / 2
    assert losses(mixed, 0.5)["label_loss"].item() == pytest.approx(mean), (
        "processes need not know of each other's labels"
    )


def test_where_no_image_has_a_label_the_teacher_alone_is_learned_from():
    found = losses(batch_of([UNLABELLED] * 4), 0.0, hard_label_weight=0)
    assert found["label_loss"].item() == 0 and found["loss"].item() == found["teacher_loss"].item() > 0


def test_half_of_a_mixed_image_may_have_a_label():
    batch = batch_of([2, UNLABELLED])._replace(labels_b=torch.tensor([UNLABELLED, 1]), lam=torch.tensor([0.75, 0.75]))
    whole = batch_of([2, 1])
    each = [losses(LabelledBatch(*(field[[row]] for field in whole)), 1.0)["label_loss"].item() for row in (0, 1)]
    assert losses(batch, 1.0)["label_loss"].item() == pytest.approx((0.75 * each[0] + 0.25 * each[1]) / 2)


@pytest.mark.parametrize("method", ["kl", "hard", "dkd", "dist"])
def test_every_method_takes_the_teachers_answer_for_the_label(method):
    answers = Answers()(batch_of([0] * 4).images).argmax(1).tolist()
    assert len(set(answers)) > 1
    unlabelled, labelled = (losses(batch_of(labels), 1.0, method=method) for labels in ([UNLABELLED] * 4, answers))
    assert unlabelled["teacher_loss"].item() == labelled["teacher_loss"].item()


TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "in_chans": 1}
FAST = {"image_size": 16, "global_batch_size": 32, "max_steps": 6, "log_every": 1, "max_grad_norm": None}


@pytest.fixture(scope="module")
def digits(prepared, tmp_path_factory):
    """Labelled digits; digits without labels, in a tree; and a teacher."""
    root = tmp_path_factory.mktemp("digits")
    (root / "labelled").symlink_to(prepared("digits"))
    prepare(str(prepared("digits")), root / "tree", unlabelled=True, jobs=1)
    torch.manual_seed(1)
    model = timm_models.build("vit_tiny_patch16_224", TINY, 10)
    classes = [str(digit) for digit in range(10)]
    (root / "teacher").mkdir()
    export.save(
        model, root / "teacher", name="vit_tiny_patch16_224", options=TINY, classes=classes, image_size=16, metrics={}
    )
    return root


def job(digits: Path, others: str, *without: str, **values) -> launcher.Job:
    """Of train_kd.py with images without labels."""
    folders = {"train": "labelled/train", "validation": "labelled/validation", "unlabelled": f"{others}/unlabelled"}
    inputs = {name: {"folder": str(digits / place)} for name, place in {**folders, "teacher": "teacher"}.items()}
    compute = values.pop("compute", {})
    hyperparameters = {"student": "vit_tiny_patch16_224", "student_options": {**TINY, "embed_dim": 12, "num_heads": 1}}
    return launcher.from_values({
        "name": "unlabelled", "script": "train_kd.py", "compute": compute,
        **({"distribution": "torchrun"} if compute else {}),
        "inputs": {name: given for name, given in inputs.items() if name not in without},
        "hyperparameters": {**hyperparameters, **FAST, **values},
    })  # fmt: skip


def test_a_student_learns_from_images_without_labels_alone(digits, tmp_path):
    alone = {"unlabelled": {"alone": True}, "hard_label_weight": 0}
    run = script_run(tmp_path, job(digits, "tree", "train", **alone))
    assert run.returncode == 0, run.stderr
    assert "1,347 images without labels in" in run.stdout
    lines = [line for line in run.metrics() if "loss" in line]
    assert len(lines) == 6 and all(
        line["label_loss"] == 0 and line["loss"] == line["teacher_loss"] > 0 for line in lines
    )
    assert run.result()["training_images"] == 1347 and run.result()["teacher"]["parameters"] > 0


@pytest.mark.slow
def test_a_run_of_two_processes_and_shards_has_the_losses_of_one(digits):
    prepare("digits", digits / "shards", unlabelled=True, shard_size="500KB")
    mixed = {
        **{"unlabelled": {"per_labelled": 4}, "images_per_class": 8, "teacher_cache": {"views": 2}, "mixup": 0.4},
        **{"epochs": 3, "max_steps": None, "global_batch_size": 100},
    }
    one = finished(job(digits, "shards", **mixed))
    two = finished(job(digits, "shards", **mixed, compute={"instance_count": 2}))
    assert two.result()["world_size"] == 2 and one.result()["training_images"] == 80 + 320
    assert any("an epoch draws 320 of them beside 80 with labels" in line for _, line in one.logs())
    first, second = ([line for line in run.metrics() if "loss" in line] for run in (one, two))
    assert [line["epoch"] for line in first] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3], (
        "the third draws the first's view again"
    )
    for key in ("loss", "label_loss", "teacher_loss"):
        assert [line[key] for line in first] == pytest.approx([line[key] for line in second], rel=1e-4)
    assert all(line["label_loss"] > 0 for line in first)

"""Banks of answers for pixels, in whole runs: filled by labelling or by training, killed, resumed, and read without a teacher."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training.data.broken import BrokenImages
from training.data.masks import MaskedImages, open_varied
from training.models import export, segmenter
from training.settings.segmentation import PixelCacheSettings, SegmentationSettings
from training.tasks.segmentation import pixel_layout
from training.teacher import frozen
from training.teacher.label_bank import digest_of
from training.teacher.pixel_records import PixelLayout

from tests.conftest import wait_until
from tests.entrypoints.ranks import run_ranks, started_ranks
from tests.entrypoints.teacher_caches import CLASSES, filled, opened

IMAGES, VIEWS, NAMES = 13, 2, ["0", "1", "2", "3", "4"]
WIDE = {"channels": (8, 8, 16, 16), "stem_width": 8}
NARROW = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "mlp_ratios": [2, 2, 2, 2]}
"""Of an encoder without BatchNorm, which would see how many images a process has at once."""

HEAD = f"""
    from training.settings.segmentation import PixelCacheSettings, PixelLabellingSettings, SegmentationSettings
    from training.settings.features import FeatureSettings
    from training.teacher.cache import TeacherCache
    from training.teacher.frozen import Teacher
    os.chdir(out)
    common = dict(
        model="pvt_v2_b0", model_options={NARROW!r}, decoder_channels=8, classes=5, image_size=(64, 64), crop_size=(32, 48), min_scale=0.8,
        max_scale=1.2, horizontal_flip=True, num_workers=0, log_every=1, system_monitor=False, learning_rate=0.01, epochs={VIEWS},
        evaluate_every=9, hard_label_weight=0.5, overlays=0,
    )
    kept = PixelCacheSettings(views={VIEWS}, where=str(out / "bank"))
"""

LABEL = (
    HEAD
    + """
    import label_pixels
    label_pixels.main(PixelLabellingSettings(**common, global_batch_size=12, batch_size_per_device=2, teacher_cache=kept))
"""
)

TRAIN = (
    HEAD
    + """
    import train_segmentation
    for name in ("__call__", "with_features"):
        def watched(self, images, asked=getattr(Teacher, name)):
            if images.shape[2] == 32 and len(images) > 1:  # a crop, and not the one whose grid is looked at
                print("asked", flush=True)
            return asked(self, images)
        setattr(Teacher, name, watched)
    train_segmentation.main(SegmentationSettings(**common, global_batch_size=4, teacher_cache=kept))
"""
)

FEATURES = """common["features"] = FeatureSettings(level="tokens")
"""


def with_features(text: str) -> str:
    """A script's text, whose settings learn features too."""
    return text.replace("    kept = ", f"    {FEATURES}    kept = ")


@pytest.fixture
def channels(tmp_path, monkeypatch) -> Path:
    """Images with masks of five classes, one of the masks broken, and a teacher of them."""
    rng = np.random.RandomState(0)
    for split, count in (("train", IMAGES), ("validation", 2)):
        for number in range(count):
            for kind, array in (
                ("images", rng.randint(0, 256, (70, 60, 3), np.uint8)),
                ("masks", np.repeat(np.repeat(rng.randint(0, 5, (7, 6)), 10, 0), 10, 1).astype(np.uint8)),
            ):
                file = tmp_path / f"data/{split}/{kind}/{number:02}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(file)
    (tmp_path / "data/train/masks/04.png").write_bytes(b"no mask")
    torch.manual_seed(1)
    model = segmenter.build("resnet10t", WIDE, 5, decoder_channels=8)
    torch.nn.init.normal_(model.model.classifier.weight, std=2.0)  # answers that differ from place to place
    decoder = {"channels": 8, "ignore_index": 255}
    export.save(model, tmp_path / "teacher", name="resnet10t", options=WIDE, classes=NAMES, image_size=(64, 64), decoder=decoder)  # fmt: skip
    for name, place in {"TRAIN": "data/train", "VALIDATION": "data/validation", "TEACHER": "teacher"}.items():
        monkeypatch.setenv(f"SM_CHANNEL_{name}", str(tmp_path / place))
    return tmp_path


def files_of(bank: Path) -> dict[str, bytes]:
    """All of a bank but the time in its manifest."""
    return {file.name: file.read_bytes() for file in bank.iterdir() if file.name != "manifest.json"}


def finished(folder: Path, text: str, size: int = 1) -> tuple[dict, list[dict[str, float]], str]:
    """A run's result, the losses of its steps, and what it printed."""
    folder.mkdir(exist_ok=True)
    ranks = run_ranks(folder, text, size=size)
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr
    output = folder / "output/data/algo-1"
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [{key: line[key] for key in line if key.endswith("loss")} for line in lines if "teacher_loss" in line]
    return json.loads((output / "result.json").read_text()), losses, "".join(rank.stdout for rank in ranks)


def test_three_processes_fill_the_bank_that_one_fills_byte_for_byte_and_a_kill_changes_nothing(channels):
    one, _, said = finished(channels / "one", LABEL)
    assert "evaluation: 1 of the held-out images at once, which are 64 × 64 pixels; training passes 2 crops" in said
    three, _, _ = finished(channels / "three", LABEL, size=3)
    bank = channels / "one/bank"
    assert files_of(channels / "three/bank") == files_of(bank) and len(files_of(bank)) == VIEWS + 1
    assert one["digest"] == three["digest"] == digest_of(bank)
    identity = json.loads((bank / "manifest.json").read_text())["logits of"]
    assert (identity["pixel grid"], identity["top_k"], identity["precision"]) == ([8, 12], 1, "int4")
    assert "the largest of 5 logits for 8 × 12 places and all 5 logits for 4 × 6 places in int4" in said
    slowed = LABEL.replace(
        "import label_pixels",
        "fill = TeacherCache.fill\n"
        "    TeacherCache.fill = lambda *what: (fill(*what), time.sleep(0.03), print('batch', flush=True))\n"
        "    import label_pixels",
    )
    (folder := channels / "killed").mkdir()
    for wanted in (3, 1):
        (folder / "stdout-0").unlink(missing_ok=True)  # what the one before said
        with started_ranks(folder, slowed.replace("0.03", "0.5"), size=2) as processes:  # long enough to be seen
            wait_until(partial(_has_batches, folder / "stdout-0", wanted), 60, "a few batches")
            assert all(process.is_alive() for process in processes)
        # here both were killed with SIGKILL, wherever they were
    result, _, _ = finished(folder, slowed, size=2)
    assert files_of(folder / "bank") == files_of(bank)
    assert result["labels_found"] > 0 and result["labels_computed"] < VIEWS * (IMAGES + 1)


def _has_batches(file: Path, count: int) -> bool:
    return file.is_file() and file.read_text().count("batch\n") >= count


@pytest.mark.parametrize("text", [TRAIN, with_features(TRAIN)], ids=["logits", "logits and features"])
def test_a_filled_run_has_the_losses_of_the_run_that_filled_the_bank_and_asks_no_teacher(channels, text):
    _, filling, said = finished(channels / "filling", text)
    assert said.count("asked") == len(filling) == VIEWS * (IMAGES // 4)
    for name, size in (("filled", 1), ("of-two", 2)):
        (channels / name).mkdir()
        (channels / name / "bank").symlink_to(channels / "filling/bank")
        _, losses, said = finished(channels / name, text, size=size)
        assert "asked" not in said
        if size == 1:
            assert losses == filling, "bit for bit"
        for one, two in zip(filling, losses, strict=True):
            assert two == pytest.approx(one, rel=1e-3)


def test_training_finds_what_labelling_kept_and_learns_nearly_what_the_teacher_says(channels):
    finished(channels / "bank", LABEL, size=2)
    before = files_of(channels / "bank/bank")
    _, kept, said = finished(channels / "bank", TRAIN)
    assert "asked" not in said and files_of(channels / "bank/bank") == before
    _, online, said = finished(channels / "online", TRAIN.replace(", teacher_cache=kept", ""))
    assert said.count("asked") == len(online)
    assert kept[0]["label_loss"] == online[0]["label_loss"], "the first view is the same"
    assert kept[0]["teacher_loss"] == pytest.approx(online[0]["teacher_loss"], rel=0.05)
    assert kept[0]["teacher_loss"] != online[0]["teacher_loss"]


# -- what a bank belongs to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": 9}, r"other pixel grid \(there \[8, 12\], here \[9, 12\]\)"),
        ({"classes": 6}, r"other classes \(there 5, here 6\)"),
        ({"top_k": 2}, r"other top_k \(there 3, here 2\)"),
        ({"precision": "int8"}, r"other precision \(there int4, here int8\)"),
    ],
)
def test_a_bank_of_other_answers_is_refused_by_name(tmp_path, changes, said):
    values = {"rows": 8, "columns": 12, "classes": 5, "top_k": 3, "precision": "int4"}
    opened(tmp_path, layout=PixelLayout(**values))
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, layout=PixelLayout(**{**values, **changes}))
    filled(tmp_path / "images")
    with pytest.raises(
        ValueError, match=r"other pixel grid \(there None, here \[8, 12\]\), .*classes \(there 12, here 5\)"
    ):
        opened(tmp_path / "images", layout=PixelLayout(**values))
    assert CLASSES == 12


def varied(channels: Path, **changes) -> MaskedImages:
    values = {"model": "x", "classes": 5, "image_size": (64, 64), "crop_size": (32, 48), "min_scale": 0.8, **changes}
    return open_varied(channels / "data/train", SegmentationSettings(**values), 3, BrokenImages(fail=False))


def test_a_banks_identity_changes_with_the_images_and_their_crops_and_not_with_masks(channels):
    plain = varied(channels)
    for changes in (
        {"seed": 1},
        {"image_size": (64, 96)},
        {"crop_size": None},
        {"min_scale": 0.9},
        {"horizontal_flip": True},
    ):
        assert varied(channels, **changes).view_description() != plain.view_description(), changes
    same = varied(channels, ignore_index=7, dice_weight=1.0, class_names=["a", "b", "c", "d", "e"])
    assert same.view_description() == plain.view_description()
    digest = plain.digest()
    shutil.copy(channels / "data/train/masks/01.png", channels / "data/train/masks/04.png")
    assert varied(channels).digest() == digest
    (channels / "data/train/images/05.png").write_bytes(b"another")
    assert varied(channels).digest() != digest


def test_in_place_of_a_broken_mask_comes_the_next_image_under_its_own_index(channels):
    images = varied(channels)
    shown = images[2, 4]
    assert (shown.image_index, shown.view, images.stand_in(4), images.stand_in(3)) == (5, 2, 5, 3)
    assert torch.equal(shown.image, images[2, 5].image)


def test_teachers_that_answer_on_grids_of_their_own_have_no_mean_that_could_be_kept(channels):
    members = frozen.load(
        channels / "teacher", NAMES, channels=3, image_size=(64, 64), pixels=True, upsampled=False
    ).members
    coarse = segmenter.build("resnet10t", {**WIDE, "output_stride": 32}, 5, decoder_channels=8, upsamples=False)
    coarse.model.used = coarse.model.used[1:]
    for parts in (coarse.model.lateral, coarse.model.smooth):
        del parts[0]
    teacher = frozen.Teacher([*members, frozen.FrozenModel(coarse, "coarse", {})])
    settings, kept = SegmentationSettings(model="x", classes=5), PixelCacheSettings(views=1)
    image = torch.zeros(1, 3, 32, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"grids differ \(resnet10t 8 × 12, coarse 4 × 6\).*: give one teacher"):
        pixel_layout(settings, kept, teacher, image)
    layout = pixel_layout(settings, kept, frozen.Teacher([*members, *members]), image)
    assert (layout.rows, layout.columns, layout.top_k) == (8, 12, 1)

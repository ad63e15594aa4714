"""Cut-outs on photographs: made of any PNG files with transparency, with exact masks, and without a leak between the splits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

import launcher
from launcher.prepare import cutouts, photos, prepare

COLOURS = {"animal": (250, 0, 0), "food": (0, 250, 0), "plant": (0, 0, 250), "vehicle": (250, 250, 0)}


@pytest.fixture
def stamps(tmp_path, monkeypatch) -> Path:
    """Four discs of each class, each with a soft edge, an opaque picture and a drawing beside them."""
    folder = tmp_path / "stamps"
    for label, inside in cutouts.CLASSES.items():
        for name in ("a.png", "deep/b.png", "c.png", "d.png", "cartoon/drawn.png"):
            file = folder / inside / name
            file.parent.mkdir(parents=True, exist_ok=True)
            picture = Image.new("RGBA", (80, 60), (*COLOURS[label], 0))
            ImageDraw.Draw(picture).ellipse((5, 5, 70, 50), (*COLOURS[label], 128))
            ImageDraw.Draw(picture).ellipse((10, 10, 65, 45), (*COLOURS[label], 255))
            picture.save(file)
        Image.new("RGB", (30, 30)).save(folder / inside / "opaque.png")
        (folder / inside / "a.txt").write_text("a disc")
    monkeypatch.setattr(cutouts, "FOLDERS", (folder,))
    monkeypatch.setattr(cutouts, "IMAGES", 40)
    return folder


def test_only_transparent_photographs_are_taken(stamps):
    found = cutouts.find(stamps)
    assert list(found) == ["animal", "food", "plant", "vehicle"]
    assert [[Path(file).relative_to(stamps).as_posix() for file in own] for own in found.values()] == [
        [f"{inside}/{name}" for name in ("a.png", "c.png", "d.png", "deep/b.png")]
        for inside in cutouts.CLASSES.values()
    ]


def test_masks_show_what_is_opaque_and_leave_out_what_is_neither(stamps, tmp_path):
    assert "30 training and 10 validation images with masks" in prepare("cutouts", tmp_path / "made")
    seen = Counter()
    for split, count in (("train", 30), ("validation", 10)):
        files = sorted((tmp_path / "made" / split / "images").iterdir())
        assert len(files) == count
        for file in files:
            image, mask = (
                np.array(Image.open(path)) for path in (file, tmp_path / "made" / split / "masks" / file.name)
            )
            assert image.shape == (96, 96, 3) and mask.shape == (96, 96)
            seen.update(mask.ravel().tolist())
            for number, colour in enumerate(COLOURS.values(), 1):
                pixels, own = image[mask == number].astype(float), np.array(colour) > 0
                # brightness varies, and the rim of what counts as opaque lets a tenth of the background through
                assert (pixels[:, own] > 160).all() and (pixels[:, ~own] < 30).all()
    assert set(seen) == {0, 1, 2, 3, 4, 255} and seen[0] > seen[255]


def test_no_cutout_and_no_part_of_a_photograph_is_in_both_splits(stamps, monkeypatch):
    from launcher.prepare.sources import find_samples

    cut, boxes = {"train": set(), "validation": set()}, {"train": [], "validation": []}
    real_cutout, real_photograph = cutouts._cutout, photos.photograph

    class Watched:
        """A photograph that notes which columns are taken of it."""

        def __init__(self, label: str):
            self.picture, self.width, self.height = (picture := real_photograph(label)), picture.width, picture.height

        def resize(self, size, *, resample, box):
            boxes[split].append((box[0] / self.width, box[2] / self.width))
            return self.picture.resize(size, resample=resample, box=box)

    monkeypatch.setattr(cutouts, "_cutout", lambda file: cut[split].add(file) or real_cutout(file))
    monkeypatch.setattr(photos, "photograph", Watched)
    cutouts._draw.cache_clear()
    for sample in find_samples("cutouts", 40, 0.25, False, in_folder=False)[0]:
        split = sample.split
        sample.image()
    assert cut["train"] and cut["validation"] and not cut["train"] & cut["validation"]
    assert max(last for _, last in boxes["train"]) <= min(first for first, _ in boxes["validation"])


def test_an_index_determines_the_pixels_at_each_size(stamps):
    files = cutouts.find(stamps)
    first = [part.tobytes() for part in cutouts.draw(3, "train", files, 40)]
    cutouts._draw.cache_clear()
    again = cutouts.draw(3, "train", files, 40)
    assert first == [part.tobytes() for part in again] and {part.size for part in again} == {(40, 40)}
    assert first != [part.tobytes() for part in cutouts.draw(4, "train", files, 40)]


def test_without_the_package_the_cure_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(cutouts, "FOLDERS", (tmp_path / "nowhere",))
    with pytest.raises(launcher.UserError, match="apt-get install --no-install-recommends tuxpaint-stamps-default"):
        prepare("cutouts", tmp_path / "made")


def test_a_class_with_a_single_cutout_is_refused(stamps, tmp_path):
    for file in [*(stamps / "food").rglob("*.png")][1:]:
        file.unlink()
    with pytest.raises(launcher.UserError, match="too few cut-outs of food"):
        prepare("cutouts", tmp_path / "made")

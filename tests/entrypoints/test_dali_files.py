"""Files that DALI would show otherwise, or not at all: batches are those of the reference pipeline."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training.data.augmentation import Augmentation
from training.data.batches import TrainingBatches
from training.data.broken import LISTING, BrokenImages
from training.data.dali import graph as dali_graph
from training.data.dali.pipeline import DaliPreprocessor
from training.data.decode.decoding import BrokenImage
from training.data.mixing import Mixing
from training.data.views import TrainingViews

from tests.entrypoints.dali_batches import (
    ALONE,
    BOTH,
    SMALL,
    damaged_png,
    epoch,
    fidelity,
    jpeg,
    photograph,
    png,
    reference,
    views,
)
from tests.entrypoints.test_jpeg import with_segment


def other(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


ODD_FILES = {
    "cmyk.jpg": jpeg(SMALL.convert("CMYK")),
    "palette.png": png(SMALL.convert("P")),
    "transparent.png": png(SMALL.convert("RGBA")),
    "colour-key.png": png(SMALL, transparency=SMALL.getpixel((5, 5))),
    "deep.png": png(Image.fromarray(np.asarray(SMALL.convert("L")).astype(np.uint16) << 8)),
    "oriented.png": png(SMALL, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
    "picture.webp": other(SMALL, "WEBP"),
    "picture.tif": other(SMALL, "TIFF"),
    "picture.bmp": other(SMALL, "BMP"),
    "trailing.jpg": jpeg(SMALL) + bytes(100),
    "untagged-trailing.jpg": other(SMALL, "JPEG") + bytes(100),
    "untagged-cmyk.jpg": other(SMALL.convert("CMYK"), "JPEG"),
    "rgb.jpg": with_segment(jpeg(SMALL, subsampling=0), 0xEE, b"Adobe" + bytes(6) + b"\0"),
}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}, {"subsampling": 0}])
def test_of_a_jpeg_without_exif_its_frame_header_says_the_size(mode, options, monkeypatch):
    file = io.BytesIO()
    SMALL.convert(mode).save(file, "JPEG", **options)
    monkeypatch.setattr(dali_graph, "open_image", None)  # Pillow is not asked
    assert dali_graph.upright_size(file.getvalue()) == SMALL.size
    assert dali_graph.upright_size(file.getvalue()[:-2]) is None, "DALI may fail on a file without its end"


def odd_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name[0] / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name[0] / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_files_of_every_kind_show_what_they_show_on_the_reference_path(tmp_path, channels):
    source = odd_folder(tmp_path, ODD_FILES)
    asked = views(source, Augmentation(0.5), Mixing(), 48, channels)
    sampler = TrainingBatches(len(ODD_FILES), len(ODD_FILES), ALONE, 1)
    (found,), (wanted,) = epoch(asked, sampler), reference(asked, sampler)
    for image, expected, number in zip(
        found.images.numpy(), wanted.images.numpy(), found.indices.tolist(), strict=True
    ):
        assert fidelity(image, expected) > 50, asked.source.name(number)


BROKEN = {
    "0.jpg": b"",
    "1.jpg": b"no image",
    "3.jpg": jpeg(SMALL)[:900],
    "4.png": damaged_png(),
}
SOUND = {f"{number}.jpg": jpeg(photograph(number, (90, 70 + number))) for number in (2, 5, 6, 7, 9)}
CUT_BUT_ENDED = {"8.jpg": jpeg(SMALL)[:-400] + dali_graph.JPEG_END}
"""libjpeg shows what there is, and grey."""


@pytest.mark.parametrize("size", [2, 5, 10])
def test_what_comes_in_place_of_broken_images_is_what_the_reference_path_brings(tmp_path, size):
    folder = odd_folder(tmp_path / "images", BROKEN | SOUND | CUT_BUT_ENDED)
    listings, seen = [], []
    for name, take in (("dali", epoch), ("reference", reference)):
        asked = views(
            folder, Augmentation(0.5, True, random_erasing=0.5), BOTH, 48, broken=BrokenImages(False, tmp_path / name)
        )
        sampler = TrainingBatches(10, size, ALONE, 1)
        seen.append([batch for number in (1, 2) for batch in take(asked, sampler, number)])
        listings.append((tmp_path / name / LISTING).read_text().splitlines())
    assert len(seen[0]) == len(seen[1]) == 2 * (10 // size)
    for found, wanted in zip(*seen, strict=True):
        for name in ("labels", "labels_b", "lam", "indices", "views"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        for image, expected in zip(found.images.numpy(), wanted.images.numpy(), strict=True):
            assert fidelity(image, expected) > 38
    assert sorted(listings[0]) == sorted(listings[1]) and len(listings[0]) == len(BROKEN)
    for name in BROKEN:
        assert sum(f"/{name} cannot be read as an image" in line for line in listings[0]) == 1


@pytest.mark.parametrize("name", BROKEN)
def test_where_broken_images_are_to_end_a_run_the_first_does_and_is_named(tmp_path, name):
    asked = views(odd_folder(tmp_path, {**SOUND, name: BROKEN[name]}), Augmentation(0.5), Mixing(), 48)
    with pytest.raises(BrokenImage, match=f"/{name} cannot be read as an image"):
        epoch(asked, TrainingBatches(6, 3, ALONE, 1))


def test_a_file_that_is_gone_is_broken_too(tmp_path):
    asked = views(odd_folder(tmp_path, SOUND), Augmentation(), Mixing(), 48, broken=BrokenImages(fail=False))
    (tmp_path / "5" / "5.jpg").unlink()
    (batch,) = epoch(asked, TrainingBatches(5, 5, ALONE, 1))
    assert sorted(batch.indices.tolist()) == [0, 2, 2, 3, 4]
    one, other = (place for place, number in enumerate(batch.indices.tolist()) if number == 2)
    assert torch.equal(batch.images[one], batch.images[other])
    asked = TrainingViews(asked.source, 48, Augmentation(), Mixing(), 1, preprocessor=DaliPreprocessor(), broken=BrokenImages(fail=True))  # fmt: skip
    with pytest.raises(BrokenImage, match="5.jpg cannot be read"):
        epoch(asked, TrainingBatches(5, 5, ALONE, 1))

"""Image files that are meant to do harm: programs, and small files of many pixels."""

from __future__ import annotations

import ast
import io
import os
import random
from pathlib import Path

import pytest
from PIL import Image
from training.data.augmentation import Augmentation
from training.data.dali import graph
from training.data.decode import fast
from training.data.decode.decoding import FORMATS, MAX_PIXELS, BrokenImage, decode
from training.data.decode.fast import FastPreprocessor
from training.data.decode.geometry import LONGEST
from training.data.decode.image_file import ImageFile
from training.data.decode.masks import decode_mask
from training.data.decode.reference import ReferencePreprocessor

from .photographs import pixels_of
from .test_jpeg import SMALL, with_frame

unscaled = fast.resize

ROOT = Path(__file__).parents[2]

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 8 8 rectfill\nshowpage\n%%EOF\n"


@pytest.fixture
def ghostscript(tmp_path, monkeypatch) -> Path:
    """A file that a run of `gs`, the program that Pillow passes PostScript to, would leave."""
    ran = tmp_path / "ran"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/gs"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || touch {ran}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None, raising=False)  # not in the oldest Pillow
    return ran


def readers() -> dict:
    """Everything that makes pixels of an encoded image."""
    whole = Augmentation()
    return {
        "reference": lambda encoded: ReferencePreprocessor().varied(
            ImageFile(lambda: encoded, lambda: "a.jpg"), 8, 3, whole, random.Random(0)
        ),
        "held out": lambda encoded: ReferencePreprocessor().held_out(encoded, "a.jpg", 8, 3),
        "fast": lambda encoded: FastPreprocessor().varied(
            ImageFile(lambda: encoded, lambda: "a.jpg"), 8, 3, whole, random.Random(0)
        ),
        "fast, whole": lambda encoded: FastPreprocessor().whole(encoded, "a.jpg", 3),
        "dali": lambda encoded: graph.readable_file(encoded, "a.jpg", 3, fallback=False),
        "mask": lambda encoded: decode_mask(encoded, "a.jpg"),
    }


@pytest.mark.parametrize("reader", readers())
def test_postscript_is_refused_and_no_program_runs(ghostscript, reader):
    with pytest.raises(BrokenImage, match=f"a.jpg cannot be read as .*: it is not a JPEG, PNG.* or {FORMATS[-1]}"):
        readers()[reader](POSTSCRIPT)
    assert not ghostscript.exists()


def test_each_format_is_read_whatever_the_name_says():
    for kind in FORMATS:
        pixels_of("china", (16, 12)).save(file := io.BytesIO(), kind)
        assert decode(file.getvalue(), "a.jpg", 3).size == (16, 12), kind


def test_every_file_that_is_opened_as_an_image_names_its_formats():
    opened = [
        call
        for folder in ("entrypoints", "launcher")
        for file in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Image.open"
    ]
    assert len(opened) >= 3 and all("formats" in {word.arg for word in call.keywords} for call in opened)


def large(kind: str) -> bytes:
    """An image with one row more than the limit, in a few kilobytes."""
    if kind == "JPEG":
        return with_frame(SMALL, width=2**13, height=2**13 + 1)
    Image.new("1", (2**13, 2**13 + 1)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_of_too_many_pixels_is_named_with_the_limit_whoever_decodes(decoder, kind):
    encoded = large(kind)
    assert MAX_PIXELS == 2**26 and len(encoded) < 20_000
    for name, read in readers().items():
        with pytest.raises(
            BrokenImage, match="a.jpg cannot be read as .*: it has more than 67,108,864 pixels.*: scale"
        ):
            print(name, read(encoded))


@pytest.mark.parametrize("size", [(3000, 1), (1, 3000), (3000, 4)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("reader", ["reference", "held out", "fast"])
def test_a_line_of_a_few_pixels_is_not_made_into_gigabytes(decoder, monkeypatch, reader, kind, size):
    """To scale all of it until its shorter side fits would take the square of its length."""
    scaled: list[int] = []

    def noted(image, to, *given, **named):
        scaled.append(to[0] * to[1])
        return resize(image, to, *given, **named)

    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", noted)
    monkeypatch.setattr(fast, "resize", lambda pixels, to: scaled.append(to[0] * to[1]) or unscaled(pixels, to))
    Image.linear_gradient("L").resize(size).save(file := io.BytesIO(), kind)
    scaled.clear()
    made = readers()[reader](file.getvalue())
    assert made.shape == (3, 8, 8) and scaled and max(scaled) <= LONGEST * 8 * 8

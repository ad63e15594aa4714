"""The fast way from files to pixels: photographs as the reference shows them, nasty files too, and all turns at once."""

from __future__ import annotations

import dataclasses
import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from training.data.augmentation import Augmentation, decoded_part
from training.data.decode.decoding import BrokenImage
from training.data.decode.fast import LONGEST_SIDE, FastPreprocessor, resize, warp
from training.data.decode.geometry import rotation
from training.data.decode.image_file import ImageFile
from training.data.decode.jpeg import read_header
from training.data.decode.reference import ReferencePreprocessor
from training.data.views import open_data
from training.settings.scripts import LabelledImageSettings

from .conftest import DECODERS
from .photographs import FOLDER, NAMES, jpeg, photograph, pixels_of, psnr
from .test_jpeg import SMALL, with_frame, with_segment

REFERENCE = ReferencePreprocessor()
PLAIN, CROPS = Augmentation(), Augmentation(0.3, horizontal_flip=True)
SHARPER = 34
"""PSNR in dB, at least, of what is decoded smaller; most of it has over 40."""


def view(preprocessor, encoded: bytes, size: int, augmentation: Augmentation = PLAIN, seed: int = 0, channels: int = 3) -> np.ndarray:  # fmt: skip
    made = preprocessor.varied(
        ImageFile(lambda: encoded, lambda: "a/0.jpg"), size, channels, augmentation, random.Random(seed)
    )
    assert made.dtype == np.uint8 and made.shape == (channels, size, size) and made.flags.c_contiguous
    return made


def kept(preprocessor, image_size: tuple[int, int], size: int, augmentation: Augmentation, seed: int) -> np.ndarray:
    """Where a view shows the image and nothing black from beyond it, but for two pixels at the border."""
    white = view(preprocessor, jpeg(Image.new("L", image_size, "white")), size, augmentation, seed, channels=1)[0]
    return np.pad(np.lib.stride_tricks.sliding_window_view(white == 255, (5, 5)).all((2, 3)), 2)


def cloudy(width: int, height: int) -> Image.Image:
    """A colour image without details, in which every place looks different."""
    noise = np.random.RandomState(0).randint(0, 256, (7, 9, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


# -- as the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [224, 64, 24])
def test_views_of_photographs_are_the_references_but_for_rounding(decoder, name, channels, size):
    """At 224 pixels nothing is decoded smaller, at 64 the whole image is by a quarter and at 24 by an eighth: these are sharper."""
    for seed, augmentation in enumerate([Augmentation(), CROPS, CROPS, CROPS, CROPS]):
        pair = [view(way, photograph(name), size, augmentation, seed, channels) for way in (FastPreprocessor(), REFERENCE)]  # fmt: skip
        assert psnr(*pair) > (48 if size == 224 else SHARPER), (seed, psnr(*pair))


def test_a_jpeg_is_decoded_no_larger_than_its_view_needs(decoder, monkeypatch):
    from training.data.decode import fast, jpeg

    decode, shapes = jpeg.find_decoder()[0], []

    def watched(*arguments):
        shapes.append((pixels := decode(*arguments)).shape[:2])
        return pixels

    monkeypatch.setattr(fast, "find_decoder", lambda: (watched, ""))
    for size in (224, 214, 213, 106, 53, 8):
        view(FastPreprocessor(), photograph("china"), size)
    turns = Augmentation(load=1)
    view(FastPreprocessor(), photograph("china"), 26, turns), view(FastPreprocessor(True), photograph("china"), 26, turns)  # fmt: skip
    assert shapes == [(427, 640), (427, 640), (214, 320), (107, 160), (54, 80), (54, 80), (427, 640), (54, 80)]


def test_what_is_decoded_smaller_is_cut_between_pixels(decoder, monkeypatch):
    """Elsewhere Pillow would have to cut it, which takes several times as long."""
    wanted = [view(FastPreprocessor(), photograph("china"), 24, CROPS, seed) for seed in range(20)]
    monkeypatch.setattr(Image.Image, "resize", None)
    made = [view(FastPreprocessor(), photograph("china"), 24, CROPS, seed) for seed in range(20)]
    assert np.array_equal(made, wanted)


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [224, 48])
def test_photographs_are_turned_as_exif_says_however_they_are_varied(orientation, size, compose):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = jpeg(pixels_of("china"), exif=exif)
    for augmentation in (Augmentation(), CROPS):
        pair = [view(way, encoded, size, augmentation, 3) for way in (FastPreprocessor(compose), REFERENCE)]
        assert psnr(*pair) > (43 if size == 224 else SHARPER)
    turned = Augmentation(0.5, True, 3, 10.0, load=2)
    smooth = jpeg(cloudy(641, 427), exif=exif)
    pair = [view(way, smooth, size, turned, 3) for way in (FastPreprocessor(compose), REFERENCE)]
    upright = (427, 641) if orientation >= 5 else (641, 427)
    assert psnr(*pair, np.broadcast_to(kept(REFERENCE, upright, size, turned, 3), pair[0].shape)) > 40


@pytest.mark.parametrize("load", [1, 4, 12])
@pytest.mark.parametrize("compose", [False, True])
def test_every_round_of_the_augmentation_load_is_done_as_the_reference_does(decoder, compose, load):
    """Where nothing black came in; of details composed views keep more, so that they are compared on an image without."""
    augmentation = Augmentation(0.35, True, load=load)
    encoded = jpeg(cloudy(400, 300)) if compose else photograph("flower")
    size = (400, 300) if compose else (640, 427)
    for seed in range(3):
        fast, reference = view(FastPreprocessor(compose), encoded, 96, augmentation, seed), view(REFERENCE, encoded, 96, augmentation, seed)  # fmt: skip
        shown = kept(REFERENCE, size, 96, augmentation, seed)
        assert shown.mean() > 0.3
        # Pillow's rotation rounds down: twelve of them make an image darker by 5 of 255
        assert psnr(fast, reference, np.broadcast_to(shown, fast.shape)) > (32 if load == 12 else 40)


def test_a_composed_view_keeps_what_step_by_step_turns_out_of_the_canvas():
    augmentation = Augmentation(load=12)
    for seed in range(5):
        together, apart = (kept(FastPreprocessor(compose), (400, 300), 96, augmentation, seed) for compose in (True, False))  # fmt: skip
        assert together.mean() >= apart.mean() and not (apart & ~together).any()


@pytest.mark.parametrize("compose", [False, True])
def test_all_ways_take_the_same_numbers_from_the_generator(compose):
    for encoded in (photograph("china"), SMALL[:300], jpeg(cloudy(30, 20).convert("CMYK"))):
        left = []
        for way in (REFERENCE, FastPreprocessor(compose)):
            rng = random.Random(5)
            try:
                way.varied(
                    ImageFile(lambda encoded=encoded: encoded, lambda: "a/0.jpg"),
                    32,
                    3,
                    Augmentation(0.3, True, 3, 10.0, 0.2, 3),
                    rng,
                )
            except BrokenImage:
                continue
            left.append(rng.random())
        assert len(set(left)) <= 1


def test_places_of_composed_views_are_those_of_the_steps_in_every_draw():
    """A bright dot, drawn often: each time both ways bring it to the same place, so that places are distributed alike."""
    dot = Image.new("L", (200, 150))
    dot.paste(255, (96, 71, 104, 79))
    encoded, places = jpeg(dot, quality=100), []
    augmentation = Augmentation(0.6, True, 4, 15.0, load=5)
    for seed in range(60):
        found = []
        for way in (FastPreprocessor(compose=True), FastPreprocessor(), REFERENCE):
            light = view(way, encoded, 64, augmentation, seed, channels=1)[0].astype(float)
            light[light < 40] = 0
            assert light.sum() > 0
            found.append([(light.sum(axis) @ (np.arange(64) + 0.5)) / light.sum() for axis in (0, 1)])
        assert np.abs(np.subtract(found, found[-1])).max() < 0.35, (seed, found)
        places.append(found[0])
    assert np.std(places, axis=0).min() > 3, "all over the view"


@pytest.mark.parametrize("values", [{}, {"compose_augmentation": True}, {"preprocessing": "cpu_reference"}])
def test_the_augmentation_load_of_the_settings_reaches_training_images_alone(tmp_path, values):
    (tmp_path / "photographs").symlink_to(FOLDER)

    def opened(load: int):
        chosen = LabelledImageSettings(image_size=64, augmentation_load=load, **values)
        return open_data(tmp_path, tmp_path, chosen, 3)

    plain, loaded = opened(0), opened(8)
    assert all(torch.equal(plain.held_out[0, number][0], loaded.held_out[0, number][0]) for number in range(2))
    assert not torch.equal(plain.training[1, 0].image, loaded.training[1, 0].image)
    assert loaded.training.view_description()["load"] == 8


# -- operations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("size", [(224, 224), (31, 97), (427, 640), (1, 1)])
def test_resize_is_pillows(size, grey):
    image = pixels_of("china").convert("L" if grey else "RGB")
    made, wanted = resize(np.array(image), size), np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR))
    assert made.shape == ((1 if grey else 3), *size)
    assert abs(made.astype(int) - (wanted[None] if grey else wanted.transpose(2, 0, 1))).max() <= 1


@pytest.mark.parametrize("degrees", [0, 5, -30, 90])
def test_a_warp_is_pillows_rotation_within_its_border(decoder, degrees):
    image = pixels_of("flower", (120, 90))
    wanted = np.asarray(image.rotate(degrees, Image.Resampling.BILINEAR, translate=(7, -4)))
    made = warp(np.asarray(image), rotation(degrees, 120, 90, (7, -4)), (120, 90))
    inside = np.asarray(Image.new("L", (116, 86), "white").resize((116, 86)))
    frame = np.zeros((90, 120), np.uint8)
    frame[2:-2, 2:-2] = inside
    shown = np.asarray(Image.fromarray(frame).rotate(degrees, Image.Resampling.NEAREST, translate=(7, -4))) > 0
    assert psnr(made, wanted, shown) > 40


# -- nasty files -------------------------------------------------------------------------------------------------------


def nasty() -> dict[str, bytes]:
    """Files of every kind that a channel of photographs may hold, by what is the matter with them."""
    image, small = pixels_of("china", (90, 60)), Image.new("RGB", (1, 1), "red")
    whole = photograph("china")
    deep = np.linspace(0, 65535, 60 * 90).reshape(60, 90).astype(np.uint16)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "description"
    tagged, adobe = jpeg(image, exif=exif), b"Adobe" + bytes(6)
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 64] = bytes(64)

    def saved(image: Image.Image, kind: str, **options) -> bytes:
        image.save(buffer := io.BytesIO(), kind, **options)
        return buffer.getvalue()

    return {
        "empty": b"",
        "text": b"no image at all",
        "a JPEG of two bytes": whole[:2],
        "a JPEG cut in its header": whole[:300],
        "a JPEG cut in the middle": whole[: len(whole) // 2],
        "a JPEG without its last bytes": whole[:-40],
        "a JPEG without its end": whole[:-2],
        "a JPEG damaged in the middle": bytes(damaged),
        "a JPEG with more behind its end": whole + b"and so on" * 20,
        "a JPEG without a table": whole.replace(b"\xff\xdb", b"\xff\xfe", 1),
        "a progressive JPEG": jpeg(image, progressive=True),
        "a grey JPEG": jpeg(image.convert("L")),
        "a CMYK JPEG": jpeg(image.convert("CMYK")),
        "a YCCK JPEG": with_segment(jpeg(image.convert("CMYK")), 0xEE, adobe + b"\2"),
        "an RGB JPEG": with_segment(jpeg(image, subsampling=0), 0xEE, adobe + b"\0"),
        "a JPEG with sparse colour": jpeg(image, subsampling=2),
        "a JPEG of 12 bits": with_frame(SMALL, bits=12),
        "a giant JPEG": with_frame(SMALL, width=65_000, height=65_000),
        "a giant PNM": b"P6 60000 60000 255\n",
        "a JPEG that says it is higher": with_frame(SMALL, height=320),
        "a JPEG of a pixel": jpeg(small),
        "a JPEG of a row": jpeg(pixels_of("china", (300, 1))),
        "a JPEG of a column": jpeg(pixels_of("china", (1, 300))),
        "a JPEG of 17 x 1001": jpeg(pixels_of("china", (17, 1001))),
        "a JPEG on its side": tagged,
        "a JPEG with bad EXIF data": tagged.replace(b"\x01\x0e\x00\x02", b"\x01\x0e\x00\x05"),
        "a JPEG with no EXIF data in its EXIF segment": tagged.replace(b"Exif\0\0MM", b"Exif\0\0XX"),
        "16-bit grey": saved(Image.fromarray(deep), "PNG"),
        "16-bit grey in a TIFF": saved(Image.fromarray(deep), "TIFF"),
        "32 bits": saved(Image.new("F", (4, 4)), "TIFF"),
        "black and white": saved(image.convert("1"), "PNG"),
        "a palette": saved(image.quantize(16), "GIF"),
        "transparency": saved(Image.merge("RGBA", (*image.split(), image.getchannel(0))), "PNG"),
        "a PNG of a row": saved(pixels_of("china", (300, 1)), "PNG"),
        "a cut PNG": saved(image, "PNG")[:900],
        "a WebP": saved(image, "WEBP"),
    }


@pytest.mark.filterwarnings(
    "ignore:Corrupt EXIF", "ignore:Metadata Warning", "ignore:Truncated File Read", "ignore:Tag data"
)
@pytest.mark.parametrize("what", nasty())
def test_nasty_files_are_shown_as_the_reference_does_or_named_as_it_does(decoder, what):
    encoded = nasty()[what]
    for channels, augmentation in ((3, Augmentation()), (1, CROPS), (3, dataclasses.replace(CROPS, load=2))):
        made = []
        for way in (REFERENCE, FastPreprocessor()):
            try:
                made.append(view(way, encoded, 32, augmentation, 1, channels))
            except BrokenImage as error:
                made.append(str(error))
        if isinstance(made[0], str):
            assert made[1] == made[0] and made[0].startswith("a/0.jpg cannot be read as an image: ")
        else:
            # around a crop Pillow sees a little of what lies beyond it, and around a turned image no half-black border
            header = read_header(encoded)
            smaller = header is not None and decoded_part((0, 0, *header[:2]), 32) > 1
            assert psnr(*made) > (
                22 if augmentation.load else SHARPER if smaller else 38 if augmentation is CROPS else 43
            )


def test_what_decodes_is_said(decoder):
    warps = "Pillow (OpenCV is not installed)" if decoder == "Pillow" else "OpenCV"
    assert FastPreprocessor().about() == f"preprocessing cpu: JPEGs decoded by {DECODERS[decoder]}, rotated by {warps}"
    assert FastPreprocessor(True).about().startswith("preprocessing cpu composed: ")


def test_a_side_of_more_pixels_than_opencv_counts_is_warped_as_pillow_does_it():
    """A page's screenshot, of which OpenCV raises an assertion."""
    shift = np.array([[1.0, 0, 1], [0, 1, 0], [0, 0, 1]])
    for shape in ((4, LONGEST_SIDE + 2), (LONGEST_SIDE + 2, 4, 3), (4, LONGEST_SIDE)):
        pixels = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        moved = warp(pixels, shift, (shape[1], shape[0]))
        assert np.array_equal(moved[:, :-1], pixels[:, 1:]), shape

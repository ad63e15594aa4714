"""JPEG headers and decoders: what is a plain JPEG, what it says, and the same pixels from each decoder at each size."""

from __future__ import annotations

import io
import itertools
import struct

import numpy as np
import pytest
from PIL import Image
from training.data.augmentation import PARTS
from training.data.decode.jpeg import JpegHeader, find_decoder, opencv, read_frame, read_header

from .conftest import DECODERS
from .photographs import NAMES, jpeg, photograph, pixels_of, psnr


def with_segment(encoded: bytes, marker: int, content: bytes) -> bytes:
    """A JPEG file with one segment more, before all others."""
    return encoded[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content + encoded[2:]


def with_frame(encoded: bytes, **changes) -> bytes:
    """A JPEG file whose frame header says something else: marker, bits, height or width."""
    place = next(place for mark in (0xC0, 0xC2) if (place := encoded.find(bytes([0xFF, mark, 0, 17]))) >= 0)
    found = dict(zip(("bits", "height", "width"), struct.unpack(">BHH", encoded[place + 4 : place + 9])))
    found.update(changes)
    marker = found.pop("marker", encoded[place + 1])
    frame = bytes([0xFF, marker, 0, 17]) + struct.pack(">BHH", *found.values())
    return encoded[:place] + frame + encoded[place + 9 :]


SMALL = jpeg(pixels_of("china", (48, 32)))


# -- headers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_header_of_a_photograph_says_its_size(name):
    assert read_header(photograph(name)) == JpegHeader(640, 427, 3, 1)


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"optimize": True}, {"subsampling": 0}, {"dpi": (9, 9)}]
)
def test_every_kind_that_pillow_writes_is_read(options):
    assert read_header(jpeg(pixels_of("china", (48, 32)), **options)) == JpegHeader(48, 32, 3, 1)
    assert read_header(jpeg(pixels_of("china", (48, 32)).convert("L"), **options)) == JpegHeader(48, 32, 1, 1)


@pytest.mark.parametrize("orientation", range(10))
def test_the_orientation_is_that_of_exif_and_one_that_does_not_exist_is_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    header = read_header(jpeg(pixels_of("china", (48, 32)), exif=exif))
    assert header == JpegHeader(48, 32, 3, orientation if 1 <= orientation <= 8 else 1)
    assert header.upright_size == ((32, 48) if 5 <= orientation <= 8 else (48, 32))


def test_the_orientation_may_come_behind_the_frame_header():
    exif = Image.Exif()
    exif[0x0112] = 6
    tagged = jpeg(pixels_of("china", (48, 32)), exif=exif)
    content = tagged[tagged.index(b"\xff\xe1") + 4 :][: tagged.index(b"\xff\xdb") - tagged.index(b"\xff\xe1") - 4]
    place = SMALL.index(b"\xff\xda")
    late = SMALL[:place] + bytes([0xFF, 0xE1]) + struct.pack(">H", len(content) + 2) + content + SMALL[place:]
    assert Image.open(io.BytesIO(late)).getexif()[0x0112] == 6
    assert read_header(late) == JpegHeader(48, 32, 3, 6) and read_frame(late).tagged and not read_frame(SMALL).tagged


def test_segments_and_fill_bytes_before_the_frame_are_passed_over():
    for encoded in (
        with_segment(SMALL, 0xFE, b"\xff\xc0 in a comment"),
        with_segment(SMALL, 0xE2, bytes(60_000)),
        SMALL[:2] + b"\xff\xff\xff" + SMALL[2:],
        SMALL + b"what follows the end",
    ):
        assert read_header(encoded) == JpegHeader(48, 32, 3, 1)


def test_what_is_no_plain_jpeg_is_left_to_pillow():
    cmyk = pixels_of("china", (48, 32)).convert("CMYK")
    adobe = b"Adobe" + bytes(6)  # its last byte, the transform, 0: RGB
    cases = {
        "nothing": b"",
        "a PNG": b"\x89PNG\r\n\x1a\n" + bytes(99),
        "CMYK": jpeg(cmyk),
        "RGB, as Adobe says": with_segment(SMALL, 0xEE, adobe + b"\0"),
        "12 bits": with_frame(SMALL, bits=12),
        "lossless": with_frame(SMALL, marker=0xC3),
        "arithmetic": with_frame(SMALL, marker=0xC9),
        "no height, which then comes later": with_frame(SMALL, height=0),
        "RGB by the names of its components": SMALL.replace(b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01", b"\x03R\x22\x00G\x11\x01B\x11\x01"),
    }  # fmt: skip
    for name, encoded in cases.items():
        assert encoded != SMALL and read_header(encoded) is None, name
    assert all(read_header(SMALL[:length]) is None for length in range(150)), "cut before its frame"
    assert read_header(with_segment(SMALL, 0xEE, adobe + b"\1")) is not None, "YCbCr, as Adobe says"
    assert read_header(with_frame(SMALL, height=2**13, width=2**13)) == JpegHeader(2**13, 2**13, 3, 1)
    assert read_header(with_frame(SMALL, height=2**13, width=2**13 + 1)) is None, "more than MAX_PIXELS"


# -- decoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize(
    ("size", "part"),
    [((9, 1), 1), ((1, 33), 1), *itertools.product([(640, 427), (203, 77), (19, 16)], [1, *PARTS])],
)
def test_all_decoders_give_the_same_pixels_at_every_part_of_the_size(decoder, size, part, grey):
    encoded = jpeg(pixels_of("flower", size).convert("L" if grey else "RGB"))
    pixels = find_decoder()[0](encoded, read_header(encoded), part, grey)
    width, height = (-(-side // part) for side in size)
    assert pixels.dtype == np.uint8 and pixels.shape == ((height, width) if grey else (height, width, 3))
    whole = Image.open(io.BytesIO(encoded)).convert("L" if grey else "RGB")
    expected = np.asarray(whole.reduce(part))
    assert expected.shape == pixels.shape and psnr(pixels, expected) > (60 if part == 1 else 32)


@pytest.mark.parametrize("grey", [False, True])
def test_grey_of_a_colour_photograph_is_its_luma(decoder, grey):
    encoded = photograph("china")
    pixels = find_decoder()[0](encoded, read_header(encoded), 1, grey)
    assert psnr(pixels, np.asarray(pixels_of("china").convert("L" if grey else "RGB"))) > 45


def test_a_file_that_ends_too_early_is_given_up(decoder):
    encoded = photograph("china")
    header = read_header(encoded)
    for kept in (len(encoded) * 9 // 10, len(encoded) // 2, 1200):
        assert find_decoder()[0](encoded[:kept], header, 1, False) is None


def test_the_fastest_decoder_that_is_installed_is_taken_and_named(decoder):
    assert find_decoder()[1] == DECODERS[decoder]
    assert (opencv() is None) == (decoder == "Pillow")

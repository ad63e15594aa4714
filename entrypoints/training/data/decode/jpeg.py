"""JPEG files decoded by the fastest installed decoder, at 1/8 to full size; Pillow decodes all that is not a plain JPEG."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np

from training.data.decode.decoding import open_image, orientation, too_large

HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)
"""Markers of baseline, extended and progressive frames (ITU-T T.81, table B.1); the others are lossless or arithmetic."""

WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))
"""Markers that no length follows (ITU-T T.81, section B.1.1.3)."""


class JpegHeader(NamedTuple):
    """The header of a plain JPEG: 8 bits, grey or YCbCr."""

    width: int
    height: int
    channels: int
    """1 or 3."""
    orientation: int
    """EXIF's, 1 to 8; 1 is upright."""

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height in pixels as a viewer shows it."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


class JpegFrame(NamedTuple):
    """What the frame header of a plain JPEG says."""

    width: int
    height: int
    channels: int
    """1 or 3."""
    tagged: bool
    """Whether EXIF or XMP, which may say that the image is not upright, comes before the scan."""


def read_header(encoded: bytes) -> JpegHeader | None:
    """The header of a plain JPEG; None: another kind of JPEG, a damaged one, one of more than MAX_PIXELS, or no JPEG."""
    frame = read_frame(encoded)
    if frame is None:
        return None
    turned = 1
    if frame.tagged:
        try:
            with open_image(encoded) as opened:
                turned = orientation(opened)
        except Exception:  # on a damaged header Pillow raises whatever its parser met; the reference path decides
            return None
    return JpegHeader(frame.width, frame.height, frame.channels, turned)


def read_frame(encoded: bytes) -> JpegFrame | None:
    """The frame header of a plain JPEG, read without opening the file with Pillow; None as for `read_header`."""
    if encoded[:3] != b"\xff\xd8\xff":
        return None
    place, end, tagged, frame = 2, len(encoded) - 4, False, None
    while place < end:
        if encoded[place] != 0xFF:
            return None
        marker = encoded[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker in WITHOUT_LENGTH:
            place += 2
            continue
        length = int.from_bytes(encoded[place + 2 : place + 4], "big")
        segment = encoded[place + 4 : place + 2 + length]
        if marker == 0xDA:  # the scan
            break
        if marker in HUFFMAN_FRAMES:
            frame = _frame(segment)
            if frame is None:
                return None
        elif marker == 0xEE and segment[:5] == b"Adobe" and segment[11:12] != b"\1":
            return None  # neither YCbCr nor grey: RGB, CMYK or YCCK
        elif marker == 0xE1:  # EXIF, or XMP, which may hold the orientation too
            tagged = True
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return None
        place += 2 + length
    return None if frame is None else JpegFrame(*frame, tagged)


def _frame(segment: bytes) -> tuple[int, int, int] | None:
    """Width and height in pixels, and channels, from a frame header's content; None: the file is no plain JPEG."""
    if len(segment) < 9:
        return None
    bits, height, width, channels = struct.unpack(">BHHB", segment[:6])
    if bits != 8 or channels not in (1, 3) or not height or not width or segment[6:12:3] in (b"RG", b"rg"):
        return None
    return None if too_large(width, height) else (width, height, channels)


Decoder = Callable[[bytes, JpegHeader, int, bool], "np.ndarray | None"]
"""(encoded, header, part, grey) -> uint8 (⌈height / part⌉, ⌈width / part⌉[, 3 unless grey]), as stored, not upright; None: the file
may be damaged, and `decoding.decode` decides."""


@functools.cache
def opencv() -> ModuleType | None:
    """OpenCV without threads of its own, which would multiply with ours; None: it is not installed."""
    try:
        import cv2
    except ImportError:
        return None
    cv2.setNumThreads(0)
    return cv2


@functools.cache
def find_decoder() -> tuple[Decoder, str]:
    """The fastest installed decoder, and its name: simplejpeg, OpenCV or Pillow. All are libjpeg-turbo and release the GIL."""
    try:
        import simplejpeg
    except ImportError:
        if opencv() is not None:
            return _by_opencv, "OpenCV (simplejpeg is not installed)"
        return _by_pillow, "Pillow (neither simplejpeg nor OpenCV is installed)"

    def by_simplejpeg(encoded: bytes, header: JpegHeader, part: int, grey: bool) -> np.ndarray | None:
        height, width = -(-header.height // part), -(-header.width // part)
        try:
            pixels = simplejpeg.decode_jpeg(
                encoded, "GRAY" if grey else "RGB", min_height=height, min_width=width, min_factor=part
            )
        except ValueError:  # libjpeg's warnings included
            return None
        found: np.ndarray = pixels[..., 0] if grey else pixels
        return found

    return by_simplejpeg, "simplejpeg"


def _by_opencv(encoded: bytes, header: JpegHeader, part: int, grey: bool) -> np.ndarray | None:
    if encoded.rfind(b"\xff\xd9", -64) < 0:  # it is truncated: OpenCV would fill it up with grey
        return None
    cv2 = opencv()
    assert cv2 is not None, "find_decoder chose it"
    # IMREAD_REDUCED_GRAYSCALE_2 is 16, …_4 32, …_8 64; the colour ones are 1 more
    flags = (8 * part if part > 1 else 0) + (0 if grey else 1) + cv2.IMREAD_IGNORE_ORIENTATION
    pixels: np.ndarray | None = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    if pixels is not None and not grey:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)
    return pixels


def _by_pillow(encoded: bytes, header: JpegHeader, part: int, grey: bool) -> np.ndarray | None:
    try:
        with open_image(encoded) as image:
            image.draft("L" if grey else "RGB", (max(header.width // part, 1), max(header.height // part, 1)))
            return np.array(image.convert("L" if grey else "RGB"))
    except Exception:  # decoding.decode reports it
        return None

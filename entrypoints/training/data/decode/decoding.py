"""An image file's pixels as a viewer shows them: upright, without transparency, 8 bits in one or three channels."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from training.data.storage import StorageError, read_with_retries

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""What a file may hold, whatever its name says. Pillow knows more, and passes PostScript to Ghostscript, which runs it."""

MAX_PIXELS = 2**26
"""Per image: 256 MiB of Pillow's memory at 4 bytes a pixel, and above the 61 million of full-frame cameras. A PNG of 300 KB can
unpack to as much."""

ORIENTATION = 0x0112
"""The EXIF tag of how a camera was held (CIPA DC-008, section 4.6.4)."""

BITS, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0
"""Tags of a TIFF: a sample's bits, and what their values mean; and the value of a negative (TIFF 6.0, section 8)."""

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The turn that brings an image of each orientation upright; 1 is upright."""


class BrokenImage(ValueError):
    """A file that cannot be read as an image; the message names it."""


def read_file(file: str | Path) -> bytes:
    """The bytes of an image file.

    Raises:
        BrokenImage: it is not there, or may not be read; the message names it.
        StorageError: storage keeps failing, so nothing is known of the image.
    """
    try:
        return read_with_retries(partial(_content, file), file)
    except StorageError:
        raise
    except OSError as error:
        raise BrokenImage(f"{file} cannot be read: {error.strerror or error}") from error


def _content(file: str | Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def open_image(encoded: bytes) -> Image.Image:
    """An image file opened by Pillow, which reads the header now and the pixels on demand.

    Raises:
        ValueError: the file is empty, in none of FORMATS, or has more than MAX_PIXELS.
        Exception: whatever else Pillow raises on a damaged header: SyntaxError, TypeError, struct.error …
    """
    try:
        opened = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError as error:  # its message names the object in memory
        valid = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"it is not a {valid} file, or its header is damaged" if encoded else "it is empty") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(_TOO_LARGE) from error
    if too_large(*opened.size):
        raise ValueError(_TOO_LARGE)
    return opened


def too_large(width: int, height: int) -> bool:
    """Whether an image has more than MAX_PIXELS."""
    return width * height > MAX_PIXELS


_TOO_LARGE = f"it has more than {MAX_PIXELS:,} pixels, the limit for one image: scale it down, or cut it into parts"


def decode(encoded: bytes, file: str | Path, channels: int) -> Image.Image:
    """An image in mode L for one channel, RGB for three.

    EXIF's orientation is applied, transparency becomes white, and 12 or 16 bits are reduced to the upper 8.

    Args:
        encoded: a whole image file.
        file: its path, for messages.

    Raises:
        BrokenImage: `open_image` refuses it, it is damaged, or its pixels have more than 16 bits; the message names the file.
    """
    try:
        with open_image(encoded) as opened:
            opened.load()
            return upright(opened, _flat(_eight_bits(opened)).convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # a damaged file makes Pillow raise OSError, SyntaxError, TypeError, struct.error …
        raise BrokenImage(f"{file} cannot be read as an image: {str(error) or type(error).__name__}") from error


def upright(opened: Image.Image, image: Image.Image) -> Image.Image:
    """An image turned upright as the file that it comes from says.

    ImageOps.exif_transpose also rewrites the remaining EXIF data, and fails on a good image with bad EXIF data.
    """
    # Pillow turns a TIFF when it loads it, and before version 10 does not say so
    turned = 1 if opened.format == "TIFF" else orientation(opened)
    return image.transpose(UPRIGHT[turned]) if turned in UPRIGHT else image


def orientation(opened: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1, upright, if the EXIF data has none or is damaged."""
    try:
        found: Any = opened.getexif().get(ORIENTATION)
    except Exception:  # whatever Pillow's parser met
        return 1
    return int(found) if found in range(1, 9) else 1


def as_pixels(image: Image.Image) -> np.ndarray:
    """A new uint8 array (channels, height, width) of an image in mode L or RGB."""
    pixels = np.asarray(image)
    return np.array(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), order="C")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits reduced to the upper 8; Pillow would clip it at 255, so that nearly all of it becomes white."""
    # PNG before Pillow 11, and a PGM of any range above 8 bits, which Pillow scales up to 16
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow leaves 12 bits of a TIFF as they are, and of such depth does not turn what is white at 0
        tags: Any = getattr(image, "tag_v2", {})
        bits, negative = tags.get(BITS, (16,))[0], tags.get(PHOTOMETRIC) == WHITE_IS_ZERO
        pixels = (np.asarray(image).astype(np.uint16) >> (bits - 8)).astype(np.uint8)
        return Image.fromarray(255 - pixels if negative else pixels)
    if image.mode in ("I", "F"):
        raise ValueError(f"it has 32-bit {image.mode} pixels: convert it to 8 bits, in the range you want to keep")
    return image


def _flat(image: Image.Image) -> Image.Image:
    """The image on white where it is transparent; plain conversion shows the colours hidden under the transparency."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image
    colours = image if image.mode == "RGBA" else image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours)

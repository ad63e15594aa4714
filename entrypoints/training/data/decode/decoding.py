"""An image file's pixels as a viewer shows them: upright, without transparency, 8 bits in one or three channels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

ORIENTATION = 0x0112
"""The EXIF tag of how a camera was held (CIPA DC-008, section 4.6.4)."""


class BrokenImage(ValueError):
    """A file that cannot be read as an image; the message names it."""


UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image of that orientation upright; 1 is upright."""


def read_file(file: str | Path) -> bytes:
    """An image file as it is.

    Raises:
        BrokenImage: it cannot be read; the message names it.
    """
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise BrokenImage(f"{file} cannot be read: {error.strerror or error}") from error


def decode(encoded: bytes, file: str | Path, channels: int) -> Image.Image:
    """An image in mode L for one channel, RGB for three.

    EXIF's orientation is applied; transparent parts show white, as on a page; of 16 bits the upper 8 are kept.

    Args:
        encoded: a whole image file.
        file: where it lies, for messages.

    Raises:
        BrokenImage: it is no image, is damaged, has more than Pillow's 179 million pixels, or pixels of more than 16 bits; the
            message names it.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            opened.load()
            return upright(opened, _flat(_eight_bits(opened)).convert("L" if channels == 1 else "RGB"))
    except UnidentifiedImageError as error:  # which would name the object in memory that Pillow read
        what = "it is of no kind that Pillow knows" if encoded else "it is empty"
        raise BrokenImage(f"{file} cannot be read as an image: {what}") from error
    except Exception as error:  # a damaged file makes Pillow raise OSError, SyntaxError, TypeError, struct.error …
        raise BrokenImage(f"{file} cannot be read as an image: {what_is_wrong(error)}") from error


def what_is_wrong(error: Exception) -> str:
    """What Pillow says of a file, the same in every process: without the place in memory where it found what is no image."""
    if isinstance(error, UnidentifiedImageError):
        return "it is in none of the formats that Pillow knows"
    return str(error) or type(error).__name__


def upright(opened: Image.Image, image: Image.Image) -> Image.Image:
    """An image turned as the file that it was read from says.

    ImageOps.exif_transpose would also write the remaining EXIF data again, and fail where a good image has bad EXIF data.
    """
    # Pillow itself turns a TIFF when it loads it, and before version 10 forgot to say so
    orientation = 1 if opened.format == "TIFF" else opened.getexif().get(ORIENTATION)
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image


def as_pixels(image: Image.Image) -> np.ndarray:
    """A new uint8 array (channels, height, width) of an image in mode L or RGB."""
    pixels = np.asarray(image)
    return np.array(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), order="C")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow itself would cut 16-bit grey off at 255, so that nearly all of it becomes white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # the second before Pillow 11
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"it has {image.mode} pixels of 32 bits: convert it to 8 bits, in the range that you want to keep"
        )
    return image


def _flat(image: Image.Image) -> Image.Image:
    """The image on white where it is transparent; without this the hidden colours under the transparency would show."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image
    colours = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours)

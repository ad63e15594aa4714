"""An image to prepare, with its class or mask: its source, and its encoded bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.prepare.entry_rules import entry_rules

if TYPE_CHECKING:
    from PIL.Image import Image

KEPT = (".jpg", ".jpeg", ".png", ".webp")
"""Suffixes of formats that are kept. Others become PNG."""

GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes without colour, which stay grey."""


class Sample(NamedTuple):
    """An image to write. It can be pickled."""

    split: str
    """One of `made_folders.SPLITS`."""
    label: str | None
    """Its class; None if it has a mask or no label."""
    stem: str
    """Its name without suffix, unique in its class."""
    source: str
    """A file's path, or a description for messages."""
    image: Callable[[], Image] | None = None
    """Draws it; None: read the file `source`."""
    mask: Callable[[], Image] | str | None = None
    """Draws its mask, or is the mask's path; None if it has none."""

    @property
    def suffix(self) -> str:
        """The written file's suffix: the source's if it is kept, else .png."""
        suffix = os.path.splitext(self.source)[1].lower()
        return suffix if suffix in KEPT else ".png"


@dataclass(frozen=True)
class Encoding:
    """How images are scaled and encoded."""

    size: int | None = None
    """Scale images down to this shorter side, in pixels; None: no scaling."""
    jpeg_quality: int = 95
    """For scaled JPEG and WebP files."""


def as_utf8(text: str) -> str:
    """Text whose file names may hold bytes that are not UTF-8, such as \xff, with an escape for each: JSON and strict streams accept it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def reason(sample: Sample, error: ValueError) -> str:
    """Why `encode` cannot read a sample, without its source's name, which may be spelled differently next time."""
    return as_utf8(str(error).removeprefix(f"{sample.source} "))


def encode(sample: Sample, encoding: Encoding) -> tuple[bytes, bytes | None]:
    """The encoded image and mask. Files that need no change keep their bytes.

    Raises:
        ValueError: the entry scripts' rules cannot decode one, or the mask has another size than the image.
    """
    image, untouched = _opened(sample)
    mask, mask_file = _opened_mask(sample)
    if mask is not None and mask.size != image.size:
        raise ValueError(
            f"the mask has {mask.width} × {mask.height} pixels, its image {image.width} × {image.height} in EXIF orientation"
        )
    size = _scaled_size(image.size, encoding.size)
    if size == image.size:
        return untouched or _encoded(image, sample.suffix, encoding), mask_file or _encoded_mask(mask)
    image = image.resize(size, resample=2, reducing_gap=3.0)  # bilinear, after halving while that loses nothing
    mask = mask.resize(size, resample=0) if mask is not None else None  # nearest, so that no new class values appear
    return _encoded(image, sample.suffix, encoding), _encoded_mask(mask)


def _opened(sample: Sample) -> tuple[Image, bytes | None]:
    """A sample's pixels, and its file's bytes if they can be kept."""
    if sample.image is not None:
        return sample.image(), None
    decoding = entry_rules().decoding
    data = decoding.read_file(sample.source)
    try:
        with decoding.open_image(data) as opened:
            channels = 1 if opened.mode in GREY else 3
    except Exception:  # decode raises the right error
        channels = 3
    kept = os.path.splitext(sample.source)[1].lower() in KEPT
    return decoding.decode(data, sample.source, channels), data if kept else None


def _opened_mask(sample: Sample) -> tuple[Image | None, bytes | None]:
    if sample.mask is None:
        return None, None
    if callable(sample.mask):
        return sample.mask(), None
    from PIL import Image

    rules = entry_rules()
    data = rules.decoding.read_file(sample.mask)
    return Image.fromarray(rules.masks.decode_mask(data, sample.mask)), data


def _scaled_size(size: tuple[int, int], shorter: int | None) -> tuple[int, int]:
    if shorter is None or min(size) <= shorter:
        return size
    scale = shorter / min(size)
    return max(shorter, round(size[0] * scale)), max(shorter, round(size[1] * scale))


def _encoded(image: Image, suffix: str, encoding: Encoding) -> bytes:
    options: dict[str, dict[str, Any]] = {
        ".png": {"format": "PNG"},
        ".webp": {"format": "WEBP", "quality": encoding.jpeg_quality},
    }
    file = io.BytesIO()
    image.save(file, **options.get(suffix, {"format": "JPEG", "quality": encoding.jpeg_quality, "subsampling": 0}))
    return file.getvalue()


def _encoded_mask(mask: Image | None) -> bytes | None:
    return None if mask is None else _encoded(mask, ".png", Encoding())

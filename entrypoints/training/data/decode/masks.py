"""A mask file's pixels as they are stored: one class number each, upright."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from training.data.decode.decoding import BrokenImage, upright, what_is_wrong

MASK_MODES = ("L", "P", "1")
"""Pillow's names for 8-bit grey, palette and black-and-white: one small whole number a pixel."""

STRETCHED = ("L;2", "L;4")
"""Grey of 2 or 4 bits, which Pillow stretches to 0…255, so that class 1 would become 85 or 17."""


def decode_mask(encoded: bytes, file: str | Path) -> np.ndarray:
    """uint8 (height, width) of whatever numbers the file holds.

    Args:
        encoded: a whole mask file.
        file: where it lies, for messages.

    Raises:
        BrokenImage: it is no image; the message names it.
        ValueError: its pixels are no class numbers; the message names the file.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            stored = opened.tile[0][3] if opened.tile else ""
            mode, mask = opened.mode, np.array(upright(opened, opened))
    except Exception as error:  # as for images, see decoding.decode
        raise BrokenImage(f"{file} cannot be read as a mask: {what_is_wrong(error)}") from error
    if mode not in MASK_MODES or stored in STRETCHED:
        kind = f"grey of {stored[-1]} bits" if stored in STRETCHED else f"{mode} pixels"
        raise ValueError(
            f"{file} has {kind}: a mask holds one class number a pixel; save it as 8-bit grey, or with a palette"
        )
    return mask.astype(np.uint8)

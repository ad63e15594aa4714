"""A mask file's pixels as stored: one class number each, upright."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.data.decode.decoding import BrokenImage, open_image, upright

MASK_MODES = ("L", "P", "1")
"""Pillow's names for 8-bit grey, palette and black-and-white: one small whole number a pixel."""

STRETCHED = ("L;2", "L;4")
"""Grey of 2 or 4 bits. Pillow stretches it to 0…255: class 1 becomes 85 or 17."""


def decode_mask(encoded: bytes, file: str | Path) -> np.ndarray:
    """The numbers in a mask file, uint8 (height, width).

    Args:
        encoded: a whole mask file.
        file: its path, for messages.

    Raises:
        BrokenImage: it is damaged or `open_image` refuses it; the message names it.
        ValueError: its pixels are no class numbers; the message names the file.
    """
    try:
        with open_image(encoded) as opened:
            stored = opened.tile[0][3] if opened.tile else ""
            mode, mask = opened.mode, np.array(upright(opened, opened))
    except Exception as error:  # a damaged file makes Pillow raise OSError, SyntaxError, TypeError, struct.error …
        raise BrokenImage(f"{file} cannot be read as a mask: {str(error) or type(error).__name__}") from error
    if mode not in MASK_MODES or stored in STRETCHED:
        kind = f"{stored[-1]}-bit grey pixels" if stored in STRETCHED else f"{mode} pixels"
        raise ValueError(
            f"{file} has {kind}: a mask holds one class number per pixel; save it as 8-bit grey, or with a palette"
        )
    return mask.astype(np.uint8)

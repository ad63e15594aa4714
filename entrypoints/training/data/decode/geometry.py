"""A variation as matrices: where in the image each pixel of a view comes from.

Points are (x, y, 1) in pixels from the image's top left corner, so that a pixel's middle is at .5; every matrix, float64 (3, 3),
leads from what an operation makes back to what it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from training.data.augmentation import Turn, Variation


def mirror(width: float) -> np.ndarray:
    """Left and right changed."""
    return np.array([[-1, 0, width], [0, 1, 0], [0, 0, 1.0]])


def flip(height: float) -> np.ndarray:
    """Top and bottom changed."""
    return np.array([[1, 0, 0], [0, -1, height], [0, 0, 1.0]])


def rotation(degrees: float, width: float, height: float, shift: tuple[float, float] = (0, 0)) -> np.ndarray:
    """Counterclockwise around the middle of a canvas that keeps its size, and shifted right and down afterwards."""
    angle, x, y = math.radians(degrees), width / 2, height / 2
    cos, sin = math.cos(angle), math.sin(angle)
    across, down = -x - shift[0], -y - shift[1]
    # the image's y axis points down: what a viewer sees turn counterclockwise turns the other way round in these numbers
    return np.array(
        [[cos, -sin, cos * across - sin * down + x], [sin, cos, sin * across + cos * down + y], [0, 0, 1.0]]
    )


def turned(turn: Turn, width: int, height: int) -> np.ndarray:
    """One round of the augmentation load: mirrored, turned upside down, then rotated."""
    return all_turned([turn], width, height)


def all_turned(turns: Iterable[Turn], width: int, height: int) -> np.ndarray:
    """Rounds of the augmentation load after each other."""
    a, b, c, d = (
        1.0,
        0.0,
        0.0,
        1.0,
    )  # all around the same middle; plain numbers, as many products of small arrays take long
    for turn in turns:
        if turn.mirrored:
            a, c = -a, -c
        if turn.upside_down:
            b, d = -b, -d
        cos, sin = math.cos(math.radians(turn.degrees)), math.sin(math.radians(turn.degrees))
        a, b, c, d = a * cos + b * sin, b * cos - a * sin, c * cos + d * sin, d * cos - c * sin
    x, y = width / 2, height / 2
    return np.array([[a, b, x - a * x - b * y], [c, d, y - c * x - d * y], [0, 0, 1.0]])


def scaled_box(box: tuple[float, float, float, float], size: int) -> np.ndarray:
    """left, top, right, bottom scaled to `size` × `size`."""
    left, top, right, bottom = box
    return np.array([[(right - left) / size, 0, left], [0, (bottom - top) / size, top], [0, 0, 1.0]])


def fitted(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height to which `reference.fit` scales an image before it cuts the middle: the shorter side becomes `size`."""
    short = min(width, height)
    wide, high = (size if side == short else int(size * side / short) for side in (width, height))
    return wide, high


def middle_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """left, top, right, bottom of the part that `reference.fit` shows."""
    wide, high = fitted(width, height, size)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    across, down = width / wide, height / high
    return left * across, top * down, (left + size) * across, (top + size) * down


def composed(variation: Variation, width: int, height: int, size: int) -> np.ndarray:
    """From a view of `size` × `size` pixels back to the upright image, through the whole variation."""
    box = variation.box or middle_box(width, height, size)
    matrix: np.ndarray = all_turned(variation.turns, width, height) @ scaled_box(box, size)
    if variation.degrees or variation.shift != (0, 0):
        matrix = matrix @ rotation(variation.degrees, size, size, variation.shift)
    if variation.mirrored:
        matrix = matrix @ mirror(size)
    return matrix


def stored(orientation: int, width: int, height: int) -> np.ndarray:
    """From an upright image back to how its file stores it, `width` × `height` pixels, by EXIF's orientation of 1 to 8."""
    matrix = np.eye(3)
    if orientation >= 5:
        matrix = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 1.0]])
    if orientation in (2, 3, 7, 8):
        matrix = mirror(width) @ matrix
    return flip(height) @ matrix if orientation in (3, 4, 6, 7) else matrix

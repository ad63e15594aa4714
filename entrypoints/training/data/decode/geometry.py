"""A variation as matrices from a view's pixels to the image's.

Points are (x, y, 1) in pixels from the top left corner, with pixel centres at .5. Every matrix, float64 (3, 3), maps an operation's
output back to its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from training.data.augmentation import Turn, Variation

LONGEST = 8
"""The largest ratio of its sides at which an image is scaled as a whole before its middle is cut."""


Rows: TypeAlias = tuple[tuple[float, float, float], tuple[float, float, float]]
"""A matrix's first two rows as plain numbers: one array of many images' rows is faster to make than one for each."""


def mirror(width: float) -> np.ndarray:
    """Left and right swapped."""
    return np.array([[-1, 0, width], [0, 1, 0], [0, 0, 1.0]])


def flip(height: float) -> np.ndarray:
    """Top and bottom swapped."""
    return np.array([[1, 0, 0], [0, -1, height], [0, 0, 1.0]])


def rotation(degrees: float, width: float, height: float, shift: tuple[float, float] = (0, 0)) -> np.ndarray:
    """A counterclockwise rotation around the middle of a canvas of constant size, then a shift right and down."""
    return np.array([*rotation_rows(degrees, width, height, shift), (0, 0, 1.0)])


def rotation_rows(degrees: float, width: float, height: float, shift: tuple[float, float] = (0, 0)) -> Rows:
    """The first two rows of `rotation`, for the same arguments."""
    angle, x, y = math.radians(degrees), width / 2, height / 2
    cos, sin = math.cos(angle), math.sin(angle)
    across, down = -x - shift[0], -y - shift[1]
    # the y axis points down, so a viewer's counterclockwise is clockwise in these numbers
    return (cos, -sin, cos * across - sin * down + x), (sin, cos, sin * across + cos * down + y)


def mirrored_rows(rows: Rows, width: float) -> Rows:
    """The first two rows of a matrix times `mirror`: what is `width` pixels wide is mirrored before it is mapped."""
    (a, b, across), (c, d, down) = rows
    return (-a, b, a * width + across), (-c, d, c * width + down)


def turned(turn: Turn, width: int, height: int) -> np.ndarray:
    """One round of the augmentation load: mirrored, turned upside down, then rotated."""
    return all_turned([turn], width, height)


def all_turned(turns: Iterable[Turn], width: int, height: int) -> np.ndarray:
    """Rounds of the augmentation load, one after the other."""
    return np.array([*turned_rows(turns, width, height), (0, 0, 1.0)])


def turned_rows(turns: Iterable[Turn], width: int, height: int) -> Rows:
    """The first two rows of `all_turned`, for the same arguments."""
    # all turn around one middle; plain numbers, as products of small arrays are slow
    a, b, c, d = 1.0, 0.0, 0.0, 1.0
    for turn in turns:
        if turn.mirrored:
            a, c = -a, -c
        if turn.upside_down:
            b, d = -b, -d
        cos, sin = math.cos(math.radians(turn.degrees)), math.sin(math.radians(turn.degrees))
        a, b, c, d = a * cos + b * sin, b * cos - a * sin, c * cos + d * sin, d * cos - c * sin
    x, y = width / 2, height / 2
    return (a, b, x - a * x - b * y), (c, d, y - c * x - d * y)


def scaled_box(box: tuple[float, float, float, float], size: int) -> np.ndarray:
    """left, top, right, bottom scaled to `size` × `size`."""
    left, top, right, bottom = box
    return np.array([[(right - left) / size, 0, left], [0, (bottom - top) / size, top], [0, 0, 1.0]])


def fitted(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height that `reference.fit` scales an image to before it cuts the middle; the shorter side is `size`."""
    short = min(width, height)
    wide, high = (size if side == short else int(size * side / short) for side in (width, height))
    return wide, high


def not_too_long(width: int, height: int) -> tuple[int, int, int, int]:
    """left, top, right, bottom of an image, or of the middle of one that is longer than LONGEST times its shorter side, so that
    scaling a line of a few pixels takes no gigabytes."""
    most = LONGEST * min(width, height)
    (left, right), (top, bottom) = (
        (0, side) if side <= most else ((side - most) // 2, (side + most) // 2) for side in (width, height)
    )
    return left, top, right, bottom


def middle_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """left, top, right, bottom of the part that `reference.fit` shows."""
    wide, high = fitted(width, height, size)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    across, down = width / wide, height / high
    return left * across, top * down, (left + size) * across, (top + size) * down


def composed(variation: Variation, width: int, height: int, size: int) -> np.ndarray:
    """The whole variation, from a view of `size` × `size` pixels to the upright image."""
    box = variation.box or middle_box(width, height, size)
    matrix: np.ndarray = all_turned(variation.turns, width, height) @ scaled_box(box, size)
    if variation.degrees or variation.shift != (0, 0):
        matrix = matrix @ rotation(variation.degrees, size, size, variation.shift)
    if variation.mirrored:
        matrix = matrix @ mirror(size)
    return matrix


def stored(orientation: int, width: int, height: int) -> np.ndarray:
    """From an upright image to the `width` × `height` pixels that its file stores, by EXIF orientation, 1 to 8."""
    matrix = np.eye(3)
    if orientation >= 5:
        matrix = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 1.0]])
    if orientation in (2, 3, 7, 8):
        matrix = mirror(width) @ matrix
    return flip(height) @ matrix if orientation in (3, 4, 6, 7) else matrix

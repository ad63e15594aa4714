"""The fast pipeline from an image file to a view's pixels: libjpeg-turbo, decoding no larger than the crop needs, in few operations."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from PIL import Image

from training.data.augmentation import Augmentation, Variation, decoded_part
from training.data.decode import geometry
from training.data.decode.decoding import as_pixels, decode
from training.data.decode.image_file import ImageFile
from training.data.decode.jpeg import JpegHeader, find_decoder, opencv, read_header

ALIASING = 1.5
"""A composed warp that shrinks by more than this works on an image that was first shrunk, antialiased."""

READS_CHANNELS_LAST = not torch.__version__.startswith("2.0.")
"""torch 2.0 mixes up the colours of an image in this memory format."""


class FastPreprocessor:
    """Decodes plain JPEGs by simplejpeg or OpenCV, all else by the reference's decoder; scales by torch, warps by OpenCV.

    Args:
        compose: apply turns, crop, scaling, rotation, shift and mirroring in one warp. The geometry is the same; what one rotation turns
            out of the canvas comes back with the next, and pixels are interpolated once and stay sharper.
    """

    def __init__(self, compose: bool = False):
        self.compose = compose
        self.name = "cpu composed" if compose else "cpu"

    def about(self) -> str:
        """The libraries that decode and warp, for the log."""
        warps = "OpenCV" if opencv() is not None else "Pillow (OpenCV is not installed)"
        return f"preprocessing {self.name}: JPEGs decoded by {find_decoder()[1]}, rotated by {warps}"

    def varied(
        self, image: ImageFile, size: int, channels: int, augmentation: Augmentation, rng: random.Random
    ) -> np.ndarray:
        """Uint8 (channels, size, size) of an image file, augmented as drawn from `rng`.

        Raises:
            BrokenImage: it cannot be decoded; the message names the file.
        """
        header = image.header
        if header is not None:
            variation = augmentation.draw(header.upright_size, size, rng)
            grey = channels == 1 or header.channels == 1
            part = self._part(header, size, variation)
            pixels = image.decoded((part, grey), lambda: find_decoder()[0](image.encoded, header, part, grey))
            if pixels is not None:
                made = self._vary(pixels, header, part, size, variation)
                return made if len(made) == channels else np.repeat(made, channels, axis=0)
        pixels = image.decoded(channels, lambda: np.array(decode(image.encoded, image.name, channels)))
        high, wide = pixels.shape[:2]
        if header is None:
            variation = augmentation.draw((wide, high), size, rng)
        return self._vary(pixels, JpegHeader(wide, high, channels, 1), 1, size, variation)

    def whole(self, encoded: bytes, file: str, channels: int) -> np.ndarray:
        """Uint8 (height, width) for one channel, (height, width, 3) for three, of an image file, upright.

        Raises:
            BrokenImage: it cannot be decoded; the message names the file.
        """
        header = read_header(encoded)
        if header is not None and header.orientation == 1:
            pixels = find_decoder()[0](encoded, header, 1, channels == 1)
            if pixels is not None:
                return pixels
        return np.array(decode(encoded, file, channels))

    def scaled(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Uint8 (channels, *size) of pixels as `whole` returns them, bilinear, antialiased."""
        return resize(pixels, size)

    def _part(self, header: JpegHeader, size: int, variation: Variation) -> int:
        """The scale denominator to decode at; repeated rotations need all pixels."""
        if variation.turns and not self.compose:
            return 1
        return decoded_part((0, 0, header.width, header.height), size) if variation.box is None else variation.part

    def _vary(self, pixels: np.ndarray, header: JpegHeader, part: int, size: int, variation: Variation) -> np.ndarray:
        """Uint8 (1 or 3, size, size) from pixels (⌈height / part⌉, ⌈width / part⌉[, 3]) as stored."""
        rotated = bool(variation.degrees) or variation.shift != (0, 0)
        if self.compose and (rotated or variation.turns):
            return _planes(_warp_at_once(pixels, header, part, size, variation))
        width, height = header.upright_size
        stored = geometry.stored(header.orientation, header.width, header.height)
        for turn in variation.turns:
            pixels = warp(pixels, stored @ geometry.turned(turn, width, height), (width, height))
            stored, header = np.eye(3), JpegHeader(width, height, header.channels, 1)
        planes = _scaled(pixels, header, part, stored, size, variation)
        if rotated:
            back = geometry.rotation(variation.degrees, size, size, variation.shift)
            planes = _planes(warp(_interleaved(planes), back, (size, size)))
        return _mirrored(planes) if variation.mirrored else planes


LONGEST_SIDE = 2**15 - 2
"""The longest side, in pixels, that OpenCV's warpAffine takes: it counts in 16 bits, and refuses more."""


def warp(pixels: np.ndarray, matrix: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pixels (height, width[, 3]) warped by a matrix of `geometry`, bilinear, black beyond the image.

    Args:
        size: width and height of the result.
    """
    cv2 = opencv()
    if cv2 is None or max(*pixels.shape[:2], *size) > LONGEST_SIDE:
        image = Image.fromarray(pixels).transform(
            size, Image.Transform.AFFINE, tuple(matrix[:2].ravel()), Image.Resampling.BILINEAR
        )
        return np.array(image)
    between_middles = matrix[:2].copy()  # OpenCV's pixel centres are whole numbers
    between_middles[:, 2] += (matrix[:2, 0] + matrix[:2, 1] - 1) / 2
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    warped: np.ndarray = cv2.warpAffine(pixels, between_middles, size, flags=flags)
    return warped


def resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pixels (height, width[, 3]) as planes (1 or 3, *size), bilinear, antialiased when shrinking: Pillow's filter.

    torch's filter is vectorised for bytes: a third of the time of OpenCV's INTER_AREA, with the reference's pixels.
    numpy does the copies: torch would spread them over threads of its own, for each thread of a pool.
    """
    if pixels.ndim == 2:  # torch is slower with one channel than with three, and spreads it over threads
        return resize(_interleaved(np.broadcast_to(pixels, (3, *pixels.shape))), size)[:1]
    if READS_CHANNELS_LAST:
        image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    else:
        image = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    made = torch.nn.functional.interpolate(image[None], size, mode="bilinear", antialias=True)
    return np.ascontiguousarray(made[0].numpy())


def _scaled(
    pixels: np.ndarray, header: JpegHeader, part: int, stored: np.ndarray, size: int, variation: Variation
) -> np.ndarray:
    """The variation's box, or the middle square as `reference.fit` cuts it, as upright planes (channels, size, size)."""
    width, height = header.upright_size
    box = variation.box or geometry.not_too_long(width, height)
    sides = [[box[0] / part, box[2] / part], [box[1] / part, box[3] / part]]
    if header.orientation != 1:
        corners = stored @ [*sides, [1 / part, 1 / part]]
        sides = [sorted(row) for row in corners[:2].tolist()]
    if variation.box is not None:
        return _upright(_scaled_part(pixels, sides, (size, size)), header.orientation)
    wide, high = geometry.fitted(int(box[2] - box[0]), int(box[3] - box[1]), size)
    scaled = _scaled_part(pixels, sides, (high, wide) if header.orientation < 5 else (wide, high))
    planes = _upright(scaled, header.orientation)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return np.ascontiguousarray(planes[:, top : top + size, left : left + size])


def _scaled_part(pixels: np.ndarray, sides: list[list[float]], size: tuple[int, int]) -> np.ndarray:
    """The box [[left, right], [top, bottom]] of pixels (height, width[, 3]) as planes (1 or 3, *size).

    Only Pillow crops between pixels, where a smaller decoded image can end or, turned, begin; it takes four times as long.
    """
    (left, right), (top, bottom) = sides
    if all(side.is_integer() for side in (left, right, top, bottom)):
        return resize(pixels[int(top) : int(bottom), int(left) : int(right)], size)
    # the filter reaches beyond the box
    beside, above = math.ceil((right - left) / size[1]), math.ceil((bottom - top) / size[0])
    first, upper = max(0, int(left) - beside), max(0, int(top) - above)
    cut = Image.fromarray(pixels[upper : math.ceil(bottom) + above, first : math.ceil(right) + beside])
    box = (left - first, top - upper, right - first, bottom - upper)
    return as_pixels(cut.resize(size[::-1], Image.Resampling.BILINEAR, box=box))


def _warp_at_once(pixels: np.ndarray, header: JpegHeader, part: int, size: int, variation: Variation) -> np.ndarray:
    """The whole variation as one warp of stored pixels (height, width[, 3])."""
    width, height = header.upright_size
    stored = geometry.stored(header.orientation, header.width, header.height)
    matrix = np.diag([1 / part, 1 / part, 1]) @ stored @ geometry.composed(variation, width, height, size)
    across, down = np.maximum(np.hypot(matrix[:2, 0], matrix[:2, 1]), 1)  # image pixels to a view's pixel
    if max(across, down) > ALIASING:
        pixels, before = _shrunk(pixels, matrix, size, across, down)
        matrix = before @ matrix
    return warp(pixels, matrix, (size, size))


def _shrunk(
    pixels: np.ndarray, matrix: np.ndarray, size: int, across: float, down: float
) -> tuple[np.ndarray, np.ndarray]:
    """The part that a view shows, shrunk by `across` and `down`, and the matrix from the whole image to it."""
    corners = matrix @ np.array([[0, 0, size, size], [0, size, 0, size], [1, 1, 1, 1]])
    (left, top), (right, bottom) = corners[:2].min(1) - 2 * across, corners[:2].max(1) + 2 * down
    left, top = max(0, int(left)), max(0, int(top))
    right, bottom = min(pixels.shape[1], int(right) + 1), min(pixels.shape[0], int(bottom) + 1)
    if right <= left or bottom <= top:  # the view is beyond the image: black
        return pixels, np.eye(3)
    wide, high = max(1, round((right - left) / across)), max(1, round((bottom - top) / down))
    small = resize(pixels[top:bottom, left:right], (high, wide))
    across, down = wide / (right - left), high / (bottom - top)
    return _interleaved(small), np.array([[across, 0, -left * across], [0, down, -top * down], [0, 0, 1]])


def _upright(planes: np.ndarray, orientation: int) -> np.ndarray:
    """Planes (channels, height, width) turned as EXIF's orientation says; the inverse of `geometry.stored`."""
    if orientation == 1:
        return planes
    if orientation in (2, 3, 7, 8):
        planes = planes[:, :, ::-1]
    if orientation in (3, 4, 6, 7):
        planes = planes[:, ::-1]
    return np.ascontiguousarray(planes.transpose(0, 2, 1) if orientation >= 5 else planes)


def _mirrored(planes: np.ndarray) -> np.ndarray:
    """Planes (channels, height, width) with left and right swapped."""
    cv2 = opencv()
    if cv2 is None:
        return np.ascontiguousarray(planes[:, :, ::-1])
    flipped: np.ndarray = cv2.flip(planes.reshape(-1, planes.shape[2]), 1)
    return flipped.reshape(planes.shape)


def _planes(pixels: np.ndarray) -> np.ndarray:
    """(height, width[, 3]) as (1 or 3, height, width)."""
    cv2 = opencv()
    if pixels.ndim == 2:
        return pixels[None]
    if cv2 is None:
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    planes = np.empty((3, *pixels.shape[:2]), np.uint8)
    cv2.split(pixels, [*planes])
    return planes


def _interleaved(planes: np.ndarray) -> np.ndarray:
    """(1 or 3, height, width) as (height, width[, 3])."""
    cv2 = opencv()
    if len(planes) > 1 and cv2 is None:
        return np.ascontiguousarray(planes.transpose(1, 2, 0))
    pixels: np.ndarray = planes[0] if cv2 is None or len(planes) == 1 else cv2.merge([*planes])
    return pixels

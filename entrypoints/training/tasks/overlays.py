"""A segmenter's predictions on held-out images as one picture: image, mask and prediction side by side, and a legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from training.data.loaders import Data
from training.data.masks import MaskedImages
from training.engine.state import TrainingState
from training.models.export import atomic_write
from training.settings.segmentation import SegmentationSettings
from training.tasks.evaluation import bands, evaluating

FILE = "overlays.png"

PANEL = 320
"""Maximum of an image's longer side in the picture, in pixels; smaller images are enlarged by whole factors."""

OPACITY = 0.6
"""Of the class colours over the image. Unlabelled pixels of the mask are not coloured."""

COLUMNS = ("image", "mask", "prediction")
MARGIN, LINE = 8, 20
"""Pixels between panels, and the height of a line of text in pixels."""

Colour = tuple[int, int, int]


class Row(NamedTuple):
    """One held-out image."""

    name: str
    image: np.ndarray
    """uint8 (height, width, channels), in the size that the model saw."""
    mask: np.ndarray
    """uint8 (height, width), in its own size."""
    prediction: np.ndarray
    """uint8 (height, width), in the mask's size."""


def save(
    state: TrainingState,
    folder: Path,
    data: Data[MaskedImages, MaskedImages],
    settings: SegmentationSettings,
    log: Callable[[str], None],
) -> None:
    """Write overlays.png of `settings.overlays` held-out images, the same in every run on that data. Call it on rank 0 alone.

    It never ends a run: a failure is logged, and no picture is left.
    """
    if not settings.overlays:
        return
    try:
        found = rows(state, data, settings)
        sheet = draw(found, settings.names, colours(settings), settings.ignore_index)
        with atomic_write(folder / FILE) as place:
            sheet.save(place, format="PNG")
    except Exception as error:  # whatever it is, the model is trained and delivered
        log(f"no {FILE}: {type(error).__name__}: {error}")
    else:
        log(f"{len(found)} held-out images with their masks and predictions: {folder / FILE}")


@torch.no_grad()
def rows(state: TrainingState, data: Data[MaskedImages, MaskedImages], settings: SegmentationSettings) -> list[Row]:
    """Up to `settings.overlays` readable images, evenly spread over the held-out ones, with the model's predictions."""
    count, images = min(settings.overlays, len(data.held_out)), len(data.held_out)
    found = []
    with evaluating(state.evaluated):
        for index in (place * images // count for place in range(count)):
            item = data.held_out[0, index]
            if item is None:  # broken; the evaluation has named it
                continue
            image, mask = item[:2]
            with state.precision.autocast():
                logits = state.evaluated(image[None].to(state.world.device))
            prediction = torch.cat(
                [scaled.argmax(0).byte() for _, scaled in bands(logits[0].float(), mask.shape)]
            ).cpu()
            name = Path(data.held_out.pairs.name(index)).name
            found.append(Row(name, image.permute(1, 2, 0).numpy(), mask.numpy(), prediction.numpy()))
    return found


def colours(settings: SegmentationSettings) -> list[Colour]:
    """The classes' colours: the settings', or PASCAL VOC's."""
    chosen = settings.class_colours or map(voc_colour, range(settings.classes))
    return [(red, green, blue) for red, green, blue in chosen]


def voc_colour(number: int) -> Colour:
    """A class's colour in PASCAL VOC: bits 0, 3 and 6 of its number are the highest bits of red, 1, 4 and 7 of green, 2 and 5 of blue.

    VOClabelcolormap.m of the development kit, http://host.robots.ox.ac.uk/pascal/VOC/voc2012/#devkit; neighbours among the
    numbers are easy to tell apart.
    """
    red, green, blue = (
        sum((number >> (3 * place + channel) & 1) << (7 - place) for place in range(8)) for channel in range(3)
    )
    return red, green, blue


def draw(found: Sequence[Row], names: Sequence[str], palette: Sequence[Colour], ignore_index: int) -> Image.Image:
    """The picture: a row for each image, and below them the classes in their colours.

    Args:
        names, palette: of the classes, in their order.
    """
    lookup = np.zeros((256, 3), np.uint8)
    lookup[: len(palette)] = palette
    panels = [_panels(row, lookup, ignore_index) for row in found]
    wide = max([panel.width for row in panels for panel in row], default=PANEL)
    whole = len(COLUMNS) * (wide + MARGIN) + MARGIN
    legend = _legend(names, palette, whole)
    high = LINE + sum(row[0].height + LINE + MARGIN for row in panels)
    sheet = Image.new("RGB", (whole, high + legend.height), "white")
    pencil, font, top = ImageDraw.Draw(sheet), _font(), LINE
    for column, title in enumerate(COLUMNS):
        pencil.text((MARGIN + column * (wide + MARGIN), 2), title, "black", font)
    for row, drawn in zip(found, panels):
        for column, panel in enumerate(drawn):
            sheet.paste(panel, (MARGIN + column * (wide + MARGIN), top))
        top += drawn[0].height
        pencil.text((MARGIN, top + 2), _printable(row.name), "black", font)
        top += LINE + MARGIN
    sheet.paste(legend, (0, high))
    return sheet


def _panels(row: Row, lookup: np.ndarray, ignore_index: int) -> list[Image.Image]:
    """The image, then its mask and its prediction over it, all of one size and with the mask's aspect ratio."""
    longest = max(row.mask.shape)
    scale = PANEL // longest if longest <= PANEL else PANEL / longest
    high, wide = (max(1, round(side * scale)) for side in row.mask.shape)
    pixels = row.image if row.image.shape[2] == 3 else row.image[..., :1].repeat(3, axis=2)
    smooth = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR
    image = Image.fromarray(np.ascontiguousarray(pixels)).resize((wide, high), smooth)
    # the mask may hold ignore_index, which may also be a class's number; a prediction is always a class
    mask, prediction = (
        np.array(Image.fromarray(classes).resize((wide, high), Image.Resampling.NEAREST))
        for classes in (row.mask, row.prediction)
    )
    unlabelled = mask == ignore_index
    return [
        image,
        _tinted(image, lookup[mask], ~unlabelled),
        _tinted(image, lookup[prediction], np.ones_like(unlabelled)),
    ]


def _tinted(image: Image.Image, colour: np.ndarray, where: np.ndarray) -> Image.Image:
    pixels = np.asarray(image, np.float32)
    tinted = np.where(where[..., None], (1 - OPACITY) * pixels + OPACITY * colour, pixels)
    return Image.fromarray(tinted.round().astype(np.uint8))


def _legend(names: Sequence[str], palette: Sequence[Colour], whole: int) -> Image.Image:
    """A colour patch and a name for each class, in lines `whole` pixels wide."""
    font, left, top, places = _font(), MARGIN, MARGIN, []
    measuring = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    labels = [_printable(name) for name in names]
    for label in labels:
        wide = LINE + round(measuring.textlength(label, font)) + 2 * MARGIN
        if left + wide > whole and left > MARGIN:
            left, top = MARGIN, top + LINE
        places.append((left, top))
        left += wide
    legend = Image.new("RGB", (whole, top + LINE + MARGIN), "white")
    pencil = ImageDraw.Draw(legend)
    for label, colour, (x, y) in zip(labels, palette, places):
        pencil.rectangle((x, y + 2, x + LINE - 6, y + LINE - 4), colour, "black")
        pencil.text((x + LINE, y + 2), label, "black", font)
    return legend


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Pillow's default font; before 10.1, or in a build without FreeType, it has a fixed size."""
    try:
        return ImageFont.load_default(13)
    except (TypeError, ImportError, OSError):
        return ImageFont.load_default()


def _printable(text: str) -> str:
    """A text with the characters replaced that Pillow's default fonts lack."""
    return text.encode("latin-1", "replace").decode("latin-1")

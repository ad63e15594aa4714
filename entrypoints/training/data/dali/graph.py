"""NVIDIA DALI's graph of operators, and its inputs for each image of a batch."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from training.data.augmentation import Variation
from training.data.decode import geometry
from training.data.decode.decoding import ORIENTATION, decode, open_image
from training.data.decode.geometry import Rows
from training.data.decode.jpeg import read_frame

if TYPE_CHECKING:
    from nvidia.dali.backend import TensorListCPU, TensorListGPU

QUEUED = 2
"""Batches that DALI works on at a time; while one is decoded on the CPU, the previous one may be on the GPU."""

JPEG_END = b"\xff\xd9"
"""The marker that a whole JPEG ends with (ITU-T T.81, table B.1)."""

OTHER_PIXELS = (b"tRNS", b"eXIf", b"Raw profile type", b"tiff:Orientation")
"""Markers of transparency in a PNG, and in any file of an orientation stored where DALI does not look for it."""


NO_WARP: Rows = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)


class Graph(Protocol):
    """The methods used of nvidia.dali.Pipeline, which have no annotations."""

    def feed_input(self, data_node: str, data: Any, /) -> None: ...

    def schedule_run(self) -> None: ...

    def share_outputs(self) -> tuple[TensorListCPU | TensorListGPU, ...]: ...

    def release_outputs(self) -> None: ...


class Operations(NamedTuple):
    """What the graph of a run does to every image."""

    size: tuple[int, int]
    """Height and width of the result."""
    channels: int
    load: int = 0
    """Rounds of turns before anything else."""
    warped: bool = False
    """Whether images are rotated or shifted after scaling."""
    pasted: bool = False
    """Whether each is scaled to a size of its own and then pasted on a black canvas, which clips it."""


class Prepared(NamedTuple):
    """The graph's inputs for one image. All but the file are plain numbers, of which `inputs` makes one array for a whole batch: while a
    thread makes arrays, no other can launch a GPU's kernels. Matrices are those of `geometry`."""

    encoded: np.ndarray
    """uint8 (bytes,), a file that DALI decodes."""
    part: tuple[int, int, int, int]
    """Top, left, height and width of the part of the upright image that is decoded: what `roi` needs, and a margin."""
    roi: tuple[float, float, float, float]
    """Top, left, bottom, right of what is scaled, relative to the part's corner; mirrored if left > right."""
    turns: tuple[Rows, ...] = ()
    """A matrix for each round of the load."""
    warp: Rows = NO_WARP
    """The matrix of rotation, shift and mirroring after scaling."""
    scaled: tuple[int, int] = (0, 0)
    """Height and width that `roi` is scaled to."""
    corner: tuple[int, int] = (0, 0)
    """Top and left of the canvas within the scaled image; negative if there is black before it."""


def prepare(encoded: bytes, size: tuple[int, int], variation: Variation, operations: Operations) -> Prepared:
    """Inputs for an image augmented as by `reference.vary`.

    Args:
        encoded: a file that DALI decodes.
        size: width and height of the upright image.
    """
    width, height = size
    view = operations.size[0]
    left, top, right, bottom = variation.box or geometry.middle_box(width, height, view)
    part = (0, 0, height, width)
    if not variation.turns:
        part = _with_margin((top, left, bottom, right), (height, width), view)
    y, x = part[:2]
    if variation.mirrored and not operations.warped:
        left, right = right, left
    warp = NO_WARP
    if operations.warped:
        warp = geometry.rotation_rows(variation.degrees, view, view, variation.shift)
        if variation.mirrored:
            warp = geometry.mirrored_rows(warp, view)
    return Prepared(
        np.frombuffer(encoded, np.uint8),
        part,
        (top - y, left - x, bottom - y, right - x),
        tuple(geometry.turned_rows([turn], width, height) for turn in variation.turns),
        warp,
    )


def prepare_part(
    encoded: bytes, box: tuple[int, int, int, int], scaled: tuple[int, int], begin: tuple[int, int], *, mirrored: bool
) -> Prepared:
    """Inputs for a part of an image, scaled on its own and pasted on the canvas.

    Args:
        encoded: a file that DALI decodes.
        box: left, top, right, bottom in pixels of the upright image.
        scaled: height and width that it is scaled to.
        begin: row and column of the canvas at which it begins.
    """
    left, top, right, bottom = box
    high, wide = bottom - top, right - left
    return Prepared(
        np.frombuffer(encoded, np.uint8),
        (top, left, high, wide),
        (0, wide, high, 0) if mirrored else (0, 0, high, wide),
        scaled=scaled,
        corner=(-begin[0], -begin[1]),
    )


def example(operations: Operations) -> Prepared:
    """A small black JPEG."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    whole = prepare_part(file.getvalue(), (0, 0, 16, 16), operations.size, (0, 0), mirrored=False)
    return whole._replace(turns=(NO_WARP,) * operations.load)


def upright_size(encoded: bytes) -> tuple[int, int] | None:
    """Width and height of an image as a viewer shows it, from its first bytes.

    Returns:
        None if DALI may fail, or show other colours or another side up than `decoding.decode`: JPEG in four colours, PNG with a
        palette, transparency or 16 bits, other formats, files without their end, and what is no image.
    """
    frame = read_frame(encoded)
    if frame is not None and not frame.tagged:
        return (frame.width, frame.height) if encoded.endswith(JPEG_END) else None
    try:
        with open_image(encoded) as opened:
            if opened.format == "PNG":
                plain = encoded[24:26] in (b"\x08\x00", b"\x08\x02")  # 8 bits, grey or RGB (PNG specification, 11.2.1)
                return None if not plain or any(mark in encoded for mark in OTHER_PIXELS) else opened.size
            if frame is None or opened.format != "JPEG" or opened.mode not in ("L", "RGB"):
                return None  # also a JPEG that is stored as red, green and blue
            if not encoded.endswith(JPEG_END) or OTHER_PIXELS[-1] in encoded:
                return None
            turned = opened.getexif().get(ORIENTATION, 1)  # from damaged data DALI may read something else
            if turned not in range(1, 9):
                return None
            width, height = opened.size
            return (width, height) if turned < 5 else (height, width)  # 5 to 8 lie on their side
    except Exception:  # a damaged file makes Pillow raise OSError, SyntaxError, TypeError, struct.error …
        return None


def readable_file(encoded: bytes, file: str, channels: int, *, fallback: bool) -> tuple[bytes, tuple[int, int]]:
    """A file that DALI decodes as the reference decoder does, and its upright width and height: the same file or, if DALI may not
    or must not decode it so, one without compression (netpbm's P5 or P6).

    Raises:
        BrokenImage: it cannot be decoded; the message names the file.
    """
    size = None if fallback else upright_size(encoded)
    if size is not None:
        return encoded, size
    image = decode(encoded, file, channels)
    width, height = image.size
    return b"P%d %d %d 255\n" % (5 if channels == 1 else 6, width, height) + image.tobytes(), image.size


def build(operations: Operations, *, images: int, threads: int, device_id: int | None) -> Graph:
    """The graph: decode, turn, crop and scale, rotate and shift, paste on black; bilinear, antialiased when it shrinks.

    It outputs uint8 (batch, channels, height, width). An image is decoded whole only if it is turned.

    Args:
        images: the most in a batch.
        threads: number of CPU threads.
        device_id: the GPU that decodes with nvJPEG and does all that follows. None: the CPU does it.
    """
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    def given(name: str) -> Any:
        return fn.external_source(name=name)

    pipeline: Any = Pipeline(batch_size=images, num_threads=threads, device_id=device_id, prefetch_queue_depth=QUEUED)
    with pipeline:
        decoding: dict[str, Any] = {
            "device": "cpu" if device_id is None else "mixed",
            "output_type": types.DALIImageType.GRAY if operations.channels == 1 else types.DALIImageType.RGB,
            "adjust_orientation": True,
            "jpeg_fancy_upsampling": True,  # colours as the CPU's decoder has them
        }
        linear: dict[str, Any] = {"interp_type": types.DALIInterpType.INTERP_LINEAR}
        pixels: Any  # a DataNode; some operators are annotated as returning several, or none
        if operations.load:
            pixels = fn.decoders.image(given("encoded"), **decoding)
        else:
            where = {"start": given("part_start"), "shape": given("part_shape"), "axis_names": "HW"}
            pixels = fn.decoders.image_slice(given("encoded"), **where, **decoding)
        for turn in range(operations.load):
            pixels = fn.warp_affine(pixels, matrix=given(f"turn_{turn}"), fill_value=0, **linear)
        roi = {"roi_start": given("roi_start"), "roi_end": given("roi_end"), "roi_relative": False}
        scaled = given("scaled") if operations.pasted else operations.size
        pixels = fn.resize(pixels, size=scaled, antialias=True, **roi, **linear)
        if operations.warped:
            pixels = fn.warp_affine(pixels, matrix=given("warp"), fill_value=0, **linear)
        if operations.pasted:
            canvas: dict[str, Any] = {
                "shape": operations.size,
                "axis_names": "HW",
                "normalized_anchor": False,
                "normalized_shape": False,
            }
            pixels = fn.slice(pixels, start=given("corner"), out_of_bounds_policy="pad", fill_values=0, **canvas)
        pipeline.set_outputs(fn.transpose(pixels, perm=[2, 0, 1]))
    pipeline.build()
    graph: Graph = pipeline
    return graph


def inputs(images: list[Prepared], operations: Operations) -> dict[str, Any]:
    """The inputs of `build`'s graph for a batch, by name."""
    rois = np.array([image.roi for image in images], np.float32)
    given: dict[str, np.ndarray] = {"roi_start": rois[:, :2], "roi_end": rois[:, 2:]}
    if operations.load:
        turns = np.array([image.turns for image in images], np.float32)
        given |= {f"turn_{turn}": turns[:, turn] for turn in range(operations.load)}
    else:
        parts = np.array([image.part for image in images], np.int32)
        given |= {"part_start": parts[:, :2], "part_shape": parts[:, 2:]}
    if operations.warped:
        given["warp"] = np.array([image.warp for image in images], np.float32)
    if operations.pasted:
        given["scaled"] = np.array([image.scaled for image in images], np.float32)
        given["corner"] = np.array([image.corner for image in images], np.int32)
    contiguous = {name: np.ascontiguousarray(value) for name, value in given.items()}
    return {"encoded": [image.encoded for image in images], **contiguous}


def _with_margin(box: tuple[float, ...], size: tuple[int, int], view: int) -> tuple[int, int, int, int]:
    """The part of an image that scaling a box of it reads: the filter reaches beyond the box's edges, as Pillow's does.

    Args:
        box: top, left, bottom, right.
        size: height and width of the image.
        view: height and width that the box is scaled to.

    Returns:
        top, left, height, width in pixels.
    """
    reached: list[tuple[int, int]] = []  # vertically, then horizontally: the first pixel, and how many
    for start, end, side in zip(box[:2], box[2:], size):
        reach = max(1.0, (end - start) / view) + 1  # a triangle of that half width, and a pixel for the rounding
        low, high = max(0, math.floor(start - reach)), min(side, math.ceil(end + reach))
        reached.append((low, high - low))
    (top, high), (left, wide) = reached
    return top, left, high, wide

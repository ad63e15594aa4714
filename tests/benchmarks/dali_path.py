"""What an image costs by NVIDIA DALI on the CPU: as DALI's own pipelines do it, and as `preprocessing: dali` does. `make bench`.

Decode, random crop, resize to a view, mirror half of them, uint8; bilinear and antialiased. All in one process, DALI with one
thread; CPU time is that of the whole process. `plain` is for other benchmarks to measure beside.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "entrypoints"))  # as the toolkit puts the code folder there

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from sklearn.datasets import load_sample_images  # noqa: E402
from training.data.augmentation import Augmentation  # noqa: E402
from training.data.batches import TrainingBatches  # noqa: E402
from training.data.broken import BrokenImages  # noqa: E402
from training.data.dali import DaliBatches, DaliPreprocessor  # noqa: E402
from training.data.dali_views import ViewsByDali  # noqa: E402
from training.data.folders import LabelledFolder  # noqa: E402
from training.data.mixing import Mixing  # noqa: E402
from training.data.reference import ReferencePreprocessor  # noqa: E402
from training.data.views import TrainingViews  # noqa: E402
from training.data.workers import Workers  # noqa: E402
from training.distributed import World  # noqa: E402

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a single process")
MIN_AREA = 0.08
ASPECTS = (3 / 4, 4 / 3)


class Cost(NamedTuple):
    """Milliseconds an image."""

    cpu: float
    wall: float


def plain(files: list[str], size: int, *, batch: int = 64, fancy: bool = False) -> Iterator[None]:
    """DALI's own reader, decoder, crop, resize and flip on one thread; each `next` is a batch of uint8 (batch, size, size, 3).

    Args:
        files: JPEGs.
        fancy: smooth chroma upsampling, which all other paths have; DALI's own default is without.
    """
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=batch, num_threads=1, device_id=None, prefetch_queue_depth=2, seed=0)
    with pipeline:
        encoded, _ = fn.readers.file(files=files, random_shuffle=True, name="files")
        crop = {"random_area": (MIN_AREA, 1.0), "random_aspect_ratio": ASPECTS}
        pixels = fn.decoders.image_random_crop(encoded, output_type=types.RGB, jpeg_fancy_upsampling=fancy, **crop)
        pixels = fn.resize(pixels, size=(size, size), interp_type=types.INTERP_LINEAR, antialias=True)
        pipeline.set_outputs(fn.flip(pixels, horizontal=fn.random.coin_flip()))
    pipeline.build()
    while True:
        (made,) = pipeline.run()
        assert made.shape()[0] == (size, size, 3)
        yield


def ours(folder: Path, size: int, *, batch: int = 64) -> Iterator[None]:
    """`preprocessing: dali` on one thread; each `next` is a batch of uint8 (batch, 3, size, size)."""
    asked = views(folder, size)
    sampler = TrainingBatches(len(asked), batch, ALONE, 0)
    loader = DaliBatches(ViewsByDali(asked), sampler, ALONE, Workers("threads", 1))
    epoch = 0
    while True:
        epoch += 1
        sampler.start(epoch)
        for made in loader:
            assert made.images.shape == (batch, 3, size, size)
            yield


def views(folder: Path, size: int) -> TrainingViews:
    """A folder's images, cropped, scaled and mirrored."""
    how = {"channels": 3, "preprocessor": DaliPreprocessor(), "broken": BrokenImages(fail=True)}
    return TrainingViews(LabelledFolder(folder), size, Augmentation(MIN_AREA, True), Mixing(), **how)


def cost(batches: Iterator[None], images: int, batch: int = 64) -> Cost:
    """What an image costs, over at least so many; the batches are already running."""
    count = -(-images // batch)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        next(batches)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(1000 * cpu / (count * batch), 1000 * wall / (count * batch))


def photographs(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """So many JPEGs of that width and height, quality 90: parts of scikit-learn's china.jpg and flower.jpg, scaled."""
    (folder / "photographs").mkdir(parents=True)
    whole = [Image.fromarray(image) for image in load_sample_images().images]
    chance = random.Random(0)
    for number in range(count):
        image = whole[number % len(whole)]
        left, top = chance.randrange(40), chance.randrange(30)
        part = image.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + 600, top + 390))
        part.save(folder / "photographs" / f"{number:04}.jpg", quality=90)
    return folder


def fidelity(size: int) -> list[tuple[str, float]]:
    """Peak signal to noise of each photograph's views by DALI against the antialiased Pillow reference, in dB."""
    rows = []
    for name, image in zip(("china.jpg", "flower.jpg"), load_sample_images().images):
        with tempfile.TemporaryDirectory() as folder:
            file = io.BytesIO()
            Image.fromarray(image).save(file, "JPEG", quality=90)
            (Path(folder) / "a").mkdir()
            (Path(folder) / "a/0.jpg").write_bytes(file.getvalue())
            asked = views(Path(folder), size)
            sampler, found = TrainingBatches(1, 1, ALONE, 0), []
            loader = DaliBatches(ViewsByDali(asked), sampler, ALONE, Workers("threads", 1))
            reference = ReferencePreprocessor()
            for view in range(1, 21):
                sampler.start(view)
                (batch,) = loader
                chance = asked.chance(view, 0)
                expected = reference.varied(file.getvalue(), name, size, 3, asked.augmentation, chance)
                error = np.square(batch.images[0].numpy().astype(float) - expected).mean()
                found.append(10 * np.log10(255**2 / max(error, 1e-9)))
        rows.append((name, min(found)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=512, help="of each way in a round")
    parser.add_argument("--size", type=int, default=224, help="height and width of a view in pixels")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for width, height in ((400, 300), (1732, 1155)):
        with tempfile.TemporaryDirectory() as place:
            folder = photographs(Path(place), 128, (width, height))
            files = [str(file) for file in sorted(folder.rglob("*.jpg"))]
            ways: dict[str, Callable[[], Iterator[None]]] = {
                "DALI's own pipeline": lambda files=files: plain(files, asked.size),
                "the same, smooth chroma": lambda files=files: plain(files, asked.size, fancy=True),
                "preprocessing: dali": lambda folder=folder: ours(folder, asked.size),
            }
            costs: dict[str, list[Cost]] = {name: [] for name in ways}
            images = asked.images if width < 1000 else max(64, asked.images // 4)
            running = {name: make() for name, make in ways.items()}
            for batches in running.values():
                cost(batches, 256)
            for _ in range(asked.rounds):
                for name, batches in running.items():
                    costs[name].append(cost(batches, images))
        print(
            f"\nJPEGs of {width} x {height}, views of {asked.size} x {asked.size}: ms an image, medians of {asked.rounds} rounds"
        )
        first = statistics.median(each.cpu for each in costs["DALI's own pipeline"])
        for name, found in costs.items():
            cpu = [each.cpu for each in found]
            wall = statistics.median(each.wall for each in found)
            print(
                f"  {name:26} CPU {statistics.median(cpu):6.3f} ({min(cpu):.3f} to {max(cpu):.3f})  wall {wall:6.3f}  "
                f"{statistics.median(cpu) / first:5.2f} x"
            )
    print("\nPSNR against Pillow, the lowest of 20 random crops:")
    for name, decibels in fidelity(asked.size):
        print(f"  {name:26} {decibels:.1f} dB")


if __name__ == "__main__":
    main()

"""What an image costs with NVIDIA DALI on the CPU: in DALI's own pipeline, and with `preprocessing: dali`.

The work, the files and the measurement are those of preprocessing.py, which takes DALI's own pipeline from here. CPU time is
that of the whole process, all threads included; DALI has one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from engine import ALONE, machine, table
from photographs import LARGE, NAMES, PHOTOGRAPHS, SMALL, some_of, write_images
from preprocessing import MIN_AREA, SIZE, Contestant, by_dali, measure, median_of, ours, versus
from training.data.batches import TrainingBatches
from training.data.dali import graph
from training.data.dali.pipeline import DaliBatches
from training.data.decode.image_file import ImageFile
from training.data.decode.reference import ReferencePreprocessor
from training.data.views import open_data
from training.data.workers import Workers
from training.settings.scripts import LabelledImageSettings

PLAIN, SMOOTH, KIT, FAST = "DALI's own pipeline", "the same, smooth chroma", "preprocessing: dali", "preprocessing: cpu"


def plain(files: list[str], size: int, *, batch: int = 32, threads: int = 1, fancy: bool = False) -> Iterator[None]:
    """DALI's own reader, decoder, crop, resize and flip; each `next` is a batch of uint8 (batch, size, size, 3).

    Args:
        files: JPEGs.
        fancy: smooth chroma upsampling, which all other paths have; DALI's own default is without.
    """
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=batch, num_threads=threads, device_id=None, prefetch_queue_depth=2, seed=0)
    with pipeline:
        encoded, _ = fn.readers.file(files=files, random_shuffle=True, name="files")
        crop = {"random_area": (MIN_AREA, 1.0), "random_aspect_ratio": (3 / 4, 4 / 3)}
        pixels = fn.decoders.image_random_crop(encoded, output_type=types.RGB, jpeg_fancy_upsampling=fancy, **crop)
        pixels = fn.resize(pixels, size=(size, size), interp_type=types.INTERP_LINEAR, antialias=True)
        pipeline.set_outputs(fn.flip(pixels, horizontal=fn.random.coin_flip()))
    pipeline.build()
    while True:
        (made,) = pipeline.run()
        assert len(made) == batch and tuple(made.shape()[0]) == (size, size, 3)
        yield


def cost(root: Path, images: int, rounds: int) -> str:
    """CPU time per image."""
    contestants = {
        PLAIN: Contestant(by_dali, root),
        SMOOTH: Contestant(by_dali, root, fancy=True),
        KIT: Contestant(ours, root, 1, preprocessing="dali"),
        FAST: Contestant(ours, root, 1),
    }
    found = measure(contestants, images, rounds)
    rows = [("", "CPU ms an image", f"x {PLAIN}", f"x {SMOOTH}")]
    for name, seconds in found.items():
        rows.append((name, f"{1000 * median_of(seconds):.3f}", *(versus(seconds, found[other]) for other in (PLAIN, SMOOTH))))  # fmt: skip
    return table(rows)


def python_part(root: Path, rounds: int) -> str:
    """CPU time per image of Python's work before DALI begins: reading a file, drawing its variation, writing DALI's inputs. Except for the
    reading, no other thread runs Python meanwhile, so it limits images/s and delays the launches of a GPU's kernels."""
    rows = [("augmentation load", "µs an image")]
    for load in (0, 1, 12):
        chosen = LabelledImageSettings(
            image_size=SIZE, min_crop_area=MIN_AREA, horizontal_flip=True, augmentation_load=load, preprocessing="dali"
        )
        data, took = open_data(root, root, chosen, 3), []
        count = min(128, len(data.training))
        for number in range(rounds):
            started = time.process_time()
            draw = data.recipe.begin_batch(frozenset())
            drawn = [draw((number + 1, index)) for index in range(count)]
            graph.inputs([one.items[0].prepared for one in drawn], data.recipe.operations)
            took.append((time.process_time() - started) / count * 1e6)
        rows.append((str(load), f"{statistics.median(took):.0f}"))
    return table(rows)


def fidelity(crops: int) -> str:
    """PSNR of views by `preprocessing: dali` against the reference's, in dB: minimum over random crops."""
    rows = [("dB", f"{SIZE} px, whole", f"{SIZE} px, crops", "64 px, crops")]
    for name in NAMES:
        encoded, cells = (PHOTOGRAPHS / name).read_bytes(), []
        for size, area, views in ((SIZE, 1.0, 1), (SIZE, MIN_AREA, crops), (64, MIN_AREA, crops)):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "a").mkdir()
                (Path(folder) / "a" / name).write_bytes(encoded)
                chosen = LabelledImageSettings(image_size=size, min_crop_area=area, preprocessing="dali")
                data = open_data(Path(folder), Path(folder), chosen, 3)
                sampler, found = TrainingBatches(1, 1, ALONE, 0), []
                loader = DaliBatches(data.recipe, sampler, ALONE, Workers("threads", 1))
                for view in range(1, views + 1):
                    sampler.start(view)
                    (batch,) = loader
                    asked = data.training
                    expected = ReferencePreprocessor().varied(
                        ImageFile(lambda encoded=encoded: encoded, partial(str, name)),
                        size,
                        3,
                        asked.augmentation,
                        asked.rng(view, 0),
                    )
                    error = np.square(batch.images[0].numpy().astype(float) - expected).mean()
                    found.append(10 * np.log10(255**2 / max(error, 1e-9)))
            cells.append(f"{min(found):.1f}")
        rows.append((name, *cells))
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=192, help="of each way in a round, a third where they are large")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine(1)}\n{asked.rounds} rounds, medians, in brackets quartiles of the rounds' ratios")
    with tempfile.TemporaryDirectory() as folder:
        for size, different, count, images in ((SMALL, 256, 1024, asked.images), (LARGE, 24, 192, asked.images // 3)):
            root = Path(folder) / str(size[0])
            write_images(root, size, different, count)
            print(f"\n{size[0]} x {size[1]} -> {SIZE}\n\n{cost(some_of(root, images), images, asked.rounds)}")
            print(f"\nof which in Python\n\n{python_part(root, 3 * asked.rounds)}")
    print(f"\nPSNR against Pillow with antialiasing\n\n{fidelity(20)}")


if __name__ == "__main__":
    main()

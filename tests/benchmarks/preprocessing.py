"""What an image costs on the CPU: `preprocessing: cpu` beside torchvision, NVIDIA DALI and bare decoding. `make bench-input`.

All read JPEG files, crop a random part (RandomResizedCrop), resize it to 224 x 224, flip half of them and make uint8 batches;
normalisation has its own table. The pipelines take turns, each in its own process, round after round: CPU time with one worker
of each pipeline's kind (DataLoader's are processes, ours and DALI's threads), then images/s with two. The files are parts of
scikit-learn's photographs, scaled like photographs on the web: 400 x 300 pixels, and 1600 x 1200 pixels of sixteen of these.

torchvision's pipeline is that of aws-samples/sagemaker-cv-preprocessing-training-performance: ImageFolder with Pillow, and as its
augmentation load HorizontalFlip, VerticalFlip and RandomRotation(5), nearest neighbours, N times; ours are bilinear. DALI's is
its own reader, decoder with a random crop, resize and flip (`dali_path.plain`), if DALI is installed. SPDL's is its pipeline of
threads, in which FFmpeg decodes, crops, scales and flips; Debian's FFmpeg is `apt-get install libavfilter8 libavdevice59`. FFCV's is its
loader with a file of its own, which holds the images as JPEGs again, of the same size to a few percent; it is built from source with
`apt-get install --no-install-recommends libopencv-dev libturbojpeg0-dev pkg-config`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from engine import ALONE, machine, progress, ratio, table
from photographs import LARGE, NAMES, PHOTOGRAPHS, QUALITY, SMALL, bits_per_pixel, some_of, write_images
from PIL import Image
from torch.utils.data import DataLoader
from training.data.augmentation import Augmentation, random_box
from training.data.decode.fast import FastPreprocessor, resize
from training.data.decode.image_file import ImageFile
from training.data.decode.jpeg import find_decoder, read_header
from training.data.decode.reference import ReferencePreprocessor
from training.data.loaders import open_loaders
from training.data.views import open_data
from training.settings.scripts import LabelledImageSettings

SIZE, MIN_AREA, BATCH = 224, 0.08, 32
LOADS = (0, 1, 4, 8, 12)

TORCHVISION, OURS, COMPOSED, REFERENCE = "torchvision", "cpu", "cpu, composed", "cpu_reference"
BARE, CUT = "bare decoding", "bare decoding, crop, resize"
DALI, SMOOTH = "DALI on the CPU", "the same, smooth chroma"
SPDL, FFCV, LOADER = "SPDL", "FFCV", "cpu, a loader process"

PREFETCHED = 6
"""Batches taken before the wall clock starts: more than any of the pipelines prefetches."""

PARTS = ("small", "small-wall", "small-load", "small-composed", "large", "large-wall", "normalisation", "fidelity")

FORKED = multiprocessing.get_context("fork")

BatchSizes = Iterator[int]
"""Each `next` makes one batch, and returns its number of images."""


# -- what is compared ------------------------------------------------------------------------------------------------


def ours(root: Path, workers: int = 0, kind: str = "auto", load: int = 0, **values) -> BatchSizes:
    chosen = LabelledImageSettings(
        image_size=SIZE,
        global_batch_size=BATCH,
        min_crop_area=MIN_AREA,
        horizontal_flip=True,
        augmentation_load=load,
        num_workers=workers,
        worker_type=kind,
        epochs=1_000_000,
        **values,
    )
    loaders = open_loaders(open_data(root, root, chosen, 3), chosen, ALONE, batch_size_per_device=BATCH)
    for epoch in itertools.count(1):
        loaders.train_batches.start(epoch)
        for batch in loaders.train:
            assert batch.images.shape == (BATCH, 3, SIZE, SIZE) and batch.images.dtype == torch.uint8
            yield len(batch.images)


def by_torchvision(root: Path, workers: int = 0, load: int = 0, bilinear: bool = False) -> BatchSizes:
    from torchvision import datasets, transforms

    how = transforms.InterpolationMode.BILINEAR if bilinear else transforms.InterpolationMode.NEAREST
    turns = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip(), transforms.RandomRotation(5, how)]
    varied = [*turns * load, transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    folder = datasets.ImageFolder(str(root), transforms.Compose([*varied, transforms.PILToTensor()]))
    loader = DataLoader(
        folder, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    while True:
        for images, _ in loader:
            assert images.shape == (BATCH, 3, SIZE, SIZE) and images.dtype == torch.uint8
            yield len(images)


def bare_decoding(root: Path, cut: bool = False) -> BatchSizes:
    """Only reads and fully decodes files, with the fast path's decoder; with `cut`, also resizes a random crop."""
    decode, rng = find_decoder()[0], random.Random(0)
    files = sorted(root.rglob("*.jpg"))
    for first in itertools.cycle(range(0, len(files) - BATCH + 1, BATCH)):
        for file in files[first : first + BATCH]:
            encoded = file.read_bytes()
            pixels = decode(encoded, read_header(encoded), 1, False)
            assert pixels is not None
            if cut:
                left, top, right, bottom = random_box(pixels.shape[1::-1], MIN_AREA, rng)
                resize(pixels[top:bottom, left:right], (SIZE, SIZE))
        yield BATCH


def by_dali(root: Path, threads: int = 1, fancy: bool = False) -> BatchSizes:
    from dali_path import plain

    for _ in plain(
        [str(file) for file in sorted(root.rglob("*.jpg"))], SIZE, batch=BATCH, threads=threads, fancy=fancy
    ):
        yield BATCH


def has_dali() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def by_spdl(root: Path, threads: int = 1) -> BatchSizes:
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    rng = random.Random(0)

    def decoded(file: Path) -> Any:
        packets = spdl.io.demux_image(str(file))
        left, top, right, bottom = random_box((packets.width, packets.height), MIN_AREA, rng)
        crop = f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1,scale={SIZE}:{SIZE}:flags=bilinear"
        mirror = ",hflip" if rng.random() < 0.5 else ""
        return spdl.io.decode_packets(packets, filter_desc=f"{crop}{mirror},format=rgb24")

    def made(part: tuple[Path, ...]) -> torch.Tensor:
        return spdl.io.to_torch(spdl.io.convert_frames([*map(decoded, part)]))

    files = sorted(root.rglob("*.jpg"))
    batches = [tuple(files[first : first + BATCH]) for first in range(0, len(files) - BATCH + 1, BATCH)]
    # whole batches, as in its examples: handing over image by image takes longer than decoding
    pipeline = (
        PipelineBuilder()
        .add_source(itertools.cycle(batches))
        .pipe(made, concurrency=threads)
        .add_sink(2)
        .build(num_threads=threads)
    )
    with pipeline.auto_stop():
        for images in pipeline:
            assert images.shape == (BATCH, SIZE, SIZE, 3) and images.dtype == torch.uint8
            yield len(images)


def has_spdl() -> bool:
    """Whether it is installed, and finds an FFmpeg."""
    try:
        import spdl.io

        spdl.io.load_image(str(PHOTOGRAPHS / NAMES[0]))
    except Exception as error:
        print(
            f"without SPDL, which needs `make bench-input` and an FFmpeg, `apt-get install libavfilter8 libavdevice59`: {error}",
            flush=True,
        )
        return False
    return True


def by_ffcv(root: Path, threads: int = 1) -> BatchSizes:
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    pixels = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    file = str(_beton(root))
    loader = Loader(
        file, BATCH, threads, order=OrderOption.RANDOM, os_cache=True, drop_last=True, pipelines={"image": pixels}
    )
    while True:
        for (images,) in loader:
            assert images.shape == (BATCH, 3, SIZE, SIZE) and images.dtype == torch.uint8
            yield len(images)


def _beton(root: Path) -> Path:
    """FFCV's file of a folder's images, as JPEGs with the quality of `write_images`."""
    from ffcv.fields import RGBImageField
    from ffcv.writer import DatasetWriter

    files, made = sorted(root.rglob("*.jpg")), root.with_suffix(".beton")

    class Images:
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, number: int) -> tuple[Image.Image]:
            return (Image.open(files[number]).convert("RGB"),)

    if not made.exists():
        kept = RGBImageField("jpg", jpeg_quality=QUALITY[Image.open(files[0]).size])
        DatasetWriter(str(made), {"image": kept}, num_workers=1).from_indexed_dataset(Images())
    return made


def has_ffcv() -> bool:
    """Whether it is installed."""
    if importlib.util.find_spec("ffcv") is not None:
        return True
    needs = "apt-get install --no-install-recommends libopencv-dev libturbojpeg0-dev pkg-config"
    print(f"without FFCV, which `make bench-input` builds where its headers are: `{needs}`", flush=True)
    return False


# -- measuring ---------------------------------------------------------------------------------------------------------


class Contestant:
    """A pipeline in its own process, so that each has its own memory allocator and pays for what it prefetches."""

    def __init__(self, make: Callable[..., BatchSizes], *arguments: Any, **named: Any):
        self._pipe, theirs = FORKED.Pipe()
        self._process = FORKED.Process(target=_serve, args=(theirs, lambda: make(*arguments, **named)))
        self._process.start()

    def measure(self, batches: int, before: int) -> tuple[float, float]:
        """Seconds of CPU and wall time per image over `batches`, started right after `before` others, or from rest if 0."""
        self._pipe.send((batches, before))
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, make: Callable[[], BatchSizes]) -> None:
    batches_made = make()
    while (asked := pipe.recv()) is not None:
        batches, before = asked
        for _ in range(before):
            next(batches_made)
        cpu, wall = _computed(), time.perf_counter()
        made = sum(next(batches_made) for _ in range(batches))
        wall = time.perf_counter() - wall
        _rest()
        pipe.send(((_computed() - cpu) / made, wall / made))
    batches_made.close()


def _computed() -> float:
    """Seconds of CPU time of this process and of its workers, all threads."""
    seconds = time.process_time()
    for worker in psutil.Process().children(recursive=True):
        # by the scheduler, which counts nanoseconds; everything else counts ticks
        for thread in Path(f"/proc/{worker.pid}/task").iterdir():
            seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def _rest() -> None:
    """Wait until no thread or worker of this process computes any more."""
    while True:
        before = _computed()
        time.sleep(0.03)
        if _computed() - before < 0.002:
            return


def measure(
    contestants: Mapping[str, Contestant], images: int, rounds: int, *, wall: bool = False
) -> dict[str, list[float]]:
    """Seconds per image of each pipeline in each round; each round starts with another one.

    Args:
        images: of each pipeline in a round, a multiple of BATCH.
        wall: by the wall clock, while batches flow. Else CPU time, from rest to rest, over a whole epoch.
    """
    batches, names, found = images // BATCH, [*contestants], {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.measure(batches, 0)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(contestants[name].measure(batches, PREFETCHED if wall else 0)[int(wall)])
        progress(f"round {number + 1} of {rounds}")
    for contestant in contestants.values():
        contestant.end()
    return found


def median_of(values: list[float]) -> float:
    return statistics.median(values)


def versus(first: list[float], second: list[float]) -> str:
    """Ratio of the first to the second, and its quartiles over the rounds."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*ratio(first, second))


def cost_of_a_view(root: Path, images: int, rounds: int) -> str:
    """CPU time per image with one worker of each kind: DataLoader's are processes, ours and DALI's threads."""
    contestants = {
        OURS: Contestant(ours, root, 1),
        TORCHVISION: Contestant(by_torchvision, root, 1),
        REFERENCE: Contestant(ours, root, 1, preprocessing="cpu_reference"),
        BARE: Contestant(bare_decoding, root),
        CUT: Contestant(bare_decoding, root, cut=True),
        LOADER: Contestant(ours, root, 1, "loader"),
    }
    if has_spdl():
        contestants[SPDL] = Contestant(by_spdl, root)
    if has_ffcv():
        contestants[FFCV] = Contestant(by_ffcv, root)
    if has_dali():
        contestants |= {DALI: Contestant(by_dali, root), SMOOTH: Contestant(by_dali, root, fancy=True)}
    found = measure(contestants, images, rounds)
    rows = [("", "CPU ms an image", "images/s a core", "x cpu's time")]
    for name, seconds in found.items():
        rows.append((name, f"{1000 * median_of(seconds):.3f}", f"{1 / median_of(seconds):.0f}", versus(seconds, found[OURS])))  # fmt: skip
    return table(rows)


def speed_of_two(root: Path, images: int, rounds: int) -> str:
    """Images/s by the wall clock, two workers each."""
    contestants = {
        "cpu, 2 threads": Contestant(ours, root, 2, "threads"),
        "cpu, 2 processes": Contestant(ours, root, 2, "processes"),
        "cpu, 2 loader processes": Contestant(ours, root, 2, "loader"),
        "torchvision, 2 processes": Contestant(by_torchvision, root, 2),
    }
    if has_dali():
        contestants["DALI on the CPU, 2 threads"] = Contestant(by_dali, root, threads=2)
    if has_spdl():
        contestants["SPDL, 2 threads"] = Contestant(by_spdl, root, threads=2)
    if has_ffcv():
        contestants["FFCV, 2 threads"] = Contestant(by_ffcv, root, threads=2)
    found = measure(contestants, images, rounds, wall=True)
    rows, first = [("", "images/s", "x the first's time")], next(iter(found.values()))
    for name, seconds in found.items():
        rows.append((name, f"{1 / median_of(seconds):.0f}", versus(seconds, first)))
    return table(rows)


def cost_of_the_load(
    root: Path, images: int, rounds: int, only: str | None = None, loads: tuple[int, ...] = LOADS
) -> str:
    """CPU time per image with N rounds of flips and rotation before the crop; for all pipelines, or only one."""
    makers: dict[str, Callable[[int], Contestant]] = {
        TORCHVISION: lambda load: Contestant(by_torchvision, root, 1, load=load),
        "torchvision, bilinear": lambda load: Contestant(by_torchvision, root, 1, load=load, bilinear=True),
        OURS: lambda load: Contestant(ours, root, 1, load=load),
        COMPOSED: lambda load: Contestant(ours, root, 1, load=load, compose_augmentation=True),
    }
    makers = {name: make for name, make in makers.items() if only in (None, name)}
    contestants = {f"{name}, {load}": make(load) for name, make in makers.items() for load in loads}
    found = measure(contestants, images, rounds)
    rows = [("CPU ms an image", *(f"load {load}" for load in loads), f"{loads[-1]} / 0")]
    for name in makers:
        seconds = [found[f"{name}, {load}"] for load in loads]
        rows.append((name, *(f"{1000 * median_of(values):.2f}" for values in seconds), versus(seconds[-1], seconds[0])))
    return table(rows)


def cost_of_normalisation(rounds: int) -> str:
    """CPU time per image to float32 with a mean and a standard deviation: image by image like torchvision, and by batch."""
    from torchvision import transforms

    image = Image.open(PHOTOGRAPHS / NAMES[0]).resize((SIZE, SIZE))
    batch = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().expand(BATCH, -1, -1, -1).contiguous()
    mean, deviation = torch.full((3, 1, 1), 0.45 * 255), torch.full((3, 1, 1), 0.225 * 255)
    one = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.45] * 3, [0.225] * 3)])

    def image_by_image() -> BatchSizes:
        while True:
            torch.stack([one(image) for _ in range(BATCH)])
            yield BATCH

    def together() -> BatchSizes:
        while True:
            batch.float().sub_(mean).div_(deviation)
            yield BATCH

    contestants = {
        "ToTensor and Normalize an image": Contestant(image_by_image),
        "uint8 batch, normalised once": Contestant(together),
    }
    found = measure(contestants, 4 * BATCH, rounds)
    return table([("", "CPU ms an image"), *((name, f"{1000 * median_of(times):.3f}") for name, times in found.items())])  # fmt: skip


def fidelity(crops: int) -> str:
    """PSNR of the fast path's views against the reference's, in dB: whole photograph, random crops' minimum and median."""
    reference, fast = ReferencePreprocessor(), FastPreprocessor()
    rows = [("dB", "224 px, whole", "224 px, crops", "224 px of 2 MP, crops", "64 px, crops")]
    for name in NAMES:
        encoded = (PHOTOGRAPHS / name).read_bytes()
        tiles = Image.new("RGB", LARGE)
        whole = Image.open(io.BytesIO(encoded))
        for left, top in itertools.product(range(0, LARGE[0], whole.width), range(0, LARGE[1], whole.height)):
            tiles.paste(whole, (left, top))
        tiles.save(file := io.BytesIO(), "JPEG", quality=90)
        cells = []
        for content, size, area, views in (
            (encoded, SIZE, 1.0, 1),
            (encoded, SIZE, MIN_AREA, crops),
            (file.getvalue(), SIZE, MIN_AREA, crops),
            (encoded, 64, MIN_AREA, crops),
        ):
            found = []
            for view in range(views):
                pair = [pipeline.varied(ImageFile(lambda content=content: content, partial(str, name)), size, 3, Augmentation(area, area < 1), random.Random(f"{name}/{view}")) for pipeline in (fast, reference)]  # fmt: skip
                error = np.square(pair[0].astype(float) - pair[1]).mean()
                found.append(10 * np.log10(255**2 / max(error, 1e-9)))
            cells.append(f"{min(found):.1f}" if views == 1 else f"{min(found):.1f} · {statistics.median(found):.1f}")
        rows.append((name, *cells))
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=192, help="of each way in a round, a sixth where they are large")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(1))
    print(f"{asked.rounds} rounds, medians, in brackets quartiles of the rounds' ratios", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, size, different, count in (("small", SMALL, 256, 1024), ("large", LARGE, 24, 192)):
            if not any(part == name or part.startswith(f"{name}-") for part in asked.only):
                continue
            root, images = Path(folder) / name, asked.images if size is SMALL else asked.images // 6
            writer = FORKED.Process(target=write_images, args=(root, size, different, count))
            writer.start(), writer.join()
            title = f"\n{size[0]} x {size[1]} -> {SIZE}, {bits_per_pixel(root, size):.2f} bits a pixel"
            if name in asked.only:
                print(f"{title}\n\n{cost_of_a_view(some_of(root, images), images, asked.rounds)}", flush=True)
            if f"{name}-wall" in asked.only:
                print(f"{title}\n\n{speed_of_two(root, 4 * images, asked.rounds)}", flush=True)
            if f"{name}-load" in asked.only:
                table_of_loads = cost_of_the_load(some_of(root, images // 3), images // 3, asked.rounds)
                print(f"{title}, augmentation load\n\n{table_of_loads}", flush=True)
            if f"{name}-composed" in asked.only:
                ends = cost_of_the_load(some_of(root, images), images, asked.rounds, COMPOSED, (LOADS[0], LOADS[-1]))
                print(f"{title}, augmentation load in one warp\n\n{ends}", flush=True)
    if "normalisation" in asked.only:
        print(f"\nNormalisation\n\n{cost_of_normalisation(asked.rounds)}", flush=True)
    if "fidelity" in asked.only:
        print(f"\nPSNR against Pillow with antialiasing; of 100 crops the least and the median\n\n{fidelity(100)}")


if __name__ == "__main__":
    main()

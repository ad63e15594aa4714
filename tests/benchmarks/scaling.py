"""How much speed two processes lose by training together. `make bench-training` (distillation), `make bench-scaling` (segmentation).

Two processes of one thread each train vit_tiny_patch16_224 at 224 px, or with --job segmentation a resnet18 segmenter at 256 px:
in turn each for itself, at the same time, and both together over gloo, with the same batch per process. So the same cores do the same
work, and only the exchange of gradients and the waiting for each other differ. A round's ratio is the images/s of both together over
those of both for themselves.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch
from engine import (
    ALONE,
    STEPS,
    STUDENT,
    TEACHER,
    Engine,
    Recorded,
    machine,
    model,
    noise,
    open_engine,
    ratio,
    settings,
    table,
    teacher,
)
from torch.utils.data import Dataset
from training.data.loaders import Data, open_loaders
from training.data.masks import collate_masked
from training.distributed.world import World, process_group
from training.engine.run import open_run
from training.engine.state import prepare
from training.models import segmenter
from training.runtime.environment import Environment
from training.settings.segmentation import SegmentationSettings
from training.tasks.segmentation import Segmentation

PROCESSES = 2

ENCODER, CLASSES, DECODER_CHANNELS = "resnet18", 19, 64


def engine(folder: Path, world: World, asked: argparse.Namespace) -> Engine:
    """This rank's own run, or a shared one."""
    share = asked.batch * world.size
    values = {"precision": asked.precision, "global_batch_size": share, "gradient_compression": asked.compression}
    values |= {"static_graph": asked.static_graph} if world.size > 1 else {"gradient_compression": "none"}
    frozen = None
    if asked.teacher:
        frozen = teacher(TEACHER, "bf16")
    else:
        values["hard_label_weight"] = 1.0
    return open_engine(folder, noise(2 * share), model(STUDENT, seed=0), frozen, settings(**values), world)


class MaskedNoise(Dataset):
    """Images and masks of noise; an item is a SampleKey."""

    def __init__(self, images: int, size: int):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
        self.masks = torch.randint(0, CLASSES, (images, size, size), generator=generator, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, draw: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        _, number = draw
        return self.images[number], self.masks[number]


def segmentation_engine(folder: Path, world: World, asked: argparse.Namespace) -> Engine:
    """The same for the segmentation job, as train_segmentation.py assembles it."""
    share = asked.batch * world.size
    chosen = SegmentationSettings(
        model=ENCODER,
        classes=CLASSES,
        decoder_channels=DECODER_CHANNELS,
        image_size=(asked.size, asked.size),
        global_batch_size=share,
        precision=asked.precision,
        gradient_compression=asked.compression if world.size > 1 else "none",
        static_graph=asked.static_graph and world.size > 1,
        epochs=STEPS,
        evaluate_every=STEPS,
        checkpoint_every=STEPS,
        warmup_fraction=0.0,
        num_workers=0,
        log_every=STEPS,
    )
    environment = Environment("algo-1", folder / "model", folder / "data", folder / "failure", {}, None)
    with redirect_stdout(io.StringIO()):
        _, run = open_run(chosen, environment, world)
    torch.manual_seed(0)
    made = segmenter.build(ENCODER, {}, CLASSES, decoder_channels=DECODER_CHANNELS)
    state = prepare(made, chosen, STEPS, world)
    images = MaskedNoise(2 * share, asked.size)
    data = Data([str(number) for number in range(CLASSES)], images, images, collate_masked)
    loaders = open_loaders(data, chosen, world, batch_size_per_device=asked.batch)
    return Engine(Recorded(Segmentation(state.trained, None, chosen, world, run.timeline)), state, loaders, run)


ENGINES = {"distillation": engine, "segmentation": segmentation_engine}


def rank(asked: argparse.Namespace) -> None:
    """One of the processes; rank 0 prints."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, process_group() as world:
        apart, together = (ENGINES[asked.job](Path(name) / str(one.size), one, asked) for one in (ALONE, world))
        kinds = {"apart": apart, "together": together}
        for one in kinds.values():
            one.steps(3)
        taken: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for number in range(asked.rounds):
            for kind in [*kinds][:: 1 if number % 2 else -1]:
                world.any(False)  # both start at once
                cpu, wall = time.process_time(), time.perf_counter()
                kinds[kind].steps(asked.steps)
                own = torch.tensor([[time.perf_counter() - wall, time.process_time() - cpu]], dtype=torch.float64)
                taken[kind].append((world.gather_rows(own) / asked.steps).tolist())
        if world.is_first:
            report(taken, asked)


def report(taken: dict[str, list[list[list[float]]]], asked: argparse.Namespace) -> None:
    """Images/s are the sum over both processes; CPU time is per step of one process."""
    speeds = {kind: [sum(asked.batch / wall for wall, _ in each) for each in rounds] for kind, rounds in taken.items()}
    cpu = {kind: [statistics.mean(used for _, used in each) for each in rounds] for kind, rounds in taken.items()}
    rows = [("two processes", "images/s", "CPU s a step", "images/s together/apart", "CPU together/apart")]
    for kind in taken:
        found = ["{:.3f} ({:.3f}…{:.3f})".format(*ratio(values[kind], values["apart"])) for values in (speeds, cpu)]
        rows.append((kind, f"{statistics.median(speeds[kind]):.2f}", f"{statistics.median(cpu[kind]):.3f}", *found))
    what = f"{STUDENT}, {'with teacher' if asked.teacher else 'alone'}"
    if asked.job == "segmentation":
        what = f"{ENCODER} segmenter, {asked.size} px, {CLASSES} classes"
    what += f", {asked.precision}, batch {asked.batch} a process"
    print(
        f"{what}; {machine(1)} a process\n{asked.rounds} rounds of {asked.steps} step(s) of each in turn; medians, quartiles in brackets\n"
    )
    print(table(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", choices=ENGINES, default="distillation")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="of each in a round")
    parser.add_argument("--batch", type=int, help="of each process (default: 32, or 16 with segmentation)")
    parser.add_argument("--size", type=int, default=256, help="of segmentation's images, in pixels")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compression", choices=("none", "bf16"), default="none")
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--teacher", action="store_true", help="a bf16 teacher too")
    asked = parser.parse_args()
    asked.batch = asked.batch or (16 if asked.job == "segmentation" else 32)
    if "RANK" in os.environ:
        rank(asked)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    places = [{"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(PROCESSES)]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **common, **place}) for place in places]
    sys.exit(max(abs(process.wait()) for process in ranks))


if __name__ == "__main__":
    main()

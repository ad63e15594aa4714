"""How many images a process passes through the model at once: what the settings say, or the most that its memory holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from launcher_observer.system.host import available_memory

from training.data.batches import share_of_batch
from training.distributed.world import World
from training.engine.memory import FILLED, Footprint, as_tried
from training.engine.memory_trial import StepTrial, largest_that_fits
from training.runtime import accelerator, failure
from training.runtime.reporting import Reporter
from training.settings.scripts import TrainingSettings

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def choose_batch_size(
    now: Footprint,
    without: Mapping[str, Footprint],
    settings: TrainingSettings,
    world: World,
    report: Reporter,
    trial: StepTrial,
    before: int | None = None,
) -> int:
    """Choose how many images each process passes through the model at once; log what a step holds and what each setting saves.
    A collective.

    With `auto` on a GPU, a whole step is tried before the first one; if memory runs out, the next smaller divisor of the share follows.

    Args:
        now, without: as `measure` gives them; FILLED among the latter is the state that the run begins in.
        before: the size of the run that this one resumes, if that had as many processes. `auto` takes the same if it fits, for the same
            numbers.

    Raises:
        ValueError: as `batch_size_per_device`; or no step fits.
    """
    share = share_of_batch(settings.global_batch_size, world)
    if accelerator.is_gpu(world.device):
        asked = settings.batch_size_per_device
        now, without = as_tried(now, without, trial, asked if isinstance(asked, int) else share)
    space, first = capacity(world), without.get(FILLED, now)
    here = min(step.largest_batch(space) for step in (now, first))
    for line in explain(now, without, space):
        report.log(line)
    fits = int(world.gather_rows(torch.tensor([here])).min())
    if settings.batch_size_per_device == "auto":
        size = _by_itself(
            settings, world, fits, trial, report.log, before if before in parts_of(share, share) else None
        )
    else:
        size = batch_size_per_device(settings, world, fits)
    failure.progress.out_of_memory = when_full(size, share, max(now.step(size), first.step(size)), space, settings)
    return size


def _by_itself(
    settings: TrainingSettings,
    world: World,
    fits: int,
    trial: StepTrial,
    log: Callable[[str], None],
    before: int | None,
) -> int:
    """The size that `auto` takes; logs it."""
    size = batch_size_per_device(settings, world, min(fits, before or fits))
    if accelerator.is_gpu(world.device):  # a step is tried there
        size = largest_that_fits(parts_of(share_of_batch(settings.global_batch_size, world), size), trial, world, log)
    if before is None:
        log(f"batch_size_per_device: {size} (auto)")
    elif size == before:
        log(f"batch_size_per_device: {size} (auto, as before)")
    else:
        log(
            f"batch_size_per_device: {size} (auto): the previous {before} no longer fits. Sums are over different parts, so numbers "
            "differ from those of an uninterrupted run"
        )
    return size


def when_full(size: int, share: int, predicted: float, space: int, settings: TrainingSettings) -> str:
    """What to change if a GPU's memory is full in spite of all this.

    Args:
        size: images that pass through the model at once.
        share: a process's share of the global batch.
        predicted: bytes of a step.
        space: bytes available.
    """
    smaller = parts_of(share, size - 1)[:1]
    changes = [f"batch_size_per_device: {part}" for part in smaller]
    changes += ["batch_size_per_device: auto"] if settings.batch_size_per_device != "auto" else []
    changes += [] if settings.zero else ["zero: true"]
    changes += ["teacher_stream: false"] if getattr(settings, "teacher_stream", False) else []
    asked = f"set {', or '.join(changes)}, and resume" if changes else "resume on a larger device"
    anew = ["precision: bf16"] if settings.precision in ("fp32", "tf32") else []
    anew += ["a smaller model or image_size"]
    return (
        f"A step of {size} images was predicted to take {_size(predicted)} of {_size(space)}: {asked}; "
        f"or start over with {', or '.join(anew)}"
    )


def explain(now: Footprint, without: Mapping[str, Footprint], capacity: int) -> list[str]:
    """Log lines: what a step holds, and what each setting saves.

    Args:
        without: by setting, the footprint that the run would have without it.
    """
    fits = now.largest_batch(capacity)
    parts = {
        "weights": now.weights,
        "gradients": now.weights,
        "accumulated gradients": now.accumulated(fits),
        "autocast's copies": now.casts,
        "optimizer": now.optimizer,
        "moving average": now.average,
        "teacher": now.teacher,
        "workspace": int(now.workspace),
    }
    kept = ", ".join(f"{name} {_size(value)}" for name, value in parts.items() if value)
    lines = [
        f"memory per process: {kept}, and {_size(now.per_image)} per image; {_size(capacity)} available: "
        f"{fits:,} images fit at once"
    ]
    for setting, other in without.items():
        saved = other.fixed - now.fixed
        bytes_per_image = other.per_image - now.per_image
        lines.append(
            f"  {setting} saves {_size(saved)}, and {_size(bytes_per_image)} per image: without it "
            f"{other.largest_batch(capacity):,} would fit"
        )
    return lines


def capacity(world: World) -> int:
    """Bytes that this process can use: its GPU's, or its share of what the machine, and its container, have left. A collective."""
    if accelerator.is_gpu(world.device):
        free, _ = accelerator.memory(world.device)
        return free + accelerator.reserved_memory(world.device)
    # proc(5): one value per boot of a machine; several hosts may be containers or processes of one machine
    machine = torch.tensor([*BOOT_ID.read_bytes()])[None]
    neighbours = int((world.gather_rows(machine) == machine).all(1).sum())
    return available_memory() // neighbours


def batch_size_per_device(settings: TrainingSettings, world: World, fits: int) -> int:
    """Images that a process passes through the model at once: its share of the global batch, or what the settings say.

    Args:
        fits: the most that its memory holds; `auto` takes the largest divisor of its share up to that.

    Raises:
        ValueError: the processes cannot have equal shares, or not even one image fits.
    """
    share, asked = share_of_batch(settings.global_batch_size, world), settings.batch_size_per_device
    if asked is None:
        return share
    if asked != "auto":
        return asked
    if fits < 1:
        raise ValueError(
            "batch_size_per_device auto: not even one image fits in memory. Take a smaller model or image_size, set zero or "
            "precision bf16, or take a larger device"
        )
    return parts_of(share, fits)[0]


def parts_of(share: int, fits: int) -> list[int]:
    """Batch sizes up to `fits` that divide a process's share of the global batch, in descending order."""
    return [size for size in range(min(fits, share), 0, -1) if share % size == 0]


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.1f} MB"

"""The memory of a training step: what it holds, what each setting saves, and how many images fit at once."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from launcher_observer.process import peak_host_memory
from launcher_observer.system.host import available_memory
from torch import nn

from training.data.batches import Images, share_of_batch
from training.data.loaders import Data
from training.distributed.world import World
from training.engine.memory_trial import StepTrial, largest_that_fits
from training.engine.optimizers import STATE_PER_PARAMETER
from training.engine.state import TrainingState
from training.models.precision import Precision
from training.runtime import accelerator, failure
from training.runtime.reporting import Reporter
from training.settings.scripts import TrainingSettings

HEADROOM = 0.1
"""Share of the memory left free for fragmentation, kernels' workspaces, NCCL's buffers and the last, uneven allocations."""

PROBES = (2, 4)
"""Images of two passes, whose difference gives what each further image keeps."""

LOSS_PROBES = (1, 2, 3, 4)
"""Images of four losses, which determine a polynomial's coefficients: of a constant, images, pairs and triples."""

TRIED = (4, 16)
"""Images of two real steps on a GPU, whose difference gives what an image takes."""

CAST_MODULES = (nn.Linear, nn.modules.conv._ConvNd)
"""Modules whose weights autocast copies (https://docs.pytorch.org/docs/stable/amp.html, ops that autocast to lower precision)."""

FILLED = "teacher_cache, once it is filled,"
"""The setting that saves nothing yet when a run begins."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Footprint:
    """Bytes of one process's training step on its device."""

    weights: int
    optimizer: int
    average: int
    """The moving average of the weights; 0: none is kept."""
    activations: float
    """Per image: what the forward pass keeps for the backward pass."""
    teacher: int = 0
    """The teacher's weights; 0: there is none, or it does not run."""
    teacher_activations: float = 0
    """Per image: the most that the teacher holds at once; it keeps nothing."""
    pairs: float = 0
    """What a relational loss keeps per pair of images: N images have N²."""
    triples: float = 0
    """And per triple: N images have N³."""
    casts: int = 0
    """Copies of the weights in autocast's format, which live as long as a step; 0: there is no autocast."""
    workspace: float = 0
    """What a GPU's kernels and the loss take in addition, however few the images; 0: not measured."""

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch; gradients are as large as the weights."""
        return 2 * self.weights + self.casts + self.optimizer + self.average + self.teacher + int(self.workspace)

    def step(self, images: int) -> float:
        """Bytes of a step on N images. The teacher is done before the student begins."""
        kept = images * (self.activations + images * (self.pairs + images * self.triples))
        return self.fixed + max(kept, images * self.teacher_activations)

    def largest_batch(self, capacity: int) -> int:
        """Images that fit into N bytes at once, with headroom."""
        space = capacity * (1 - HEADROOM)
        most = max(0, int(space - self.fixed))  # at least a byte per image
        return bisect.bisect_right(range(1, most + 1), space, key=self.step)


def example(data: Data[Images, Images], device: torch.device) -> torch.Tensor:
    """One training image as a model takes it: uint8 (1, channels, height, width)."""
    images: torch.Tensor = data.collate_training([data.training[1, 0]]).images
    return images[:1].to(device)


def bytes_of(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def optimizer_bytes(model: nn.Module, settings: TrainingSettings, world: World) -> int:
    """Bytes of the state that the optimizer will keep in one process; with ZeRO, its share."""
    numbers = sum(item.numel() for item in model.parameters() if item.requires_grad)
    return STATE_PER_PARAMETER[settings.optimizer] * numbers * 4 // (world.size if settings.zero else 1)


def cast_bytes(model: nn.Module, precision: Precision) -> int:
    """Bytes of autocast's copies of the weights of matrix products and convolutions, which it keeps for the backward pass."""
    if precision.dtype == torch.float32:
        return 0
    weights = (module.weight for module in model.modules() if isinstance(module, CAST_MODULES))
    return sum(weight.numel() * torch.finfo(precision.dtype).bits // 8 for weight in weights)


def activation_bytes(model: nn.Module, image: torch.Tensor, precision: Precision) -> float:
    """Bytes that one image's forward pass keeps for the backward pass, from two passes of different size.

    The passes leave no trace: neither in buffers such as BatchNorm's statistics nor in the state of random generators.

    Args:
        model: in train mode, on its device.
        image: (1, channels, height, width), as the model takes it.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]

    def output(images: int) -> Any:
        with precision.autocast():
            return model(image.repeat(images, 1, 1, 1))

    with accelerator.same_random_numbers(image.device):
        few, more = (_kept(output, count) for count in PROBES)
    for buffer, before in zip(model.buffers(), buffers):
        buffer.copy_(before)
    return max(0.0, (more - few) / (PROBES[1] - PROBES[0]))


def loss_bytes(loss: Callable[[int], torch.Tensor], device: torch.device) -> tuple[float, float, float]:
    """Bytes that a loss keeps for the backward pass: per image, per pair and per triple of images.

    Args:
        loss: of N synthetic images.
    """
    with accelerator.same_random_numbers(device):
        kept = [_kept(loss, count) for count in LOSS_PROBES]
    counts = torch.tensor(LOSS_PROBES, dtype=torch.float64)
    powers = torch.linalg.solve(torch.vander(counts, increasing=True), torch.tensor(kept, dtype=torch.float64))
    bytes_per_image, per_pair, per_triple = (max(0.0, round(value, 3)) for value in powers[1:].tolist())
    return bytes_per_image, per_pair, per_triple


def working_bytes(model: nn.Module, images: torch.Tensor) -> float:
    """The most bytes that a forward pass without gradients holds per image: the largest module's input plus output.

    Args:
        images: (batch, channels, height, width), as the model takes them.
    """
    largest = 0

    def watch(_module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        nonlocal largest
        tensors = [item for item in (*inputs, output) if isinstance(item, torch.Tensor)]
        largest = max(largest, sum(item.numel() * item.element_size() for item in tensors))

    hooks = [module.register_forward_hook(watch) for module in model.modules() if not any(module.children())]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return largest / len(images)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: on its GPU, or else in host memory."""
    if accelerator.is_gpu(device):
        return accelerator.peak_memory(device)
    return peak_host_memory()


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


def explain(now: Footprint, without: Mapping[str, Footprint], capacity: int) -> list[str]:
    """Log lines: what a step holds, and what each setting saves.

    Args:
        without: by setting, the footprint that the run would have without it.
    """
    parts = {
        "weights": now.weights,
        "gradients": now.weights,
        "autocast's copies": now.casts,
        "optimizer": now.optimizer,
        "moving average": now.average,
        "teacher": now.teacher,
        "workspace": int(now.workspace),
    }
    kept = ", ".join(f"{name} {_size(value)}" for name, value in parts.items() if value)
    lines = [
        f"memory of a process: {kept}, and {_size(now.activations)} an image; {_size(capacity)} are there: "
        f"{now.largest_batch(capacity):,} images fit at once"
    ]
    for setting, other in without.items():
        saved = other.fixed - now.fixed
        bytes_per_image = max(other.activations, other.teacher_activations) - max(
            now.activations, now.teacher_activations
        )
        lines.append(
            f"  {setting} saves {_size(saved)}, and {_size(bytes_per_image)} an image: without it "
            f"{other.largest_batch(capacity):,} would fit"
        )
    return lines


def measure(states: Sequence[TrainingState], data: Data[Images, Images]) -> tuple[Footprint, dict[str, Footprint]]:
    """A step's footprint for all models together, without a teacher; and, by setting, the footprint without that setting."""
    image = example(data, states[0].world.device)
    each = [_measured(state, image) for state in states]
    now = together([now for now, _ in each])
    settings = dict.fromkeys(name for _, without in each for name in without)
    return now, {name: together([without.get(name, now) for now, without in each]) for name in settings}


def together(footprints: Sequence[Footprint]) -> Footprint:
    """The footprint of a step in which several models, without a teacher, take turns on the same images: a model's activations and
    autocast's copies are freed before the next model's forward pass."""
    return Footprint(
        weights=sum(one.weights for one in footprints),
        optimizer=sum(one.optimizer for one in footprints),
        average=sum(one.average for one in footprints),
        activations=max(one.activations for one in footprints),
        pairs=max(one.pairs for one in footprints),
        triples=max(one.triples for one in footprints),
        casts=max(one.casts for one in footprints),
    )


def _measured(state: TrainingState, image: torch.Tensor) -> tuple[Footprint, dict[str, Footprint]]:
    model, world, settings = state.trainable.train(), state.world, state.settings
    now = Footprint(
        weights=bytes_of(model),
        optimizer=optimizer_bytes(model, settings, world),
        average=0 if state.average is None else bytes_of(state.model),
        activations=activation_bytes(model, image, state.precision),
        casts=cast_bytes(model, state.precision),
    )
    without = {}
    if settings.zero and world.size > 1:
        without["zero"] = replace(now, optimizer=now.optimizer * world.size)
    if state.precision.dtype != torch.float32:
        full = activation_bytes(model, image, Precision("fp32", world.device))
        without[f"precision {settings.precision}"] = replace(now, activations=full, casts=0)
    return now, without


def as_tried(
    now: Footprint, without: Mapping[str, Footprint], trial: StepTrial, most: int
) -> tuple[Footprint, dict[str, Footprint]]:
    """Footprints on a GPU, corrected by two real steps on few images.

    A forward pass's activations are not all: the loss, the gradients of activations and the kernels' workspaces come on top. On an H100,
    a segmenter's forward pass kept 249 MiB per image, and its step held 315; a ViT-S's 31.8 and 32.1 (docs/results/gpu.md).

    Args:
        now, without: as `measure` gives them; unchanged if the few images do not fit, or if a relational loss grows with pairs or triples.
        most: the most images that pass through the model at once; below 8, no difference is taken.
    """
    few, more = (min(count, most) for count in TRIED)
    kept = max(now.activations, now.teacher_activations)
    if more < 2 * few or not kept or now.pairs or now.triples:
        return now, dict(without)
    of_few, of_more = trial.held(few), trial.held(more)
    if of_few is None or of_more is None:
        return now, dict(without)
    bytes_per_image = max(kept, (of_more - of_few) / (more - few))
    beside = of_few - few * bytes_per_image - (now.weights + now.casts + now.optimizer)

    def corrected(one: Footprint) -> Footprint:
        activations, teacher_activations = (
            value * bytes_per_image / kept for value in (one.activations, one.teacher_activations)
        )
        return replace(
            one, activations=activations, teacher_activations=teacher_activations, workspace=max(0.0, beside)
        )

    return corrected(now), {name: corrected(one) for name, one in without.items()}


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
        report.say(line)
    fits = int(world.gather_rows(torch.tensor([here])).min())
    if settings.batch_size_per_device == "auto":
        size = _by_itself(
            settings, world, fits, trial, report.say, before if before in parts_of(share, share) else None
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
    say: Callable[[str], None],
    before: int | None,
) -> int:
    """The size that `auto` takes; logs it."""
    size = batch_size_per_device(settings, world, min(fits, before or fits))
    if accelerator.is_gpu(world.device):  # a step is tried there
        size = largest_that_fits(parts_of(share_of_batch(settings.global_batch_size, world), size), trial, world, say)
    if before is None:
        say(f"batch_size_per_device: {size}, by itself")
    elif size == before:
        say(f"batch_size_per_device: {size}, as before")
    else:
        say(
            f"batch_size_per_device: {size}, by itself: there is no room for the {before} of before. Sums are of other parts, so numbers "
            "differ from those of a run that was not interrupted"
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
    asked = f"set {', or '.join(changes)}, and resume" if changes else "resume on a larger device"
    anew = ["precision: bf16"] if settings.precision in ("fp32", "tf32") else []
    anew += ["a smaller model or image_size"]
    return (
        f"A step of {size} images was predicted to take {_size(predicted)} of {_size(space)}: {asked}; "
        f"or begin anew with {', or '.join(anew)}"
    )


def _kept(function: Callable[[int], Any], images: int) -> int:
    """Bytes of the distinct storages that autograd saves in a function of N images; parameters are counted elsewhere.

    Nothing stays behind. If the hooks kept the tensors themselves, an output that a function saves for itself would form a reference cycle
    with it and never be freed (https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks):
    on an H100, 4.2 GiB for a segmenter.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> None:
        if not (tensor.is_leaf and tensor.requires_grad):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage  # alive until all are counted, so that no address is reused

    def not_asked(_: None) -> torch.Tensor:
        raise RuntimeError("there is no backward pass")

    with torch.autograd.graph.saved_tensors_hooks(note, not_asked):
        function(images)
    return sum(storage.nbytes() for storage in storages.values())


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.1f} MB"

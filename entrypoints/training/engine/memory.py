"""What a training step holds in memory, and what it would hold without each setting."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from launcher_observer.process import peak_host_memory
from torch import nn

from training.data.batches import Images, share_of_batch
from training.data.loaders import Data
from training.distributed.world import World
from training.engine.memory_trial import StepTrial
from training.engine.optimizers import STATE_PER_PARAMETER
from training.engine.state import TrainingState
from training.models.fp8 import WORKING_BYTES, Fp8Linear
from training.models.precision import Precision
from training.runtime import accelerator
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
    teacher_beside: bool = False
    """Whether the teacher runs during the student's previous step."""
    pairs: float = 0
    """What a relational loss keeps per pair of images: N images have N²."""
    triples: float = 0
    """And per triple: N images have N³."""
    casts: int = 0
    """Copies of the weights in autocast's format, which live as long as a step; 0: there is no autocast."""
    workspace: float = 0
    """What a GPU's kernels and the loss take in addition, however few the images; 0: not measured."""
    share: int = 0
    """The process's share of the global batch if DDP exchanges gradients; 0: the process is alone."""

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch; gradients are as large as the weights."""
        return 2 * self.weights + self.casts + self.optimizer + self.average + self.teacher + int(self.workspace)

    @property
    def per_image(self) -> float:
        """Bytes that each further image takes, without what pairs and triples keep."""
        if self.teacher_beside:
            return self.activations + self.teacher_activations
        return max(self.activations, self.teacher_activations)

    def accumulated(self, images: int) -> int:
        """Bytes of the gradients that passes of N images accumulate beside DDP's buckets; 0: a step is one pass, or there are no buckets.

        A pass in `no_sync` leaves its gradients in storages of their own; only the pass that exchanges them puts them into the buckets,
        which stay allocated between steps (torch 2.14, torch/csrc/distributed/c10d/reducer.cpp, `mark_variable_ready_dense`).
        """
        return self.weights if images < self.share else 0

    def step(self, images: int) -> float:
        """Bytes of a step on N images. Without `teacher_beside`, the teacher is done before the student begins."""
        kept = images * (self.activations + images * (self.pairs + images * self.triples))
        asked = images * self.teacher_activations
        fixed = self.fixed + self.accumulated(images)
        return fixed + (kept + asked if self.teacher_beside else max(kept, asked))

    def largest_batch(self, capacity: int) -> int:
        """Images that fit into N bytes at once, with headroom."""
        space = capacity * (1 - HEADROOM)
        # the whole share may fit where a little less does not, which accumulates
        least = max(1, self.share) if self.step(self.share) <= space else 1
        most = max(least, int(space - self.fixed))  # at least a byte per image
        return least - 1 + bisect.bisect_right(range(least, most + 1), space, key=self.step)


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
    """The most bytes that a forward pass without gradients holds per image: the largest module's input plus output, or what an fp8 layer
    needs to scale its input.

    Args:
        images: (batch, channels, height, width), as the model takes them.
    """
    largest = 0

    def watch(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        nonlocal largest
        tensors = [item for item in (*inputs, output) if isinstance(item, torch.Tensor)]
        held = sum(item.numel() * item.element_size() for item in tensors)
        if isinstance(module, Fp8Linear):
            held = max(held, WORKING_BYTES * tensors[0].numel())
        largest = max(largest, held)

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
        share=footprints[0].share,
    )


def _measured(state: TrainingState, image: torch.Tensor) -> tuple[Footprint, dict[str, Footprint]]:
    model, world, settings = state.trainable.train(), state.world, state.settings
    now = Footprint(
        weights=bytes_of(model),
        optimizer=optimizer_bytes(model, settings, world),
        average=0 if state.average is None else bytes_of(state.model),
        activations=activation_bytes(model, image, state.precision),
        casts=cast_bytes(model, state.precision),
        share=share_of_batch(settings.global_batch_size, world) if world.size > 1 else 0,
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
    kept = now.per_image
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

"""Optimizers by name: fused if torch has it, and sharded across processes on request."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from training.distributed.world import World
from training.models.features import parameter_groups
from training.models.timm_models import only_channels_last
from training.runtime import accelerator
from training.settings.scripts import TrainingSettings

CLASSES: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "sgd": torch.optim.SGD,
}

KERNELS = ("fused", "foreach", "capturable")
"""Optimizer options that determine how it computes, not what."""

STATE_PER_PARAMETER = {"adamw": 2, "nadam": 2, "radam": 2, "sgd": 1}
"""Numbers that an optimizer keeps for each parameter: two moments, or one momentum."""


def build(model: nn.Module, settings: TrainingSettings, world: World) -> Optimizer:
    """The optimizer that the settings ask for, over the model's parameters on their device.

    With `zero` and several processes it is a ZeroRedundancyOptimizer: each keeps the state of its share of the parameters
    and sends these to the others after its step.

    Raises:
        ValueError: this version of torch, or the process group, lacks what the settings ask for.
    """
    kind = CLASSES[settings.optimizer]
    options = {"lr": settings.learning_rate, **_options(settings.optimizer)}
    groups = parameter_groups(model, settings.weight_decay)
    # GradScaler leaves it to a fused optimizer to skip a step whose gradients overflow; torch's SGD (torch/optim/sgd.py, up to 2.14.1)
    # then keeps a momentum that it allocated and never wrote
    unsafe = settings.optimizer == "sgd" and settings.precision == "fp16"
    if not unsafe and _fusible(kind, options, model):
        options["fused"] = True
    if settings.zero and world.size > 1:
        if not world.is_torch_group:
            raise ValueError(
                "zero: smddp before 1.4 has no process group over which torch can shard the state; set it to false"
            )
        # Each rank's parameters as views of one buffer: one broadcast per rank, not per parameter, though of those there may be fewer: a
        # rank that holds none broadcasts its buffer all the same. Such views would undo channels-last order.
        parameters = [parameter for group in groups for parameter in group["params"]]
        flat = world.size <= len(parameters) and not any(map(only_channels_last, parameters))
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, parameters_as_bucket_view=flat, **options)
    return kind(groups, **options)


def state_for_everyone(optimizer: Optimizer, world: World) -> dict[str, Any] | None:
    """The whole optimizer's state as one process would hold it, on rank 0; None elsewhere. A collective."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        accelerator.synchronize(world.device)  # it copies to the host asynchronously
    return optimizer.state_dict() if world.is_first else None


def every_groups(optimizer: Optimizer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """An optimizer's parameter groups, and those of the inner optimizer that updates this rank's share."""
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return optimizer.param_groups, local.param_groups


def restore(optimizer: Optimizer, captured: dict[str, Any]) -> None:
    """Restore a state from `state_for_everyone`; tensors may be on the CPU.

    This also does what PyTorch leaves undone. Scalars, such as Adam's `step`, belong on the device if one kernel does the whole step,
    and otherwise on the host, as each read would wait for the device. ZeroRedundancyOptimizer puts all of them on the host
    (https://github.com/pytorch/pytorch/issues/124133), torch 2.0 leaves them there (https://github.com/pytorch/pytorch/issues/103256),
    and others go to the device. Which kernels run depends on this machine alone, and so does the memory format: one kernel goes through
    a parameter and its averages in memory order.
    """
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    own = [{name: group.get(name) for name in KERNELS} for group in local.param_groups]
    optimizer.load_state_dict(captured)
    if local is not optimizer:
        optimizer.state.clear()  # a second copy of this rank's share, on its device, which nothing reads
    for groups in every_groups(optimizer):
        for group, kernels in zip(groups, own):
            group.update({name: chosen for name, chosen in kernels.items() if name in group})
    for group in local.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = local.state.get(parameter, {})
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if value.dim() == 0:
                    state[name] = value.to(parameter.device if on_device else "cpu")
                elif value.shape == parameter.shape and value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _options(name: str) -> dict[str, Any]:
    if name == "sgd":
        return {"momentum": 0.9, "nesterov": True}
    if name in ("nadam", "radam"):
        if "decoupled_weight_decay" not in inspect.signature(CLASSES[name]).parameters:
            raise ValueError(f"optimizer {name}: torch {torch.__version__} lacks its decoupled weight decay: set adamw")
        return {"decoupled_weight_decay": True}
    return {}


def _fusible(kind: type[Optimizer], options: dict[str, Any], model: nn.Module) -> bool:
    """Whether torch has one kernel for this optimizer's whole step on the model's device; tested by creating one."""
    if "fused" not in inspect.signature(kind).parameters:
        return False
    try:
        kind([next(model.parameters())], **{**options, "fused": True})
    except RuntimeError:  # "`fused=True` requires all the params to be floating point Tensors of supported devices"
        return False
    return True

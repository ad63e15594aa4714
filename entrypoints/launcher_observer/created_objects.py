"""The models, optimizers and precision that a script makes, as the hooks see them made: on any thread."""

from __future__ import annotations

import weakref
from typing import Any

from launcher_observer import process, setups
from launcher_observer.addresses import Address, here
from launcher_observer.models import models_of
from launcher_observer.setups import Setups

MAX_DESCRIBED = 8
"""Optimizers whose models are looked for, by a scan of all Python objects: a script may make one for every image."""


class CreatedObjects:
    """Notes each object, with the line that made it."""

    def __init__(self, torch: Any, noted: Setups):
        """
        Args:
            torch: the module.
        """
        self._torch, self._setups = torch, noted
        self._autocast: str | None = None
        """The dtype of the first autocast with gradients on."""
        self._described: set[int] = set()
        """Identities of optimizers."""
        self._described_yet = 0
        """Optimizers in all, including those that are gone."""
        self.parallel_models: weakref.WeakSet[Any] = weakref.WeakSet()
        """DDP and FSDP models."""
        self.compiles = False
        """Whether torch.compile was called."""
        self.device: Any = None
        """Where the first optimizer's parameters are."""

    def optimizer_made(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._described.discard(id(optimizer))  # no other with its identity lives
        self._setups.add("optimizer", here(), setups.optimizer_values(optimizer))

    def data_parallel(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """A model was wrapped by DistributedDataParallel or FullyShardedDataParallel."""
        self.parallel_models.add(model)
        values = {"class": type(model).__name__, "world_size": process.rank_and_size(self._torch)[1]}
        self._setups.add("data_parallel", here(), values)

    def compiled(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile was called."""
        self.compiles = True
        self._setups.add(
            "compile", here(), {"mode": kwargs.get("mode"), "backend": str(kwargs.get("backend", "inductor"))}
        )

    def autocast_entered(self, context: Any) -> None:
        """An autocast began. One without gradients is an evaluation's; a disabled one is an exception within another."""
        if self._autocast is None and context._enabled and self._torch.is_grad_enabled():
            self._autocast = str(context.fast_dtype).removeprefix("torch.")
            self._precision(here())

    def knows(self, optimizer: Any) -> bool:
        """Whether it was described."""
        return id(optimizer) in self._described

    def describe(self, optimizer: Any) -> None:
        """Called at an optimizer's first step: the models exist, and the loop's functions are running."""
        self._described.add(id(optimizer))
        self._setups.add("step", here(), {})
        model_at = here()
        if self._described_yet < MAX_DESCRIBED:
            for model_at, values in models_of(self._torch, optimizer):
                self._setups.add("model", model_at, values, which=(model_at[:2], values["class"]))
        self._described_yet += 1
        parameters = setups.parameters_of(optimizer)
        if not self._setups.knows("precision"):
            self._precision(model_at)
        if any(type(parameter).__name__ == setups.SHARDED for parameter in parameters):
            values = {"class": "fully_shard", "world_size": process.rank_and_size(self._torch)[1]}
            self._setups.add("data_parallel", model_at, values)
        if self.device is None and parameters:
            # the first may be offloaded to the CPU
            on_a_gpu = (one.device for one in parameters if one.device.type not in process.NOT_GPUS)
            self.device = next(on_a_gpu, parameters[0].device)
            cuda = self._torch.cuda
            if self.device.type == "cpu" and cuda.is_initialized() and cuda.max_memory_allocated():  # all of them are
                self.device = self._torch.device("cuda", cuda.current_device())
            self._setups.add("device", model_at, {"type": self.device.type})

    def _precision(self, at: Address) -> None:
        self._setups.add("precision", at, setups.precision_values(self._torch, self._autocast), which="precision")

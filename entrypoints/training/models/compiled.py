"""Models under torch.compile, with static shapes, and as CUDA graphs."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import nn

_COUNTED = itertools.count(1)
"""Numbers this process's models under torch.compile: students, averages in evaluation, a teacher's members."""


def _allow_another() -> None:
    """Let torch compile one more model, for up to four modes and shapes: a batch of training, of evaluation, of whole held-out images.

    By default torch compiles a code object eight times, which models of one class share, and then runs what is new eagerly
    (`recompile_limit`, before torch 2.6 `cache_size_limit`:
    https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html).
    """
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), 4 * next(_COUNTED)))


def _compile_backward_at_once() -> None:
    """Make torch compile the backward pass with the forward pass, for the whole process, so that a model that cannot be compiled can still
    run eagerly. By default torch compiles it in the first backward pass; older versions have no such switch."""
    from torch._functorch import config

    if hasattr(config, "force_non_lazy_backward_lowering"):
        config.force_non_lazy_backward_lowering = True


class Compiled(nn.Module):
    """A model under torch.compile, for one batch size; a model that cannot be compiled runs eagerly, with a warning.

    With `graphs` its kernels are recorded as CUDA graphs, which the host launches as one. A graph's outputs lie in memory that its next
    run overwrites: copy them to keep them longer. Gradients lie there too: they must be used up before the next forward pass of
    this model or another one (https://github.com/pytorch/pytorch/issues/169545).
    """

    def __init__(self, model: nn.Module, name: str, setting: str, *, graphs: bool = False):
        """
        Args:
            model: keeps its parameters and its mode.
            name, setting: the model's name, and the setting that asked for it, for the warning.
        """
        super().__init__()
        _compile_backward_at_once()
        _allow_another()
        self.model, self.graphs, self._name, self._setting = model, graphs, name, setting
        mode = "reduce-overhead" if graphs else None  # torch's name for CUDA graphs
        self._compiled: Any = torch.compile(model, dynamic=False, mode=mode)
        self.train(model.training)

    def forward(self, images: torch.Tensor) -> Any:
        """The model's output."""
        if self._compiled is not None:
            from torch._dynamo.exc import TorchDynamoException  # slow to import; torch.compile has imported it

            try:
                return self._compiled(images)
            except TorchDynamoException as error:
                cause = " ".join(str(error).split())[:300]
                warnings.warn(
                    f"{self._name} cannot be compiled and runs eagerly; {self._setting}: false saves the attempt. {cause}",
                    stacklevel=2,
                )
                self._compiled = None
        return self.model(images)

    @property
    def runs_compiled(self) -> bool:
        """Whether compilation has not failed."""
        return self._compiled is not None


class StaticBatch(Compiled):
    """A compiled model that sees one batch size of images of a size; smaller batches are padded to the largest one of that size so far.

    By default torch.compile switches to dynamic shapes for good when it meets a second batch size, as at the end of an evaluation
    (https://github.com/pytorch/torchtitan/pull/2204), and every later batch runs slower kernels.
    Only for models that treat images independently: in eval mode, without gradients. Its outputs may be kept.
    """

    def __init__(self, *arguments: Any, **options: Any):
        """
        Args: as Compiled.
        """
        super().__init__(*arguments, **options)
        self._largest: dict[torch.Size, int] = {}
        """Images of a batch, by an image's shape: whole held-out images come in smaller batches than crops of training images."""

    def forward(self, images: torch.Tensor) -> Any:
        """Images (batch, …) -> the model's output for them (batch, …), one tensor or several."""
        count, shape = len(images), images.shape[1:]
        full = max(self._largest.get(shape, 0), count)
        if count < full and self.runs_compiled:
            images = torch.cat([images, images[-1:].expand(full - count, *images.shape[1:])])
        output = super().forward(images)
        self._largest[shape] = full  # not before: there may be no memory for that many
        return (
            tuple(self._kept(part, count) for part in output)
            if isinstance(output, tuple)
            else self._kept(output, count)
        )

    def _kept(self, part: torch.Tensor, count: int) -> torch.Tensor:
        return part[:count].clone() if self.graphs else part[:count]

"""A compiled model that always sees one batch size, so that a ragged last batch compiles nothing anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def allow_models(count: int) -> None:
    """Let torch compile that many models of one class, each in training and in evaluation: by itself it compiles the ninth no more, and
    runs it as it is.

    torch counts what it compiled by code, which models of one class share (`recompile_limit`, before torch 2.6 `cache_size_limit`:
    https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html).
    """
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(getattr(config, name), 4 * count))


class StaticBatch(nn.Module):
    """A model through torch.compile with static shapes; smaller batches are filled up to the largest one so far.

    By itself torch.compile turns to dynamic shapes for good when it meets a second batch size, as at the end of an evaluation
    (https://github.com/pytorch/torchtitan/pull/2204), and every later batch runs slower kernels.
    Only for models whose images do not see each other: in eval mode.
    """

    def __init__(self, model: nn.Module):
        """
        Args:
            model: takes a tensor (batch, …), gives one (batch, …), or a tuple of such. It keeps its parameters and its mode.
        """
        super().__init__()
        self.model = model
        self._compiled: Any = torch.compile(model, dynamic=False)
        self._largest = 0
        self.train(model.training)

    def forward(self, images: torch.Tensor) -> Any:
        """Images (batch, …) -> what the model gives for them (batch, …), one tensor or several."""
        count, full = len(images), max(self._largest, len(images))
        if count < full:
            images = torch.cat([images, images[-1:].expand(full - count, *images.shape[1:])])
        output = self._compiled(images)
        self._largest = full  # not before: there may be no memory for that many
        return tuple(part[:count] for part in output) if isinstance(output, tuple) else output[:count]

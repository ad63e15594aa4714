"""A compiled model that always sees one batch size, so that a ragged last batch compiles nothing anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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

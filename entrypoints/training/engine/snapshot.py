"""Copies of tensors in main memory, for a thread that writes them while training goes on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from training.runtime import accelerator
from training.runtime.reporting import write_line


def snapshot(tree: Any, device: torch.device) -> Any:
    """A tree of dicts, lists and tuples with copies of its tensors in main memory, as they are now; the host waits once.

    Args:
        device: that holds them.
    """
    copied = _copied(tree)
    accelerator.synchronize(device)
    return copied


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        if tree.device.type == "cpu":
            return tree.detach().clone()
        try:
            copy = torch.empty_like(tree, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError as error:  # CUDA's "out of memory" is the host's here
            _say_unpinned(str(error).partition("\n")[0])
            copy = torch.empty_like(tree, device="cpu", requires_grad=False)
        return copy.copy_(tree.detach(), non_blocking=True)
    if isinstance(tree, dict):
        return type(tree)((key, _copied(value)) for key, value in tree.items())
    return type(tree)(map(_copied, tree)) if isinstance(tree, (list, tuple)) else tree


@functools.cache
def _say_unpinned(error: str) -> None:
    """Once for each error."""
    write_line(
        f"the host's memory cannot be pinned for a checkpoint ({error}): the copy uses unpinned memory, which takes longer"
    )

"""Pinned host memory: PyTorch asks the driver for it, so here a storage is only marked as pinned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "empty_strided")


def register() -> None:
    """Have `pin_memory` and `is_pinned` mean these marks."""
    for name in FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))
    torch.Tensor.to = _to(torch.Tensor.to)
    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = is_pinned


def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """A pinned copy, or the tensor itself where it is one."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}': only dense CPU tensors can be pinned")
    return tensor if is_pinned(tensor) else _marked(tensor.clone())


def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    """Whether a tensor lies in pinned memory."""
    begin = tensor.untyped_storage().data_ptr()
    registered = any(first <= begin < first + size for first, size in Runtime.registered.items())
    return registered or getattr(tensor.untyped_storage(), "pinned", False)


class Runtime:
    """Of CUDA's, what pins memory that others have allocated; its errors as numbers."""

    registered: ClassVar[dict[int, int]] = {}
    """Bytes, by the address at which they begin."""

    @classmethod
    def cudaHostRegister(cls, begin: int, size: int, flags: int) -> int:
        known = begin in cls.registered
        cls.registered.setdefault(begin, size)
        return 712 if known else 0  # cudaErrorHostMemoryAlreadyRegistered

    @classmethod
    def cudaHostUnregister(cls, begin: int) -> int:
        return 0 if cls.registered.pop(begin, None) else 713  # cudaErrorHostMemoryNotRegistered


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().pinned = True
    return tensor


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def pinning(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        return _marked(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

    return pinning


def _to(move: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As on CUDA, what comes to the host without waiting is pinned there."""

    def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if tensor.device.type == "gpu":
            asked = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **asked)
            if non_blocking and device is not None and device.type == "cpu":
                there = torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=True)
                return there.copy_(tensor, non_blocking=True)
        return move(tensor, *args, **kwargs)

    return to

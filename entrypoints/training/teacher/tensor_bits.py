"""Bit packing on a device, in the format of training.teacher.bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers uint8 (batch, count), of at most 8 bits each -> uint8 (batch, ⌈count × bits / 8⌉)."""
    if bits == 8:
        return numbers
    if bits == 4:
        padded = F.pad(numbers, (0, numbers.shape[1] % 2))
        return padded[:, ::2] | padded[:, 1::2] << 4
    each = (numbers[:, :, None] >> _places(bits, numbers.device) & 1).flatten(1)
    octets = F.pad(each, (0, -each.shape[1] % 8)).reshape(len(numbers), -1, 8)
    return (octets << _places(8, numbers.device)).sum(2, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """The numbers, uint8 (batch, count), that `pack_bits` packed."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :count]
    each = (packed[:, :, None] >> _places(8, packed.device) & 1).flatten(1)[:, : count * bits]
    return (each.reshape(len(packed), count, bits) << _places(bits, packed.device)).sum(2, dtype=torch.uint8)


def bytes_of(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers (batch, count) of any type -> their memory, uint8 (batch, bytes)."""
    return numbers.contiguous().view(torch.uint8)


def fp16_of(content: torch.Tensor) -> torch.Tensor:
    """Memory, uint8 (batch, 2 × count) -> float32 (batch, count)."""
    return content.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _places(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8, device=device)

"""Bit-packed integers. numpy alone."""

from __future__ import annotations

import numpy as np

CODE_BITS = {"int8": 8, "int4": 4}
"""Bits of a number's code, by precision."""


def packed_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned numbers (batch, count) into N bits each, lowest bit first: uint8 (batch, ⌈count × N / 8⌉)."""
    each = numbers[:, :, None] >> np.arange(bits, dtype=numbers.dtype) & numbers.dtype.type(1)
    return np.packbits(each.reshape(len(numbers), numbers.shape[1] * bits).astype(np.uint8), axis=1, bitorder="little")


def unpacked_bits(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Unpack what `packed_bits` packed: int64 (batch, count), of at most 24 bits each."""
    if bits == 8:
        return packed.astype(np.int64)
    padded = np.pad(packed, ((0, 0), (0, 3)))  # each number lies within the four bytes from that of its first bit
    byte, bit = np.divmod(np.arange(count) * bits, 8)
    words = sum(padded[:, byte + place].astype(np.int64) << 8 * place for place in range(4))
    numbers: np.ndarray = words >> bit & 2**bits - 1
    return numbers

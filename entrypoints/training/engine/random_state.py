"""Random number generators of a training process: captured, restored, and reseeded for a new rank."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from training.runtime import accelerator


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of this process's random generators: Python's, NumPy's if it is imported, PyTorch's, and the GPU's.

    A DataLoader without its own generator draws from PyTorch's whenever its iterator is created, so a run that resumes in the middle
    of an epoch would have drawn once more: give it one.
    """
    version, key, gauss = random.getstate()
    found = {"rng python": _packed(key, gauss), **_torch_state(device)}
    if "numpy" in sys.modules:
        _, key, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        found["rng numpy"] = _packed([*key.tolist(), position], gauss if has_gauss else None)
    return found


def restore_rng(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore the generators from `rng_state`. Other names are ignored."""
    key, gauss = _unpacked(state["rng python"])
    random.setstate((3, tuple(key), gauss))
    _set_torch_state(state, device)
    if "rng numpy" in state:
        import numpy

        (*key, position), gauss = _unpacked(state["rng numpy"])
        words = numpy.array(key, numpy.uint32)
        numpy.random.set_state(("MT19937", words, position, int(gauss is not None), gauss or 0.0))


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed the generators of a rank that resumes at another world size: from the run's seed, the step and the rank alone."""
    number = seed_of(seed, step, rank)
    random.seed(number)
    torch.manual_seed(number)  # every GPU's too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def seed_of(seed: int, step: int, rank: int) -> int:
    """A seed for a rank that resumes from a step, derived from a run's or a model's own seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:4], "big")


class RandomNumbers:
    """One model's own draws from PyTorch's generators, such as dropout's masks, whatever else its process draws.

    PyTorch has one generator for the CPU and one for a GPU. This keeps the model's own states of them while it draws nothing; getting
    and setting them does not wait for the GPU.
    """

    def __init__(self, seed: int, device: torch.device):
        self._device = device
        self.state: dict[str, torch.Tensor] = {}
        """uint8, on the CPU: as a checkpoint keeps it."""
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """Restart the model's draws from this seed."""
        with accelerator.same_random_numbers(self._device):
            torch.manual_seed(seed)  # every GPU's too
            self.state = _torch_state(self._device)

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """The body draws the model's numbers; afterwards the process draws its own again."""
        with accelerator.same_random_numbers(self._device):
            _set_torch_state(self.state, self._device)
            yield
            self.state = _torch_state(self._device)


def _torch_state(device: torch.device) -> dict[str, torch.Tensor]:
    found = {"rng torch": torch.get_rng_state()}
    if accelerator.is_gpu(device):
        found["rng gpu"] = accelerator.module(device).get_rng_state(device)
    return found


def _set_torch_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["rng torch"])
    if "rng gpu" in state and accelerator.is_gpu(device):
        accelerator.module(device).set_rng_state(state["rng gpu"], device)


def _packed(key: Any, gauss: float | None) -> torch.Tensor:
    """A Mersenne Twister's integers, and the bits of its cached normal number, as int64."""
    bits = struct.unpack("<q", struct.pack("<d", gauss or 0.0))[0]
    return torch.tensor([*key, int(gauss is not None), bits], dtype=torch.int64)


def _unpacked(packed: torch.Tensor) -> tuple[list[int], float | None]:
    *key, has_gauss, bits = packed.tolist()
    return key, struct.unpack("<d", struct.pack("<q", bits))[0] if has_gauss else None

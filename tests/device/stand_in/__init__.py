"""A GPU for machines without one: the device type `gpu`, which computes on the CPU and is as strict as CUDA.

It is PyTorch's private-use device, so the product runs the lines that it runs on `cuda`. Tensors are ordinary `torch.Tensor`s with
their values in main memory. Registration is for the life of a process: see tests/device/conftest.py.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.device.stand_in import autocast, kernels, module, pinned
from tests.device.stand_in.synchronisation import HiddenSynchronisation, Synchronisation, no_synchronisation, observed

__all__ = ["HiddenSynchronisation", "Synchronisation", "install", "no_synchronisation", "observed"]


@functools.cache
def install() -> torch.device:
    """Register the device type `gpu` in this process; its only device."""
    _setup_privateuseone_for_python_backend("gpu", backend_module=module.Gpu())
    kernels.register()
    autocast.register()
    pinned.register()
    return torch.device("gpu", 0)

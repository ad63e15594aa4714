"""The number format that a step computes in: fp32, tf32, or bf16 and fp16 by autocast with weights in fp32."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from training.models import fp8
from training.runtime import accelerator
from training.settings.scripts import Precision as Name

AMPERE = (8, 0)
"""The first CUDA compute capability with bf16 and tf32 (NVIDIA, CUDA C++ programming guide, table of arithmetic by capability)."""

FORMATS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Types of the results of matrix products."""


@dataclass(frozen=True)
class Precision:
    """A number format on one device."""

    name: Name
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations that matrix products give."""
        return FORMATS[self.name]

    def autocast(self) -> AbstractContextManager[object]:
        """The context for a forward pass and its loss; does nothing for fp32 and tf32."""
        return contextlib.nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler that keeps small gradients from vanishing in fp16 (https://arxiv.org/abs/1710.03740, section 3.2); else None."""
        if self.name != "fp16":
            return None
        if accelerator.is_gpu(self.device) and not hasattr(torch.amp, "GradScaler"):  # before torch 2.3
            return torch.cuda.amp.GradScaler()
        return torch.amp.GradScaler(self.device.type)


def resolved(name: Name | Literal["auto"], device: torch.device) -> tuple[Name, str]:
    """The precision that a setting stands for on a device, and the reason in words.

    auto: bf16 if the GPU has it, because it has fp32's range and needs no gradient scaler; else fp32.
    """
    if name != "auto":
        return name, "as set"
    gpu = accelerator.name(device)
    if gpu is None:
        return "fp32", "auto: there is no GPU"
    if unsupported("bf16", device) is None:
        return "bf16", f"auto: {gpu} supports it; matrix products that stay in fp32 use TF32"
    return "fp32", f"auto: {gpu} does not support bf16; precision: fp16 would be faster"


def choose(setting: Name | Literal["auto"], device: torch.device) -> Precision:
    """A precision that the device has; sets CUDA's use of tf32 accordingly, for the whole process.

    Raises:
        ValueError: the device lacks it; the message says what it has.
    """
    name, _ = resolved(setting, device)
    problem = unsupported(name, device)
    if problem:
        raise ValueError(f"precision {name}: {problem}")
    choose_tf32(name, device)
    return Precision(name, device)


def choose_tf32(name: str, device: torch.device) -> None:
    """On a GPU, compute in tf32 what stays in fp32, unless the precision itself is fp32; for the whole process."""
    if accelerator.is_gpu(device):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name != "fp32"


def unsupported(name: str, device: torch.device) -> str | None:
    """Why a device cannot compute in a precision, with the fix; None: it can."""
    if name == "fp8":
        return fp8.unsupported(device)
    if accelerator.is_gpu(device):
        capability = accelerator.capability(device)
        if name in ("bf16", "tf32") and capability < AMPERE:
            return (
                f"{accelerator.name(device)} has compute capability {'.'.join(map(str, capability))} but {name} needs 8.0 "
                "(A100, A10G, L4, H100 and later): set fp16 or fp32, or take such an instance"
            )
    elif name == "tf32":
        return "only CUDA GPUs support it: set fp32 or bf16"
    elif name == "fp16" and not hasattr(torch.amp, "GradScaler"):
        return f"torch {torch.__version__} has no gradient scaler for the {device.type}: set bf16 or fp32"
    return None

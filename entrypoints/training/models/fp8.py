"""A frozen model's linear layers in fp8: half the bytes of bf16, and twice the peak rate of matrix products.

Weights and activations are scaled row by row, so that each row's largest magnitude becomes the largest number of e4m3; activations anew
in every forward pass (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433, sections 3 and 4.2). Attention, norms and convolutions
stay in bf16.
"""

from __future__ import annotations

import torch
from torch import nn

from training.runtime import accelerator

FORMAT = torch.float8_e4m3fn if hasattr(torch, "float8_e4m3fn") else None
"""4 bits of exponent, 3 of fraction: the format of a forward pass. None: torch is older than 2.1."""

MIN_TORCH = (2, 9)
"""Oldest torch in AWS's images whose compiler keeps the layout of the product's matrices (the operator's tag needs_exact_strides)."""

ADA = (8, 9)
"""The first CUDA compute capability with fp8 (NVIDIA, CUDA C++ programming guide, table of arithmetic by capability)."""

MULTIPLE = 16
"""cuBLAS takes matrices whose sides are multiples of this (its documentation, section on fp8 of cublasLtMatmul)."""

WORKING_BYTES = 2 + 4 + 1
"""Of an input's number while it is scaled: bf16, float32, fp8."""

_MIN_MAGNITUDE = 1e-12
"""Lower bound of a row's largest magnitude, so that a row of zeros is not divided by 0."""


class Fp8Linear(nn.Module):
    """The forward pass of a frozen linear layer in fp8."""

    quantized: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        quantized, scales = _quantize(linear.weight.detach())
        self.register_buffer("quantized", quantized)
        self.register_buffer("scales", scales)
        self.register_parameter("bias", linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs bf16 (…, in) -> bf16 (…, out)."""
        quantized, scales = _quantize(inputs.flatten(0, -2))
        # PyTorch's own fp8 library, torchao, calls it too, and with its fast accumulation; functional.scaled_mm is newer than many images
        output: torch.Tensor = torch._scaled_mm(
            quantized,
            self.quantized.t(),
            scale_a=scales,
            scale_b=self.scales.t(),
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return output.view(*inputs.shape[:-1], len(self.quantized))

    @property
    def weight(self) -> torch.Tensor:
        """fp8 does not keep the original weight.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "the model uses the weights of its linear layers directly, which fp8 does not keep: set teacher_precision to bf16"
        )


def unsupported(device: torch.device) -> str | None:
    """Why a device cannot compute in fp8, with the fix; None: it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < MIN_TORCH:
        return (
            f"torch {torch.__version__} is older than {'.'.join(map(str, MIN_TORCH))}: set bf16, or use a newer image"
        )
    if not accelerator.is_gpu(device):
        return None
    capability = accelerator.capability(device)
    if capability < ADA:
        return (
            f"{accelerator.name(device)} has compute capability {'.'.join(map(str, capability))} but fp8 needs 8.9 (L4, L40S, H100 and "
            "later): set bf16 or fp16, or take such an instance"
        )
    return None


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, width) -> the same in fp8, and the float32 scales (n, 1) that give them back. Both are contiguous: a GPU's product takes
    no other layout, and the CPU's takes any."""
    assert FORMAT is not None, "see `unsupported`"
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=_MIN_MAGNITUDE) / torch.finfo(FORMAT).max
    return (rows / scales).to(FORMAT).contiguous(), scales.contiguous()


def to_fp8(model: nn.Module) -> None:
    """Replace a model's linear layers, in place, by those in fp8. Layers whose sides are not multiples of 16, such as most heads, stay as
    they are.

    Raises:
        ValueError: it has no other linear layer.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not (child.in_features % MULTIPLE or child.out_features % MULTIPLE)
    ]
    if not found:
        raise ValueError(
            f"fp8 applies only to linear layers whose sides are multiples of {MULTIPLE}; this model has none: set teacher_precision to bf16"
        )
    for parent, name, child in found:
        setattr(parent, name, Fp8Linear(child))

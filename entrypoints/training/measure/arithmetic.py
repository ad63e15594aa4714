"""How much arithmetic a step's models do, and its share of the device's peak: the model FLOP utilisation (MFU).

MFU is defined in Chowdhery et al. 2022 (https://arxiv.org/abs/2204.02311, appendix B). It counts the models' own arithmetic: forward
and backward passes of what trains, and forward passes of a teacher for the images that it answers for. It does not count an optimizer,
losses, augmentation, evaluations, or whatever a run computes twice. A multiplication and an addition are two operations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from training.measure.timeline import WARM_UP_STEPS
from training.runtime import accelerator

Counted = tuple[nn.Module, str]
"""A model, uncompiled, and the precision that it computes in: fp32, tf32, bf16, fp16 or fp8."""

IMAGES = 2
"""Images in the pass that is counted: BatchNorm takes no fewer."""


class Peak(NamedTuple):
    """Peak throughput of a GPU model, without sparsity."""

    name: str
    """A regular expression for the whole device name in CUDA: a part of a GPU (MIG, vGPU) and its slower forms have other names."""
    teraflops: dict[str, float]
    """By precision; the device lacks those that are not here."""
    source: str
    """NVIDIA's own table. Its data-center tables from Ampere on list figures with sparsity: twice these."""
    date: str
    """Day on which the figures were taken from it, as YYYY-MM-DD."""


PEAKS = (
    Peak(
        r"Tesla V100-SXM2-\d+GB",
        {"fp32": 15.7, "fp16": 125.0},
        "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
        "2026-11-25",
    ),
    Peak(
        r"Tesla T4",
        {"fp32": 8.1, "fp16": 65.0},
        "https://www.nvidia.com/en-us/data-center/tesla-t4/",
        "2026-11-25",
    ),
    Peak(
        r"(NVIDIA )?A100([- ](SXM4|PCIE))?[- ]\d+GB( PCIe)?",
        {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
        "https://www.nvidia.com/en-us/data-center/a100/",
        "2026-11-25",
    ),
    Peak(
        r"NVIDIA L40S",
        {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0, "fp8": 733.0},
        "https://www.nvidia.com/en-us/data-center/l40s/",
        "2026-11-29",
    ),
    Peak(
        r"NVIDIA L4",
        {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5},
        "https://www.nvidia.com/en-us/data-center/l4/",
        "2026-11-29",
    ),
    Peak(
        r"NVIDIA H100 80GB HBM3",
        {"fp32": 67.0, "tf32": 494.5, "bf16": 989.0, "fp16": 989.0, "fp8": 1979.0},
        "https://www.nvidia.com/en-us/data-center/h100/",
        "2026-11-29",
    ),
    Peak(
        r"NVIDIA H200",
        {"fp32": 67.0, "tf32": 494.5, "bf16": 989.0, "fp16": 989.0, "fp8": 1979.0},
        "https://www.nvidia.com/en-us/data-center/h200/",
        "2026-11-29",
    ),
)
"""Others are left out, not guessed: two of NVIDIA's tables differ by a factor of 1.8 for the A10G, no table of NVIDIA's was at hand for the
B200 and the H100 NVL, and nobody states a CPU's clock under load."""


def peak(device_name: str | None) -> Peak | None:
    """A device's peak, by its name in CUDA; None: it is not known, or the device is a CPU (None)."""
    if device_name is None:
        return None
    return next((one for one in PEAKS if re.fullmatch(one.name, device_name)), None)


def _shape(value: Any) -> Sequence[int]:
    """A tensor's shape; torch's counter gives a formula either the tensor or its shape, depending on the version."""
    shape: Sequence[int] = getattr(value, "shape", value)
    return shape


def _convolution_backward(grad_out: Any, x: Any, weight: Any, *others: Any, **_: Any) -> float:
    """Operations of both gradients of a convolution: each takes as many as the forward pass. torch's own formula counts the gradient of
    grouped weights once for each group (2.14.1).

    Args:
        others: bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask, as aten takes them.
    """
    transposed, wanted = others[4], others[7][:2]
    places = _shape(x if transposed else grad_out)[2:]
    return float(2 * math.prod(_shape(weight)) * _shape(x)[0] * math.prod(places) * sum(wanted))


def operations(model: nn.Module, image: torch.Tensor, *, trains: bool) -> float:
    """Floating-point operations of a model for one image, counted by torch on shapes alone: nothing is computed, and no weight, buffer,
    gradient or random number changes.

    Args:
        image: (1, channels, height, width), as the model takes it.
        trains: include the backward pass, for the parameters that have gradients.

    Raises:
        Exception: whatever the model raises if it needs more than shapes.
        ImportError: torch is older than 2.1, and cannot count.
    """
    return _counted(model, image, trains)[0]


def _counted(model: nn.Module, image: torch.Tensor, trains: bool) -> tuple[float, float]:
    """What `operations` returns, and how many of these are matrix products in fp8."""
    from torch.func import functional_call  # here, like the next: both are slow to import
    from torch.utils.flop_counter import FlopCounterMode

    def of_shape(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta").requires_grad_(trains and tensor.requires_grad)

    shapes = {name: of_shape(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    images = torch.empty((IMAGES, *image.shape[1:]), dtype=image.dtype, device="meta")
    mended = {torch.ops.aten.convolution_backward: _convolution_backward}
    counter = FlopCounterMode(display=False, custom_mapping=mended)
    with counter, torch.set_grad_enabled(trains):
        output = functional_call(model, shapes, (images,))
        if trains:
            outputs = output if isinstance(output, tuple) else (output,)
            torch.stack([part.float().sum() for part in outputs]).sum().backward()
    by_operator = {str(operator): count for operator, count in counter.get_flop_counts().get("Global", {}).items()}
    return counter.get_total_flops() / IMAGES, by_operator.get("aten._scaled_mm", 0) / IMAGES


class Arithmetic:
    """A process's arithmetic: what its models compute per step, and its device's peak.

    If models compute in several precisions, MFU is the time that their arithmetic takes at each one's peak over the time that it took.
    """

    def __init__(self, device: torch.device):
        self._name = accelerator.name(device)
        self._peak = peak(self._name)
        self._trained: list[dict[str, float]] = []
        self._asked: list[dict[str, float]] = []
        self._why_not = "the run has not counted its models' operations"
        self._ideal = self._seconds = 0.0
        self._steps = 0

    def count(self, image: torch.Tensor, trained: Iterable[Counted], asked: Iterable[Counted] = ()) -> None:
        """Count the operations of a run's models.

        Args:
            image: (1, channels, height, width), as they take it.
            trained: what a step trains.
            asked: the teacher's models.
        """
        try:
            self._trained = [self._by_precision(model, precision, image, True) for model, precision in trained]
            self._asked = [self._by_precision(model, precision, image, False) for model, precision in asked]
            self._why_not = ""
        except ImportError:
            self._why_not = f"torch {torch.__version__} does not count operations: 2.1 and later do"
        except Exception as error:  # a model may do anything, and training does not need the number
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            self._why_not = f"the models' operations could not be counted: {first}"

    def window(self, images: float, asked: float, seconds: float, steps: int) -> dict[str, float]:
        """The utilisation over a window of steps.

        Args:
            images: of this process, per step.
            asked: how many of these the teacher answered for.
            seconds: per step.
            steps: in the window.

        Returns:
            `tflops`, the models' own arithmetic in TFLOP/s, and `mfu`, 0 to 1: each if it is known.
        """
        if self._why_not:
            return {}
        done = [(images * count, precision) for one in self._trained for precision, count in one.items()]
        done += [(asked * count, precision) for one in self._asked for precision, count in one.items()]
        found = {"tflops": sum(count for count, _ in done) / seconds / 1e12}
        if self._no_peak:
            return found
        assert self._peak is not None
        ideal = sum(count / self._peak.teraflops[precision] / 1e12 for count, precision in done)
        if self._steps >= WARM_UP_STEPS:
            self._ideal, self._seconds = self._ideal + steps * ideal, self._seconds + steps * seconds
        self._steps += steps
        return {**found, "mfu": ideal / seconds}

    def _by_precision(self, model: nn.Module, precision: str, image: torch.Tensor, trains: bool) -> dict[str, float]:
        """A model's operations for one image, by precision. In an fp8 model the replaced linear layers count as fp8, the rest as bf16."""
        total, in_fp8 = _counted(model, image, trains)
        return {"fp8": in_fp8, "bf16": total - in_fp8} if precision == "fp8" else {self._used(precision): total}

    def _used(self, precision: str) -> str:
        """The precision of matrix products, for fp32 may mean tf32: training/models/precision.py sets that for the whole process."""
        has_it = self._peak is not None and "tf32" in self._peak.teraflops
        return "tf32" if precision == "fp32" and has_it and torch.backends.cuda.matmul.allow_tf32 else precision

    @property
    def _no_peak(self) -> str:
        """Why there is no MFU, though operations were counted; "" if there is one."""
        if self._peak is None:
            return f"no peak is known for this device ({self._name or 'CPU'})"
        lacking = self._precisions - {*self._peak.teraflops}
        return f"no peak is known for {', '.join(sorted(lacking))} on this device ({self._name})" if lacking else ""

    @property
    def _precisions(self) -> set[str]:
        return {precision for one in (*self._trained, *self._asked) for precision in one}

    def about(self) -> dict[str, Any]:
        """Entries for a run's record: operations per image, peaks with their source and its date, and why there is no MFU, "" if it is
        known."""
        known = {"gflop_per_image": [sum(one.values()) / 1e9 for one in self._trained]} if not self._why_not else {}
        asked = {"teacher_gflop_per_image": [sum(one.values()) / 1e9 for one in self._asked]} if self._asked else {}
        found = self._peak.teraflops if self._peak else {}
        peaks = {name: value for name, value in found.items() if name in self._precisions}
        sourced = (
            {"peak_tflops": peaks, "peak_source": self._peak.source, "peak_date": self._peak.date}
            if self._peak and peaks
            else {}
        )
        return {**known, **asked, **sourced, "why_no_mfu": self._why_not or self._no_peak}

    def overall(self) -> float | None:
        """MFU of this process's device over all logged windows that begin after the warm-up; None: not known."""
        return self._ideal / self._seconds if self._seconds else None

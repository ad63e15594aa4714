"""Precision: what a step computes in, and what a device without it is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training.models import precision

from tests.entrypoints.torch_versions import fp16_on_cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), pytest.param("fp16", torch.float16, marks=fp16_on_cpu)],
)
def test_a_matrix_product_comes_out_in_the_chosen_format(name, dtype):
    chosen = precision.choose(name, CPU)
    with chosen.autocast():
        assert nn.Linear(4, 4)(torch.rand(2, 4)).dtype == dtype == chosen.dtype


@fp16_on_cpu
def test_fp16_scales_its_loss():
    assert precision.choose("fp16", CPU).scaler() is not None


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_no_other_format_scales_its_loss(name):
    assert precision.choose(name, CPU).scaler() is None


def test_fp16_is_refused_where_torch_cannot_scale_its_loss(monkeypatch):
    monkeypatch.delattr(torch.amp, "GradScaler", raising=False)  # as before torch 2.3
    with pytest.raises(ValueError, match="precision fp16: torch .* no gradient scaler for the cpu: set bf16 or fp32"):
        precision.choose("fp16", CPU)


def test_tf32_is_refused_without_a_gpu():
    with pytest.raises(ValueError, match="precision tf32: only CUDA GPUs support it: set fp32 or bf16"):
        precision.choose("tf32", CPU)


@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_a_gpu_before_ampere_is_refused_with_the_fix(monkeypatch, name):
    """The one thing that is set here is what the driver would answer for a V100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    problem = precision.unsupported(name, torch.device("cuda", 0))
    assert "Tesla V100-SXM2-16GB has compute capability 7.0" in problem and "set fp16 or fp32" in problem
    assert precision.unsupported("fp16", torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("capability", "name", "expected", "why"),
    [
        (
            (8, 0),
            "NVIDIA A100-SXM4-40GB",
            "bf16",
            "auto: NVIDIA A100-SXM4-40GB supports it; matrix products that stay in fp32 use TF32",
        ),
        (
            (7, 0),
            "Tesla V100-SXM2-16GB",
            "fp32",
            "auto: Tesla V100-SXM2-16GB does not support bf16; precision: fp16 would be faster",
        ),
    ],
)
def test_auto_is_bf16_where_the_gpu_has_it_and_says_why(monkeypatch, capability, name, expected, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert precision.resolved("auto", torch.device("cuda", 0)) == (expected, why)


def test_auto_is_fp32_without_a_gpu_and_a_set_precision_stays():
    assert precision.resolved("auto", CPU) == ("fp32", "auto: there is no GPU")
    assert precision.resolved("bf16", CPU) == ("bf16", "as set")
    assert precision.choose("auto", CPU).name == "fp32"

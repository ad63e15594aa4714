"""A teacher's linear layers in fp8: what they compute, which layers they replace, and where a model or a device has none."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn
from training.engine import memory
from training.models import fp8, timm_models
from training.models.fp8 import Fp8Linear, to_fp8
from training.teacher.frozen import FrozenModel, Teacher

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(fp8.unsupported(CPU) is not None, reason="torch is too old for fp8")

IMAGES = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """To three bits of fraction, each row's largest number to 448: by hand, in float64."""
    scaled = rows.double() / rows.double().abs().amax(-1, keepdim=True) * 448
    step = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / step).round() * step * rows.double().abs().amax(-1, keepdim=True) / 448


def vit() -> timm_models.Normalized:
    torch.manual_seed(0)
    return timm_models.build("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}, 5)


def test_a_layers_output_is_the_product_of_rows_rounded_to_three_bits_of_fraction():
    linear = nn.Linear(64, 48).bfloat16().requires_grad_(False)
    inputs = seeded(3, 5, 64).bfloat16()
    expected = rounded(inputs) @ rounded(linear.weight).T + linear.bias.double()
    found = Fp8Linear(linear)(inputs)
    assert found.dtype == torch.bfloat16 and found.shape == (3, 5, 48)
    assert (found.double() - expected).norm() / expected.norm() < 0.01, (
        "bf16 rounds the output, and numbers halfway may differ"
    )


def test_each_row_has_its_own_scale_and_a_row_of_zeros_gives_the_bias():
    layer = Fp8Linear(nn.Linear(64, 48).bfloat16().requires_grad_(False))
    inputs = seeded(3, 64).bfloat16()
    beside = inputs * torch.tensor([[1.0], [2.0**15], [0.0]], dtype=torch.bfloat16)
    assert torch.equal(layer(beside)[0], layer(inputs)[0]) and layer(beside).isfinite().all()
    assert torch.equal(layer(beside)[2], layer.bias)
    tiny = Fp8Linear(nn.Linear(16, 16, bias=False).bfloat16().requires_grad_(False))
    assert tiny(torch.zeros(2, 16, dtype=torch.bfloat16)).abs().sum() == 0


def test_layers_whose_sides_are_multiples_of_16_are_replaced_and_the_head_stays():
    model = vit().bfloat16().requires_grad_(False)
    to_fp8(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    replaced = {name.rpartition(".")[2] for name, kind in kinds.items() if kind is Fp8Linear}
    assert replaced == {"qkv", "proj", "fc1", "fc2"} and [*kinds.values()].count(Fp8Linear) == 8
    assert kinds["model.head"] is nn.Linear, "five classes"


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="multiples of 16; this model has none: set teacher_precision to bf16"):
        FrozenModel(timm_models.build("resnet10t", {}, 5), "resnet10t", {}, precision="fp8")


def test_a_model_that_multiplies_by_a_layers_weights_itself_is_refused_at_its_first_batch():
    inner = timm.create_model("beitv2_base_patch16_224", img_size=32, num_classes=5, depth=1, embed_dim=32, num_heads=2)
    teacher = FrozenModel(timm_models.Normalized(inner, [0.5] * 3, [0.5] * 3), "beit", {}, precision="fp8")
    with pytest.raises(ValueError, match="directly, which fp8 does not keep: set teacher_precision to bf16"):
        teacher(IMAGES)


def test_an_fp8_teacher_gives_about_the_logits_of_a_bf16_teacher_in_half_its_memory():
    model = vit()
    found = {
        name: Teacher([FrozenModel(copy.deepcopy(model), "vit", {}, precision=name)])
        for name in ("fp32", "bf16", "fp8")
    }
    logits = {name: teacher(IMAGES) for name, teacher in found.items()}
    assert logits["fp8"].dtype == torch.float32
    assert (logits["fp8"] - logits["fp32"]).norm() / logits["fp32"].norm() < 0.1
    assert not torch.equal(logits["fp8"], logits["bf16"])
    assert found["fp8"].parameters == found["bf16"].parameters == timm_models.parameter_count(model)
    assert found["fp8"].memory_bytes < 0.56 * found["bf16"].memory_bytes
    again = Teacher([FrozenModel(copy.deepcopy(model), "vit", {}, precision="fp8")])
    assert again.digest() == found["fp8"].digest() != found["bf16"].digest()
    assert torch.equal(again(IMAGES), logits["fp8"])


def test_a_gpu_gets_matrices_in_the_only_layout_that_it_takes_also_of_one_image(monkeypatch):
    """Rows in order and columns in order. The CPU takes any: with one image, a transposed activation stays a view when it is flattened."""
    product, layouts = torch._scaled_mm, set()

    def watched(left, right, *, scale_a, scale_b, **others):
        layouts.add(
            (left.is_contiguous(), right.t().is_contiguous(), scale_a.is_contiguous(), scale_b.t().is_contiguous())
        )
        return product(left, right, scale_a=scale_a, scale_b=scale_b, **others)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    inner = timm.create_model("levit_128s", num_classes=5).eval()
    teacher = FrozenModel(timm_models.Normalized(inner, [0.5] * 3, [0.5] * 3), "levit_128s", {}, precision="fp8")
    assert teacher(torch.zeros(1, 3, 224, 224, dtype=torch.uint8)).isfinite().all()
    assert layouts == {(True, True, True, True)}


def test_a_compiled_layer_computes_what_an_eager_one_does():
    layer = Fp8Linear(nn.Linear(64, 48).bfloat16().requires_grad_(False))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    inputs = seeded(3, 5, 64).bfloat16()
    with torch.no_grad():
        assert torch.equal(compiled(inputs), layer(inputs))


def test_what_a_layer_needs_to_scale_its_input_counts_as_memory():
    layer = Fp8Linear(nn.Linear(256, 16).bfloat16().requires_grad_(False))
    assert memory.working_bytes(nn.Sequential(layer), torch.zeros(4, 256, dtype=torch.bfloat16)) == 7 * 256


def test_an_older_torch_is_named_with_the_fix(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    with pytest.raises(ValueError, match=r"teacher_precision fp8: torch 2.8.0\+cu128 is older than 2.9: set bf16"):
        FrozenModel(vit(), "vit", {}, precision="fp8")

"""How much the models of a step compute, and which share of a device's peak that is."""

from __future__ import annotations

import copy
import datetime
import json
import sys
from importlib.util import find_spec

import pytest
import timm
import torch
from torch import nn
from training.measure import arithmetic
from training.measure.arithmetic import PEAKS, Arithmetic, operations, peak
from training.models import fp8
from training.models.features import WithFeatures
from training.models.precision import Precision
from training.models.timm_models import Normalized, build, choose_attention
from training.runtime import accelerator, metrics
from training.teacher.frozen import FrozenModel, Teacher

from tests.entrypoints.test_training_runs import TINY, finished, job

CPU = torch.device("cpu")
IMAGE = torch.zeros((1, 3, 32, 32), dtype=torch.uint8)

counts = pytest.mark.skipif(find_spec("torch.utils.flop_counter") is None, reason="torch counts from 2.1 on")
"""The rest of this file runs on torch 2.0 too, where a run says that it cannot count."""


def on(monkeypatch, name: str | None) -> Arithmetic:
    """The arithmetic of a process with such a device."""
    monkeypatch.setattr(accelerator, "name", lambda _: name)
    return Arithmetic(CPU)


def perceptron(trained: bool = True) -> nn.Module:
    first, last = nn.Linear(3 * 32 * 32, 7), nn.Linear(7, 5)
    first.requires_grad_(trained)
    return Normalized(nn.Sequential(nn.Flatten(), first, nn.ReLU(), last), [0.5] * 3, [0.5] * 3)


def vit(width: int, depth: int, tokens: int, patch: int, classes: int) -> int:
    """Multiplications and additions of a ViT's forward pass: Dosovitskiy et al. 2021, appendix A, term by term."""
    embedding = (tokens - 1) * 3 * patch**2 * width
    block = tokens * (4 * width**2 + 8 * width**2) + 2 * tokens**2 * width
    return 2 * (embedding + depth * block + width * classes)


@counts
def test_operations_of_a_perceptron_by_hand():
    forward = 2 * (3 * 32 * 32 * 7 + 7 * 5)
    assert operations(perceptron(), IMAGE, trains=False) == forward
    backward = 2 * (3 * 32 * 32 * 7 + 2 * 7 * 5)  # pixels need no gradient
    assert operations(perceptron(), IMAGE, trains=True) == forward + backward
    assert operations(perceptron(trained=False), IMAGE, trains=True) == forward + 2 * 7 * 5, "the last layer's weights"


@counts
@pytest.mark.parametrize("fused", [True, False])
def test_operations_of_a_vit_by_hand_whatever_computes_its_attention(fused):
    model = build("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 3}, 11)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    forward = vit(width=192, depth=3, tokens=17, patch=8, classes=11)
    assert operations(model, IMAGE, trains=False) == forward
    whole = operations(model, IMAGE, trains=True)
    assert whole == 3 * forward - 2 * 16 * 3 * 8**2 * 192, "backward is twice forward, but for the pixels' gradient"


@counts
@pytest.mark.parametrize("kind", ["depthwise", "grouped", "transposed"])
def test_operations_of_convolutions_by_hand(kind):
    """6 channels of 8 by 8 places; each of both gradients takes as many operations as the forward pass, grouped or not."""
    layer, weights = {
        "depthwise": (nn.Conv2d(6, 6, 3, padding=1, groups=6), 6 * 9),
        "grouped": (nn.Conv2d(6, 4, 3, padding=1, groups=2), 4 * 3 * 9),
        "transposed": (nn.ConvTranspose2d(6, 4, 2, stride=2), 6 * 4 * 4),
    }[kind]
    image = torch.zeros((1, 3, 8, 8), dtype=torch.uint8)
    model = Normalized(nn.Sequential(nn.Conv2d(3, 6, 1), layer), [0.5] * 3, [0.5] * 3)
    first, second = 2 * 18 * 64, 2 * weights * 64
    assert operations(model, image, trains=False) == first + second
    assert operations(model, image, trains=True) == 2 * first + 3 * second, "pixels need no gradient"


@counts
@pytest.mark.parametrize(
    ("name", "gmacs"), [("resnet18", 1.82), ("vit_small_patch16_224", 4.61), ("convnext_tiny", 4.47)]
)
def test_operations_are_those_of_timms_published_table(name, gmacs):
    """https://github.com/huggingface/pytorch-image-models/blob/main/results/model_metadata-in1k.csv and its benchmarks: MACs."""
    image = torch.zeros((1, 3, 224, 224), dtype=torch.uint8)
    assert operations(build(name, {}, 1000), image, trains=False) / 2e9 == pytest.approx(gmacs, rel=0.01)


@counts
@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_050", "swin_tiny_patch4_window7_224"])
def test_counting_leaves_no_trace(name):
    options = {"img_size": 224} if name.startswith("swin") else {}
    model = build(name, {**options, "drop_rate": 0.1, "drop_path_rate": 0.1}, 3).train()
    model.to(memory_format=torch.channels_last)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    torch.manual_seed(7)
    random = torch.get_rng_state()
    assert operations(model, torch.zeros((1, 3, 224, 224), dtype=torch.uint8), trains=True) > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None and one.device == CPU for one in model.parameters())
    assert [module.training for module in model.modules()] == modes


@counts
def test_teachers_in_sixteen_bits_with_features_and_segmenters_are_counted():
    from training.models import segmenter

    model = build("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}, 4)
    alone = operations(model, IMAGE, trains=False)
    teacher = Teacher([FrozenModel(copy.deepcopy(model), "vit", {}, precision="bf16", features="tokens")] * 2)
    assert [(operations(one, IMAGE, trains=False), name) for one, name in teacher.counted] == [(alone, "bf16")] * 2
    both = WithFeatures(model, "pooled", nn.Linear(192, 64))
    projection = 2 * 192 * 64
    assert operations(both, IMAGE, trains=True) == operations(model, IMAGE, trains=True) + 3 * projection
    pixels = torch.zeros((1, 3, 64, 64), dtype=torch.uint8)
    assert operations(segmenter.build("resnet10t", {}, 5, decoder_channels=16), pixels, trains=True) > 1e8
    choose_attention(model, torch.bfloat16, CPU)
    assert operations(model, IMAGE, trains=False) == alone


@counts
@pytest.mark.skipif(fp8.unsupported(CPU) is not None, reason="torch is too old for fp8")
def test_an_fp8_teachers_products_with_its_weights_are_counted_as_fp8_and_its_attention_as_bf16(monkeypatch):
    model = build("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}, 4)
    alone = operations(model, IMAGE, trains=False)
    teacher = Teacher([FrozenModel(model, "vit", {}, precision="fp8")])
    in_fp8 = 2 * 2 * 17 * 12 * 192**2  # two blocks' four layers; 17 tokens
    known = on(monkeypatch, "NVIDIA H100 80GB HBM3")
    known.count(IMAGE, [], teacher.counted)
    assert known.about()["teacher_gflop_per_image"] == [alone / 1e9]
    ideal = in_fp8 / 1979e12 + (alone - in_fp8) / 989e12
    assert known.window(10, 10, 0.1, 4)["mfu"] == pytest.approx(10 * ideal / 0.1)
    assert known.about()["peak_tflops"] == {"bf16": 989.0, "fp8": 1979.0}


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("A100-SXM4-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla T4", 65.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A10G", None),
        ("NVIDIA B200", None),
        (None, None),
    ],
)
def test_a_peak_is_that_of_the_very_device_or_not_known(device, teraflops):
    found = peak(device)
    assert (found and found.teraflops["fp16"]) == teraflops


def test_every_peak_has_its_source_with_the_date_and_rises_with_fewer_bits():
    for one in PEAKS:
        assert datetime.date(2026, 11, 25) <= datetime.date.fromisoformat(one.date) <= datetime.date.today()
        assert one.source.startswith("https://") and "nvidia" in one.source
        ordered = [one.teraflops[name] for name in ("fp32", "tf32", "bf16", "fp8") if name in one.teraflops]
        assert ordered == sorted(ordered) and one.teraflops["fp16"] == one.teraflops.get("bf16", one.teraflops["fp16"])


def test_utilisation_by_hand_where_models_compute_in_several_precisions(monkeypatch):
    """By models whose operations are their name."""
    monkeypatch.setattr(arithmetic, "_counted", lambda count, image, trains: (count, count - 8e9))
    known = on(monkeypatch, "NVIDIA A100-SXM4-40GB")
    known.count(IMAGE, [(30e9, "bf16"), (6e9, "bf16")], [(78e9, "tf32")])
    done = {"tflops": 256 * 36e9 / 0.1e12, "mfu": 256 * 36e9 / 312e12 / 0.1}
    for _ in range(2):
        assert known.window(256, 0, 0.1, 4) == pytest.approx(done) and known.overall() is None, (
            "it begins in the warm-up"
        )
    found = known.window(256, 128, 0.2, 4)
    ideal = 256 * 36e9 / 312e12 + 128 * 78e9 / 156e12
    assert found == pytest.approx({"tflops": (256 * 36e9 + 128 * 78e9) / 0.2e12, "mfu": ideal / 0.2})
    assert known.overall() == pytest.approx(ideal / 0.2)
    known.window(256, 0, 0.1, 1)
    assert known.overall() == pytest.approx((4 * ideal + 256 * 36e9 / 312e12) / 0.9), "a short window counts less"
    about = known.about()
    assert about["gflop_per_image"] == [30.0, 6.0] and about["teacher_gflop_per_image"] == [78.0]
    assert about["peak_tflops"] == {"tf32": 156.0, "bf16": 312.0} and about["why_no_mfu"] == ""
    assert about["peak_source"].endswith("/a100/") and about["peak_date"] == "2026-11-25"


@counts
@pytest.mark.parametrize(
    ("device", "precision", "reason"),
    [
        (None, "fp32", "no peak is known for this device (CPU)"),
        ("NVIDIA A10G", "bf16", "no peak is known for this device (NVIDIA A10G)"),
        ("Tesla T4", "bf16", "no peak is known for bf16 on this device (Tesla T4)"),
    ],
)
def test_without_a_peak_there_is_the_rate_alone_and_the_reason(monkeypatch, device, precision, reason):
    known = on(monkeypatch, device)
    known.count(IMAGE, [(perceptron(), precision)])
    assert known.window(10, 0, 0.5, 9) == {"tflops": 10 * operations(perceptron(), IMAGE, trains=True) / 0.5e12}
    assert known.overall() is None and known.about()["why_no_mfu"] == reason


@counts
@pytest.mark.parametrize(
    ("allowed", "device", "used"),
    [(True, "NVIDIA H200", "tf32"), (False, "NVIDIA H200", "fp32"), (True, "Tesla T4", "fp32")],
)
def test_fp32_is_tf32_where_the_process_allows_it_and_the_device_has_it(monkeypatch, allowed, device, used):
    before = torch.backends.cuda.matmul.allow_tf32
    known = on(monkeypatch, device)
    try:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        known.count(IMAGE, [(perceptron(), Precision("fp32", CPU).name)])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert [*known.about()["peak_tflops"]] == [used]


@counts
def test_a_model_that_needs_more_than_shapes_is_not_counted_and_trains_all_the_same(monkeypatch):
    class Asks(nn.Module):
        def forward(self, images):
            return images.float() * images.sum().item()

    known = on(monkeypatch, "NVIDIA H200")
    known.count(IMAGE, [(perceptron(), "bf16"), (Asks(), "bf16")])
    assert known.window(10, 0, 0.5, 9) == {} and known.overall() is None
    about = known.about()
    assert about["why_no_mfu"].startswith("the models' operations could not be counted: ") and [*about] == [
        "why_no_mfu"
    ]


def test_a_torch_that_cannot_count_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.flop_counter", None)
    known = Arithmetic(CPU)
    known.count(IMAGE, [(perceptron(), "fp32")])
    assert known.about() == {"why_no_mfu": f"torch {torch.__version__} does not count operations: 2.1 and later do"}


@pytest.fixture(scope="module")
def digits(prepared):
    return prepared("digits")


@counts
@pytest.mark.slow
def test_a_run_records_what_it_computes_and_of_a_teacher_only_what_it_was_asked(digits, tmp_path):
    """Its first epoch fills the cache; from then on the teacher's arithmetic is none."""
    taught = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "in_chans": 1}
    finished(
        job(digits, "train_classifier.py", {"model": "vit_tiny_patch16_224", "model_options": taught}, name="teacher")
    )
    student = finished(
        job(digits, "train_kd.py", {"student": "vit_tiny_patch16_224", "student_options": TINY, "images_per_class": 8, "epochs": 4,
                                    "max_steps": 8, "teacher_cache": {"views": 1, "where": str(tmp_path / "bank")}},
            inputs={"teacher": {"run": "teacher"}})
    )  # fmt: skip
    image = torch.zeros((1, 1, 16, 16), dtype=torch.uint8)
    model, asked = (timm.create_model("vit_tiny_patch16_224", num_classes=10, **options) for options in (TINY, taught))
    each, teachers = (operations(Normalized(one, [0.5], [0.5]), image, trains=one is model) for one in (model, asked))
    windows = [line for line in student.metrics() if "loss" in line]
    seconds = {line["step"]: 32 / line["images/s"] for line in windows}
    done = {line["step"]: line["tflops"] * 1e12 * seconds[line["step"]] / 32 for line in windows}
    assert done == pytest.approx({2: each + teachers, 4: each, 6: each, 8: each}, rel=1e-6)
    assert all("mfu" not in line for line in windows)
    about = {"gflop_per_image": [each / 1e9], "teacher_gflop_per_image": [teachers / 1e9]}
    result = student.result()
    assert result["mfu"] is None
    assert result["arithmetic"] == {**about, "why_no_mfu": "no peak is known for this device (CPU)"}
    assert any("no MFU: no peak is known for this device (CPU)" in line for _, line in student.logs())
    diagnosis = student.diagnose()
    begun = diagnosis.to_dict()["start"]
    assert {*begun["parts"]} == {*metrics.START} and sum(begun["parts"].values()) == pytest.approx(
        begun["seconds"], abs=0.2
    )
    assert f"first step after {begun['seconds']:.1f} s: " in str(diagnosis)
    assert "TFLOP/s a process; no MFU: no peak is known for this device (CPU)" in str(diagnosis)
    found = json.loads(json.dumps(diagnosis.to_dict()["utilisation"]))
    assert found["mfu"] is None and found["tflops"] > 0 and found["gflop_per_image"] == about["gflop_per_image"]

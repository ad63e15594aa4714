"""What the product decides by the GPU: precision, batch size, workers; and what it asks of profilers."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from training.data import workers
from training.data.batches import LabelledBatch
from training.data.threads import pinned_batch
from training.engine import run
from training.engine.memory import Footprint
from training.engine.memory_trial import StepTrial
from training.engine.state import TrainingState
from training.measure import annotate, sagemaker_profiler
from training.models import precision, timm_models
from training.runtime import accelerator, failure
from training.settings.distillation import DistillationSettings
from training.tasks import distillation
from training.teacher import frozen
from training.teacher.logit_records import record_layout
from training.teacher.served import ServerTeacher

from tests.device.runs import CLASSES, CONVOLUTIONAL, SIDE, Runs, left_behind, weights_of
from tests.device.stand_in.kernels import Memory


def test_a_process_takes_the_gpu_of_its_number(gpu, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator.find(1) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert accelerator.find(1) == torch.device("cuda", 1) and taken == [torch.device("cuda", 1)]
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own: 2 are visible"):
        accelerator.find(2)
    assert [accelerator.in_turn(index).index for index in range(4)] == [0, 1, 0, 1], "servers share a host's GPUs"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert accelerator.in_turn(3) == torch.device("cpu")


def test_ranges_go_to_nvtx_where_a_gpu_is_in_use(monkeypatch):
    assert accelerator.nvtx() is None
    calls = []
    nvtx = types.SimpleNamespace(range_push=calls.append, range_pop=lambda: calls.append("end"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    with annotate.annotate("teacher_forward"):
        assert calls == ["teacher_forward"]
    assert calls == ["teacher_forward", "end"]


def test_bf16_is_taken_where_the_gpu_has_it(gpu, monkeypatch):
    assert precision.choose("auto", gpu).name == "bf16"
    monkeypatch.setattr(torch.gpu, "capability", (7, 5))
    assert precision.choose("auto", gpu).name == "fp32"
    with pytest.raises(ValueError, match="Stand-in GPU has compute capability 7.5 but bf16 needs 8.0"):
        precision.choose("bf16", gpu)


def test_a_teacher_moves_as_a_whole_and_keeps_its_types(gpu, channels):
    loaded = frozen.load(channels / "ensemble", CLASSES, channels=3, image_size=SIDE, precision="bf16")
    assert {value.device.type for value in weights_of(loaded).values()} == {"cpu"}
    types_before = {name: value.dtype for name, value in weights_of(loaded).items()}
    for device in (gpu, torch.device("cpu"), torch.device("meta")):
        moved = weights_of(loaded.to(device))
        assert {value.device for value in moved.values()} == {device}
        assert {name: value.dtype for name, value in moved.items()} == types_before


def test_an_fp8_teacher_needs_a_gpu_that_has_it(gpu, monkeypatch):
    model = timm_models.build("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 1}, len(CLASSES))
    teacher = frozen.Teacher([frozen.FrozenModel(model, "vit", {}, precision="fp8")])
    monkeypatch.setattr(torch.gpu, "capability", (8, 6))
    with pytest.raises(
        ValueError, match="teacher_precision fp8: Stand-in GPU has compute capability 8.6 but fp8 needs 8.9"
    ):
        teacher.to(gpu)
    monkeypatch.setattr(torch.gpu, "capability", (9, 0))
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    expected, found = teacher(images), teacher.to(gpu)(images.to(gpu))
    assert found.device.type == gpu.type and (found.cpu() - expected).norm() < 0.1 * expected.norm()


def test_the_teacher_of_a_server_computes_on_its_gpu_and_answers_where_the_images_are(gpu, channels):
    cpu, layout = torch.device("cpu"), record_layout(len(CLASSES), 2, "fp16")
    images = torch.randint(0, 256, (4, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    batch, found = LabelledBatch(images, *torch.zeros(5, 4)), {}
    for device in (cpu, gpu):
        teacher = frozen.load(channels / "ensemble", CLASSES, channels=3, image_size=SIDE, precision="fp32")
        server = ServerTeacher(teacher.to(device), device, layout)
        logits, records = server(images), server.taught(batch).records
        assert (logits.device, records.device) == (cpu, cpu)
        found[device] = logits, layout.decode(records.numpy(), cpu)
    for one, other in zip(found[cpu], found[gpu]):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_servers_teacher_computes_in_tf32_where_the_training_hosts_would(gpu, monkeypatch, name):
    monkeypatch.setattr(accelerator, "in_turn", lambda index: gpu)
    monkeypatch.setattr(distillation, "load_teacher", lambda *_: frozen.Teacher([]))
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [one.allow_tf32 for one in switches]
    try:
        for one in switches:
            one.allow_tf32 = name == "fp32"  # the wrong way round
        settings = DistillationSettings(student="x", precision=name)
        distillation._server_teacher(settings, CLASSES, 3, record_layout(len(CLASSES), 2, "fp16"), 0)
        assert [one.allow_tf32 for one in switches] == [name != "fp32"] * 2
    finally:
        for one, value in zip(switches, before):
            one.allow_tf32 = value


def test_everything_by_itself_and_recorded(runs: Runs, monkeypatch):
    monkeypatch.setattr(workers, "TINY", 0.0)  # so that an image is worth a worker
    run = runs(
        "train_classifier", precision="auto", batch_size_per_device="auto", num_workers="auto", profile_steps=1, profile_after=1
    )  # fmt: skip
    assert left_behind(run) == [] and run.state.precision.name == "bf16"
    assert (run.folder / "data/algo-1/operators.json").is_file()
    assert run.result["hardware"]["gpu"] == "Stand-in GPU"


def test_the_server_of_workers_begins_before_the_images_are_listed(runs: Runs, monkeypatch):
    import train_classifier

    order = []
    monkeypatch.setattr(run, "begin_server", lambda settings, device: order.append((settings.worker_type, device.type)))
    listed = train_classifier.open_data
    monkeypatch.setattr(
        train_classifier, "open_data", lambda *args, **more: order.append("listed") or listed(*args, **more)
    )
    runs("train_classifier", max_steps=1)
    assert order == [("threads", "gpu"), "listed"]


def test_a_batch_that_the_memory_cannot_hold_is_halved(runs: Runs, monkeypatch, capsys):
    monkeypatch.setattr(Footprint, "largest_batch", lambda *_: 8)  # a prediction that knows too little
    needed = {}
    for size in (2, 8):
        torch.gpu.reset_peak_memory_stats()
        before = torch.gpu.memory_allocated()
        runs("train_classifier", name=str(size), batch_size_per_device=size, max_steps=1)
        needed[size] = torch.gpu.max_memory_allocated() - before
    assert needed[8] > needed[2]
    capsys.readouterr()
    monkeypatch.setattr(Memory, "total", torch.gpu.memory_allocated() + (needed[2] + needed[8]) // 2)
    runs("train_classifier", name="auto", batch_size_per_device="auto", max_steps=1)
    assert "a step of 8 images ran out of the GPU's memory, trying fewer" in capsys.readouterr().out
    monkeypatch.setattr(StepTrial, "fits", lambda *_: False)
    with pytest.raises(ValueError, match="not even one image fits in the GPU's memory"):
        runs("train_classifier", name="none", batch_size_per_device="auto", max_steps=1)


def test_a_run_that_goes_on_takes_the_size_that_it_had_where_it_still_fits(runs: Runs, monkeypatch, capsys):
    job = {"batch_size_per_device": "auto", "checkpoint_every": 1}
    monkeypatch.setattr(Footprint, "largest_batch", lambda *_: 4)
    runs("train_classifier", **job, max_steps=1)
    assert "batch_size_per_device: 4 (auto)" in capsys.readouterr().out
    monkeypatch.setattr(Footprint, "largest_batch", lambda *_: 8)
    runs("train_classifier", **job, max_steps=2)
    assert "batch_size_per_device: 4 (auto, as before)" in capsys.readouterr().out
    monkeypatch.setattr(StepTrial, "fits", lambda _, images: images < 4)
    runs("train_classifier", **job, max_steps=3)
    assert "batch_size_per_device: 2 (auto): the previous 4 no longer fits" in capsys.readouterr().out
    # a size that somebody named is none that was tried: `auto` does not keep to it
    monkeypatch.undo()
    runs("train_classifier", **job | {"batch_size_per_device": 4}, name="named", max_steps=1)
    runs("train_classifier", **job, name="named", max_steps=2)
    assert "batch_size_per_device: 8 (auto)" in capsys.readouterr().out


def test_what_a_step_takes_is_predicted_from_two_small_ones(runs: Runs):
    """The forward pass alone keeps less: a loss, gradients of activations and copies come on top."""
    before = torch.gpu.memory_allocated()
    runs("train_classifier", **CONVOLUTIONAL, global_batch_size=24, max_steps=1)
    needed = torch.gpu.max_memory_allocated() - before
    [predicted] = re.findall(r"A step of 24 images was predicted to take ([\d.]+) MB", failure.progress.out_of_memory)
    assert float(predicted) * 1e6 == pytest.approx(needed, rel=0.15)


def test_a_library_without_workspace_ends_no_trial_and_another_error_does(runs: Runs):
    made = runs("train_classifier", max_steps=1)

    def failing(words: str) -> StepTrial:
        def task(batch: object) -> dict[str, torch.Tensor]:
            raise RuntimeError(words)

        images = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8)
        one = LabelledBatch(images, *torch.zeros(5, 1))
        data = types.SimpleNamespace(collate_training=lambda items: one, training={(1, 0): None})
        return StepTrial(task, made.states, data, 0)

    assert not failing("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`").fits(2)
    with pytest.raises(RuntimeError, match="Expected all tensors"):
        failing("Expected all tensors to be on the same device").fits(2)


def test_a_trial_of_passes_that_accumulate_holds_the_gradients_of_earlier_ones(runs: Runs, monkeypatch):
    [state] = runs("train_classifier", max_steps=1).states
    together = replace(state, world=replace(state.world, size=2))  # a share of 4 images
    one = LabelledBatch(torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8), *torch.zeros(5, 1))
    data = types.SimpleNamespace(collate_training=lambda items: one, training={(1, 0): None})

    def trial(state: TrainingState) -> StepTrial:
        def task(batch: LabelledBatch) -> Iterator[dict[str, torch.Tensor]]:
            yield {"loss": state.trainable(batch.images).square().mean()}

        return StepTrial(task, [state], data, 0)

    def held(size: int, **how: bool) -> int:
        torch.ones(1, device=runs.gpu, requires_grad=True).sum().backward()  # autograd's thread frees what it did last
        return trial(together).held(size, **how)

    gradients = sum(4 * parameter.numel() for parameter in state.trainable.parameters())
    first, later, whole = held(2), held(2, accumulates=True), held(4)
    assert later - first == gradients
    torch.ones(1, device=runs.gpu, requires_grad=True).sum().backward()
    before = torch.gpu.memory_allocated()
    monkeypatch.setattr(Memory, "total", before + first + gradients // 2)
    assert trial(state).fits(2) and not trial(together).fits(2)
    monkeypatch.setattr(Memory, "total", before + whole + gradients)
    assert trial(together).fits(4), "the whole share is one pass"


def test_every_tensor_of_a_batch_is_pinned_for_a_gpu_and_for_no_cpu(gpu):
    batch = [torch.zeros(2), [torch.zeros(3), None], "name"]
    images, [mask, nothing], name = pinned_batch(batch, gpu)
    assert images.is_pinned() and mask.is_pinned() and (nothing, name) == (None, "name")
    assert pinned_batch(batch, torch.device("cpu")) is batch and not batch[0].is_pinned()


def test_sagemakers_profiler_is_told_of_the_gpu(gpu, monkeypatch):
    configured = []
    profiler = types.SimpleNamespace(
        configure=lambda config: configured.append(config.profiler), start_profiling=lambda: None, stop_profiling=lambda: None
    )  # fmt: skip
    module = types.SimpleNamespace(
        SMProfiler=types.SimpleNamespace(instance=lambda: profiler), Config=types.SimpleNamespace
    )
    monkeypatch.setattr(sagemaker_profiler, "sagemaker_profiler", lambda: module)
    monkeypatch.setattr(sagemaker_profiler, "is_asked_for", lambda _: True)
    settings = types.SimpleNamespace(profile_after=0, profile_steps=1)
    recording = sagemaker_profiler.SageMakerProfiler(settings, gpu, lambda _: None)
    recording.step()
    recording.close()
    assert configured == [{"EnableCuda": "1"}]

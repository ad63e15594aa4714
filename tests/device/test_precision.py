"""Every precision and optimizer on the stand-in GPU: types as declared, and a resumed run that goes on to the bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from training.models.precision import FORMATS

from tests.device.runs import CPU, VIT, Runs, left_behind

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "nadam", "radam", "sgd")

UNFUSED = ("nadam", "radam", "sgd")
"""In fp16. Before a step of these, PyTorch's gradient scaler asks the device whether all gradients are finite."""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_goes_on_to_the_bit(runs: Runs, precision: str, optimizer: str):
    values = {"precision": precision, "optimizer": optimizer, "epochs": 1, "checkpoint_every": 1, "ema_decay": 0.9}
    values |= {"model_options": {**VIT, "drop_rate": 0.2}, "log_every": 1}
    if precision == "fp16" and optimizer in UNFUSED:
        values["waits_in"] = ("grad_scaler._maybe_opt_step",)
    undisturbed = runs("train_classifier", **values)
    shutil.rmtree(undisturbed.folder / "output/checkpoints/step-00000003")
    resumed = runs("train_classifier", **values)
    assert resumed.losses == {3: undisturbed.losses[3]}
    for name, value in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], value), name
    for run in (undisturbed, resumed):
        assert left_behind(run) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", ["gpu", "cpu"])
def test_a_checkpoint_goes_on_on_the_other_device(runs: Runs, first: str, optimizer: str):
    values = {"optimizer": optimizer, "epochs": 1, "checkpoint_every": 1, "log_every": 1, "name": "moved"}
    devices = {"gpu": runs.gpu, "cpu": CPU}
    undisturbed = runs("train_classifier", devices[first], **values)
    shutil.rmtree(undisturbed.folder / "output/checkpoints/step-00000003")
    [other] = {*devices} - {first}
    moved = runs("train_classifier", devices[other], **values)
    assert moved.losses == {3: pytest.approx(undisturbed.losses[3], rel=1e-5)}
    if other == "gpu":
        assert left_behind(moved) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_logits_and_teacher_are_of_the_declared_type(runs: Runs, precision: str):
    run = runs("train_kd", precision=precision, epochs=1)
    wanted = FORMATS[precision]
    student, images = run.state.model.train(), torch.zeros(2, 3, 32, 32, dtype=torch.uint8, device=runs.gpu)
    found = {}
    for name, layer in student.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.register_forward_hook(lambda _, __, made, name=name: found.__setitem__(name, made.dtype))
    with run.state.precision.autocast():
        logits = student(images)
    assert len(found) > 5 and set(found.values()) == {wanted} and logits.dtype == wanted
    assert {value.dtype for value in student.parameters()} == {torch.float32}
    [member] = run.task.teacher.members
    assert {value.dtype for value in member.model.parameters()} == {wanted}
    assert member.model.mean.dtype == torch.float32
    answer = run.task.teacher(images)
    assert answer.dtype == torch.float32 and answer.device == runs.gpu
    if precision in ("bf16", "fp16"):
        assert torch.equal(answer, answer.to(wanted).float()), "it was computed in fewer bits"

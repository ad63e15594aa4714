"""What each of two ranks on the stand-in GPU runs: every case to its end, and again from its last checkpoint but one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import device_lines, stand_in
from tests.device.runs import CONVOLUTIONAL, VIT, Run, Runs, left_behind
from tests.device.stand_in import collectives

COMMON = {"epochs": 1, "checkpoint_every": 1, "log_every": 1}
ZERO = {**COMMON, "zero": True, "model_options": {**VIT, "drop_rate": 0.2}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero, adamw": ("train_classifier", {**ZERO, "ema_decay": 0.9}),
    "zero, adamw, bf16": ("train_classifier", {**ZERO, "precision": "bf16"}),
    "zero, adamw, fp16": ("train_classifier", {**ZERO, "precision": "fp16"}),
    "zero, nadam": ("train_classifier", {**ZERO, "optimizer": "nadam"}),
    "zero, radam": ("train_classifier", {**ZERO, "optimizer": "radam"}),
    "zero, sgd": ("train_classifier", {**ZERO, "optimizer": "sgd"}),
    "zero, channels last": ("train_classifier", {**COMMON, "zero": True, **CONVOLUTIONAL}),
    "accumulation and compression": (
        "train_classifier",
        {**COMMON, "batch_size_per_device": 2, "gradient_compression": "bf16"},
    ),
    "side streams": ("train_kd", {**COMMON, "zero": True, "copy_stream": True, "teacher_stream": True}),
    "metric lines read late": ("train_classifier", {**COMMON, "checkpoint_every": 2, "late_metrics": True}),
    "filling teacher cache": ("train_kd", {**COMMON, "teacher_cache": {"views": 1, "top_k": 2}}),
    "several students": (
        "train_kd",
        {
            **COMMON,
            "student_options": {**VIT, "drop_rate": 0.2},
            "students": {"one": {"ema_decay": 0.9}, "other": {"seed": 5, "method": "dkd"}},
        },
    ),
    "segmentation with dice": ("train_segmentation", {**COMMON, "dice_weight": 0.5}),
}

SCALED = "grad_scaler._maybe_opt_step"
"""PyTorch's gradient scaler does not see that ZeRO's optimizer is a fused one, and asks the device before its step."""

WAITS = (
    "answer_of_device",  # for the stop flag of two steps before, on a stream of its own
    "distributed._pre_forward",  # once: DDP has the first step's order of gradients rebuild its buckets
)


def main(channels: Path, out: Path, ports: list[int]) -> None:
    """Writes what this rank found of each case, and which lines for a GPU it ran, to a JSON file."""
    gpu = stand_in.install()
    collectives.register()
    found = {}
    for case, (script, values) in CASES.items():
        folder, runs = out / case, Runs(gpu, channels, out / case, pytest.MonkeyPatch())
        made: list[Run] = []
        for _ in range(2):
            os.environ["MASTER_PORT"] = str(ports.pop())
            scaled = (SCALED,) if values.get("precision") == "fp16" else ()
            made.append(runs(script, waits_in=(*WAITS, *scaled), **values))
            for place in folder.glob("gpu/output/checkpoints/step-00000003"):
                if len(made) == 1 and made[0].weights:
                    shutil.rmtree(place)
        whole, resumed = made
        found[case] = {
            "losses": whole.losses,
            "resumed": resumed.losses,
            "differing": [
                name for name, value in whole.weights.items() if not torch.equal(resumed.weights[name], value)
            ],
            "sums": [float(value.double().sum()) for state in whole.states for value in state.model.parameters()],
            "left behind": [*left_behind(whole), *left_behind(resumed)],
        }
    written = {"cases": found, "device lines": [*device_lines.seen], "environment": {**os.environ}}
    (out / f"found-{os.environ['RANK']}.json").write_text(json.dumps(written))

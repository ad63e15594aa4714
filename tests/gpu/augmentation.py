"""Item 12, the DALI post's grid: a ResNet at one augmentation load, with images prepared by each of the kit's pipelines.

The post compares ResNet18, 50 and 152 at loads 1, 4, 8 and 12, and finds epochs 28 to 73 % shorter with DALI on the GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from training.data.loaders import open_loaders
from training.data.views import open_data
from training.engine.probe import RepeatedBatch

from tests.gpu import pictures
from tests.gpu.bench import Bench, Model, seconds_per_step
from tests.gpu.input_side import kernel_seconds
from tests.gpu.outcomes import Result
from tests.gpu.scripts import has_dali

PIPELINES: dict[str, dict[str, Any]] = {
    "cpu_reference": {"preprocessing": "cpu_reference"},
    "cpu": {},
    "cpu, composed": {"compose_augmentation": True},
    "dali": {"preprocessing": "dali"},
}


def speeds(bench: Bench, result: Result, *, model: str, load: int) -> None:
    """Images/s, and how much shorter an epoch is than with the first pipeline, the post's baseline: Pillow in processes."""
    sizes, classes = bench.sizes, min(bench.sizes.classes, 4)
    root = pictures.labelled(bench.folder / "train", sizes.photographs, classes, sizes.photograph)
    settings = bench.settings(
        student=model,
        hard_label_weight=1.0,
        global_batch_size=sizes.large_batch,
        image_size=sizes.image_size,
        min_crop_area=0.08,
        horizontal_flip=True,
        augmentation_load=load,
    )
    alone = replace(settings, num_workers=0)  # no worker makes a batch that nobody takes
    engine = bench.engine(alone, open_data(root, root, alone, 3), bench.model(Model(model)), None)
    engine.loaders = replace(engine.loaders, train=RepeatedBatch(engine.loaders.train))
    steps = engine.steps()
    fastest = seconds_per_step(bench, steps, 5, 10)
    busy = kernel_seconds(bench, steps) if bench.is_gpu else None
    steps.close()
    row = {"model": model, "load": load}
    one = {"images by": "one batch over and over", "images/s": sizes.large_batch / fastest, "epoch shorter, %": None}
    result.rows.append({**row, **one, "GPU idle": _idle(busy, fastest)})
    baseline = None
    for name, values in PIPELINES.items():
        if name == "dali" and not has_dali():
            result.left_out.append("dali: nvidia.dali is not installed")
            continue
        chosen = replace(settings, **values)
        opened = open_data(root, root, chosen, 3)
        engine.loaders = open_loaders(opened, chosen, bench.world(), batch_size_per_device=sizes.large_batch)
        steps = engine.steps()
        seconds = seconds_per_step(bench, steps, 5, 10, engine.loaders.crowd)
        steps.close()
        baseline = baseline or seconds
        result.rows.append(
            {
                **row,
                "images by": name,
                "images/s": sizes.large_batch / seconds,
                "epoch shorter, %": 100 * (1 - seconds / baseline),
                "GPU idle": _idle(busy, seconds),
            }
        )
    bench.require_gpu("a comparison of speeds")


def _idle(busy: float | None, seconds: float) -> float | None:
    """The share of a step in which the model's kernels do not run; None if not measured."""
    return None if busy is None else max(0.0, 1 - busy / seconds)

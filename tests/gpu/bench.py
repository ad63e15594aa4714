"""What a check works with: a device, sizes, images of noise, models with random weights, and the kit's own engine with them."""

from __future__ import annotations

import copy
import functools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import Dataset, default_collate
from training.data.batches import LabelledBatch, MaskedBatch
from training.data.loaders import Data, Loaders, open_loaders
from training.distributed.world import World
from training.engine.loop import Task, step_by_step, train
from training.engine.run import Run, open_run
from training.engine.state import TrainingState, prepare
from training.models import segmenter, timm_models
from training.runtime.environment import Environment
from training.settings.distillation import DistillationSettings
from training.settings.scripts import TrainingSettings
from training.settings.segmentation import SegmentationSettings
from training.tasks.distillation import Distillation
from training.tasks.students import Student
from training.teacher.cache import TeacherCache
from training.teacher.frozen import FrozenModel, Teacher
from training.teacher.logit_records import record_layout

from tests.gpu.outcomes import NotChecked

MANY = 1_000_000
"""Steps, or epochs: more than any check takes."""


FAIL_AT_LIMIT = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
"""torch's switch, and its name before torch 2.6. Without it, what exceeds `recompile_limit` runs eagerly, and only a log line says so."""


@dataclass(frozen=True)
class Model:
    """A timm model and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    teacher: Model
    student: Model
    shallow_teacher: Model
    """Of two blocks, so that a step of the shallow models has fewer kernels than CUDA queues before the host has to wait (1,024)."""
    shallow_student: Model
    encoder: Model
    shallow_encoder: Model
    decoder_channels: int
    image_size: int
    masked_size: int
    """Height and width of a segmenter's input."""
    classes: int
    masked_classes: int
    """Of a segmenter."""
    batch: int
    """Images per step if a check is to be quick."""
    large_batch: int
    """Images per step that keep the GPU busy."""
    auto_batch: int
    """More images than fit into memory."""
    steps: int
    """Measured steps."""
    photograph: tuple[int, int]
    """Width and height of the JPEGs."""
    photographs: int
    seconds: float
    """How long a throughput is measured."""
    throughput_batch: int | None = None
    """In place of a check's own batch. None: that one."""
    compile_backend: str | None = None
    """In place of torch.compile's own backend. None: that one."""


_TINY_ENCODER = Model(
    "pvt_v2_b0",
    {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "mlp_ratios": [2, 2, 2, 2]},
)
_TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}

REAL = Sizes(
    teacher=Model("vit_large_patch16_224"),
    student=Model("vit_small_patch16_224"),
    shallow_teacher=Model("vit_base_patch16_224", {"depth": 2}),
    shallow_student=Model("vit_small_patch16_224", {"depth": 2}),
    encoder=Model("resnet50"),
    shallow_encoder=Model("resnet10t"),
    decoder_channels=128,
    image_size=224,
    masked_size=512,
    classes=1000,
    masked_classes=21,
    batch=16,
    large_batch=128,
    auto_batch=4096,
    steps=20,
    photograph=(500, 375),
    photographs=32_768,
    seconds=4.0,
)

TINY = Sizes(
    teacher=Model("vit_tiny_patch16_224", {**_TINY, "depth": 2}),
    student=Model("vit_tiny_patch16_224", _TINY),
    shallow_teacher=Model("vit_tiny_patch16_224", _TINY),
    shallow_student=Model("vit_tiny_patch16_224", _TINY),
    encoder=_TINY_ENCODER,
    shallow_encoder=_TINY_ENCODER,
    decoder_channels=8,
    image_size=32,
    masked_size=64,
    classes=10,
    masked_classes=4,
    batch=4,
    large_batch=4,
    auto_batch=8,
    steps=4,
    photograph=(40, 32),
    photographs=64,
    seconds=0.1,
    throughput_batch=4,
    compile_backend="eager",
)


class Noise(Dataset):
    """Images of noise as a loader returns them, uint8; an index beyond the distinct ones gets an earlier one's pixels."""

    distinct = 64

    def __init__(self, images: int, size: int, classes: int):
        generator = torch.Generator().manual_seed(0)
        count = min(images, self.distinct)
        self.pixels = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
        self.images, self.classes = images, classes

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, draw: tuple[int, int]) -> tuple[torch.Tensor, int, int]:
        view, number = draw
        return self.pixels[number % len(self.pixels)], number, view

    def collate(self, items: list[tuple], images: torch.Tensor | None = None) -> LabelledBatch:
        """A batch, whose images may lie together already."""
        if images is None:
            images = torch.stack([item[0] for item in items])
        numbers, views = default_collate([item[1:] for item in items])
        labels = numbers % self.classes
        return LabelledBatch(images, labels, labels, torch.ones(len(labels)), numbers, views)

    def collate_held_out(self, items: list[tuple], images: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Images and labels."""
        return self.collate(items, images)[:2]


class MaskedNoise(Dataset):
    """One image of noise and its mask, repeated."""

    def __init__(self, images: int, side: int, classes: int):
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(0, 256, (3, side, side), generator=generator, dtype=torch.uint8)
        self.mask = torch.randint(0, classes, (side, side), generator=generator, dtype=torch.uint8)
        self.images = images

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, draw: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pixels, self.mask

    @staticmethod
    def collate(items: list[tuple], images: torch.Tensor | None = None) -> MaskedBatch:
        """A batch, whose images may lie together already."""
        pixels, masks = zip(*items)
        numbers = torch.zeros(len(items), dtype=torch.int64)
        return MaskedBatch(torch.stack(pixels) if images is None else images, torch.stack(masks), numbers, numbers)


@dataclass
class Engine:
    """The kit's loop, with our models and images."""

    task: Task
    state: TrainingState
    loaders: Loaders
    run: Run
    folder: Path

    def steps(self) -> Iterator[None]:
        """One step per `next`, from the first epoch on."""
        return step_by_step(self.task, [self.state], self.loaders, self.run)

    def train(self, steps: int) -> None:
        """`training.engine.loop.train` up to this step, without evaluation."""
        train(self.task, lambda _model: {}, [self.state], self.loaders, steps, self.run)

    def losses(self) -> dict[int, float]:
        """Of the loop's metric lines, by step."""
        lines = (self.folder / "data/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}

    def timeline(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind in the loop's timeline."""
        lines = (self.folder / "data/timeline-0.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]


@dataclass
class Bench:
    """A check's surroundings."""

    device: torch.device
    sizes: Sizes
    folder: Path
    """Empty, and this check's own."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def require_gpu(self, what: str = "the rest") -> None:
        """Go no further without a GPU."""
        if not self.is_gpu:
            raise NotChecked(f"{what} needs a GPU")

    def world(self) -> World:
        """This process alone."""
        return World(0, 1, 0, self.device, "none", "a single process")

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def model(self, chosen: Model, seed: int = 0) -> timm_models.Normalized:
        """With random weights, the same per seed, on the CPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return timm_models.build(chosen.name, chosen.options, self.sizes.classes)

    def teacher(
        self, chosen: Model, precision: str = "bf16", *, compile: bool = False, cuda_graphs: bool = False
    ) -> Teacher:
        """Frozen, on the device."""
        how = {"precision": precision, "compile": compile, "cuda_graphs": cuda_graphs}
        return Teacher([FrozenModel(self.model(chosen, 1), chosen.name, chosen.options, **how)]).to(self.device)

    def noise(self, images: int) -> Data:
        dataset = Noise(images, self.sizes.image_size, self.sizes.classes)
        names = [str(number) for number in range(self.sizes.classes)]
        return Data(names, dataset, dataset, dataset.collate, dataset.collate_held_out)

    def masked_noise(self, images: int) -> Data:
        dataset = MaskedNoise(images, self.sizes.masked_size, self.sizes.masked_classes)
        names = [str(number) for number in range(self.sizes.masked_classes)]
        return Data(names, dataset, dataset, dataset.collate)

    def segmenter(self, encoder: Model) -> timm_models.Normalized:
        """With random weights, on the CPU."""
        sizes = self.sizes
        return segmenter.build(
            encoder.name, encoder.options, sizes.masked_classes, decoder_channels=sizes.decoder_channels
        )

    def segmentation_settings(self, **values: Any) -> SegmentationSettings:
        """Segmentation in bf16, unless `values` say otherwise."""
        sizes = self.sizes
        common = {
            "model": sizes.encoder.name,
            "model_options": dict(sizes.encoder.options),
            "decoder_channels": sizes.decoder_channels,
            "classes": sizes.masked_classes,
            "image_size": (sizes.masked_size, sizes.masked_size),
            "precision": "bf16",
            "global_batch_size": sizes.batch,
            "num_workers": 2,
            "system_monitor": False,
        }
        return SegmentationSettings(**{**common, **values})

    def settings(self, **values: Any) -> DistillationSettings:
        """Endless distillation in bf16, unless `values` say otherwise."""
        common = {
            "student": self.sizes.student.name,
            "precision": "bf16",
            "global_batch_size": self.sizes.batch,
            "learning_rate": 1e-4,
            "epochs": MANY,
            "evaluate_every": MANY,
            "checkpoint_every": MANY,
            "log_every": MANY,
            "system_monitor": False,
        }
        return DistillationSettings(**{**common, **values})

    def engine(
        self,
        settings: TrainingSettings,
        data: Data,
        student: timm_models.Normalized,
        teacher: Teacher | None,
        *,
        world: World | None = None,
        checkpoints: bool = False,
        make_task: Callable[[TrainingState, Run], Task] | None = None,
    ) -> Engine:
        """The engine as train_kd.py assembles it; with a cache if the settings ask for one.

        Args:
            world: None: this process alone.
            checkpoints: whether there is a folder for them.
            make_task: another task than distillation.
        """
        world, folder = world or self.world(), self.folder
        kept = settings.teacher_cache if isinstance(settings, DistillationSettings) else None
        environment = Environment(
            "algo-1", folder / "model", folder / "data", folder / "failure", {}, folder / "checkpoints" if checkpoints else None
        )  # fmt: skip
        _, run = open_run(settings, environment, world)
        state = prepare(copy.deepcopy(student), settings, MANY, world)
        size = settings.batch_size_per_device or settings.global_batch_size // world.size
        loaders = open_loaders(
            data, settings, world, batch_size_per_device=size, views=kept.views if kept else None, log=run.report.log
        )
        cache = None
        if kept is not None:
            cache = TeacherCache.open(
                folder / "cache",
                parts={"teacher weights": "random"},
                images=len(data.training),
                layout=record_layout(self.sizes.classes, kept.top_k, kept.precision),
                views=kept.views,
                world=world,
            )
        task = (
            make_task(state, run)
            if make_task
            else Distillation(
                [Student(state.trained, settings)],
                teacher,
                cache,
                timeline=run.timeline,
            )
        )
        return Engine(task, state, loaders, run, folder)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """torch.compile, with the sizes' backend; a fallback to eager raises, also torch's own at its limit of recompilations."""
        from torch._dynamo import config

        options = {} if self.sizes.compile_backend is None else {"backend": self.sizes.compile_backend}
        at_limit = {name: True for name in FAIL_AT_LIMIT if hasattr(config, name)}
        with config.patch(at_limit), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*cannot be compiled and runs eagerly.*")
            with mock.patch.object(torch, "compile", functools.partial(torch.compile, **options)):
                yield


def seconds_per_step(bench: Bench, steps: Iterator[None], warm_up: int, least: int, crowd: int = 0) -> float:
    """Mean seconds per step, over the time that a throughput is measured.

    Args:
        warm_up: steps before it that do not count.
        least: minimum steps that count.
        crowd: batches that arrive together. Only whole crowds are measured, at least two: for part of one, the wait before it counts
            too much, or too little.
    """
    for _ in range(max(warm_up, crowd)):
        next(steps)
    bench.synchronize()
    started, count = time.perf_counter(), 0
    while count < max(least, 2 * crowd) or count % max(crowd, 1) or time.perf_counter() - started < bench.sizes.seconds:
        next(steps)
        count += 1
    bench.synchronize()
    return (time.perf_counter() - started) / count

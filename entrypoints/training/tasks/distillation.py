"""Distillation task: students learn from labels, and from one frozen teacher's logits and features."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from training.data.batches import LabelledBatch, TaughtBatch, TrainingBatches
from training.data.loaders import Batches, Collate, Data, Loaders, held_out_loader
from training.data.masks import MaskedImages
from training.data.views import HeldOutImages, TrainingViews, open_data, training_folders
from training.distributed.world import World
from training.engine import memory
from training.engine.memory import Footprint
from training.engine.run import Run
from training.measure.timeline import Timeline
from training.models import precision
from training.runtime import accelerator
from training.runtime.environment import Environment, read_environment
from training.servers.groups import read_groups
from training.settings.distillation import DistillationSettings, LabelBankSettings
from training.settings.scripts import TeacherSettings
from training.settings.segmentation import SegmentationSettings
from training.tasks.features import asked_of, kept_features, logits_and_features, untaught, with_features
from training.tasks.losses import distillation_loss, label_cross_entropy
from training.tasks.students import Student
from training.teacher import frozen, served
from training.teacher.bank_folder import bank_folder
from training.teacher.cache import TeacherCache
from training.teacher.complete_bank import FILL, CompleteBank
from training.teacher.frozen import Teacher
from training.teacher.logit_records import Output, RecordLayout, record_layout
from training.teacher.pixel_records import Layout


class Distillation:
    """`hard_label_weight` × cross-entropy with the labels + `teacher_weight` × the teacher's part + `features.weight` × the features'.

    All models see one view. Several students see the same pixels, and the teacher answers once for all of them.
    """

    def __init__(
        self,
        students: Sequence[Student],
        teacher: Teacher | None = None,
        cache: TeacherCache | None = None,
        *,
        timeline: Timeline,
        layout: RecordLayout | None = None,
        labelled_share: float = 1.0,
    ):
        """
        Args:
            students: they also return features if `features` are learned, which all students learn alike.
            teacher: None: labels alone, or the logits come with the images.
            cache: keeps the teacher's answers; without `teacher` it holds all of them. None: the teacher runs on every step.
            layout: of the logits that come with the images. None: none do.
            labelled_share: share of the images drawn in an epoch that have a label.
        """
        self.students, self.teacher, self.cache, self.layout = students, teacher, cache, layout
        self.timeline, self.labelled_share = timeline, labelled_share

    def begin_epoch(self, epoch: int, batches: TrainingBatches) -> None:
        """Check whether the cache holds all that all ranks draw in this epoch; if so, move the teacher to the CPU. A collective."""
        if self.cache is not None:
            complete = self.cache.begin_epoch(batches.views_of(epoch), batches.own_indices(epoch))
            if complete and self.teacher is not None:
                self.teacher.to(torch.device("cpu"))

    def __call__(self, batch: LabelledBatch | TaughtBatch) -> Iterator[dict[str, torch.Tensor]]:
        """Losses of a micro-batch on the students' device, one student after another; scalars in nats."""
        target = taught = None
        if self.teacher is not None or self.layout is not None or self.cache is not None:
            with self.timeline.phase("teacher_forward"):
                target, taught = self._target(batch)
        for student in self.students:
            yield self._losses(student, batch, target, taught)

    def _losses(
        self,
        student: Student,
        batch: LabelledBatch | TaughtBatch,
        target: torch.Tensor | None,
        taught: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        settings, phase = student.settings, self.timeline.phase
        with phase("student_forward"):
            logits, features = logits_and_features(student.model(batch.images))
        with phase("loss"):
            labels = label_cross_entropy(
                logits,
                batch.labels,
                batch.labels_b,
                batch.lam,
                smoothing=settings.label_smoothing,
                labelled_share=self.labelled_share,
            )
            if target is None:
                return {"loss": labels + untaught(features)}
            if not settings.has_teacher:
                return {"loss": labels}
            losses = {"loss": settings.hard_label_weight * labels, "label_loss": labels}
            if settings.teacher_weight > 0:
                parts = distillation_loss(logits, target, batch, settings)
                losses["teacher_loss"] = torch.stack([*parts.values()]).sum()
                losses["loss"] = losses["loss"] + settings.teacher_weight * losses["teacher_loss"]
                losses |= parts if len(parts) > 1 else {}
            return {**losses, **with_features(losses["loss"], features, taught, settings)}

    def _target(self, batch: LabelledBatch | TaughtBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The teacher's logits, float32 (batch, classes), and its features if they are learned."""
        if isinstance(batch, TaughtBatch):
            assert self.layout is not None, "whoever asks for taught batches knows their layout"
            return logits_and_features(self.layout.decode(batch.records.numpy(), batch.images.device))
        return logits_and_features(
            self._ask(batch.images) if self.cache is None else self.cache.answers(batch, self._ask)
        )

    def _ask(self, images: torch.Tensor) -> Output:
        if self.teacher is None:
            assert self.cache is not None, "nobody else asks"
            raise ValueError(
                f"the label bank in {self.cache.where} was complete when the run began, but lacks answers now: {FILL}"
            )
        self.timeline.asks(len(images))
        return asked_of(self.teacher.to(images.device), self.students[0].settings)(images)


def open_images(
    settings: DistillationSettings, environment: Environment, channels: int
) -> Data[TrainingViews, HeldOutImages]:
    """The images that a teacher and a student see; `channels` is their number of channels.

    Raises:
        ValueError: as `open_data`.
    """
    labelled, unlabelled = training_folders(settings, environment)
    return open_data(
        labelled,
        environment.channel("validation"),
        settings,
        channels,
        unlabelled=unlabelled,
        per_labelled=None if settings.unlabelled is None else settings.unlabelled.per_labelled,
        view_size=settings.view_size,
        output=environment.output_data_dir,
    )


def held_out_for_teacher(
    settings: DistillationSettings, data: Data[TrainingViews, HeldOutImages], loaders: Loaders, world: World
) -> Batches:
    """The held-out images at the size of the views that the teacher sees."""
    if settings.view_size is None or settings.view_size == settings.image_size:
        return loaders.validation
    resized, size = data.held_out.resized(settings.view_size), loaders.train_batches.batch_size_per_device
    return held_out_loader(resized, size, loaders.workers, world)


def load_teacher(
    settings: DistillationSettings, environment: Environment, classes: Sequence[str], channels: int
) -> Teacher:
    """The configured teacher, on the CPU; `channels` is the images' number of channels.

    Raises:
        ValueError: as frozen.load.
    """
    return frozen.load(
        None if settings.teacher_pretrained else environment.channel("teacher"),
        classes,
        channels=channels,
        image_size=settings.view_size or settings.image_size,
        name=settings.teacher,
        options=settings.teacher_options,
        precision=settings.teacher_number_format,
        compile=settings.compile_teacher is True,
        cuda_graphs=settings.cuda_graphs is True,
        features=settings.features.level if settings.features else None,
    )


def ask_servers(
    settings: DistillationSettings, data: Data[TrainingViews, HeldOutImages], channels: int, run: Run
) -> served.RemoteTeacher:
    """The teacher that runs on the servers that make the training images. A collective, before the first loader.

    Raises:
        ValueError: servers find no such teacher.
        NoServers: none has answered for process_group_minutes.
    """
    assert run.servers is not None and settings.teacher_servers is not None, "worker_type remote, as the settings say"
    layout = record_layout(len(data.classes), settings.teacher_servers.top_k, settings.teacher_servers.precision)
    assert data.elsewhere is not None, "open_data gives it"
    elsewhere = partial(open_taught, data.elsewhere, settings, channels, layout)
    servers = run.servers.asked(replace(data, elsewhere=elsewhere))
    wait_seconds, hosts = settings.process_group_minutes * 60, len(read_groups().serving)
    teacher = served.meet(servers, layout, run.world, wait_seconds, run.servers.log, hosts=hosts)
    run.servers.teacher = teacher
    return teacher


def open_taught(
    open_views: Callable[[], tuple[TrainingViews, Collate]],
    settings: DistillationSettings,
    channels: int,
    layout: RecordLayout,
) -> tuple[TrainingViews, Collate, partial[served.ServerTeacher]]:
    """A serving host's training images, what makes batches of them, and what opens the teacher of one of its servers."""
    views, collate = open_views()
    return views, collate, partial(_server_teacher, settings, views.source.classes, channels, layout)


def _server_teacher(
    settings: DistillationSettings, classes: Sequence[str], channels: int, layout: RecordLayout, index: int
) -> served.ServerTeacher:
    """One server's teacher, on the host's GPUs in turn, else on the CPU."""
    device = accelerator.in_turn(index)
    precision.choose_tf32(settings.precision, device)  # as on the training hosts, which resolved `auto`
    teacher = load_teacher(settings, read_environment(), classes, channels).to(device)
    return served.ServerTeacher(teacher, device, layout)


def teacher_steps(
    settings: DistillationSettings | SegmentationSettings, data: Data[Any, Any], steps: int | None = None
) -> int:
    """Steps in which the teacher answers: all of a run, or those that fill its cache, about one per global batch of all views.

    Args:
        steps: of the run. None: a labelling run, which trains nothing.
    """
    if settings.teacher_cache is None:
        assert steps is not None, "whoever labels has a bank, as the settings say"
        return steps
    filling = settings.teacher_cache.views * -(-data.epoch_images // settings.global_batch_size)
    return filling if steps is None else min(steps, filling)


def with_teacher(
    now: Footprint,
    without: Mapping[str, Footprint],
    teacher: Teacher,
    settings: TeacherSettings,
    image: torch.Tensor,
    *,
    cached: bool = False,
) -> tuple[Footprint, dict[str, Footprint]]:
    """The footprints of `memory.measure` with a teacher that runs beside the student, or only until its cache is filled.

    Args:
        now, without: already with the feature loss, if features are learned.
        image: uint8 (1, channels, height, width), on the teacher's device.
        cached: the teacher's answers are kept.
    """
    working = max(memory.working_bytes(member.model, image) for member in teacher.members)
    with_it = partial(
        replace,
        teacher=teacher.memory_bytes,
        teacher_activations=working,
        teacher_beside=settings.teacher_stream and accelerator.is_gpu(image.device),
    )
    taught = with_it(now)
    if cached:
        return now, {**without, memory.FILLED: taught}
    changed = {name: with_it(step) for name, step in without.items()}
    if settings.teacher_number_format != "fp32":
        changed[f"teacher_precision {settings.teacher_number_format}"] = replace(
            taught,
            teacher=4 * teacher.parameters,
            teacher_activations=2 * working,  # which are of 16 bits, with fp8 too
        )
    return taught, changed


def open_cache(
    settings: DistillationSettings,
    teacher: Teacher,
    data: Data[TrainingViews, HeldOutImages],
    environment: Environment,
    world: World,
) -> TeacherCache | None:
    """The cache that the settings ask for, in its folder. A collective.

    Raises:
        ValueError: there is no folder for it, or the existing one is of another teacher, transform or data.
    """
    kept = settings.teacher_cache
    if kept is None:
        return None
    features = None
    if settings.features is not None:
        image = memory.example(data, world.device)
        features = kept_features(settings.features, kept.feature_precision, teacher, image)
    layout = record_layout(len(data.classes), kept.top_k, kept.precision, features)
    return open_bank(settings, kept, layout, teacher, data, environment, world)


def open_bank(
    settings: TeacherSettings,
    kept: LabelBankSettings,
    layout: Layout,
    teacher: Teacher,
    data: Data[TrainingViews | MaskedImages, Any],
    environment: Environment,
    world: World,
) -> TeacherCache:
    """The cache of a teacher's answers in the given layout, in its folder. A collective.

    Raises:
        ValueError: as `open_cache`.
    """
    where, parts, about = _bank(kept, layout, data, environment, world)
    return TeacherCache.open(
        where,
        parts={**parts, "teacher weights": teacher.digest(), "dtype": settings.teacher_number_format},
        images=len(data.training),
        layout=layout,
        views=kept.views,
        world=world,
        stand_in=data.training.stand_in,
        drawn=data.epoch_images,
        about={"teacher": teacher.name, **about},
    )


def open_complete_bank(
    settings: DistillationSettings, data: Data[TrainingViews, HeldOutImages], environment: Environment, world: World
) -> CompleteBank | None:
    """The complete bank that replaces the teacher, if the settings ask for one. A collective.

    Raises:
        ValueError: there is none, or it is of another transform or data; as CompleteBank.
    """
    kept = settings.teacher_cache
    if kept is None or not kept.complete:
        return None
    layout = record_layout(len(data.classes), kept.top_k, kept.precision)
    where, parts, about = _bank(kept, layout, data, environment, world, read_only=True)
    return CompleteBank(
        where,
        parts=parts,
        about=about,
        images=len(data.training),
        layout=layout,
        views=kept.views,
        world=world,
        stand_in=data.training.stand_in,
        drawn=data.epoch_images,
    )


def _bank(
    kept: LabelBankSettings,
    layout: Layout,
    data: Data[TrainingViews | MaskedImages, Any],
    environment: Environment,
    world: World,
    *,
    read_only: bool = False,
) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """A label bank's folder, the parts of its identity that the images determine, and what its manifest says of them. A collective."""
    where = bank_folder(kept, environment, world, kept.views * len(data.training) * layout.size, read_only=read_only)
    digest = world.on_rank_zero(data.training.digest)
    views = data.training.view_description()
    parts = {
        "transform": hashlib.sha256(json.dumps(views, sort_keys=True).encode()).hexdigest(),
        "data": world.broadcast_bytes(None if digest is None else digest.encode()).decode(),
    }
    return where, parts, {"class names": [*data.classes], "transform": views}

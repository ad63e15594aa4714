"""Labelling: a frozen teacher answers every view of every image that training draws, and the label bank keeps the answers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.data.batches import LabellingBatches, share_of_batch
from training.data.loaders import Data, Loaders, open_loaders
from training.data.same_images import refuse_other_images
from training.engine.batch_size import batch_size_per_device, capacity, explain
from training.engine.device_batches import on_device
from training.engine.held_out_size import WholeImages, whole_at_once
from training.engine.memory import Footprint, example, working_bytes
from training.engine.metric_lines import Place, end_steps, printed_of, record_steps
from training.engine.run import Run
from training.runtime import failure, metrics
from training.teacher.cache import TeacherCache
from training.teacher.frozen import Teacher
from training.teacher.label_bank import digest_of
from training.teacher.logit_records import Output


@dataclass(frozen=True)
class Labelled:
    """How labelling ended."""

    found: int
    """Answers that the bank held already, over all views."""
    computed: int
    """Answers that the teacher gave, over all processes."""
    stopped: bool
    """Whether SIGTERM ended it before the last batch."""
    images_per_second: float | None
    """Over all processes, without the first batches. None: there were no others."""


def memory_needed(teacher: Teacher, data: Data[Any, Any], device: torch.device, packing: int = 0) -> Footprint:
    """A process's memory: the teacher, and the most that one image takes at once.

    Args:
        packing: bytes that packing an answer for the bank takes.
    """
    image = example(data, device)
    bytes_per_image = max(packing, *(working_bytes(member.model, image) for member in teacher.members))
    return Footprint(weights=0, optimizer=0, average=0, activations=bytes_per_image, teacher=teacher.memory_bytes)


def labelling_loaders(
    data: Data[Any, Any], needed: Footprint, views: int, run: Run, whole: WholeImages | None = None
) -> Loaders:
    """Loaders of every image that a view draws, in batches as large as the student's in training, or as memory allows.

    Args:
        needed: the teacher's memory.
        whole: held-out images that are larger than the views. None: they are not.

    Raises:
        ValueError: hosts have different images; or as `batch_size_per_device` and `open_loaders`.
    """
    refuse_other_images(data, run.world)
    space = capacity(run.world)
    run.report.log_all(explain(needed, {}, space))
    fits = int(run.world.gather_rows(torch.tensor([needed.largest_batch(space)])).min())
    size = batch_size_per_device(run.settings, run.world, fits)
    failure.progress.out_of_memory = (
        f"{size} images pass through the teacher at once: set a smaller batch_size_per_device, a divisor of the "
        f"{share_of_batch(run.settings.global_batch_size, run.world)} per process, and resume"
    )
    remote = run.servers.loader if run.servers is not None else None
    return open_loaders(
        data,
        run.settings,
        run.world,
        batch_size_per_device=size,
        held_out_batch_size=whole_at_once(whole, size, needed, run),
        views=views,
        remote=remote,
        log=run.report.log,
        sampler=LabellingBatches,
    )


def label(teacher: Callable[[torch.Tensor], Output], bank: TeacherCache, loaders: Loaders, run: Run) -> Labelled:
    """Fill a bank view by view; answers that it already holds are not computed again. A collective.

    Args:
        teacher: uint8 images (batch, channels, height, width) -> what the bank keeps.

    Raises:
        ValueError: no host can write to the bank, or the teacher's answers are not finite.
        OSError: the disk is full.
    """
    batches, world, timeline = loaders.train_batches, run.world, run.timeline
    assert isinstance(batches, LabellingBatches), "labelling_loaders makes them"
    if not world.any(bank.writable):
        raise ValueError(f"{bank.where} is read-only: set teacher_cache.where to a writable folder")
    a_view = -(-len(batches.of_view(1)) // world.size)
    steps, size, stopped, found = bank.views * a_view, batches.batch_size_per_device, False, 0

    def asked(images: torch.Tensor) -> Output:
        timeline.asks(len(images))
        return teacher(images)

    for view in range(1, bank.views + 1):
        images = batches.of_view(view)
        bank.begin_epoch([view], images[world.rank :: world.size].ravel())  # the others check the rest
        wanted = bank.lacking(view, images)
        found += min(batches.images, size * int((~wanted).sum()))
        batches.start_view(view, wanted)
        step = view * a_view - len(batches)
        timeline.start()
        for batch in on_device(iter(loaders.train), world, timeline, run.settings.copy_stream) if len(batches) else ():
            with timeline.phase("teacher_forward"):
                bank.fill(batch, asked)
            step += 1
            failure.progress.step = step
            run.record.first_step(step, loaders.workers.count)
            stopped = run.stop.agreed() and step < steps
            if step % run.settings.log_every == 0 or step == steps or stopped:
                _report(
                    batches.global_batch_size, (found, bank.misses * world.size), (view, bank.views, step, steps), run
                )
            else:
                timeline.step()
            if stopped:
                run.report.log(f"stopped after batch {step} of {steps} on SIGTERM")
                break
        if stopped:
            break
        bank.complete_view()
        run.report.log(f"view {view} of {bank.views} is complete")
    bank.close()
    run.stop.finish()
    failure.progress.enter("")
    seconds = timeline.seconds_per_step()
    speed = batches.global_batch_size / seconds if seconds else None
    return Labelled(found, bank.misses * world.size, stopped, speed)


def deliver_bank(
    bank: TeacherCache, labelled: Labelled, data: Data[Any, Any], run: Run, taught: dict[str, Any]
) -> None:
    """Write result.json on rank 0; a bank in the checkpoint folder also becomes model.tar.gz, which later runs take as {run: NAME}."""
    if not run.world.is_first:
        return
    checkpoints = run.environment.checkpoint_dir
    if not labelled.stopped and checkpoints is not None and bank.where.is_relative_to(checkpoints):
        run.environment.model_dir.mkdir(parents=True, exist_ok=True)
        for file in sorted(bank.where.iterdir()):
            if not file.name.startswith("."):
                _link(file, run.environment.model_dir / file.name)
    run.report.result(
        {
            "label_bank": str(bank.where),
            "digest": None if labelled.stopped else digest_of(bank.where),
            "views": bank.views,
            "training_images": data.epoch_images,
            "bytes": bank.size_bytes,
            "labels_found": labelled.found,
            "labels_computed": labelled.computed,
            "stopped": labelled.stopped,
            "images_per_second": labelled.images_per_second,
            "mfu": run.arithmetic.overall(),
            "arithmetic": run.arithmetic.about(),
            "teacher": taught,
            "world_size": run.world.size,
            "device": run.world.device.type,
        }
    )


def _report(images: int, counts: tuple[int, int], place: Place, run: Run) -> None:
    """The metric line of the batches since the last one.

    Args:
        images: in a batch, over all processes.
        counts: answers found, and computed.
    """
    run.timeline.step()
    ended = end_steps(place, run)
    window = ended.read()
    utilisation = record_steps(ended, window, run, images)
    values = dict(zip((metrics.LABELS_FOUND.name, metrics.LABELS_COMPUTED.name), counts))
    printed, phases = printed_of(window)
    speed = {metrics.IMAGES_PER_SECOND.name: images / window.step}
    speed |= {metrics.MFU.name: utilisation.pop("mfu")} if "mfu" in utilisation else {}
    run.report.metrics(*place, {**values, **speed, **printed, **ended.memory}, {**phases, **utilisation})


def _link(file: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the target is on another disk."""
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)

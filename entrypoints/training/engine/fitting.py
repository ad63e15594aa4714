"""Chooses the micro-batch size, the most images at once that a whole step has memory for, and opens the loaders for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from training.data.batches import Images
from training.data.loaders import Data, Loaders, open_loaders
from training.data.same_images import identity, refuse_other_images
from training.engine.batch_size import choose_batch_size
from training.engine.held_out_size import WholeImages, whole_at_once
from training.engine.loop import States, Task
from training.engine.memory import Footprint
from training.engine.memory_trial import StepTrial
from training.engine.run import Run
from training.settings.scripts import TrainingSettings

SIZE = "batch_size_per_device"
"""The key of this decision in checkpoints."""


def fitting_loaders(
    task: Task,
    states: States,
    data: Data[Images, Images],
    now: Footprint,
    without: Mapping[str, Footprint],
    run: Run,
    *,
    views: int | None = None,
    whole: WholeImages | None = None,
) -> Callable[..., Loaders]:
    """A function that opens a run's loaders, with micro-batches that fit in every process's memory. From here on, the run's checkpoints
    belong to these images. A collective.

    Args:
        task: of the bare models, without a collective; StepTrial runs its steps.
        now, without: a step's memory, as `memory.measure` gives it.
        views: as `open_loaders` takes it.
        whole: held-out images that are larger than what a step sees. None: they are not.

    Returns:
        open(settings, images, log): as `open_loaders`; `images` defaults to the run's, and without `log` it logs nothing.

    Raises:
        ValueError: hosts have different images, not one image fits, or the processes cannot have equal shares.
    """
    refuse_other_images(data, run.world)
    run.checkpoints.belong_to(identity(data))
    trial = StepTrial(task, states, data, now.optimizer)
    before = run.checkpoints.decided(SIZE)
    size = choose_batch_size(now, without, run.settings, run.world, run.report, trial, before)
    if run.settings.batch_size_per_device == "auto":
        run.checkpoints.decide(SIZE, size)
    of_held_out = whole_at_once(whole, size, now, run)

    def opened(
        settings: TrainingSettings,
        images: Data[Images, Images] = data,
        log: Callable[[str], None] = lambda _: None,
    ) -> Loaders:
        remote = run.servers.loader if run.servers is not None else None
        return open_loaders(
            images,
            settings,
            run.world,
            batch_size_per_device=size,
            held_out_batch_size=of_held_out,
            views=views,
            remote=remote,
            log=log,
        )

    return opened

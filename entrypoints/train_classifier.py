"""Train a timm model on labelled images.

    In a job:         launcher run configs/quickstart_teacher.yaml
    In a shell:       SM_CHANNEL_TRAIN=data/digits/train SM_CHANNEL_VALIDATION=data/digits/validation \\
                      python entrypoints/train_classifier.py --model vit_tiny_patch16_224 --epochs 5
    On many devices:  the same behind `torchrun --nproc_per_node 8`
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from training.data.batches import Images
from training.data.loaders import Data, Loaders, open_loaders
from training.data.views import open_data
from training.distributed.rendezvous import read_place
from training.distributed.world import World, process_group
from training.engine import memory, probe_run, probes
from training.engine.delivery import deliver, require_packages
from training.engine.loop import open_run, total_steps, train
from training.engine.memory_trial import StepTrial
from training.engine.state import prepare
from training.measure.monitor import system_monitor
from training.measure.timeline import Timeline
from training.measure.usage import hardware
from training.models import timm_models
from training.runtime import reporting
from training.runtime.environment import read_environment
from training.runtime.failure import failure_file
from training.settings import read_settings
from training.settings.scripts import ClassifierSettings
from training.tasks.classification import Classification
from training.tasks.evaluation import evaluate


def main(settings: ClassifierSettings) -> None:
    environment = read_environment()
    with (
        failure_file(environment.failure_file),
        system_monitor(environment.output_data_dir, read_place().local_rank, wanted=settings.system_monitor),
        process_group(settings.process_group_minutes) as world,
    ):
        settings, run = open_run(settings, environment, world)
        require_packages(settings)
        torch.manual_seed(settings.seed)
        channels = settings.model_options.get("in_chans", 3)
        opened = partial(
            open_data,
            environment.channel("train"),
            environment.channel("validation"),
            channels=channels,
            output=environment.output_data_dir,
        )
        data = opened(settings)
        run.report.say_all(data.notes)
        model = timm_models.build(
            settings.model, settings.model_options, len(data.classes), pretrained=settings.pretrained
        )
        parameters = timm_models.parameter_count(model)
        run.report.say(f"model {settings.model}: {parameters:,} parameters, {len(data.classes)} classes")

        steps = total_steps(settings, len(data.training))
        state = prepare(model, settings, steps, world)
        now, without = memory.measure(state, settings, data)
        bare = Classification(state.model, settings.label_smoothing, Timeline(world.device))
        trial = StepTrial(bare, state, data, now.optimizer)
        size = memory.choose_batch_size(now, without, settings, world, run.report, trial)
        reopened = partial(open_loaders, data, world=world, batch_size_per_device=size)
        loaders = reopened(settings, say=run.report.say)
        probed = {}
        if settings.probe_input_images:
            probed = probe_input(loaders, opened, settings, world, size)
        if settings.repeat_batch:
            run.report.say(
                "repeat_batch: every step gets the first batch again, so this measures the model and teaches it nothing"
            )
            loaders = replace(loaders, train=probes.RepeatedBatch(loaders.train))
        task = Classification(state.trained, settings.label_smoothing, run.timeline)
        if settings.probe_seconds:
            return probe_run.measure(task, state, loaders, reopened, run, environment)
        measure = partial(evaluate, loader=loaders.validation, world=world, autocast=state.precision.autocast)

        torch.manual_seed(settings.seed + 1 + world.rank)  # dropout differs between ranks
        outcome = train(task, measure, state, loaders, steps, run)
        summary = reporting.summary(settings.model, parameters, outcome, settings, world)
        if world.is_first:
            deliver(
                state.evaluated,
                environment.model_dir,
                settings,
                data,
                outcome,
                name=settings.model,
                options=settings.model_options,
                image_size=settings.image_size,
            )
        measured = {"training_images": len(data.training), "hardware": hardware(world.device), **probed}
        run.report.result({**summary, **measured})


def probe_input(
    loaders: Loaders,
    opened: Callable[[ClassifierSettings], Data[Images, Images]],
    settings: ClassifierSettings,
    world: World,
    size: int,
) -> dict[str, float]:
    """How fast the input side is alone, at its own image size if it has one."""
    if settings.probe_image_size is not None:
        settings = replace(settings, image_size=settings.probe_image_size)
        loaders = open_loaders(opened(settings), settings, world, batch_size_per_device=size)
    return probes.input_alone(loaders, settings.probe_input_images, world)


if __name__ == "__main__":
    main(read_settings(ClassifierSettings))

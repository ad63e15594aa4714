"""Train a model that gives every pixel a class, from images and masks; on a teacher's answers too, where there is one.

    In a job:         launcher run CONFIG, with script: train_segmentation.py
    In a shell:       SM_CHANNEL_TRAIN=data/shapes/train SM_CHANNEL_VALIDATION=data/shapes/validation \\
                      python entrypoints/train_segmentation.py --model resnet10t --classes 4 --image_size "[64, 64]"
    On many devices:  the same behind `torchrun --nproc_per_node 8`

A channel holds images/…/<name>.jpg or .png, and masks/…/<name>.png, whose pixels are class numbers, or shards of them;
`ignore_index` marks the pixels that nobody labelled. `launcher prepare shapes data/shapes` makes such a folder.

With `hard_label_weight` below 1 the model is a student of the one in the channel `teacher`: the model.tar.gz of an earlier run.
"""

from dataclasses import replace
from functools import partial

import torch
from training.data.loaders import open_loaders
from training.data.masks import open_data
from training.distributed.rendezvous import read_place
from training.distributed.world import process_group
from training.engine import memory, probe_run
from training.engine.delivery import deliver
from training.engine.loop import open_run, total_steps, train
from training.engine.memory_trial import StepTrial
from training.engine.state import prepare
from training.measure.monitor import system_monitor
from training.measure.timeline import Timeline
from training.models import segmenter, timm_models
from training.runtime import reporting
from training.runtime.environment import read_environment
from training.runtime.failure import failure_file
from training.settings import read_settings
from training.settings.segmentation import SegmentationSettings
from training.tasks import overlays
from training.tasks.distillation import with_teacher
from training.tasks.evaluation import evaluate_pixels, told_by_class
from training.tasks.segmentation import Segmentation
from training.teacher import frozen as teachers


def main(settings: SegmentationSettings) -> None:
    environment = read_environment()
    with (
        failure_file(environment.failure_file),
        system_monitor(environment.output_data_dir, read_place().local_rank, wanted=settings.system_monitor),
        process_group(settings.process_group_minutes) as world,
    ):
        settings, run = open_run(settings, environment, world)
        torch.manual_seed(settings.seed)
        channels = settings.model_options.get("in_chans", 3)
        data = open_data(
            environment.channel("train"),
            environment.channel("validation"),
            settings,
            channels,
            output=environment.output_data_dir,
        )
        run.report.say_all(data.notes)
        model = segmenter.build(
            settings.model,
            settings.model_options,
            settings.classes,
            decoder_channels=settings.decoder_channels,
            pretrained=settings.pretrained,
        )
        parameters = timm_models.parameter_count(model)
        run.report.say(f"{settings.model}: {parameters:,} parameters, {settings.classes} classes")

        steps = total_steps(settings, len(data.training))
        state = prepare(model, settings, steps, world)
        now, without = memory.measure(state, settings, data)
        teacher = None
        if settings.teacher_weight > 0:
            teacher = teachers.load(
                environment.channel("teacher"),
                data.classes,
                channels=channels,
                image_size=settings.image_size,
                precision=settings.teacher_number_format,
                compile=settings.compile_teacher,
                pixels=True,
            ).to(world.device)
            now, without = with_teacher(now, without, teacher, settings, memory.example(data, world.device))
        alone = replace(world, rank=0, size=1)
        trial = StepTrial(
            Segmentation(state.model, teacher and teacher.eager(), settings, alone, Timeline(world.device)),
            state,
            data,
            now.optimizer,
        )
        size = memory.choose_batch_size(now, without, settings, world, run.report, trial)
        reopened = partial(open_loaders, data, world=world, batch_size_per_device=size)
        loaders = reopened(settings, say=run.report.say)
        task, untaught = (Segmentation(state.trained, one, settings, world, run.timeline) for one in (teacher, None))
        if settings.probe_seconds:
            bare = None if teacher is None else untaught
            return probe_run.measure(task, state, loaders, reopened, run, environment, without_teacher=bare)
        measure = partial(
            evaluate_pixels,
            loader=loaders.validation,
            world=world,
            classes=data.classes,
            ignore_index=settings.ignore_index,
            autocast=state.precision.autocast,
        )
        taught = None
        if teacher is not None:
            taught = {"model": teacher.name, "parameters": teacher.parameters, **measure(teacher)}
            run.report.say(
                f"teacher {teacher.name}: {teacher.parameters:,} parameters in {settings.teacher_number_format}, frozen, "
                f"validation_miou {taught['validation_miou']:.4f}"
            )
            teachers.require_miou(taught["validation_miou"], settings.min_teacher_miou, teacher.name)

        torch.manual_seed(settings.seed + 1 + world.rank)  # dropout differs between ranks, and not with the teacher
        outcome = train(task, measure, state, loaders, steps, run)
        if outcome.validation:
            run.report.say(told_by_class(outcome.validation))
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
                decoder={
                    "channels": settings.decoder_channels,
                    "ignore_index": settings.ignore_index,
                    "class_colours": overlays.colours(settings),
                },
                teacher=taught,
            )
        run.report.result({**summary, "training_images": len(data.training), "teacher": taught})
        if world.is_first and not outcome.stopped:
            overlays.save(state, environment.output_data_dir, data, settings, run.report.say)


if __name__ == "__main__":
    main(read_settings(SegmentationSettings))

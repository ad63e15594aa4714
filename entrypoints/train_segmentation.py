"""Train a semantic segmentation model on images and masks, and on a teacher's answers if there is one.

    In a job:         launcher run CONFIG, with script: train_segmentation.py
    In a shell:       SM_CHANNEL_TRAIN=data/shapes/train SM_CHANNEL_VALIDATION=data/shapes/validation \\
                      python entrypoints/train_segmentation.py --model resnet10t --classes 4 --image_size "[64, 64]"
    On many devices:  the same under `torchrun --nproc_per_node 8`

A channel holds images/…/<name>.jpg or .png and masks/…/<name>.png, whose pixels are class numbers, or shards of them;
`ignore_index` marks unlabelled pixels. `launcher prepare shapes data/shapes` makes such a folder.

With `hard_label_weight` below 1 the model is a student of the one in the channel `teacher`: the model.tar.gz of an earlier run. With
`teacher_cache` the teacher runs once per view of an image.
"""

from dataclasses import replace
from functools import partial

import torch
from training.data.masks import open_data
from training.engine import memory, probe
from training.engine.compiling import decide_compiling
from training.engine.delivery import Trained, deliver
from training.engine.fitting import fitting_loaders
from training.engine.loop import train
from training.engine.run import count_arithmetic, started, total_steps
from training.engine.state import prepare
from training.measure.timeline import Timeline
from training.models import segmenter, timm_models
from training.servers.serving import serve, serves
from training.settings import read_settings
from training.settings.segmentation import SegmentationSettings
from training.tasks import features, overlays
from training.tasks.distillation import teacher_steps, with_teacher
from training.tasks.evaluation import describe_classes, evaluate_pixels
from training.tasks.segmentation import Segmentation, load_teacher, measured, open_cache, whole_images
from training.teacher import acceptance


def main(settings: SegmentationSettings) -> None:
    if serves(settings):
        return serve(settings)
    with started(settings) as (settings, run):
        environment, world, log = run.environment, run.world, run.report.log
        torch.manual_seed(settings.seed)
        channels = settings.model_options.get("in_chans", 3)
        data = open_data(
            environment.channel("train"),
            environment.channel("validation"),
            settings,
            channels,
            output=environment.output_data_dir,
        )
        run.report.log_all(data.notes)
        run.record.passed("images")
        model = segmenter.build(
            settings.model,
            settings.model_options,
            settings.classes,
            decoder_channels=settings.decoder_channels,
            pretrained=settings.pretrained,
        )
        log(f"{settings.model}: {timm_models.parameter_count(model):,} parameters, {settings.classes} classes")
        steps, image = total_steps(settings, data.epoch_images), memory.example(data, world.device)
        answered = teacher_steps(settings, data, steps) if settings.has_teacher else 0
        settings, run = decide_compiling(settings, run, trained=steps, answered=answered)
        teacher = None
        if settings.has_teacher:
            teacher = load_teacher(settings, environment, data.classes, channels).to(world.device)
        beside = features.learner(model, teacher, settings, image)
        state = prepare(model, settings, steps, world, beside=beside)
        run.record.passed("models")
        count_arithmetic(run, image, [state.counted], teacher.counted if teacher else ())
        now, without = memory.measure([state], data)
        if teacher is not None:
            now, without = features.with_feature_loss(now, without, [state], teacher, settings, image)
            cached = settings.teacher_cache is not None
            now, without = with_teacher(now, without, teacher, settings, image, cached=cached)
        alone = replace(world, rank=0, size=1)
        bare = Segmentation(state.trainable, teacher and teacher.eager(), settings, alone, Timeline(world.device))
        views = settings.teacher_cache.views if settings.teacher_cache else None
        whole = whole_images(settings, image, state=state, teacher=teacher)
        opened = fitting_loaders(bare, [state], data, now, without, run, views=views, whole=whole)
        del bare  # it holds what it answered last
        loaders = opened(settings, log=log)
        run.record.passed("memory")
        features.require_enough(settings, loaders.train_batches.batch_size_per_device)
        task, untaught = (Segmentation(state.trained, one, settings, world, run.timeline) for one in (teacher, None))
        if settings.probe_seconds:  # without a cache: the probe measures the pass that fills it
            return probe.measure(task, [state], loaders, opened, run, without_teacher=untaught if teacher else None)

        measure = partial(
            evaluate_pixels,
            loader=loaders.validation,
            world=world,
            classes=data.classes,
            ignore_index=settings.ignore_index,
            autocast=state.precision.autocast,
        )
        taught = cache = None
        if teacher is not None:
            minimum, number_format = settings.min_teacher_miou, settings.teacher_number_format
            found = measured(teacher, loaders.validation, settings, data.classes, world)
            taught = acceptance.accept(teacher, found, minimum, number_format, log)
            run.checkpoints.belong_to(acceptance.identity(taught))
            run.record.passed("teacher")
            cache = open_cache(settings, teacher, data, environment, world)
            run.record.passed("label_bank")
            if cache is not None:
                log(cache.summary())
                task = Segmentation(state.trained, teacher, settings, world, run.timeline, cache)
        outcome = train(task, measure, [state], loaders, steps, run)
        if cache is not None:
            cache.close()
        if outcome.validation:
            log(describe_classes(outcome.validation[state.name]))
        deliver(
            outcome,
            [Trained(state, settings.model, settings.model_options)],
            data,
            run,
            image_size=settings.image_size,
            decoder={
                "channels": settings.decoder_channels,
                "ignore_index": settings.ignore_index,
                "class_colours": overlays.colours(settings),
            },
            measured={"teacher": taught},
        )
        if world.is_first and not outcome.stopped:
            overlays.save(state, environment.output_data_dir, data, settings, log)


if __name__ == "__main__":
    main(read_settings(SegmentationSettings))

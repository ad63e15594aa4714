"""Distil the output logits and features of a frozen teacher into a small student, or into several at once.

    In a job:         launcher run configs/quickstart.yaml            (the teacher: configs/quickstart_teacher.yaml)
    In a shell:       SM_CHANNEL_TRAIN=data/digits/train SM_CHANNEL_VALIDATION=data/digits/validation SM_CHANNEL_TEACHER=output/model \\
                      python entrypoints/train_kd.py --student vit_tiny_patch16_224 --epochs 5
    On many devices:  the same under `torchrun --nproc_per_node 8`

The loss is `hard_label_weight` × cross-entropy with the labels + the rest × the teacher's part, by default the temperature KL
of Hinton et al. (https://arxiv.org/abs/1503.02531). Both models see the same augmented pixels, each with its own
normalisation and resolution. With `features` the student also learns the features of the teacher's last layer. With `students`
several learn from one teacher pass. With `teacher_cache` the teacher runs once per view of an image. With
`teacher_servers` it runs on the hosts that make the images. With a complete label bank no teacher runs.
"""

from functools import partial

import torch
from training.engine import memory, probe
from training.engine.compiling import decide_compiling
from training.engine.delivery import deliver, require_exportable, require_packages
from training.engine.fitting import fitting_loaders
from training.engine.loop import train
from training.engine.run import count_arithmetic, started, total_steps
from training.measure.timeline import Timeline
from training.servers.serving import serve, serves
from training.settings import read_settings
from training.settings.distillation import DistillationSettings
from training.settings.entries import variants
from training.tasks import features
from training.tasks.distillation import (
    Distillation,
    ask_servers,
    held_out_for_teacher,
    load_teacher,
    open_cache,
    open_complete_bank,
    open_images,
    teacher_steps,
    with_teacher,
)
from training.tasks.evaluation import evaluate
from training.tasks.students import Students
from training.teacher import acceptance


def main(settings: DistillationSettings) -> None:
    if serves(settings):
        return serve(settings)
    with started(settings) as (settings, run):
        require_packages(settings)
        environment, world, log = run.environment, run.world, run.report.log
        channels = settings.image_channels
        data = open_images(settings, environment, channels)
        run.report.log_all(data.notes)
        run.record.passed("images")
        steps, image = total_steps(settings, data.epoch_images), memory.example(data, world.device)
        teacher = remote = None
        bank = open_complete_bank(settings, data, environment, world)
        run.record.passed("label_bank")
        elsewhere = bank is not None or settings.teacher_servers is not None
        asks = not elsewhere and any(own.has_teacher for own in variants(settings).values())
        answered = teacher_steps(settings, data, steps) if asks else 0
        settings, run = decide_compiling(settings, run, trained=steps, answered=answered)
        each = variants(settings)
        if settings.teacher_servers is not None:
            remote = ask_servers(settings, data, channels, run)
        elif asks:
            teacher = load_teacher(settings, environment, data.classes, channels).to(world.device)
        students = Students(each, teacher, data.classes, environment, image, steps, world, log)
        states = students.states
        require_exportable(settings, states)
        run.record.passed("models")
        count_arithmetic(run, image, [state.counted for state in states], teacher.counted if teacher else ())
        now, without = memory.measure(states, data)
        if teacher is not None:
            now, without = features.with_feature_loss(now, without, states, teacher, settings, image)
            cached = settings.teacher_cache is not None
            now, without = with_teacher(now, without, teacher, settings, image, cached=cached)
        distillation = partial(Distillation, labelled_share=data.labelled_share)
        layout = remote.layout if remote else None
        views = settings.teacher_cache.views if settings.teacher_cache else None
        if bank is not None and settings.probe_seconds:
            views = settings.views_per_decode  # the first ones: the probe repeats one batch of these
        bare = distillation(students.bare, teacher and teacher.eager(), timeline=Timeline(world.device))
        opened = fitting_loaders(bare, states, data, now, without, run, views=views)
        del bare  # it holds what it answered last
        loaders = opened(settings, log=log)
        run.record.passed("memory")
        features.require_enough(settings, loaders.train_batches.batch_size_per_device)
        cache = taught = None
        if bank is not None:
            bank.require_answers(loaders.train_batches, steps)
            cache, taught = bank.cache, bank.about()
            log(bank.summary())
        if settings.probe_seconds:  # without a cache that a teacher fills: the probe measures the filling pass
            task = distillation(students.trained, teacher, cache, timeline=run.timeline, layout=layout)
            alone = distillation(students.trained, timeline=run.timeline) if teacher else None
            return probe.measure(task, states, loaders, opened, run, without_teacher=alone)

        teacher_logits: list[torch.Tensor] | None = None
        asked = teacher or remote
        if asked is not None:
            teacher_logits = []
            metrics = evaluate(asked, held_out_for_teacher(settings, data, loaders, world), world, keep=teacher_logits)
            taught = acceptance.accept(
                asked, metrics, settings.min_teacher_accuracy, settings.teacher_number_format, log
            )
            run.record.passed("teacher")
        if teacher is not None:
            cache = open_cache(settings, teacher, data, environment, world)
            run.record.passed("label_bank")
            if cache is not None:
                log(cache.summary())
        if taught is not None:
            run.checkpoints.belong_to(acceptance.identity(taught))
        task = distillation(students.trained, teacher, cache, timeline=run.timeline, layout=layout)
        measure = partial(
            evaluate,
            loader=loaders.validation,
            world=world,
            autocast=states[0].precision.autocast,
            teacher_logits=teacher_logits,
        )
        outcome = train(task, measure, states, loaders, steps, run)
        if cache is not None:
            cache.close()
        deliver(
            outcome,
            students.delivered,
            data,
            run,
            image_size=settings.image_size,
            measured={"teacher": taught},
        )


if __name__ == "__main__":
    main(read_settings(DistillationSettings))

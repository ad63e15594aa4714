"""Distil a frozen teacher into a light student on its output logits.

    In a job:         launcher run configs/quickstart.yaml            (the teacher: configs/quickstart_teacher.yaml)
    In a shell:       SM_CHANNEL_TRAIN=data/digits/train SM_CHANNEL_VALIDATION=data/digits/validation SM_CHANNEL_TEACHER=output/model \\
                      python entrypoints/train_kd.py --student vit_tiny_patch16_224 --epochs 5
    On many devices:  the same behind `torchrun --nproc_per_node 8`

The loss is `hard_label_weight` × cross-entropy with the labels + the rest × the teacher's part, by default the temperature KL
of Hinton et al. (https://arxiv.org/abs/1503.02531). Both models look at the same augmented pixels, each with its own
normalisation and resolution. With `teacher_cache` the teacher runs once for each view of an image, with `teacher_servers` on the hosts
that make the images.
"""

from functools import partial

import torch
from training.engine import memory, probe
from training.engine.delivery import deliver, require_packages
from training.engine.fitting import fitting_loaders
from training.engine.loop import train
from training.engine.run import started, total_steps
from training.engine.state import prepare
from training.measure.timeline import Timeline
from training.models import start, timm_models
from training.servers.serving import serve, serves
from training.settings import read_settings
from training.settings.scripts import DistillationSettings
from training.tasks.distillation import (
    Distillation,
    ask_servers,
    held_out_for_teacher,
    load_teacher,
    open_cache,
    open_images,
    with_teacher,
)
from training.tasks.evaluation import evaluate
from training.teacher import acceptance


def main(settings: DistillationSettings) -> None:
    if serves(settings):
        return serve(settings)
    with started(settings) as (settings, run):
        require_packages(settings)
        environment, world, say = run.environment, run.world, run.report.say
        torch.manual_seed(settings.seed)
        channels = settings.student_options.get("in_chans", 3)
        data = open_images(settings, environment, channels)
        run.report.say_all(data.notes)
        student = start.build(
            settings.student,
            settings.student_options,
            data.classes,
            settings.pretrained,
            environment,
            image_size=settings.image_size,
        )
        say(
            f"student {settings.student}: {timm_models.parameter_count(student):,} parameters, {len(data.classes)} classes"
        )
        steps = total_steps(settings, data.epoch_images)
        state = prepare(student, settings, steps, world)
        now, without = memory.measure(state, settings, data)
        teacher = remote = None
        if settings.teacher_servers is not None:
            remote = ask_servers(settings, data, channels, run)
        elif settings.teacher_weight > 0:
            teacher = load_teacher(settings, environment, data.classes, channels).to(world.device)
            cached, image = settings.teacher_cache is not None, memory.example(data, world.device)
            now, without = with_teacher(now, without, teacher, settings, image, cached=cached)
        distillation = partial(Distillation, settings=settings, labelled_share=data.labelled_share)
        bare = distillation(state.model, teacher and teacher.eager(), timeline=Timeline(world.device))
        layout = remote.layout if remote else None
        views = settings.teacher_cache.views if settings.teacher_cache else None
        opened = fitting_loaders(bare, state, data, now, without, run, views=views)
        loaders = opened(settings, say=say)
        if settings.probe_seconds:  # without a cache: measured is the pass that fills it
            task = distillation(state.trained, teacher, timeline=run.timeline, layout=layout)
            alone = distillation(state.trained, timeline=run.timeline) if teacher else None
            return probe.measure(task, state, loaders, opened, run, without_teacher=alone)

        cache = taught = None
        teacher_logits: list[torch.Tensor] | None = None
        asked = teacher or remote
        if asked is not None:
            teacher_logits = []
            metrics = evaluate(asked, held_out_for_teacher(settings, data, loaders, world), world, keep=teacher_logits)
            taught = acceptance.accept(
                asked, metrics, settings.min_teacher_accuracy, settings.teacher_number_format, say
            )
        if teacher is not None:
            cache = open_cache(settings, teacher, data, environment, world)
            if cache is not None:
                say(cache.say())
        task = distillation(state.trained, teacher, cache, timeline=run.timeline, layout=layout)
        measure = partial(
            evaluate,
            loader=loaders.validation,
            world=world,
            autocast=state.precision.autocast,
            teacher_logits=teacher_logits,
        )
        torch.manual_seed(settings.seed + 1 + world.rank)  # dropout differs between ranks, and not with the teacher
        outcome = train(task, measure, state, loaders, steps, run)
        if cache is not None:
            cache.close()
        deliver(
            outcome,
            state,
            data,
            run,
            name=settings.student,
            options=settings.student_options,
            image_size=settings.image_size,
            measured={"teacher": taught},
        )


if __name__ == "__main__":
    main(read_settings(DistillationSettings))

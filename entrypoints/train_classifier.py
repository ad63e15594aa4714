"""Train a timm model on labelled images.

    In a job:         launcher run configs/quickstart_teacher.yaml
    In a shell:       SM_CHANNEL_TRAIN=data/digits/train SM_CHANNEL_VALIDATION=data/digits/validation \\
                      python entrypoints/train_classifier.py --model vit_tiny_patch16_224 --epochs 5
    On many devices:  the same under `torchrun --nproc_per_node 8`
"""

from dataclasses import replace
from functools import partial

import torch
from training.data.views import open_data
from training.engine import memory, probe
from training.engine.compiling import decide_compiling
from training.engine.delivery import Trained, deliver, require_exportable, require_packages
from training.engine.fitting import fitting_loaders
from training.engine.loop import train
from training.engine.run import count_arithmetic, started, total_steps
from training.engine.state import prepare
from training.measure.timeline import Timeline
from training.measure.usage import hardware
from training.models import start, timm_models
from training.servers.serving import serve, serves
from training.settings import read_settings
from training.settings.scripts import ClassifierSettings
from training.tasks.classification import Classification
from training.tasks.evaluation import evaluate


def main(settings: ClassifierSettings) -> None:
    if serves(settings):
        return serve(settings)
    with started(settings) as (settings, run):
        require_packages(settings)
        environment, world, log = run.environment, run.world, run.report.log
        torch.manual_seed(settings.seed)
        open_images = partial(
            open_data,
            environment.channel("train"),
            environment.channel("validation"),
            channels=settings.model_options.get("in_chans", 3),
            output=environment.output_data_dir,
        )
        data = open_images(settings)
        run.report.log_all(data.notes)
        run.record.passed("images")
        model = start.build(settings.model, settings.model_options, data.classes, settings.pretrained, environment)
        if settings.trained_layers == "head":
            model.train_head_alone()
        log(f"model {settings.model}: {timm_models.parameter_count(model):,} parameters, {len(data.classes)} classes")
        steps = total_steps(settings, data.epoch_images)
        settings, run = decide_compiling(settings, run, trained=steps)
        state = prepare(model, settings, steps, world)
        require_exportable(settings, [state])
        run.record.passed("models")
        count_arithmetic(run, memory.example(data, world.device), [state.counted])
        now, without = memory.measure([state], data)
        bare = Classification(state.model, settings.label_smoothing, Timeline(world.device))
        opened = fitting_loaders(bare, [state], data, now, without, run)
        loaders = opened(settings, log=log)
        run.record.passed("memory")
        probed = {}
        if settings.probe_input_images:
            alone = loaders
            if settings.probe_image_size is not None:
                other = replace(settings, image_size=settings.probe_image_size)
                alone = opened(other, open_images(other))
            probed = probe.input_alone(alone, settings.probe_input_images, world, crowd=alone.crowd)
            del alone  # and its worker processes
        if settings.repeat_batch:
            log("repeat_batch: every step repeats the first batch; this run measures the model and teaches it nothing")
            loaders = replace(loaders, train=probe.RepeatedBatch(loaders.train))
        task = Classification(state.trained, settings.label_smoothing, run.timeline)
        if settings.probe_seconds:
            return probe.measure(task, [state], loaders, opened, run)

        measure = partial(evaluate, loader=loaders.validation, world=world, autocast=state.precision.autocast)
        outcome = train(task, measure, [state], loaders, steps, run)
        deliver(
            outcome,
            [Trained(state, settings.model, settings.model_options)],
            data,
            run,
            image_size=settings.image_size,
            measured={"hardware": hardware(world.device), **probed},
        )


if __name__ == "__main__":
    main(read_settings(ClassifierSettings))

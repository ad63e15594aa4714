"""Train a timm model on labelled images.

    In a job:         launcher run configs/quickstart_teacher.yaml
    In a shell:       SM_CHANNEL_TRAIN=data/digits/train SM_CHANNEL_VALIDATION=data/digits/validation \\
                      python entrypoints/train_classifier.py --model vit_tiny_patch16_224 --epochs 5
    On many devices:  the same behind `torchrun --nproc_per_node 8`
"""

import torch
from training import distributed, export, models, reporting
from training.data.folders import open_data
from training.environment import read_environment
from training.evaluation import evaluate
from training.failure import failure_file
from training.loop import distribute, train
from training.losses import label_cross_entropy
from training.script_settings import ClassifierSettings
from training.settings import read_settings
from training.stopping import StopSignal


def main(settings: ClassifierSettings) -> None:
    environment = read_environment()
    with distributed.process_group() as world, failure_file(environment.failure_file):
        report = reporting.Reporter(environment.output_data_dir, active=world.is_first)
        report.say(str(world))
        stop = StopSignal(world)
        torch.manual_seed(settings.seed)
        data = open_data(
            environment.channel("train"),
            environment.channel("validation"),
            settings,
            settings.model_options.get("in_chans", 3),
            world,
        )
        model = models.build(settings.model, settings.model_options, len(data.classes), pretrained=settings.pretrained)
        report.say(f"{settings.model}: {models.parameter_count(model):,} parameters, {len(data.classes)} classes")
        trained = distribute(model, world)

        def task(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": label_cross_entropy(trained(images), labels, settings.label_smoothing)}

        torch.manual_seed(settings.seed + 1 + world.rank)  # dropout differs between ranks, and not with the teacher
        outcome = train(task, evaluate, model, data, settings, world, report, stop)
        summary = reporting.summary(settings.model, models.parameter_count(model), outcome, settings, world)
        if world.is_first:
            export.save(
                model,
                environment.model_dir,
                name=settings.model,
                options=settings.model_options,
                classes=data.classes,
                image_size=settings.image_size,
                **outcome.validation,
            )
        report.result(summary)


if __name__ == "__main__":
    main(read_settings(ClassifierSettings))

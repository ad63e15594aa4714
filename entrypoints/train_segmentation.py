"""Train a model that gives every pixel a class, from images and masks.

    In a job:         launcher run CONFIG, with script: train_segmentation.py
    In a shell:       SM_CHANNEL_TRAIN=data/shapes/train SM_CHANNEL_VALIDATION=data/shapes/validation \\
                      python entrypoints/train_segmentation.py --model resnet10t --classes 4 --image_size "[64, 64]"
    On many devices:  the same behind `torchrun --nproc_per_node 8`

A channel holds images/…/<name>.jpg or .png, and masks/…/<name>.png, whose pixels are class numbers; `ignore_index` marks the
ones that nobody labelled. `launcher prepare shapes data/shapes` makes such a folder.
"""

from functools import partial

import torch
from training import distributed, export, models, reporting, segmenter
from training.data.masks import open_data
from training.environment import read_environment
from training.evaluation import evaluate_pixels
from training.failure import failure_file
from training.loop import distribute, train
from training.losses import pixel_cross_entropy
from training.script_settings import SegmentationSettings
from training.settings import read_settings
from training.stopping import StopSignal


def main(settings: SegmentationSettings) -> None:
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
        model = segmenter.build(
            settings.model,
            settings.model_options,
            settings.classes,
            decoder_channels=settings.decoder_channels,
            pretrained=settings.pretrained,
        )
        report.say(f"{settings.model}: {models.parameter_count(model):,} parameters, {settings.classes} classes")
        trained = distribute(model, world)

        def task(images: torch.Tensor, masks: torch.Tensor) -> dict[str, torch.Tensor]:
            masks = masks.long()
            labelled = world.total((masks != settings.ignore_index).sum()) / world.size
            return {"loss": pixel_cross_entropy(trained(images), masks, settings.ignore_index, labelled)}

        evaluate = partial(evaluate_pixels, classes=settings.classes, ignore_index=settings.ignore_index)
        torch.manual_seed(settings.seed + 1 + world.rank)  # dropout differs between ranks
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
                decoder_channels=settings.decoder_channels,
                ignore_index=settings.ignore_index,
                **outcome.validation,
            )
        report.result(summary)


if __name__ == "__main__":
    main(read_settings(SegmentationSettings))

"""Fill a label bank: a frozen teacher's per-pixel answers for every view that train_segmentation.py would draw, without a student.

    In a job:         launcher label CONFIG, a config of train_segmentation.py with teacher_cache
    In a shell:       SM_CHANNEL_TRAIN=data/shapes/train SM_CHANNEL_VALIDATION=data/shapes/validation SM_CHANNEL_TEACHER=output/model \\
                      python entrypoints/label_pixels.py --model resnet10t --classes 4 --image_size "[64, 64]" --hard_label_weight 0.5 \\
                      --teacher_cache '{"views": 8}'
    On many devices:  the same under `torchrun --nproc_per_node 8`

If it is killed, a restart computes only what is missing. A training run with the same settings finds all its answers there.
"""

from training.data.masks import open_data
from training.engine.compiling import decide_compiling
from training.engine.memory import example
from training.engine.run import count_arithmetic, started
from training.models import precision
from training.servers.serving import serve, serves
from training.settings import read_settings
from training.settings.segmentation import PixelLabellingSettings
from training.tasks.distillation import teacher_steps
from training.tasks.features import asked_of
from training.tasks.labelling import deliver_bank, label, labelling_loaders, memory_needed
from training.tasks.segmentation import load_teacher, measured, open_cache, whole_images
from training.teacher import acceptance
from training.teacher.pixel_records import PixelLayout


def main(settings: PixelLabellingSettings) -> None:
    if serves(settings):
        return serve(settings)
    with started(settings) as (settings, run):
        environment, world, log = run.environment, run.world, run.report.log
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
        settings, run = decide_compiling(settings, run, answered=teacher_steps(settings, data))
        precision.choose_tf32(settings.precision, world.device)  # as in training, which uses these answers
        teacher = load_teacher(settings, environment, data.classes, channels).to(world.device)
        run.record.passed("models")
        bank = open_cache(settings, teacher, data, environment, world)
        run.record.passed("label_bank")
        assert bank is not None and isinstance(bank.layout, PixelLayout), "as the settings say"
        image = example(data, world.device)
        count_arithmetic(run, image, [], teacher.counted)
        needed = memory_needed(teacher, data, world.device, bank.layout.packing_bytes)
        whole = whole_images(settings, image, teacher=teacher)
        loaders = labelling_loaders(data, needed, bank.views, run, whole)
        run.record.passed("memory")
        found = measured(teacher, loaders.validation, settings, data.classes, world)
        taught = acceptance.accept(teacher, found, settings.min_teacher_miou, settings.teacher_number_format, log)
        run.record.passed("teacher")
        log(bank.summary())
        deliver_bank(bank, label(asked_of(teacher, settings), bank, loaders, run), data, run, taught)


if __name__ == "__main__":
    main(read_settings(PixelLabellingSettings))

"""Fill a label bank: a frozen teacher's answers for every view that train_kd.py would draw, without a student.

    In a job:         launcher label configs/vit_student.yaml         (a config of train_kd.py with teacher_cache)
    In a shell:       SM_CHANNEL_TRAIN=data/digits/train SM_CHANNEL_VALIDATION=data/digits/validation SM_CHANNEL_TEACHER=output/model \\
                      python entrypoints/label_images.py --student vit_tiny_patch16_224 --teacher_cache '{"views": 8}'
    On many devices:  the same under `torchrun --nproc_per_node 8`

If it is killed, a restart computes only what is missing. A training run with the same settings finds all its answers there.
"""

from training.engine.compiling import decide_compiling
from training.engine.memory import example
from training.engine.run import count_arithmetic, started
from training.models import precision
from training.servers.serving import serve, serves
from training.settings import read_settings
from training.settings.distillation import LabellingSettings
from training.tasks.distillation import held_out_for_teacher, load_teacher, open_cache, open_images, teacher_steps
from training.tasks.evaluation import evaluate
from training.tasks.features import asked_of
from training.tasks.labelling import deliver_bank, label, labelling_loaders, memory_needed
from training.teacher import acceptance


def main(settings: LabellingSettings) -> None:
    if serves(settings):
        return serve(settings)
    with started(settings) as (settings, run):
        environment, world, log = run.environment, run.world, run.report.log
        channels = settings.image_channels
        data = open_images(settings, environment, channels)
        run.report.log_all(data.notes)
        run.record.passed("images")
        settings, run = decide_compiling(settings, run, answered=teacher_steps(settings, data))
        precision.choose_tf32(settings.precision, world.device)  # as in training, which uses these answers
        teacher = load_teacher(settings, environment, data.classes, channels).to(world.device)
        run.record.passed("models")
        bank = open_cache(settings, teacher, data, environment, world)
        run.record.passed("label_bank")
        assert bank is not None, "as the settings say"
        count_arithmetic(run, example(data, world.device), [], teacher.counted)
        loaders = labelling_loaders(data, memory_needed(teacher, data, world.device), bank.views, run)
        run.record.passed("memory")
        metrics = evaluate(teacher, held_out_for_teacher(settings, data, loaders, world), world)
        taught = acceptance.accept(teacher, metrics, settings.min_teacher_accuracy, settings.teacher_number_format, log)
        run.record.passed("teacher")
        log(bank.summary())
        deliver_bank(bank, label(asked_of(teacher, settings), bank, loaders, run), data, run, taught)


if __name__ == "__main__":
    main(read_settings(LabellingSettings))

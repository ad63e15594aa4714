"""Distil a frozen teacher into a light student on its output logits.

    In a job:         launcher run configs/quickstart.yaml            (the teacher: configs/quickstart_teacher.yaml)
    In a shell:       SM_CHANNEL_TRAIN=data/digits/train SM_CHANNEL_VALIDATION=data/digits/validation SM_CHANNEL_TEACHER=output/model \\
                      python entrypoints/train_kd.py --student vit_tiny_patch16_224 --epochs 5
    On many devices:  the same behind `torchrun --nproc_per_node 8`

The loss is `hard_label_weight` × cross-entropy with the labels + the rest × temperature KL with the teacher
(https://arxiv.org/abs/1503.02531). Both models look at the same augmented pixels, each with its own normalisation.
"""

import torch
from training import distributed, export, models, reporting
from training import teacher as teachers
from training.data.folders import open_data
from training.environment import read_environment
from training.evaluation import evaluate
from training.failure import failure_file
from training.loop import distribute, train
from training.losses import label_cross_entropy, temperature_kl
from training.script_settings import DistillationSettings
from training.settings import read_settings
from training.stopping import StopSignal


def main(settings: DistillationSettings) -> None:
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
            settings.student_options.get("in_chans", 3),
            world,
        )
        student = models.build(
            settings.student, settings.student_options, len(data.classes), pretrained=settings.pretrained
        )
        report.say(
            f"student {settings.student}: {models.parameter_count(student):,} parameters, {len(data.classes)} classes"
        )
        trained = distribute(student, world)
        teacher, teacher_summary = None, None
        if settings.hard_label_weight < 1:
            teacher = teachers.load(
                environment.channel("teacher"),
                data.classes,
                channels=student.mean.shape[1],
                image_size=settings.image_size,
                name=settings.teacher,
                options=settings.teacher_options,
            )
            teacher.model.to(world.device)
            accuracy = evaluate(teacher.model, data.validation, world)["validation_accuracy"]
            teacher_summary = {
                "model": teacher.name,
                "parameters": models.parameter_count(teacher.model),
                "validation_accuracy": accuracy,
            }
            report.say(
                f"teacher {teacher.name}: {teacher_summary['parameters']:,} parameters, frozen, validation_accuracy {accuracy:.4f}"
            )

        def task(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = trained(images)
            hard = label_cross_entropy(logits, labels, settings.label_smoothing)
            if teacher is None:
                return {"loss": hard}
            soft = temperature_kl(logits, teacher(images), settings.temperature)
            return {
                "loss": settings.hard_label_weight * hard + (1 - settings.hard_label_weight) * soft,
                "label_loss": hard,
                "teacher_loss": soft,
            }

        torch.manual_seed(settings.seed + 1 + world.rank)  # dropout differs between ranks, and not with the teacher
        outcome = train(task, evaluate, student, data, settings, world, report, stop)
        summary = reporting.summary(settings.student, models.parameter_count(student), outcome, settings, world)
        if world.is_first:
            export.save(
                student,
                environment.model_dir,
                name=settings.student,
                options=settings.student_options,
                classes=data.classes,
                image_size=settings.image_size,
                **outcome.validation,
            )
        report.result({**summary, "teacher": teacher_summary})


if __name__ == "__main__":
    main(read_settings(DistillationSettings))

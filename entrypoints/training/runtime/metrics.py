"""Every metric and phase of the kit's scripts, declared once. Standard library only: the launcher reads this very table.

A metric is a number of the line that people read, `epoch 3/60 step 40/1260 loss 0.1234 images/s 512.3 …`, and of metrics.jsonl. A phase
is a part of a training step, whose seconds are in each rank's timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

NAME, NUMBER = r"[A-Za-z_/0-9]+", r"-?(?:\d+\.?\d*|nan|inf)"
"""Regular expressions for a metric line's names and numbers, after its epoch and step."""

LINE = (
    r"^epoch (?P<epoch>\d+)/(?P<epochs>\d+) step (?P<step>\d+)/(?P<steps>\d+)"
    rf"(?P<rest>(?: {NAME} {NUMBER})*)$"
)
"""Regular expression of a whole metric line."""

PAIR = f" ({NAME}) ({NUMBER})"
"""Regular expression of one metric in it."""


class Metric(NamedTuple):
    """One number of a metric line."""

    name: str
    """In the line and in metrics.jsonl."""
    unit: str
    """Empty for a pure number; `fraction` is 0 to 1."""
    meaning: str
    signed: bool = False
    """Whether it may be negative."""
    sagemaker: str | None = ""
    """Its name as a metric of a training job. Empty: `name`; None: SageMaker is not asked for it."""
    shown: str = ""
    """How a progress line shows it. Empty: it does not."""
    is_curve: bool = False
    """Whether the launcher keeps every value, not only the latest."""
    phase: str = ""
    """The phase whose seconds it reports."""

    @property
    def expression(self) -> str:
        """The regular expression by which SageMaker finds it in a line."""
        return f" {self.name} ({'-?' if self.signed else ''}[0-9.]+)"


class Phase(NamedTuple):
    """A part of a training step."""

    name: str
    meaning: str
    on_host: bool = False
    """Whether the host's clock measures it, even if the steps run on a GPU."""
    inside: str = ""
    """The phase that it is a part of."""
    computes: bool = False
    """Whether the device computes in it."""


LOSS = Metric("loss", "", "What training lowers", signed=True, shown="loss {:.4f}", is_curve=True)
LEARNING_RATE = Metric("learning_rate", "", "Of the step, after the schedule")
IMAGES_PER_SECOND = Metric(
    "images/s", "images/s", "Over all processes", sagemaker="images_per_second", shown="{:.0f} images/s"
)
MFU = Metric(
    "mfu",
    "fraction",
    "Model FLOP utilisation: the models' own arithmetic, of what the device could do in that time; where its peak is known",
    shown="MFU {:.0%}",
)
VALIDATION_LOSS = Metric("validation_loss", "nats", "Cross-entropy on the held-out images", signed=True)
ACCURACY = Metric(
    "validation_accuracy", "fraction", "Held-out images of the right class", shown="accuracy {:.1%}", is_curve=True
)
TOP5_ACCURACY = Metric("validation_top5_accuracy", "fraction", "Held-out images whose class is among the first five")
MIOU = Metric("validation_miou", "fraction", "Mean intersection over union", shown="mIoU {:.1%}", is_curve=True)
PIXEL_ACCURACY = Metric("validation_pixel_accuracy", "fraction", "Labelled pixels of the right class")
TEACHER_TOP1 = Metric("teacher_top1_agreement", "fraction", "Images to which student and teacher give one class")
TEACHER_TOP5 = Metric(
    "teacher_top5_agreement",
    "fraction",
    "Images whose class by the teacher is among the student's first five",
    sagemaker=None,
)
TEACHER_KL = Metric("teacher_kl", "nats", "Mean KL(teacher ‖ student) at temperature 1")
TEACHER_SHARE = Metric("teacher_share", "fraction", "Of a step's time, the teacher's forward pass")
LABELS_FOUND = Metric(
    "labels_found", "images", "Answers that the label bank held already", sagemaker=None, shown="{:.0f} found"
)
LABELS_COMPUTED = Metric("labels_computed", "images", "Answers that the teacher gave", shown="{:.0f} computed")
MEMORY = Metric(
    "memory_gib", "GiB", "The most that the process has held: of its GPU, or of main memory", sagemaker=None
)
EVALUATE_SECONDS = Metric("evaluate_s", "s", "An evaluation", sagemaker=None, phase="evaluate")
CHECKPOINT_SECONDS = Metric("checkpoint_s", "s", "The pause for a checkpoint", sagemaker=None, phase="checkpoint")

METRICS = (
    LOSS,
    Metric("label_loss", "nats", "The labels' part of the loss", signed=True),
    Metric("teacher_loss", "nats", "The teacher's part of the loss", signed=True),
    Metric("feature_loss", "", "The features' part of the loss, not weighted"),
    *(
        Metric(name, "", meaning, signed=True, sagemaker=None)
        for name, meaning in (
            ("dkd_target", "DKD: the target class's part, weighted"),
            ("dkd_nontarget", "DKD: the other classes' part, weighted"),
            ("dist_inter", "DIST: the relation between an image's classes, weighted"),
            ("dist_intra", "DIST: the relation between a class's images, weighted"),
            ("cross_entropy", "Segmentation with Dice: the cross-entropy's part"),
            ("dice_loss", "Segmentation with Dice: the Dice loss, without its weight"),
        )
    ),
    LEARNING_RATE,
    VALIDATION_LOSS,
    ACCURACY,
    TOP5_ACCURACY,
    MIOU,
    PIXEL_ACCURACY,
    TEACHER_TOP1,
    TEACHER_TOP5,
    TEACHER_KL,
    LABELS_FOUND,
    LABELS_COMPUTED,
    IMAGES_PER_SECOND,
    MFU,
    Metric("steps/s", "steps/s", "Of a script that the observer follows", sagemaker=None, shown="{:.3g} steps/s"),
    TEACHER_SHARE,
    Metric("data_wait_s", "s", "Waiting for data, a step", phase="data_wait"),
    Metric("teacher_forward_s", "s", "The teacher's forward pass, a step", sagemaker=None, phase="teacher_forward"),
    Metric("student_forward_s", "s", "The trained model's forward pass, a step", phase="student_forward"),
    Metric("backward_s", "s", "The backward pass, a step", phase="backward"),
    MEMORY,
    EVALUATE_SECONDS,
    CHECKPOINT_SECONDS,
)
"""Every metric of a line, in the order in which people read them."""

PHASES = (
    Phase("data_wait", "The process waits for its next batch", on_host=True),
    Phase("host_to_device", "The batch is copied to the device"),
    Phase("augment", "Images are varied on the device", computes=True),
    Phase(
        "buffer_sync", "Buffers, such as a batch norm's statistics, are made equal on all ranks before a forward pass"
    ),
    Phase("teacher_forward", "The teacher's forward pass", computes=True),
    Phase("student_forward", "The trained model's forward pass, where there may be a teacher", computes=True),
    Phase("forward", "The forward pass", computes=True),
    Phase("loss", "The losses are computed from the logits", computes=True),
    Phase("backward", "The backward pass, with the exchange of gradients that it hides", computes=True),
    Phase("grad_sync", "Gradients are exchanged after the backward pass is over on this rank", inside="backward"),
    Phase("optimizer", "Gradients are clipped and the optimizer steps", computes=True),
)
"""Parts of a step, in their order. The kit's scripts have no `augment`, no `buffer_sync` and no `forward`; a user's script may."""

START = {
    "imports": "Python, imports, and the processes finding each other",
    "images": "listing the images",
    "models": "making the models and reading their weights",
    "memory": "measuring a step's memory and opening the loaders",
    "teacher": "evaluating the teacher",
    "label_bank": "opening the label bank",
    "checkpoint": "reading a checkpoint",
    "first_step": "the first batch and the first step, with what it compiles",
}
"""Parts of the time from a process's start to the end of its first step, in their order, and what happens in each."""

PAUSES = ("evaluate", "checkpoint")
"""What happens between two steps, in its order; a rank's timeline has a line for each."""

STEP_LINE = tuple(f"{phase.name}_s" for phase in PHASES if any(metric.phase == phase.name for metric in METRICS))
"""Metrics of a step's line that are seconds of phases; the others are in metrics.jsonl alone."""


OF_EACH = (ACCURACY, LOSS, TEACHER_TOP1, VALIDATION_LOSS, TEACHER_KL, TOP5_ACCURACY, TEACHER_TOP5)
"""What a line shows of each of several models, most important first: SageMaker is asked for the first ones. metrics.jsonl has the rest."""

SAGEMAKER_AT_MOST = 40
"""Metric definitions of a training job:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_AlgorithmSpecification.html"""


def of_model(model: str, name: str) -> str:
    """A metric's name in a line and in metrics.jsonl.

    Args:
        model: the model's name if a run trains several; empty if it trains one alone.
    """
    return f"{model}/{name}" if model else name


def line_of(found: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The models' metrics in a line, and those that only metrics.jsonl has.

    One model's metrics keep their names. Those of several are under `model/name`; the name alone is then their mean, so that
    whoever reads a line by that name sees one curve.

    Args:
        found: by the model's name, numbers by the metric's.
    """
    if len(found) == 1 and "" in found:
        return dict(found[""]), {}
    names = [metric.name for metric in OF_EACH if all(metric.name in values for values in found.values())]
    printed = {name: sum(values[name] for values in found.values()) / len(found) for name in names}
    unprinted: dict[str, float] = {}
    for model, values in found.items():
        for name, value in values.items():
            (printed if name in names else unprinted)[of_model(model, name)] = value
    return printed, unprinted


def sagemaker_metrics(models: Sequence[str] = ()) -> dict[str, str]:
    """A training job's metrics: name -> regular expression.

    Args:
        models: the names if the job trains several. Each gets as many metrics as there is room for; MFU is left out to make some.
    """
    left_out = (MFU,) if models else ()
    asked = {
        metric.sagemaker or metric.name: metric.expression
        for metric in METRICS
        if metric.sagemaker is not None and metric not in left_out
    }
    room = (SAGEMAKER_AT_MOST - len(asked)) // len(models) if models else 0
    each = [metric for metric in OF_EACH if metric.sagemaker is not None][:room]
    return asked | {
        f"{model}:{metric.name}": metric._replace(name=of_model(model, metric.name)).expression
        for model in models
        for metric in each
    }

"""What a change of a setting can touch: phases of a step, pauses, the start. What it cannot touch is a comparison's control."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

START = "start"
"""What comes before the first step: imports, lists of files, workers, compilation ahead of time."""

CODE, INPUTS, ENVIRONMENT, THREADS, BACKEND = "code", "inputs", "environment", "threads", "backend"
SERVING = "serving_groups"
"""Facts of a run that may change as settings do: the source package, the config's inputs and environment variables, a process's compute
threads, what exchanges gradients, and the hosts that prepare images."""


class Touch(NamedTuple):
    """What settings of one kind can touch."""

    names: tuple[str, ...]
    phases: tuple[str, ...] | None
    """Of a step, pauses and START. None: all of them. Waiting for data is not named, since everything touches it: the longer a step is,
    the more of the workers' time it hides."""
    why: str
    by_workers: bool = False
    """Whether the data workers' load changes, or which phase it coincides with. It touches every phase if they share cores with the
    training process, or its Python lock."""
    is_another_job: bool = False
    """Whether the job is then another one, whose speed says nothing about this one's."""

    @property
    def takes_time(self) -> bool:
        """Whether it can touch anything at all."""
        return self.by_workers or self.phases is None or bool(self.phases)

    def can_touch(self, phase: str) -> bool:
        return self.phases is None or phase in self.phases


MODEL = ("student_forward", "forward", "loss", "backward")
"""Phases of the trained model's arithmetic; `forward` of an observed script may hold a teacher's."""

TOUCHES = (
    Touch(
        ("num_workers", "prefetch_factor", "persistent_workers"),
        (START,),
        "workers make the batches",
        by_workers=True,
    ),
    Touch(
        (
            *("augmentation_load", "compose_augmentation", "min_crop_area", "max_shift_pixels", "max_rotation_degrees"),
            *(
                "min_scale",
                "max_scale",
                "horizontal_flip",
                "on_broken_image",
                "shuffle_window_shards",
                "shard_cache_gb",
            ),
            *("images_per_class", INPUTS),
        ),
        (START, "evaluate"),
        "workers read and vary the images",
        by_workers=True,
    ),
    Touch(("pin_memory",), ("host_to_device",), "only the copy to the device starts from other memory"),
    Touch(("numa_binding",), None, "the process and its workers use other cores"),
    Touch(("copy_stream",), None, "copies to the device run beside the model's kernels"),
    Touch(("late_metrics",), None, "the device goes on while the host reads metrics"),
    Touch(
        ("precision", "matmul_precision"),
        ("augment", "teacher_forward", *MODEL, "optimizer", "evaluate"),
        "the device computes with other numbers",
    ),
    Touch(("compile",), (START, *MODEL, "evaluate"), "the trained model's kernels are others"),
    Touch(("cuda_graphs",), (START, "teacher_forward", *MODEL), "what is compiled is launched in another way"),
    Touch(
        ("channels_last",),
        (START, "host_to_device", "augment", *MODEL, "evaluate"),
        "images and weights lie in another order",
    ),
    Touch(
        ("cudnn_benchmark",),
        (START, "teacher_forward", *MODEL, "evaluate"),
        "convolutions are computed by other algorithms, which are timed at first",
    ),
    Touch(
        ("teacher_cache", "teacher_precision", "compile_teacher"),
        (START, "teacher_forward", "loss"),
        "only what the teacher says is made in another way",
        by_workers=True,  # without the teacher's arithmetic, they share their cores with the student's
    ),
    Touch(
        ("method", "temperature", "standardize_logits", "hard_label_weight", "teacher_loss_weight", "label_smoothing"),
        ("loss", "backward"),
        "only the losses differ",
    ),
    Touch(
        ("optimizer", "zero", "max_grad_norm", "ema_decay"),
        (START, "optimizer", "evaluate", "checkpoint"),
        "gradients are used in another way",
    ),
    Touch(
        ("gradient_compression", "static_graph", BACKEND),
        (START, "buffer_sync", "backward", "optimizer"),
        "gradients are exchanged in another way",
    ),
    Touch(
        ("checkpoint_every", "keep_checkpoints", "checkpoints"),
        ("checkpoint",),
        "checkpoints are written between steps",
    ),
    Touch(("checkpoint_writing",), None, "a thread may write checkpoints beside the steps"),
    Touch(
        ("evaluate_every",), ("evaluate", "checkpoint"), "evaluations, and checkpoints before them, lie between steps"
    ),
    Touch(
        (
            *("epochs", "max_steps", "learning_rate", "lr", "warmup_fraction", "weight_decay", "seed"),
            *("class_names", "class_colours", "overlays", "export_onnx", "min_teacher_accuracy", "min_teacher_miou"),
            *("pretrained", "name", "run_name", "output", "output_dir", "log_dir", "save_dir", "process_group_minutes"),
        ),
        (),
        "no step takes longer or shorter by it",
    ),
    Touch(
        (SERVING, "without_servers"),
        (START,),
        "other hosts make the batches",
        by_workers=True,  # on one machine they share its cores
    ),
    Touch(
        ("worker_type",),
        None,
        "threads hold Python's lock, which the training thread needs; with remote, other hosts make the batches",
    ),
    Touch(("teacher_stream",), None, "the teacher's kernels run beside the student's"),
    Touch(("teacher_servers",), None, "other hosts run the teacher, whose logits come with the images"),
    Touch(("preprocessing",), None, "images are prepared elsewhere, such as on the device"),
    Touch(("global_batch_size", "batch_size_per_device"), None, "every phase works on another number of images"),
    Touch(("log_every",), None, "to read a loss waits for the device"),
    Touch(("profile_steps", "profile_after"), None, "torch.profiler slows the steps that it records"),
    Touch((THREADS,), None, "all arithmetic on the CPU is divided in another way"),
    Touch((ENVIRONMENT,), None, "libraries read variables for anything"),
    Touch((CODE,), None, "what the code does in a step may be anything"),
    Touch(
        (
            *("model", "model_options", "student", "student_options", "teacher", "teacher_options"),
            *("image_size", "crop_size", "view_size", "decoder_channels", "classes"),
        ),
        None,
        "it is another job",
        is_another_job=True,
    ),
)
"""By kind of setting, under the kit's names. A setting in no row can touch everything."""

_BY_NAME = {name: touch for touch in TOUCHES for name in touch.names}

UNKNOWN = Touch((), None, "what it does is not known")


def touch_of(name: str) -> Touch:
    """What a setting can touch, under its name in a config or in a command: `num_workers`, `hyperparameters.lr`, `--output-dir`."""
    return _BY_NAME.get(name.removeprefix("hyperparameters.").removeprefix("--").replace("-", "_"), UNKNOWN)


def untouched(touches: Iterable[Touch], phases: Iterable[str], *, apart: bool) -> list[str]:
    """The phases of a step that none of these can touch.

    Args:
        phases: that were measured.
        apart: whether the data workers share neither cores nor a lock with the training process.
    """
    found = [*touches]
    if any(touch.by_workers for touch in found) and not apart:
        return []
    return [name for name in phases if not any(touch.can_touch(name) for touch in found)]

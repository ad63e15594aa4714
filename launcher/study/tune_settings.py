"""The settings that `launcher tune` may change: which keep the training's numbers as they are, which need to be allowed, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.config.issues import Issue, UserError, did_you_mean


@dataclass(frozen=True)
class Rule:
    """What a change of one setting does to the training."""

    same_numbers: bool
    """Whether it is tried without `--allow`. The losses of its trials are compared all the same; if they differ, it is kept only if
    it was allowed."""
    reason: str


RULES = {
    "num_workers": Rule(True, "the images of a batch do not depend on who prepares them"),
    "worker_type": Rule(True, "threads, processes, loader processes and other hosts prepare the same batches"),
    "log_every": Rule(True, "only how often the loss is read changes"),
    "pin_memory": Rule(True, "the same bytes, in memory that the GPU reads directly"),
    "copy_stream": Rule(True, "the same bytes, copied during the previous step"),
    "persistent_workers": Rule(True, "the same workers prepare the next epoch"),
    "prefetch_factor": Rule(True, "the same batches, prepared earlier"),
    "PYTORCH_CUDA_ALLOC_CONF": Rule(True, "memory is allocated differently; what is in it stays the same"),
    "precision": Rule(False, "fewer bits of each number"),
    "teacher_precision": Rule(False, "fewer bits of each of the teacher's numbers"),
    "matmul_precision": Rule(False, "fewer bits in matrix products"),
    "global_batch_size": Rule(False, "different gradients; the learning rate has to follow"),
    "batch_size": Rule(False, "different gradients; the learning rate has to follow"),
    "batch_size_per_device": Rule(
        False, "sums in a different order, and batch normalisation over a different number of images"
    ),
    "compile": Rule(False, "fused kernels sum in a different order"),
    "compile_teacher": Rule(False, "fused kernels sum in a different order"),
    "cuda_graphs": Rule(False, "the compiled code may differ, and sum in a different order"),
    "channels_last": Rule(False, "different kernels sum in a different order"),
    "cudnn_benchmark": Rule(False, "each run may choose different kernels, which sum in a different order"),
    "gradient_compression": Rule(False, "gradients are exchanged with fewer bits"),
    "teacher_cache": Rule(False, "images repeat their views, and the teacher's logits are rounded"),
    "compose_augmentation": Rule(False, "pixels are interpolated once instead of in each round"),
    "preprocessing": Rule(False, "a different decoder and interpolation: pixels differ slightly"),
    "OMP_NUM_THREADS": Rule(False, "sums are split differently among the threads"),
    "checkpoint_every": Rule(False, "the losses stay the same, but a run that is killed loses more steps"),
    "evaluate_every": Rule(False, "the losses stay the same, but there are fewer evaluations"),
}
"""By the setting's name, of the kit's scripts and of others."""


def check_allowed(allowed: Iterable[str]) -> frozenset[str]:
    """The names given to `--allow`. Raises UserError for unknown ones."""
    names = frozenset(allowed)
    unknown = [
        Issue(
            key="--allow", found=f"{name}: no such setting", valid=", ".join(RULES), fix=did_you_mean(name, list(RULES))
        )
        for name in sorted(names - {*RULES})
    ]
    if unknown:
        raise UserError(unknown)
    return names

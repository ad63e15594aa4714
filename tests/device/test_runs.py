"""Whole runs on the stand-in GPU: the CPU's numbers, all tensors on the device, and no wait between two log lines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.device.runs import CONVOLUTIONAL, CPU, RESNET, VIT, Runs, left_behind, same_numbers

EVERYTHING = {
    **{"mixup": 0.8, "cutmix": 1.0, "random_erasing": 0.5, "label_smoothing": 0.1, "min_crop_area": 0.5},
    **{"ema_decay": 0.9, "batch_size_per_device": 4, "max_grad_norm": 0.5},
}
DROPOUT = {**VIT, "drop_rate": 0.2}
GRADED = {"optimizer": "sgd", "learning_rate": 0.05}
"""Adam would magnify the rounding of gradients that are 0."""

STUDENTS = {
    "one": {"student": "vit_tiny_patch16_224"},
    "other": {"student": "vit_small_patch16_224", "seed": 5, "method": "hard"},
}

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "classifier": ("train_classifier", {}),
    "classifier with everything": ("train_classifier", {"model_options": DROPOUT, **EVERYTHING}),
    "convolutional, channels last": ("train_classifier", CONVOLUTIONAL),
    "convolutional, contiguous": ("train_classifier", {**CONVOLUTIONAL, "channels_last": False}),
    "data worker processes": ("train_classifier", {"worker_type": "processes"}),
    "a loader process": ("train_classifier", {"worker_type": "loader", "epochs": 4}),
    "a loader process, two micro-batches a step": ("train_classifier", {"worker_type": "loader", "epochs": 4, "batch_size_per_device": 4}),
    "no data workers": ("train_classifier", {"num_workers": 0}),
    "metric lines read late": ("train_kd", {"late_metrics": True, "log_every": 1, "students": STUDENTS}),
    "one batch over and over": ("train_classifier", {"repeat_batch": True, "probe_input_images": 8}),
    "exported to ONNX": ("train_classifier", {"export_onnx": True}),
    "distillation": ("train_kd", {}),
    "distillation with everything": ("train_kd", {"student_options": DROPOUT, "view_size": 40, **EVERYTHING}),
    "distillation of an ensemble": ("train_kd", {"teacher": "ensemble"}),
    "distillation, labels alone": ("train_kd", {"hard_label_weight": 1.0}),
    "distillation of hard labels": ("train_kd", {"method": "hard"}),
    "dkd": ("train_kd", {"method": "dkd"}),
    "dist": ("train_kd", {"method": "dist", "learning_rate": 1e-3}),
    "standardised logits": ("train_kd", {"standardize_logits": True}),
    "teacher cache": ("train_kd", {"teacher_cache": {"views": 1, "top_k": 2}, "epochs": 3}),
    "teacher cache of all logits": ("train_kd", {"teacher_cache": {"views": 2, "top_k": None}, "epochs": 4}),
    "pooled features": ("train_kd", {"features": {"loss": "smooth_l1"}, **EVERYTHING}),
    "features of places": ("train_kd", {"features": {"level": "tokens"}, "student": "resnet10t", "student_options": RESNET}),
    "features alone": ("train_kd", {"features": {"level": "tokens", "weight": 2}, "hard_label_weight": 1.0}),
    "relations": ("train_kd", {"features": {"loss": "relational"}}),
    "several students": ("train_kd", {"students": STUDENTS, "student_options": DROPOUT}),
    "several students with everything": (
        "train_kd",
        {"students": STUDENTS, "student_options": DROPOUT, "teacher_cache": {"views": 2, "top_k": 2}, **EVERYTHING},
    ),
    "teacher cache in 4 bits": ("train_kd", {"teacher_cache": {"views": 1, "top_k": 2, "precision": "int4"}, "epochs": 3}),
    "features in a teacher cache": ("train_kd", {"teacher_cache": {"views": 1, "top_k": 2}, "features": {"level": "tokens"}, "epochs": 3}),
    "segmentation": ("train_segmentation", {}),
    "segmentation with dice": ("train_segmentation", {"dice_weight": 0.5, "min_scale": 0.5, "max_scale": 1.5}),
    "segmentation with a teacher": ("train_segmentation", {"teacher": "pixel_teacher", "hard_label_weight": 0.5}),
    "segmentation with a teacher cache": (
        "train_segmentation",
        {"teacher": "pixel_teacher", "hard_label_weight": 0.5, "teacher_cache": {"views": 1}, "epochs": 3},
    ),
    "segmentation of features": ("train_segmentation", {"teacher": "pixel_teacher", "features": {"level": "tokens"}}),
    "copies by a stream": ("train_classifier", {"copy_stream": True, **EVERYTHING}),
    "copies of a loader process by a stream": ("train_kd", {"copy_stream": True, "worker_type": "loader", "epochs": 4}),
    "copies by a stream for a teacher cache": ("train_kd", {"copy_stream": True, "teacher_cache": {"views": 1, "top_k": 2}, "epochs": 3}),
    "a teacher by a stream": ("train_kd", {"copy_stream": True, "teacher_stream": True, "batch_size_per_device": 4}),
    "an ensemble by a stream": ("train_kd", {"copy_stream": True, "teacher_stream": True, "teacher": "ensemble", "students": STUDENTS}),
    "a teacher of features by a stream": ("train_kd", {"copy_stream": True, "teacher_stream": True, "features": {"level": "tokens"}}),
    "a teacher of pixels by a stream": (
        "train_segmentation",
        {"copy_stream": True, "teacher_stream": True, "teacher": "pixel_teacher", "hard_label_weight": 0.5, "dice_weight": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_a_run_has_the_losses_and_weights_of_the_cpus(runs: Runs, case: str):
    script, values = PLAIN[case]
    on_gpu = runs(script, **{**GRADED, **values})
    on_cpu = runs(script, CPU, **{**GRADED, **values})
    same_numbers(on_gpu, on_cpu)
    assert left_behind(on_gpu) == []

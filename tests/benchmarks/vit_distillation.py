"""What does a real vision transformer teach a light one, by its logits, by its features, by both? `make bench-kd-vit`.

The teacher is DINOv2 ViT-S/14 with a head for 15 kinds of pictures, made of published weights as configs/vit_teacher.yaml does it. The
793 pictures are split in five, and a kind with fewer than five is left out: each fifth is held out by one seed, whose teacher and students
learn from the others. So every picture is judged once, and a seed's four students differ in what they learn from alone: the same images,
initial weights, order and steps.

The settings were fixed before the first run: temperature and weight of the labels are those of configs/vit_student.yaml, the weight of
the features that of the example in timm's FeatureDistillationTask. None was tuned on these pictures. Needs Debian's package
tuxpaint-stamps-default. About 40 minutes on 2 quiet cores.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from distillation import SEEDS, show_gain, show_table, train

from launcher.prepare import prepare
from launcher.prepare.published_weights import published_weights

PICTURES, PREPARED, WEIGHTS = "/usr/share/tuxpaint/stamps", Path("data/stamps"), Path("data/dinov2-small")
FOLDS = Path("data/stamps-folds")
SIZE = 56
COMMON = {
    "image_size": SIZE, "max_shift_pixels": 0, "horizontal_flip": True, "min_crop_area": 0.5, "global_batch_size": 32,
    "evaluate_every": 1000, "log_every": 50,
}  # fmt: skip
TEACHER = {
    "model": "vit_small_patch14_dinov2", "model_options": {"img_size": SIZE}, "pretrained": "channel", "trained_layers": "head",
    "epochs": 8, "learning_rate": 3e-3,
}  # fmt: skip
STUDENT = {
    "student": "vit_tiny_patch16_224",
    "student_options": {"img_size": SIZE, "patch_size": 14, "embed_dim": 128, "num_heads": 4, "depth": 6},
    "epochs": 10_000, "max_steps": 400, "learning_rate": 1e-3, "temperature": 2, "teacher_precision": "bf16",
}  # fmt: skip
FEATURES = {"features": {"loss": "cosine", "level": "tokens", "weight": 5}}
ARMS = {
    "alone": {"hard_label_weight": 1},
    "on logits": {"hard_label_weight": 0.2},
    "on features": {"hard_label_weight": 1, **FEATURES},
    "on both": {"hard_label_weight": 0.2, **FEATURES},
}
"""What the student learns from."""


def split(fold: int) -> dict[str, dict[str, str]]:
    """The inputs of a seed: every fifth picture of each class held out, by name."""
    root = FOLDS / str(fold)
    for folder in sorted({file.parent.name for file in PREPARED.glob("*/*/*")}):
        pictures = sorted(PREPARED.glob(f"*/{folder}/*"), key=lambda file: file.name)
        for number, file in enumerate(pictures if len(pictures) >= len(SEEDS) else []):
            target = root / ("validation" if number % len(SEEDS) == fold else "train") / folder / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return {name: {"folder": str(root / name)} for name in ("train", "validation")}


def main() -> None:
    print(prepare(PICTURES, PREPARED, size=96))
    print(published_weights("dinov2-small", WEIGHTS))
    results: dict[str, list[dict]] = {"teacher": [], **{f"student {name}": [] for name in ARMS}}
    for fold, seed in enumerate(SEEDS):
        inputs, teacher = split(fold), f"stamps-teacher-{fold}"
        weights = {"weights": {"folder": str(WEIGHTS)}}
        results["teacher"].append(
            train(teacher, "train_classifier.py", {**COMMON, **TEACHER, "seed": seed}, inputs | weights)
        )
        for name, arm in ARMS.items():
            own = inputs if name == "alone" else {**inputs, "teacher": {"run": teacher}}
            run = f"stamps-{name.replace(' ', '-')}"
            results[f"student {name}"].append(
                train(run, "train_kd.py", {**COMMON, **STUDENT, **arm, "seed": seed}, own)
            )
    show_table(results, f"accuracy on held-out pictures, mean ± sd over {len(SEEDS)} folds")
    for name in ("on logits", "on features", "on both"):
        show_gain(results, f"student {name}", "student alone")
    show_gain(results, "student on both", "student on logits")


if __name__ == "__main__":
    main()

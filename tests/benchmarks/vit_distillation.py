"""What does a real vision transformer teach a light one, by its logits, its features, or both? `make bench-kd-vit`.

The teacher is DINOv2 ViT-S/14 with a head for 15 kinds of pictures, made from published weights as in configs/vit_teacher.yaml. The
793 pictures are split in five, without kinds that have fewer than five: each fifth is held out by one seed, whose teacher and students
learn from the others. So every picture is judged once, and a seed's students differ only in what they learn from: the same images,
initial weights, order and steps.

Two parts: with the labels of all pictures, and with those of ten of each kind, for teacher and students alike; two of the students then
also take all pictures, without labels.

The settings were fixed before the first run: temperature and label weight are those of configs/vit_student.yaml, the feature weight
is that of the example in timm's FeatureDistillationTask. None was tuned on these pictures. Needs Debian's package
tuxpaint-stamps-default. About 40 minutes on 2 quiet cores for the first part, 25 for the second.
"""

from __future__ import annotations

import argparse
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
FEW = {"images_per_class": 10}
"""Labels that teacher and students see in the second part."""

ALL_LABELS = {
    "alone": {"hard_label_weight": 1},
    "on logits": {"hard_label_weight": 0.2},
    "on features": {"hard_label_weight": 1, **FEATURES},
    "on both": {"hard_label_weight": 0.2, **FEATURES},
}
FEW_LABELS = {
    "alone": {**FEW, "hard_label_weight": 1},
    "on logits": {**FEW, "hard_label_weight": 0.2},
    "on logits, and without labels": {**FEW, "hard_label_weight": 0.2, "unlabelled": {"per_labelled": 3}},
    "on both, and without labels": {**FEW, "hard_label_weight": 0.2, "unlabelled": {"per_labelled": 3}, **FEATURES},
}
"""What the students of each part learn from."""


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


def learn(part: str, head: dict, arms: dict[str, dict]) -> dict[str, list[dict]]:
    """The results of teacher and students over the folds.

    Args:
        head: what the teacher's head is fitted with.
        arms: the students' settings, by name.
    """
    results: dict[str, list[dict]] = {"teacher": [], **{f"student {name}": [] for name in arms}}
    for fold, seed in enumerate(SEEDS):
        inputs, teacher = split(fold), f"stamps-{part}-teacher-{fold}"
        weights = {"weights": {"folder": str(WEIGHTS)}}
        results["teacher"].append(
            train(teacher, "train_classifier.py", {**COMMON, **TEACHER, **head, "seed": seed}, inputs | weights)
        )
        unlabelled = {"unlabelled": {"folder": str(FOLDS / f"{fold}-unlabelled/unlabelled")}}
        if any("unlabelled" in arm for arm in arms.values()):
            prepare(FOLDS / str(fold) / "train", FOLDS / f"{fold}-unlabelled", unlabelled=True)
        for name, arm in arms.items():
            taught = {} if name == "alone" else {"teacher": {"run": teacher}}
            own = {**inputs, **taught, **(unlabelled if "unlabelled" in arm else {})}
            run = f"stamps-{part}-{name.replace(', ', '-').replace(' ', '-')}"
            results[f"student {name}"].append(
                train(run, "train_kd.py", {**COMMON, **STUDENT, **arm, "seed": seed}, own)
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--labels", choices=("all", "few"), help="of which pictures; default: both parts")
    parts = [given] if (given := parser.parse_args().labels) else ["all", "few"]
    print(prepare(PICTURES, PREPARED, size=96))
    print(published_weights("dinov2-small", WEIGHTS))
    judged = f"accuracy on held-out pictures, mean ± sd over {len(SEEDS)} folds"
    if "all" in parts:
        results = learn("all", {}, ALL_LABELS)
        show_table(results, judged)
        for name in ("on logits", "on features", "on both"):
            show_gain(results, f"student {name}", "student alone")
        show_gain(results, "student on both", "student on logits")
    if "few" in parts:
        results = learn("few", {**FEW, "epochs": 10_000, "max_steps": 160}, FEW_LABELS)
        show_table(results, judged)
        for name in list(FEW_LABELS)[1:]:
            show_gain(results, f"student {name}", "student alone")
        show_gain(results, "student on logits, and without labels", "student on logits")
        show_gain(results, "student on both, and without labels", "student on logits, and without labels")


if __name__ == "__main__":
    main()

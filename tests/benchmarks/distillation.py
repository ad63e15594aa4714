"""What do a teacher and unlabelled images gain on Fashion-MNIST? `make bench-kd`: one teacher, one student architecture, five seeds.

The teacher sees all 60,000 training images with their labels. The student sees the labels of the first 10 of each class: alone; with the
teacher; with the teacher and 9 of the 60,000 images, unlabelled, for each of these; and the 60,000 without any label. All take the
same number of steps, with the same augmentation and seeds. The settings were fixed before the first run on the 10,000 test images; none
was tuned on them. Needs Debian's package dataset-fashion-mnist. About half an hour on 2 cores.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import launcher
from launcher.prepare import prepare

DATA, UNLABELLED = Path("data/fashion-mnist"), Path("data/fashion-mnist-unlabelled")
INPUTS = {split: {"folder": str(DATA / split)} for split in ("train", "validation")}
COMMON = {"image_size": 32, "max_shift_pixels": 2, "horizontal_flip": True, "evaluate_every": 1000, "log_every": 100}
TEACHER = {
    "model": "pvt_v2_b0",
    "model_options": {"in_chans": 1, "embed_dims": [32, 64, 160, 256], "depths": [1, 2, 2, 1], "num_heads": [1, 2, 5, 8]},
    "epochs": 5, "global_batch_size": 128, "learning_rate": 1.5e-3,
}  # fmt: skip
STUDENT = {
    "student": "pvt_v2_b0",
    "student_options": {
        "in_chans": 1, "embed_dims": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2],
    },
    "global_batch_size": 50, "learning_rate": 4e-3, "temperature": 4, "epochs": 10_000, "max_steps": 800,
}  # fmt: skip
LABELLED = {"images_per_class": 10}
ARMS = {
    "alone": {**LABELLED, "hard_label_weight": 1},
    "distilled": {**LABELLED, "hard_label_weight": 0.1},
    "and without labels": {**LABELLED, "hard_label_weight": 0.1, "unlabelled": {"per_labelled": 9}},
    "without any label": {"hard_label_weight": 0, "unlabelled": {"alone": True}},
}
"""What the student learns from."""

SEEDS = (0, 1, 2, 3, 4)


def train(name: str, script: str, hyperparameters: dict, inputs: dict) -> dict:
    """One run's result; the program ends if it fails."""
    job = launcher.from_values(
        {
            "name": name,
            "script": script,
            "inputs": inputs,
            "hyperparameters": {**COMMON, **hyperparameters},
        }
    )
    run = launcher.run(launcher.plan(job))
    if run.wait() != "Completed":
        sys.exit(f"{run.name}: {run.state}\n{run.outcome().get('failure', '')}")
    result = run.result()
    print(
        f"{name:<27} seed {hyperparameters['seed']}  {result['validation_accuracy']:.2%}  {run.outcome()['seconds']:.0f} s",
        flush=True,
    )
    return result


def main() -> None:
    print(prepare("fashion-mnist", DATA))
    print(prepare("fashion-mnist", UNLABELLED, unlabelled=True))
    teacher = train("fashion-teacher", "train_classifier.py", {**TEACHER, "seed": 0}, INPUTS)
    inputs = {**INPUTS, "unlabelled": {"folder": str(UNLABELLED / "unlabelled")}, "teacher": {"run": "fashion-teacher"}}
    results: dict[str, list[dict]] = {name: [] for name in ARMS}
    for seed in SEEDS:
        for name, arm in ARMS.items():
            own = {key: place for key, place in inputs.items() if key not in left_out(arm)}
            run = f"fashion-{name.replace(' ', '-')}"
            results[name].append(train(run, "train_kd.py", {**STUDENT, **arm, "seed": seed}, own))
    table = {"teacher": [teacher], **{f"student {name}": found for name, found in results.items()}}
    show_table(table, f"test accuracy, mean ± sd over {len(SEEDS)} seeds")
    for name, before in (
        ("distilled", "alone"),
        ("and without labels", "distilled"),
        ("without any label", "distilled"),
    ):
        show_gain(table, f"student {name}", f"student {before}")


def show_table(results: Mapping[str, Sequence[dict]], heading: str) -> None:
    """A line for each run name, with its accuracy over the seeds."""
    print()
    print(f"{'':<28} {'parameters':>10}  {heading:>40}  {'images/s':>8}")
    for name, found in results.items():
        accuracies = [100 * result["validation_accuracy"] for result in found]
        spread = f"± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else "(one seed)"
        speed = statistics.median(result["images_per_second"] for result in found)
        accuracy = f"{statistics.mean(accuracies):.2f} {spread}"
        print(f"{name:<28} {found[0]['parameters']:>10,}  {accuracy:>40}  {speed:>8.0f}")


def show_gain(results: Mapping[str, Sequence[dict]], name: str, before: str) -> None:
    """The gain of one arm over another, seed by seed."""
    pairs = zip(results[before], results[name], strict=True)
    gains = [100 * (b["validation_accuracy"] - a["validation_accuracy"]) for a, b in pairs]
    listed = ", ".join(f"{gain:+.2f}" for gain in gains)
    print(
        f"{name} over {before}, by seed: {listed} points; mean {statistics.mean(gains):+.2f} ± {statistics.stdev(gains):.2f}"
    )


def left_out(arm: dict) -> list[str]:
    """The inputs that an arm does not read."""
    unlabelled = arm.get("unlabelled")
    return ["unlabelled"] if unlabelled is None else ["train"] if unlabelled.get("alone") else []


if __name__ == "__main__":
    main()

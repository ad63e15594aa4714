"""Does distillation help on Fashion-MNIST? `make bench-kd`: one teacher, one student architecture, three seeds, the 10,000 test images.

The teacher sees all 60,000 training images; the student the first 100 of each class, alone and with the teacher, with the
same steps, augmentation and seed. The settings were fixed before the first run on the test images; none was tuned on them.
Needs Debian's package dataset-fashion-mnist. About fifteen minutes on 2 cores.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import launcher
from launcher.prepare import prepare

DATA = Path("data/fashion-mnist")
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
    "images_per_class": 100, "epochs": 40, "global_batch_size": 50, "learning_rate": 4e-3, "temperature": 4,
}  # fmt: skip
SEEDS = (0, 1, 2)


def train(name: str, script: str, hyperparameters: dict, **inputs: dict) -> dict:
    """One run's result; the program ends where it fails."""
    job = launcher.from_values(
        {
            "name": name,
            "script": script,
            "inputs": {**INPUTS, **inputs},
            "hyperparameters": {**COMMON, **hyperparameters},
        }
    )
    run = launcher.run(launcher.plan(job))
    if run.wait() != "Completed":
        sys.exit(f"{run.name}: {run.state}\n{run.outcome().get('failure', '')}")
    result = run.result()
    print(
        f"{name:<18} seed {hyperparameters['seed']}  {result['validation_accuracy']:.2%}  {run.outcome()['seconds']:.0f} s",
        flush=True,
    )
    return result


def main() -> None:
    print(prepare("fashion-mnist", DATA))
    teacher = train("fashion-teacher", "train_classifier.py", {**TEACHER, "seed": 0})
    alone, distilled = [], []
    for seed in SEEDS:
        for results, weight in ((alone, 1), (distilled, 0.1)):
            hyperparameters = {**STUDENT, "seed": seed, "hard_label_weight": weight}
            name = "fashion-alone" if weight == 1 else "fashion-distilled"
            results.append(train(name, "train_kd.py", hyperparameters, teacher={"run": "fashion-teacher"}))
    print()
    print(
        f"{'':<18} {'parameters':>10}  {'test accuracy, mean ± sd over ' + str(len(SEEDS)) + ' seeds':>40}  {'images/s':>8}"
    )
    for name, results in (("teacher", [teacher]), ("student alone", alone), ("student distilled", distilled)):
        accuracies = [100 * result["validation_accuracy"] for result in results]
        spread = f"± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else "(one seed)"
        speed = statistics.median(result["images_per_second"] for result in results)
        print(
            f"{name:<18} {results[0]['parameters']:>10,}  {f'{statistics.mean(accuracies):.2f} {spread}':>40}  {speed:>8.0f}"
        )
    gains = [100 * (b["validation_accuracy"] - a["validation_accuracy"]) for a, b in zip(alone, distilled, strict=True)]
    print(
        f"gain by seed: {', '.join(f'{gain:+.2f}' for gain in gains)} points; mean {statistics.mean(gains):+.2f} ± {statistics.stdev(gains):.2f}"
    )


if __name__ == "__main__":
    main()

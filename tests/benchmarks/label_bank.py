"""What do fewer bits of a teacher's answers cost a student? `make bench-bank`: records by precision, and Fashion-MNIST over five seeds.

One teacher; one student that learns from 500 images of each class, at temperature 4 and label weight 0.1, from a label bank of one view:
all logits in fp32, then the 5 largest of 10 in fp16, 8 bits and 4 bits. Seeds pair the runs: initial weights, images and their order are
the same, so a difference is due to the records, and to what rounding does over 400 steps. The settings were fixed before the first run on
the 10,000 test images.

Ten classes are few: half of them are kept here, while a bank of 1,000 keeps a hundredth. So this shows the cost of rounding the logits,
not of leaving out 990 classes; and no record of ten classes is ten times smaller than ten logits in fp16. Sizes are given for both.
"""

from __future__ import annotations

import statistics
import time

from distillation import DATA, INPUTS, SEEDS, STUDENT, TEACHER, train

from launcher.labels.bank import rules
from launcher.prepare import prepare

REFERENCE, HALVES = "all in fp32", "5 in fp16"
ARMS = {
    REFERENCE: {"top_k": None, "precision": "fp32"},
    HALVES: {"top_k": 5, "precision": "fp16"},
    "5 in int8": {"top_k": 5, "precision": "int8"},
    "5 in int4": {"top_k": 5, "precision": "int4"},
}
"""What a record keeps out of 10 logits."""

LEARNS = {"images_per_class": 500, "hard_label_weight": 0.1, "max_steps": 400, "ema_decay": 0.98}
ALLOWED = 0.2
"""Points of accuracy that a record of fewer bits may cost."""


def sizes(classes: int, top_k: int) -> str:
    """Bytes per record by precision, and how much smaller that is than all logits in fp16."""
    plain = 2 * classes
    parts = []
    for precision in ("fp16", "int8", "int4"):
        size = rules().RecordFormat(classes, top_k, precision).size
        parts.append(f"{precision} {size} bytes ({plain / size:.1f} times smaller)")
    return f"{classes:>5} classes, the {top_k} largest: {', '.join(parts)}; all in fp16 without a checksum: {plain:,}"


def main() -> None:
    for classes, top_k in ((10, 5), (1000, 10), (1000, 50), (21_841, 10)):
        print(sizes(classes, top_k), flush=True)
    print(prepare("fashion-mnist", DATA))
    started = time.monotonic()
    train("bank-teacher", "train_classifier.py", {**TEACHER, "epochs": 1, "seed": 0}, INPUTS)
    inputs = {**INPUTS, "teacher": {"run": "bank-teacher"}}
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in SEEDS:
        for name, kept in ARMS.items():
            settings = {**STUDENT, **LEARNS, "teacher_cache": {"views": 1, **kept}, "seed": seed}
            result = train(f"bank-{name.replace(' ', '-')}", "train_kd.py", settings, inputs)
            found[name].append(100 * result["validation_accuracy"])
    print(f"\ntest accuracy, mean ± sd over {len(SEEDS)} seeds; {(time.monotonic() - started) / 60:.0f} minutes")
    for name, accuracies in found.items():
        print(f"{name:<12} {statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}")
    pairs = [(name, REFERENCE) for name in ARMS if name != REFERENCE]
    for name, before in [*pairs, ("5 in int8", HALVES), ("5 in int4", HALVES)]:
        gains = [there - here for there, here in zip(found[name], found[before], strict=True)]
        mean, error = statistics.mean(gains), statistics.stdev(gains) / len(gains) ** 0.5
        kept = "within" if mean >= -ALLOWED else "beyond"
        listed = ", ".join(f"{gain:+.2f}" for gain in gains)
        print(
            f"{name} over {before}, by seed: {listed} points; mean {mean:+.2f} ± {error:.2f} (standard error), {kept} {ALLOWED}"
        )


if __name__ == "__main__":
    main()

"""What does a segmenter lose in a label bank? `make bench-pixels`: bytes per record, distillation loss and its gradient from kept answers.

Two teachers of 64 × 64 pixels: one of drawn shapes, four classes, which it nearly always finds, with sharp edges; and one of cut-out pictures
of 20 kinds on photographs, most of which it does not find. Students are the teacher's own answers, blurred: one as is, and one with added
noise. The bank's code is compared with keeping only the largest logits of each place, exact, with the rest spread evenly, as image records
do. About 5 minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import engine  # noqa: F401  # finds the entry scripts' modules
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from training.tasks.evaluation import resized
from training.tasks.losses import temperature_kl
from training.teacher import frozen
from training.teacher.pixel_records import PixelLayout

import launcher
from launcher.prepare import cutouts, prepare

STAMPS, SIZE, TEMPERATURES, IMAGES = Path("/usr/share/tuxpaint/stamps"), 64, (1.0, 2.0, 4.0), 32
KINDS = (
    *("symbols/alphabets", "animals/mammals", "animals/birds", "symbols/money", "food/fruit", "plants/flowers", "symbols/math", "vehicles"),
    *("food/vegetables", "seasonal/christmas", "town/roadsigns", "seasonal/halloween", "household/tools", "symbols/chess", "symbols/music"),
    *("animals/fish", "hobbies/music", "seasonal/easter", "seasonal/hanukkah", "space/planets"),
)  # fmt: skip
TEACHER = {
    "model": "resnet10t", "decoder_channels": 32, "image_size": [SIZE, SIZE], "horizontal_flip": True, "epochs": 100,
    "global_batch_size": 32, "learning_rate": 3e-3, "evaluate_every": 1000, "log_every": 100,
}  # fmt: skip


def pictures(target: Path) -> None:
    """Cut-outs of KINDS on photographs; every fourth one of a kind is held out."""
    cutouts.CLASSES = {kind.replace("/", "_"): kind for kind in KINDS}  # type: ignore[misc]  # those of the package are four
    found = cutouts.find(STAMPS)
    for split, count in (("train", 900), ("validation", 200)):
        files = {kind: [file for place, file in enumerate(all_) if (place % 4 == 0) == (split == "validation")] for kind, all_ in found.items()}  # fmt: skip
        for index in range(count):
            for name, picture in zip(("images", "masks"), cutouts.draw(index, split, files)):
                (target / split / name).mkdir(parents=True, exist_ok=True)
                picture.save(target / split / name / f"{index:04}.png")


def even(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The largest logits of each place as they are, and the rest spread evenly."""
    kept, classes = logits.topk(top_k, dim=1)
    others = logits.scatter(1, classes, -math.inf).logsumexp(1, keepdim=True) - math.log(logits.shape[1] - top_k)
    return others.expand_as(logits).scatter(1, classes, kept)


def codes(logits: torch.Tensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Encodings of logits (batch, classes, rows, columns): a name, bytes per record, and the decoded logits."""
    _, classes, rows, columns = logits.shape
    for top_k, precision in ((0, "int4"), (1, "int4"), (2, "int4"), (1, "int8")):
        layout = PixelLayout(rows, columns, classes, top_k, precision)
        records = layout.encode(layout.pack(logits).numpy())
        yield f"top_k {top_k}, {precision}", layout.size, layout.decode(records, logits.device)
    for top_k in (1, 3):
        bits = top_k * (4 + (classes - 1).bit_length())  # as few as in 4 bits
        if top_k < classes - 1:
            yield f"{top_k} largest, even rest", rows * columns * bits // 8, even(logits, top_k)


def measure(teacher: frozen.Teacher, images: torch.Tensor) -> None:
    logits = torch.cat([teacher(part) for part in images.split(16)])
    exact, plain = resized(logits, images.shape[2:]), 2 * logits[0].numel()
    noise = resized(
        torch.randn(len(images), logits.shape[1], 8, 8, generator=torch.Generator().manual_seed(0)), images.shape[2:]
    )
    blurred = F.avg_pool2d(exact, 5, 1, 2)
    students = [0.3 * F.avg_pool2d(exact, 9, 1, 4), 0.7 * (blurred + noise * exact.std())]
    print(
        "| code | bytes | smaller than in fp16 | "
        + " | ".join(f"T {temperature:g}: loss, gradient" for temperature in TEMPERATURES)
        + " |"
    )
    for name, size, found in codes(logits):
        kept, cells = resized(found, images.shape[2:]), []
        for temperature in TEMPERATURES:
            moved = [difference(student, exact, kept, temperature) for student in students]
            cells.append(", ".join(f"{loss:+.1%} {gradient:.0%}" for loss, gradient in moved))
        print(f"| {name} | {size:,} | {plain / size:.1f} | {' | '.join(cells)} |", flush=True)


def difference(
    student: torch.Tensor, exact: torch.Tensor, kept: torch.Tensor, temperature: float
) -> tuple[float, float]:
    """The relative change of the loss, and of its gradient, due to kept answers."""
    own = student.detach().requires_grad_()
    losses = [temperature_kl(own, answers, temperature) for answers in (exact, kept)]
    first, second = (torch.autograd.grad(loss, own)[0] for loss in losses)
    return (losses[1] / losses[0] - 1).item(), ((second - first).norm() / first.norm()).item()


def main() -> None:
    print(prepare("shapes", Path("data/shapes")))
    pictures(Path("data/cutouts20"))
    for name, classes, steps in (("shapes", 4, 220), ("cutouts20", len(KINDS) + 1, 336)):
        inputs = {split: {"folder": f"data/{name}/{split}"} for split in ("train", "validation")}
        values = {"name": f"bench-{name}", "script": "train_segmentation.py", "inputs": inputs}
        hyperparameters = {**TEACHER, "classes": classes, "max_steps": steps, "dice_weight": float(classes > 4)}
        run = launcher.run(launcher.plan(launcher.from_values({**values, "hyperparameters": hyperparameters})))
        assert run.wait(3600) == "Completed", run.outcome
        files = sorted(Path(f"data/{name}/validation/images").iterdir())[:IMAGES]
        arrays = [np.array(Image.open(file).convert("RGB").resize((SIZE, SIZE))) for file in files]
        names = [str(number) for number in range(classes)]
        folder = run.folder.host("algo-1") / "model"
        teacher = frozen.load(folder, names, channels=3, image_size=(SIZE, SIZE), pixels=True, upsampled=False)
        print(f"\n{name}: {classes} classes, mean IoU {run.result()['validation_miou']:.3f}")
        measure(teacher, torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2))


if __name__ == "__main__":
    main()

"""KT's distillation on up to 1,024 GPUs, on paper: the scaling model, the input's bandwidth, and failures. `make at-scale`, a second.

Nothing is measured here. Each number rests on the assumptions listed below with their sources; to change one, change its line. The step
is launcher/study/scaling_model.py's. Checkpoints have Young's optimal interval (1974, https://doi.org/10.1145/361147.361115): the square
root of twice a checkpoint's seconds times those between failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.show.table import Table
from launcher.show.text import three_digits
from launcher.study.scaling_model import ScalingModel

GPUS = (8, 32, 64, 128, 256, 512, 1024)

GPUS_PER_HOST = 8
"""Of an ml.p4d.24xlarge."""


@dataclass(frozen=True)
class Assumption:
    """A number on which the tables rest."""

    value: float
    said: str
    source: str


BATCH = Assumption(36, "36 images a GPU: weak scaling, the global batch grows", "KT's 1,152 images on 32 GPUs")
ONLINE = Assumption(
    151e9 / (0.33 * 312e12),
    "1.47 ms an image on an A100: 151 GFLOP (ViT-L/16 forward, ViT-S/16 forward and backward) at an MFU of 33 % in bf16",
    "an estimate; an H100 reached 33 % at 36 images with CUDA graphs, 8 % without: docs/results/gpu.md",
)
CACHED = Assumption(
    28e9 / (0.229 * 312e12),
    "0.39 ms an image with a filled label bank: 28 GFLOP (ViT-S/16 alone) at 22.9 %",
    "nvSubquadratic's MFU of a ViT-5-S on one H100 with synthetic data; ours reached 11 % at 36 images and 21 % at 256; an A100's is assumed",
)
PARAMETERS = Assumption(
    22.05e6, "22.05 million parameters, exchanged in fp32: 88 MB a step", "timm's vit_small_patch16_224"
)
BANDWIDTH = Assumption(
    25e9,
    "25 GB/s between hosts: half of EFA's 400 Gbit/s",
    "https://aws.amazon.com/ec2/instance-types/p4/ for the 400; the half is assumed",
)
LATENCY = Assumption(
    15e-6,
    "15 µs a turn of a ring, of which 1,024 GPUs make 254 for each bucket; NCCL's trees make far fewer",
    "assumed",
)
PHOTOGRAPH = Assumption(110e3, "110 kB an image: photographs of ImageNet's size", "ImageNet-1k: 1.28 million in 138 GB")
RESIZED = Assumption(25e3, "25 kB an image: shards of `launcher prepare --size`", "256 pixels at quality 90, rounded")
FSX = Assumption(
    1e9,
    "FSx for Lustre reads 1 GB/s for each TiB, its fastest SSD tier; others read an eighth to a half of that",
    "https://docs.aws.amazon.com/fsx/latest/LustreGuide/performance.html",
)
FAILURES = Assumption(
    54 * 24 * 16384 / 419,
    f"a GPU fails, or ends the job otherwise, once in {54 * 24 * 16384 / 419:,.0f} hours: 419 interruptions of 16,384 H100 in 54 days",
    "https://arxiv.org/abs/2407.21783, section 3.3.4",
)
RESTART = Assumption(600.0, "10 minutes from a failure to the first step: SageMaker starts new hosts", "assumed")
WRITTEN = Assumption(
    16 * 22.05e6 / 0.25e9,
    "1.4 s to write 353 MB of weights, average, and AdamW's state at 250 MB/s",
    "the checkpoint's size; the speed is assumed",
)
COPIED = Assumption(
    16 * 22.05e6 / 10e9, "0.04 s to copy the same into main memory at 10 GB/s, written in the background", "assumed"
)

ASSUMPTIONS = (
    *(BATCH, ONLINE, CACHED, PARAMETERS, BANDWIDTH, LATENCY, PHOTOGRAPH, RESIZED),
    *(FSX, FAILURES, RESTART, WRITTEN, COPIED),
)


def model(compute_seconds_per_image: Assumption, backward: float) -> ScalingModel:
    """The step of one GPU among many. Only exchange between hosts counts as such; that within a host counts as computing.

    Args:
        backward: share of the operations in the backward pass, 0 to 1.
    """
    return ScalingModel(
        gradient_bytes=4 * PARAMETERS.value,
        fixed=0.0,
        compute_seconds_per_image=compute_seconds_per_image.value,
        input_seconds_per_image=0.0,
        seconds_per_byte=1 / BANDWIDTH.value,
        latency=LATENCY.value,
        backward=backward,
    )


def goodput(stall: float, gpus: int) -> float:
    """Share of time spent in steps that count, with the best interval between checkpoints.

    Args:
        stall: seconds that a checkpoint stops the steps.
    """
    between = FAILURES.value * 3600 / gpus
    interval = math.sqrt(2 * stall * between)
    return 1 - stall / interval - (interval / 2 + RESTART.value) / between


def steps() -> Table:
    """How long a step takes, and how much it reads."""
    head = [
        "GPUs",
        "global batch",
        "teacher",
        "ms a step",
        "exposed",
        "efficiency",
        "images/s",
        "reads, GB/s",
        "FSx, TiB",
    ]
    head += ["resized, GB/s", "FSx, TiB"]
    rows = []
    for name, compute_seconds_per_image, backward in (("online", ONLINE, 18.4 / 151), ("cached", CACHED, 2 / 3)):
        made = model(compute_seconds_per_image, backward)
        first = made.step(1, BATCH.value).seconds
        for gpus in GPUS:
            step = made.step(gpus // GPUS_PER_HOST, BATCH.value)
            rate = gpus * BATCH.value / step.seconds
            read, small = rate * PHOTOGRAPH.value, rate * RESIZED.value
            rows.append(
                [str(gpus), f"{gpus * BATCH.value:,.0f}", name, f"{step.seconds * 1000:.1f}"]
                + [
                    f"{step.exposed / step.seconds * 100:.0f} %",
                    f"{first / step.seconds * 100:.0f} %",
                    three_digits(rate),
                ]
                + [
                    f"{read / 1e9:.1f}",
                    f"{math.ceil(read / FSX.value)}",
                    f"{small / 1e9:.1f}",
                    f"{math.ceil(small / FSX.value)}",
                ]
            )
    return Table(head, rows)


def failures() -> Table:
    """Goodput: how much of the time counts."""
    head = [
        "GPUs",
        "hours between failures",
        "goodput, written while steps wait",
        "in the background",
        "of which restarts take",
    ]
    rows = []
    for gpus in GPUS:
        hours = FAILURES.value / gpus
        shares = [goodput(stall.value, gpus) for stall in (WRITTEN, COPIED)]
        rows.append(
            [str(gpus), three_digits(hours), *(f"{share * 100:.2f} %" for share in shares)]
            + [f"{RESTART.value / hours / 36:.2f} %"]
        )
    return Table(head, rows)


def main() -> None:
    for one in ASSUMPTIONS:
        print(f"- {one.said} ({one.source})")
    print(f"\n{steps()}\n\n{failures()}")


if __name__ == "__main__":
    main()

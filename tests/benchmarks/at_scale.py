"""KT's distillation on up to 1,024 GPUs, on paper: the scaling model, ZeRO, the input's bandwidth, and failures. `make at-scale`, a second.

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
ONLINE_EAGER = Assumption(
    66.9e-3 / 36,
    "as shipped, online: 66.9 ms for 36 images, 8 % of an H100's peak and 26 % of an A100's, as the host's launches of kernels are the limit",
    "measured on one H100, eager: docs/results/gpu.md; an A100's host is assumed to be as fast; "
    "compile auto is off on an A100 and with several processes",
)
ONLINE = Assumption(
    151e9 / (0.33 * 312e12),
    "compiled, online: 1.47 ms an image on an A100, 151 GFLOP (ViT-L/16 forward, ViT-S/16 forward and backward) at an MFU of 33 % in bf16",
    "an H100's MFU at 36 images with CUDA graphs, 22 % compiled without: docs/results/gpu.md; an A100's is assumed",
)
CACHED_EAGER = Assumption(
    32.9e-3 / 36,
    "as shipped, with a filled label bank: 32.9 ms for 36 images, 3 % of an H100's peak",
    "measured on one H100, eager: docs/results/gpu.md; an A100's host is assumed to be as fast",
)
CACHED = Assumption(
    28e9 / (0.229 * 312e12),
    "compiled, with a filled label bank: 0.39 ms an image, 28 GFLOP (ViT-S/16 alone) at 22.9 %",
    "nvSubquadratic's MFU of a ViT-5-S on one H100 with synthetic data; ours reached 11 % at 36 images and 21 % at 256; an A100's is assumed",
)
BACKWARD = Assumption(
    18.4 / 151,
    "gradients travel during the student's backward: 12 % of an online step, two thirds of a cached one",
    "its share of the operations; an H100's backward took 30 % of the time of an online step of 128 images: docs/results/gpu.md",
)
PARAMETERS = Assumption(
    22.05e6, "22.05 million parameters, exchanged in fp32: 88 MB a step", "timm's vit_small_patch16_224"
)
BANDWIDTH = Assumption(
    1.5 * 2**30 / 70.253e-3,
    "nccl: 22.9 GB/s between hosts, of EFA's 50: its all-reduce of 1 GiB on four p4d.24xlarge took 70.3 ms",
    "https://github.com/NVIDIA/nccl/issues/527, a user's nccl-tests of 2022-07-25; "
    "no figure for more p4d hosts was found, so the same is assumed",
)
LATENCY = Assumption(
    15e-6,
    "nccl: 15 µs a turn of a ring, of which 1,024 GPUs make 254 for each bucket; NCCL's trees make far fewer",
    "assumed",
)
SMDDP = Assumption(
    2.0,
    "smddp: gradients in half of nccl's time, on any number of hosts; no figure was found for its AllReduce on p4d",
    "AWS's Herring, whose balanced fusion buffers it has, on V100: https://www.amazon.science/publications/herring-rethinking-the-parameter-server-at-scale-for-the-cloud; "
    "AWS's guide had 4 to 52 % more throughput than PyTorch's DDP on 2 to 8 ml.p3dn.24xlarge: "
    "https://docs.aws.amazon.com/sagemaker/latest/dg/data-parallel-intro.html, an earlier edition",
)
ZERO = Assumption(
    152,
    "ZeRO: 88 MB of parameters after each optimizer step, exposed, in one broadcast per process or, if there are fewer of those, per tensor: "
    "ViT-S has 152",
    "_sync_params of torch's ZeroRedundancyOptimizer, and entrypoints/training/engine/optimizers.py",
)
TREE = Assumption(
    2.0,
    "a broadcast goes by a binary tree, log2 of the hosts turns, and begins when the last has ended; with smddp as with nccl",
    "assumed: NCCL has only a ring for it (its src/graph/tuning.cc), with more turns, but a rank may begin the next one earlier",
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
    *(BATCH, ONLINE_EAGER, ONLINE, CACHED_EAGER, CACHED, BACKWARD, PARAMETERS, BANDWIDTH, LATENCY, SMDDP, ZERO, TREE),
    *(PHOTOGRAPH, RESIZED, FSX, FAILURES, RESTART, WRITTEN, COPIED),
)

STEPS = (
    ("online", "as shipped", ONLINE_EAGER, BACKWARD.value),
    ("online", "compiled", ONLINE, BACKWARD.value),
    ("cached", "as shipped", CACHED_EAGER, 2 / 3),
    ("cached", "compiled", CACHED, 2 / 3),
)
"""The teacher's logits, the models, seconds per image, and backward's share of these."""


def model(compute_seconds_per_image: Assumption, backward: float, faster: float = 1.0) -> ScalingModel:
    """The step of one GPU among many. Only exchange between hosts counts as such; that within a host counts as computing.

    Args:
        backward: share of the step in the backward pass, 0 to 1.
        faster: speed-up of the exchange of gradients over nccl's.
    """
    return ScalingModel(
        gradient_bytes=4 * PARAMETERS.value,
        fixed=0.0,
        compute_seconds_per_image=compute_seconds_per_image.value,
        input_seconds_per_image=0.0,
        seconds_per_byte=1 / BANDWIDTH.value / faster,
        latency=LATENCY.value / faster,
        backward=backward,
    )


def broadcasts(gpus: int) -> float:
    """Seconds per step in which ZeRO sends the parameters, all exposed. Within a host they count as computing, like gradients."""
    hosts = gpus // GPUS_PER_HOST
    if hosts == 1:
        return 0.0
    turns = math.ceil(math.log(hosts, TREE.value))
    return 4 * PARAMETERS.value / BANDWIDTH.value + min(gpus, ZERO.value) * turns * LATENCY.value


def goodput(stall: float, gpus: int) -> float:
    """Share of time spent in steps that count, with the best interval between checkpoints.

    Args:
        stall: seconds that a checkpoint stops the steps.
    """
    between = FAILURES.value * 3600 / gpus
    interval = math.sqrt(2 * stall * between)
    return 1 - stall / interval - (interval / 2 + RESTART.value) / between


def steps() -> Table:
    """How long a step takes, and what of it is computing."""
    head = ["GPUs", "global batch", "teacher", "models"]
    for library in ("nccl", "smddp"):
        head += [f"{library}, ms a step", "efficiency", "with ZeRO, ms", "efficiency"]
    rows = []
    for teacher, models, compute_seconds_per_image, backward in STEPS:
        for gpus in GPUS:
            row = [str(gpus), f"{gpus * BATCH.value:,.0f}", teacher, models]
            for faster in (1.0, SMDDP.value):
                made = model(compute_seconds_per_image, backward, faster)
                alone, seconds = (
                    made.step(1, BATCH.value).seconds,
                    made.step(gpus // GPUS_PER_HOST, BATCH.value).seconds,
                )
                for whole in (seconds, seconds + broadcasts(gpus)):
                    row += [f"{whole * 1000:.1f}", f"{alone / whole * 100:.0f} %"]
            rows.append(row)
    return Table(head, rows)


def reads() -> Table:
    """What the compiled models read, by nccl and without ZeRO."""
    head = ["GPUs", "teacher", "images/s", "reads, GB/s", "FSx, TiB", "resized, GB/s", "FSx, TiB"]
    rows = []
    for teacher, compute_seconds_per_image, backward in (("online", ONLINE, BACKWARD.value), ("cached", CACHED, 2 / 3)):
        made = model(compute_seconds_per_image, backward)
        for gpus in GPUS:
            rate = gpus * BATCH.value / made.step(gpus // GPUS_PER_HOST, BATCH.value).seconds
            row = [str(gpus), teacher, three_digits(rate)]
            for size in (PHOTOGRAPH, RESIZED):
                row += [f"{rate * size.value / 1e9:.1f}", f"{math.ceil(rate * size.value / FSX.value)}"]
            rows.append(row)
    return Table(head, rows)


def failures() -> Table:
    """Goodput: how much of the time counts."""
    head = ["GPUs", "hours between failures", "failures a day", "goodput, written while steps wait"]
    head += ["in the background", "of which restarts take"]
    rows = []
    for gpus in GPUS:
        hours = FAILURES.value / gpus
        shares = [goodput(stall.value, gpus) for stall in (WRITTEN, COPIED)]
        rows.append(
            [str(gpus), three_digits(hours), f"{24 / hours:.3f}", *(f"{share * 100:.2f} %" for share in shares)]
            + [f"{RESTART.value / hours / 36:.2f} %"]
        )
    return Table(head, rows)


def main() -> None:
    for one in ASSUMPTIONS:
        print(f"- {one.said} ({one.source})")
    print(f"\n{steps()}\n\n{reads()}\n\n{failures()}")


if __name__ == "__main__":
    main()

"""Item 11: how long a checkpoint stalls training, and what NVML and the system monitor say about the GPU."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from launcher_observer.system.monitor import FOLDER, system_monitor
from launcher_observer.system.nvml import Gpus
from training.engine.checkpoints import Checkpoints

from tests.gpu.bench import Bench
from tests.gpu.outcomes import Result

BUSY_SECONDS, LONGEST = 5.0, 30.0
"""For which the GPU has work, and within which the monitor's first line must come."""

BETWEEN = 200
"""Steps from one checkpoint to the next, so that the disk has the one before: 4.9 GB took it 5 s."""

METRICS = ("GPUUtilization", "GPUMemoryUtilization")


def checkpoint(bench: Bench, result: Result, *, size: str) -> None:
    """Checkpoints within training: weights, average, both moments of AdamW. The first also pins the memory of the copies; the second
    reuses it, with the first already on disk.

    Args:
        size: student or teacher, whose size the trained model has.
    """
    chosen = bench.sizes.student if size == "student" else bench.sizes.teacher
    every = BETWEEN if bench.is_gpu else 2
    settings = bench.settings(
        student=chosen.name, hard_label_weight=1.0, ema_decay=0.999, checkpoint_every=every, log_every=1, num_workers=1
    )
    engine = bench.engine(settings, bench.noise(8 * bench.sizes.batch), bench.model(chosen), None, checkpoints=True)
    engine.train(2 * every)
    stalls = [line["seconds"] for line in engine.timeline("checkpoint")]
    steps = [line["seconds"]["step"] for line in engine.timeline("steps")]
    folder = bench.folder / "checkpoints"
    [newest] = sorted(place for place in folder.iterdir() if place.name.startswith("step-"))[-1:]
    held = sum(file.stat().st_size for file in newest.iterdir())
    started = time.perf_counter()
    loaded = Checkpoints(folder, bench.world(), fingerprint=settings.fingerprint(), log=print).load()
    result.figures |= {
        "parameters, M": sum(parameter.numel() for parameter in engine.state.model.parameters()) / 1e6,
        "checkpoint, GB": held / 1e9,
        "first stall, s": stalls[0],
        "second stall, s": stalls[-1],
        "GB/s of the second": held / 1e9 / stalls[-1],
        "read again, s": time.perf_counter() - started,
        "step, s": statistics.median(steps),
        "longest step beside the writer, s": max(steps[every:]),
    }
    result.expect(len(stalls) == 2, "each of two checkpoints is in the timeline")
    result.expect(loaded is not None and loaded.step == 2 * every, "the checkpoint of the last step is whole")


def gpu_metrics(bench: Bench, result: Result) -> None:
    """NVML's values and the system monitor's lines while the GPU is busy."""
    output = bench.folder / "output"
    with system_monitor(output, 0):
        side = 4096 if bench.is_gpu else 16
        square = torch.ones(side, side, device=bench.device)
        began = time.monotonic()
        while not _files(output / FOLDER) or time.monotonic() - began < BUSY_SECONDS * bench.is_gpu:
            for _ in range(20):
                square @ square
            bench.synchronize()
            if time.monotonic() - began > LONGEST:
                break
        seen = Gpus().look() if bench.is_gpu else {}
    lines = [
        json.loads(line) for file in _files(output / FOLDER) for line in file.read_text(encoding="utf-8").splitlines()
    ]
    highest: dict[str, float] = defaultdict(float)
    for line in lines:
        highest[line["Dimension"]] = max(highest[line["Dimension"]], line["Value"])
    result.figures |= {"lines": len(lines), "kinds of values": len(highest)}
    result.expect(bool(lines), "the monitor writes lines")
    bench.require_gpu("what is said of the GPU")
    for metric in METRICS:
        at_once = [value for (_, _, dimension), value in seen.items() if dimension == metric]
        result.figures |= {
            f"NVML {metric}, %": max(at_once, default=None),
            f"monitor's highest {metric}, %": highest.get(metric),
        }
        result.expect(max(at_once, default=0) > 0, f"NVML gives {metric} above 0")
        result.expect(highest.get(metric, 0) > 0, f"the monitor writes {metric} above 0")


def _files(folder: Path) -> list[Path]:
    """The monitor's files that have lines."""
    return [file for file in sorted(folder.glob("system/incremental/*/*.json")) if file.stat().st_size]

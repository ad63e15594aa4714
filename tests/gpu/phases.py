"""Item 5: the timeline's phases against work of known length, and against the whole step."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

import torch
from training.measure.timeline import Timeline

from tests.gpu.bench import Bench
from tests.gpu.clocks import host_milliseconds, queue_sleep
from tests.gpu.outcomes import Result

KNOWN = {
    "host_to_device": 5.0,
    "teacher_forward": 40.0,
    "student_forward": 20.0,
    "loss": 2.0,
    "backward": 30.0,
    "optimizer": 10.0,
}
"""Milliseconds that the GPU is kept busy in each phase."""

TOLERANCE = 0.05

NO_PHASES = ("step", "cpu", "data_wait")
"""Parts of a window that are not GPU phases."""


def known_phases(bench: Bench, result: Result) -> None:
    """Each phase is as long as the work queued in it, they make up the step, and there is no data wait."""
    timeline, work = Timeline(bench.device), _Work(bench)
    work(1.0)  # the first one loads the kernel
    bench.synchronize()
    timeline.start()
    for step in range(1, bench.sizes.steps + 1):
        with timeline.phase("data_wait"):
            pass
        for name, length in KNOWN.items():
            with timeline.phase(name):
                work(length, name)
        if step == bench.sizes.steps:  # as the loop does, which reads the loss before it closes a window
            bench.synchronize()
        timeline.step()
    window = timeline.window()
    phases, step = {name: seconds * 1000 for name, seconds in window.phases.items()}, window.step * 1000
    result.rows += [{"phase": name, "queued, ms": work.mean(name), "measured, ms": phases[name]} for name in KNOWN]
    whole = sum(phases[name] for name in KNOWN)
    result.figures |= {
        "phases together, ms": whole,
        "step, ms": step,
        "slowest step, ms": window.slowest_step * 1000,
        "data_wait, ms": phases["data_wait"],
    }
    bench.require_gpu("a comparison of times")
    for row in result.rows:
        off = abs(row["measured, ms"] - row["queued, ms"])
        result.expect(off <= TOLERANCE * row["queued, ms"] + 0.3, f"{row['phase']} is as long as what was queued in it")
    result.expect(abs(whole / step - 1) <= TOLERANCE, "the phases make up the step")
    result.expect(phases["data_wait"] < 1, "data_wait is below 1 ms")


class _Work:
    """Keeps the GPU, or without one the host, busy for about so many milliseconds, and knows how long that really took."""

    def __init__(self, bench: Bench):
        self.bench, self._taken = bench, defaultdict(list)

    def __call__(self, milliseconds: float, name: str = "") -> None:
        if self.bench.is_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            queue_sleep(milliseconds)
            end.record()
            self._taken[name].append(lambda: begin.elapsed_time(end))
        else:
            taken = host_milliseconds(lambda: time.sleep(milliseconds / 1e4))
            self._taken[name].append(lambda: taken)

    def mean(self, name: str) -> float:
        """Milliseconds of one piece of work; the GPU has done all of them."""
        return statistics.mean(taken() for taken in self._taken[name])


def real_steps(bench: Bench, result: Result) -> None:
    """If the GPU is the bottleneck, the phases make up the step, and data_wait is next to nothing. Checkpoints between two log lines, when
    the GPU is behind the host, take nothing from it."""
    sizes, steps = bench.sizes, bench.sizes.steps
    settings = bench.settings(
        student=sizes.student.name,
        global_batch_size=sizes.large_batch,
        log_every=steps,
        checkpoint_every=steps // 4 + 2,
        num_workers=2,
    )
    data = bench.noise(2 * steps * sizes.large_batch)
    engine = bench.engine(settings, data, bench.model(sizes.student), bench.teacher(sizes.teacher), checkpoints=True)
    engine.train(2 * steps)
    line = engine.timeline("steps")[-1]
    seconds = line["seconds"]
    phases = {name: value for name, value in seconds.items() if name not in NO_PHASES}
    covered, waited = sum(phases.values()) / seconds["step"], seconds["data_wait"] / seconds["step"]
    result.rows += [
        {"phase": name, "ms": value * 1000, "share of the step": value / seconds["step"]}
        for name, value in phases.items()
    ]
    result.figures |= {
        "step, ms": seconds["step"] * 1000,
        "images/s": line["extra"]["images_per_second"],
        "phases' share of the step": covered,
        "data_wait's share": waited,
        "slowest step, ms": line["extra"]["slowest_step"] * 1000,
    }
    bench.require_gpu("a step that the GPU limits")
    result.expect(0.95 <= covered <= 1.02, "the phases make up 95 to 102 % of the step")
    result.expect(waited < 0.05, "data_wait is below 5 % of the step")

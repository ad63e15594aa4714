"""Measures parts of a training step alone: the input side without the model, the model without its input side or its teacher.

A timeline does not show which half a run waits for: halves that run at the same time hide each other, and if they share cores, each
slows the other down. So a probe takes each away in turn. `measure` does so in a run of its own, which writes probe.json as it goes;
`input_alone` and `RepeatedBatch` measure one half in a run that trains.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from launcher_observer.process import process_started, worker_cpu_seconds

from training.data.dali.pipeline import DaliBatches
from training.data.loaders import Loaders
from training.data.workers import cores_per_process
from training.distributed.world import World
from training.engine.loop import States, Task, step_by_step
from training.engine.run import Run
from training.measure.timeline import WARM_UP_STEPS
from training.runtime import accelerator
from training.servers.remote import RemoteLoader
from training.settings.scripts import TrainingSettings

FILE = "probe.json"
"""In the first host's output folder."""

LONGEST_TURN = 2.5
"""Seconds of one turn if there is enough time; a measurement takes one or several."""

TURNS = {"as_it_is": 2, "one_batch": 2, "one_batch_without_teacher": 2, "input_alone": 1, "with_workers": 2, "again": 2}
"""Turns that each measurement takes."""

WARM_UP = 3
"""Uncounted steps at the start; more if each of many worker processes first makes a whole batch."""

LEAST, MOST = 4, 400
"""Steps that a measurement counts, unless they are far too slow for the time there is."""

AS_FAST = 0.95
"""Share of the fastest input side's speed from which fewer workers are as good: a smaller gain is lost in the noise."""

LONGEST_INPUT = 8.0
"""Seconds after which a slow input side is measured well enough."""

Open = Callable[[TrainingSettings], Loaders]
"""Opens the run's loaders with settings that differ in num_workers."""


class Stopped(Exception):
    """Some rank received SIGTERM."""


def measure(
    task: Task,
    states: States,
    loaders: Loaders,
    opened: Open,
    run: Run,
    *,
    without_teacher: Task | None = None,
) -> None:
    """Measure everything that there is time for, and write it to FILE. A collective, which trains the states on the way.

    Args:
        task, states, loaders: as `train` takes them. Each measurement opens its own loaders, whose workers end with it: work that
            they have begun would disturb the next one.
        without_teacher: the task without its teacher. None: it has none.
    """
    bench = _Bench(states, run, opened, run.environment.output_data_dir / FILE, loaders)
    with contextlib.suppress(Stopped):
        bench.measure_all(task, without_teacher)


class _Bench:
    """Runs one measurement after another, in step on all ranks."""

    def __init__(self, states: States, run: Run, opened: Open, file: Path, loaders: Loaders):
        self.states, self.run, self.opened, self.file = states, run, opened, file
        self.settings, self.world, self.log = run.settings, run.world, run.report.log
        self.today, self.kind = _workers(loaders)
        self.ends = process_started() + self.settings.probe_seconds
        self.turn, self.next_step = LONGEST_TURN, 0
        self.phases: dict[str, float] = {}
        self.found: dict[str, Any] = {
            "as_it_is": [],
            "one_batch": None,
            "one_batch_without_teacher": None,
            "input_alone": [],
            "with_workers": None,
            "phases": {},
            "left_out": {},
            "finished": False,
            "workers": self.today,
            "worker_kind": self.kind,
            "cores_per_process": cores_per_process(self.world, os.environ)[0],
            "world_size": self.world.size,
            "device": self.world.device.type,
            "device_name": accelerator.name(self.world.device),
        }

    def measure_all(self, task: Task, without_teacher: Task | None) -> None:
        found, counts = self.found, self.worker_counts()
        if self.kind == "remote":  # servers are still starting, which must not be measured
            next(_epochs(self._open(self.today), 0))
        left = self._agreed(self.ends - time.time())
        turns = sum(TURNS.values()) + (len(counts) - 1) * TURNS["input_alone"]
        self.turn = min(LONGEST_TURN, max(left, 0.0) / turns / 2)  # half of the time goes into warming up
        self.log(
            f"probe_seconds {self.settings.probe_seconds:g}: this run measures and does not train; {left:.0f} s are left, "
            f"{self.turn:.2f} s for each turn"
        )
        found["as_it_is"].append(self.whole_steps(task, self._open(self.today), "as_it_is"))
        found["phases"] = self.phases
        self.log_speed("as it is", found["as_it_is"][0])
        alone = self._open(0)
        alone = replace(alone, train=RepeatedBatch(alone.train))
        found["one_batch"] = self.whole_steps(task, alone, "one_batch")
        self.log_speed("on one batch over and over", found["one_batch"])
        if without_teacher is not None and self.there_is_time_for("one_batch_without_teacher"):
            found["one_batch_without_teacher"] = self.whole_steps(without_teacher, alone, "one_batch_without_teacher")
            self.log_speed("the same without the teacher", found["one_batch_without_teacher"])
        for count in counts:
            if self.there_is_time_for("input_alone", str(count)):
                found["input_alone"].append(self.input_alone(self._open(count), count))
                by = "servers" if self.kind == "remote" else f"{count} workers"
                self.log_speed(f"the input alone, {by}", found["input_alone"][-1]["images_per_second"])
        best = self.best_workers()
        if best is not None and self.there_is_time_for("with_workers"):
            speed = self.whole_steps(task, self._open(best), "with_workers")
            found["with_workers"] = {"workers": best, "images_per_second": speed}
            self.log_speed(f"whole steps with {best} workers", speed)
        if self.there_is_time_for("again"):  # shows how much the machine's other load varies
            found["as_it_is"].append(self.whole_steps(task, self._open(self.today), "again"))
            self.log_speed("as it is, again", found["as_it_is"][-1])
        found["finished"] = True
        self._write()

    def worker_counts(self) -> list[int]:
        """Numbers of workers to try: none, powers of two up to the cores of a process, that number of cores, and today's. If other hosts
        make the images, today's alone."""
        if self.kind == "remote":
            return [self.today]
        cores = int(self._agreed(self.found["cores_per_process"]))
        powers = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
        none = [] if self.kind == "dali" else [0]  # DALI has at least one thread
        return sorted({*none, *powers, max(cores, 1), self.today})

    def best_workers(self) -> int | None:
        """The fewest workers whose input side is about as fast as the fastest; None if whole steps need not be tried with them.

        Zero workers are no candidate: the training process would make the images between its steps.
        """
        speeds = {one["workers"]: one["images_per_second"] for one in self.found["input_alone"] if one["workers"]}
        if not speeds or self.found["one_batch"] * AS_FAST <= self.found["as_it_is"][0]:
            return None  # there is nothing to gain from the input side
        best = min(count for count, speed in speeds.items() if speed >= AS_FAST * max(speeds.values()))
        return None if best == self.today else best

    def whole_steps(self, task: Task, loaders: Loaders, name: str) -> float:
        """Images per second of optimizer steps, over all processes."""
        crowd = -(-loaders.crowd // loaders.train_batches.accumulation)
        seconds = TURNS[name] * self.turn
        self.run.timeline.start()
        steps = step_by_step(task, self.states, loaders, self.run, self.next_step)
        try:
            compiles = any(state.compiled for state in self.states) or getattr(self.settings, "compile_teacher", False)
            # a model is compiled in its first step, and recorded as CUDA graphs in the next two: none of them is counted
            warm, _ = self._advance(steps, max(WARM_UP, crowd), 0.0, math.inf if compiles else seconds)
            self.run.timeline.window()
            counted, elapsed = self._advance(steps, max(LEAST, crowd), seconds, 3 * seconds)
        finally:
            steps.close()  # its threads end with it
        if not isinstance(loaders.train, RepeatedBatch):
            self.next_step += warm + counted  # so that no file is read twice while there are others
        window = self.run.timeline.window()
        self.phases = {phase: round(mean / window.step, 4) for phase, mean in window.phases.items()}
        return counted * self.settings.global_batch_size / elapsed

    def input_alone(self, loaders: Loaders, workers: int) -> dict[str, float]:
        """Images per second of all processes' input sides, and CPU seconds per image, the mean over processes."""
        self._agreed(0.0)  # all at once: they share a host's cores
        began, seconds = time.perf_counter(), TURNS["input_alone"] * self.turn
        alone = input_alone(
            loaders,
            sys.maxsize,
            self.world,
            most_seconds=seconds,
            first_step=self.next_step,
            crowd=loaders.crowd,
        )
        speed = self._agreed(alone["input_images_per_second"]) * self.world.size
        images = self._agreed(time.perf_counter() - began) * speed
        self.next_step += math.ceil(images / self.settings.global_batch_size)
        return {
            "workers": workers,
            "images_per_second": speed,
            "cpu_seconds_per_image": self._agreed(alone["input_cpu_seconds_per_image"]),
        }

    def there_is_time_for(self, name: str, detail: str = "") -> bool:
        """Whether a measurement can end in time; if not, it is recorded as left out. The same on every rank."""
        self._write()
        left = self._agreed(self.ends - time.time())
        if left >= TURNS[name] * self.turn:
            return True
        self.found["left_out"][f"{name} {detail}".strip()] = f"{max(left, 0):.1f} s were left"
        return False

    def log_speed(self, what: str, speed: float) -> None:
        self.log(f"{what}: {speed:.1f} images/s")

    def _open(self, workers: int) -> Loaders:
        return self.opened(replace(self.settings, num_workers=workers))

    def _advance(self, steps: Iterator[None], least: int, seconds: float, longest: float) -> tuple[int, float]:
        """Do at least `least` steps, for at least `seconds`, but at most MOST steps and not much longer than `longest`.

        Returns:
            The number of steps and the seconds that they took, the same on every rank.
        """
        began, count, chunk, elapsed = time.perf_counter(), 0, 1, 0.0
        while (count < least or (elapsed < seconds and count < MOST)) and (not count or elapsed < longest):
            for _ in range(chunk):
                next(steps)
            count += chunk
            settle(self.world)
            elapsed = self._agreed(time.perf_counter() - began)
            fits = (max(seconds, longest / 3) - elapsed) * count / elapsed  # steps for which there is time
            chunk = int(min(2 * chunk, max(1, fits), max(1, max(least, MOST) - count)))
        return count, elapsed

    def _agreed(self, value: float) -> float:
        """The mean over all ranks, the same on each of them. A collective.

        Raises:
            Stopped: some rank received SIGTERM.
        """
        asked = torch.tensor([value, float(self.run.stop.received)], dtype=torch.float64, device=self.world.device)
        mean: float
        mean, stopped = (self.world.all_reduce_sum(asked) / self.world.size).tolist()
        if stopped:
            self._write()
            raise Stopped
        return mean

    def _write(self) -> None:
        if self.world.is_first:
            temporary = self.file.with_name(f".{self.file.name}")
            temporary.write_text(json.dumps(self.found, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, self.file)


def _workers(loaders: Loaders) -> tuple[int, str]:
    """How many workers make the training images now, and their kind: threads, processes, DALI's threads, or remote, with none in this
    process."""
    if isinstance(loaders.train, RemoteLoader):
        return 0, "remote"
    if isinstance(loaders.train, DaliBatches):
        return loaders.train.threads.count, "dali"
    return loaders.workers.count, loaders.workers.kind


class RepeatedBatch:
    """Takes a loader's place: its first batch, over and over."""

    def __init__(self, loader: Iterable[Any]):
        self._loader, self._first = loader, None

    def __iter__(self) -> Iterator[Any]:
        self._first = next(iter(self._loader)) if self._first is None else self._first
        return itertools.repeat(self._first)


def input_alone(
    loaders: Loaders,
    images: int,
    world: World,
    *,
    most_seconds: float = LONGEST_INPUT,
    first_step: int = 0,
    crowd: int = 0,
) -> dict[str, float]:
    """Make micro-batches for N images, or for some seconds, and drop them; a few warm-up batches before them do not count.

    Args:
        most_seconds: after which no more batches are made.
        first_step: the optimizer step, from 0 on, whose images come first.
        crowd: micro-batches that worker processes make in parallel and deliver all at once. At least as many warm up, and at least
            as many count, unless that takes three times `most_seconds`.

    Returns:
        input_images_per_second of this process, input_cpu_seconds_per_image (this process and its workers), and
        input_start_seconds: from asking the loader to its first batch, the start of its workers included.
    """
    asked, counted, batches, made = time.perf_counter(), 0, 0, _epochs(loaders, first_step)
    next(made)
    settle(world)
    first = time.perf_counter() - asked
    for _ in range(max(crowd + 1, WARM_UP_STEPS) - 1):
        next(made)
    settle(world)
    began, cpu = time.perf_counter(), time.process_time() + worker_cpu_seconds()
    while not counted or (
        counted < images and time.perf_counter() - began < most_seconds * (1 if batches >= crowd else 3)
    ):
        counted, batches = counted + len(next(made).images), batches + 1
    settle(world)
    seconds, cpu = time.perf_counter() - began, time.process_time() + worker_cpu_seconds() - cpu
    return {
        "input_images_per_second": counted / seconds,
        "input_cpu_seconds_per_image": cpu / counted,
        "input_start_seconds": first,
    }


def _epochs(loaders: Loaders, first_step: int) -> Iterator[Any]:
    """Batches, one epoch after another."""
    epoch, step = divmod(first_step, len(loaders.train_batches))
    for number in itertools.count(epoch + 1):
        loaders.train_batches.start(number, step)
        yield from loaders.train
        step = 0


def settle(world: World) -> None:
    """Wait for pending work on a GPU."""
    accelerator.synchronize(world.device)

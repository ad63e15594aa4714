"""The question of the scaling study: one job on several numbers of hosts, with the same batch per process (weak) or in total (strong)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launcher import backends
from launcher.backends.local_hosts import core_count
from launcher.backends.plans import plan
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job, StudySection
from launcher.runner.run import Run
from launcher.show.text import counted
from launcher.study import scaling_measures
from launcher.study.conditions import settings_of
from launcher.study.question import WARM_UP_STEPS, Question, Trial, alternating, planning_errors, read

VARIED = ("global_batch_size", "epochs", "max_steps", "log_every", "evaluate_every", "checkpoint_every")
"""Hyperparameters that the study sets."""

WINDOW = WARM_UP_STEPS
"""Steps that are measured together: the first window is the warm-up."""

NEVER = 10**6
"""Epochs or steps that no trial reaches."""

THREADS = "OMP_NUM_THREADS"


@dataclass(kw_only=True)
class ScalingQuestion(Question):
    """How does a job scale?"""

    kind: ClassVar[str] = "scaling"
    keys: ClassVar[tuple[str, ...]] = ("hosts", "global_batch", "repeat")
    """A size may belong to both weak and strong scaling, so neither is a column."""
    measured: ClassVar[tuple[str, ...]] = scaling_measures.MEASURED

    cores: int | None = None
    """Cores of the one machine that all hosts share; None: each has its own machine or GPUs."""

    @classmethod
    def of(cls, config: str | Path, overrides: Sequence[str], on: str, smoke: bool) -> ScalingQuestion:
        """The question about a config.

        Raises:
            UserError: every mistake in the config, the overrides and the sizes.
        """
        job, found = read(config, overrides, smoke)
        plan(job, on=on)  # refuses an unknown backend
        grid = job.study or StudySection()
        grid = grid.model_copy(update={"hosts": sorted(set(grid.hosts))})
        shared = backends.get(on).hosts_share_a_machine()
        base, cores, notes = _on_one_machine(job, grid, on) if shared else (job, None, [])
        base = base.model_copy(update={"compute": base.compute.model_copy(update={"instance_count": 1})})
        each = backends.get(on).world_size(base)
        readable = not any("study." in issue.key for issue in found)
        mistakes = [*_about_the_job(job, grid, on), *(_about_the_batches(job, grid, each) if readable else ())]
        found += mistakes
        if readable and not mistakes:
            grid = grid.model_copy(update={"batches": _batches(job, grid, each)})
            sizes = (_sized(base, grid, hosts, batch) for hosts, batch in _sizes(base, grid, each))
            found += planning_errors(sizes, on, found)
        if found:
            raise UserError(found, str(config))
        return cls(job=job, base=base, on=on, small=smoke, grid=grid, notes=notes, cores=cores)

    @property
    def processes_per_host(self) -> int:
        """As planned: an emulator's hosts may run fewer."""
        return backends.get(self.on).world_size(self.base)

    def trials(self) -> Iterator[Trial]:
        """All sizes in each repeat, in alternating order."""
        sizes = _sizes(self.base, self.grid, self.processes_per_host)
        for repeat in range(1, self.grid.repeats + 1):
            for hosts, batch in alternating(sizes, repeat):
                key = {"hosts": hosts, "global_batch": batch, "repeat": repeat}
                name = f"{counted(hosts, 'host')}, global batch {batch}"
                yield Trial(key, _sized(self.base, self.grid, hosts, batch), name, (hosts, batch))

    def settings(self) -> str:
        """The shared settings, without hosts and batches."""
        threads = self.base.environment.get(THREADS)
        others = {name: value for name, value in self.base.environment.items() if name != THREADS}
        values = json.loads(settings_of(self.base.model_copy(update={"environment": others}), VARIED))
        return json.dumps({**values, "threads": threads, "steps": self.grid.steps}, sort_keys=True)

    def measure(self, run: Run) -> dict[str, Any]:
        return scaling_measures.of_run(run)

    def progress(self, measured: dict[str, Any]) -> str:
        return f"{measured['images_per_second']:.1f} images/s, {measured['step_seconds'] * 1000:.1f} ms a step"


def _sizes(base: Job, grid: StudySection, each: int) -> list[tuple[int, int]]:
    """(hosts, global batch) of every size, once.

    Args:
        each: processes per host.
    """
    found: list[tuple[int, int]] = []
    for hosts in grid.hosts:
        weak = [batch * hosts * each for batch in grid.batches] if grid.mode != "strong" else []
        strong = [base.hyperparameters["global_batch_size"]] if grid.mode != "weak" else []
        found += [(hosts, batch) for batch in (*weak, *strong)]
    return list(dict.fromkeys(found))


def _sized(job: Job, grid: StudySection, hosts: int, batch: int) -> Job:
    """The job at one size: the warm-up, then the steps that the study counts, with nothing between them."""
    steps = WARM_UP_STEPS + math.ceil(grid.steps / WINDOW) * WINDOW
    kept = {name: value for name, value in job.hyperparameters.items() if name not in VARIED}
    own = {"global_batch_size": batch, "epochs": NEVER, "max_steps": steps, "log_every": WINDOW}
    own |= {"evaluate_every": NEVER, "checkpoint_every": NEVER}
    compute = job.compute.model_copy(update={"instance_count": hosts})
    return job.model_copy(update={"hyperparameters": {**kept, **own}, "compute": compute, "study": None})


def _on_one_machine(job: Job, grid: StudySection, on: str) -> tuple[Job, int | None, list[str]]:
    """The job with the same share of this machine for each host, whatever their number; the cores that they share, or None if
    each process has a GPU; and notes about it."""
    most, gpus = max(grid.hosts), backends.get(on).gpus_here(job)
    compute = job.compute
    if gpus:
        each = compute.processes_per_host or max(1, gpus // most)
        note = f"all hosts run on this machine and share its CPU and memory, with {counted(each, 'GPU')} per host"
        return job.model_copy(update={"compute": compute.model_copy(update={"processes_per_host": each})}), None, [note]
    cores, each = core_count(), compute.processes_per_host or 1
    asked = job.hyperparameters.get("num_workers", "auto")
    workers = asked if isinstance(asked, int) else 0
    threads = job.environment.get(THREADS) or str(max(1, cores // (most * each) - workers))
    job = job.model_copy(update={"environment": {**job.environment, THREADS: threads}})
    and_workers = f" and {counted(workers, 'data worker')}" if workers else ""
    notes = [
        f"all hosts run on this machine and share its {cores} cores, memory and caches; each process has {threads} "
        f"thread{'s' if threads != '1' else ''}{and_workers} at every size"
    ]
    if asked == "auto":
        job = job.model_copy(update={"hyperparameters": {**job.hyperparameters, "num_workers": 0}})
        notes.append("num_workers is 0: data workers would take cores from the other hosts")
    crowded = [hosts for hosts in grid.hosts if threads.isdecimal() and hosts * each * (int(threads) + workers) > cores]
    if crowded:
        notes.append(
            f"{', '.join(map(str, crowded))} hosts have more threads and data workers than this machine has cores: they are listed "
            "without an efficiency, and left out of the model and the advice"
        )
    return job, cores, notes


def _about_the_job(job: Job, grid: StudySection, on: str) -> Iterator[Issue]:
    if job.source is not None:
        found = "your own script: the study cannot set its batch and steps"
        yield Issue(key="source", found=found, fix="remove source and use a script of this kit")
    if job.distribution == "none" and grid.hosts != [1]:
        fix = "write distribution: torchrun (or smddp)"
        yield Issue(key="distribution", found="none: with several hosts, each would train alone", fix=fix)
    if job.compute.instance_groups:
        fix = "write compute.instance_type"
        yield Issue(key="compute.instance_groups", found="hosts of different types cannot be compared", fix=fix)
    if job.hyperparameters.get("batch_size_per_device") == "auto":
        fix = "write a number, or null for the whole share"
        found = "auto: each size could choose a different one"
        yield Issue(key="hyperparameters.batch_size_per_device", found=found, fix=fix)
    gpus, most = backends.get(on).gpus_here(job), max(grid.hosts)
    processes = most * (job.compute.processes_per_host or 1)
    if 0 < gpus < processes:
        fix = "fewer study.hosts; or CUDA_VISIBLE_DEVICES= before the command, to train on the CPU at every size"
        found = f"{most} hosts need {processes} GPUs, this machine has {gpus}: they would train on the CPU, the others on GPUs"
        yield Issue(key="study.hosts", found=found, fix=fix)
    for name in ("deadline_hours", "budget_usd"):
        if getattr(grid, name) is not None and not isinstance(job.hyperparameters.get("epochs"), int):
            fix = "write hyperparameters.epochs"
            yield Issue(key=f"study.{name}", found="the number of epochs is not set", fix=fix)


def _about_the_batches(job: Job, grid: StudySection, each: int) -> Iterator[Issue]:
    """Args: each: processes per host."""
    whole, key = job.hyperparameters.get("global_batch_size"), "hyperparameters.global_batch_size"
    if not isinstance(whole, int) or isinstance(whole, bool) or whole < 1:
        if not (grid.mode == "weak" and grid.batches):
            yield Issue(
                key=key, found="missing" if whole is None else repr(whole), fix="write it: every size derives from it"
            )
        return
    own = job.compute.instance_count * each
    if grid.mode != "strong" and not grid.batches and whole % own:
        found = (
            f"{whole} is not divisible by the job's {own} processes on {counted(job.compute.instance_count, 'host')}"
        )
        yield Issue(key=key, found=found, fix="set study.batches, the images per process of weak scaling")
    odd = [hosts for hosts in grid.hosts if whole % (hosts * each)]
    if grid.mode != "weak" and odd:
        together = math.lcm(*(hosts * each for hosts in grid.hosts))
        near = max(together, round(whole / together) * together)
        found = f"{', '.join(map(str, odd))}: the global batch of {whole} is not divisible by their processes"
        fix = f"leave them out, write {key}: {near}, or use --mode weak"
        yield Issue(key="study.hosts", found=found, fix=fix)


def _batches(job: Job, grid: StudySection, each: int) -> list[int]:
    """Images per process of weak scaling: the grid's, or the job's own batch on its own hosts."""
    if grid.batches or grid.mode == "strong":
        return sorted(set(grid.batches))
    return [job.hyperparameters["global_batch_size"] // (job.compute.instance_count * each)]

"""How a job scales: one job on several numbers of hosts, weakly and strongly, a model of what was measured, and the hosts to take."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.aws import prices
from launcher.backends.local_hosts import core_count, gpu_count
from launcher.backends.plans import plan
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job, StudySection
from launcher.config.loading import load
from launcher.planner.source_package import source_files
from launcher.record import records
from launcher.study import scaling_advice, scaling_measures, scaling_model, scaling_report, scaling_sizes
from launcher.study.measures import WARM_UP_STEPS
from launcher.study.scaling_model import HeldOut, ScalingModel
from launcher.study.scaling_sizes import Line, Size
from launcher.study.trials import (
    Row,
    Table,
    code_checksum,
    commit_of,
    held,
    machine_of,
    settings_of,
    tell_the_price,
    try_once,
)

KEYS = ("hosts", "global_batch", "repeat")
"""What tells a trial: a size may be one of weak and of strong scaling."""

VARIED = ("global_batch_size", "epochs", "max_steps", "log_every", "evaluate_every", "checkpoint_every")
"""Hyperparameters that are the study's."""

WINDOW = WARM_UP_STEPS
"""Steps that are measured together: the first window is the warm-up."""

NEVER = 10**6
"""Epochs or steps that no trial has."""

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Trial:
    """One run at one size."""

    key: dict[str, Any]
    job: Job

    def __str__(self) -> str:
        hosts = self.key["hosts"]
        return f"{hosts} host{'s' if hosts > 1 else ''}, batch {self.key['global_batch']} in all, repeat {self.key['repeat']}"


@dataclass
class ScalingStudy:
    """What the trials say. `print` it, show it in a notebook, `plot` it; `table`, `lines`, `model` and `held_out` are for machines:
    `found.model.step(hosts=4, batch=8).seconds` is that of a size that was not run.

    >>> few = ["study.hosts=[1]", "study.batches=[4]", "study.mode=weak", "study.repeats=1", "study.steps=5"]
    >>> found = launcher.study.scaling("configs/hyundai_segmentation.yaml", few, smoke=True, say=lambda line: None)
    >>> found.plot("scaling.svg").name
    'scaling.svg'
    """

    job: Job
    on: str
    file: Path
    """The table, a CSV file."""
    grid: StudySection
    """With nothing left open."""
    table: list[Row]
    """The lines of the grid's trials."""
    cores: int | None = None
    """Of the one machine that all hosts were on; None: each had a machine, or GPUs, of its own."""
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Trials that did not complete, and why; the same command tries them again."""

    @property
    def sizes(self) -> list[Size]:
        return scaling_sizes.sizes(self.table, self.cores)

    @property
    def lines(self) -> list[Line]:
        """Weak scaling, a line for each batch a process, then strong scaling; each as far as the mode has it."""
        batches = [] if self.grid.mode == "strong" else self.grid.batches
        whole = None if self.grid.mode == "weak" else self.job.hyperparameters["global_batch_size"]
        return scaling_sizes.lines(self.sizes, batches, whole)

    @cached_property
    def model(self) -> ScalingModel | None:
        """Fitted to the sizes whose hosts share no cores; None where there is none."""
        points = self._points
        return scaling_model.fit(points, self.gradient_bytes) if points else None

    @cached_property
    def held_out(self) -> list[HeldOut]:
        """Each measured size as a model predicts it that was fitted to the others."""
        return scaling_model.held_out(self._points, self.gradient_bytes)

    @cached_property
    def hosts_held_out(self) -> list[HeldOut]:
        """The same, by a model that saw no size with as many hosts; empty with fewer than three host counts."""
        return scaling_model.hosts_held_out(self._points, self.gradient_bytes)

    @property
    def gradient_bytes(self) -> float:
        """That a process gives to the exchange each step."""
        return float(self.table[0]["gradient_bytes"])

    @property
    def usd_an_hour(self) -> float | None:
        """Of one host; None: no price known."""
        return host_price(self.job, self.on)

    def offers(self, line: Line) -> list[scaling_advice.Offer]:
        """What the whole training would take on each number of hosts; empty where its images or epochs are not known."""
        size, epochs = line.sizes[0], self.job.hyperparameters.get("epochs")
        images = (size.images or 0) * (epochs if isinstance(epochs, int) else 0)
        return (
            scaling_advice.offers(line, self.model, size.processes // size.hosts, images, self.usd_an_hour)
            if images
            else []
        )

    @property
    def verdict(self) -> str:
        """The answer in a few lines."""
        return "\n".join(scaling_report.verdict(self))

    def __str__(self) -> str:
        return scaling_report.text(self)

    def __repr__(self) -> str:
        return f"<scaling study {self.file.name}: {len(self.table)} trials>"

    def _repr_html_(self) -> str:
        return scaling_report.html(self)

    def plot(self, file: str | Path) -> Path:
        """Write the charts, images a second beside the ideal line and efficiency, as SVG."""
        records.write_atomically(Path(file), scaling_report.charts(self))
        return Path(file)

    @property
    def _points(self) -> list[scaling_model.Point]:
        there = {(size.hosts, size.global_batch) for line in self.lines for size in line.clean}
        return [
            size.point(backends.get(self.on).on_this_machine)
            for size in self.sizes
            if (size.hosts, size.global_batch) in there
        ]


def scaling(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    on: str = "process",
    smoke: bool = False,
    table: str | Path | None = None,
    max_cost: float | None = None,
    say: Callable[[str], None] = print,
) -> ScalingStudy:
    """Run the trials of a config's `study` section that the table does not hold yet, and tell what all of them say.

    >>> few = ["study.hosts=[1]", "study.batches=[4]", "study.mode=weak", "study.repeats=1", "study.steps=5"]
    >>> found = launcher.study.scaling("configs/hyundai_segmentation.yaml", few, smoke=True, say=lambda line: None)
    >>> [(size.hosts, size.global_batch) for size in found.sizes]
    [(1, 4)]

    Args:
        config: a YAML file whose script is one of this kit's.
        overrides: `key=value` texts, for example study.hosts=[1,2,4] or study.mode=weak.
        on: the backend. On one machine the hosts share its cores; those that have too few are told and not judged.
        smoke: lay the config's smoke section over it.
        table: the CSV file. None: studies/<job>-scaling-<backend>[-smoke].csv among the runs.
        max_cost: refuse trials that could cost more US dollars than this together, or whose price is not known.
        say: takes a line for people at each trial.

    Raises:
        UserError: every mistake in the config, the overrides and the sizes, at once; or a table of other trials.
    """
    asked, base, grid, cores, notes = _checked(config, overrides, on, smoke)
    for note in notes:
        say(note)
    file = Path(table) if table is not None else _own_file(asked, on, smoke)
    first = plan(base, on=on)
    alike = {
        "code": code_checksum(source_files(first.source)[0]),
        "settings": _settings(base, grid),
        "machine": machine_of(base, on),
    }
    with held(file):
        known = Table(file, KEYS, scaling_measures.MEASURED, alike, commit_of(first.source))
        every = list(trials(base, grid, _processes_a_host(base, on)))
        missing = [trial for trial in every if known.find(trial.key) is None]
        say(f"{len(every)} trials, {len(every) - len(missing)} of them in {file}")
        if missing:
            tell_the_price([plan(trial.job, on=on) for trial in missing], max_cost, say)
        failed = _run(missing, known, on, say)
        rows = [row for trial in every if (row := known.find(trial.key)) is not None]
    return ScalingStudy(asked, on, file, grid, rows, cores, notes, failed)


def trials(job: Job, grid: StudySection, processes_a_host: int) -> Iterator[Trial]:
    """All trials of a grid: the sizes take turns, forwards and backwards, so that none of them always has the warmer machine."""
    found: list[tuple[int, int]] = []
    for hosts in grid.hosts:
        weak = [batch * hosts * processes_a_host for batch in grid.batches] if grid.mode != "strong" else []
        strong = [job.hyperparameters["global_batch_size"]] if grid.mode != "weak" else []
        found += [(hosts, batch) for batch in (*weak, *strong)]
    found = list(dict.fromkeys(found))
    for repeat in range(1, grid.repeats + 1):
        for hosts, batch in found if repeat % 2 else reversed(found):
            key = {"hosts": hosts, "global_batch": batch, "repeat": repeat}
            yield Trial(key, _sized(job, grid, hosts, batch))


def host_price(job: Job, on: str) -> float | None:
    """US dollars an hour of one host; None: not known. This machine has the price that the config gives it, and no other."""
    if backends.get(on).on_this_machine and job.compute.price_per_hour is None:
        return None
    compute = job.compute.model_copy(update={"instance_count": 1})
    if compute.instance_type is None:
        return compute.price_per_hour
    return prices.price(job.model_copy(update={"compute": compute})).per_hour


def _sized(job: Job, grid: StudySection, hosts: int, batch: int) -> Job:
    """The job at one size, with as many steps as the study counts and nothing between them."""
    steps = WARM_UP_STEPS + math.ceil(grid.steps / WINDOW) * WINDOW
    kept = {name: value for name, value in job.hyperparameters.items() if name not in VARIED}
    own = {"global_batch_size": batch, "epochs": NEVER, "max_steps": steps, "log_every": WINDOW}
    own |= {"evaluate_every": NEVER, "checkpoint_every": NEVER}
    compute = job.compute.model_copy(update={"instance_count": hosts})
    return job.model_copy(update={"hyperparameters": {**kept, **own}, "compute": compute, "study": None})


def _settings(base: Job, grid: StudySection) -> str:
    """What all trials share, as JSON; their hosts and batches are not of it."""
    threads = base.environment.get(THREADS)
    plain = base.model_copy(
        update={"environment": {name: value for name, value in base.environment.items() if name != THREADS}}
    )
    return json.dumps(
        {**json.loads(settings_of(plain, VARIED)), "threads": threads, "steps": grid.steps}, sort_keys=True
    )


def _run(missing: Sequence[Trial], known: Table, on: str, say: Callable[[str], None]) -> list[str]:
    """Run trials one after the other; why some did not complete. A size that fails is not tried again."""
    failed, given_up = [], set()
    for number, trial in enumerate(missing, 1):
        size = (trial.key["hosts"], trial.key["global_batch"])
        if size in given_up:
            failed.append(f"{trial}: left out, because it failed before")
            continue
        run, told = try_once(trial.job, on, say=say), f"{number}/{len(missing)}  {trial}"
        try:
            if run.state != records.COMPLETED:
                why = " ".join(run.outcome().get("failure", "").split())[:300]
                raise RuntimeError(f"{run.state}{': ' if why else ''}{why}")
            measured = scaling_measures.of_run(run)
        except (RuntimeError, UserError) as error:
            given_up.add(size)
            failed.append(f"{trial}: {error}; launcher logs {run.name}")
            say(f"{told}: {run.state}")
            continue
        known.add(trial.key, measured, run)
        say(f"{told}: {measured['images_per_second']:.1f} images/s, {measured['step_seconds'] * 1000:.1f} ms a step")
    return failed


def _own_file(job: Job, on: str, smoke: bool) -> Path:
    return records.store() / "studies" / f"{job.name}-scaling-{on}{'-smoke' if smoke else ''}.csv"


def _processes_a_host(job: Job, on: str) -> int:
    one = job.model_copy(update={"compute": job.compute.model_copy(update={"instance_count": 1})})
    return backends.get(on).world_size(one)


def _checked(
    config: str | Path, overrides: Sequence[str], on: str, smoke: bool
) -> tuple[Job, Job, StudySection, int | None, list[str]]:
    """The job as it was asked for, the one that the sizes are made of, the grid with nothing left open, the cores that all hosts
    share, and what is to be known. Raises UserError with all mistakes."""
    found: list[Issue] = []
    try:
        job: Job | None = load(config, overrides, smoke=smoke)
    except UserError as error:
        found, job = list(error.issues), error.rest
    if job is None:
        raise UserError(found, str(config))
    plan(job, on=on)  # no such backend
    grid = job.study or StudySection()
    grid = grid.model_copy(update={"hosts": sorted(set(grid.hosts))})
    base, cores, notes = _on_one_machine(job, grid, on) if backends.get(on).on_this_machine else (job, None, [])
    base = base.model_copy(update={"compute": base.compute.model_copy(update={"instance_count": 1})})
    each = _processes_a_host(base, on)
    wrong_grid = any("study." in issue.key for issue in found)
    mistakes = list(_about_the_job(job, grid, on)) + ([] if wrong_grid else list(_about_the_batches(job, grid, each)))
    found += mistakes
    if not mistakes and not wrong_grid:
        grid = grid.model_copy(update={"batches": _batches(job, grid, each)})
        known = {issue.key.split(" (line")[0] for issue in found}
        seen = {str(issue) for issue in found}
        for trial in trials(base, grid.model_copy(update={"repeats": 1}), each):
            for issue in plan(trial.job, on=on).errors:
                if issue.key not in known and str(issue) not in seen:
                    seen.add(str(issue))
                    found.append(issue)
    if found:
        raise UserError(found, str(config))
    return job, base, grid, cores, notes


def _on_one_machine(job: Job, grid: StudySection, on: str) -> tuple[Job, int | None, list[str]]:
    """The job with the same share of this machine for each host, whatever their number; the cores that they share, None where
    each process has a GPU; and what is to be known of it."""
    most, gpus = max(grid.hosts), gpu_count()
    compute = job.compute
    if gpus:
        each = compute.processes_per_host or max(1, gpus // most)
        told = f"all hosts are on this machine and share its CPU and memory; {each} GPU{'s' if each > 1 else ''} a host"
        return job.model_copy(update={"compute": compute.model_copy(update={"processes_per_host": each})}), None, [told]
    cores, each = core_count(), compute.processes_per_host or 1
    threads = job.environment.get(THREADS) or str(max(1, cores // (most * each)))
    job = job.model_copy(update={"environment": {**job.environment, THREADS: threads}})
    notes = [
        f"all hosts are on this machine and share its {cores} cores, memory and caches: each process has {threads} "
        f"thread{'s' if threads != '1' else ''} at every size"
    ]
    if job.hyperparameters.get("num_workers", "auto") == "auto":
        job = job.model_copy(update={"hyperparameters": {**job.hyperparameters, "num_workers": 0}})
        notes.append("num_workers 0: data workers would take the cores of other hosts")
    crowded = [hosts for hosts in grid.hosts if threads.isdecimal() and hosts * each * int(threads) > cores]
    if crowded:
        notes.append(
            f"{', '.join(map(str, crowded))} hosts have more threads than there are cores: shown as sharing cores, and left out of "
            "efficiency, the model and the advice"
        )
    return job, cores, notes


def _about_the_job(job: Job, grid: StudySection, on: str) -> Iterator[Issue]:
    if job.source is not None:
        fix = "remove source, and take a script of this kit"
        yield Issue(key="source", found="a script of yours, whose batch and steps the study cannot set", fix=fix)
    if job.distribution == "none" and grid.hosts != [1]:
        fix = "write distribution: torchrun (or smddp)"
        yield Issue(key="distribution", found="none: several hosts would know nothing of each other", fix=fix)
    if job.compute.instance_groups:
        fix = "write compute.instance_type"
        yield Issue(key="compute.instance_groups", found="hosts of several types cannot be compared", fix=fix)
    if job.hyperparameters.get("batch_size_per_device") == "auto":
        fix = "write a number, or null for the whole share"
        found = "auto: each size could choose another one"
        yield Issue(key="hyperparameters.batch_size_per_device", found=found, fix=fix)
    gpus, most = gpu_count() if backends.get(on).on_this_machine else 0, max(grid.hosts)
    processes = most * (job.compute.processes_per_host or 1)
    if 0 < gpus < processes:
        fix = "fewer study.hosts; or CUDA_VISIBLE_DEVICES= before the command, to train on the CPU at every size"
        found = f"{most} hosts want {processes} GPUs of {gpus}: they would train on the CPU, the others on GPUs"
        yield Issue(key="study.hosts", found=found, fix=fix)
    if grid.deadline_hours is not None and not isinstance(job.hyperparameters.get("epochs"), int):
        fix = "write hyperparameters.epochs"
        yield Issue(key="study.deadline_hours", found="how many epochs the training has is not said", fix=fix)


def _about_the_batches(job: Job, grid: StudySection, each: int) -> Iterator[Issue]:
    """Args: each: processes a host."""
    whole, key = job.hyperparameters.get("global_batch_size"), "hyperparameters.global_batch_size"
    if not isinstance(whole, int) or isinstance(whole, bool) or whole < 1:
        if not (grid.mode == "weak" and grid.batches):
            yield Issue(
                key=key, found="missing" if whole is None else repr(whole), fix="write it: the sizes are made of it"
            )
        return
    own = job.compute.instance_count * each
    if grid.mode != "strong" and not grid.batches and whole % own:
        found = (
            f"{whole} images do not divide by the {own} processes of the job's own {job.compute.instance_count} hosts"
        )
        yield Issue(key=key, found=found, fix="give study.batches, images a process, for weak scaling")
    odd = [hosts for hosts in grid.hosts if whole % (hosts * each)]
    if grid.mode != "weak" and odd:
        together = math.lcm(*(hosts * each for hosts in grid.hosts))
        near = max(together, round(whole / together) * together)
        found = f"{', '.join(map(str, odd))}: {whole} images in all do not divide by that many hosts' processes"
        fix = f"leave them out, write {key}: {near}, or --mode weak"
        yield Issue(key="study.hosts", found=found, fix=fix)


def _batches(job: Job, grid: StudySection, each: int) -> list[int]:
    """Images a process of weak scaling: as the grid says, or what the job's own batch is on its own hosts."""
    own = [job.hyperparameters["global_batch_size"] // (job.compute.instance_count * each)] * (grid.mode != "strong")
    return sorted(set(grid.batches or own))

"""Which way of preprocessing feeds a model: a grid of models, ways and augmentation loads, each cell trained, and the answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.backends.local_hosts import gpu_count
from launcher.backends.plans import plan
from launcher.config import yaml_file
from launcher.config.issues import Issue, UserError, did_you_mean
from launcher.config.job import Job, StudySection, Way
from launcher.config.loading import load
from launcher.planner.source_package import source_files
from launcher.record import records
from launcher.study import measures, report
from launcher.study.cells import Cell, cells
from launcher.study.model_names import timm_models, unknown
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

SCRIPT = "train_classifier.py"

WAYS: dict[Way, dict[str, Any]] = {
    "cpu_reference": {"preprocessing": "cpu_reference"},
    "cpu": {"preprocessing": "cpu"},
    "cpu_composed": {"preprocessing": "cpu", "compose_augmentation": True},
    "dali": {"preprocessing": "dali"},
}
"""The hyperparameters of each way."""

VARIED = ("model", "preprocessing", "compose_augmentation", "augmentation_load", "repeat_batch", "probe_input_images")
"""Hyperparameters that are the study's."""

KEYS = ("part", "model", "way", "load", "repeat")
"""What tells a trial: `part` is training, or model for the model on one batch over and over, which has neither way nor load."""

PROBED_IMAGES = 256
"""By which the input side alone is measured, before each training."""


@dataclass(frozen=True)
class Trial:
    """One run of the grid."""

    key: dict[str, Any]
    job: Job

    def __str__(self) -> str:
        what = f"{self.key['way']}, load {self.key['load']}" if self.key["way"] else "the model alone"
        return f"{self.key['model']}, {what}, repeat {self.key['repeat']}"


@dataclass
class PreprocessingStudy:
    """What the trials say. `print` it, or show it in a notebook; `table` and `cells` are for machines.

    >>> few = ["study.loads=[1]", "study.ways=[cpu]", "study.repeats=1", "hyperparameters.max_steps=8"]
    >>> found = launcher.study.preprocessing("configs/dali_imagenette.yaml", few, smoke=True, say=lambda line: None)
    >>> found.verdict.splitlines()[0]
    'resnet18, load 1: cpu alone was tried; ...'
    >>> found.plot("trials.svg").name
    'trials.svg'
    """

    job: Job
    on: str
    file: Path
    """The table, a CSV file."""
    grid: StudySection
    table: list[Row]
    """The lines of the grid's trials."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    failed: list[str] = field(default_factory=list)
    """Trials that did not complete, and why; the same command tries them again."""

    @property
    def cells(self) -> list[Cell]:
        return cells(self.table, self.grid.models, self.grid.ways, self.grid.loads)

    @property
    def verdict(self) -> str:
        """The answer in a few lines."""
        return "\n".join(report.verdict(self.cells, self.grid.ways, self.job))

    def __str__(self) -> str:
        return report.text(self.cells, self.grid.ways, self.job, [*self.notes, *self.failed])

    def __repr__(self) -> str:
        return f"<preprocessing study {self.file.name}: {len(self.table)} trials>"

    def _repr_html_(self) -> str:
        return report.html(self.cells, self.grid.ways, self.job, [*self.notes, *self.failed])

    def plot(self, file: str | Path) -> Path:
        """Write the two charts, seconds an epoch and how much less the other ways take, as SVG."""
        records.write_atomically(Path(file), report.charts(self.cells, self.grid.ways))
        return Path(file)


def preprocessing(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    on: str = "process",
    smoke: bool = False,
    table: str | Path | None = None,
    max_cost: float | None = None,
    say: Callable[[str], None] = print,
) -> PreprocessingStudy:
    """Run the trials of a config's `study` section that the table does not hold yet, and tell what all of them say.

    >>> few = ["study.loads=[1]", "study.ways=[cpu]", "study.repeats=1", "hyperparameters.max_steps=8"]
    >>> found = launcher.study.preprocessing("configs/dali_imagenette.yaml", few, smoke=True, say=lambda line: None)
    >>> [(cell.model, cell.way, cell.load) for cell in found.cells]
    [('resnet18', 'cpu', 1)]

    Args:
        config: a YAML file whose script is train_classifier.py.
        overrides: `key=value` texts, for example study.loads=[1,12] or hyperparameters.max_steps=50.
        on: the backend.
        smoke: lay the config's smoke section over it. So it is on a machine without a GPU too.
        table: the CSV file. None: studies/<job>-preprocessing-<backend>[-smoke].csv among the runs.
        max_cost: refuse trials that could cost more US dollars than this together, or whose price is not known.
        say: takes a line for people at each trial.

    Raises:
        UserError: every mistake in the config, the overrides and the grid, at once; or a table of other trials.
    """
    small = smoke or _to_be_small(config, on)
    if small and not smoke:
        say(f"no GPU here: the CPU paths are compared on smaller images, as the smoke section of {config} says")
    job, grid, notes = _checked(config, overrides, on, small)
    for note in notes:
        say(note)
    name = f"{job.name}-preprocessing-{on}{'-smoke' if small else ''}.csv"
    file = Path(table) if table is not None else records.store() / "studies" / name
    first = plan(job, on=on)
    alike = {
        "code": code_checksum(source_files(first.source)[0]),
        "settings": settings_of(job, VARIED),
        "machine": machine_of(job, on),
    }
    with held(file):
        known = Table(file, KEYS, measures.MEASURED, alike, commit_of(first.source))
        every = list(trials(job, grid))
        missing = [trial for trial in every if known.find(trial.key) is None]
        say(f"{len(every)} trials, {len(every) - len(missing)} of them in {file}")
        if missing:
            tell_the_price([plan(missing[0].job, on=on)] * len(missing), max_cost, say)
        failed = _run(missing, known, on, say)
        rows = [row for trial in every if (row := known.find(trial.key)) is not None]
    return PreprocessingStudy(job, on, file, grid, rows, notes, failed)


def trials(job: Job, grid: StudySection) -> Iterator[Trial]:
    """All trials of a grid: the ways take turns, forwards and backwards, so that none of them always has the warmer machine."""
    for repeat in range(1, grid.repeats + 1):
        for model in grid.models:
            alone = {"model": model, **WAYS[grid.ways[0]], "repeat_batch": True}
            yield Trial(dict(part="model", model=model, way="", load="", repeat=repeat), _varied(job, alone))
            for load_factor in grid.loads:
                for way in grid.ways if repeat % 2 else reversed(grid.ways):
                    values = {"model": model, **WAYS[way], "augmentation_load": load_factor}
                    key = dict(part="training", model=model, way=way, load=load_factor, repeat=repeat)
                    yield Trial(key, _varied(job, {**values, "probe_input_images": PROBED_IMAGES}))


def _varied(job: Job, values: dict[str, Any]) -> Job:
    kept = {name: value for name, value in job.hyperparameters.items() if name not in VARIED}
    return job.model_copy(update={"hyperparameters": {**kept, **values}, "study": None})


def _run(missing: Sequence[Trial], known: Table, on: str, say: Callable[[str], None]) -> list[str]:
    """Run trials one after the other; why some did not complete. Where one fails, its model on its way is not tried
    again; where a model alone fails, nothing of it is."""
    failed: list[str] = []
    given_up: set[tuple[Any, Any]] = set()
    for number, trial in enumerate(missing, 1):
        model, way = trial.key["model"], trial.key["way"]
        if {(model, way), (model, "")} & given_up:
            failed.append(f"{trial}: left out, because it failed before")
            continue
        run = try_once(trial.job, on, say=say)
        told = f"{number}/{len(missing)}  {trial}"
        if run.state != records.COMPLETED:
            why = " ".join(run.outcome().get("failure", "").split())[:300]
            failed.append(f"{trial}: {run.state}{': ' if why else ''}{why}; launcher logs {run.name}")
            given_up.add((model, way))
            say(f"{told}: {run.state}")
            continue
        measured = measures.of_run(run)
        known.add(trial.key, measured, run)
        say(f"{told}: {measured['images_per_second']:.1f} images/s, {measured['epoch_seconds']:.2f} s an epoch")
    return failed


def _to_be_small(config: str | Path, on: str) -> bool:
    """Whether the config has a smoke section, and the trials would run on this machine and its CPUs."""
    return backends.get(on).on_this_machine and "smoke" in yaml_file.read(config).values and not gpu_count()


def _checked(config: str | Path, overrides: Sequence[str], on: str, smoke: bool) -> tuple[Job, StudySection, list[str]]:
    """The job, its grid with nothing left open, and what was left out of it. Raises UserError with all mistakes."""
    found: list[Issue] = []
    try:
        job: Job | None = load(config, overrides, smoke=smoke)
    except UserError as error:
        found, job = list(error.issues), error.rest
    if job is None:
        raise UserError(found, str(config))
    job = _probed_at_full_size(job, config, overrides) if smoke else job
    grid, notes = _complete(job, on)
    found += _about_the_grid(job, grid, on)
    known = {issue.key.split(" (line")[0] for issue in found}
    if job.script == SCRIPT and job.source is None:
        seen: set[str] = set()
        for model, way in itertools.product(grid.models[:1], grid.ways):
            trial = _varied(job, {"model": model, **WAYS[way], "augmentation_load": max(grid.loads)})
            for issue in plan(trial, on=on).errors:
                if issue.key not in known and str(issue) not in seen:
                    seen.add(str(issue))
                    found.append(issue)
    if found:
        raise UserError(found, str(config))
    return job, grid, notes


def _probed_at_full_size(job: Job, config: str | Path, overrides: Sequence[str]) -> Job:
    """The job with its input side alone measured on images of the size without the smoke section: it needs no GPU for that."""
    try:
        size = load(config, overrides).hyperparameters.get("image_size")
    except UserError:  # told already, or a mistake of the whole config's alone
        return job
    given = job.hyperparameters
    if size in (None, given.get("image_size")) or "probe_image_size" in given:
        return job
    return job.model_copy(update={"hyperparameters": {**given, "probe_image_size": size}})


def _complete(job: Job, on: str) -> tuple[StudySection, list[str]]:
    """The job's grid with its own model and all ways that there are, where it names none."""
    grid = job.study or StudySection()
    own = job.hyperparameters.get("model")
    models = grid.models or ([own] if isinstance(own, str) else [])
    ways, notes = list(grid.ways), []
    if not ways:
        ways = list(WAYS)
        if backends.get(on).lacks("nvidia.dali"):
            ways.remove("dali")
            notes.append("dali left out: not installed here (pip install nvidia-dali-cuda130, or -cuda120)")
    return grid.model_copy(update={"models": list(dict.fromkeys(models)), "ways": list(dict.fromkeys(ways))}), notes


def _about_the_grid(job: Job, grid: StudySection, on: str) -> Iterator[Issue]:
    if job.script != SCRIPT or job.source is not None:
        fix = f"set script to {SCRIPT} and remove source"
        yield Issue(key="script", found=f"{job.script} has no ways of preprocessing to compare", fix=fix)
    if not grid.models:
        yield Issue(key="study.models", found="none", fix="name timm models, for example study.models=[resnet18]")
    for model in grid.models:
        if unknown(model):
            near = did_you_mean(model, sorted(timm_models()), "timm.list_models() names all")
            yield Issue(key="study.models", found=f"timm has no model {model}", fix=near)
    if "dali" in grid.ways and backends.get(on).lacks("nvidia.dali"):
        fix = "pip install nvidia-dali-cuda130 (or -cuda120), or leave dali out of study.ways"
        yield Issue(key="study.ways", found="dali is not installed here", fix=fix)

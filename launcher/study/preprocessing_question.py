"""The question of the preprocessing study: every model under every augmentation load, with every preprocessing pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launcher import backends
from launcher.config import yaml_file
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job, Pipeline, StudySection
from launcher.config.loading import load
from launcher.planner import model_names
from launcher.runner.run import Run
from launcher.study import preprocessing_hosts
from launcher.study import preprocessing_measures as measures
from launcher.study.conditions import settings_of
from launcher.study.preprocessing_hosts import REMOTE
from launcher.study.question import Question, Trial, alternating, planning_errors, read

SCRIPT = "train_classifier.py"

PIPELINES: dict[Pipeline, dict[str, Any]] = {
    "cpu_reference": {"preprocessing": "cpu_reference"},
    "cpu": {"preprocessing": "cpu"},
    "cpu_composed": {"preprocessing": "cpu", "compose_augmentation": True},
    "dali": {"preprocessing": "dali"},
    REMOTE: {"preprocessing": "cpu", "worker_type": "remote", "without_servers": "fail"},
}
"""The hyperparameters of each pipeline."""

VARIED = ("model", "preprocessing", "compose_augmentation", "augmentation_load", "repeat_batch", "probe_input_images")
"""Hyperparameters that the study sets."""

PROBED_IMAGES = 256
"""Images on which the input side alone is measured before each training."""

PACKAGES: dict[Pipeline, tuple[str, str, str]] = {
    "dali": ("nvidia.dali", "NVIDIA DALI", "pip install nvidia-dali-cuda130, or -cuda120"),
    REMOTE: ("ray", "Ray", "pip install -e '.[remote]'"),
}
"""For pipelines that need a package: its module, its name, and how to install it."""


@dataclass(kw_only=True)
class PreprocessingQuestion(Question):
    """Which pipeline feeds a model?"""

    kind: ClassVar[str] = "preprocessing"
    keys: ClassVar[tuple[str, ...]] = ("part", "model", "pipeline", "serving", "load", "repeat")
    """`part` is training; or model, for the model alone on one repeated batch, with neither pipeline nor load. `serving` names the
    hosts that preprocess, with the pipeline remote."""
    measured: ClassVar[tuple[str, ...]] = measures.MEASURED

    remote: Job | None = None
    """The job with the hosts that preprocess; None: the grid has no pipeline remote."""

    @classmethod
    def of(cls, config: str | Path, overrides: Sequence[str], on: str, smoke: bool) -> PreprocessingQuestion:
        """The question about a config.

        Raises:
            UserError: every mistake in the config, the overrides and the grid.
        """
        given, found = read(config, overrides, smoke)
        without_gpu = not smoke and wants_smaller_images(config, on, given)
        small = smoke or without_gpu
        if without_gpu:
            given, found = read(config, overrides, small)
        grid, notes = _complete(given, on)
        remote, mistakes = None, []
        if REMOTE in grid.pipelines:
            mistakes = list(preprocessing_hosts.check(given, given.study or StudySection()))
            remote = None if mistakes else preprocessing_hosts.served(given, grid.serving_groups)
        job = preprocessing_hosts.alone(given)
        job = _probed_at_full_size(job, config, overrides) if small else job
        found += [*_about_the_grid(job, grid, on), *mistakes]
        asked = cls(job=job, base=job, on=on, small=small, grid=grid, notes=notes, remote=remote)
        if job.script == SCRIPT and job.source is None:
            hardest = {"augmentation_load": max(grid.loads)}
            known = [model for model in grid.models if not any(_about_a_model(model, on, job))]
            here = [name for name in grid.pipelines if not _lacks(name, on) and (name != REMOTE or remote is not None)]
            found += planning_errors((asked._job(m, p, hardest) for m in known[:1] for p in here), on, found)
        if found:
            raise UserError(found, str(config))
        if without_gpu:
            notes.insert(
                0,
                f"no GPU here: the CPU pipelines are compared on smaller images, as set in the smoke section of {config}",
            )
        return asked

    def trials(self) -> Iterator[Trial]:
        """The pipelines alternate; each model alone comes before its trainings."""
        for repeat in range(1, self.grid.repeats + 1):
            for model in self.grid.models:
                first: Pipeline = next((name for name in self.grid.pipelines if name != REMOTE), "cpu")
                key = dict(part="model", model=model, pipeline="", serving="", load="", repeat=repeat)
                job = self._job(model, first, {"repeat_batch": True})
                yield Trial(key, job, f"{model}, the model alone", (model, ""))
                for load_factor in self.grid.loads:
                    for pipeline in alternating(self.grid.pipelines, repeat):
                        values = {"augmentation_load": load_factor, "probe_input_images": PROBED_IMAGES}
                        job = self._job(model, pipeline, values)
                        key = dict(part="training", model=model, pipeline=pipeline, load=load_factor, repeat=repeat)
                        key["serving"] = self._serving if pipeline == REMOTE else ""
                        name = f"{model}, {pipeline}, load {load_factor}"
                        yield Trial(key, job, name, (model, pipeline), needs=((model, ""),))

    def settings(self) -> str:
        return settings_of(self.job, VARIED)

    def measure(self, run: Run) -> dict[str, Any]:
        return measures.of_run(run)

    def progress(self, measured: dict[str, Any]) -> str:
        return f"{measured['images_per_second']:.1f} images/s, {measured['epoch_seconds']:.2f} s an epoch"

    def _job(self, model: str, pipeline: Pipeline, values: dict[str, Any]) -> Job:
        """A trial's job, on the hosts of its pipeline."""
        job = self.job
        if pipeline == REMOTE:
            assert self.remote is not None
            # servers make images of one size only
            kept = {name: value for name, value in self.job.hyperparameters.items() if name != "probe_image_size"}
            job = self.remote.model_copy(update={"hyperparameters": kept})
        return _varied(job, {"model": model, **PIPELINES[pipeline], **values})

    @property
    def _serving(self) -> str:
        return ", ".join(f"{group.instance_count} {group.instance_type}" for group in self.grid.serving_groups)


def wants_smaller_images(config: str | Path, on: str, job: Job) -> bool:
    """Whether the config has a smoke section and the trials would run on this machine's CPUs."""
    backend = backends.get(on)
    return backend.on_this_machine and "smoke" in yaml_file.read(config).values and not backend.gpus_here(job)


def _varied(job: Job, values: dict[str, Any]) -> Job:
    """The job with the study's own hyperparameters."""
    kept = {name: value for name, value in job.hyperparameters.items() if name not in VARIED}
    return job.model_copy(update={"hyperparameters": {**kept, **values}, "study": None})


def _probed_at_full_size(job: Job, config: str | Path, overrides: Sequence[str]) -> Job:
    """The job, with its input side alone measured at the config's image size without `smoke`: that needs no GPU."""
    try:
        size = load(config, overrides).hyperparameters.get("image_size")
    except UserError:  # reported already, or a mistake that the smoke section replaces
        return job
    given = job.hyperparameters
    if size in (None, given.get("image_size")) or "probe_image_size" in given:
        return job
    return job.model_copy(update={"hyperparameters": {**given, "probe_image_size": size}})


def _complete(job: Job, on: str) -> tuple[StudySection, list[str]]:
    """The job's grid with defaults filled in: the job's own model, all pipelines that run here, the hosts that preprocess."""
    grid = job.study or StudySection()
    own = job.hyperparameters.get("model")
    models = grid.models or ([own] if isinstance(own, str) else [])
    pipelines, notes = list(grid.pipelines), []
    if not pipelines:
        pipelines = [name for name in PIPELINES if name != REMOTE or preprocessing_hosts.are_named(job, grid)]
        for name in [name for name in pipelines if _lacks(name, on)]:
            _, package, install = PACKAGES[name]
            pipelines.remove(name)
            notes.append(f"{name} is left out: {package} is not installed here ({install})")
    found: dict[str, Any] = {"models": list(dict.fromkeys(models)), "pipelines": list(dict.fromkeys(pipelines))}
    if REMOTE in pipelines:
        found["serving_groups"] = preprocessing_hosts.serving_groups(job, grid)
    elif grid.serving_groups:
        notes.append("study.serving_groups is ignored: remote is not among the pipelines")
    return grid.model_copy(update=found), notes


def _lacks(pipeline: Pipeline, on: str) -> bool:
    """Whether the package that a pipeline needs is missing."""
    return pipeline in PACKAGES and backends.get(on).lacks(PACKAGES[pipeline][0])


def _about_a_model(model: str, on: str, job: Job) -> Iterator[Issue]:
    return model_names.check_name("study.models", model, backends.get(on).timm_version(job))


def _about_the_grid(job: Job, grid: StudySection, on: str) -> Iterator[Issue]:
    if job.script != SCRIPT or job.source is not None:
        fix = f"set script to {SCRIPT} and remove source"
        yield Issue(key="script", found=f"{job.script} has no preprocessing pipelines to compare", fix=fix)
    if not grid.models:
        yield Issue(key="study.models", found="none", fix="name timm models, for example study.models=[resnet18]")
    for model in grid.models:
        yield from _about_a_model(model, on, job)
    for name in [name for name in grid.pipelines if _lacks(name, on)]:
        _, package, install = PACKAGES[name]
        fix = f"{install}; or leave {name} out of study.pipelines"
        yield Issue(key="study.pipelines", found=f"{name} needs {package}, which is not installed here", fix=fix)

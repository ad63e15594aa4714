"""What a probe measured of a run, and what follows: what bounds the step, which findings hold, and how much there is to gain.

A probe takes one half of a step away at a time (entrypoints/training/engine/probe.py), as DS-Analyzer does
(https://arxiv.org/abs/2007.06775): speeds that differ tell a cause where shares of one timeline tell what happened together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, bounded, percent
from launcher.insight.report import ProbeAnswer, Report

Bound = Literal["input", "shared_cores", "teacher", "model"]
"""What holds a step up: its input side; the cores that both halves want; the teacher; the trained model itself."""

LIKE_THE_RUN = 1.5
"""Times slower or faster than the run until which a probe speaks of the same thing: else the machine was busy otherwise, or the
files came from memory instead of the disk."""

BUSY = 0.7
"""Share of the cores from which the input side alone is held up by them; below `IDLE`, by something else."""

IDLE = 0.5

INPUT_KINDS = {"too_few_workers", "too_many_workers", "data_bound", "storage_bound"}

STEP_KINDS = {
    "gpu_starved",
    "main_thread_bound",
    "small_batch",
    "fp32_compute",
    "synchronising_calls",
    "host_to_device_bound",
}
"""Findings whose time is still there with one batch over and over."""


@dataclass(frozen=True)
class InputAlone:
    """The input side without a model."""

    workers: int
    images_per_second: float
    cpu_seconds_an_image: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Speeds in images a second, of all processes together."""

    run: str
    """The run that measured."""
    as_it_is: tuple[float, ...]
    """Whole steps, at the beginning and at the end."""
    one_batch: float
    """Steps on one batch over and over: without an input side."""
    one_batch_without_teacher: float | None = None
    input_alone: tuple[InputAlone, ...] = ()
    with_workers: tuple[int, float] | None = None
    """Whole steps with the fewest workers whose input side alone is about as fast as the fastest; None: those of today."""
    workers: int
    """Of a process, today."""
    worker_kind: str
    cores_a_process: float
    world_size: int
    device: str
    device_name: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What was not measured, and why."""
    trouble: str = ""
    """Why not all was measured."""

    @classmethod
    def from_file(cls, run: str, values: Mapping[str, Any], trouble: str = "") -> Probe | None:
        """Of what the script wrote so far (probe.json); None where that is too little to say anything."""
        if not values.get("as_it_is") or not values.get("one_batch"):
            return None
        checked = values["with_workers"]
        plain = ("workers", "worker_kind", "cores_a_process", "world_size", "device", "device_name", "left_out")
        return cls(
            run=run,
            as_it_is=tuple(values["as_it_is"]),
            one_batch=values["one_batch"],
            one_batch_without_teacher=values["one_batch_without_teacher"],
            input_alone=tuple(InputAlone(**one) for one in values["input_alone"]),
            with_workers=None if checked is None else (checked["workers"], checked["images_per_second"]),
            trouble=trouble,
            **{name: values[name] for name in plain},
        )

    @property
    def speed(self) -> float:
        """Whole steps as they are: the quickest measurement, because what else the machine does only slows."""
        return max(self.as_it_is)

    @property
    def input_share(self) -> float:
        """Share of a step that goes away without the input side."""
        return max(0.0, 1 - self.speed / self.one_batch)

    @property
    def teacher_share(self) -> float | None:
        """Share of a step that goes away without the teacher where nothing waits for input; None: not measured."""
        bare = self.one_batch_without_teacher
        return None if bare is None else min(1.0, max(0.0, self.speed * (1 / self.one_batch - 1 / bare)))

    @property
    def today(self) -> InputAlone | None:
        """The input side alone with the run's number of workers."""
        return next((one for one in self.input_alone if one.workers == self.workers), None)

    @property
    def fastest(self) -> InputAlone | None:
        """The fastest input side alone."""
        return max(self.input_alone, key=lambda one: one.images_per_second, default=None)

    @property
    def gained(self) -> float | None:
        """Times as fast as now that whole steps with other workers were; None: not tried."""
        return None if self.with_workers is None else self.with_workers[1] / self.speed

    @property
    def helped(self) -> bool:
        """Whether whole steps were tried with other workers, and were faster."""
        return self.gained is not None and self.gained >= 1 + NOTICEABLE

    @property
    def best_workers(self) -> int | None:
        """Workers a process that were fastest in whole steps, where another number was tried: it replaces today's only where it
        brings something. None: the input side alone was not measured."""
        if self.with_workers is not None and self.helped:
            return self.with_workers[0]
        return self.workers if self.today is not None else None

    @property
    def at_most(self) -> float | None:
        """Times as fast as now at most by another number of workers: the slower half alone over whole steps; None: not measured."""
        if self.fastest is None:
            return None
        return max(1.0, min(self.one_batch, self.fastest.images_per_second) / self.speed)

    @property
    def feeds(self) -> bool:
        """Whether some number of workers alone is as fast as the model alone."""
        return self.fastest is not None and self.fastest.images_per_second >= self.one_batch

    @property
    def bound(self) -> Bound:
        if self.input_share >= NOTICEABLE:
            return "shared_cores" if self.today and self.today.images_per_second >= self.one_batch else "input"
        return "teacher" if (self.teacher_share or 0) >= NOTICEABLE else "model"

    def busy(self, one: InputAlone) -> float:
        """Share of the processes' cores that the input side alone kept busy."""
        return min(1.0, one.images_per_second * one.cpu_seconds_an_image / (self.cores_a_process * self.world_size))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "run": self.run,
            "bound": self.bound,
            "images_per_second": {
                "as_it_is": list(self.as_it_is),
                "one_batch": self.one_batch,
                "one_batch_without_teacher": self.one_batch_without_teacher,
                "input_alone": {str(one.workers): one.images_per_second for one in self.input_alone},
                "with_workers": None
                if self.with_workers is None
                else {"workers": self.with_workers[0], "images_per_second": self.with_workers[1]},
            },
            "input_cpu_seconds_an_image": {str(one.workers): one.cpu_seconds_an_image for one in self.input_alone},
            "input_share": self.input_share,
            "teacher_share": self.teacher_share,
            "workers": self.workers,
            "best_workers": self.best_workers,
            "at_most": self.at_most,
            "left_out": dict(self.left_out),
            "trouble": self.trouble,
        }


def tested(report: Report, evidence: Evidence, probe: Probe | str) -> Report:
    """A report with what a probe says of it: refuted findings come after the others, before the risks.

    Args:
        probe: or why there is none.
    """
    if isinstance(probe, str):
        return replace(report, probe=ProbeAnswer(f"not done: {probe}"))
    unlike = _unlike(evidence, probe)
    findings = report.findings if unlike else tuple(_tested(finding, probe) for finding in report.findings)
    ranked = sorted(findings, key=lambda one: (one.level == "risk", one.refuted))
    return replace(report, findings=tuple(ranked), probe=_answer(probe, unlike))


def _unlike(evidence: Evidence, probe: Probe) -> str:
    """Why the probe does not speak of what the run was measured at; "" where it does."""
    facts, batch = evidence.facts, evidence.settings.get("global_batch_size")
    for name, what in (("device", "on"), ("device_name", "on"), ("world_size", "by processes:")):
        before, now = facts.get(name), getattr(probe, name)
        if before is not None and now is not None and before != now:
            return f"the run computed {what} {before}, the probe {what} {now}"
    if not evidence.step_seconds or not isinstance(batch, int):
        return ""
    speed = batch / evidence.step_seconds  # of usual steps; with what lies between them it is less
    least = min(speed, batch * windows.steps_done(evidence.ranks[0]) / evidence.training_seconds)
    if not least / LIKE_THE_RUN <= probe.speed <= speed * LIKE_THE_RUN:
        return (
            f"the run made {speed:.4g} images/s, the same steps now {probe.speed:.4g}: other work on the machine, files that come "
            "from memory by now, or another machine"
        )
    return ""


def _answer(probe: Probe, unlike: str) -> ProbeAnswer:
    told = [f"The findings below are not judged by it: {unlike}."] if unlike else []
    told += _workers_told(probe)
    if probe.device == "cpu" and probe.bound in ("input", "shared_cores"):
        told.append("Model and workers compute on the same cores here, so that no more than these bounds is reached.")
    if probe.trouble:
        told.append(f"It did not end: {probe.trouble}")
    told += [f"Not measured: {what} ({why})." for what, why in probe.left_out.items()]
    told.append(f"Measured by the run {probe.run}.")
    return ProbeAnswer(_title(probe), not unlike, tuple(_rows(probe)), tuple(told))


def _title(probe: Probe) -> str:
    faster = f"{probe.one_batch / probe.speed:.2f} times as fast"
    share = percent(probe.input_share)
    if probe.bound == "input":
        return f"Input-bound: on one batch over and over, steps are {faster}, so {share} of a step is for its input"
    if probe.bound == "shared_cores":
        return (
            f"Input and model take the cores from each other: each alone is faster than a step, which would be {faster} without "
            f"its input ({share} of it)"
        )
    if probe.bound == "teacher":
        assert probe.one_batch_without_teacher is not None and probe.teacher_share is not None
        bare = probe.one_batch_without_teacher / probe.one_batch
        return (
            f"Teacher-bound: it takes {percent(probe.teacher_share)} of a step, and without it steps are {bare:.2f} times as fast; "
            f"without its input a step is only {faster}"
        )
    return f"Model-bound: without its input a step is only {faster}, so nothing about the input can bring more"


def _rows(probe: Probe) -> list[tuple[str, str, str]]:
    kind = "" if probe.worker_kind == "dali" else f" ({probe.worker_kind})"

    def row(what: str, speed: float) -> tuple[str, str, str]:
        return what, f"{speed:.4g}", f"{speed / probe.speed:.2f}"

    rows = [row("whole steps, as they are", probe.speed), row("one batch over and over: no input", probe.one_batch)]
    if probe.one_batch_without_teacher is not None:
        rows.append(row("the same without the teacher", probe.one_batch_without_teacher))
    for one in probe.input_alone:
        today = ", as it is" if one.workers == probe.workers else ""
        rows.append(
            row(f"input alone, {_counted(one.workers)}{kind if one.workers else ''}{today}", one.images_per_second)
        )
    if probe.with_workers is not None:
        rows.append(row(f"whole steps with {_counted(probe.with_workers[0])}", probe.with_workers[1]))
    return rows


def _workers_told(probe: Probe) -> list[str]:
    """What the input side could bring, in words."""
    told = []
    if len(probe.as_it_is) > 1:
        told.append(
            f"As it is was measured twice: {' and '.join(f'{speed:.4g}' for speed in probe.as_it_is)} images/s."
        )
    if probe.fastest is None or probe.bound in ("teacher", "model"):
        return told
    told.append(
        f"Gain to expect: at most {probe.at_most:.2f} times as fast by the number of workers, which is the slower half alone over "
        f"steps as they are: min({probe.one_batch:.4g}, {probe.fastest.images_per_second:.4g}) / {probe.speed:.4g}."
    )
    if probe.with_workers is not None:
        tried = f"num_workers={probe.with_workers[0]}"
        told.append(
            f"{tried} made whole steps {probe.gained:.2f} times as fast (now {probe.workers})."
            if probe.helped
            else f"{tried} does not help: whole steps were {probe.gained:.2f} times as fast with it."
        )
    elif probe.today is not None:
        told.append(f"No other number of workers makes the input alone faster than today's {probe.workers}.")
    busy, cost = probe.busy(probe.fastest), probe.fastest.cpu_seconds_an_image * 1000
    if not probe.feeds and busy >= BUSY:
        told.append(
            f"The fastest input alone keeps {percent(busy)} of the cores busy, at {cost:.3g} ms of CPU an image: beyond it help "
            "cheaper images or more cores."
        )
    elif not probe.feeds and busy < IDLE:
        told.append(
            f"The fastest input alone keeps {percent(busy)} of the cores busy: it waits for storage, or for one thread."
        )
    return told


def _counted(workers: int) -> str:
    return "no workers" if not workers else f"{workers} worker{'s' if workers > 1 else ''}"


def _tested(finding: Finding, probe: Probe) -> Finding:
    """A finding with what the probe says of it; where whole steps were faster with other workers, with these and that gain."""
    said = _said(finding, probe)
    if said is None:
        return finding
    if probe.with_workers is None or probe.gained is None or not probe.helped:
        return replace(finding, probe=said)
    if said.startswith("refuted") or finding.kind not in ("too_few_workers", "too_many_workers"):
        return replace(finding, probe=said)
    count, speed = probe.with_workers
    first = replace(finding.fixes[0], value=count, why="measured by the probe")
    told = f"measured by the probe: {speed:.4g} images/s with {_counted(count)}, {probe.speed:.4g} as it is"
    gain = bounded(max(finding.share or 0.0, 1 - 1 / probe.gained), probe.gained, told)
    return replace(finding, probe=said, fixes=(first, *finding.fixes[1:]), gain=gain)


def _said(finding: Finding, probe: Probe) -> str | None:
    """confirmed or refuted, and by what; None: the probe cannot tell."""
    alone = f"without any input, steps are {probe.one_batch / probe.speed:.2f} times as fast"
    if finding.kind in STEP_KINDS and finding.share is not None:
        left = probe.speed / probe.one_batch
        if finding.share <= left + NOTICEABLE:
            return None
        return f"refuted: {alone}, so that all but the input takes {percent(left)} of a step"
    if finding.kind == "teacher_bound":
        share = probe.teacher_share
        if share is None:
            return None
        return f"{'confirmed' if share >= NOTICEABLE else 'refuted'}: the teacher takes {percent(share)} of a step"
    if finding.kind not in INPUT_KINDS:
        return None
    if probe.input_share < NOTICEABLE:
        return f"refuted: {alone}"
    if finding.kind in ("too_few_workers", "too_many_workers"):
        return _said_of_workers(finding.kind, probe)
    if probe.with_workers is not None and probe.helped:
        return f"refuted: with {_counted(probe.with_workers[0])} whole steps are {probe.gained:.2f} times as fast"
    if probe.fastest is None:
        return None
    busy = probe.busy(probe.fastest)
    told = f"{alone}, other workers do not help, and the input alone keeps {percent(busy)} of the cores busy"
    if finding.kind == "data_bound":
        return f"confirmed: {told}" if busy >= BUSY or probe.feeds else _refuted_if(busy < IDLE, told)
    if probe.feeds:
        return "refuted: the input alone is as fast as the model alone, unless the files came from memory"
    return (
        f"confirmed: {told}" if busy < IDLE else _refuted_if(busy >= BUSY, f"{told}, unless the files came from memory")
    )


def _refuted_if(holds: bool, told: str) -> str | None:
    return f"refuted: {told}" if holds else None


def _said_of_workers(kind: str, probe: Probe) -> str | None:
    """Whether there are too few or too many workers."""
    few = kind == "too_few_workers"
    if probe.today is None:
        return None
    if probe.with_workers is not None and (probe.with_workers[0] > probe.workers) == few:
        told = f"with {_counted(probe.with_workers[0])} whole steps are {probe.gained:.2f} times as fast"
        return f"{'confirmed' if probe.helped else 'refuted'}: {told}"
    others = [one for one in probe.input_alone if (one.workers > probe.workers) == few and one is not probe.today]
    if not others:
        return None
    best = max(others, key=lambda one: one.images_per_second)
    faster = best.images_per_second / probe.today.images_per_second
    return (
        f"refuted: the input alone is {faster:.2f} times as fast with {_counted(best.workers)}"
        if faster < 1 + NOTICEABLE
        else None
    )

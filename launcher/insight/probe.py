"""What a probe of a run measured, and what follows: what limits the step, which findings hold, and the possible gain.

A probe removes one half of a step at a time (entrypoints/training/engine/probe.py), as DS-Analyzer does
(https://arxiv.org/abs/2007.06775): a change of speed shows a cause, while shares of one timeline only show what happens together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, percent
from launcher.insight.gains import estimated, in_steps
from launcher.insight.report import ProbeAnswer, Report

Bound = Literal["input", "shared_cores", "teacher", "model"]
"""What limits a step: its input side; the cores that both halves share; the teacher; the trained model itself."""

LIKE_THE_RUN = 1.5
"""A probe applies to a run if its speed is within this factor of the run's, either way: beyond, the machine had other work, or the files
came from memory instead of the disk."""

BUSY = 0.7
"""Share of the cores from which they limit the input side alone; below `IDLE`, something else does."""

IDLE = 0.5

SERVER_KINDS = {"too_few_servers", "servers_network_bound", "receiving_bound"}

INPUT_KINDS = {"too_few_workers", "too_many_workers", "data_bound", "storage_bound", *SERVER_KINDS}

WORKERS = "hyperparameters.num_workers"

AS_FAST = 0.95
"""Share of the fastest input alone from which another number of workers is as fast: AS_FAST of training/engine/probe.py."""

STEP_KINDS = {
    "gpu_starved",
    "main_thread_bound",
    "small_batch",
    "fp32_compute",
    "synchronising_calls",
    "host_to_device_bound",
}
"""Findings whose time remains when steps repeat one batch."""


@dataclass(frozen=True)
class InputOnly:
    """The input side without a model."""

    workers: int
    images_per_second: float
    cpu_seconds_per_image: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Speeds in images per second, over all processes."""

    run: str
    """The run that measured."""
    as_it_is: tuple[float, ...]
    """Whole steps, at the beginning and at the end."""
    one_batch: float
    """Steps that repeat one batch: no input side."""
    one_batch_without_teacher: float | None = None
    input_alone: tuple[InputOnly, ...] = ()
    with_workers: tuple[int, float] | None = None
    """(workers, speed) of whole steps with the fewest workers whose input side alone is about as fast as the fastest; None: that is
    today's number."""
    workers: int
    """Per process, today."""
    worker_kind: str
    cores_per_process: float
    world_size: int
    device: str
    device_name: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What was not measured, and why."""
    trouble: str = ""
    """Why the probe did not finish."""

    @classmethod
    def from_file(cls, run: str, values: Mapping[str, Any], trouble: str = "") -> Probe | None:
        """The probe from what the script wrote so far (shapes.PROBE); None if that is too little."""
        if not values.get("as_it_is") or not values.get("one_batch"):
            return None
        checked = values["with_workers"]
        plain = ("workers", "worker_kind", "cores_per_process", "world_size", "device", "device_name", "left_out")
        return cls(
            run=run,
            as_it_is=tuple(values["as_it_is"]),
            one_batch=values["one_batch"],
            one_batch_without_teacher=values["one_batch_without_teacher"],
            input_alone=tuple(InputOnly(**one) for one in values["input_alone"]),
            with_workers=None if checked is None else (checked["workers"], checked["images_per_second"]),
            trouble=trouble,
            **{name: values[name] for name in plain},
        )

    @property
    def speed(self) -> float:
        """Whole steps as they are: the fastest measurement, because other work on the machine only slows them."""
        return max(self.as_it_is)

    @property
    def input_share(self) -> float:
        """Share of a step that goes away without the input side."""
        return max(0.0, 1 - self.speed / self.one_batch)

    @property
    def teacher_share(self) -> float | None:
        """Share of a step that goes away without the teacher when nothing waits for input; None: not measured."""
        bare = self.one_batch_without_teacher
        return None if bare is None else min(1.0, max(0.0, self.speed * (1 / self.one_batch - 1 / bare)))

    @property
    def today(self) -> InputOnly | None:
        """The input side alone with the run's number of workers."""
        return next((one for one in self.input_alone if one.workers == self.workers), None)

    @property
    def fastest(self) -> InputOnly | None:
        """The fastest input side alone."""
        return max(self.input_alone, key=lambda one: one.images_per_second, default=None)

    @property
    def gained(self) -> float | None:
        """Speed-up of whole steps with another number of workers; None: not tried."""
        return None if self.with_workers is None else self.with_workers[1] / self.speed

    @property
    def helped(self) -> bool:
        """Whether whole steps with another number of workers were faster."""
        return self.gained is not None and self.gained >= 1 + NOTICEABLE

    @property
    def no_other_helps(self) -> bool:
        """Whether other numbers of workers were tried alone, and none was faster than today's; False also if some were left out."""
        left_out = any(name.startswith(("with_workers", "input_alone")) for name in self.left_out)
        if self.today is None or self.fastest is None or left_out or self.trouble:
            return False
        return self.today.images_per_second >= AS_FAST * self.fastest.images_per_second

    @property
    def best_workers(self) -> int | None:
        """Workers per process with the fastest whole steps; today's number unless another helped. None: the input side alone was not
        measured."""
        if self.with_workers is not None and self.helped:
            return self.with_workers[0]
        return self.workers if self.today is not None else None

    @property
    def remote(self) -> bool:
        """Whether other hosts make the images."""
        return self.worker_kind == "remote"

    @property
    def at_most(self) -> float | None:
        """Bound on the speed-up from another number of workers: the slower half alone over whole steps. From more servers, whose number
        is not varied: steps without input over whole steps. None: not measured."""
        if self.fastest is None:
            return None
        if self.remote:
            return max(1.0, self.one_batch / self.speed)
        return max(1.0, min(self.one_batch, self.fastest.images_per_second) / self.speed)

    @property
    def feeds(self) -> bool:
        """Whether some number of workers alone, or the servers alone, is as fast as the model alone."""
        return self.fastest is not None and self.fastest.images_per_second >= self.one_batch

    @property
    def bound(self) -> Bound:
        if self.input_share >= NOTICEABLE:
            return "shared_cores" if self.today and self.today.images_per_second >= self.one_batch else "input"
        return "teacher" if (self.teacher_share or 0) >= NOTICEABLE else "model"

    def busy(self, one: InputOnly) -> float:
        """Share of the processes' cores that the input side alone kept busy."""
        return min(1.0, one.images_per_second * one.cpu_seconds_per_image / (self.cores_per_process * self.world_size))

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
            "input_cpu_seconds_per_image": {str(one.workers): one.cpu_seconds_per_image for one in self.input_alone},
            "input_share": self.input_share,
            "teacher_share": self.teacher_share,
            "workers": self.workers,
            "best_workers": self.best_workers,
            "at_most": self.at_most,
            "left_out": dict(self.left_out),
            "trouble": self.trouble,
        }


def tested(report: Report, evidence: Evidence, probe: Probe | str) -> Report:
    """The report with a probe's answers; refuted findings come after the others, before the risks.

    Args:
        probe: the probe, or why there is none.
    """
    if isinstance(probe, str):
        return replace(report, probe=ProbeAnswer(f"not done: {probe}"))
    unlike = _unlike(evidence, probe)
    findings = report.findings if unlike else tuple(_tested(finding, evidence, probe) for finding in report.findings)
    ranked = sorted(findings, key=lambda one: (not one.urgent, one.level == "risk", one.refuted))
    return replace(report, findings=tuple(ranked), probe=_answer(probe, unlike))


def _unlike(evidence: Evidence, probe: Probe) -> str:
    """Why the probe does not apply to the run as it was measured; "" if it does."""
    facts, batch = evidence.facts, evidence.settings.get("global_batch_size")
    for name, what in (("device", "on"), ("device_name", "on"), ("world_size", "by processes:")):
        before, now = facts.get(name), getattr(probe, name)
        if before is not None and now is not None and before != now:
            return f"the run computed {what} {before}, the probe {what} {now}"
    if not evidence.step_seconds or not isinstance(batch, int):
        return ""
    speed = batch / evidence.step_seconds  # in usual steps; with the time between them it is less
    least = min(speed, batch * windows.steps_done(evidence.ranks[0]) / evidence.training_seconds)
    if not least / LIKE_THE_RUN <= probe.speed <= speed * LIKE_THE_RUN:
        return (
            f"the run made {speed:.4g} images/s, the same steps make {probe.speed:.4g} now: other work on the machine, files cached in "
            "memory, or another machine"
        )
    return ""


def _answer(probe: Probe, unlike: str) -> ProbeAnswer:
    sentences = [f"It does not judge the findings below: {unlike}."] if unlike else []
    sentences += _about_the_workers(probe)
    if probe.remote:
        sentences.append(
            "Servers and trainers of a probe share this machine: servers on hosts of their own can be faster."
        )
    elif probe.device == "cpu" and probe.bound in ("input", "shared_cores"):
        sentences.append("Model and workers share the cores here, so these gains are upper bounds.")
    if probe.trouble:
        sentences.append(f"It did not finish: {probe.trouble}")
    sentences += [f"Not measured: {what} ({why})." for what, why in probe.left_out.items()]
    sentences.append(f"Measured by the run {probe.run}.")
    return ProbeAnswer(_title(probe), not unlike, tuple(_rows(probe)), tuple(sentences))


def _title(probe: Probe) -> str:
    faster = f"speed-up of {probe.one_batch / probe.speed:.2f}"
    share = percent(probe.input_share)
    if probe.bound == "input":
        return f"Input-bound: one batch over and over brings a {faster}, so {share} of a step goes into its input"
    if probe.bound == "shared_cores":
        return (
            f"Input and model compete for the cores: each alone is faster than a step. Without input ({share} of a step) there is a "
            f"{faster}"
        )
    if probe.bound == "teacher":
        assert probe.one_batch_without_teacher is not None and probe.teacher_share is not None
        bare = probe.one_batch_without_teacher / probe.one_batch
        return (
            f"Teacher-bound: the teacher takes {percent(probe.teacher_share)} of a step. Steps without it have a speed-up of {bare:.2f}, "
            f"steps without input only a {faster}"
        )
    return f"Model-bound: steps without input have only a {faster}, and no change of the input can bring more"


def _rows(probe: Probe) -> list[tuple[str, str, str]]:
    kind = "" if probe.worker_kind == "dali" else f" ({probe.worker_kind})"

    def made_by(one: InputOnly) -> str:
        return "servers" if probe.remote else f"{_counted(one.workers)}{kind if one.workers else ''}"

    def row(what: str, speed: float) -> tuple[str, str, str]:
        return what, f"{speed:.4g}", f"{speed / probe.speed:.2f}"

    rows = [row("whole steps, as they are", probe.speed), row("one batch over and over: no input", probe.one_batch)]
    if probe.one_batch_without_teacher is not None:
        rows.append(row("the same without the teacher", probe.one_batch_without_teacher))
    for one in probe.input_alone:
        today = ", as it is" if one.workers == probe.workers else ""
        rows.append(row(f"input alone, {made_by(one)}{today}", one.images_per_second))
    if probe.with_workers is not None:
        rows.append(row(f"whole steps with {_counted(probe.with_workers[0])}", probe.with_workers[1]))
    return rows


def _about_the_workers(probe: Probe) -> list[str]:
    """What a change of the input side could bring, in words."""
    sentences = []
    if len(probe.as_it_is) > 1:
        sentences.append(
            f"Whole steps as they are were measured twice: {' and '.join(f'{speed:.4g}' for speed in probe.as_it_is)} images/s."
        )
    if probe.fastest is None or probe.bound in ("teacher", "model"):
        return sentences
    if probe.remote:
        sentences.append(
            f"More servers can bring a speed-up of at most {probe.at_most:.2f}: steps without input over steps as they are, "
            f"{probe.one_batch:.4g} / {probe.speed:.4g}. Their number was not changed."
        )
        return sentences
    sentences.append(
        f"The number of workers can bring a speed-up of at most {probe.at_most:.2f}: the slower half alone over steps as they are, "
        f"min({probe.one_batch:.4g}, {probe.fastest.images_per_second:.4g}) / {probe.speed:.4g}."
    )
    if probe.with_workers is not None:
        tried = f"num_workers={probe.with_workers[0]}"
        sentences.append(
            f"{tried} brought whole steps a speed-up of {probe.gained:.2f} (now {probe.workers})."
            if probe.helped
            else f"{tried} does not help: the speed-up of whole steps was {probe.gained:.2f}."
        )
    elif probe.no_other_helps:
        sentences.append(f"No other number of workers makes the input alone faster than today's {probe.workers}.")
    busy, cost = probe.busy(probe.fastest), probe.fastest.cpu_seconds_per_image * 1000
    if not probe.feeds and busy >= BUSY:
        sentences.append(
            f"The fastest input alone keeps {percent(busy)} of the cores busy, at {cost:.3g} ms of CPU an image: only cheaper "
            "images or more cores help beyond it."
        )
    elif not probe.feeds and busy < IDLE:
        sentences.append(
            f"The fastest input alone keeps {percent(busy)} of the cores busy: it waits for storage, or for a single thread."
        )
    return sentences


def _counted(workers: int) -> str:
    return "no workers" if not workers else f"{workers} worker{'s' if workers > 1 else ''}"


def _tested(finding: Finding, evidence: Evidence, probe: Probe) -> Finding:
    """The finding with the probe's answer, and with the number of workers and the gain that it measured if whole steps were faster."""
    said = _said(finding, probe)
    if said is None:
        return finding
    if probe.with_workers is None or probe.gained is None or not probe.helped:
        return replace(finding, probe=said)
    if said.startswith("refuted") or finding.kind not in ("too_few_workers", "too_many_workers"):
        return replace(finding, probe=said)
    count, speed = probe.with_workers
    others = [fix for fix in finding.fixes if fix.setting != WORKERS]
    workers = next(
        (fix for fix in finding.fixes if fix.setting == WORKERS), Fix(setting=WORKERS, value=count, now=probe.workers)
    )
    left = 1 - in_steps(evidence) * (1 - 1 / probe.gained)
    formula = f"measured by the probe: {speed:.4g} images/s with {_counted(count)}, {probe.speed:.4g} as it is"
    gain = estimated(evidence, finding.kind, max(finding.share or 0.0, 1 - left), left, formula)
    return replace(finding, probe=said, fixes=(workers.set_to(count, "measured by the probe"), *others), gain=gain)


def _said(finding: Finding, probe: Probe) -> str | None:
    """Confirmed or refuted, and by what; None: the probe cannot tell."""
    alone = f"without input, the speed-up of steps is {probe.one_batch / probe.speed:.2f}"
    if finding.kind in STEP_KINDS and finding.share is not None:
        left = probe.speed / probe.one_batch
        if finding.share <= left + NOTICEABLE:
            return None
        return f"refuted: {alone}, so everything else takes {percent(left)} of a step"
    if finding.kind == "teacher_bound":
        share = probe.teacher_share
        if share is None:
            return None
        return f"{'confirmed' if share >= NOTICEABLE else 'refuted'}: the teacher takes {percent(share)} of a step"
    if finding.kind not in INPUT_KINDS:
        return None
    if probe.input_share < NOTICEABLE:
        return f"refuted: {alone}"
    if probe.remote:
        if finding.kind != "too_few_servers" or probe.fastest is None or probe.feeds:
            return None  # it does not show what the servers wait for, nor what they do with the cores to themselves
        return f"confirmed: {alone}, and servers alone bring {probe.fastest.images_per_second:.4g} images/s"
    if finding.kind in ("too_few_workers", "too_many_workers"):
        return _verdict_on_workers(finding.kind, probe)
    if probe.with_workers is not None and probe.helped:
        return f"refuted: with {_counted(probe.with_workers[0])}, the speed-up of whole steps is {probe.gained:.2f}"
    if probe.fastest is None or (probe.with_workers is None and not probe.no_other_helps):
        return None
    busy = probe.busy(probe.fastest)
    reason = (
        f"{alone}, other numbers of workers do not help, and the input alone keeps {percent(busy)} of the cores busy"
    )
    if finding.kind == "data_bound":
        return f"confirmed: {reason}" if busy >= BUSY or probe.feeds else _refuted_if(busy < IDLE, reason)
    if probe.feeds:
        return "refuted: the input alone is as fast as the model alone, unless the files were cached in memory"
    return (
        f"confirmed: {reason}"
        if busy < IDLE
        else _refuted_if(busy >= BUSY, f"{reason}, unless the files were cached in memory")
    )


def _refuted_if(holds: bool, reason: str) -> str | None:
    return f"refuted: {reason}" if holds else None


def _verdict_on_workers(kind: str, probe: Probe) -> str | None:
    """Whether there are too few or too many workers."""
    few = kind == "too_few_workers"
    if probe.today is None:
        return None
    if probe.with_workers is not None and (probe.with_workers[0] > probe.workers) == few:
        result = f"with {_counted(probe.with_workers[0])}, the speed-up of whole steps is {probe.gained:.2f}"
        return f"{'confirmed' if probe.helped else 'refuted'}: {result}"
    others = [one for one in probe.input_alone if (one.workers > probe.workers) == few and one is not probe.today]
    if not others:
        return None
    best = max(others, key=lambda one: one.images_per_second)
    faster = best.images_per_second / probe.today.images_per_second
    return (
        f"refuted: the speed-up of the input alone is {faster:.2f} with {_counted(best.workers)}"
        if faster < 1 + NOTICEABLE
        else None
    )

"""Every rule with what it looks for, and one ranked list of what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.insight.answers import Answer, DoesNotApply, NotMeasured
from launcher.insight.contention import PROGRAMS, lost_to
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, percent
from launcher.insight.gains import of_other_fixes
from launcher.insight.length import too_short
from launcher.insight.outside import Watched
from launcher.insight.report import Report
from launcher.insight.rules import compute, data, feeding, neighbours, pauses, processes, script_fixes, serving, system


@dataclass(frozen=True)
class Rule:
    """One question that is asked of every run."""

    looks_for: str
    ask: Callable[[Evidence], Answer]
    of_short_runs: bool = False
    """Whether it is also asked of a run that is too short to say where time goes: it is not about a share of the steps."""


RULES = (
    Rule("waiting for data: workers, cores, storage", data.waiting),
    Rule("waiting for images from other hosts: their number, the network, receiving", serving.waiting),
    Rule("a training thread kept from its core", neighbours.noisy),
    Rule("cores throttled by a quota", system.throttled),
    Rule("pauses at the start of epochs", pauses.epoch_starts),
    Rule("copying batches to the device", compute.transfer),
    Rule("a teacher that takes much of the step", compute.teacher),
    Rule("arithmetic in fp32", compute.fp32),
    Rule("a GPU that waits for the training process", feeding.starved),
    Rule("steps too small for their fixed cost", feeding.fixed_cost),
    Rule("exchange of gradients", processes.communication),
    Rule("one slow rank", processes.slow_rank),
    Rule("GPUs used unevenly", processes.uneven_gpus),
    Rule("checkpoints", pauses.checkpoints),
    Rule("evaluations", pauses.evaluations),
    Rule("a slow start", pauses.start, of_short_runs=True),
    Rule("steps that take far longer than the others", pauses.outliers),
    Rule("growth of a host's memory", system.host_memory, of_short_runs=True),
    Rule("growth of a GPU's memory", system.gpu_memory, of_short_runs=True),
)


HIDING = 0.2
"""Share of step time in which programs outside the run have the training thread's core, from which they hide much of what is slow."""


def judge(evidence: Evidence) -> Report:
    """Ask every rule."""
    findings, not_found, not_measured, not_applicable = [], [], [], []
    short = too_short(evidence)
    for rule in RULES:
        if short and not rule.of_short_runs:
            not_measured.append(NotMeasured(what=rule.looks_for, reason=f"{short}: too short to judge"))
            continue
        answer = rule.ask(evidence)
        if isinstance(answer, Finding):
            judged = replace(answer, share=None, gain=None, level="risk") if short else answer
            findings.append(_followable(judged, evidence))
        elif isinstance(answer, NotMeasured):
            not_measured.append(answer)
        elif isinstance(answer, DoesNotApply):
            not_applicable.append((rule.looks_for, answer.why))
        else:
            not_found.append(rule.looks_for)
    lost = lost_to(evidence, PROGRAMS) or 0.0
    if lost >= HIDING:
        small = f"what takes less than {percent(NOTICEABLE)} of the time"
        core = f"programs outside the run take the training thread's core {percent(lost)} of the time"
        not_measured.append(
            NotMeasured(what=small, reason=f"{core}: without them, its share may be {percent(NOTICEABLE / (1 - lost))}")
        )
    if "operators" not in evidence.facts:
        not_measured.append(NotMeasured(what="operators and kernels", reason=evidence.why_not("operators")))
    findings.sort(key=lambda finding: (not finding.urgent, finding.level == "risk", -(finding.share or 0.0)))
    for place, (first, second) in enumerate(zip(findings, findings[1:])):
        if _as_large(first, second) and _has_fix(second) and not _has_fix(first):
            findings[place : place + 2] = second, first
    return Report(tuple(findings), tuple(not_found), tuple(not_measured), tuple(not_applicable), too_short=short)


AS_LARGE = 0.02
"""Shares of the time that differ by no more count as equal: of two such findings, one with a fix goes before one with advice alone. Steps
that take far longer than others are most often what the other finding does now and then."""


def _as_large(first: Finding, second: Finding) -> bool:
    """Whether two findings, in their order, count as equally large."""
    alike = (first.urgent, first.level) == (second.urgent, second.level)
    return alike and first.share is not None and second.share is not None and first.share - second.share <= AS_LARGE


def _has_fix(finding: Finding) -> bool:
    return any(fix.label == "fix" for fix in finding.fixes)


def _followable(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with fixes that change something in this run, and that know which run that is."""
    if evidence.script:
        finding = script_fixes.for_script(finding, evidence)
    else:
        fixes = tuple(
            fix
            for fix in finding.fixes
            if not _has_it(fix, evidence.settings) and not (evidence.remote and fix.setting in OF_WORKERS)
        )
        if finding.gain is not None and fixes[:1] != finding.fixes[:1]:
            finding = replace(finding, gain=of_other_fixes(finding))
        finding = replace(finding, fixes=fixes or (_probe(evidence),))
    replayed = evidence.measurements.replay
    run = replayed.run if replayed else None
    fixes = tuple(replace(fix, run=run, watched=_watched(fix, evidence)) for fix in finding.fixes)
    return replace(finding, fixes=fixes)


def _watched(fix: Fix, evidence: Evidence) -> Watched | None:
    """The watched command, if a fix can be set in it from outside; None for a setting that it would not take."""
    script = evidence.script
    if script is None:  # the kit's own, which takes its settings as hyperparameters alone
        takes = (fix.setting or "").startswith("environment.")
    else:
        takes = fix.setting != "num_workers" or script.takes_workers(fix.value)
    return evidence.measurements.watched if takes else None


OF_WORKERS = ("hyperparameters.num_workers", "hyperparameters.worker_type")
"""Settings that are not advised if other hosts make the training images: this host's workers then only make those of evaluations."""


def _has_it(fix: Fix, settings: Mapping[str, Any]) -> bool:
    """Whether the run already has a fix's value."""
    name = (fix.setting or "").removeprefix("hyperparameters.")
    return name in settings and settings[name] == fix.value


def _probe(evidence: Evidence) -> Fix:
    """The advice if all that a rule advises is already set."""
    run = evidence.measurements.replay
    probe = f"launcher diagnose {run.run if run else 'RUN'} --probe"
    return Fix(setting=None, value=f"{probe}, which measures the halves of a step separately")

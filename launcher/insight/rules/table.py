"""Every rule with what it looks for, and one ranked list of what they find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.insight.answers import Answer, DoesNotApply, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.report import Report
from launcher.insight.rules import compute, data, feeding, pauses, processes, script_fixes, system


@dataclass(frozen=True)
class Rule:
    """One question that is asked of every run."""

    looks_for: str
    ask: Callable[[Evidence], Answer]
    of_usual_steps: bool = False
    """Whether it needs usual steps: in the first ones, memory is allocated and kernels are chosen."""


RULES = (
    Rule("waiting for data: workers, cores, storage", data.waiting, of_usual_steps=True),
    Rule("cores throttled by a quota", system.throttled),
    Rule("pauses at the start of epochs", pauses.epoch_starts, of_usual_steps=True),
    Rule("copying batches to the device", compute.transfer, of_usual_steps=True),
    Rule("a teacher that takes much of the step", compute.teacher, of_usual_steps=True),
    Rule("arithmetic in fp32", compute.fp32, of_usual_steps=True),
    Rule("a GPU that waits for the training process", feeding.starved, of_usual_steps=True),
    Rule("steps too small for their fixed cost", feeding.fixed_cost, of_usual_steps=True),
    Rule("exchange of gradients", processes.communication, of_usual_steps=True),
    Rule("one slow rank", processes.slow_rank, of_usual_steps=True),
    Rule("GPUs used unevenly", processes.uneven_gpus),
    Rule("checkpoints", pauses.checkpoints),
    Rule("evaluations", pauses.evaluations),
    Rule("a slow start", pauses.start),
    Rule("steps that take far longer than the others", pauses.outliers),
    Rule("growth of a host's memory", system.host_memory),
    Rule("growth of a GPU's memory", system.gpu_memory),
)


def judge(evidence: Evidence) -> Report:
    """Ask every rule."""
    findings, not_found, not_measured, not_applicable = [], [], [], []
    for rule in RULES:
        if rule.of_usual_steps and evidence.only_first_steps:
            not_measured.append(NotMeasured(what=rule.looks_for, reason="the run has only its first steps"))
            continue
        answer = rule.ask(evidence)
        if isinstance(answer, Finding):
            findings.append(script_fixes.for_script(answer, evidence) if evidence.script else answer)
        elif isinstance(answer, NotMeasured):
            not_measured.append(answer)
        elif isinstance(answer, DoesNotApply):
            not_applicable.append((rule.looks_for, answer.why))
        else:
            not_found.append(rule.looks_for)
    if "operators" not in evidence.facts:
        not_measured.append(NotMeasured(what="operators and kernels", reason=evidence.why_not("operators")))
    findings.sort(key=lambda finding: (not finding.urgent, finding.level == "risk", -(finding.share or 0.0)))
    return Report(tuple(findings), tuple(not_found), tuple(not_measured), tuple(not_applicable))

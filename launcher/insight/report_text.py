"""A diagnosis as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from launcher.insight import servers, start_up, summary, utilisation, windows
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, percent
from launcher.insight.phases import labelled
from launcher.insight.report import Report
from launcher.record.records import FAILED, STOPPED
from launcher.show.table import Table
from launcher.show.text import counted, duration

WIDTH = 110
"""Columns of running text."""


ESSENTIAL = ("CPU", "CPU of the quota", "busiest core", "memory", "GPU", "GPU memory")
"""Shown for each of several hosts; the page and --json have the rest."""


def headline(evidence: Evidence, report: Report) -> str:
    """The main finding in one sentence."""
    left = [one for one in report.findings if one.level == "bottleneck" and not one.refuted]
    if report.probe is not None and report.probe.speaks and not left:
        return report.probe.title
    if ended := without_steps(evidence):
        return f"{ended}. {titled(report.findings[0])}" if report.findings else ended
    if report.too_short:
        short = f"{report.too_short}: too short to judge"
        return f"{short}. {titled(report.findings[0])}" if report.findings else short
    if report.findings:
        top = report.findings[0]
        return titled(top) if top.share is None else f"{titled(top)} ({taken(top)})"
    if not evidence.ranks and not evidence.hosts:
        return "not measured: neither steps nor hosts were recorded"
    compute = evidence.share(
        "forward", "student_forward", "teacher_forward", "augment", "loss", "backward", "optimizer"
    )
    if compute is not None:
        compute -= evidence.share("grad_sync") or 0.0  # a part of backward
    if compute is not None and compute >= 0.5:
        return (
            f"No bottleneck found in what was measured: {percent(compute)} of each step is the models' own arithmetic"
        )
    found = "No bottleneck found in what was measured" if evidence.ranks else "no step was measured"
    if evidence.gpu_idle is not None and evidence.gpu_idle < 0.3:
        return f"{found}: GPUs busy {percent(1 - evidence.gpu_idle)} of the time"
    return found


def incomplete(evidence: Evidence) -> str:
    """The state of a run that ended without completing; "" for any other, or if it is not known."""
    state = evidence.facts.get("state")
    return str(state) if state in (FAILED, STOPPED) else ""


def without_steps(evidence: Evidence) -> str:
    """How a run ended that has no measured step and did not complete, and where the reason is; "" for any other."""
    state, seconds = incomplete(evidence), evidence.facts.get("run_seconds")
    if evidence.ranks or not state:
        return ""
    after = f" after {duration(seconds)}" if isinstance(seconds, (int, float)) else ""
    return f"{state}{after}, no step measured; launcher show {evidence.measurements.source} has the reason"


def about(evidence: Evidence) -> str:
    """What ran, and which part of it was measured, in one line."""
    parts = [incomplete(evidence)] if evidence.ranks and incomplete(evidence) else []
    parts += [counted(len(evidence.measurements.hosts), "host")] if evidence.measurements.hosts else []
    world_size, step_seconds = evidence.world_size, evidence.step_seconds
    if world_size is not None and step_seconds is not None:
        parts.append(counted(world_size, "process", "processes"))
        steps = evidence.ranks[0]
        parts.append(f"steps {int(steps.step[0] - windows.counts(steps)[0]) + 1} to {int(steps.step[-1])}")
        parts.append(f"{step_seconds:.3g} s a step")
        if evidence.only_first_steps:
            parts.append("all of them first steps, which allocate memory and choose kernels: usual ones are faster")
        batch = evidence.settings.get("global_batch_size")
        if isinstance(batch, int):
            parts.append(f"{batch / step_seconds:.4g} images/s")
    kinds = [evidence.facts.get(name) for name in ("instance_type", "device_name", "device")]
    parts += [str(kind) for kind in kinds if kind not in (None, "local", "cuda")]
    return ", ".join(parts)


def text(evidence: Evidence, report: Report) -> str:
    """The whole report."""
    lines = [f"{evidence.measurements.source}: {headline(evidence, report)}"]
    lines += [f"  {about(evidence)}"] if about(evidence) else []
    lines += _wrapped("  ", start_up.sentence(evidence))
    lines += _wrapped("  ", utilisation.sentence(evidence))
    lines += [f"  {evidence.measurements.sampled}"] if evidence.measurements.sampled else []
    lines += _wrapped("  ", servers.sentence(evidence))
    lines += _wrapped("  could not be read: ", unreadable(evidence))
    if report.probe is not None:
        lines += ["", *_wrapped("probe: ", report.probe.title)]
        lines += [str(Table(report.probe.HEAD, report.probe.rows))] if report.probe.rows else []
        for sentence in report.probe.sentences:
            lines += _wrapped("  ", sentence)
    for number, finding in enumerate(report.findings, 1):
        lines += ["", *_finding(number, finding)]
    phases = summary.phase_rows(evidence)
    if phases:
        rows = [
            [labelled(name), f"{seconds * 1000:.2f}", percent(share), "#" * round(share * 40)]
            for name, seconds, share in phases
        ]
        lines += ["", str(Table(["phase", "ms a step", "share", ""], rows))]
    operators = [
        [name[:80], f"{seconds * 1000:.2f}", percent(share)] for name, seconds, share in summary.operators(evidence, 5)
    ]
    if operators:
        lines += ["", str(Table(["operators that take longest", "ms a step", "share"], operators))]
    sampled = [[at, phase, percent(share), code[:60]] for at, phase, share, code in summary.lines(evidence, 5)]
    if sampled:
        lines += ["", str(Table(summary.LINES, sampled))]
    several = len(evidence.measurements.hosts) > 1
    used = [use for use in summary.uses(evidence) if not several or use.resource in ESSENTIAL]
    if used:
        rows = [
            [
                *([use.host] if several else []),
                use.resource,
                *(f"{value:.1f}" for value in use.quantiles.values()),
                use.unit,
            ]
            for use in used
        ]
        lines += ["", str(Table([*(["host"] if several else []), "use", *summary.QUANTILES, "unit"], rows))]
    lines.append("")
    if report.not_found:
        lines += _wrapped("looked for, not found: ", "; ".join(report.not_found))
    if report.not_applicable:
        lines += _wrapped("does not apply: ", "; ".join(f"{what} ({why})" for what, why in report.not_applicable))
    for reason, missing in not_measured(report).items():
        lines += _wrapped("not measured: ", f"{'; '.join(missing)} ({reason})")
    return "\n".join(lines)


def not_measured(report: Report) -> dict[str, list[str]]:
    """What could not be looked for, by reason."""
    reasons: dict[str, list[str]] = {}
    for missing in report.not_measured:
        reasons.setdefault(missing.reason, []).append(missing.what)
    return reasons


def unreadable(evidence: Evidence) -> str:
    """Which measurements could not be read; "" if all could."""
    return "; ".join(evidence.measurements.unreadable)


def titled(finding: Finding) -> str:
    """A finding's title, with the line to change if it has one."""
    return f"{finding.title}, at {finding.at}" if finding.at else finding.title


def taken(finding: Finding) -> str:
    """The share of time that a finding takes, in words."""
    share = "a risk" if finding.share is None else f"{percent(finding.share)} of the time"
    return f"{share}; refuted" if finding.refuted else share


def details(finding: Finding) -> Iterator[tuple[str, str, bool]]:
    """All of a finding but its title, as (evidence, cause, fix, advice …; the text; whether that is a command)."""
    for number in finding.evidence:
        yield "evidence", number, False
    yield "cause", finding.cause, False
    for fix in finding.fixes:
        yield fix.label, str(fix), False
        if fix.command is not None:
            yield fix.label, fix.command, True
    if finding.experiment:
        yield "to test", finding.experiment, False
    if finding.gain:
        yield "gain", str(finding.gain), False
    if finding.probe:
        yield "probe", finding.probe, False


def _finding(number: int, finding: Finding) -> list[str]:
    lines = _wrapped(f"{number}. ", f"{titled(finding)} ({taken(finding)})")
    before = ""
    for name, value, is_command in details(finding):
        head = f"   {'' if name == before else name:<8}  "
        lines += (
            [f"{head}{value}"] if is_command else _wrapped(head, value)
        )  # a command is pasted: it has no line breaks
        before = name
    return lines


def _wrapped(head: str, value: str) -> list[str]:
    return textwrap.wrap(
        value,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )

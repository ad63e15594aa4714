"""A diagnosis as HTML: findings for a notebook, and one page with charts that needs nothing else."""

from __future__ import annotations

from html import escape

from launcher.insight import report, summary
from launcher.insight.evidence import Evidence
from launcher.insight.rules import Judgement
from launcher.insight.verdicts import Verdict, percent


def fragment(evidence: Evidence, judgement: Judgement) -> str:
    """Findings and tables, without charts or scripts: what a notebook shows."""
    return (
        f"<div class='diagnosis'><h2>{escape(report.headline(evidence, judgement))}</h2>"
        f"<p class='about'>{escape(evidence.measurements.source)} · {escape(report.about(evidence))}</p>"
        + findings(judgement)
        + phase_table(evidence)
        + use_table(evidence)
        + "</div>"
    )


def findings(judgement: Judgement) -> str:
    """The ranked list, and what was looked for or could not be."""
    parts = [_finding(verdict) for verdict in judgement.verdicts]
    parts = [f"<ol class='findings'>{''.join(parts)}</ol>"] if parts else []
    if judgement.not_found:
        parts.append(f"<p><b>Looked for, not found:</b> {escape('; '.join(judgement.not_found))}.</p>")
    if judgement.not_applicable:
        told = "; ".join(f"{what} ({why})" for what, why in judgement.not_applicable)
        parts.append(f"<p><b>Does not apply:</b> {escape(told)}.</p>")
    if judgement.not_measured:
        rows = "".join(
            f"<li>{escape(missing.what)}: {escape(missing.reason)}</li>" for missing in judgement.not_measured
        )
        parts.append(f"<p><b>Not measured</b></p><ul>{rows}</ul>")
    return "".join(parts)


def phase_table(evidence: Evidence) -> str:
    rows = [
        [escape(name), f"{seconds * 1000:.2f}", percent(share)] for name, seconds, share in summary.phase_rows(evidence)
    ]
    return _table(["phase", "ms a step", "share"], rows)


def use_table(evidence: Evidence) -> str:
    rows = [
        [
            escape(use.host),
            escape(use.resource),
            *(f"{value:.1f}" for value in use.quantiles.values()),
            escape(use.unit),
        ]
        for use in summary.uses(evidence)
    ]
    return _table(["host", "use", *summary.QUANTILES, "unit"], rows)


def _finding(verdict: Verdict) -> str:
    taken = "a risk" if verdict.share is None else f"{percent(verdict.share)} of the training time"
    parts = [f"<li class='{verdict.level}'><h3>{escape(verdict.title)} <span class='share'>{taken}</span></h3><dl>"]
    for name, values in (
        ("evidence", verdict.evidence),
        ("cause", (verdict.cause,)),
        ("cure", tuple(str(cure) for cure in verdict.cures)),
        ("gain", (str(verdict.gain),) if verdict.gain else ()),
    ):
        if values:
            parts.append(f"<dt>{name}</dt>" + "".join(f"<dd>{escape(value)}</dd>" for value in values))
    return "".join(parts) + "</dl></li>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"

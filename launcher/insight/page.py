"""A diagnosis as HTML: findings for a notebook, and one page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from launcher.insight import charts, report_text, servers, summary, windows
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, percent, written
from launcher.insight.phases import inside_others
from launcher.insight.report import ProbeAnswer, Report
from launcher.show.page import document
from launcher.show.table import Table

RANKS = 48
"""Rows of the comparison of ranks: as many as fit on a screen."""


def fragment(evidence: Evidence, report: Report) -> str:
    """Findings and tables, without charts or scripts: what a notebook shows."""
    return (
        f"<div class='diagnosis'><h2>{escape(report_text.headline(evidence, report))}</h2>"
        f"<p class='about'>{escape(evidence.measurements.source)} · {escape(report_text.about(evidence))}</p>"
        + _servers(evidence)
        + _unreadable(evidence)
        + findings(report)
        + phase_table(evidence)
        + operator_table(evidence)
        + line_table(evidence)
        + use_table(evidence)
        + "</div>"
    )


def page(title: str, top: str, runs: Sequence[tuple[Evidence, Report]]) -> str:
    """One HTML document with charts; it loads nothing.

    Args:
        top: HTML above the runs.
        runs: below each other.
    """
    here = Path(__file__)
    style, script = (here.with_suffix(ending).read_text(encoding="utf-8") for ending in (".css", ".js"))
    bodies = "".join(_run(evidence, report, place) for place, (evidence, report) in enumerate(runs))
    return document(title, top + bodies, [charts.payload(evidence) for evidence, _ in runs], style, script)


def _run(evidence: Evidence, report: Report, place: int) -> str:
    """A run's part of the page: findings on top, then charts and tables."""
    source, headline = escape(evidence.measurements.source), escape(report_text.headline(evidence, report))
    return (
        f"<section><p class='about'>{source}</p><h1>{headline}</h1><p class='about'>{escape(report_text.about(evidence))}</p>"
        f"{_servers(evidence)}{_unreadable(evidence)}{findings(report)}<div id='charts-{place}'></div>"
        f"{_section('Ranks, slowest first', rank_bars(evidence))}{_section('Phases of a usual step', phase_table(evidence))}"
        f"{_section('Operators that take longest', operator_table(evidence))}"
        f"{_section('Lines of the script', line_table(evidence))}"
        f"{_section('Use of resources', use_table(evidence))}{_section('Settings', settings_table(evidence))}</section>"
    )


def _servers(evidence: Evidence) -> str:
    text = servers.said(evidence)
    return f"<p class='about'>{escape(text)}</p>" if text else ""


def _unreadable(evidence: Evidence) -> str:
    text = report_text.unreadable(evidence)
    return f"<p class='about'><b>Could not be read:</b> {escape(text)}.</p>" if text else ""


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2><div class='scroll'>{body}</div>" if body else ""


def rank_bars(evidence: Evidence) -> str:
    """Where each rank's step goes, as bars; the ranks whose own part takes longest come first."""
    if len(evidence.ranks) < 2:
        return ""
    phases = [name for name in summary.in_order(evidence.phases) if name not in inside_others()]
    rows = []
    for steps in evidence.ranks:
        seconds = {name: windows.mean_seconds(steps, name) or 0.0 for name in phases}
        waits = windows.mean_seconds(steps, "grad_sync") or 0.0
        rows.append((sum(seconds.values()) - waits, waits, steps, seconds))
    rows.sort(key=lambda row: -row[0])
    longest = max(sum(seconds.values()) for *_, seconds in rows) or 1.0
    bars_of_ranks = []
    for own, waits, steps, seconds in rows[:RANKS]:
        bars = ""
        for name, value in seconds.items():
            style = f"width:{100 * value / longest:.2f}%;background:var(--c{summary.colour(name)})"
            bars += f"<i style='{style}' title='{escape(name)} {value * 1000:.4g} ms'></i>"
        numbers = f"own {own * 1000:.4g} ms" + (f", waits {waits * 1000:.4g} ms" if waits else "")
        bars_of_ranks.append(
            f"<span>{escape(f'rank {steps.rank}, {steps.host}')}</span><span class='bar'>{bars}</span><span>{numbers}</span>"
        )
    names = "".join(
        f"<span><i style='background:var(--c{summary.colour(name)})'></i>{escape(name)}</span>" for name in phases
    )
    more = f"<p class='note'>{len(rows) - RANKS} more ranks are not shown.</p>" if len(rows) > RANKS else ""
    return f"<div class='bars'>{''.join(bars_of_ranks)}</div><div class='legend'>{names}</div>{more}"


def settings_table(evidence: Evidence) -> str:
    rows = [[name, written(value)] for name, value in evidence.settings.items()]
    return (
        f"<details><summary>{len(rows)} settings</summary>{_table(['setting', 'value'], rows)}</details>"
        if rows
        else ""
    )


def findings(report: Report) -> str:
    """What a probe says, the ranked list, and what was not found or could not be looked for."""
    parts = [_finding(finding) for finding in report.findings]
    parts = [f"<ol class='findings'>{''.join(parts)}</ol>"] if parts else []
    if report.probe is not None:
        parts.insert(0, _probe(report.probe))
    if report.not_found:
        parts.append(f"<p><b>Looked for, not found:</b> {escape('; '.join(report.not_found))}.</p>")
    if report.not_applicable:
        text = "; ".join(f"{what} ({why})" for what, why in report.not_applicable)
        parts.append(f"<p><b>Does not apply:</b> {escape(text)}.</p>")
    if report.not_measured:
        text = "; ".join(f"{'; '.join(what)} ({reason})" for reason, what in report_text.not_measured(report).items())
        parts.append(f"<p><b>Not measured:</b> {escape(text)}.</p>")
    return "".join(parts)


def _probe(answer: ProbeAnswer) -> str:
    body = _table(answer.HEAD, answer.rows)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in answer.sentences)
    return f"<div class='probe'><h3>Probe: {escape(answer.title)}</h3><div class='scroll'>{body}</div>{sentences}</div>"


def phase_table(evidence: Evidence) -> str:
    rows = [[name, f"{seconds * 1000:.2f}", percent(share)] for name, seconds, share in summary.phase_rows(evidence)]
    return _table(["phase", "ms a step", "share"], rows)


def operator_table(evidence: Evidence) -> str:
    rows = [[name, f"{seconds * 1000:.3f}", percent(share)] for name, seconds, share in summary.operators(evidence, 15)]
    return _table(["operator or kernel", "ms a step", "share"], rows)


def line_table(evidence: Evidence) -> str:
    rows = [[at, phase, percent(share), code] for at, phase, share, code in summary.lines(evidence, 15)]
    return _table(summary.LINES, rows)


def use_table(evidence: Evidence) -> str:
    rows = [
        [
            use.host,
            use.resource,
            *(f"{value:.1f}" for value in use.quantiles.values()),
            use.unit,
        ]
        for use in summary.uses(evidence)
    ]
    return _table(["host", "use", *summary.QUANTILES, "unit"], rows)


def _finding(finding: Finding) -> str:
    title, taken = escape(report_text.titled(finding)), report_text.taken(finding)
    parts = [f"<li class='{finding.level}'><h3>{title} <span class='share'>{taken}</span></h3><dl>"]
    before = ""
    for name, value, is_command in report_text.said(finding):
        shown = f"<code>{escape(value)}</code>" if is_command else escape(value)
        parts.append(f"{'' if name == before else f'<dt>{name}</dt>'}<dd>{shown}</dd>")
        before = name
    return "".join(parts) + "</dl></li>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """ "" where there are no rows."""
    return Table(head, rows).html() if rows else ""

"""A diagnosis as HTML: findings for a notebook, and one page with charts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from pathlib import Path

from launcher.insight import charts, pictures, report_text, servers, start_up, summary, utilisation, windows
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, Fix, percent, written
from launcher.insight.phases import labelled
from launcher.insight.report import ProbeAnswer, Report
from launcher.show import html
from launcher.show.page import document
from launcher.show.table import Table

RANKS = 48
"""Rows of the comparison of ranks: as many as fit on a screen."""

LABELLED = 0.11
"""Share of the training time from which a part of its bar holds its number, even on a narrow screen."""


def fragment(evidence: Evidence, report: Report) -> str:
    """What a notebook shows: the headline, a picture of where the time goes, the findings, and the tables folded. It has no scripts or
    style sheets, which an untrusted notebook would lose."""
    tables = (
        ("phases of a usual step", phase_table(evidence)),
        ("operators that take longest", operator_table(evidence)),
        ("lines of the script", line_table(evidence)),
        ("use of resources", use_table(evidence)),
    )
    return (
        f"<div class='diagnosis'><h2>{escape(report_text.headline(evidence, report))}</h2>"
        f"<p class='about'>{escape(evidence.measurements.source)} · {escape(report_text.about(evidence))}</p>"
        + _about(start_up.sentence(evidence))
        + _about(utilisation.sentence(evidence))
        + _about(servers.sentence(evidence))
        + _unreadable(evidence)
        + html.image(pictures.one_run(evidence))
        + findings(report)
        + "".join(f"<details><summary>{title}</summary>{table}</details>" for title, table in tables if table)
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
    """A run's part of the page: one screen of headline, where the time goes and the findings; then charts and tables."""
    source = escape(evidence.measurements.source)
    headline = escape(report_text.headline(evidence, report)).replace(" %", "&nbsp;%")
    return (
        f"<section><p class='about'>{source}</p><h1>{headline}</h1><p class='about'>{escape(report_text.about(evidence))}</p>"
        f"{_about(start_up.sentence(evidence))}{_about(utilisation.sentence(evidence))}{_about(servers.sentence(evidence))}{_unreadable(evidence)}"
        f"{_course(evidence)}{findings(report)}<div id='charts-{place}'></div>"
        f"{_section('Ranks, slowest first', rank_bars(evidence))}{_section('Phases of a usual step', phase_table(evidence))}"
        f"{_section('Operators that take longest', operator_table(evidence))}"
        f"{_section('Lines of the script', line_table(evidence))}"
        f"{_section('Use of resources', use_table(evidence))}{_section('Settings', settings_table(evidence))}</section>"
    )


def _about(text: str) -> str:
    return f"<p class='about'>{escape(text)}</p>" if text else ""


def _unreadable(evidence: Evidence) -> str:
    text = report_text.unreadable(evidence)
    return f"<p class='about'><b>Could not be read:</b> {escape(text)}.</p>" if text else ""


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2><div class='scroll'>{body}</div>" if body else ""


def _course(evidence: Evidence) -> str:
    """Where the training time goes, as one bar with its legend; if the steps were not timed, how much of its resources the run used."""
    course = summary.course(evidence)
    whole = sum(course.values())
    if not whole:
        return _use_bars(evidence)
    bar, names = "", ""
    for part, seconds in course.items():
        share, colour = seconds / whole, _colour(part)
        if share < 0.001:
            continue
        label = percent(share) if share >= LABELLED else ""
        style = f"width:{100 * share:.2f}%;background:var(--{colour});color:var(--on-{colour})"
        bar += f"<span style='{style}' title='{escape(part)} {percent(share)}'>{label}</span>"
        names += _entry(part, f"{part} {percent(share)}")
    return (
        f"<div class='course'><h2>Where the training time goes</h2><div class='bar'>{bar}</div>"
        f"<div class='legend'>{names}</div></div>"
    )


def _entry(part: str, text: str) -> str:
    """A part of the training time in a legend."""
    return f"<span><i style='background:var(--{_colour(part)})'></i>{escape(text)}</span>"


def _colour(part: str) -> str:
    """The name of the CSS variable of a part of the training time."""
    beside = {summary.PAUSES: "beside", summary.UNNAMED: "none"}
    return beside.get(part) or f"c{summary.colour(part)}"


def _use_bars(evidence: Evidence) -> str:
    """How much of each resource of the first host was used, as bars; "" if nothing was sampled."""
    host = next(iter(evidence.measurements.hosts), None)
    rows = "".join(
        f"<span>{escape(use.resource)}</span><span class='bar'><i style='width:{min(use.quantiles['p50'], 100):.1f}%'></i></span>"
        f"<span>{use.quantiles['p50']:.0f} %</span>"
        for use in summary.uses(evidence)
        if use.host == host and use.unit.startswith("%")
    )
    title = f"How busy {escape(str(host))} was: the median of each resource"
    return f"<div class='course'><h2>{title}</h2><div class='bars use'>{rows}</div></div>" if rows else ""


def rank_bars(evidence: Evidence) -> str:
    """Where each rank's step goes, as bars; the ranks whose own part takes longest come first."""
    if len(evidence.ranks) < 2:
        return ""
    phases = summary.in_order(evidence.phases)
    rows = []
    for steps in evidence.ranks:
        seconds = summary.apart({name: windows.mean_seconds(steps, name) or 0.0 for name in phases})
        seconds[summary.UNNAMED] = evidence.seconds_outside_phases(steps)
        waits = sum(seconds.get(name, 0.0) for name in ("grad_sync", "buffer_sync"))
        rows.append((sum(seconds.values()) - waits, waits, steps, seconds))
    rows.sort(key=lambda row: -row[0])
    longest = max(sum(seconds.values()) for *_, seconds in rows) or 1.0
    bars_of_ranks = []
    for own, waits, steps, seconds in rows[:RANKS]:
        bars = ""
        for name, value in seconds.items():
            style = f"width:{100 * value / longest:.2f}%;background:var(--{_colour(name)})"
            bars += f"<i style='{style}' title='{escape(name)} {value * 1000:.4g} ms'></i>"
        numbers = f"own {own * 1000:.4g} ms" + (f", waits {waits * 1000:.4g} ms" if waits else "")
        bars_of_ranks.append(
            f"<span>{escape(f'rank {steps.rank}, {steps.host}')}</span><span class='bar'>{bars}</span><span>{numbers}</span>"
        )
    names = "".join(_entry(name, name) for name in (*phases, summary.UNNAMED))
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
    """The probe's answer, the ranked findings with the first unfolded, and what was not found or could not be looked for."""
    parts = [_finding(finding, is_first=not place) for place, finding in enumerate(report.findings)]
    parts = [f"<ol class='findings'>{''.join(parts)}</ol>"] if parts else []
    if report.probe is not None:
        parts.insert(0, _probe(report.probe))
    return "".join(parts) + _what_else(report)


def _what_else(report: Report) -> str:
    """What else was looked for, folded."""
    paragraphs = []
    if report.not_found:
        paragraphs.append(f"<p><b>Looked for, not found:</b> {escape('; '.join(report.not_found))}.</p>")
    if report.not_applicable:
        text = "; ".join(f"{what} ({why})" for what, why in report.not_applicable)
        paragraphs.append(f"<p><b>Does not apply:</b> {escape(text)}.</p>")
    if report.not_measured:
        text = "; ".join(f"{'; '.join(what)} ({reason})" for reason, what in report_text.not_measured(report).items())
        paragraphs.append(f"<p><b>Not measured:</b> {escape(text)}.</p>")
    if not paragraphs:
        return ""
    numbers = ((len(report.not_found), "not found"), (len(report.not_measured), "not measured"))
    counts = ", ".join(f"{number} {what}" for number, what in numbers if number)
    title = f"What else was looked for{f': {counts}' if counts else ''}"
    return f"<details class='else'><summary>{title}</summary>{''.join(paragraphs)}</details>"


def _probe(answer: ProbeAnswer) -> str:
    body = _table(answer.HEAD, answer.rows)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in answer.sentences)
    return f"<div class='probe'><h3>Probe: {escape(answer.title)}</h3><div class='scroll'>{body}</div>{sentences}</div>"


def phase_table(evidence: Evidence) -> str:
    rows = [
        [labelled(name), f"{seconds * 1000:.2f}", percent(share)]
        for name, seconds, share in summary.phase_rows(evidence)
    ]
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


def _finding(finding: Finding, *, is_first: bool) -> str:
    """What to do, and what it brings; then why, which is folded except for the first finding."""
    title, taken = escape(report_text.titled(finding)), report_text.taken(finding)
    to_do = [("fix", _fix(fix)) for fix in finding.fixes if fix.label == "fix"]
    if finding.experiment:
        to_do.append(("to test", escape(finding.experiment)))
    if to_do and finding.gain:
        to_do.append(("gain", escape(str(finding.gain))))
    above = {"fix", *(name for name, _ in to_do)}
    why = definition_list([(name, value) for name, value, _ in report_text.details(finding) if name not in above])
    is_open = " open" if is_first or not to_do else ""
    return (
        f"<li class='{finding.level}'><h3>{title} <span class='share'>{taken}</span></h3>{_definition_list(to_do)}"
        f"<details{is_open}><summary>evidence and cause</summary>{why}</details></li>"
    )


def _fix(fix: Fix) -> str:
    """A fix: what to paste (the command, if there is one), and what it does."""
    paste = fix.command or (fix.overrides if fix.setting and not fix.change else "")
    code = f"<div class='paste' style='overflow-x:auto'><code>{escape(paste)}</code></div>" if paste else ""
    return code + escape(fix.reason if paste and not fix.command else str(fix))


def definition_list(rows: Sequence[tuple[str, str]]) -> str:
    """Names with their sentences; "" if empty. Neighbours of one name share it, and one element, as JupyterLab lays such lists out."""
    return _definition_list([(name, escape(value)) for name, value in rows])


def _definition_list(rows: Sequence[tuple[str, str]]) -> str:
    """Names with HTML."""
    parts = (
        f"<dt>{name}</dt><dd>{''.join(f'<div>{value}</div>' for _, value in same)}</dd>"
        for name, same in itertools.groupby(rows, key=lambda row: row[0])
    )
    return f"<dl>{''.join(parts)}</dl>" if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """ "" if there are no rows."""
    return Table(head, rows).html() if rows else ""

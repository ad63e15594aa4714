"""How jobs, plans and runs show themselves in a notebook: small HTML in the page's own colours, light or dark, that loads nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.issues import Issue
from launcher.config.redaction import redact
from launcher.record.metric_lines import parse_line
from launcher.record.progress import Progress, percent, quality
from launcher.record.records import COMPLETED, FAILED, OVER
from launcher.show.text import counted, dollars

if TYPE_CHECKING:
    from launcher.config.job import Job
    from launcher.planner.plan import Plan
    from launcher.runner.run import Run

DIM, LINE, FILLED = "opacity:.7", "border-bottom:1px solid rgba(127,127,127,.3)", "#3a8fd0"
"""Of whatever text and background the notebook has: an output cannot know its theme."""

REDRAW_SECONDS = 0.5
"""At least, between two drawings of a run that goes on."""

CURVE_POINTS, CURVE_WIDTH, CURVE_HEIGHT = 120, 260, 56
"""Of a drawn curve: points at most, and pixels."""

Rows = Sequence[tuple[str, str]]


def job(shown: Job) -> str:
    """What a job says, without what it leaves as it is."""
    kept = shown.model_dump(exclude_defaults=True, exclude_none=True)
    if "environment" in kept:
        kept["environment"] = redact(kept["environment"])
    rows = [(name, _value(value)) for name, value in kept.items() if name not in ("name", "hyperparameters")]
    return _box(
        f"job {shown.name}", "", _table(rows) + _more("hyperparameters", _settings(kept.get("hyperparameters", {})))
    )


def plan(shown: Plan) -> str:
    """What would happen, what it would cost, and what was found."""
    about = [shown.backend, counted(len(shown.hosts), "host"), f"at most {shown.job.compute.max_hours:g} h"]
    size = sum(file.size for file in shown.files) / 1024
    rows = [("script", shown.job.script), ("code", f"{counted(len(shown.files), 'file')}, {size:.0f} KiB")]
    rows += [("price", shown.price.text)] if shown.price is not None else []
    rows += [("resumes", shown.resumes)] if shown.resumes is not None else []
    rows += [(f"channel {name}", _near(place)) for name, place in shown.channels.items()]
    rows += [
        (
            "upload",
            f"{_near(str(one.source))}: {counted(one.files, 'file')}, {one.size / 2**20:.1f} MiB, to {one.target}",
        )
        for one in shown.uploads
    ]
    found = "".join(_issue(issue) for issue in shown.issues)
    end = "" if shown.errors else "nothing was started; launcher.run(plan) does it"
    parts = _table(rows) + _more("hyperparameters", _settings(shown.job.hyperparameters)) + found
    return _box(f"plan {shown.name}", " · ".join(about), parts, end)


def run(shown: Run) -> str:
    """How far a run is or how it ended, its cost, and what it measured."""
    watched = _Watched(shown)
    watched.read()
    return watched.html()


def watch(shown: Run) -> Watch | None:
    """A display of a run that goes on, in the notebook whose kernel this is; None outside a notebook."""
    return Watch(shown) if in_notebook() else None


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. IPython is not imported: a kernel has it there already."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None


class Watch:
    """One output that is written over and over: whoever comes back to the notebook sees the latest, and no more than that."""

    def __init__(self, shown: Run):
        from IPython.display import HTML, display  # a kernel has it

        self._watched = _Watched(shown)
        self._watched.read()
        self._drawn, self._at = self._watched.html(), time.monotonic()
        self._handle = display(HTML(self._drawn), display_id=True)

    def update(self, *, last: bool = False) -> None:
        """Draw what is new, unless it was drawn a moment ago; the last time always."""
        if not last and time.monotonic() - self._at < REDRAW_SECONDS:
            return
        from IPython.display import HTML

        self._watched.read()
        html, self._at = self._watched.html(), time.monotonic()
        if html != self._drawn:
            self._handle.update(HTML(html))
            self._drawn = html


class _Watched:
    """A run, and what was read of its log so far."""

    def __init__(self, shown: Run):
        self.run, self.progress = shown, Progress()
        self._positions: dict[str, int] = {}

    def read(self) -> None:
        """Take in the log lines that are new."""
        first, now = self.run.hosts[0], time.monotonic()
        for host, line in self.run.logs(positions=self._positions):
            metric = parse_line(line) if host == first else None
            if metric is not None:
                self.progress.add(metric, now)

    def html(self) -> str:
        run, state, outcome, result = self.run, self.run.state, self.run.outcome(), self.run.result()
        over = state in OVER
        about = [state, run.backend, counted(len(run.hosts), "host")]
        if outcome.get("seconds") is not None:
            about.append(f"{outcome['seconds']:.0f} s")
        usd = outcome.get("cost_usd") if over else run.spend
        about += [] if usd is None else [dollars(usd) + ("" if over else " so far")]
        rows = _results(result) if over else []
        if outcome.get("saving") is not None:
            rows.append(("spot", f"saved {percent(outcome['saving'])}"))
        if state == FAILED:
            rows += [(name, outcome[name]) for name in ("failed_host", "failure", "cause", "fix") if outcome.get(name)]
        stages = run.folder.read(run.folder.remote).get("SecondaryStatusTransitions", [])
        if stages and not over:
            rows.append(("stage", f"{stages[-1]['Status']}: {stages[-1].get('StatusMessage', '')}".rstrip(": ")))
        rows += [("not checked", run.trouble)] if run.trouble else []
        left = None if over else self.progress.seconds_left(time.monotonic())
        bar = "" if state == COMPLETED else _bar(self.progress.share)
        told = f"<div>{escape(self.progress.line(left))}</div>" if self.progress.last else ""
        curves = "".join(_curve(name, points) for name, points in self.progress.curves.items())
        end = "" if over else f'launcher.attach("{run.name}").wait() follows it from any notebook'
        return _box(f"run {run.name}", " · ".join(about), bar + told + curves + _table(rows), end)


def _results(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What of a script's result people ask for first."""
    found = [("on held-out images", quality(dict(result)))] if quality(dict(result)) != "-" else []
    forms = {"model": "", "parameters": ",", "steps": ",", "images_per_second": ",.0f"}
    for name, form in forms.items():
        value = result.get(name)
        if isinstance(value, (int, float) if form else str):
            found.append((name.replace("_per_second", " a second"), format(value, form)))
    return found


def _box(title: str, about: str, body: str, end: str = "") -> str:
    head = f"<b>{escape(title)}</b>" + (f" <span style='{DIM}'>{escape(about)}</span>" if about else "")
    tail = f"<div style='{DIM};margin-top:4px'>{escape(end)}</div>" if end else ""
    return f"<div style='max-width:56em;font-size:13px;line-height:1.5'><div>{head}</div>{body}{tail}</div>"


def _table(rows: Rows) -> str:
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td style='text-align:left;vertical-align:top;white-space:nowrap;padding:1px 12px 1px 0;{DIM};{LINE}'>{escape(name)}</td>"
        f"<td style='text-align:left;overflow-wrap:anywhere;white-space:pre-wrap;padding:1px 0;{LINE}'>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table style='border-collapse:collapse;margin:4px 0;color:inherit;font-size:inherit'><tbody>{lines}</tbody></table>"


def _more(title: str, rows: Rows) -> str:
    """What is shown when it is asked for."""
    return f"<details><summary>{len(rows)} {escape(title)}</summary>{_table(rows)}</details>" if rows else ""


def _issue(issue: Issue) -> str:
    colour = {"error": "#d1495b", "warning": "#e9a23b"}.get(issue.level, "rgba(127,127,127,.6)")
    return (
        f"<div style='border-left:4px solid {colour};padding:2px 8px;margin:6px 0;white-space:pre-wrap'>"
        f"<b>{escape(issue.level)}</b> {escape(str(issue))}</div>"
    )


def _bar(share: float) -> str:
    return (
        "<div style='height:6px;margin:4px 0;background:rgba(127,127,127,.25);border-radius:3px' role='progressbar' "
        f"aria-valuemin='0' aria-valuemax='100' aria-valuenow='{share * 100:.0f}'>"
        f"<div style='height:6px;border-radius:3px;width:{share * 100:.1f}%;background:{FILLED}'></div></div>"
    )


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """A small line of one number over the steps, "" of fewer than two."""
    points = [point for point in points if abs(point[1]) < float("inf")]  # nan and inf are nowhere on it
    if len(points) < 2:
        return ""
    every = -(-len(points) // CURVE_POINTS)
    points = [*points[:-1:every], points[-1]]
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    drawn = " ".join(
        f"{(step - first) / max(last - first, 1) * CURVE_WIDTH:.1f},{(high - value) / ((high - low) or 1) * CURVE_HEIGHT + 2:.1f}"
        for step, value in points
    )
    ends = f"{name.replace('_', ' ')}: {points[0][1]:.4g} at step {first}, {points[-1][1]:.4g} at step {last}"
    return (
        f"<div style='display:inline-block;margin:4px 24px 4px 0'><svg width='{CURVE_WIDTH}' height='{CURVE_HEIGHT + 4}' role='img' "
        f"aria-label='{escape(ends)}'><polyline points='{drawn}' fill='none' stroke='{FILLED}' stroke-width='1.5'/></svg>"
        f"<div style='{DIM};font-size:11px'>{escape(ends)}</div></div>"
    )


def _settings(values: Mapping[str, Any]) -> Rows:
    return [(name, _value(value)) for name, value in values.items()]


def _value(value: Any) -> str:
    """A setting in a line, as YAML would take it but for the outer brackets."""
    if isinstance(value, Mapping):
        parts = (
            (name, f"{{{_value(item)}}}" if isinstance(item, Mapping) else _value(item)) for name, item in value.items()
        )
        return ", ".join(f"{name}: {text}" for name, text in parts)
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _near(place: str) -> str:
    """A path below the current folder as it is written from there."""
    here = os.getcwd()
    return os.path.relpath(place, here) if Path(place).is_absolute() and Path(place).is_relative_to(here) else place

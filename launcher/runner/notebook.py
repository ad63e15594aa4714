"""A run's display in a notebook, once or live."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Protocol

from launcher.record.progress import RunProgress, percent, quality
from launcher.record.records import COMPLETED, FAILED, OVER, RunFolder
from launcher.show import html
from launcher.show.text import counted, dollars, number

REDRAW_SECONDS = 0.5
"""Least seconds between two redraws of a live run."""


class Shown(Protocol):
    """What a display needs from a Run."""

    folder: RunFolder
    trouble: str

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def hosts(self) -> list[str]: ...
    @property
    def cost(self) -> float | None: ...
    @property
    def spent(self) -> str: ...
    def logs(self, *, positions: dict[str, int] | None = None) -> Iterator[tuple[str, str]]: ...
    def outcome(self) -> dict[str, Any]: ...
    def result(self) -> dict[str, Any]: ...


def fragment(shown: Shown) -> str:
    """A run's progress or end, its cost and its results, as HTML."""
    watched = _Watched(shown)
    watched.read()
    return watched.html()


def watch(shown: Shown) -> Watch | None:
    """A live display of a run in this process's notebook; None outside a notebook."""
    return Watch(shown) if in_notebook() else None


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. A kernel has imported IPython, so this does not."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None


class Watch:
    """One output that is redrawn in place, so that a notebook holds only the latest."""

    def __init__(self, shown: Shown):
        from IPython.display import HTML, display  # a kernel has it

        self._watched = _Watched(shown)
        self._watched.read()
        self._drawn, self._at = self._watched.html(), time.monotonic()
        self._handle = display(HTML(self._drawn), display_id=True)

    def update(self, *, last: bool = False) -> None:
        """Draw what is new, at most every REDRAW_SECONDS, but always the last time."""
        if not last and time.monotonic() - self._at < REDRAW_SECONDS:
            return
        from IPython.display import HTML

        self._watched.read()
        drawn, self._at = self._watched.html(), time.monotonic()
        if drawn != self._drawn:
            self._handle.update(HTML(drawn))
            self._drawn = drawn


class _Watched:
    """A run, and what has been read from its log."""

    def __init__(self, shown: Shown):
        self.run, self.progress = shown, RunProgress(shown.folder)
        self._positions: dict[str, int] = {}

    def read(self) -> None:
        """Read the new log lines, and what the observer counted."""
        first, now = self.run.hosts[0], time.monotonic()
        for host, line in self.run.logs(positions=self._positions):
            if host == first:
                self.progress.read_line(line, now)
        self.progress.read_observed(now)
        self.progress.caught_up()

    def html(self) -> str:
        run, state, outcome, result = self.run, self.run.state, self.run.outcome(), self.run.result()
        over = state in OVER
        about = [state, run.backend, counted(len(run.hosts), "host")]
        if outcome.get("seconds") is not None:
            about.append(f"{outcome['seconds']:.0f} s")
        if outcome:
            about += [] if run.cost is None else [dollars(run.cost)]
        elif run.spent:
            about.append(run.spent)
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
        bar = "" if state == COMPLETED else html.bar(self.progress.share)
        text = self.progress.line(left)
        line = f"<div>{escape(text)}</div>" if text else ""
        curves = "".join(html.curve(name, points) for name, points in self.progress.curves.items())
        end = "" if over else f'launcher.attach("{run.name}").wait() follows it from any notebook'
        return html.box(f"run {run.name}", " · ".join(about), bar + line + curves + html.pairs(rows), end)


def _results(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parts of a script's result that people look for first."""
    found = [("on held-out images", quality(dict(result)))] if quality(dict(result)) != "-" else []
    forms = {"model": "", "parameters": ",", "steps": ",", "images_per_second": ",.0f", "mfu": ".0%"}
    for name, form in forms.items():
        value = result.get(name)
        if isinstance(value, (int, float) if form else str):
            shown = number(value, form) if form else str(value)
            found.append((name.replace("_per_second", " a second"), shown))
    return found

"""A tuning as HTML: each change with its evidence, expected and obtained gain, and the losses side by side; then both diagnoses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from launcher.insight import page as diagnosis_page
from launcher.insight.charts import MIN_SAMPLES
from launcher.show import html
from launcher.show.lines import Curve, LineChart, Mark, line_charts
from launcher.show.spread import Spread
from launcher.show.svg import Picture
from launcher.study.tune_course import Losses
from launcher.study.tune_search import Step, Trial
from launcher.study.tune_settings import RULES

POINTS = 120
"""Points of a drawn loss curve."""


def page(title: str, top: str, trials: Sequence[Trial]) -> str:
    """One document that loads nothing.

    Args:
        top: HTML above the trials, whose diagnoses follow with their charts.
    """
    return diagnosis_page.page(title, top, [(one.diagnosis.evidence, one.diagnosis.report) for one in trials])


def fragment(
    title: str, sentences: Sequence[str], how: Sequence[tuple[str, bool]], steps: Sequence[Step], render: html.Renderer
) -> str:
    """What a notebook shows, and the top of the page.

    Args:
        how: (lines, diffs and commands that apply the changes to the job; whether that is a command to paste).
    """
    lines = "".join(f"<p>{escape(line)}</p>" for line in sentences)
    code = "".join(_how(text, to_paste) for text, to_paste in how)
    tried = "".join(
        f"<li class='{'kept' if step.kept else 'rolled-back'}'>{_step(step, render)}</li>" for step in steps
    )
    return f"<div class='diagnosis'><h1>{escape(title)}</h1>{lines}{code}<ol class='findings'>{tried}</ol></div>"


def _how(text: str, to_paste: bool) -> str:
    if to_paste:
        return f"<div class='paste' style='overflow-x:auto'><code>{escape(text)}</code></div>"
    return f"<pre style='white-space:pre-wrap;word-break:normal;overflow-wrap:break-word'>{escape(text)}</pre>"


def _step(step: Step, render: html.Renderer) -> str:
    """One change."""
    finding, proposal = step.proposal.finding, step.proposal
    rows = [
        ("against", f"{finding.title}{', as a neighbour of the previous value' if proposal.neighbour else ''}"),
        ("expected", proposal.expected or "not estimated"),
        ("obtained", step.why if step.gain is None else f"{step.gain:.2f}: {step.why}"),
        *([("losses", step.losses)] if step.losses else []),
    ]
    evidence = [("evidence", number) for number in finding.evidence]
    may_differ = not RULES[proposal.setting].same_numbers or not step.same_losses
    drawn = _curves(step) if may_differ and step.after and not step.after[0].failed else Picture()
    return (
        f"<h3>{escape(str(proposal))}: {step.verdict}</h3>{diagnosis_page.definition_list(rows)}"
        f"<details><summary>evidence</summary>{diagnosis_page.definition_list(evidence)}</details>"
        f"{render(drawn)}"
    )


def _curves(step: Step) -> Picture:
    """The losses before and after, side by side; empty if neither is a curve."""
    sides = (("before", step.before[0].losses), (str(step.proposal), step.after[0].losses))
    curves = tuple(Curve(name, marks) for name, losses in sides if (marks := _marks(losses or {})))
    drawn = any(len(curve.marks) >= MIN_SAMPLES for curve in curves)
    return line_charts([LineChart("Training loss", "loss", "steps", curves)]) if drawn else Picture()


def _marks(losses: Losses) -> tuple[Mark, ...]:
    steps = [step for step in sorted(losses) if math.isfinite(losses[step])]  # nan and inf have no place on an axis
    return tuple(Mark(step, Spread((losses[step],))) for step in steps[:: max(1, len(steps) // POINTS)])

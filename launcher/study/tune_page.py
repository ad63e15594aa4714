"""A tuning as HTML: each change with its evidence, expected and obtained gain, and the losses side by side; then both diagnoses."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from launcher.insight import page as diagnosis_page
from launcher.show.lines import Curve, LineChart, Mark, line_charts
from launcher.show.spread import Spread
from launcher.study.tune_course import Losses
from launcher.study.tune_search import Step, Trial
from launcher.study.tune_settings import RULES

POINTS = 120
"""Of a drawn curve of losses."""


def page(title: str, top: str, trials: Sequence[Trial]) -> str:
    """One document; it loads nothing.

    Args:
        top: HTML above the trials, whose diagnoses follow with their charts.
    """
    return diagnosis_page.page(title, top, [(one.diagnosis.evidence, one.diagnosis.report) for one in trials])


def fragment(title: str, sentences: Sequence[str], how: Sequence[str], steps: Sequence[Step]) -> str:
    """What a notebook shows, and the top of the page.

    Args:
        how: how the changes get into the job, as diffs and commands.
    """
    lines = "".join(f"<p>{escape(line)}</p>" for line in sentences)
    code = "".join(f"<pre>{escape(text)}</pre>" for text in how)
    tried = "".join(f"<li>{_step(step)}</li>" for step in steps)
    return f"<div class='diagnosis'><h1>{escape(title)}</h1>{lines}{code}<ol class='findings'>{tried}</ol></div>"


def _step(step: Step) -> str:
    """One change."""
    finding, proposal = step.proposal.finding, step.proposal
    gain = "-" if step.gain is None else f"{step.gain:.2f}"
    numbers = "".join(f"<li>{escape(text)}</li>" for text in finding.evidence)
    near = "a neighbour of the value before, against: " if proposal.neighbour else "against: "
    parts = [
        f"<h3>{escape(str(proposal))}: {step.verdict}</h3>",
        f"<p><b>{near}</b>{escape(finding.title)}</p><ul>{numbers}</ul>",
        f"<p><b>expected</b> {escape(proposal.expected or 'nothing in numbers')}</p>",
        f"<p><b>obtained</b> {gain}: {escape(step.why)}</p>",
    ]
    if step.losses:
        parts.append(f"<p><b>losses</b> {escape(step.losses)}</p>")
    may_differ = not RULES[proposal.setting].same_numbers or not step.same_losses
    if may_differ and step.after and not step.after[0].failed:
        parts.append(_curves(step))
    return "".join(parts)


def _curves(step: Step) -> str:
    """The losses before and after, side by side; "" where none were logged."""
    sides = (("before", step.before[0].losses), (str(step.proposal), step.after[0].losses))
    curves = tuple(Curve(name, _marks(losses)) for name, losses in sides if losses)
    return line_charts([LineChart("Training loss", "loss", "steps", curves)]) if curves else ""


def _marks(losses: Losses) -> tuple[Mark, ...]:
    chosen = sorted(losses)[:: max(1, len(losses) // POINTS)]
    return tuple(Mark(step, Spread((losses[step],))) for step in chosen)

"""A scaling study in words and charts: throughput and efficiency, the model and its errors, sizes not run, and the hosts to take."""

from __future__ import annotations

from html import escape
from statistics import median
from typing import TYPE_CHECKING

from launcher import backends
from launcher.show.text import dollars
from launcher.study import line_charts
from launcher.study.cells import NOT_MEASURED
from launcher.study.charts import number
from launcher.study.line_charts import APART, PREDICTED, Curve, LineChart, Mark
from launcher.study.measures import Spread
from launcher.study.scaling_advice import advice
from launcher.study.scaling_model import HeldOut
from launcher.study.scaling_sizes import STRONG, Line, Size
from launcher.study.sections import Section, as_html, as_text

if TYPE_CHECKING:
    from launcher.study.scaling_study import ScalingStudy

NO_PRICE = "no price known"

GOAL = 0.10
"""Relative error on sizes that the model was not shown, from which its predictions are called a guess; and difference among the
repeats of a size, from which the trials are called disturbed."""


def text(study: ScalingStudy) -> str:
    """All of it for a terminal."""
    if not study.table:
        return "\n".join(["no trial has completed", *study.failed])
    told = "\n".join(["verdict", "", *verdict(study), *study.notes, *study.failed])
    return "\n\n".join([*as_text(sections(study)), told])


def html(study: ScalingStudy) -> str:
    """All of it for a notebook."""
    if not study.table:
        return f"<p>{escape('no trial has completed: ' + '; '.join(study.failed))}</p>"
    told = [*verdict(study), *study.notes, *study.failed]
    return "\n".join([charts(study), *as_html(sections(study)), *(f"<p>{escape(line)}</p>" for line in told)])


def sections(study: ScalingStudy) -> list[Section]:
    """The tables, one after the other."""
    return [_measured(study), _errors(study), _predicted(study)]


def _measured(study: ScalingStudy) -> Section:
    head = ["scaling", "hosts", "batch", "images/s", "ms a step", "efficiency", "exposed", "data_wait"]
    head += ["s an epoch", "US$ an epoch", "US$ a million images"]
    rows = [_row(line, size, study.usd_an_hour) for line in study.lines for size in line.sizes]
    first = study.lines[0].sizes[0]
    below = [
        "images/s: median (least-most) of the repeats, each the median over windows of five steps after the warm-up. batch: images a",
        f"process, {first.processes // first.hosts} process(es) a host. efficiency: images/s a host beside the smallest size's. "
        "exposed: the share",
        "of a step in which backward was over and the gradients were not yet exchanged (mean of the first ten steps), waiting for a "
        "slower rank included.",
    ]
    if any(row[5] == APART for row in rows):
        below.append(f"{APART}: more threads than this machine has cores; a machine for each host would be faster.")
    if any(len(size.rows) == 1 for line in study.lines for size in line.sizes):
        below.append("One run has no spread, so a difference may be chance: --repeats 3 shows it.")
    if study.usd_an_hour is None:
        own = backends.get(study.on).on_this_machine
        below.append("No price known: give compute.price_per_hour, US dollars a host-hour" + (
            "; this machine has none of its own." if own else ", or `launcher plan CONFIG --on aws --check` reads AWS's list."
        ))  # fmt: skip
    return "throughput and efficiency", head, rows, below


def _row(line: Line, size: Size, usd_an_hour: float | None) -> list[str]:
    efficiency, images, waits = line.efficiency(size), size.images, size.share("data_wait_seconds")
    usd = None if usd_an_hour is None else usd_an_hour * size.hosts / 3600 / size.rate.median
    return [
        str(line),
        str(size.hosts),
        f"{size.batch:g}",
        _range(size.rate),
        f"{size.seconds * 1000:.1f}",
        _percents(efficiency) if efficiency is not None else APART,
        _percent(size.exposed),
        _percent(waits),
        f"{images / size.rate.median:.4g}" if images else NOT_MEASURED,
        NO_PRICE if usd is None else dollars(usd * images) if images else NOT_MEASURED,
        NO_PRICE if usd is None else dollars(usd * 1e6),
    ]


def _errors(study: ScalingStudy) -> Section:
    """How well the model predicts what it was not shown."""
    head = ["left out", "measured, ms a step", "predicted", "error"]
    rows = []
    for each in study.held_out:
        rows.append([f"{each.point.hosts} hosts, batch {each.point.batch:g}", *_told(each)])
    for each in study.hosts_held_out:
        rows.append([f"all of {each.point.hosts} hosts: batch {each.point.batch:g}", *_told(each)])
    model = study.model
    if model is None:
        return (
            "the model",
            head,
            rows,
            ["No size has a machine or cores of its own for each host: nothing to fit a model to."],
        )
    bandwidth = "not limiting" if model.bandwidth is None else f"{model.bandwidth / 1e6:,.0f} MB/s"
    waiting = f"{model.input_an_image * 1000:.3g} ms an image" if model.input_an_image else "never limited a step"
    below = [
        f"computing {model.fixed * 1000:.3g} ms a step and {model.an_image * 1000:.3g} ms an image, {model.backward * 100:.0f} % of it "
        f"backward; input: {waiting}; exchange of {model.gradient_bytes / 1e6:.1f} MB:",
        f"{bandwidth} between hosts, {model.latency * 1e3:.3g} ms a turn of the ring. launcher/study/scaling_model.py has the formulas.",
        *(
            [
                f"Each further host on this machine adds {model.crowding * 1000:.3g} ms an image: memory, caches and power are shared."
            ]
            if model.crowding
            else []
        ),
        *(f"assumed: {assumption}" for assumption in model.assumptions),
    ]
    return "the model, on sizes that it was not shown", head, rows, below


def _told(each: HeldOut) -> list[str]:
    measured = f"{each.point.seconds * 1000:.1f}"
    if each.predicted is None or each.error is None:
        return [measured, "-", each.why]
    return [measured, f"{each.predicted * 1000:.1f}", f"{each.error * 100:+.1f} %"]


def _predicted(study: ScalingStudy) -> Section:
    """Sizes that were not run, a doubling each."""
    head = ["scaling", "hosts", "batch", "images/s", "efficiency", "exposed"]
    rows = []
    for line in study.lines:
        for hosts, rate, exposed in _beyond(study, line):
            batch = line.global_batch(hosts * _each(line))
            assert batch is not None and line.first is not None
            efficiency = rate / line.first.rate.median / hosts * line.first.hosts
            share = batch / (hosts * _each(line))
            rows.append([str(line), str(hosts), f"{share:g}", number(rate), _percent(efficiency), _percent(exposed)])
    below = ["By the model, if every host has a machine of its own like the measured one, and the same network."]
    if not rows:
        below = ["No prediction: the exchange between hosts was not measured on machines or cores of their own."]
    return "sizes that were not run", head, rows, below


def _each(line: Line) -> int:
    """Processes a host."""
    return line.sizes[0].processes // line.sizes[0].hosts


def _beyond(study: ScalingStudy, line: Line) -> list[tuple[int, float, float]]:
    """Hosts, images a second and the exposed share of doublings beyond the measured sizes that share no cores."""
    found, model = [], study.model
    if model is None or len(line.clean) < 2:
        return []
    hosts = 2 * line.clean[-1].hosts
    while hosts <= 4 * line.clean[-1].hosts:
        batch = line.global_batch(hosts * _each(line))
        if batch is not None:
            step = model.step(hosts, batch / (hosts * _each(line)))
            found.append((hosts, batch / step.seconds, step.exposed / step.seconds))
        hosts *= 2
    return found


def verdict(study: ScalingStudy) -> list[str]:
    """The answer: a line for each way to scale, the model's error, and the hosts to take."""
    told = []
    for line in study.lines:
        if len(line.clean) < 2:
            told.append(f"{line}: not told, because fewer than two sizes have cores of their own")
            continue
        largest, first = line.clean[-1], line.clean[0]
        efficiency = line.efficiency(largest)
        assert efficiency is not None, "it shares no cores"
        speed = largest.rate.median / first.rate.median
        told.append(
            f"{line}: {largest.hosts} hosts are {speed:.2f} times as fast as {first.hosts}, {_percents(efficiency)} efficient"
            f"{_why(largest, first)}{_apart(study, line)}"
        )
    told += [*_about_the_repeats(study), *_about_the_model(study)]
    for line in study.lines:
        choices = study.offers(line)
        told += [
            f"{line}, {sentence}" for sentence in advice(choices, study.grid.deadline_hours, study.grid.budget_usd)
        ] if choices else []  # fmt: skip
    if any(study.offers(line) for line in study.lines):
        epochs = study.job.hyperparameters["epochs"]
        told.append(f"Hours are those of {epochs} epochs, without start, evaluations and checkpoints.")
    if any(line.kind == STRONG for line in study.lines) and any(line.kind != STRONG for line in study.lines):
        told.append("Weak scaling changes the global batch, so learning rate and accuracy are another question there.")
    return told


def _why(largest: Size, first: Size) -> str:
    """What the largest size lost, as far as it was measured."""
    parts = [
        f"{share * 100:.0f} % of the step is {what}"
        for what, share in (
            ("exposed exchange", largest.exposed),
            ("waiting for data", largest.share("data_wait_seconds")),
        )
        if share is not None and share >= 0.01
    ]
    slower = ""
    own = [size.share("data_wait_seconds") for size in (largest, first)]
    if largest.batch == first.batch and largest.exposed is not None and None not in own:
        computing = [size.seconds * (1 - (size.exposed or 0.0)) for size in (largest, first)]
        if computing[0] > computing[1] * 1.03:
            slower = f"the rest of the step takes {(computing[0] / computing[1] - 1) * 100:.0f} % longer than on {first.hosts}"
    return "".join(f"; {part}" for part in [*parts, *[slower] * bool(slower)])


def _apart(study: ScalingStudy, line: Line) -> str:
    """What the largest size would be if its hosts did not crowd one machine, where that was seen to cost something."""
    model, first = study.model, line.first
    if model is None or not model.crowding or first is None:
        return ""
    largest = line.clean[-1]
    rate = largest.global_batch / model.step(largest.hosts, largest.batch).seconds
    share = rate / first.rate.median / largest.hosts * first.hosts
    return f"; with a machine for each host it would be {_percent(share)}, by the model"


def _about_the_repeats(study: ScalingStudy) -> list[str]:
    """Whether something disturbed the trials: what follows from them is no surer than they agree."""
    clean = [size for line in study.lines for size in line.clean]
    if not clean:
        return []
    worst = max(clean, key=lambda size: size.rate.high / size.rate.low)
    apart = worst.rate.high / worst.rate.low - 1
    if apart <= GOAL:
        return []
    return [
        f"disturbed: the repeats of {worst.hosts} hosts, batch {worst.batch:g}, differ by {apart * 100:.0f} %, so nothing here is surer "
        "than that; more --repeats on a quiet machine would be"
    ]


def _about_the_model(study: ScalingStudy) -> list[str]:
    known = [(each, each.error) for each in (*study.held_out, *study.hosts_held_out) if each.error is not None]
    if not known:
        return ["model: no size could be held out, so how wrong its predictions are is not known"]
    worst, error = max(known, key=lambda pair: abs(pair[1]))
    middle = median(abs(error) for _, error in known)
    told = "within 10 %" if abs(error) <= GOAL else "further off than 10 %: take its predictions as a guess"
    return [
        f"model: on {len(known)} sizes that it was not shown its error is {middle * 100:.1f} % in the median, "
        f"{abs(error) * 100:.1f} % at most "
        f"({worst.point.hosts} hosts, batch {worst.point.batch:g}), {told}"
    ]


def charts(study: ScalingStudy) -> str:
    """Images a second and efficiency over the number of hosts, as SVG."""
    rates, shares = [], []
    for line in study.lines:
        first = line.first
        marks = [
            Mark(size.hosts, size.rate, APART if size.shares_cores else line_charts.MEASURED) for size in line.sizes
        ]
        there = {size.hosts for size in line.sizes}
        beyond = [(hosts, rate) for hosts, rate, _ in _beyond(study, line)]
        marks += [Mark(hosts, Spread((rate,)), PREDICTED) for hosts, rate in beyond if hosts not in there]
        most = max(mark.hosts for mark in marks)
        start = first or line.sizes[0]
        each = start.rate.median / start.hosts
        ideal = ((start.hosts, start.rate.median), (most, each * most)) if first is not None else ()
        rates.append(Curve(str(line), tuple(sorted(marks, key=lambda mark: mark.hosts)), ideal))
        if first is not None:
            percents = [Mark(size.hosts, _in_percent(line.efficiency(size))) for size in line.clean]
            percents += [Mark(hosts, Spread((rate / each / hosts * 100,)), PREDICTED) for hosts, rate in beyond]
            most = max(mark.hosts for mark in percents)
            shares.append(Curve(str(line), tuple(percents), ((start.hosts, 100.0), (most, 100.0))))
    drawn = [LineChart("Throughput by the number of hosts", "images/s", tuple(rates))]
    if any(len(curve.marks) > 1 for curve in shares):
        drawn.append(LineChart("Efficiency by the number of hosts", "% of the smallest size's", tuple(shares)))
    return line_charts.svg(drawn)


def _in_percent(share: Spread | None) -> Spread:
    assert share is not None, "it shares no cores"
    return Spread(tuple(value * 100 for value in share.values), share.median * 100)


def _range(value: Spread) -> str:
    return number(value.median) + (f" ({number(value.low)}-{number(value.high)})" if len(value.values) > 1 else "")


def _percents(value: Spread) -> str:
    spread = (
        f" ({_digits(value.low)}-{_digits(value.high)})" if len(value.values) > 1 and value.high > value.low else ""
    )
    return f"{_digits(value.median)} %{spread}"


def _percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{_digits(share)} %"


def _digits(share: float) -> str:
    return f"{share * 100:.1f}"

"""The charts of a scaling study: images a second and efficiency over the number of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.show.lines import Curve, LineChart, Mark, Sign, line_charts
from launcher.show.spread import Spread
from launcher.show.svg import Picture
from launcher.study.scaling_model import ScalingModel
from launcher.study.scaling_sizes import Line, beyond

SIGNS: Mapping[Sign, str] = {"dot": "measured", "cross": "hosts share cores", "ring": "predicted"}


def charts(lines: Sequence[Line], model: ScalingModel | None) -> Picture:
    """Both charts as SVG."""
    rates, shares = [], []
    for line in lines:
        first, there = line.first, {size.hosts for size in line.sizes}
        marks = [Mark(size.hosts, size.rate, "cross" if size.shares_cores else "dot") for size in line.sizes]
        predicted = [(hosts, rate) for hosts, rate, _ in beyond(line, model)]
        marks += [Mark(hosts, Spread((rate,)), "ring") for hosts, rate in predicted if hosts not in there]
        most = max(mark.count for mark in marks)
        start = first or line.sizes[0]
        each = start.rate.median / start.hosts
        ideal = ((start.hosts, start.rate.median), (most, each * most)) if first is not None else ()
        rates.append(Curve(str(line), tuple(sorted(marks, key=lambda mark: mark.count)), ideal))
        if first is not None:
            percents = [Mark(size.hosts, _in_percent(line.efficiency(size))) for size in line.clean]
            percents += [Mark(hosts, Spread((rate / each / hosts * 100,)), "ring") for hosts, rate in predicted]
            most = max(mark.count for mark in percents)
            shares.append(Curve(str(line), tuple(percents), ((start.hosts, 100.0), (most, 100.0))))
    drawn = [LineChart("Throughput by the number of hosts", "images/s", "hosts", tuple(rates), SIGNS)]
    if any(len(curve.marks) > 1 for curve in shares):
        title = "Efficiency by the number of hosts"
        drawn.append(LineChart(title, "% of the smallest size's", "hosts", tuple(shares), SIGNS))
    return line_charts(drawn)


def _in_percent(share: Spread | None) -> Spread:
    assert share is not None, "it shares no cores"
    return Spread(tuple(value * 100 for value in share.values), share.median * 100)

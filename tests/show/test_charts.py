"""Charts drawn as SVG, whatever they show."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from launcher.show.axes import ticks
from launcher.show.bars import BarChart, bar_charts
from launcher.show.lines import Curve, LineChart, Mark, line_charts
from launcher.show.spread import Spread

SVG = "{http://www.w3.org/2000/svg}"


def test_a_chart_shows_ranges_losses_and_names_of_any_kind():
    values = (Spread((4.0, 6.0)), Spread((-3.0,)), None)
    drawn = ElementTree.fromstring(
        bar_charts([BarChart("<a> & b", "s", (("m<1>", ("1", "2", "3")),), "load", (('say "x"', values),))])
    )
    assert len(list(drawn.iter(f"{SVG}path"))) == 1, "only what has a range is drawn one"
    zero = next(line for line in drawn.iter(f"{SVG}line") if line.get("class") == "axis").get("y1")
    up, down = (bar for bar in drawn.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None)
    assert float(up.get("y")) + float(up.get("height")) == pytest.approx(float(zero), abs=0.11)
    assert float(down.get("y")) == pytest.approx(float(zero), abs=0.11) and float(down.get("height")) > 0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 173.18), (-0.4, 72.6), (0, 0), (-5, -1), (0, 0.0031)])
def test_an_axis_encloses_its_values_and_zero_by_few_round_numbers(low, high):
    found = ticks(low, high)
    assert found[0] <= min(low, 0) and found[-1] >= max(high, 0) and 2 <= len(found) <= 9
    assert 0 in [round(mark, 12) for mark in found]


def test_a_single_size_and_none_are_drawn_too():
    one = Curve("<a> & b", (Mark(1, Spread((5.0,))),), ())
    for chart in (LineChart("t", "u", "hosts", (one,)), LineChart("t", "u", "hosts", ())):
        assert ElementTree.fromstring(line_charts([chart])).tag == f"{SVG}svg"


def test_numbers_on_the_horizontal_axis_do_not_touch():
    marks = tuple(Mark(step, Spread((2.0 / step,))) for step in range(5, 200_005, 1600))
    drawn = ElementTree.fromstring(line_charts([LineChart("loss", "loss", "steps", (Curve("before", marks),))]))
    counts = {str(mark.count) for mark in marks}
    ends = [
        (float(item.get("x")) - 3.5 * len(item.text), float(item.get("x")) + 3.5 * len(item.text))
        for item in drawn.iter(f"{SVG}text")
        if item.get("text-anchor") == "middle" and item.text in counts
    ]
    assert len(ends) > 8 and all(right + 5 < left for (_, right), (left, _) in itertools.pairwise(ends))


def test_the_pointer_shows_small_values_and_no_sign_that_the_chart_does_not_name():
    curve = Curve("before", (Mark(5, Spread((0.0034,))), Mark(10, Spread((0.25, 0.5, 12.34)))))
    drawn = ElementTree.fromstring(line_charts([LineChart("loss", "loss", "steps", (curve,))]))
    tips = [item.text for circle in drawn.iter(f"{SVG}circle") for item in circle.iter(f"{SVG}title")]
    assert tips == [
        "before, 5 steps: 0.0034 loss, 0.0034 to 0.0034, n = 1",
        "before, 10 steps: 0.5 loss, 0.25 to 12.3, n = 3",
    ]

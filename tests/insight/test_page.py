"""The diagnosis's page, opened in a browser: it draws, answers the mouse, fits its colours, and asks for nothing else."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from launcher.insight import charts, summary
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Host, Measurements, Series
from launcher.insight.phases import order
from launcher.show import palette
from tests.browser import Browser
from tests.insight.observed import observed, sampled
from tests.insight.planted import BEGAN, plant
from tests.show.made_up import STEP, crowded, distillation

CHARTS = "[...document.querySelectorAll('canvas')].map(c => [c.getAttribute('aria-label'), +c.dataset.marks, c.width, c.height])"

COLOURS = """(selector => { const c = document.querySelector(selector), found = new Set();
    const bytes = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);
    bytes.forEach(colour => found.add(colour)); return found.size })"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_complaint(browser):
    browser.complaints.clear()
    browser.emulate()
    yield
    assert browser.complaints == []


def test_every_chart_is_drawn(browser, tmp_path):
    browser.open(distillation().save_html(tmp_path / "page.html"))
    assert browser.value("document.documentElement.dataset.drawn") == "yes"
    drawn = {label: (marks, width, height) for label, marks, width, height in browser.value(CHARTS)}
    assert set(drawn) == {
        "phases of the steps over time, stacked",
        "Use of algo-1",
        "heat map of 20 cores and GPUs of algo-1 over time",
        "Disks and network of algo-1",
    }
    assert all(marks > 100 and width > 500 and height > 100 for marks, width, height in drawn.values()), drawn
    assert browser.value(f"{COLOURS}('canvas')") > 5
    assert browser.value("document.querySelectorAll('.bars .bar').length") == 4
    assert browser.value("document.querySelector('ol.findings h3').textContent")


def test_every_phase_has_a_colour_of_its_own_on_the_page_and_in_the_picture(browser, tmp_path):
    browser.open(distillation().save_html(tmp_path / "page.html"))
    style = "getComputedStyle(document.documentElement).getPropertyValue"
    for scheme in ("light", "dark"):
        browser.emulate(scheme=scheme)
        shown = [browser.value(f"{style}('--c{summary.colour(phase)}')") for phase in order()]
        assert all(shown) and len({*shown}) == len(order()), shown
    assert len({palette.PHASES[summary.colour(phase)] for phase in order()}) == len(order())


def test_hovering_tells_time_and_values_and_dragging_zooms(browser, tmp_path):
    browser.open(distillation().save_html(tmp_path / "page.html"))
    left, top, width, height = browser.value(
        "(() => { scrollTo(0, 0); const c = document.querySelector('canvas'); c.scrollIntoView({block: 'center'});"
        "const r = c.getBoundingClientRect(); return [r.left, r.top, r.width, r.height] })()"
    )
    middle = top + height / 2
    browser.mouse("mouseMoved", left + width / 2, middle)
    reported = browser.value("document.querySelector('.tip').textContent")
    assert re.match(
        r"2027-01-15 08:0\d:\d\d UTC, 00:0\d:\d\d after the start\n.*epoch \d, step \d+: ", reported, re.DOTALL
    )
    assert "data_wait" in reported and "grad_sync" in reported
    assert (
        browser.value("[...document.querySelectorAll('.cross')].filter(c => c.style.display === 'block').length") == 4
    )
    before = browser.value("document.querySelector('.tools .dim').textContent")
    browser.mouse("mousePressed", left + width * 0.4, middle, button="left", clickCount=1)
    browser.mouse("mouseMoved", left + width * 0.5, middle, button="left", buttons=1)
    browser.mouse("mouseReleased", left + width * 0.5, middle, button="left", clickCount=1)
    zoomed = browser.value("document.querySelector('.tools .dim').textContent")
    assert zoomed != before
    assert browser.value(CHARTS)[0][1] > 0
    browser.value("document.querySelector('.tools button').click()")
    assert browser.value("document.querySelector('.tools .dim').textContent") == before


def test_a_click_on_a_name_hides_it(browser, tmp_path):
    browser.open(distillation().save_html(tmp_path / "page.html"))
    before = browser.value(CHARTS)[0][1]
    browser.value("document.querySelector('.legend button').click()")
    assert browser.value(CHARTS)[0][1] < before


def test_light_dark_and_print_have_their_own_colours(browser, tmp_path):
    browser.open(distillation().save_html(tmp_path / "page.html"))
    colours = {}
    drawn, heat_maps = "document.querySelectorAll('canvas')[2].toDataURL()", {}
    for scheme in ("light", "dark"):
        browser.emulate(scheme=scheme)
        browser.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => 0)")
        body = "getComputedStyle(document.body)"
        colours[scheme] = browser.value(f"[{body}.backgroundColor, {body}.color]")
        heat_maps[scheme] = browser.value(drawn)
    assert colours["light"] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert colours["dark"] == ["rgb(20, 23, 27)", "rgb(231, 234, 238)"]
    assert heat_maps["light"] != heat_maps["dark"]
    browser.value("dispatchEvent(new Event('beforeprint'))")  # paper is white, whatever the screen
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.value(drawn) != heat_maps["dark"]
    browser.value("dispatchEvent(new Event('afterprint'))")
    assert browser.value(drawn) == heat_maps["dark"]
    assert len(browser.call("Page.printToPDF")["data"]) > 10_000


@pytest.mark.parametrize("width", [1200, 400])
def test_nothing_reaches_over_the_page_on_a_wide_and_a_narrow_screen(browser, tmp_path, width):
    browser.open(distillation().save_html(tmp_path / "page.html"))
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    try:
        assert browser.value("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_an_hour_of_a_host_with_8_gpus_and_96_cores_is_under_5_mb_and_says_how_it_was_thinned(browser, tmp_path):
    hour = distillation(ranks=8, steps=5600, cores=96, busy=60)
    assert 3300 < hour.evidence.training_seconds < 4000
    file = hour.save_html(tmp_path / "page.html")
    assert file.stat().st_size < 5e6
    browser.open(file)
    assert all(marks > 1000 for _, marks, *_ in browser.value(CHARTS))
    [note] = browser.value(
        "[...document.querySelectorAll('.note')].map(n => n.textContent).filter(t => t.includes('mean of'))"
    )
    assert "counts all samples" in note


def test_many_hosts_and_ranks_stay_under_5_mb(tmp_path):
    many = distillation(ranks=256, steps=100, cores=96, busy=50)
    assert many.save_html(tmp_path / "page.html").stat().st_size < 5e6


def bare(**values) -> Measurements:
    return Measurements(source="</script><b>'bare", **values)


ODD = {
    "nothing": bare(),
    "one sample of one core": bare(
        hosts={"algo-1": Host(name="algo-1", cores={"cpu0": Series(np.array([BEGAN]), np.array([100.0]))})}
    ),
    "a GPU alone": bare(
        hosts={"algo-1": Host(name="algo-1", gpus={"gpu0": Series(BEGAN + np.arange(100.0), np.linspace(0, 100, 100))})}
    ),
    "a gap": bare(
        hosts={
            "algo-1": Host(
                name="algo-1",
                cores={
                    "cpu0": Series(BEGAN + np.r_[0:50, 500:550].astype(float), np.r_[np.zeros(50), np.full(50, 7.0)])
                },
            )
        }
    ),
    "one step": dataclasses.replace(plant(phases=STEP, steps=10, system=False), source="one"),
    "a week": plant(phases=STEP, steps=20_000, log_every=1000, system=False, gap=30.0),
    "a millisecond": plant(
        phases={"data_wait": 1e-6, "forward": 1e-5, "backward": 1e-5}, steps=20, log_every=1, cores=1, busy=0.5
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_measurements_are_shown_all_the_same(browser, tmp_path, case):
    diagnosis = Diagnosis(ODD[case])
    browser.open(diagnosis.save_html(tmp_path / "page.html"))
    assert browser.value("document.documentElement.dataset.drawn") == "yes"
    assert browser.value("document.querySelector('h1').textContent.replaceAll('\u00a0', ' ')") == diagnosis.headline
    assert all(marks > 0 for _, marks, *_ in browser.value(CHARTS))
    assert str(diagnosis) and json.dumps(diagnosis.to_dict(), allow_nan=False)
    assert "<script" not in diagnosis._repr_html_()


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("one sample of one core", "1 host: no chart over time of what was sampled only once; the table below has it"),
        ("one step", "1 rank: no chart over time of a single logged window; the table below has its phases"),
    ],
)
def test_a_single_sample_is_no_chart_and_a_line_says_why(browser, tmp_path, case, why):
    browser.open(Diagnosis(ODD[case]).save_html(tmp_path / "page.html"))
    assert browser.value(CHARTS) == []
    assert browser.value("[...document.querySelectorAll('.note')].map(n => n.textContent)") == [why]
    assert browser.value("document.querySelectorAll('.tools').length") == 0, "nothing to zoom in"


def test_a_run_of_three_steps_has_its_charts_and_no_verdict(browser, tmp_path):
    short = distillation(ranks=1, steps=3, log_every=1, checkpoint=(3, 0.5), evaluate=None)
    browser.open(short.save_html(tmp_path / "page.html"))
    assert browser.value("document.querySelector('h1').textContent.replaceAll('\u00a0', ' ')") == short.headline
    assert short.headline.endswith("too short to judge") and len(browser.value(CHARTS)) == 4
    assert browser.value("document.querySelectorAll('ol.findings li').length") == 0


def test_a_command_is_selected_whole_by_a_click(browser, tmp_path):
    named = crowded()
    browser.open(named.save_html(tmp_path / "page.html"))
    command = named.findings[0].fixes[0].command
    assert command.startswith("launcher replay slow-20261122-100000-abcd hyperparameters.")
    assert browser.value("document.querySelector('dd .paste code').textContent") == command
    left, top = browser.value(
        "(() => { const c = document.querySelector('dd .paste code'); c.scrollIntoView({block: 'center'});"
        "const r = c.getBoundingClientRect(); return [r.left + 20, r.top + r.height / 2] })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, left, top, button="left", clickCount=1)
    assert browser.value("getSelection().toString()") == command


def test_two_runs_lie_on_one_page(browser, tmp_path):
    both = Comparison(distillation(), distillation(phases={**STEP, "data_wait": 0.005}))
    browser.open(both.save_html(tmp_path / "page.html"))
    assert len(browser.value(CHARTS)) == 8
    assert browser.value("document.querySelector('h1').textContent") == both.headline


def test_thinning_keeps_means_and_peaks():
    times = BEGAN + np.arange(1000.0)
    values = np.zeros(1000)
    values[137] = 100.0
    means, highest = charts.binned(Series(times, values), BEGAN, BEGAN + 1000, 10)
    assert means.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert highest.tolist() == [0, 100, 0, 0, 0, 0, 0, 0, 0, 0]


def test_steps_are_thinned_by_means_over_all_their_steps():
    run = plant(phases=STEP, steps=50_000, log_every=1, system=False)
    [rank] = charts.payload(Evidence(run))["ranks"]
    assert len(rank["step"]) < 10_000 and rank["step"][-1] == 50_000
    assert np.mean(rank["whole"]) == pytest.approx(run.ranks[0].seconds["step"].mean(), rel=0.01)


def test_the_page_of_an_observed_script_shows_its_lines(browser, tmp_path):
    hot = sampled(66, "draw(images) if a < b & c", 40)
    phases = {"data_wait": 0.6, "student_forward": 0.1, "backward": 0.3, "optimizer": 0.02}
    crowd = dict(phases=phases, cores=2, busy=1.9, settings={"num_workers": 16})
    browser.open(Diagnosis(observed(tmp_path / "run", crowd, lines=[hot])).save_html(tmp_path / "page.html"))
    assert browser.value("document.documentElement.dataset.drawn") == "yes"
    text = browser.value("document.body.innerText")
    assert "Too many workers: 16 a process on 2 cores, at train.py:42" in text
    assert "Lines of the script" in text and "draw(images) if a < b & c" in text
    assert "DataLoader(num_workers=16) at train.py:42: set num_workers=2" in text

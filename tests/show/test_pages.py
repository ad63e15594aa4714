"""Every page, opened in a browser on wide and narrow screens, light, dark and as print: it can be read, nothing is cut off, and the first
screen holds the answer."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from launcher.insight import pictures
from launcher.insight.comparison import Comparison
from launcher.show import palette
from launcher.show.bars import BarChart, bar_charts
from launcher.show.lines import Curve, LineChart, Mark, line_charts
from launcher.show.page import document
from launcher.show.spread import Spread
from tests.browser import Browser
from tests.looks import wrong
from tests.show import made_up

ROOT = Path(__file__).parents[2]
PICTURES = (ROOT / "docs" / "pictures", ROOT / "notebooks" / "pictures")

DRAWN = 3.0
"""Contrast of what is drawn, at least: WCAG 2.2, success criterion 1.4.11, https://www.w3.org/TR/WCAG22/#non-text-contrast"""

WIDTHS = (1200, 768, 390)
"""Of a desktop, a tablet and a telephone."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {name: make().save_html(folder / f"{name}.html") for name, make in made_up.SHOWN.items()}


def screen(browser: Browser, width: int, height: int = 900) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
    )
    browser.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => 0)")


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
@pytest.mark.parametrize("name", made_up.SHOWN)
def test_a_page_can_be_read_at_every_width(browser, pages, name, scheme):
    browser.complaints.clear()
    browser.emulate("print" if scheme == "print" else "", "dark" if scheme == "print" else scheme)
    browser.open(pages[name])
    if scheme == "print":
        browser.value("dispatchEvent(new Event('beforeprint'))")
    else:
        browser.value("document.querySelectorAll('details').forEach(part => { part.open = true })")
    for width in WIDTHS if scheme != "print" else (794,):  # A4 at 96 pixels an inch
        screen(browser, width)
        assert wrong(browser) == [], f"{width} pixels"
    assert browser.complaints == []


@pytest.mark.parametrize(
    "name", ["report", "report of a command to paste", "report of system metrics alone", "report of 256 ranks"]
)
@pytest.mark.parametrize(("width", "height"), [(1200, 800), (390, 844)])
def test_the_first_screen_holds_the_headline_where_time_goes_and_what_to_do(browser, pages, name, width, height):
    browser.emulate()
    screen(browser, width, height)
    browser.open(pages[name])
    ends = browser.value(
        "['h1', '.course .bar', '.findings h3'].map(at => document.querySelector(at).getBoundingClientRect().bottom)"
    )
    assert ends == sorted(ends) and ends[-1] < height
    if name != "report of system metrics alone":  # it has an experiment, and no setting to change
        fix, details = browser.value(
            "['.paste', 'details'].map(at => document.querySelector(`.findings li ${at}`).getBoundingClientRect().bottom)"
        )
        assert fix < height and (details < height or width == 390)
    assert browser.value("[...document.querySelectorAll('.findings details')].map(one => one.open)")[0]


FAULTS = {
    "contrast": "<p style='color:#999;background:#fff'>grey</p>",
    "contrast 2.1": "<div style='opacity:0.3;color:#000;background:#fff'><p>faint</p></div>",
    "broken word": "<p style='width:170px;word-break:break-all'>some words extraordinary</p>",
    "the page is": "<p style='width:2000px'>wide</p>",
    "beyond the screen": "<p style='position:relative;left:-50px'>left</p>",
    "cut off": "<p style='width:40px;overflow:hidden;white-space:nowrap'>cut off here</p>",
    "on ": "<svg width='200' height='50'><text x='10' y='20'>one</text><text x='14' y='22'>other</text></svg>",
    "outside its picture": "<svg width='50' height='50'><text x='30' y='20'>outside</text></svg>",
    "not shown": "<img alt='gone' src='data:image/png;base64,AAAA'/>",
}
"""What `wrong` says of a page, and its body."""


@pytest.mark.parametrize("said", FAULTS)
def test_what_is_wrong_with_a_page_is_seen(browser, tmp_path, said):
    browser.emulate()
    screen(browser, 390)
    for body in (FAULTS[said], ""):
        (tmp_path / "page.html").write_text(
            f"<body style='background:#fff'>{body}<p>sound, with a_long-name/and/path</p></body>"
        )
        browser.open(tmp_path / "page.html")
        assert [found for found in wrong(browser) if not found.startswith(said)] == [] or said in (
            "the page is",
            "cut off",
        )
        assert any(found.startswith(said) for found in wrong(browser)) == bool(body), wrong(browser)


def test_a_click_copies_a_command(browser, pages):
    browser.emulate()
    screen(browser, 1200)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.open(pages["report of a command to paste"])
    command = made_up.crowded().findings[0].fixes[0].command
    left, top = browser.value(
        "(() => { const b = document.querySelector('.paste button'); b.scrollIntoView({block: 'center'});"
        "const r = b.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2] })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, left, top, button="left", clickCount=1)
    assert (
        browser.value("new Promise(done => setTimeout(done, 200)).then(() => navigator.clipboard.readText())")
        == command
    )
    assert browser.value("document.querySelector('.paste button').textContent") == "copied"
    assert browser.value("getSelection().toString()") == command


def lab(colour: str) -> tuple[float, float, float]:
    """CIE 1976 L*a*b*, of D65: https://www.w3.org/TR/css-color-4/#lab-colors"""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    x, y, z = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", [0, 1])
def test_a_colour_means_one_thing(scheme):
    severe = {name: both[scheme] for name, both in palette.SEVERITIES.items()}
    others = {f"phase {place}": both[scheme] for place, both in enumerate(palette.PHASES)}
    others |= {name: both[scheme] for name, both in palette.RESOURCES.items()}
    others |= {"unnamed": palette.UNNAMED[scheme], "beside": palette.BESIDE[scheme]}
    near = [
        (a, b)
        for (a, one), (b, other) in itertools.combinations(others.items(), 2)
        if math.dist(lab(one), lab(other)) < 16
    ]
    near += [(a, b) for a, one in severe.items() for b, other in others.items() if math.dist(lab(one), lab(other)) < 25]
    assert near == []
    back, beside = ("#ffffff", "#14171b")[scheme], {"unnamed", "beside"}
    assert [
        name
        for name, colour in (others | severe).items()
        if palette.contrast(colour, back) < DRAWN and name not in beside
    ] == []


MANY = tuple(Mark(2**power, Spread((100.0 * 2**power,)), "ring" if power > 3 else "dot") for power in range(11))

CROWDED = {
    "hosts to 1,024": lambda: line_charts(
        [
            LineChart(
                "Throughput by the number of hosts",
                "images/s",
                "hosts",
                (
                    Curve("weak, batch 1152 per process", MANY, ((1, 100.0), (1024, 102400.0))),
                    Curve("strong", MANY[:5]),
                ),
                {"dot": "measured", "cross": "hosts share cores", "ring": "predicted"},
            )
        ]
    ),
    "two pipelines of one model": lambda: bar_charts(
        [
            BarChart(
                "Training time by model and augmentation load",
                "seconds an epoch",
                (("resnet18", ("1",)), ("mobilenetv3_small_050", ("1", "12"))),
                "augmentation load",
                (
                    ("cpu_reference", (Spread((0.002,)), Spread((12345.6,)), None)),
                    ("remote", (Spread((9.0, 11.0)),) * 3),
                ),
            )
        ]
    ),
    "phases far longer than others": lambda: comparison_of(0.001, 3.0),
    "one run": lambda: pictures.one_run(made_up.distillation().evidence),
}
"""Charts with much to write."""


def comparison_of(first: float, second: float) -> str:
    runs = [made_up.distillation(phases={**made_up.STEP, "data_wait": wait}) for wait in (first, second)]
    return Comparison(*runs).picture


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", [*CROWDED, *(file.name for folder in PICTURES for file in sorted(folder.glob("*.svg")))]
)
def test_no_text_of_a_picture_touches_another(browser, tmp_path, name, scheme):
    drawn = (
        CROWDED[name]()
        if name in CROWDED
        else next(file for folder in PICTURES for file in folder.glob(name)).read_text()
    )
    (tmp_path / "page.html").write_text(document(name, f"<div class='picture'>{drawn}</div>"))
    browser.emulate(scheme=scheme)
    screen(browser, 1200)
    browser.open(tmp_path / "page.html")
    assert wrong(browser) == []


def test_the_legend_draws_its_signs_beside_what_they_mean(browser, tmp_path):
    (tmp_path / "page.html").write_text(document("x", CROWDED["hosts to 1,024"]()))
    browser.emulate()
    browser.open(tmp_path / "page.html")
    signs = """(word => { const text = [...document.querySelectorAll('text')].find(one => one.textContent === word).getBoundingClientRect();
        return [...document.querySelectorAll('circle, path')].filter(one => { const box = one.getBoundingClientRect();
            return box.right <= text.left && text.left - box.right < 20 && Math.abs(box.y + box.height / 2 - text.y - text.height / 2) < 4 })
            .map(one => one.getAttribute('fill')) })"""
    assert browser.value(f"{signs}('measured')") == ["#808080"] and browser.value(f"{signs}('predicted')") == ["none"]

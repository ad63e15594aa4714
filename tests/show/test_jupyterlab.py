"""What notebooks show, in JupyterLab: in a notebook that it does not trust, whose outputs it cleans of scripts, SVG elements and styles."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

import launcher
from tests.browser import Browser
from tests.looks import wrong
from tests.show import made_up

START_SECONDS = 120.0
"""On a busy machine."""

LAYOUT_SECONDS = 60.0
"""Until what is wrong stays wrong."""

WIDTHS = (1400, 900, 560)
"""Pixels of the window; JupyterLab takes some of them for itself."""

CANARY = "svg"
"""An element that JupyterLab leaves out of what it does not trust."""

SIDE_BY_SIDE = """[...document.querySelectorAll('.jp-OutputArea dt')].filter(name => {
    const one = name.getBoundingClientRect(), other = name.nextElementSibling.getBoundingClientRect();
    return one.top > other.top + 4 || one.right > other.left + 1 || other.top > one.bottom }).map(name => name.textContent)"""
"""Names that do not stand to the left of what they name."""

TRAINS = """
    import sys
    for step in range(1, 6):
        sys.stdout.write(f"epoch 1/1 step {step}/5 loss {1 / step:.3f} images/s 50.0\\n")
"""


@pytest.fixture
def displays(script_job) -> dict[str, str]:
    """HTML, by name."""
    job = script_job(TRAINS, hyperparameters={"depth": 7, "note": "a long sentence about what this job is for " * 3})
    plan = launcher.plan(job)
    run = launcher.run(plan)
    assert run.wait() == "Completed"
    warned = launcher.plan(script_job(TRAINS, inputs={"train": {"folder": "nowhere"}}))
    shown = {name: make() for name, make in made_up.SHOWN.items()}
    shown |= {"run": run, "job": job, "plan": plan, "plan with an error": warned}
    return {name: one._repr_html_() for name, one in shown.items()}


def slow_start(complaint: Any) -> bool:
    """Whether JupyterLab says in its console how long its own parts take: on loaded cores, some need more than its 5 s."""
    return isinstance(complaint, list) and "to activate." in str(complaint[0].get("value"))


def reported(runtime: Path) -> dict[str, Any]:
    """What a server says of itself; {} before it has written all of it."""
    for file in runtime.glob("jpserver-*.json"):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(file.read_text())
    return {}


@pytest.fixture
def lab(displays, tmp_path) -> str:
    """The address of a notebook whose only cell has all displays as its outputs, in a JupyterLab that never saw it run."""
    shown = [*displays.values(), f"<{CANARY}></{CANARY}>"]
    outputs = [nbformat.v4.new_output("display_data", {"text/html": html}) for html in shown]
    cell = nbformat.v4.new_code_cell("1", outputs=outputs, execution_count=1)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    place = tmp_path / "place"
    place.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel}), place / "shown.ipynb")
    environment = (
        os.environ
        | {f"JUPYTER_{what}_DIR": str(tmp_path / what) for what in ("CONFIG", "DATA", "RUNTIME")}
        | {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    )
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0", "--ip=127.0.0.1"]
    command += [f"--ServerApp.root_dir={place}", "--IdentityProvider.token="]
    command += [
        "--expose-app-in-browser",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(command, env=environment, cwd=place, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_SECONDS
        while not (found := reported(tmp_path / "RUNTIME")):
            assert server.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.2)
        yield f"{found['url']}doc/tree/shown.ipynb"
    finally:
        server.terminate()
        server.wait(START_SECONDS)


def test_a_notebook_that_is_not_trusted_keeps_its_pictures_and_can_be_read(displays, lab, tmp_path):
    with Browser(tmp_path / "profile", 1400, 1000) as browser:
        browser.emulate()
        browser.navigate(lab)
        address = lab.removesuffix("doc/tree/shown.ipynb")
        count = "document.querySelectorAll('.jp-OutputArea-output').length"
        end = time.monotonic() + START_SECONDS
        while browser.value(count) < len(displays) + 1:  # the canary is the last
            assert time.monotonic() < end, browser.value("document.body.innerText")
            time.sleep(0.2)
        assert not browser.value(f"document.querySelectorAll('.jp-OutputArea-output {CANARY}').length"), "it is trusted"
        images = sum(html.count("<img ") for html in displays.values())
        assert images > 7 and browser.value("document.querySelectorAll('.jp-OutputArea img').length") == images
        for theme in ("Light", "Dark"):
            browser.value(
                f"jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}}).then(() => 0)"
            )
            for width in WIDTHS:
                browser.call(
                    "Emulation.setDeviceMetricsOverride", width=width, height=9000, deviceScaleFactor=1, mobile=False
                )
                browser.value(
                    "document.querySelectorAll('.jp-OutputArea details').forEach(part => { part.open = true })"
                )
                end = time.monotonic() + LAYOUT_SECONDS
                while (
                    found := [*wrong(browser, ".jp-OutputArea"), *browser.value(SIDE_BY_SIDE)]
                ) and time.monotonic() < end:
                    time.sleep(0.2)  # JupyterLab lays its parts out anew
                assert found == [], f"{width} pixels, {theme}"
        complaints = [one for one in browser.complaints if not (str(one).startswith(address) or slow_start(one))]
        assert complaints == [], "errors, or requests to others"

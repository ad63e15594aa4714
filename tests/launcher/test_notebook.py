"""What jobs, plans and runs show in a notebook, and the progress that a kernel shows while a run goes on."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from html.parser import HTMLParser

import pytest

import launcher
from launcher.record.metric_lines import parse_line
from launcher.record.progress import Progress
from launcher.runner import notebook as shown
from launcher.show import html as fragments
from tests.conftest import SLEEPER, wait_for_ready

NASTY = "<script>alert('x')</script> & \"more\""

TRAINS = """
    import sys
    for step in range(1, 6):
        sys.stdout.write(f"epoch 1/2 step {step}/10 loss {1 / step:.3f} images/s 50.0\\n")
    raise SystemExit(int(sys.argv[-1]) if sys.argv[-1].isdigit() else 0)
"""


class Balanced(HTMLParser):
    """Fails where an element is not closed, or something would be loaded or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "svg", "link", "iframe", "style"), tag
        held = [value for name, value in attributes if name in ("src", "href")]
        assert all(value.startswith("data:image/svg+xml;base64,") for value in held), held
        assert not any(name.startswith("on") for name, _ in attributes), attributes
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(shown) -> str:
    """Its HTML, which is whole, loads nothing and sets no colour of text or page."""
    html = shown._repr_html_()
    assert len(repr(shown)) < 120 and "hush" not in repr(shown), "a notebook keeps that too"
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    assert not re.search(r"[;'\"\s](?:color|background-color):(?!inherit)", html), "a theme of its own"
    return html


def test_a_job_shows_what_it_says_and_no_secret(script_job):
    job = script_job(TRAINS, hyperparameters={"note": NASTY, "depth": 7}, environment={"HF_TOKEN": "hush", "FLAG": "1"})
    html = checked(job)
    assert "hush" not in html and "HF_TOKEN: ***" in html and "<script>" not in html
    assert "&lt;script&gt;" in html and "depth" in html and "compute" not in html, (
        "what it leaves as it is is not shown"
    )


def test_a_plan_shows_its_mistakes_and_that_nothing_was_started(script_job):
    good = checked(launcher.plan(script_job(TRAINS)))
    assert "nothing has started" in good and "1 host" in good
    job = script_job(TRAINS, inputs={"train": {"folder": f"missing {NASTY}"}})
    bad = checked(launcher.plan(job))
    assert "<b>error</b>" in bad and "fix:" in bad and "nothing has started" not in bad and "<script>" not in bad


def test_a_plan_for_sagemaker_shows_its_price():
    values = {"name": "priced", "script": "train_classifier.py", "region": "us-west-2"}
    compute = {"instance_type": "ml.m5.xlarge", "max_hours": 2, "price_per_hour": 0.25}
    plan = launcher.plan(launcher.from_values({**values, "compute": compute}), on="aws")
    assert "at most $0.51" in checked(plan)


def test_a_run_shows_its_state_its_numbers_and_their_course(script_job):
    run = launcher.run(launcher.plan(script_job(TRAINS)))
    assert run.wait(60) == "Completed"
    html = checked(run)
    assert f"run {run.name}" in html and "Completed" in html and "step 5/10" in html and "50 images/s" in html
    assert (
        "loss: 1 at step 1, 0.2 at step 5" in html and html.count("<img alt='loss'") == 1 and "progressbar" not in html
    )


def test_a_failed_run_shows_why(script_job):
    run = launcher.run(launcher.plan(script_job(f"raise ValueError({NASTY!r})")))
    assert run.wait(60) == "Failed"
    html = checked(run)
    assert "failure" in html and "ValueError" in html and "<script>" not in html


def test_a_curve_of_many_points_stays_small_and_keeps_its_ends():
    progress = Progress()
    for step in range(1, 5001):
        loss = "nan" if step == 7 else f"{5000 - step}.0"
        progress.add(parse_line(f"epoch 1/1 step {step}/5000 loss {loss}"), float(step))
    html = fragments.curve("loss", progress.curves["loss"])
    assert len(html) < 4000 and "nan" not in html and html.endswith("4999 at step 1, 0 at step 5000</div></div>")


def test_lines_that_were_there_before_tell_nothing_of_the_speed():
    progress = Progress()
    for step, now in ((10, 0.0), (20, 0.001), (30, 0.002)):
        progress.add(parse_line(f"epoch 1/1 step {step}/100 loss 1.0"), now)
    progress.caught_up()
    assert progress.seconds_left(0.002) is None
    for step, now in ((35, 9.0), (40, 10.0)):  # the first may have been there for a while
        progress.add(parse_line(f"epoch 1/1 step {step}/100 loss 1.0"), now)
        progress.caught_up()
    assert progress.seconds_left(10.0) == pytest.approx(12) and progress.share == 0.4
    assert progress.line(60.0, 1.5) == "epoch 1/1  step 40/100  loss 1.0000  $1.50  1:00 left"


class Notebook:
    """What a kernel's IPython looks like from here: a shell with a kernel, and outputs that can be written over."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def modules(self) -> dict[str, types.ModuleType]:
        package, shown = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        package.get_ipython = lambda: types.SimpleNamespace(kernel=object())
        shown.HTML, shown.display = str, self.display
        return {"IPython": package, "IPython.display": shown}

    def display(self, html: str, display_id: bool):
        assert display_id
        output = [html]
        self.outputs.append(output)
        return types.SimpleNamespace(update=output.append)


@pytest.fixture
def notebook(monkeypatch) -> Notebook:
    made = Notebook()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_waiting_in_a_notebook_writes_one_output_over_until_the_run_is_over(
    script_job, notebook, tmp_path, monkeypatch
):
    seen = tmp_path / "seen"

    def display(html: str, display_id: bool):
        output = notebook.display(html, display_id)
        seen.touch()
        return output

    monkeypatch.setattr(sys.modules["IPython.display"], "display", display)
    until_seen = f"""
    import pathlib, time
    while not pathlib.Path({str(seen)!r}).exists():
        time.sleep(0.05)
    """
    run = launcher.run(launcher.plan(script_job(textwrap.dedent(until_seen) + textwrap.dedent(TRAINS))))
    assert run.wait(60) == "Completed"
    [output] = notebook.outputs
    assert "InProgress" in output[0] and "follows it from any notebook" in output[0]
    assert "Completed" in output[-1] and "step 5/10" in output[-1] and "follows it" not in output[-1]


def test_another_notebook_goes_on_with_the_display_from_the_runs_record(script_job, notebook):
    run = launcher.run(launcher.plan(script_job(TRAINS)))
    run.wait(60, progress=False)
    assert notebook.outputs == []
    launcher.attach(run.name).wait()
    [[html]] = notebook.outputs
    assert "loss: 1 at step 1, 0.2 at step 5" in html, "also what came before anybody looked"


def test_an_interrupted_display_says_how_to_come_back_and_the_run_goes_on(script_job, notebook, monkeypatch):
    run = launcher.run(launcher.plan(script_job(SLEEPER)))
    wait_for_ready(run, 1)

    def interrupt(_seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("launcher.runner.run.time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.wait()
    assert run.state == "InProgress" and f"launcher.attach(&quot;{run.name}&quot;).wait()" in notebook.outputs[0][-1]
    run.stop()
    assert run.wait(60, progress=False) == "Stopped"


def test_outside_a_notebook_nothing_is_shown_and_ipython_is_not_imported(script_job):
    assert not shown.in_notebook()
    run = launcher.run(launcher.plan(script_job(TRAINS)))
    assert shown.watch(run) is None and run.wait(60) == "Completed"


def test_a_users_mistake_has_no_traceback_in_a_notebook():
    with pytest.raises(launcher.UserError) as mistakes:
        launcher.from_values({"name": "no_hyphens", "script": "x.py"})
    assert mistakes.value._render_traceback_() == str(mistakes.value).splitlines()

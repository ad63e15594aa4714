"""Measurements with wrong values in them: what cannot be read is reported, the rest is used, and a hostile page runs nothing."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import MAX_SHARE
from launcher.insight.measurements import read
from tests.browser import Browser
from tests.insight.observed import loader, observed, sampled
from tests.insight.planted import plant, write
from tests.launcher.test_damaged_records import OPERATORS, VALUES, paths, replaced

PHASES = {
    "data_wait": 0.3,
    "teacher_forward": 0.1,
    "student_forward": 0.1,
    "backward": 0.2,
    "grad_sync": 0.05,
    "optimizer": 0.05,
}

HOSTILE = "</script><img src=x onerror=\"window.owned='yes'\"><script>window.owned='yes'</script>"


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """A folder of measurements with everything in it that rules look at."""
    folder = tmp_path_factory.mktemp("planted")
    settings = {"teacher_cache": None, "precision": "fp32", "compile": True, "evaluate_every": 1}
    measured = plant(
        phases=PHASES, ranks=2, ranks_per_host=1, steps=120, gpu=40, io_wait=1, checkpoint=(40, 2.0), evaluate=(50, 2.0),
        cpu_seconds=0.2, worker_cpu_seconds=0.1, settings=settings, seconds=5, cores=2, busy=1,
    )  # fmt: skip
    write(measured, folder)
    for steps in measured.ranks:
        with open(folder / steps.host / f"timeline-{steps.rank}.jsonl", "a") as file:
            for stall in measured.stalls:
                if stall.rank == steps.rank:
                    file.write(
                        json.dumps(
                            {"kind": stall.kind, "step": stall.step, "began": stall.began, "seconds": stall.seconds}
                        )
                        + "\n"
                    )
    (folder / "algo-1/operators.json").write_text(json.dumps(OPERATORS))
    return folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Path:
    """A folder of what the observer wrote of a script."""
    folder = tmp_path_factory.mktemp("watched")
    planted = dict(phases=PHASES, steps=120, checkpoint=(40, 2.0), cores=2, busy=1, settings={"precision": "fp32"})
    observed(
        folder, planted, loader("transformers"), lines=[sampled(66, "draw(images)", 40), sampled(67, "x", 2, None)]
    )
    return folder


def mutations(folder: Path, rng: random.Random, most: int) -> Iterator[tuple[Path, str, str]]:
    """(file, what is wrong, its text): one value replaced or removed, in one line or in all lines of its kind."""
    files = [folder / "algo-1/timeline-0.jsonl", folder / "algo-1/operators.json", min(folder.rglob("*.algo-1.json"))]
    for file in filter(Path.exists, files):
        text = file.read_text()
        lines = (
            [json.loads(text)] if file.name == "operators.json" else [json.loads(line) for line in text.splitlines()]
        )
        kinds = {kind_of(line): line for line in lines}
        choices = [(kind, at, new) for kind, line in kinds.items() for at in paths(line) for new in [*VALUES, ...]]
        for kind, at, new in rng.sample(choices, min(most, len(choices))):
            every, made = rng.random() < 0.5, copy.deepcopy(lines)
            for place, line in enumerate(lines):
                if kind_of(line) == kind and (every or line is kinds[kind]):
                    made[place] = replaced(line, at, new)
            yield (
                file,
                f"{kind} {'.'.join(map(str, at))}={new!r}"[:90],
                "".join(json.dumps(line) + "\n" for line in made),
            )


def kind_of(line: dict[str, Any]) -> str:
    """Of a timeline what happened, of a `setup` line what was set up, of system metrics what was sampled."""
    return line.get("of") or line.get("kind", line.get("Dimension", ""))


def explained(folder: Path, page: Path, other: Diagnosis) -> Diagnosis:
    """A diagnosis in all of its forms; numpy may not divide by nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Diagnosis(read(str(folder)))
        assert str(found) and found._repr_html_() and json.dumps(found.to_dict(), allow_nan=False)
        found.save_html(page)
        both = Comparison(other, found)
        assert str(both) and both._repr_html_() and json.dumps(both.to_dict(), allow_nan=False)
    return found


def tried(folder: Path, page: Path, rng: random.Random, most: int) -> tuple[int, list[str]]:
    """How many mutations were tried, and what was wrong with the diagnosis of each."""
    whole, wrong, done = explained(folder, page, Diagnosis(read(str(folder)))), [], 0
    for file, what, text in mutations(folder, rng, most):
        before, done = file.read_text(), done + 1
        file.write_text(text)
        try:
            explained(folder, page, whole)
        except launcher.UserError:
            pass
        except Exception as error:
            wrong.append(f"{file.name} {what}: {error!r} {error.__traceback__ and error.__traceback__.tb_next}")
        finally:
            file.write_text(before)
    return done, wrong


def test_no_wrong_value_of_a_measurement_ends_a_diagnosis(planted, tmp_path):
    done, wrong = tried(planted, tmp_path / "page.html", random.Random(0), 60)
    assert done >= 150 and not wrong, "\n".join(wrong)


def test_no_wrong_value_of_what_the_observer_wrote_ends_a_diagnosis(watched, tmp_path):
    done, wrong = tried(watched, tmp_path / "page.html", random.Random(2), 40)
    assert done >= 80 and not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["planted", "watched"])
def test_no_wrong_value_of_a_measurement_ends_a_diagnosis_in_many_more_trials(of, request, tmp_path):
    done, wrong = tried(request.getfixturevalue(of), tmp_path / "page.html", random.Random(1), 400)
    assert done >= 400 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("of", ["planted", "watched"])
def test_a_phase_that_takes_longer_than_its_steps_ends_no_diagnosis(of, request, tmp_path):
    folder = request.getfixturevalue(of)
    whole, timeline = Diagnosis(read(str(folder))), folder / "algo-1/timeline-0.jsonl"
    before = timeline.read_text()
    for phase in whole.evidence.phases:
        lines = [json.loads(line) for line in before.splitlines()]
        for line in lines:
            if line["kind"] == "steps" and phase in line["seconds"]:
                line["seconds"][phase] = 9.0 * line["seconds"]["step"]
        timeline.write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            assert explained(folder, tmp_path / "page.html", whole).evidence.share(phase) == MAX_SHARE
        finally:
            timeline.write_text(before)


def test_the_report_says_what_could_not_be_read_and_uses_the_rest(planted, tmp_path):
    timeline = planted / "algo-1/timeline-0.jsonl"
    before = timeline.read_text()
    lines = before.splitlines()
    broken = [
        '{"kind": "steps", "epo',
        lines[3].replace('"step": ', '"step": "x", "was": '),
        lines[3].replace("}", ', "a": NaN}'),
    ]
    timeline.write_text("\n".join([*lines, *broken]))
    operators = planted / "algo-1/operators.json"
    operators.rename(planted / "aside")
    operators.mkdir()
    try:
        found = Diagnosis(read(str(planted)))
    finally:
        timeline.write_text(before)
        operators.rmdir()
        (planted / "aside").rename(operators)
    unreadable = f"timeline-0.jsonl: 3 of {len(lines) + 3} lines", "operators.json: Is a directory"
    assert found.measurements.unreadable == unreadable and found.to_dict()["could_not_be_read"] == [*unreadable]
    assert f"could not be read: {unreadable[0]}; {unreadable[1]}" in str(found)
    assert f"Could not be read:</b> {unreadable[0]}; {unreadable[1]}." in found._repr_html_()
    whole = read(str(planted))
    assert found.measurements.ranks[0].step.tolist() == whole.ranks[0].step.tolist() and not whole.unreadable


def hostile(values: Any) -> Any:
    """Nested values with every text in them, and every name that is no word of the format, hostile."""
    if isinstance(values, dict):
        return {
            name: hostile(value) if name not in ("kind", "Type", "Dimension", "NodeId", "device") else value
            for name, value in values.items()
        }
    if isinstance(values, list):
        return [hostile(value) for value in values]
    return HOSTILE if isinstance(values, str) else values


def test_a_hostile_run_folder_runs_nothing_in_the_page(planted, tmp_path):
    folder = tmp_path / HOSTILE.replace("/", "∕")
    for file in [file for file in planted.rglob("*") if file.is_file()]:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        made = [hostile(line) for line in lines]
        for line in made:
            if line.get("kind") == "start":
                line["settings"][HOSTILE] = HOSTILE
                line["not_measured"] = {HOSTILE: HOSTILE, "grad_sync": HOSTILE}
            if line.get("kind") == "steps":
                line["seconds"][HOSTILE] = 0.05
        place = folder / file.relative_to(planted)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("\n".join(map(json.dumps, made)) + "\n")
    rank = json.loads((folder / "algo-1/timeline-0.jsonl").read_text().splitlines()[0])
    (folder / "algo-1/timeline-9.jsonl").write_text(json.dumps({**rank, "rank": HOSTILE}) + "\n")
    found = Diagnosis(read(str(folder)))
    assert any(name.startswith("timeline-9.jsonl") for name in found.measurements.unreadable)
    page = found.save_html(tmp_path / "page.html")
    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        assert browser.value("document.documentElement.dataset.drawn") == "yes" and browser.complaints == []
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert HOSTILE in browser.value("document.body.innerText")
        assert browser.value("typeof window.owned") == "undefined"

        allowed = page.read_text().replace("<body>", "<body><script>window.owned = 'by a script'</script>")
        allowed = allowed.replace("<section>", "<section onclick=\"window.owned = 'by a handler'\">")
        page.write_text(allowed)  # as if one place had not escaped: the policy stops it
        browser.open(page)
        browser.value("document.querySelector('section').click()")
        assert browser.value("typeof window.owned") == "undefined"
        assert browser.value("document.documentElement.dataset.drawn") == "yes"
        assert len([one for one in browser.complaints if "Content Security Policy" in one["text"]]) == 2

"""The notebooks: executed, and checked for what readers and the next execution need. `make test-notebooks`."""

from __future__ import annotations

import ast
import base64
import copy
import functools
import importlib
import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest

import launcher
from tests.insight.test_neighbours import KT
from tests.notebooks.executing import MAX_BYTES, NAMES, NOTEBOOKS, PICTURES, ROOT, execute
from tests.notebooks.stories import contradictions, printed

ALONE = bool(os.environ.get("LAUNCHER_TEST_NOTEBOOKS"))
"""Whether nothing else runs beside the notebooks: `make test-notebooks`."""

MEASURES = ("kt_journey",)
"""Notebooks whose text holds where they have the machine to themselves."""


@functools.cache
def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def code_cells(name: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_a_notebook_runs_from_top_to_bottom_and_leaves_nothing_in_the_repository(name, tmp_path):
    before = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, check=True).stdout
    measured = ALONE or name not in MEASURES
    book = execute(name, tmp_path / "kit", trials=None if measured else 1)
    if measured:
        assert contradictions(name, book) == []
    after = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, check=True).stdout
    assert after == before


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_outputs_bear_out_the_text(name):
    assert contradictions(name, read(name)) == []


def test_the_readme_quotes_kts_journey_as_it_is_stored():
    quoted = re.findall(r"^num_workers=\d+: .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(quoted) == 2 and {*quoted} <= {*printed(read("kt_journey")).splitlines()}


def test_the_log_of_kts_slow_job_is_as_kt_published_it():
    """The second to sixth iteration: the first one starts the job."""
    [cell] = [cell for cell in code_cells("scaling_study") if "# As published" in cell.source]
    for name, phase in (("loading", "data_wait"), ("forward", "student_forward"), ("backward", "backward")):
        [values] = re.findall(rf"^{name} = (\[.*\])$", cell.source, re.MULTILINE)
        assert ast.literal_eval(values) == [*KT[phase][1:]], name


@pytest.mark.parametrize(
    ("name", "output", "other"),
    [
        ("kt_journey", "; 16 workers a process keep", "; The teacher takes 53 % of each step"),
        ("kt_journey", "; Preparing the images needs more cores", "; The teacher takes 53 % of each step"),
        ("kt_journey", r"speed-up [\d.]+ of the whole job", "speed-up 0.86 of the whole job"),
        ("kt_journey", r": kept, speed-up ([\d.]+) \([\d.]+ to", r": kept, speed-up \1 (0.97 to"),
        ("kt_journey", r"num_workers=\d+: kept", "prefetch_factor=4: kept"),
        ("kt_journey", r"^speed-up [\d.]+ \([\d.]+ to", "speed-up 1.09 (0.78 to"),
        ("kt_journey", r"dataloader: \S+ sec", "dataloader: 9.00000 sec"),
        ("kt_journey", r"^\+  preprocessing: cpu", "+  compile: true"),
        ("quickstart", r"^27 times fewer", "3 times fewer"),
        ("quickstart", r"its teacher [\d.]+%", "its teacher 1.0%"),
        ("scaling_study", r"from more GPUs, at most( +)16.0", r"from more GPUs, at most\g<1>4.0"),
        ("scaling_study", "of which computing explains 2.3 s", "of which computing explains 20 s"),
        ("scaling_study", r"from five instances, about( +)[\d.]+", r"from five instances, about\g<1>1.00"),
        ("scaling_study", r"left for each instance, at least( +)[\d.]+", r"left for each instance, at least\g<1>1.00"),
        ("preprocessing_trials", r"takes [\d.]+ % less time", "takes 99 % less time"),
        ("preprocessing_trials", r"^2/7 .*$", ""),
        ("preprocessing_trials", r"^1/1 .*$", ""),
        ("preprocessing_trials", r"^  cpus preprocesses: .*$", ""),
        ("preprocessing_trials", r"so it cannot win by them and is not judged", "so it pays"),
        ("sagemaker", r"^billed (\d+) s, \$\d+", r"billed \1 s, $900"),
    ],
)
def test_outputs_that_contradict_the_text_are_noticed(name, output, other):
    book = copy.deepcopy(read(name))
    changed = 0
    for cell in book.cells:
        for shown in cell.get("outputs", []):
            for part, key in ((shown, "text"), (shown.get("data", {}), "text/html")):
                if key in part:
                    part[key], count = re.subn(output, other, part[key], flags=re.MULTILINE)
                    changed += count
    assert changed and contradictions(name, book)


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_outputs_are_those_of_a_whole_run_small_and_of_no_machine(name):
    book, text = read(name), (NOTEBOOKS / f"{name}.ipynb").read_text()
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    nbformat.validate(book)
    assert len(text.encode()) <= MAX_BYTES
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "make notebooks executes them"
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and all(output.output_type != "error" for output in outputs)
    assert not re.search(r"/(?:work|root|home|tmp)/\w", text), "a folder of the machine that executed it"
    assert set(book.metadata) == {"kernelspec", "language_info"} and all(not cell.metadata for cell in book.cells)


@pytest.mark.parametrize("name", NAMES)
def test_the_code_names_what_there_is(name):
    """Of `launcher.a.b` and `from launcher.a import b`."""
    for cell in code_cells(name):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Attribute) and (words := _dotted(node)) and words[0] == "launcher":
                functools.reduce(getattr, words[1:], launcher)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("launcher"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_with_what_it_shows_and_how_long_it_takes(name):
    first, second = read(name).cells[:2]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert re.search(r"^Takes about .* on 2 CPU cores", first.source, re.MULTILINE)
    assert second.source == code_cells("quickstart")[0].source, "all begin in the same way"
    assert f"({name}.ipynb)" in (NOTEBOOKS / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_links_of_a_notebook_lead_somewhere(name):
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (NOTEBOOKS / target).exists(), target


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda file: file.stem)
def test_a_picture_loads_nothing_and_follows_the_readers_scheme(picture):
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text and len(text) < MAX_BYTES
    assert not re.search(r"(?:href|src|url\()\s*=?\s*[\"']?(?:https?:|//)", text) and "<script" not in text
    if picture.stem in NAMES:  # the same run as the notebook's own output
        outputs = [output.get("data", {}) for cell in code_cells(picture.stem) for output in cell.outputs]
        images = re.findall(
            r"data:image/svg\+xml;base64,([^']+)'", "".join(data.get("text/html", "") for data in outputs)
        )
        assert text in [base64.b64decode(image).decode() for image in images]

"""Documents stay true: links, commands, configs and mistakes as they are, the reference as the code makes it, pages short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import yaml

import launcher
from launcher.config.job import Job
from tests.conftest import ROOT, write_batch
from tests.docs import reference
from tests.docs.documents import DOCUMENTS, FENCE, anchors, blocks, mentions, the_block
from tests.test_repository import steps_of

LONG = ("docs/reference/", "docs/results/gpu.md", "CHANGELOG.md")
"""What is made from the code, or grows with time."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_link_is_broken(document):
    text = FENCE.sub("", (ROOT / document).read_text())
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if not target.startswith("http"):
            file = (ROOT / document).parent.joinpath(path) if path else ROOT / document
            assert file.exists(), f"{document} links to {target}"
            if anchor:
                assert anchor in anchors(str(file.resolve().relative_to(ROOT))), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_in_a_document_exists(document):
    makefile = (ROOT / "Makefile").read_text()
    code = re.findall(r"`[^`]+`|^    .*$|^```.*?^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\bmake ([a-z][a-z0-9-]*)", " ".join(code)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_every_command_in_running_text_has_its_options():
    """`test_examples.py` reads whole commands; here they may lack arguments."""
    parsers = dict(reference.every_command())
    for document, text in mentions():
        words = text.split()
        name = next((" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in parsers), None)
        if name is None:
            known = words[0] == "COMMAND" or any(one.startswith(f"{text} ") for one in parsers)  # `launcher study`
            assert known, f"{document}: launcher {text}"
            continue
        options = {option for action in parsers[name]._actions for option in action.option_strings}
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", text):
            assert option in options, f"{document}: launcher {text}"


def test_the_reference_is_what_the_code_makes():
    for name, text in reference.pages().items():
        page = reference.FOLDER / name
        assert page.read_text() == text, ".venv/bin/python -m tests.docs.reference --write"
    assert {page.name for page in reference.FOLDER.iterdir()} == set(reference.pages())


def test_the_readme_is_one_screen_of_promise_and_one_of_use():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.encode()) <= 8192
    assert text.index("make quickstart") < text.index("make test") < text.index("pip install") < 2048


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if not path.startswith(LONG)])
def test_a_page_is_short(document):
    assert len((ROOT / document).read_text().splitlines()) <= 250


def test_the_index_names_every_page():
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index
    results = (ROOT / "docs/results/README.md").read_text()
    for page in (ROOT / "docs/results").glob("*.md"):
        assert page.name in ("README.md", "gpu.md") or f"({page.name})" in results


DATE, COMMIT = r"\d{4}-\d\d-\d\d", r"\b[0-9a-f]{7}\b"


def test_every_table_of_results_has_a_command_a_date_and_a_commit():
    for page in (ROOT / "docs/results").glob("*.md"):
        if page.name not in ("README.md", "gpu.md"):
            text = page.read_text()
            assert re.search(DATE, text) and re.search(COMMIT, text) and "`" in text, page
            for section in text.split("\n## "):  # one with a date of its own was measured by code of its own
                dated = "| --- |" in section and re.search(DATE, section)
                assert not dated or re.search(COMMIT, section), f"{page.name}: {section.splitlines()[0]}"


def test_the_workflow_for_users_calls_what_is_here():
    """tests/local_mode/test_your_ci.py runs it."""
    commands = "\n".join(steps_of(the_block("yaml", "# .github/workflows/training-job.yml")))
    for path in re.findall(r"vision-launcher/((?:\.ci|docker)/\S+)", commands):
        assert (ROOT / path).is_file(), path
    assert "-e vision-launcher\n" in commands, "without an extra: containers need no SDK"
    [given] = re.findall(r"^launcher (run .*)$", commands, re.MULTILINE)
    done = subprocess.run([sys.executable, "-m", "launcher", *given.split()], capture_output=True, text=True)
    assert "train.yaml: no such file" in done.stderr and "unrecognized" not in done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_extra_to_install_exists(document):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for found in re.findall(r"(?:'\.|vision-launcher)\[([\w,]+)\]", (ROOT / document).read_text()):
        assert set(found.split(",")) <= set(extras), found


def test_the_mistakes_in_the_documents_are_what_is_printed(tmp_path):
    (tmp_path / "broken.yaml").write_text(the_block("yaml", "# broken.yaml"))
    shown = the_block("", "$ launcher run broken.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "run", "broken.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert shown == "$ launcher run broken.yaml\n" + done.stderr


@pytest.mark.parametrize("document, text", blocks("yaml"))
def test_the_yaml_of_a_document_is_a_job_or_a_part_of_one(document, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("train", "validation"):
        write_batch(Path("data/digits", part))
    values = yaml.safe_load(text)
    if text.startswith(
        ("# broken.yaml", "# launcher-defaults.yaml", "# .github/workflows/", "# .pre-commit-config.yaml")
    ):
        return  # those have tests of their own
    if "script" in values:
        Path("job.yaml").write_text(text)
        for smoke in (False, True):
            plan = launcher.plan(launcher.load("job.yaml", smoke=smoke))
            assert [issue for issue in plan.errors if "no such run" not in issue.found] == []
    else:
        assert set(values) <= set(Job.model_fields), document
        launcher.from_values({"name": "part", "script": "train_kd.py", **values})


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda config: config.stem)
def test_a_configs_comments_say_what_it_has(config):
    """How many lines are for AWS alone; and under Data what the job itself reads: a smoke run's data are named beside it."""
    own, _, _ = config.read_text().partition("\nsmoke:")
    for lines, count in re.findall(r"^(role: .*ignore these (\w+)\n(?:.+\n)+?)compute:", own, re.MULTILINE):
        assert lines.count("\n") == {"four": 4, "five": 5}[count], lines
    data = re.search(r"^# Data: .*\n(?:# {9}.*\n)*", own, re.MULTILINE)
    for folder in re.findall(r"launcher prepare \S+ (data/[\w-]+)", data[0] if data else ""):
        assert f"{folder}/" in own, f"{folder} is read by the smoke run alone"

"""A config's text with values changed: what YAML reads of it changes, and nothing else of the text."""

from __future__ import annotations

import difflib
import json

import pytest

from launcher.config import yaml_file
from launcher.config.yaml_edit import with_values, without
from tests.conftest import ROOT

BLOCK = """# a job
name: a
hyperparameters:
  model: resnet18      # small
  num_workers: 16  # too many

  # the rest
  lr: 1e-3
# the end
"""


def read(text: str) -> dict:
    return yaml_file.parse(text, "test").values


@pytest.mark.parametrize(
    ("text", "key", "value", "line"),
    [
        (BLOCK, "hyperparameters.num_workers", 2, "  num_workers: 2  # too many"),
        (BLOCK, "hyperparameters.compile", True, "  compile: true"),
        (BLOCK, "hyperparameters.model", "null", '  model: "null"      # small'),
        (BLOCK, "environment.LAUNCHER_SETTINGS", '{"a": 1}', "environment: {LAUNCHER_SETTINGS: '{\"a\": 1}'}"),
        ("hyperparameters: {a: 1, b: 2}  # x\n", "hyperparameters.c", 3, "hyperparameters: {a: 1, b: 2, c: 3}  # x"),
        ("hyperparameters: {a: 1,\n  b: 2}\n", "hyperparameters.a", "x y", 'hyperparameters: {a: "x y",'),
        ("hyperparameters: {}\n", "hyperparameters.a", {"views": 2}, "hyperparameters: {a: {views: 2}}"),
        ("hyperparameters:\nname: b\n", "hyperparameters.a", 1, "hyperparameters: {a: 1}"),
        ("a: 1", "b.c", 2.5, "b: {c: 2.5}"),
        ("a:\n- 1\n- 2\nb: 3\n", "a", [4], "a: [4]"),
        ("a: |\n  text\n\nb: {c: 1}\n", "a", 5, "a: 5"),
    ],
)
def test_only_the_line_of_the_key_changes(text, key, value, line):
    edited = with_values(text, {key: value})
    wanted, problems = yaml_file.override(yaml_file.parse(text, "test"), [f"{key}={json.dumps(value)}"])
    assert not problems and read(edited) == wanted.values
    changed = [row[1:] for row in difflib.ndiff(text.splitlines(), edited.splitlines()) if row.startswith("+ ")]
    assert [row[1:] for row in changed] == [line]


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_of_the_kit_can_be_changed(file):
    text = file.read_text()
    edited = with_values(text, {"hyperparameters.num_workers": 3, "smoke.hyperparameters.num_workers": 1})
    before, after = read(text), read(edited)
    assert after["hyperparameters"] == {**before.get("hyperparameters", {}), "num_workers": 3}
    assert after["smoke"]["hyperparameters"]["num_workers"] == 1
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in edited.splitlines() if line.startswith("#")
    ]


@pytest.mark.parametrize(
    ("text", "key", "left"),
    [
        ("a: 1  # x\n# y\nb: 2\n", "a", "# y\nb: 2\n"),
        ("a: 1\nb:\n  c: 1\n  d: 2\ne: 3\n", "b", "a: 1\ne: 3\n"),
        ("a: 1\nb:\n  c: 1\n  d: 2\ne: 3\n", "b.d", "a: 1\nb:\n  c: 1\ne: 3\n"),
        ("a: {b: 1, c: 2, d: 3}\n", "a.b", "a: {c: 2, d: 3}\n"),
        ("a: {b: 1, c: 2, d: 3}\n", "a.d", "a: {b: 1, c: 2}\n"),
        ("a: {b: 1}\n", "a.b", "a: {}\n"),
        ("a: [1,\n  2]\nb: 3", "b", "a: [1,\n  2]\n"),
        ("a: 1\n", "b.c", "a: 1\n"),
        ("# all\n", "a", "# all\n"),
    ],
)
def test_a_key_is_removed_with_its_line_and_nothing_else(text, key, left):
    assert without(text, key) == left

"""The order of rooms: every import runs down, none in a circle, lazy ones and those for annotations too."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT

LAUNCHER = [
    "show",
    "config",
    "record",
    "planner",
    "sdk_import",
    "aws",
    "backends",
    "insight",
    "runner",
    "study",
    "prepare",
    "labels",
    "emulator",
    "facade",
    "commands",
]
"""Rooms of launcher/, each above those that it may import; the facade is launcher/__init__.py."""

TRAINING = ["launcher_observer", "runtime", "settings", "distributed"]
TRAINING += ["measure", "data", "servers", "models", "teacher", "engine", "tasks", "scripts"]
"""The observer, the rooms of entrypoints/training/, and the entry scripts on top, each above those that it may import."""


def modules(folder: str) -> dict[str, Path]:
    """Dotted name -> file, of every tracked module below a folder."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", f"{folder}/*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return {
        path.removeprefix("entrypoints/").removesuffix(".py").removesuffix("/__init__").replace("/", "."): ROOT / path
        for path in listed
        if (ROOT / path).is_file()
    }


def imported(file: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Every module of `known` that a file imports, wherever in the file, with the line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((item.name, node.lineno) for item in node.names if item.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            for item in node.names:
                full = f"{node.module}.{item.name}"
                if full in known:
                    yield full, node.lineno
                elif node.module in known:
                    yield node.module, node.lineno


def room(module: str) -> str:
    """The room that a module lies in."""
    parts = module.split(".")
    if parts[0] == "launcher":
        return "facade" if len(parts) == 1 else "commands" if parts[1] == "__main__" else parts[1]
    if parts[0] == "launcher_observer":
        return "launcher_observer"
    if parts[0] != "training":
        return "scripts"
    return parts[1] if len(parts) > 1 else "runtime"


def arrows(folder: str) -> dict[str, dict[str, int]]:
    """Module -> what it imports, with the line."""
    known = modules(folder)
    return {
        name: {other: line for other, line in imported(file, known) if other != name} for name, file in known.items()
    }


def circles(graph: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Modules that reach themselves, by one way for each that closes a circle."""
    found, done = [], set()

    def walk(module: str, way: list[str]) -> None:
        if module in way:
            found.append([*way[way.index(module) :], module])
        elif module not in done:
            for other in graph[module]:
                walk(other, [*way, module])
            done.add(module)

    for module in graph:
        walk(module, [])
    return found


@pytest.mark.parametrize(("folder", "order", "least"), [("launcher", LAUNCHER, 100), ("entrypoints", TRAINING, 80)])
def test_every_arrow_runs_down(folder, order, least):
    graph = arrows(folder)
    assert len(graph) >= least and {room(module) for module in graph} == {*order}
    up = [
        f"{module}:{line} imports {other}, {room(module)} lies below {room(other)}"
        for module, others in graph.items()
        for other, line in others.items()
        if order.index(room(other)) > order.index(room(module))
    ]
    assert not up


@pytest.mark.parametrize("folder", ["launcher", "entrypoints"])
def test_no_import_is_part_of_a_circle(folder):
    assert circles(arrows(folder)) == []


def test_the_entry_scripts_never_import_the_launcher_nor_it_them():
    known = modules("launcher") | modules("entrypoints")
    for name, file in known.items():
        side = name.split(".")[0] == "launcher"
        assert all((other.split(".")[0] == "launcher") == side for other, _ in imported(file, known)), name


def test_a_circle_and_an_arrow_that_runs_up_are_seen(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("def f():\n    from launcher.commands import main\n    import launcher.b\n")
    known = {"launcher.commands.main": file, "launcher.b": file}
    assert dict(imported(file, known)) == {"launcher.commands.main": 2, "launcher.b": 3}
    assert circles({"a": {"b": 1}, "b": {"c": 1}, "c": {"b": 1}}) == [["b", "c", "b"]]
    assert room("launcher.config.job") == "config" and room("launcher") == "facade" and room("train_kd") == "scripts"

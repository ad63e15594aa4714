"""How well tests hold the diagnosis's rules: each comparison, boolean and arithmetic operator of them turned, one at a time.

A mutant that no test notices survives. Each runs in a fork of one pytest session, on the tests that run its line. `make mutants` takes all of
them, some 5 minutes on 2 cores; name files to turn only theirs:

    .venv/bin/python -m tests.insight.mutants workers data
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest

from launcher.show.table import Table

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "launcher/insight/rules"
TESTS = [
    HERE / f"test_{name}.py"
    for name in (
        "workers_rule",
        "images_rule",
        "system_rule",
        "processes_rule",
        "compute_rule",
        "data_rule",
        "serving_rule",
        "serving_numbers",
        "feeding_rule",
        "pauses_rule",
        "neighbours",
        "script_fixes",
        "rule_shares",
        "observed_runs",
        "observed_arguments",
        "rules",
        "gains",
        "gain_ranges",
        "reports",
        "probe_answer",
    )
]

TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}

SECONDS = 60
"""After which a test fails: a mutant may not end."""

ENOUGH = 0.9
"""Share of mutants that must be noticed."""


@dataclass(frozen=True)
class Mutant:
    """One turned operator."""

    file: Path
    number: int
    """Of the operator in its file."""
    lines: range
    at_import: bool
    """Whether it lies outside of all functions."""
    change: str


def mutants_of(file: Path) -> Iterator[Mutant]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    for number, (node, place) in enumerate(operators(tree)):
        operator = type(node.op if place is None else node.ops[place])
        new = TURNED.get(operator)
        at_import = not any(one.lineno <= node.lineno <= one.end_lineno for one in functions)
        change = f"{operator.__name__} -> {new.__name__ if new else 'nothing'}"
        yield Mutant(file, number, range(node.lineno, node.end_lineno + 1), at_import, change)


def operators(tree: ast.AST) -> Iterator[tuple[Any, int | None]]:
    """Every operator that can be turned, always in the same order: its node, and its place there where a node has several.

    Those of assertions are left out: they always hold.
    """
    asserted = {id(node) for one in ast.walk(tree) if isinstance(one, ast.Assert) for node in ast.walk(one)}
    for node in ast.walk(tree):
        if id(node) in asserted:
            continue
        if isinstance(node, ast.Compare):
            yield from ((node, place) for place in range(len(node.ops)))
        elif (
            isinstance(node, (ast.BoolOp, ast.BinOp))
            and type(node.op) in TURNED
            or isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.Not)
        ):
            yield node, None


def mutated(mutant: Mutant) -> ast.Module:
    """The file's code with that operator turned."""
    tree = ast.parse(mutant.file.read_text(encoding="utf-8"))
    node, place = [*operators(tree)][mutant.number]
    if place is not None:
        node.ops[place] = TURNED[type(node.ops[place])]()
    elif isinstance(node, ast.UnaryOp):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)  # twice is once less
    else:
        node.op = TURNED[type(node.op)]()
    return ast.fix_missing_locations(tree)


def turn(mutant: Mutant) -> None:
    """Turn the operator in this process: also where other modules hold the functions of the rules' module."""
    module = importlib.import_module(f"launcher.insight.rules.{mutant.file.stem}")
    before = dict(vars(module))
    exec(compile(mutated(mutant), str(mutant.file), "exec", dont_inherit=True), vars(module))
    for name, function in before.items():
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            function.__code__ = vars(module)[name].__code__


class Turning:
    """A pytest plugin: instead of running the collected tests once, it runs them on every mutant."""

    def __init__(self, mutants: list[Mutant]):
        self.mutants = mutants
        self.survivors: list[Mutant] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        ran = self._lines_of_tests(session)
        running: dict[int, Mutant] = {}
        for mutant in self.mutants:
            where = {(str(mutant.file), line) for line in mutant.lines}
            items = [item for item in session.items if mutant.at_import or where & ran[item.nodeid]]
            if len(running) == os.cpu_count():
                self._ended(running)
            running[_fork(partial(_try, mutant, session, items))] = mutant
        while running:
            self._ended(running)
        return True

    def _lines_of_tests(self, session: pytest.Session) -> dict[str, set[tuple[str, int]]]:
        """By test, the lines of the rules that it runs, with the rules as they are."""
        with tempfile.TemporaryDirectory() as place:
            record = Path(place) / "lines.json"
            _, passed = _wait(_fork(lambda: record.write_text(json.dumps(_traced(session)))))
            if not passed:
                pytest.exit("the tests fail with the rules as they are: mend them first", returncode=1)
            return {name: {*map(tuple, lines)} for name, lines in json.loads(record.read_text()).items()}

    def _ended(self, running: dict[int, Mutant]) -> None:
        child, passed = _wait(-1)
        mutant = running.pop(child)
        if passed:
            self.survivors.append(mutant)
            print(f"survives: {mutant.file.name}:{mutant.lines[0]}: {mutant.change}", flush=True)


def _traced(session: pytest.Session) -> dict[str, list[tuple[str, int]]]:
    files, lines, ran = {str(file) for file in RULES.glob("*.py")}, set(), {}

    def trace(frame: FrameType, event: str, value: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    for item in session.items:
        lines.clear()
        sys.settrace(trace)
        _run(session, [item])
        sys.settrace(None)
        ran[item.nodeid] = [*lines]
    return ran


def _try(mutant: Mutant, session: pytest.Session, items: list[pytest.Item]) -> None:
    turn(mutant)
    _run(session, items)


def _run(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Run tests; raises at the first that fails."""
    for item, following in zip(items, [*items[1:], None]):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        assert not session.testsfailed, item.nodeid


def _fork(do: Callable[[], object]) -> int:
    """Do something in a fork, which prints nothing and ends with 0 if nothing was raised."""
    child = os.fork()
    if child == 0:
        code = 1
        with (
            contextlib.suppress(BaseException),
            tempfile.TemporaryDirectory() as place,
            open(os.devnull, "w") as nowhere,
        ):
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = place  # tests' own folders
            do()
            code = 0
        os._exit(code)
    return child


def _wait(child: int) -> tuple[int, bool]:
    """Which child ended, and whether it did so with 0."""
    ended, status = os.waitpid(child, 0)
    return ended, status == 0


def main() -> None:
    known = {file.stem: file for file in sorted(RULES.glob("*.py"))}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FILE", help=f"only these rules: {', '.join(known)}")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only one in N mutants")
    options = parser.parse_args()
    files = [known[name] for name in options.names] or [*known.values()]
    turning = Turning([mutant for file in files for mutant in mutants_of(file)][:: options.every])
    quiet = ["-qq", "--no-header", "--capture=no", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={SECONDS}"]
    if pytest.main([*quiet, "-m", "not slow", *map(str, TESTS)], plugins=[turning]) != pytest.ExitCode.OK:
        sys.exit(1)
    rows = []
    for file in files:
        count = sum(mutant.file == file for mutant in turning.mutants)
        rows.append([file.name, str(count), str(count - sum(mutant.file == file for mutant in turning.survivors))])
    noticed = len(turning.mutants) - len(turning.survivors)
    print(Table(["rules", "mutants", "noticed"], [*rows, ["all", str(len(turning.mutants)), str(noticed)]]))
    print(f"{noticed / len(turning.mutants):.1%} noticed")
    sys.exit(noticed < ENOUGH * len(turning.mutants))


if __name__ == "__main__":
    main()

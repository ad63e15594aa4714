"""How well tests hold the diagnosis's rules: each comparison, boolean and arithmetic operator of them turned, one at a time.

A mutant that no test notices survives. `make mutants` runs all of them, some 15 minutes on 2 cores; name files to run only theirs:

    .venv/bin/python -m tests.insight.mutants workers data
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.machinery
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # before the forks, which then start at once
import pydantic  # noqa: F401
import pytest

from launcher.show.table import Table

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "launcher/insight/rules"
TESTS = [
    HERE / f"test_{name}.py" for name in ("rules", "neighbours", "gains", "observed_runs", "reports", "probe_answer")
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

SECONDS = 300
"""After which a mutant counts as noticed: it does not end."""

ENOUGH = 0.9
"""Share of mutants that must be noticed."""


@dataclass(frozen=True)
class Mutant:
    """One turned operator."""

    file: Path
    number: int
    """Of the operator in its file."""
    line: int
    change: str


def mutants_of(file: Path) -> Iterator[Mutant]:
    for number, (node, place) in enumerate(operators(ast.parse(file.read_text(encoding="utf-8")))):
        operator = type(node.op if place is None else node.ops[place])
        new = TURNED.get(operator)
        yield Mutant(file, number, node.lineno, f"{operator.__name__} -> {new.__name__ if new else 'nothing'}")


def operators(tree: ast.AST) -> Iterator[tuple[Any, int | None]]:
    """Every operator that can be turned, always in the same order: its node, and its place there where a node has several."""
    for node in ast.walk(tree):
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


def survives(mutant: Mutant | None) -> bool:
    """Whether all tests pass with it; None: with the rules as they are. In a fork, which imports the rules anew."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            if mutant is not None:
                _import_as(mutant)
            with tempfile.TemporaryDirectory() as place:
                options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", f"{place}/t"]
                code = pytest.main([*options, "-m", "not slow", *map(str, TESTS)])
        os._exit(int(code))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def _import_as(mutant: Mutant) -> None:
    """Have this process import the file with the operator turned."""
    load = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
        if Path(self.path) == mutant.file:
            return compile(mutated(mutant), self.path, "exec", dont_inherit=True)
        return load(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FILE", help="only these rules, such as workers")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only one in N mutants")
    options = parser.parse_args()
    files = sorted(file for file in RULES.glob("*.py") if not options.names or file.stem in options.names)
    mutants = [mutant for file in files for mutant in mutants_of(file)][:: options.every]
    assert not [name for name in sys.modules if name.startswith("launcher.insight.rules")], "the forks import them"
    if not survives(None):
        sys.exit("the tests fail with the rules as they are: mend them first")
    left: dict[Path, list[Mutant]] = {file: [] for file in files}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, lives in zip(mutants, pool.map(survives, mutants)):
            if lives:
                left[mutant.file].append(mutant)
                print(f"survives: {mutant.file.name}:{mutant.line}: {mutant.change}", flush=True)
    rows = []
    for file in files:
        count = sum(mutant.file == file for mutant in mutants)
        rows.append([file.name, str(count), str(count - len(left[file]))])
    noticed = len(mutants) - sum(map(len, left.values()))
    print(Table(["rules", "mutants", "noticed"], [*rows, ["all", str(len(mutants)), str(noticed)]]))
    print(f"{noticed / len(mutants):.1%} noticed")
    sys.exit(noticed < ENOUGH * len(mutants))


if __name__ == "__main__":
    main()

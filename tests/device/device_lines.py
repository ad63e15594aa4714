"""Which lines of the product run on a GPU alone, found in its syntax trees, and which of them have run.

A line does where a condition asks for a GPU (`accelerator.is_gpu`, a device's `type`, or a name that was made from one of these), and
in what follows a condition that leaves the block on the CPU; from where something is asked of the GPU's module on, to the block's
end; in all of accelerator.py; and in functions that are named in such lines alone.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"
WHOLE = "training/runtime/accelerator.py"

OF_GPUS = {f"accelerator.{name}" for name in ("module", "side_stream", "capability", "memory", "reserved_memory")}
"""Functions that fail on the CPU."""

UNSEEN = {
    (
        "training/models/precision.py",
        "return torch.cuda.amp.GradScaler()",
    ): "torch before 2.3, which has no stand-in device"
}
"""Lines that cannot run here, by file and text, and why."""

Place = tuple[str, int]
"""A file below entrypoints/, and a line of it."""

seen: set[Place] = set()
"""Places that have run in this process."""

found: list[str] = []
"""What `problems` said at the end of all tests, for the last lines of the run."""


class Lines:
    """Places of one version of the product.

    Args:
        sources: by file, relative to entrypoints/.
    """

    def __init__(self, sources: Mapping[str, str]):
        self.trees = {file: ast.parse(source) for file, source in sources.items()}
        self.nodes: dict[str, set[ast.stmt | ast.expr]] = {file: set() for file in self.trees}
        """Statements, and branches of conditional expressions."""
        for file, tree in self.trees.items():
            if file == WHOLE:
                for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                    self._add(file, function.body)
            else:
                self._look(file, tree.body, _names_of_gpus(tree))
        self._add_functions()

    @property
    def places(self) -> set[Place]:
        return {(file, node.lineno) for file, nodes in self.nodes.items() for node in nodes}

    def counted(self, file: str) -> ast.Module:
        """A file's tree that calls `_device_line` at each of its places."""
        return ast.fix_missing_locations(_Counting(file, self.nodes[file]).visit(self.trees[file]))

    def _add(self, file: str, body: Sequence[ast.stmt | ast.expr]) -> None:
        """These, and all statements inside of them."""
        for top in body:
            for node in ast.walk(top):
                if (isinstance(node, ast.stmt) or node is top) and not _says_nothing(node):
                    self.nodes[file].add(node)

    def _look(self, file: str, body: Sequence[ast.stmt], gpus: set[str]) -> None:
        for position, statement in enumerate(body):
            expressions = [*_own_expressions(statement)]
            for node in expressions:
                if isinstance(node, ast.IfExp):
                    self._add(file, [node.body] if _when(node.test, True, gpus) else [])
                    self._add(file, [node.orelse] if _when(node.test, False, gpus) else [])
            chosen = {id(part) for node in expressions if node in self.nodes[file] for part in ast.walk(node)}
            calls = [
                ast.unparse(node.func) for node in expressions if isinstance(node, ast.Call) and id(node) not in chosen
            ]
            if OF_GPUS.intersection(calls):
                self._add(file, body[position:])
            if isinstance(statement, ast.If):
                for taken, branch, other in (
                    (True, statement.body, statement.orelse),
                    (False, statement.orelse, statement.body),
                ):
                    if _when(statement.test, taken, gpus):
                        self._add(file, branch)
                        if _leaves(other):
                            self._add(file, body[position + 1 :])
            if isinstance(statement, ast.Assert) and _when(statement.test, True, gpus):
                self._add(file, body[position + 1 :])
            for name in ("body", "orelse", "finalbody"):
                self._look(file, getattr(statement, name, []), gpus)
            for handler in getattr(statement, "handlers", []):
                self._look(file, handler.body, gpus)

    def _add_functions(self) -> None:
        """Functions of which nothing but such lines speaks, as long as there are more."""
        named: dict[str, set[int]] = {}
        functions = []
        for file, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, (ast.Name, ast.Attribute)):
                    named.setdefault(node.id if isinstance(node, ast.Name) else node.attr, set()).add(id(node))
                elif isinstance(node, ast.FunctionDef):
                    functions.append((file, node))
        before = 0
        while before < (now := sum(map(len, self.nodes.values()))):
            before = now
            inside = {id(part) for nodes in self.nodes.values() for node in nodes for part in ast.walk(node)}
            for file, function in functions:
                speakers = named.get(function.name)
                if speakers and speakers <= inside:
                    self._add(file, function.body)


def of_the_product() -> Lines:
    """As it is on the disk."""
    files = sorted(ENTRYPOINTS.rglob("*.py"))
    return Lines({file.relative_to(ENTRYPOINTS).as_posix(): file.read_text(encoding="utf-8") for file in files})


def watch() -> None:
    """Have modules of the product that are imported from now on count their places in `seen`."""
    builtins._device_line = lambda file, line: seen.add((file, line))
    sys.meta_path.insert(0, _Finder(of_the_product()))


def problems() -> list[str]:
    """Lines that have not run in this process, nor in those whose places were added to `seen`, and exceptions that are none."""
    places = of_the_product().places
    lines = {file: (ENTRYPOINTS / file).read_text(encoding="utf-8").splitlines() for file, _ in places}
    unseen = {(file, line): lines[file][line - 1].strip() for file, line in places - seen}
    excepted = {*UNSEEN}
    return [
        *(
            f"{file}:{line} is there for a GPU, and no test of tests/device runs it: {text}"
            for (file, line), text in sorted(unseen.items())
            if (file, text) not in excepted
        ),
        *(
            f"{file} is an exception in tests/device/device_lines.py for a line that runs, or is gone: {text}"
            for file, text in sorted(excepted - {(file, text) for (file, _), text in unseen.items()})
        ),
    ]


class _Loader(importlib.machinery.SourceFileLoader):
    lines: Lines

    def get_code(self, fullname: str) -> CodeType:
        file = Path(self.path).relative_to(ENTRYPOINTS).as_posix()
        return compile(self.lines.counted(file), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, lines: Lines):
        self._lines = lines

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "training":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        file = None if spec is None or spec.origin is None else Path(spec.origin).relative_to(ENTRYPOINTS).as_posix()
        if spec is None or file is None or not self._lines.nodes.get(file):
            return spec
        spec.loader = _Loader(fullname, spec.origin)
        spec.loader.lines = self._lines
        return spec


class _Counting(ast.NodeTransformer):
    """Puts a call before each counted statement, and around each counted expression."""

    def __init__(self, file: str, nodes: set[ast.stmt | ast.expr]):
        self._file, self._nodes = file, nodes

    def visit(self, node: ast.AST) -> Any:
        counted = node in self._nodes
        self.generic_visit(node)
        if not counted:
            return node
        call = ast.Call(ast.Name("_device_line", ast.Load()), [ast.Constant(self._file), ast.Constant(node.lineno)], [])
        if isinstance(node, ast.expr):
            pair = ast.Tuple([call, node], ast.Load())
            return ast.copy_location(ast.Subscript(pair, ast.Constant(1), ast.Load()), node)
        return [ast.copy_location(ast.Expr(call), node), node]


def _names_of_gpus(tree: ast.Module) -> set[str]:
    """Names and attributes that were made from the answer whether there is a GPU."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _asks(node.value):
            for target in node.targets:
                names |= {
                    part.attr if isinstance(part, ast.Attribute) else part.id
                    for part in ast.walk(target)
                    if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Store)
                }
    return names


def _asks(value: ast.expr) -> bool:
    """Whether a value is None or false without a GPU: `is_gpu(…)`, `… if is_gpu(…) else None`, `accelerator.name(…)`."""
    if isinstance(value, ast.IfExp):
        return _is_question(value.test) and isinstance(value.orelse, ast.Constant) and not value.orelse.value
    return _is_question(value) or (isinstance(value, ast.Call) and ast.unparse(value.func) == "accelerator.name")


def _is_question(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "is_gpu"


def _when(test: ast.expr, taken: bool, gpus: set[str]) -> bool:
    """Whether a condition that is true, or false, means that there is a GPU."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _when(test.operand, not taken, gpus)
    if isinstance(test, ast.BoolOp):
        enough = any if isinstance(test.op, ast.And) == taken else all
        return enough(_when(value, taken, gpus) for value in test.values)
    if isinstance(test, ast.Compare):
        left, right, how = test.left, test.comparators[0], type(test.ops[0])
        if isinstance(right, ast.Constant) and right.value is None and _is_named(left, gpus):
            return taken == (how is ast.IsNot)
        of_cpu = isinstance(right, ast.Constant) and right.value == "cpu"
        return of_cpu and ast.unparse(left).endswith("device.type") and taken == (how is ast.NotEq)
    return taken and (_is_question(test) or _is_named(test, gpus))


def _is_named(node: ast.expr, gpus: set[str]) -> bool:
    return (isinstance(node, ast.Name) and node.id in gpus) or (isinstance(node, ast.Attribute) and node.attr in gpus)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _says_nothing(node: ast.AST) -> bool:
    """A docstring, or a declaration."""
    of_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return of_text or isinstance(node, (ast.Pass, ast.Global, ast.Nonlocal))


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement's expressions, without those of the statements inside."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            child for child in ast.iter_child_nodes(node) if not isinstance(child, (ast.stmt, ast.excepthandler))
        ]

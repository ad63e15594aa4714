"""Values of expressions: some may have unknown parts, others must not."""

from __future__ import annotations

import ast
import itertools
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.config.expressions import MAX_LENGTH, Evaluator, NotPlain, Undefined
from launcher.sdk_import.objects import Symbol, Unread, invalidate, is_plain, text_of

ESTIMATORS = ("PyTorch", "HuggingFace", "Estimator", "ModelTrainer")
"""Names of the classes of SDK v2 and v3 that start a training job with a script."""

CANNOT_BE_READ = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotPlain,
    RecursionError,
    TypeError,
    ValueError,
)
"""What evaluating an expression may raise if a value in it is not what it seems."""


class Expressions(Evaluator):
    """Reads expressions. An unknown part makes the whole expression unknown, but not a dictionary, list or call."""

    def __init__(self, file: str):
        super().__init__(file, self._no_name, self._attribute_of, lambda _: False, itertools.count())
        self.open = 0
        """Above 0: the code being read may not run, or may run more than once."""

    def read(self, node: ast.AST, names: Mapping[str, Any]) -> Any:
        """An expression's value; Unread if it is known only when the script runs."""
        try:
            return self.value(node, names)
        except CANNOT_BE_READ:
            pass
        return Unread(text_of(node), getattr(node, "lineno", 0))

    def _no_name(self, name: str) -> Any:
        raise Undefined(name)

    def _attribute_of(self, of: Any, name: str) -> Any:
        if isinstance(of, Symbol):
            return Symbol(f"{of.name}.{name}")
        raise NotPlain(name)

    def _known(self, node: ast.expr, names: Mapping[str, Any]) -> ast.Constant:
        """An expression's value, as a constant that is not evaluated again. Raises NotPlain if a part of it is unknown."""
        value = self.value(node, names)
        if not is_plain(value):
            raise NotPlain(text_of(node))
        return ast.copy_location(ast.Constant(value), node)

    def _Dict(self, node: ast.Dict, names: Mapping[str, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values):
            value = self.read(item, names)
            if key is None and isinstance(value, dict):
                made |= value
                continue
            known = self.read(key, names) if key is not None else None
            if key is not None and is_plain(known):
                made[known] = value
            else:  # it may be any key, also one that is there
                invalidate(made, text_of(item if key is None else key), node.lineno)
        return made

    def _items(self, nodes: Sequence[ast.expr], names: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value: Any = self._known(node.value, names).value
                found += value
            else:
                found.append(self.read(node, names))
        return found

    def _Set(self, node: ast.Set, names: Mapping[str, Any]) -> set[Any]:
        return {self._known(part, names).value for part in node.elts}

    def _Subscript(self, node: ast.Subscript, names: Mapping[str, Any]) -> Any:
        of, key = self.value(node.value, names), self._known(node.slice, names).value
        found = of[key]
        if isinstance(found, Unread):
            raise NotPlain(text_of(node))
        return found

    def _JoinedStr(self, node: ast.JoinedStr, names: Mapping[str, Any]) -> str:
        parts = [
            ast.copy_location(
                ast.FormattedValue(self._known(part.value, names), part.conversion, part.format_spec), part
            )
            if isinstance(part, ast.FormattedValue)
            else part
            for part in node.values
        ]
        return super()._JoinedStr(ast.copy_location(ast.JoinedStr(parts), node), names)

    def _BinOp(self, node: ast.BinOp, names: Mapping[str, Any]) -> Any:
        left, right = self._known(node.left, names), self._known(node.right, names)
        if isinstance(left.value, str) and isinstance(node.op, ast.Div) and isinstance(right.value, str):  # of pathlib
            return limited(os.path.join(left.value, right.value))
        if isinstance(left.value, str) and isinstance(node.op, ast.Mod) and re.fullmatch(r"([^%]|%[sd])*", left.value):
            return limited(left.value % right.value)
        return super()._BinOp(ast.copy_location(ast.BinOp(left, node.op, right), node), names)

    def _Compare(self, node: ast.Compare, names: Mapping[str, Any]) -> bool:
        left = self._known(node.left, names)
        others: list[ast.expr] = [self._known(part, names) for part in node.comparators]
        return super()._Compare(ast.copy_location(ast.Compare(left, node.ops, others), node), names)

    def _BoolOp(self, node: ast.BoolOp, names: Mapping[str, Any]) -> Any:
        parts: list[ast.expr] = [self._known(part, names) for part in node.values]
        return super()._BoolOp(ast.copy_location(ast.BoolOp(node.op, parts), node), names)

    def _UnaryOp(self, node: ast.UnaryOp, names: Mapping[str, Any]) -> Any:
        known = ast.UnaryOp(node.op, self._known(node.operand, names))
        return super()._UnaryOp(ast.copy_location(known, node), names)

    def _IfExp(self, node: ast.IfExp, names: Mapping[str, Any]) -> Any:
        try:
            known = ast.IfExp(self._known(node.test, names), node.body, node.orelse)
        except CANNOT_BE_READ:
            self._perhaps([node.body, node.orelse], names)
            raise
        return super()._IfExp(ast.copy_location(known, node), names)

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, variables: Mapping[str, Any]) -> list[Any]:
        if any(isinstance(part, ast.Call) and _last(part.func) in ESTIMATORS for part in ast.walk(node.elt)):
            targets = [part for loop in node.generators for part in ast.walk(loop.target) if isinstance(part, ast.Name)]
            unknown = {target.id: Unread(target.id, target.lineno) for target in targets}
            self._perhaps([node.elt], {**variables, **unknown})
            raise NotPlain(text_of(node))
        return super()._ListComp(node, variables)

    _GeneratorExp = _ListComp

    def _perhaps(self, nodes: Sequence[ast.expr], names: Mapping[str, Any]) -> None:
        """Read expressions that may not run, or may run more than once."""
        self.open += 1
        for node in nodes:
            self.read(node, names)
        self.open -= 1

    def _rounds(self, loops: Sequence[ast.comprehension], variables: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for loop in loops[:1]:
            self._known(loop.iter, variables)
        for inner in super()._rounds(loops, variables):
            for condition in (condition for loop in loops for condition in loop.ifs):
                self._known(condition, inner)
            yield inner


def _last(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def limited(text: str) -> str:
    """The text. Raises NotPlain if it is too long."""
    if len(text) > MAX_LENGTH:
        raise NotPlain("too long")
    return text

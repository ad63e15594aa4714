"""The values of plain Python expressions and small methods, evaluated from a syntax tree: the file that holds them never runs."""

from __future__ import annotations

import ast
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_STEPS = 200_000
"""Most expressions that one check evaluates: a comprehension over a config's values needs thousands."""

MAX_LENGTH, MAX_NUMBER, MAX_EXPONENT = 10_000, 2**64, 64
"""Largest text or list, whole number and exponent that an expression may make: no setting needs more, and it could fill the memory."""

MAKERS = (ast.BinOp, ast.JoinedStr, ast.List, ast.ListComp, ast.GeneratorExp, ast.Tuple)
"""Expressions whose results may be larger than their parts."""

CALLS: tuple[Any, ...] = (
    *(abs, all, any, bool, dict, float, frozenset, int, isinstance, len, list, max, min, round, set, sorted, sum, tuple),
    *(math.ceil, math.floor, math.isfinite, math.isnan, math.log2, math.sqrt),
)  # fmt: skip
"""Functions without side effects, whose results are no larger than their arguments."""

METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        ["endswith", "isdigit", "lower", "removeprefix", "removesuffix", "split", "startswith", "strip", "upper"]
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count"}),
    tuple: frozenset({"count"}),
    float: frozenset({"is_integer"}),
}
"""Methods without side effects, by the exact type of their object."""

BUILTINS: Mapping[str, Any] = {
    made.__name__: made for made in (*CALLS, object, str, ValueError, TypeError) if made.__module__ == "builtins"
}

_OPERATORS: Mapping[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt},
    **{ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items},
    **{ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos},
}


class NotPlain(Exception):
    """A piece of code that is more than a plain expression; says where and what."""


class Undefined(Exception):
    """A file does not define a name."""


class Evaluator:
    """Evaluates the expressions of one file. What they would raise, such as a TypeError, is raised here too.

    Args:
        file: its name, for messages.
        names: looks up a name that is not a local variable; raises Undefined, and the name is then a builtin's, or NotPlain.
        attributes: gives an attribute of anything but a text, number or collection; raises NotPlain.
        trusted: whether a function that is not in CALLS may be called.
        steps: counts the expressions of everything that one check reads.
    """

    def __init__(
        self,
        file: str,
        names: Callable[[str], Any],
        attributes: Callable[[Any, str], Any],
        trusted: Callable[[Any], bool],
        steps: Iterator[int],
    ):
        self.file, self._names, self._attributes, self._trusted, self._steps = file, names, attributes, trusted, steps

    def value(self, node: ast.AST, variables: Mapping[str, Any]) -> Any:
        """An expression's value. Raises NotPlain."""
        if next(self._steps) > MAX_STEPS:
            raise self._not_plain(node, "takes too long")
        evaluate = getattr(self, f"_{type(node).__name__}", None)
        if evaluate is None:
            raise self._not_plain(node, "cannot be read without running it")
        result = evaluate(node, variables)
        if isinstance(node, MAKERS) and _is_large(result):
            raise self._not_plain(node, "is too large")
        return result

    def call(self, function: ast.FunctionDef, arguments: Mapping[str, Any]) -> Any:
        """What a function of assignments, conditions and plain expressions returns. Raises NotPlain."""
        return self._body(function.body, dict(arguments))[1]

    def _body(self, body: Sequence[ast.stmt], variables: dict[str, Any]) -> tuple[bool, Any]:
        """(whether it returned, what)."""
        for statement in body:
            if isinstance(statement, ast.Return):
                return True, None if statement.value is None else self.value(statement.value, variables)
            if isinstance(statement, ast.Expr):
                self.value(statement.value, variables)
            elif isinstance(statement, ast.Assign):
                value = self.value(statement.value, variables)
                for target in statement.targets:
                    self._assign(target, value, variables)
            elif isinstance(statement, ast.If):
                branch = statement.body if self.value(statement.test, variables) else statement.orelse
                returned, value = self._body(branch, variables)
                if returned:
                    return True, value
            elif isinstance(statement, ast.Raise) and statement.exc is not None:
                raise self._error(statement.exc, variables)
            elif not isinstance(statement, ast.Pass):
                raise self._not_plain(statement, "cannot be read without running it")
        return False, None

    def _error(self, node: ast.expr, variables: Mapping[str, Any]) -> Exception:
        """The exception of a `raise`."""
        if isinstance(node, ast.Call) and len(node.args) == 1:
            kind, text = self.value(node.func, variables), self.value(node.args[0], variables)
            if isinstance(kind, type) and issubclass(kind, (TypeError, ValueError)):
                return kind(text)
        raise self._not_plain(node, "is no ValueError with a text")

    def _assign(self, target: ast.expr, value: Any, variables: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            variables[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, (list, tuple)) and len(value) == len(target.elts):
            for part, item in zip(target.elts, value):
                self._assign(part, item, variables)
        else:
            raise self._not_plain(target, "cannot be assigned to without running it")

    def _not_plain(self, node: ast.AST, why: str) -> NotPlain:
        text = " ".join(ast.unparse(node).split())
        return NotPlain(
            f"{self.file}:{getattr(node, 'lineno', '?')}: {text if len(text) <= 60 else text[:57] + '...'} {why}"
        )

    # -- one method for each kind of node ------------------------------------------------------------------------------

    def _Constant(self, node: ast.Constant, _: Mapping[str, Any]) -> Any:
        return node.value

    def _Name(self, node: ast.Name, variables: Mapping[str, Any]) -> Any:
        if node.id in variables:
            return variables[node.id]
        try:
            return self._names(node.id)
        except Undefined:
            if node.id in BUILTINS:
                return BUILTINS[node.id]
        raise self._not_plain(node, "is not defined where it can be read")

    def _Attribute(self, node: ast.Attribute, variables: Mapping[str, Any]) -> Any:
        of = self.value(node.value, variables)
        if node.attr in METHODS.get(type(of), ()):
            return getattr(of, node.attr)
        return self._attributes(of, node.attr)

    def _Subscript(self, node: ast.Subscript, variables: Mapping[str, Any]) -> Any:
        return self.value(node.value, variables)[self.value(node.slice, variables)]

    def _Slice(self, node: ast.Slice, variables: Mapping[str, Any]) -> slice:
        return slice(*(part and self.value(part, variables) for part in (node.lower, node.upper, node.step)))

    def _Tuple(self, node: ast.Tuple, variables: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(self._items(node.elts, variables))

    def _List(self, node: ast.List, variables: Mapping[str, Any]) -> list[Any]:
        return self._items(node.elts, variables)

    def _Set(self, node: ast.Set, variables: Mapping[str, Any]) -> set[Any]:
        return set(self._items(node.elts, variables))

    def _Dict(self, node: ast.Dict, variables: Mapping[str, Any]) -> dict[Any, Any]:
        if None in node.keys:
            raise self._not_plain(node, "cannot be read without running it")
        return {
            self.value(key, variables): self.value(item, variables) for key, item in zip(node.keys, node.values) if key
        }

    def _BinOp(self, node: ast.BinOp, variables: Mapping[str, Any]) -> Any:
        left, right = self.value(node.left, variables), self.value(node.right, variables)
        kinds = {type(left), type(right)}
        numbers = kinds <= {int, float, bool}
        joined = isinstance(node.op, ast.Add) and len(kinds) == 1 and kinds <= {str, list, tuple}
        union = isinstance(node.op, ast.BitOr) and all(map(_is_type, (left, right)))
        if type(node.op) not in _OPERATORS or not (numbers or joined or union):
            raise self._not_plain(node, "cannot be read without running it")
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise self._not_plain(node, "is too large")
        return _OPERATORS[type(node.op)](left, right)

    def _UnaryOp(self, node: ast.UnaryOp, variables: Mapping[str, Any]) -> Any:
        if type(node.op) not in _OPERATORS:
            raise self._not_plain(node, "cannot be read without running it")
        return _OPERATORS[type(node.op)](self.value(node.operand, variables))

    def _BoolOp(self, node: ast.BoolOp, variables: Mapping[str, Any]) -> Any:
        for part in node.values:
            result = self.value(part, variables)
            if bool(result) != isinstance(node.op, ast.And):
                break
        return result

    def _Compare(self, node: ast.Compare, variables: Mapping[str, Any]) -> bool:
        left = self.value(node.left, variables)
        for kind, comparator in zip(node.ops, node.comparators):
            right = self.value(comparator, variables)
            if not _OPERATORS[type(kind)](left, right):
                return False
            left = right
        return True

    def _IfExp(self, node: ast.IfExp, variables: Mapping[str, Any]) -> Any:
        return self.value(node.body if self.value(node.test, variables) else node.orelse, variables)

    def _JoinedStr(self, node: ast.JoinedStr, variables: Mapping[str, Any]) -> str:
        return "".join(str(self.value(part, variables)) for part in node.values)

    def _FormattedValue(self, node: ast.FormattedValue, variables: Mapping[str, Any]) -> str:
        value = self.value(node.value, variables)
        form = self.value(node.format_spec, variables) if node.format_spec else ""
        if not isinstance(value, (str, int, float, type(None))) or not re.fullmatch(r",?(\.\d\d?)?[a-z%]?", form):
            raise self._not_plain(node.value, "cannot be written into a text without running it")
        return format(repr(value) if node.conversion == ord("r") else value, form)

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, variables: Mapping[str, Any]) -> list[Any]:
        return [self.value(node.elt, inner) for inner in self._rounds(node.generators, dict(variables))]

    _GeneratorExp = _ListComp

    def _SetComp(self, node: ast.SetComp, variables: Mapping[str, Any]) -> set[Any]:
        return set(self._ListComp(node, variables))

    def _rounds(self, loops: Sequence[ast.comprehension], variables: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The variables of each round of a comprehension."""
        if not loops:
            yield variables
            return
        first, *inner = loops
        for item in list(self.value(first.iter, variables)):
            self._assign(first.target, item, variables)
            if all(self.value(condition, variables) for condition in first.ifs):
                yield from self._rounds(inner, variables)

    def _Call(self, node: ast.Call, variables: Mapping[str, Any]) -> Any:
        function = self.value(node.func, variables)
        known = any(function is allowed for allowed in CALLS) or self._is_method(function) or self._trusted(function)
        if not known or any(keyword.arg is None for keyword in node.keywords):
            raise self._not_plain(node, "cannot be read without running it")
        arguments = self._items(node.args, variables)
        if function is sum and len(arguments) != 1:  # of lists
            raise self._not_plain(node, "cannot be read without running it")
        return function(*arguments, **{str(word.arg): self.value(word.value, variables) for word in node.keywords})

    def _is_method(self, function: Any) -> bool:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        return isinstance(function, types.BuiltinMethodType) and name in METHODS.get(type(owner), ())

    def _Lambda(self, node: ast.Lambda, variables: Mapping[str, Any]) -> Callable[[], Any]:
        if ast.unparse(node.args):
            raise self._not_plain(node, "cannot be read without running it")
        self.value(node.body, variables)
        return lambda: self.value(node.body, variables)

    def _items(self, nodes: Sequence[ast.expr], variables: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self.value(node.value, variables)
            else:
                found.append(self.value(node, variables))
        return found


def _is_large(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) > MAX_NUMBER
    return isinstance(value, (str, list, tuple)) and len(value) > MAX_LENGTH


def _is_type(value: Any) -> bool:
    known = isinstance(value, (type, types.UnionType, types.GenericAlias)) or typing.get_origin(value) is not None
    return known or value is None or value is Any

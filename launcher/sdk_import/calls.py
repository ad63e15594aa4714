"""The estimators that a script makes and what it fits them on, read from its syntax tree: nothing runs."""

from __future__ import annotations

import ast
import itertools
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from launcher.config.expressions import Evaluator, NotPlain, Undefined
from launcher.sdk_import.objects import Call, Estimator, Symbol, Unread, holds_unread
from launcher.sdk_import.source import Source

SDKS = ("sagemaker", "boto3")
"""Packages whose classes and functions are calls of interest."""

ESTIMATORS = ("PyTorch", "HuggingFace", "Estimator", "ModelTrainer")
"""Names of the classes of SDK v2 and v3 that start a training job with a script."""

STARTS = ("fit", "train")
"""Their methods that start it."""

CANNOT_BE_READ = (ArithmeticError, AttributeError, LookupError, NotPlain, TypeError, ValueError)
"""What evaluating an expression may raise where a value in it is not what it seems."""


def estimators(source: Source) -> list[Estimator]:
    """Every estimator that a script makes, in the order of its lines.

    Raises:
        UserError: it is not Python.
    """
    tree = source.parsed()
    reader = _Reader(source.name)
    reader.module(tree)
    return sorted(reader.found, key=lambda one: one.made.line)


class _Reader(Evaluator):
    """Follows a script's statements from top to bottom. What it cannot know becomes Unread, and reading goes on."""

    def __init__(self, file: str):
        super().__init__(file, self._no_name, self._attribute_of, lambda _: False, itertools.count())
        self.found: list[Estimator] = []
        self._by_call: dict[int, Estimator] = {}
        """By the identity of the call, which lives as long as the estimator."""
        self._by_node: dict[int, Call] = {}
        """Calls that made an estimator: an expression that is read twice makes it once."""
        self._functions: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, dict[str, Any]]] = []

    def module(self, tree: ast.Module) -> None:
        names: dict[str, Any] = {}
        self._follow(tree.body, names)
        for function, outer in self._functions:  # bodies see all that the module defines; the list grows meanwhile
            inner = dict(outer)
            given = function.args
            positional = [*given.posonlyargs, *given.args]
            for argument in [*positional, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]:
                inner[argument.arg] = Unread(argument.arg, argument.lineno)
            for argument, default in zip(positional[::-1], given.defaults[::-1]):
                inner[argument.arg] = self.value(default, outer)
            for argument, preset in zip(given.kwonlyargs, given.kw_defaults):
                if preset is not None:
                    inner[argument.arg] = self.value(preset, outer)
            self._follow(function.body, inner)

    # -- statements ----------------------------------------------------------------------------------------------------

    def _follow(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> None:
        for statement in body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                names.update(_imported(statement))
            elif isinstance(statement, ast.Assign):
                value = self.value(statement.value, names)
                for target in statement.targets:
                    self._bind(target, value, names)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._bind(statement.target, self.value(statement.value, names), names)
            elif isinstance(statement, ast.AugAssign):
                self._bind(statement.target, self._changed(statement, names), names)
            elif isinstance(statement, ast.Expr):
                self._expression(statement.value, names)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names[statement.name] = Unread(statement.name, statement.lineno)
                self._functions.append((statement, names))
            elif isinstance(statement, ast.ClassDef):
                self._class(statement, names)
            elif isinstance(statement, ast.If):
                self._branch(statement, names)
            else:
                self._parts(statement, names)

    def _class(self, statement: ast.ClassDef, names: dict[str, Any]) -> None:
        """A class's body; its methods see what is around the class."""
        methods = len(self._functions)
        self._follow(statement.body, dict(names))
        self._functions[methods:] = [(function, names) for function, _ in self._functions[methods:]]

    def _parts(self, statement: ast.stmt, names: dict[str, Any]) -> None:
        """A loop, `with`, `try` or `return`: its expressions, then its bodies once."""
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            self._bind(statement.target, Unread(ast.unparse(statement.target), statement.lineno), names)
        for item in getattr(statement, "items", []):
            made = self.value(item.context_expr, names)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, made, names)
        if isinstance(statement, ast.Return) and statement.value is not None:
            self._expression(statement.value, names)
        for body in ("body", "handlers", "orelse", "finalbody"):
            for part in getattr(statement, body, []):
                self._follow(part.body if isinstance(part, ast.ExceptHandler) else [part], names)

    def _branch(self, statement: ast.If, names: dict[str, Any]) -> None:
        """The branch that is taken; where that is open, both, and a name that they set differently is unread."""
        if ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__"):
            return self._follow(statement.body, names)
        test = self.value(statement.test, names)
        if not isinstance(test, (Unread, Call, Symbol)):
            return self._follow(statement.body if test else statement.orelse, names)
        one, other = deepcopy(names, _kept(self._by_call)), deepcopy(names, _kept(self._by_call))
        self._follow(statement.body, one)
        self._follow(statement.orelse, other)
        names.update(_common(one, other, statement.lineno))
        return None

    def _bind(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, (list, tuple)) and len(value) == len(target.elts) else None
            for place, part in enumerate(target.elts):
                self._bind(part, parts[place] if parts else Unread(ast.unparse(part), target.lineno), names)
        elif isinstance(target, ast.Subscript):
            holder, key = self.value(target.value, names), self.value(target.slice, names)
            if isinstance(holder, (dict, list)):
                try:
                    holder[key] = value
                except CANNOT_BE_READ:
                    self._forget(target.value, names)

    def _forget(self, node: ast.expr, names: dict[str, Any]) -> None:
        """What a name holds is no longer known."""
        if isinstance(node, ast.Name):
            names[node.id] = Unread(node.id, node.lineno)

    def _changed(self, statement: ast.AugAssign, names: dict[str, Any]) -> Any:
        held, given = self.value(statement.target, names), self.value(statement.value, names)
        if isinstance(statement.op, ast.BitOr) and isinstance(held, dict) and isinstance(given, dict):
            return {**held, **given}
        joined = ast.BinOp(statement.target, statement.op, statement.value)
        return self.value(ast.copy_location(joined, statement), names)

    def _expression(self, node: ast.expr, names: dict[str, Any]) -> None:
        """A statement that is one call: it may start an estimator, or change a dictionary or a list."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            self.value(node, names)
            return
        of, method = self.value(node.func.value, names), node.func.attr
        call = self._made(f"{method}", node, names)
        if isinstance(of, Call) and id(of) in self._by_call:
            if method in STARTS:
                self._by_call[id(of)].starts.append(call)
            elif method == "set_hyperparameters":
                self._by_call[id(of)].hyperparameters.update(call.keywords)
        elif isinstance(of, dict) and method == "update":
            for given in call.positional:  # what else an unread one gives is noted, as in a call
                of.update(given if isinstance(given, dict) else {f"**{given}": Unread(str(given), node.lineno)})
            of.update(call.keywords)
        elif isinstance(of, list) and method in ("append", "extend") and len(call.positional) == 1:
            [given] = call.positional
            of += (
                [given]
                if method == "append"
                else given
                if isinstance(given, (list, tuple))
                else [Unread(str(given), node.lineno)]
            )
        else:
            self.value(node, names)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def value(self, node: ast.AST, variables: Mapping[str, Any]) -> Any:
        """An expression's value; Unread where it is known only when the script runs."""
        try:
            return super().value(node, variables)
        except CANNOT_BE_READ:
            return Unread(" ".join(ast.unparse(node).split()), getattr(node, "lineno", 0))
        except RecursionError:
            return Unread("a nested expression", getattr(node, "lineno", 0))

    def _no_name(self, name: str) -> Any:
        raise Undefined(name)

    def _attribute_of(self, of: Any, name: str) -> Any:
        if isinstance(of, Symbol):
            return Symbol(f"{of.name}.{name}")
        raise NotPlain(name)

    def _Call(self, node: ast.Call, variables: Mapping[str, Any]) -> Any:
        function = self.value(node.func, variables)
        if isinstance(function, Symbol):
            return self._of_a_package(function.name, node, variables)
        if (
            isinstance(node.func, ast.Attribute) and node.func.attr == "upload_data"
        ):  # of a session, however it was made
            return self._made("sagemaker.Session.upload_data", node, variables)
        given = [self.value(part, variables) for part in (*node.args, *(word.value for word in node.keywords))]
        words = {str(word.arg): part for word, part in zip(node.keywords, given[len(node.args) :])}
        if function is dict and not node.args and None not in [word.arg for word in node.keywords]:
            return words
        if holds_unread(given):
            raise NotPlain(ast.unparse(node))
        if (
            isinstance(function, Unread)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("format", "join")
        ):
            of = self.value(node.func.value, variables)
            if isinstance(of, str):
                return of.join(given[0]) if node.func.attr == "join" else _formatted(of, given[: len(node.args)], words)
        parts = [ast.copy_location(ast.Constant(part), node) for part in given]
        keywords = [ast.keyword(word.arg, part) for word, part in zip(node.keywords, parts[len(node.args) :])]
        known = ast.Call(node.func, list(parts[: len(node.args)]), keywords)
        return super()._Call(ast.copy_location(known, node), variables)

    def _of_a_package(self, name: str, node: ast.Call, variables: Mapping[str, Any]) -> Any:
        """A call of the SDK; or of Python's own where it joins paths."""
        if id(node) in self._by_node:
            return self._by_node[id(node)]
        if name.partition(".")[0] in SDKS:
            call = self._made(name, node, variables)
            if call.short in ESTIMATORS and name.startswith("sagemaker."):
                estimator = Estimator(call)
                self.found.append(estimator)
                self._by_call[id(call)], self._by_node[id(node)] = estimator, call
            return call
        given = [self.value(part, variables) for part in node.args]
        if name in ("os.path.join", "pathlib.Path", "pathlib.PurePath") and all(
            isinstance(part, str) for part in given
        ):
            return os.path.join(*given)  # noqa: PTH118 - as the script joins them
        raise NotPlain(ast.unparse(node))

    def _made(self, name: str, node: ast.Call, variables: Mapping[str, Any]) -> Call:
        keywords: dict[str, Any] = {}
        for word in node.keywords:
            given = deepcopy(self.value(word.value, variables), _kept(self._by_call))
            if word.arg is not None:
                keywords[word.arg] = given
            elif isinstance(given, dict) and all(isinstance(key, str) for key in given):
                keywords |= given
            else:
                keywords[f"**{ast.unparse(word.value)}"] = Unread(ast.unparse(word.value), node.lineno)
        positional: list[Any] = []
        for argument in node.args:
            positional.append(deepcopy(self.value(argument, variables), _kept(self._by_call)))
        return Call(name, tuple(positional), keywords, node.lineno, " ".join(ast.unparse(node).split()))

    def _Dict(self, node: ast.Dict, variables: Mapping[str, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values):
            value = self.value(item, variables)
            if key is not None:
                made[self.value(key, variables)] = value
            elif isinstance(value, dict):
                made |= value
            else:
                raise NotPlain(ast.unparse(node))
        return made

    def _known(self, node: ast.expr, variables: Mapping[str, Any]) -> ast.Constant:
        """An expression's value, as a constant that is not evaluated again. Raises NotPlain where Python could not compare or join it."""
        value = self.value(node, variables)
        if holds_unread([value]):
            raise NotPlain(ast.unparse(node))
        return ast.copy_location(ast.Constant(value), node)

    def _JoinedStr(self, node: ast.JoinedStr, variables: Mapping[str, Any]) -> str:
        parts = [
            ast.copy_location(
                ast.FormattedValue(self._known(part.value, variables), part.conversion, part.format_spec), part
            )
            if isinstance(part, ast.FormattedValue)
            else part
            for part in node.values
        ]
        return super()._JoinedStr(ast.copy_location(ast.JoinedStr(parts), node), variables)

    def _BinOp(self, node: ast.BinOp, variables: Mapping[str, Any]) -> Any:
        left, right = self._known(node.left, variables), self._known(node.right, variables)
        if isinstance(left.value, str) and isinstance(node.op, ast.Div) and isinstance(right.value, str):  # of pathlib
            return os.path.join(left.value, right.value)  # noqa: PTH118
        if isinstance(left.value, str) and isinstance(node.op, ast.Mod) and re.fullmatch(r"([^%]|%[sd])*", left.value):
            return left.value % right.value
        return super()._BinOp(ast.copy_location(ast.BinOp(left, node.op, right), node), variables)

    def _Compare(self, node: ast.Compare, variables: Mapping[str, Any]) -> bool:
        left = self._known(node.left, variables)
        others: list[ast.expr] = [self._known(part, variables) for part in node.comparators]
        return super()._Compare(ast.copy_location(ast.Compare(left, node.ops, others), node), variables)

    def _BoolOp(self, node: ast.BoolOp, variables: Mapping[str, Any]) -> Any:
        parts: list[ast.expr] = [self._known(part, variables) for part in node.values]
        return super()._BoolOp(ast.copy_location(ast.BoolOp(node.op, parts), node), variables)

    def _UnaryOp(self, node: ast.UnaryOp, variables: Mapping[str, Any]) -> Any:
        known = ast.UnaryOp(node.op, self._known(node.operand, variables))
        return super()._UnaryOp(ast.copy_location(known, node), variables)

    def _IfExp(self, node: ast.IfExp, variables: Mapping[str, Any]) -> Any:
        known = ast.IfExp(self._known(node.test, variables), node.body, node.orelse)
        return super()._IfExp(ast.copy_location(known, node), variables)


def _imported(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Symbol]]:
    """(name in the script, what it stands for)."""
    for item in statement.names:
        if isinstance(statement, ast.Import):
            name = item.name if item.asname else item.name.partition(".")[0]
            yield item.asname or name, Symbol(name)
        elif not statement.level and item.name != "*":
            yield item.asname or item.name, Symbol(f"{statement.module}.{item.name}")


def _common(one: Mapping[str, Any], other: Mapping[str, Any], line: int) -> dict[str, Any]:
    """What two branches agree on; the rest is Unread."""
    made: dict[str, Any] = {}
    for name in [*one, *(name for name in other if name not in one)]:
        left, right = one.get(name, made), other.get(name, made)  # `made` itself is nobody's value
        if isinstance(left, dict) and isinstance(right, dict) and made is not left and made is not right:
            made[name] = _common(left, right, line)
        else:
            made[name] = left if left is not made and left == right else Unread(str(name), line)
    return made


def _formatted(text: str, positional: Sequence[Any], words: Mapping[str, Any]) -> str:
    """`text.format(…)` with plain fields only, which reach into nothing."""
    if not re.fullmatch(r"([^{}]|\{\{|\}\}|\{\w*\})*", text):
        raise NotPlain(text)
    return text.format(*positional, **words)


def _kept(calls: Mapping[int, Estimator]) -> dict[int, Any]:
    """A memo of deepcopy by which estimators stay themselves."""
    return {place: estimator.made for place, estimator in calls.items()}

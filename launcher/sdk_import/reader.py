"""The calls of a script that say what job it starts: estimators, their methods, and changes to their arguments."""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.config.expressions import NotPlain
from launcher.config.yaml_file import MAX_VALUES
from launcher.sdk_import.expressions import CANNOT_BE_READ, ESTIMATORS, Expressions, limited
from launcher.sdk_import.objects import (
    Call,
    Estimator,
    Symbol,
    Unread,
    invalidate,
    is_plain,
    size,
    snapshot,
    text_of,
)

SDKS = ("sagemaker", "boto3")
"""Packages whose classes and functions are calls of interest."""

STARTS = ("fit", "train")
"""Estimator methods that start a job."""

KEPT_BY_REFERENCE = ("hyperparameters", "environment")
"""Dictionaries that SDK v2's estimators do not copy: changes before a start count."""

LEAVE_ALONE = {
    *(
        "print",
        "len",
        "str",
        "repr",
        "sorted",
        "list",
        "dict",
        "tuple",
        "set",
        "type",
        "isinstance",
        "id",
        "format",
        "any",
        "all",
    ),
    *("bool", "int", "float", "min", "max", "sum", "enumerate", "zip", "display", "pprint", "logger", "log", "logging"),
    *("json", "os", "pathlib", "time", "datetime", "math", "copy", "yaml", "sagemaker", "boto3"),
}
"""Functions, and the first names of modules and loggers, that change no dictionary or list passed to them."""

LOOKS = {"get", "items", "keys", "values", "copy", "count", "index"}
"""Methods of dictionaries and lists that change nothing."""


class Reader(Expressions):
    """Reads expressions and the calls in them, and follows what these make and change."""

    def __init__(self, file: str):
        super().__init__(file)
        self.found: list[Estimator] = []
        self._by_call: dict[int, Estimator] = {}
        """id() of the call that made it, which lives as long as the estimator -> estimator."""
        self._by_node: dict[int, Any] = {}
        """id() of a call's node -> its result: an expression that is read twice makes and changes something once."""

    def _Call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        if id(node) in self._by_node:
            return self._by_node[id(node)]
        of = self.read(node.func.value, names) if isinstance(node.func, ast.Attribute) else None
        function = self.read(node.func, names)
        if isinstance(function, Symbol) and function.name.partition(".")[0] in SDKS:
            return self._of_the_sdk(function.name, node, names)
        if isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if method not in LOOKS and self.changes_an_estimator(node.func.value, names, text_of(node)):
                raise NotPlain(text_of(node))
            if isinstance(of, Call) and id(of) in self._by_call:
                return self._of_an_estimator(self._by_call[id(of)], method, node, names)
            if method == "upload_data":  # of a session, however it was made
                return self._made("sagemaker.Session.upload_data", node, names)
            if isinstance(of, (dict, list)) and method not in LOOKS:
                return self._changing(of, method, node, names)
        given = [self.read(part, names) for part in (*node.args, *(word.value for word in node.keywords))]
        if not (isinstance(function, type) or _root(node.func) in LEAVE_ALONE or isinstance(of, str)):
            for part in given:
                if isinstance(part, (dict, list)) and not callable(function):
                    invalidate(part, text_of(node), node.lineno)
        return self._plain_call(function, of, node, given, names)

    def changes_an_estimator(self, node: ast.expr, names: Mapping[str, Any], text: str) -> bool:
        """Note a change to what an estimator's attribute holds, such as `estimator.environment`; return whether it was one.

        Args:
            node: what is changed.
            text: what changes it.
        """
        attribute = ""
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            attribute = node.attr if isinstance(node, ast.Attribute) else attribute
            node = node.value
        of = names.get(node.id) if attribute and isinstance(node, ast.Name) else None
        if not isinstance(of, Call) or id(of) not in self._by_call:
            return False
        of.keywords[attribute.lstrip("_")] = Unread(f"changed later, by {text}", getattr(node, "lineno", 0))
        return True

    def _plain_call(self, function: Any, of: Any, node: ast.Call, given: list[Any], names: Mapping[str, Any]) -> Any:
        """A call of plain Python, whose arguments must be known; those of `dict(…)` need not be."""
        words = {str(word.arg): part for word, part in zip(node.keywords, given[len(node.args) :])}
        if function is dict and not node.args and None not in [word.arg for word in node.keywords]:
            return words
        if not is_plain(given):
            raise NotPlain(text_of(node))
        positional = given[: len(node.args)]
        if isinstance(function, Symbol) and function.name in ("os.path.join", "pathlib.Path", "pathlib.PurePath"):
            return limited(os.path.join(*positional))
        if isinstance(of, str) and isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "join"):
            return limited(of.join(given[0]) if node.func.attr == "join" else _formatted(of, positional, words))
        if isinstance(of, dict) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and positional:
                return _looked_up(of, *positional)
            if node.func.attr == "copy":
                return snapshot(of)
            if not is_plain(of):
                raise NotPlain(text_of(node))
        parts = [ast.copy_location(ast.Constant(part), node) for part in given]
        keywords = [ast.keyword(word.arg, part) for word, part in zip(node.keywords, parts[len(node.args) :])]
        known = ast.Call(node.func, list(parts[: len(node.args)]), keywords)
        return super()._Call(ast.copy_location(known, node), names)

    def _of_the_sdk(self, name: str, node: ast.Call, names: Mapping[str, Any]) -> Call:
        call = self._made(name, node, names)
        self._by_node[id(node)] = call
        if call.short in ESTIMATORS and name.startswith("sagemaker."):
            estimator = Estimator(call)
            estimator.shared = {
                word.arg: held
                for word in node.keywords
                if word.arg in KEPT_BY_REFERENCE and isinstance(held := self.read(word.value, names), dict)
            }
            self.found.append(estimator)
            self._by_call[id(call)] = estimator
        return call

    def _of_an_estimator(self, estimator: Estimator, method: str, node: ast.Call, names: Mapping[str, Any]) -> Any:
        call = self._made(method, node, names)
        if method in STARTS:
            if not estimator.starts:
                for name, held in estimator.shared.items():
                    if not isinstance(estimator.made.keywords.get(name), Unread):
                        estimator.made.keywords[name] = snapshot(held)
            estimator.starts.append(call)
        elif method.startswith(("with_", "set_")) and estimator.starts:
            return Unread(call.text, node.lineno)  # for a later start than the one that is read
        elif method.startswith(("with_", "set_")):
            estimator.changes.append(call)
            if method.startswith("with_"):  # it returns the estimator
                self._by_node[id(node)] = estimator.made
                return estimator.made
        self._by_node[id(node)] = Unread(call.text, node.lineno)
        return self._by_node[id(node)]

    def _made(self, name: str, node: ast.Call, names: Mapping[str, Any]) -> Call:
        """A call with its arguments as they are now."""
        keywords: dict[str, Any] = {}
        for word in node.keywords:
            given = self._now(word.value, names)
            if word.arg is not None:
                keywords[word.arg] = given
            elif isinstance(given, dict) and all(isinstance(key, str) for key in given):
                keywords |= given
            else:
                keywords[f"**{text_of(word.value)}"] = Unread(text_of(word.value), node.lineno)
        positional = [self._now(argument, names) for argument in node.args]
        return Call(name, positional, keywords, node.lineno, text_of(node), not self.open)

    def _now(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        try:
            value = snapshot(self.read(node, names))
            if size(value) > MAX_VALUES:
                raise NotPlain("too many parts")
            return value
        except CANNOT_BE_READ:
            return Unread(text_of(node), node.lineno)

    def _changing(self, of: dict[Any, Any] | list[Any], method: str, node: ast.Call, names: Mapping[str, Any]) -> Any:
        """Follow a method that changes a dictionary or list. An unusual method invalidates it, and so may an unknown argument."""
        call = self._made(method, node, names)
        given = call.positional
        result: Any = None
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        if isinstance(of, dict) and method == "update" and not starred:
            for part in given:  # what else an unread one gives is noted, as in a call
                if not isinstance(part, dict):
                    invalidate(of, str(part), node.lineno)
                else:
                    of.update(part)
            of.update(call.keywords)
        elif (
            isinstance(of, dict)
            and method in ("pop", "setdefault")
            and given
            and isinstance(given[0], str)
            and not starred
        ):
            otherwise = given[1] if len(given) > 1 else None
            if method == "pop":
                result = of.pop(given[0], otherwise)
            elif any(str(key).startswith("**") for key in of) and given[0] not in of:
                invalidate(of, call.text, node.lineno)
            else:
                result = of.setdefault(given[0], otherwise)
        elif method == "clear":
            of.clear()
        elif isinstance(of, list) and method in ("append", "extend") and len(given) == 1 and not starred:
            more = (
                [given[0]]
                if method == "append"
                else given[0]
                if isinstance(given[0], (list, tuple))
                else [Unread(str(given[0]), node.lineno)]
            )
            if len(of) + len(more) > MAX_VALUES:
                invalidate(of, call.text, node.lineno)
            else:
                of += more
        else:
            invalidate(of, call.text, node.lineno)
            result = Unread(call.text, node.lineno)
        self._by_node[id(node)] = result
        return result


def imported(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Symbol]]:
    """(name in the script, what it stands for)."""
    for item in statement.names:
        if isinstance(statement, ast.Import):
            name = item.name if item.asname else item.name.partition(".")[0]
            yield item.asname or name, Symbol(name)
        elif not statement.level and item.name != "*":
            yield item.asname or item.name, Symbol(f"{statement.module}.{item.name}")


def _root(node: ast.expr) -> str:
    """The first part of a dotted name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _looked_up(of: Mapping[Any, Any], key: Any, otherwise: Any = None) -> Any:
    """`of.get(key, otherwise)`. Raises NotPlain if the key may be there but unread."""
    found = of.get(key, otherwise)
    if isinstance(found, Unread) or (key not in of and any(str(name).startswith("**") for name in of)):
        raise NotPlain(str(key))
    return found


def _formatted(text: str, positional: Sequence[Any], words: Mapping[str, Any]) -> str:
    """`text.format(…)` with plain fields only, without access to attributes or items."""
    if not re.fullmatch(r"([^{}]|\{\{|\}\}|\{\w*\})*", text):
        raise NotPlain(text)
    return text.format(*positional, **words)

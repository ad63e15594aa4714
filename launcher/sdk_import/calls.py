"""The estimators that a script makes and what it fits them on, read from its syntax tree without running it.

A value that is read is certain. Wherever the script may have changed a value in a way that is not followed here, it becomes Unread.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from launcher.config.expressions import NotPlain
from launcher.config.issues import mistake
from launcher.config.yaml_file import MAX_VALUES
from launcher.sdk_import.objects import Call, Estimator, Unread, invalidate, is_plain, same, snapshot, text_of
from launcher.sdk_import.reader import LOOKS, Reader, imported
from launcher.sdk_import.source import Source

MAIN_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")

Names = dict[str, Any]


def estimators(source: Source) -> list[Estimator]:
    """Every estimator that a script makes, in the order of its lines.

    Raises:
        UserError: it is not Python, or too deeply nested.
    """
    tree = source.parsed()
    follower = _Follower(source.name, tree)
    try:
        follower.module(tree)
    except RecursionError:
        raise mistake("FILE", f"{source.name}: too deeply nested", "import the part that makes the estimator") from None
    return sorted(follower.reader.found, key=lambda one: one.made.line)


class _Follower:
    """Follows a script's statements from top to bottom."""

    def __init__(self, file: str, tree: ast.Module):
        self.reader = Reader(file)
        self._is_top = True
        """Whether the statements being followed are outside of functions."""
        self._often = _bound_often(tree)
        self._functions: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, Names, Names]] = []
        """Functions, the names around them, and the values of their defaults."""
        self._elsewhere = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        """Outer names that a function changes, at a time that is not followed."""
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._elsewhere |= _changed_by(node)
        self._open = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.NamedExpr)}
        """Names that `:=` sets, which is not followed."""
        self._calls: dict[str, list[ast.Call]] = {}
        self._class_of: dict[int, ast.ClassDef] = {}
        """id() of a method's definition, which lives as long as the tree -> its class."""
        called = set[int]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                self._calls.setdefault(name, []).append(node)
                called.add(id(node.func))
            elif isinstance(node, ast.ClassDef):
                self._class_of |= {id(part): node for part in node.body if isinstance(part, ast.FunctionDef)}
        self._passed_on = {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and id(node) not in called
        }
        """Names that are read without being called, such as a function given to another function."""

    def module(self, tree: ast.Module) -> None:
        self._follow(tree.body, {})
        self._is_top = False
        for function, around, defaults in self._functions:  # the list grows meanwhile
            inner = {**around, **{name: Unread(name, function.lineno) for name in self._often & around.keys()}}
            inner |= self._parameters(function, defaults)
            self._follow(function.body, inner)

    def _parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef, defaults: Names) -> Names:
        """A parameter's value: its default if no call in the script gives it, the constant that the only call gives, else Unread."""
        given = function.args
        places = [argument.arg for argument in (*given.posonlyargs, *given.args)]
        every = [*places, *(argument.arg for argument in given.kwonlyargs)]
        every += [argument.arg for argument in (given.vararg, given.kwarg) if argument is not None]
        calls, within = self._calls.get(function.name, []), self._class_of.get(id(function))
        passed_on = function.name in self._passed_on
        if within is not None:
            places = places[1:]  # the object itself
            if function.name == "__init__":
                calls = [*calls, *self._calls.get(within.name, [])]
                # also if another class has it as a base, or calls its base's
                passed_on = within.name in self._passed_on or "__init__" in self._calls
        found: Names = {}
        for name in every:
            place = places.index(name) if name in places else None
            passed = [_passed(call, name, place) for call in calls]
            written = passed[0] if len(passed) == 1 else None
            if function.decorator_list or passed_on:  # which may give anything
                found[name] = Unread(name, function.lineno)
            elif name in defaults and all(one is None for one in passed):
                found[name] = defaults[name]
            elif isinstance(written, ast.Constant):
                found[name] = written.value
            else:
                found[name] = Unread(text_of(written) if written is not None else name, function.lineno)
        return found

    # -- statements ----------------------------------------------------------------------------------------------------

    def _follow(self, body: Sequence[ast.stmt], names: Names) -> None:
        for statement in body:
            follow: Callable[[Any, Names], None] = getattr(self, f"_{type(statement).__name__}", self._other)
            follow(statement, names)

    def _Import(self, statement: ast.Import, names: Names) -> None:
        names.update(imported(statement))

    def _ImportFrom(self, statement: ast.ImportFrom, names: Names) -> None:
        names.update(imported(statement))

    def _Assign(self, statement: ast.Assign, names: Names) -> None:
        value = self.reader.read(statement.value, names)
        for target in statement.targets:
            self._bind(target, value, names)

    def _AnnAssign(self, statement: ast.AnnAssign, names: Names) -> None:
        if statement.value is not None:
            self._bind(statement.target, self.reader.read(statement.value, names), names)

    def _AugAssign(self, statement: ast.AugAssign, names: Names) -> None:
        held, given = self.reader.read(statement.target, names), self.reader.read(statement.value, names)
        if isinstance(held, dict) and isinstance(statement.op, ast.BitOr) and isinstance(given, dict):
            held.update(given)
        elif isinstance(held, (dict, list)):
            joined = isinstance(held, list) and isinstance(statement.op, ast.Add) and isinstance(given, list)
            if joined and is_plain(given) and len(held) + len(given) <= MAX_VALUES:
                held += given
            else:
                invalidate(held, text_of(statement), statement.lineno)
        else:
            whole = ast.copy_location(ast.BinOp(statement.target, statement.op, statement.value), statement)
            self._bind(statement.target, self.reader.read(whole, names), names)

    def _Expr(self, statement: ast.Expr, names: Names) -> None:
        self.reader.read(statement.value, names)

    def _Return(self, statement: ast.Return, names: Names) -> None:
        if statement.value is not None:
            self.reader.read(statement.value, names)

    def _FunctionDef(self, statement: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> None:
        given = statement.args
        positional = [*given.posonlyargs, *given.args]
        pairs = [*zip(positional[::-1], given.defaults[::-1]), *zip(given.kwonlyargs, given.kw_defaults)]
        defaults = {argument.arg: self.reader.read(value, names) for argument, value in pairs if value is not None}
        names[statement.name] = Unread(statement.name, statement.lineno)
        self._functions.append((statement, names, defaults))

    _AsyncFunctionDef = _FunctionDef

    def _ClassDef(self, statement: ast.ClassDef, names: Names) -> None:
        """Follow a class's body. Its methods see the names around the class."""
        methods = len(self._functions)
        self._follow(statement.body, dict(names))
        self._functions[methods:] = [(function, names, defaults) for function, _, defaults in self._functions[methods:]]

    def _If(self, statement: ast.If, names: Names) -> None:
        """Follow the branch that is taken. If that is unknown, follow both; what they do differently becomes Unread."""
        test = self.reader.read(statement.test, names)
        if text_of(statement.test) in MAIN_GUARDS:
            self._follow(statement.body, names)
        elif is_plain(test):
            self._follow(statement.body if test else statement.orelse, names)
        else:
            self._either([statement.body, statement.orelse], names, statement.lineno)

    def _Try(self, statement: ast.Try, names: Names) -> None:
        bodies = [[*statement.body, *statement.orelse], *(handler.body for handler in statement.handlers)]
        for handler in statement.handlers:
            if handler.name is not None:
                names[handler.name] = Unread(handler.name, handler.lineno)
        self._either(bodies, names, statement.lineno)
        self._follow(statement.finalbody, names)

    _TryStar = _Try

    def _For(self, statement: ast.For | ast.AsyncFor, names: Names) -> None:
        self._bind(statement.target, Unread(text_of(statement.target), statement.lineno), names)
        self._again(statement, names)

    _AsyncFor = _For

    def _While(self, statement: ast.While, names: Names) -> None:
        self._again(statement, names)

    def _again(self, statement: ast.For | ast.AsyncFor | ast.While, names: Names) -> None:
        """Follow a loop's body, which runs any number of times: what it changes is unknown in it and after it."""
        changed = [*statement.body, *statement.orelse]
        self._forget(changed, names, statement.lineno)
        self.reader.open += 1
        self._follow(changed, names)
        self.reader.open -= 1
        self._forget(changed, names, statement.lineno)

    def _With(self, statement: ast.With | ast.AsyncWith, names: Names) -> None:
        for item in statement.items:
            made = self.reader.read(item.context_expr, names)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, made, names)
        self._follow(statement.body, names)

    _AsyncWith = _With

    def _Delete(self, statement: ast.Delete, names: Names) -> None:
        for target in statement.targets:
            holder = self.reader.read(target.value, names) if isinstance(target, ast.Subscript) else None
            key = self.reader.read(target.slice, names) if isinstance(target, ast.Subscript) else None
            if isinstance(holder, dict) and isinstance(key, str):
                holder.pop(key, None)
            elif isinstance(holder, (dict, list)):
                invalidate(holder, text_of(target), statement.lineno)
            elif isinstance(target, ast.Name):
                names.pop(target.id, None)

    def _Pass(self, statement: ast.stmt, names: Names) -> None:
        """Nothing happens."""

    _Global = _Nonlocal = _Break = _Continue = _Raise = _Assert = _Pass

    def _other(self, statement: ast.stmt, names: Names) -> None:
        """Forget what a statement of any other kind changes, and follow its bodies as ones that may run."""
        self._forget([statement], names, statement.lineno)
        bodies = [case.body for case in getattr(statement, "cases", [])]
        self._either([*bodies, []], names, statement.lineno)

    # -- what becomes of names -----------------------------------------------------------------------------------------

    def _either(self, bodies: Sequence[Sequence[ast.stmt]], names: Names, line: int) -> None:
        """Follow several bodies of which one runs: names keep what all of them leave alike. One that ends the function or the script is
        followed, but not compared."""
        self.reader.open += 1
        try:
            states = [snapshot(names) for _ in bodies]
        except NotPlain:  # too much to compare
            for body in bodies:
                self._forget(body, names, line)
                self._follow(body, names)
                self._forget(body, names, line)
            self.reader.open -= 1
            return
        for body, state in zip(bodies, states):
            self._follow(body, state)
        self.reader.open -= 1
        left = [
            state for body, state in zip(bodies, states) if not (body and isinstance(body[-1], (ast.Raise, ast.Return)))
        ]
        for name in {name: None for state in left for name in state}:
            found = [state[name] for state in left if name in state]
            if not all(same(one, found[0]) for one in found):  # where it is missing, nothing can read it
                _differ(names, name, found, line)
            elif not (
                name in names and same(names[name], found[0])
            ):  # else the object stays the one that others hold too
                names[name] = found[0]

    def _forget(self, statements: Sequence[ast.stmt], names: Names, line: int) -> None:
        """Forget whatever the statements may change."""
        for node in itertools.chain.from_iterable(map(ast.walk, statements)):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names[node.id] = Unread(node.id, line)
            elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                self._invalidate_root(node, names, line)
            elif isinstance(node, ast.AugAssign):
                self._invalidate_root(node.target, names, line)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr not in LOOKS:
                self._invalidate_root(node.func.value, names, line)

    def _invalidate_root(self, node: ast.expr, names: Names, line: int) -> None:
        """Invalidate the dictionary or list that a target or a method belongs to."""
        while isinstance(node, (ast.Subscript, ast.Attribute)):
            node = node.value
        if isinstance(node, ast.Name) and isinstance(names.get(node.id), (dict, list)):
            invalidate(names[node.id], node.id, line)

    def _bind(self, target: ast.expr, value: Any, names: Names) -> None:
        if isinstance(target, ast.Name):
            unknown = target.id in self._open or (target.id in self._elsewhere and self._is_top)
            names[target.id] = Unread(target.id, target.lineno) if unknown else value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, (list, tuple)) and len(value) == len(target.elts) else None
            if any(isinstance(part, ast.Starred) for part in target.elts):
                parts = None
            for place, part in enumerate(target.elts):
                one = part.value if isinstance(part, ast.Starred) else part
                self._bind(one, parts[place] if parts else Unread(text_of(one), target.lineno), names)
        elif isinstance(target, ast.Subscript) and self.reader.changes_an_estimator(
            target.value, names, text_of(target)
        ):
            return
        elif isinstance(target, ast.Subscript):
            holder, key = self.reader.read(target.value, names), self.reader.read(target.slice, names)
            if _takes(holder, key):
                holder[key] = value
            elif isinstance(holder, (dict, list)):
                invalidate(holder, text_of(target), target.lineno)
        elif isinstance(target, ast.Attribute):
            holder = self.reader.read(target.value, names)
            if isinstance(holder, Call):  # whatever was made of it before
                text = text_of(target)
                holder.keywords[target.attr] = Unread(f"set later, by {text}", target.lineno)


def _takes(holder: Any, key: Any) -> bool:
    """Whether a value is a dictionary or list that takes an item at this known key or index."""
    if isinstance(holder, list):
        return isinstance(key, int) and -len(holder) <= key < len(holder)
    return isinstance(holder, dict) and isinstance(key, str)


def _differ(names: Names, name: str, found: list[Any], line: int) -> None:
    """Mark a name that several bodies treat differently as Unread. A dictionary keeps what they agree on."""
    held = names.get(name)
    if isinstance(held, dict) and all(isinstance(one, dict) for one in found):
        keys = {key: None for one in found for key in one}
        agreed = {
            key: found[0][key] for key in keys if all(key in one and same(one[key], found[0][key]) for one in found)
        }
        held.clear()
        held.update({key: agreed[key] if key in agreed else Unread(str(key), line) for key in keys})
        return
    if isinstance(held, (dict, list)):
        invalidate(held, name, line)
    unread = next((one for one in found if isinstance(one, (Unread, Call))), None)  # it says more than the name
    names[name] = Unread(unread.text if unread is not None else name, unread.line if unread is not None else line)


def _bound_often(tree: ast.Module) -> set[str]:
    """Names that are bound more than once outside of functions: a function may be called before or after the last binding."""
    found: list[str] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        found += [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return {name for name in found if found.count(name) > 1}


def _changed_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names from around a function whose dictionaries or lists its body changes."""
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = set()
    for node in ast.walk(function):
        changes = isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load)
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr not in LOOKS
        at: ast.AST = node.func if called and isinstance(node, ast.Call) else node
        while (changes or called) and isinstance(at, (ast.Subscript, ast.Attribute)):
            at = at.value
        if (changes or called) and isinstance(at, ast.Name):
            found.add(at.id)
    return found - own


def _passed(call: ast.Call, name: str, place: int | None) -> ast.expr | None:
    """What a call passes for a parameter; None: nothing. `*` and `**` may pass it, so they count as something."""
    for word in call.keywords:
        if word.arg in (name, None):
            return word.value
    for number, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred) or number == place:
            return argument
    return None

"""A script's settings class, made from its module's syntax tree: no user code runs."""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.expressions import Evaluator, NotPlain, Undefined

MODULES: Mapping[str, tuple[types.ModuleType, frozenset[str]]] = {
    "typing": (
        typing,
        frozenset({"Any", "ClassVar", "Dict", "List", "Literal", "Mapping", "Optional", "Sequence", "Tuple", "Union"}),
    ),
    "collections.abc": (collections.abc, frozenset({"Mapping", "Sequence"})),
    "dataclasses": (dataclasses, frozenset({"dataclass", "field"})),
    "math": (math, frozenset(["ceil", "e", "floor", "inf", "isfinite", "isnan", "log2", "pi", "sqrt"])),
}
"""What a settings class may use from the standard library."""

KIT_NAMES = {
    "training.settings": ("SettingsError", "limits", "require", "setting"),
    "training.settings.entries": ("variants",),
}
"""What it may call from this kit: module -> names."""


class SettingsClasses:
    """Settings classes of one script.

    A module of this kit, or an unchanged copy of one, is imported; it is ours. Any other is read.

    Args:
        folders: where the script finds its modules, in this order.
        kit: the folder of this kit's entry scripts, from which its modules can be imported meanwhile.
    """

    def __init__(self, folders: Sequence[Path], kit: Path):
        self._folders, self.kit = folders, kit
        self._modules: dict[str, _Module | types.ModuleType] = {}
        self._steps = itertools.count()
        self.unread: list[str] = []
        """Methods that cannot be read in full: what they require is not checked."""

    def get(self, module: str, name: str) -> Any:
        """What a module calls `name`. Raises Undefined if the module has no such name, NotPlain if it cannot be read."""
        if module in MODULES:
            own, known = MODULES[module]
            if name in known:
                return getattr(own, name)
            raise NotPlain(f"{module}.{name} cannot be used in a settings class that is read")
        if module not in self._modules:
            self._modules[module] = self._opened(module)
        opened = self._modules[module]
        try:
            if isinstance(opened, _Module):
                return opened.get(name)
            if hasattr(opened, name):
                return getattr(opened, name)
            raise Undefined(f"{module} has no {name}")
        except Undefined:
            if module_file(f"{module}.{name}", self._folders) is None:
                raise
            return _Imported(f"{module}.{name}")

    def trusted(self, function: Any) -> bool:
        """Whether a function may be called: a field's, this kit's, or a method that was made here."""
        if isinstance(function, _Super) or function is dataclasses.field:
            return True
        if any(
            function is getattr(importlib.import_module(own), name)
            for own, names in KIT_NAMES.items()
            for name in names
        ):
            return True
        return isinstance(function, types.MethodType) and dataclasses.is_dataclass(function.__self__)

    def _opened(self, module: str) -> _Module | types.ModuleType:
        file = module_file(module, self._folders) if module else None
        if file is None:
            raise NotPlain(f"its module {module} is not beside the script")
        content = file.read_bytes()
        ours = module_file(module, [self.kit])
        if ours is not None and module.split(".")[0] == "training" and content == ours.read_bytes():
            return importlib.import_module(module)
        return _Module(self, module, file, content, self._steps)


def module_file(module: str, folders: Sequence[Path]) -> Path | None:
    """The file that `import module` runs last, if it is in one of the folders; a package goes before a module."""
    for folder in folders:
        base = folder.joinpath(*module.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
    return None


class _Module:
    """A user's module: its names, each evaluated when first needed."""

    def __init__(self, classes: SettingsClasses, name: str, file: Path, content: bytes, steps: Any):
        self.classes, self.name, self.file = classes, name, file
        self.evaluator = Evaluator(file.name, self.get, self.attribute, classes.trusted, steps)
        self._found: dict[str, Any] = {}
        try:
            tree = ast.parse(content, file.name)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise NotPlain(f"{file.name}: {error}") from None
        self._places: dict[str, Callable[[], Any]] = {}
        for node in tree.body:
            for defined, place in self._definitions(node):
                self._places[defined] = place

    def _definitions(self, node: ast.stmt) -> list[tuple[str, Callable[[], Any]]]:
        """(name, how to evaluate it) for everything that a top-level statement defines."""
        if isinstance(node, ast.ClassDef):
            return [(node.name, functools.partial(_class_of, self, node))]
        if isinstance(node, ast.ImportFrom):
            package = self.name.split(".")[: None if self.file.name == "__init__.py" else -1]
            above = package[: max(0, len(package) - node.level + 1)] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            return [
                (alias.asname or alias.name, functools.partial(self.classes.get, module, alias.name))
                for alias in node.names
            ]
        if isinstance(node, ast.Import):
            return [
                (alias.asname or alias.name, functools.partial(_Imported, alias.name))
                for alias in node.names
                if alias.asname or "." not in alias.name
            ]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = functools.partial(self.evaluator.value, node.value, {})
            return [(target.id, value) for target in targets if isinstance(target, ast.Name)]
        parts = [node] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ast.walk(node)
        return [(name, functools.partial(self._unknown, name)) for part in parts for name in _names_of(part)]

    def _unknown(self, name: str) -> Any:
        raise NotPlain(f"{self.file.name}: {name} cannot be read without running it")

    def get(self, name: str) -> Any:
        """A name's value. Raises Undefined if the module has none, NotPlain if it cannot be read."""
        if name not in self._found:
            if not self._places.keys() & {name, "*", "__getattr__"}:
                raise Undefined(f"{self.file.name} defines no {name}")
            place = self._places.get(name, functools.partial(self._unknown, name))
            self._places[name] = functools.partial(self._unknown, name)  # in case it needs itself
            self._found[name] = place()
        return self._found[name]

    def attribute(self, of: Any, name: str) -> Any:
        """An attribute of a module, of settings, or of `super()`."""
        if isinstance(of, _Imported):
            return self.classes.get(of.module, name)
        known = dataclasses.is_dataclass(of) or isinstance(of, super)
        if known and (not name.startswith("_") or name == "__post_init__") and hasattr(of, name):
            return getattr(of, name)
        raise NotPlain(f"{self.file.name}: .{name} cannot be read without running it")


def _names_of(node: ast.AST) -> list[str]:
    """The names that a node itself defines."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return []


@dataclasses.dataclass(frozen=True)
class _Imported:
    """What `import module` gives."""

    module: str


@dataclasses.dataclass(frozen=True)
class _Super:
    """`super` inside a method."""

    owner: type
    settings: Any

    def __call__(self) -> super:
        return super(self.owner, self.settings)


def _class_of(module: _Module, node: ast.ClassDef) -> type:
    """A dataclass as its definition says, with methods that are evaluated. Raises NotPlain."""
    value = functools.partial(module.evaluator.value, variables={})
    bases = tuple(value(base) for base in node.bases)
    ours = (isinstance(base, type) and (base is object or base.__module__ == __name__) for base in bases)
    if node.keywords or not all(own or dataclasses.is_dataclass(base) for own, base in zip(ours, bases)):
        raise NotPlain(f"{module.file.name}: a base of {node.name} is no dataclass")
    made_with: list[dict[str, Any]] = []
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if value(call.func if call else decorator) is not dataclasses.dataclass:
            raise NotPlain(f"{module.file.name}: a decorator of {node.name} is not dataclass")
        made_with.append({str(word.arg): value(word.value) for word in call.keywords} if call else {})
    owner: list[type] = []
    annotations: dict[str, Any] = {}
    body: dict[str, Any] = {"__module__": __name__, "__annotations__": annotations}
    body["__sentences__"] = field_sentences(node)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotations[statement.target.id] = _annotation(module, statement.annotation)
            if statement.value is not None:
                body[statement.target.id] = value(statement.value)
        elif isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
            body |= {target.id: value(statement.value) for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.FunctionDef):
            body |= _method(module, owner, statement)
        elif not isinstance(statement, (ast.Pass, ast.AsyncFunctionDef)) and not _is_constant(statement):
            where = f"{module.file.name}:{statement.lineno}"
            raise NotPlain(f"{where}: {type(statement).__name__} in the body of {node.name} cannot be read")
    owner.append(type(node.name, bases, body))
    for words in made_with:
        owner[0] = dataclasses.dataclass(**words)(owner[0])
    return owner[0]


def sentences(cls: type) -> Mapping[str, str]:
    """Field -> the docstring under it, of one class without its bases."""
    kept = cls.__dict__.get("__sentences__")  # of a class that was read rather than imported
    return _sentences_of_source(cls) if kept is None else dict(kept)


@functools.cache  # asked for field by field, and each class's source takes milliseconds to find and parse
def _sentences_of_source(cls: type) -> Mapping[str, str]:
    [node] = [
        node
        for node in ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
        if isinstance(node, ast.ClassDef)
    ]
    return types.MappingProxyType(field_sentences(node))


def field_sentences(node: ast.ClassDef) -> dict[str, str]:
    """Field -> the docstring under it, on one line, of the fields that have one."""
    return {
        ast.unparse(field.target): " ".join(str(text.value.value).split())
        for field, text in zip(node.body, node.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _is_constant(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, or another unused value."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _annotation(module: _Module, node: ast.expr) -> Any:
    """A field's type; one in quotes is read too."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    return module.evaluator.value(node, {})


def _method(module: _Module, owner: list[type], node: ast.FunctionDef) -> dict[str, Any]:
    """A method that is evaluated when called, by its name. If that cannot be done, the inherited method counts.

    Args:
        owner: holds the class once it is made.
    """

    def evaluated(self: Any) -> Any:
        return module.evaluator.call(node, {node.args.args[0].arg: self, "super": _Super(owner[0], self)})

    def evaluated_or_inherited(self: Any) -> Any:
        try:
            return evaluated(self)
        except (NotPlain, RecursionError) as error:
            module.classes.unread.append(str(error))
            return getattr(super(owner[0], self), node.name, tuple)()

    if [ast.unparse(decorator) for decorator in node.decorator_list] == ["property"]:
        return {node.name: property(evaluated)}
    return {} if node.decorator_list or len(node.args.args) != 1 else {node.name: evaluated_or_inherited}

"""What each config key and each setting of a script takes, in words: from the classes that check them, and the docstring under each field.

The reference pages, `launcher explain` and the JSON schema are made from it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from launcher.config.entrypoints import entrypoints_folder, kit_modules
from launcher.config.expressions import NotPlain, Undefined
from launcher.config.hyperparameters import declared_settings
from launcher.config.job import Job
from launcher.config.script_arguments import ONE_TEXT, needs_several, takes_several
from launcher.config.script_parser import parser_of
from launcher.config.sections import Part
from launcher.config.settings_class import SettingsClasses, sentences


@dataclass(frozen=True, kw_only=True)
class Described:
    """One config key or setting."""

    name: str
    """Dotted below its section, as in `teacher_cache.views`."""
    takes: str
    """Type, range and conditions."""
    required: bool = False
    default: Any = None
    """JSON-ready; None if it is required or null is the default."""
    sentence: str = ""
    example: str = ""
    on_resume: bool = False
    """Whether a run that resumes may change it."""
    default_expression: str = ""
    """The script's expression for its default, if a config cannot give that: no plain value, or a list for argparse."""

    @property
    def default_text(self) -> str:
        """The default as YAML writes it; empty for an empty mapping or list."""
        if self.required or self.default_expression:
            return "required" if self.required else self.default_expression
        if self.default in ({}, []):
            return ""
        return self.default if isinstance(self.default, str) else json.dumps(self.default)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


SMOKE = Described(
    name="smoke",
    takes="a mapping of config keys",
    default={},
    sentence="What --smoke changes: a small version of the job. An override cannot change this section.",
    example="{hyperparameters: {max_steps: 3}}",
)
"""The key of a config file that a job does not have."""


def config_sections(model: type[BaseModel] = Job, path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(key of the section, its model), outermost first; `inputs.NAME` and `study.serving_groups[]` stand for many."""
    yield path, model
    for name, item in model.model_fields.items():
        if inner := _part(item.annotation):
            many = ".NAME" if "dict" in str(item.annotation) else "[]" if "list" in str(item.annotation) else ""
            yield from config_sections(inner, f"{path}.{name}{many}".removeprefix("."))


def config_keys(model: type[BaseModel]) -> list[Described]:
    """The keys of one section of a config."""
    keys = [
        Described(
            name=name,
            takes=item.description or "",
            required=item.is_required(),
            default=None if item.is_required() else _plain(item.get_default(call_default_factory=True)),
            sentence=sentences(model).get(name, ""),
            example=str(item.examples[0]) if item.examples else "",
        )
        for name, item in model.model_fields.items()
    ]
    return [*keys, SMOKE] if model is Job else keys


def settings_of(cls: type, settings: ModuleType, *, inherited: bool = True) -> list[Described]:
    """The settings of a settings class.

    Args:
        settings: `training.settings`, imported.
        inherited: those of its bases too.
    """
    found, annotations = [], typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if not inherited and item.name not in cls.__dict__.get("__annotations__", {}):
            continue
        required = item.default is item.default_factory is dataclasses.MISSING
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        meanings = [sentences(base).get(item.name, "") for base in cls.__mro__ if dataclasses.is_dataclass(base)]
        found.append(
            Described(
                name=item.name,
                takes=_takes(cls, item, annotations[item.name], settings),
                required=required,
                default=None if required else _plain(default),
                sentence=next(filter(None, meanings), "").replace("None:", "null:"),  # as a config says it
                on_resume=item.metadata.get("on_resume") == "may change",
            )
        )
    return found


def script_settings(source: Path, script: str) -> list[Described]:
    """The settings of a script, from its settings class or its argparse parser; nothing of it runs. Groups are followed by their settings.

    Args:
        source: the folder that holds the script.
        script: the script's path inside it.

    Raises:
        NotPlain: they cannot be read without running the script, or it declares none.
        SyntaxError, ValueError: the script is not Python.
    """
    declared = declared_settings(source / script)
    if declared is None:
        return _arguments(source / script)
    with kit_modules("training.settings") as (settings,):
        classes = SettingsClasses([(source / script).parent, source, entrypoints_folder()], entrypoints_folder())
        try:
            cls = classes.get(*declared)
        except Undefined as error:
            raise NotPlain(str(error)) from None
        # dataclasses', of fields that do not go together
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{declared[1]} cannot be made: {type(error).__name__}: {error}") from None
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise NotPlain(f"{declared[1]} is not a dataclass")
        found, annotations = [], typing.get_type_hints(cls)
        for one in settings_of(cls, settings):
            found.append(one)
            group = group_of(annotations[one.name])
            inner = settings_of(group, settings) if group else []
            found += [dataclasses.replace(part, name=f"{one.name}.{part.name}") for part in inner]
        return found


def group_of(annotation: Any) -> type | None:
    """The settings class that a setting holds, if it holds a group of settings."""
    parts = (annotation, *typing.get_args(annotation))
    return next((part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)), None)


@functools.cache
def first_paragraph(cls: type) -> str:
    """The first paragraph of a class's docstring, on one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def _part(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, if it holds one."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    return next(filter(None, map(_part, typing.get_args(annotation))), None)


def _plain(value: Any) -> Any:
    """A default, JSON-ready; that of a section is the empty mapping."""
    if isinstance(value, Part):
        return {}
    return list(value) if isinstance(value, (tuple, set)) else value


def _takes(cls: type, item: dataclasses.Field[Any], annotation: Any, settings: ModuleType) -> str:
    """A setting's type, range and conditions in words."""
    kind, range_ = str(settings.describe(annotation)), item.metadata.get("limits")
    if range_ is not None:
        number = next((word for word in ("a whole number", "a number") if kind.startswith(word)), "")
        kind = f"{number} {range_.describe(annotation)}".strip()
    return "; ".join(filter(None, [kind, _conditions(cls, settings).get(item.name, "")]))


@functools.cache
def _conditions(cls: type, settings: ModuleType) -> dict[str, str]:
    """Conditions between settings, in words. None are known for a class that cannot be made of stand-ins."""
    if not hasattr(cls, "conditions"):
        return {}
    try:
        made = _of_stand_ins(cls, settings)
        ranges = {name for name, _, _ in settings.limits(made)}
        found = [(name, valid) for name, _, valid in made.conditions() if name not in ranges]
    except (NotPlain, TypeError, ValueError):
        return {}
    texts: dict[str, list[str]] = {}
    for name, valid in found:
        texts.setdefault(name, []).append(valid.replace("the 2 classes", "the classes"))
    return {name: "; ".join(valid) for name, valid in texts.items()}


def _of_stand_ins(cls: type, settings: ModuleType) -> Any:
    """An object of a settings class with a 2 for every required setting, or a section if it must be one."""
    annotations = typing.get_type_hints(cls)
    given = {}
    for name in [name for name, found, _ in settings.check(cls, {})[1] if found == "missing"]:
        parts = (annotations[name], *typing.get_args(annotations[name]))
        section = next((one for one in parts if isinstance(one, type) and dataclasses.is_dataclass(one)), None)
        given[name] = 2 if section is None else _of_stand_ins(section, settings)
    return cls(**given)


def _arguments(file: Path) -> list[Described]:
    """The arguments of a script's argparse parser that a job can give: those with a value."""
    made = parser_of(file)
    if made is None:
        raise NotPlain("it declares neither a settings class nor an argparse parser")
    written = _as_written(ast.parse(file.read_bytes()))
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    found = []
    for action in made[0]._actions:
        if action.nargs == 0 or not action.option_strings:  # SageMaker passes a value with every name
            continue
        option = next((one for one in action.option_strings if one.startswith("--")), action.option_strings[0])
        help, default, default_expression = written[action.option_strings[0]]
        takes = f"one of {', '.join(map(str, action.choices))}" if action.choices else ""
        takes = takes or kinds.get(typing.cast(type, action.type), "text")
        if takes_several(action):
            default_expression, default = "" if action.required else default_expression or str(default), None
            takes += f", {action.nargs} of them, which no job can give" if needs_several(action) else ", no list"
            takes += f": {ONE_TEXT}"
        found.append(
            Described(
                name=option.lstrip("-"),
                takes=takes,
                required=action.required,
                default=default,
                sentence=" ".join(
                    help.replace("%%", "%").replace("%(default)s", default_expression or str(default)).split()
                ),
                default_expression=default_expression,
            )
        )
    return found


def _as_written(tree: ast.Module) -> dict[str, tuple[str, Any, str]]:
    """First option string -> (help, default, expression of a default that is no plain value) for every add_argument."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = {word.arg: word.value for word in node.keywords}
            help, default = (_literal(words.get(name, ast.Constant(None))) for name in ("help", "default"))
            default_expression = "" if _is_json(default) else ast.unparse(words["default"])
            text = help if isinstance(help, str) else ""
            found[str(_literal(node.args[0]))] = (text, None if default_expression else default, default_expression)
    return found


def _literal(node: ast.expr) -> Any:
    """A plain value; NotPlain itself, which no JSON holds, if the script works it out."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NotPlain


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True

"""Typed hyperparameters: each declared in one field, converted to its type, all mistakes reported at once. Standard library only.

A script declares its settings by the annotation of its `main`:

    from training.settings.distillation import DistillationSettings
    from training.settings import read_settings

    def main(settings: DistillationSettings) -> None: ...

    if __name__ == "__main__":
        main(read_settings(DistillationSettings))

The launcher finds that annotation without running the script, and checks a config against the class with `check`, the
function that the script itself uses. A class of your own works in the same way: a frozen dataclass in a module beside
your script that imports no more than the standard library and `training.settings`:

    @dataclass(frozen=True, kw_only=True)
    class MySettings:
        rate: float = setting(0.1, above=0, at_most=1)
        # a docstring here is its sentence for people

        def __post_init__(self) -> None:
            require(*limits(self))
"""

from __future__ import annotations

import json
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union

from launcher_observer.contract import contract_value

from training.settings.entries import check_entries

Settings = TypeVar("Settings")

# Hyperparameters that SageMaker's SDK and toolkit add for themselves; the toolkit keeps them from the script, other launchers may not.
RESERVED_PREFIXES = ("sagemaker_", "_tuning_objective_metric")


class SettingsError(ValueError):
    """One line per wrong setting, each `name: what is valid`."""


def require(*conditions: tuple[str, bool, str]) -> None:
    """Raise a SettingsError that names every (setting, holds, valid) whose condition does not hold."""
    wrong = [f"{name}: {valid}" for name, holds, valid in conditions if not holds]
    if wrong:
        raise SettingsError("\n".join(wrong))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The range of a number, or of each number of a list; `None` and words such as `auto` have none."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    multiple_of: int | None = None
    each: str = ""
    """What a list's items are, for example "[height, width]"."""
    why: str = ""
    """The reason for the range, if it is not obvious."""

    def hold(self, value: Any) -> bool:
        """Whether a value, or each item of a list, is in the range."""
        if isinstance(value, (list, tuple)):
            return all(map(self.hold, value))
        if value is None or isinstance(value, str):
            return True
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
            and (self.multiple_of is None or (value > 0 and value % self.multiple_of == 0))
        )

    def describe(self, annotation: Any) -> str:
        """The range in words, with what else the annotation allows: "at least 1, auto, or null"."""
        if self.multiple_of is not None:
            text = f"a multiple of {self.multiple_of}"
        elif self.at_least is not None and self.at_most is not None:
            text = f"from {self.at_least} to {self.at_most}"
        elif self.at_least is not None and self.below is not None:
            text = f"from {self.at_least} to below {self.below}"
        elif self.at_least == 0:
            text = "0 or more"
        else:
            bounds = {"above": self.above, "below": self.below, "at least": self.at_least, "at most": self.at_most}
            text = " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)
        if self.each:
            text = f"{self.each}, each {text}"
        others = [text, *_other_values(annotation)]
        text = ", ".join(others[:-1]) + f", or {others[-1]}" if len(others) > 1 else text
        return f"{text}: {self.why}" if self.why else text


def setting(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | None = None,
    on_resume: Literal["must stay", "may change"] = "must stay",
    overrides: Sequence[str] = (),
    optional_for_entries: bool = False,
    **limits: Any,
) -> Any:
    """A dataclass's field for one hyperparameter.

    Args:
        default, default_factory: as `dataclasses.field` takes them; with neither the setting must be given.
        on_resume: whether a run that goes on from a checkpoint may have another value than the run that saved it.
        overrides: of a mapping from names to mappings, which of the class's settings each of these may set anew: `entries.variants`.
        optional_for_entries: whether it is enough if one of several entries, such as students, can use it: for the others it has its
            default in `entries.variants`.
        limits: the range, as the fields of Limits.
    """
    metadata = {
        "limits": Limits(**limits) if limits else None,
        "on_resume": on_resume,
        "overrides": tuple(overrides),
        "optional_for_entries": optional_for_entries,
    }
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def limits(settings: Any) -> list[tuple[str, bool, str]]:
    """The ranges of a class's fields as `require` takes them: (setting, holds, valid).

    Args:
        settings: an object of a dataclass whose fields are made by `setting`.
    """
    annotations = typing.get_type_hints(type(settings))
    return [
        (item.name, bounds.hold(getattr(settings, item.name)), bounds.describe(annotations[item.name]))
        for item in fields(settings)
        if (bounds := item.metadata.get("limits")) is not None
    ]


def fixed_part(settings: Any) -> dict[str, Any]:
    """The values that a checkpoint must have been saved with, those of settings within settings too; JSON-ready."""
    values = asdict(settings)
    for name in values:
        if is_dataclass(part := getattr(settings, name)):
            values[name] = fixed_part(part)
    return {name: values[name] for name in fixed_on_resume(type(settings))}


def fixed_on_resume(settings_class: type) -> list[str]:
    """Names of the settings that a checkpoint must have been saved with, so that a run may go on from it."""
    return [item.name for item in fields(settings_class) if item.metadata.get("on_resume") != "may change"]


def _other_values(annotation: Any) -> list[str]:
    """What an annotation allows beside numbers: its words, then null."""
    parts = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else ()
    words = [str(word) for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]
    return [*words, *(["null"] if type(None) in parts else [])]


def check(
    settings_class: type[Settings], values: Mapping[str, Any]
) -> tuple[Settings | None, list[tuple[str, str, str]]]:
    """Make settings from values, or report everything that is wrong with them.

    Args:
        settings_class: a dataclass.
        values: by setting name; numbers, true/false and null may also be texts, as a command line or a tuner gives them.

    Returns:
        The settings, or None where a problem was found; and the problems as (name, what was found, what is valid).
    """
    assert is_dataclass(settings_class)
    annotations = typing.get_type_hints(settings_class)
    known = {item.name: item for item in fields(settings_class) if item.init}
    problems = [(name, "unknown hyperparameter", ", ".join(known)) for name in values if name not in known]
    good: dict[str, Any] = {}
    for name, item in known.items():
        if name in values:
            try:
                good[name], inner = _convert_or_check(values[name], annotations[name])
                problems += [(f"{name}.{part}" if part else name, found, valid) for part, found, valid in inner]
            except (ValueError, OverflowError):
                problems.append((name, _shown(values[name]), describe(annotations[name])))
        elif item.default is MISSING and item.default_factory is MISSING:
            problems.append((name, "missing", describe(annotations[name])))
    for name, item in known.items():
        if item.metadata.get("overrides") and good.get(name):
            of_entries = check_entries(check, settings_class, item, good[name], values)
            problems += [problem for problem in dict.fromkeys(of_entries) if problem not in problems]
    required = [name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING]
    # stand-ins, so that the other settings' conditions are seen too
    absent = {name: None for name in required if name not in good}
    try:
        settings = settings_class(**good, **absent)
    except ValueError as error:
        for line in str(error).splitlines():
            name, colon, valid = line.partition(": ")
            if not (colon and name in known):
                problems.append(("", line, ""))
            elif name not in absent:
                misfit = "missing" if known[name].default in (None, "") else "the default does not fit the others"
                problems.append((name, _shown(values[name]) if name in values else misfit, valid))
    except TypeError:
        if not absent:
            raise
    return (None if problems else settings), problems


def read_settings(
    settings_class: type[Settings], arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """The settings that this process was started with.

    Under SageMaker's toolkit they come from SM_HPS, which is JSON and so keeps every type; the toolkit's command line says
    None, lists and texts that look like numbers in ways that cannot be told apart. In a plain shell they come from the
    command line, `--name value`. Problems end the process with status 2 and one line each.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if "SM_HPS" in environ:
        values = {
            name: value
            for name, value in contract_value(environ, "SM_HPS", {}).items()
            if not name.startswith(RESERVED_PREFIXES)
        }
    else:
        values = _from_command_line(settings_class, arguments)
    settings, problems = check(settings_class, values)
    if settings is None:
        lines = [f"{name}: {found}" + (f" (valid: {valid})" if valid else "") for name, found, valid in problems]
        sys.stderr.write("wrong hyperparameters:\n" + "\n".join(f"  {line}" for line in lines) + "\n")
        raise SystemExit(2)
    return settings


def _convert_or_check(value: Any, annotation: Any) -> tuple[Any, list[tuple[str, str, str]]]:
    """A value as its field's type; where that is a group of settings, also everything wrong inside."""
    parts = (annotation, *typing.get_args(annotation))
    group = next((part for part in parts if isinstance(part, type) and is_dataclass(part)), None)
    if group is None or value is None or value in ("null", "None"):
        return convert(value, annotation), []
    settings, problems = check(group, _from_json(value, dict))
    return settings, problems


def convert(value: Any, annotation: Any) -> Any:
    """A value as the type that a field's annotation asks for.

    Texts are accepted for numbers, true/false, null, lists and dicts (`"3"`, `"True"`, `"[1, 2]"`); nothing is rounded.

    Raises:
        ValueError: the value is not of that type.
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if annotation is None or annotation is type(None):
        if value is None or value in ("null", "None"):
            return None
        raise ValueError
    if origin in (Union, types.UnionType):
        exact = [part for part in inner if type(value) is part]
        for part in exact + sorted(inner, key=lambda part: part is str):  # text comes last: it would accept anything
            try:
                return convert(value, part)
            except ValueError:
                continue
        raise ValueError
    if origin is Literal:
        for choice in inner:
            if value == choice and type(value) is type(choice):
                return choice
        for choice in inner:
            if isinstance(value, str) and value == str(choice):
                return choice
        raise ValueError
    if origin in (list, tuple):
        items = _from_json(value, (list, tuple))
        if origin is list or inner[1:] == (...,):
            return origin(convert(item, inner[0]) for item in items)
        if len(items) != len(inner):
            raise ValueError
        return tuple(convert(item, part) for item, part in zip(items, inner))
    if origin is dict:
        return {convert(name, inner[0]): convert(item, inner[1]) for name, item in _from_json(value, dict).items()}
    if annotation in (list, tuple, dict):
        return annotation(_from_json(value, (list, tuple) if annotation is not dict else dict))
    if annotation is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise ValueError
    if isinstance(value, bool):
        raise ValueError
    if annotation is int:
        if isinstance(value, (int, str)):
            return int(value)
        raise ValueError
    if annotation is float:
        if isinstance(value, (int, float, str)) and math.isfinite(float(value)):
            return float(value)
        raise ValueError
    if annotation is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)):
            return str(value)
        raise ValueError
    raise ValueError(f"a settings class may not use {annotation!r}")


def describe(annotation: Any) -> str:
    """An annotation in words: `int | None` is "a whole number or null"."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if is_dataclass(annotation):
        return "a mapping with " + ", ".join(item.name for item in fields(annotation))
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        dict: "a mapping",
        list: "a list",
        tuple: "a list",
        Any: "anything",
    }
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in inner)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in inner)
    if origin is list or (origin is tuple and inner[1:] == (...,)):
        return f"a list, each {describe(inner[0])}"
    if origin is tuple:
        return "a list of " + ", ".join(describe(part) for part in inner)
    if origin is dict:
        return "a mapping"
    return words.get(annotation, str(annotation))


def _from_command_line(settings_class: type, arguments: Sequence[str]) -> dict[str, str]:
    """`--name value` pairs; the word after a name is its value whatever it begins with, so negative numbers need no care."""
    names = [item.name for item in fields(settings_class)]
    if len(arguments) % 2 or any(not name.startswith("--") for name in arguments[::2]) or "--help" in arguments:
        sys.stderr.write("usage: --name value ..., with the names: " + ", ".join(names) + "\n")
        raise SystemExit(2)
    return {name[2:].replace("-", "_"): value for name, value in zip(arguments[::2], arguments[1::2])}


def _from_json(value: Any, kinds: type | tuple[type, ...]) -> Any:
    if isinstance(value, str):
        value = json.loads(value)  # json.JSONDecodeError is a ValueError
    if not isinstance(value, kinds):
        raise ValueError
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

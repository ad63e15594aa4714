"""Settings of several kinds of one thing, such as students: a mapping whose entries set some settings anew. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from typing import Any, TypeVar

Settings = TypeVar("Settings", bound=Any)

Problem = tuple[str, str, str]
"""Name, what was found, what is valid."""

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""An entry's name: a folder's, and part of a metric's."""


def variants(settings: Settings) -> dict[str, Settings]:
    """By the name of each entry of the field with `overrides`, the settings with what it sets; without entries, the same ones under "".

    Args:
        settings: of a dataclass, as `training.settings.check` made it.
    """
    for item in fields(settings):
        if item.metadata.get("overrides") and getattr(settings, item.name):
            entries: dict[str, dict[str, Any]] = getattr(settings, item.name)
            return {name: _variant(settings, {item.name: None, **own}) for name, own in entries.items()}
    return {"": settings}


def _variant(settings: Settings, own: Mapping[str, Any]) -> Settings:
    """The settings with what an entry sets; those that are `optional_for_entries` have their default if it cannot use them."""
    optional = {item.name: item.default for item in fields(settings) if item.metadata.get("optional_for_entries")}
    try:
        return replace(settings, **own)
    except ValueError as error:
        if not all(line.partition(":")[0] in optional for line in str(error).splitlines()):
            raise
        return replace(settings, **{**optional, **own})


def check_entries(
    check: Callable[[type, Mapping[str, Any]], tuple[Any, list[Problem]]],
    settings_class: type,
    field: Field[Any],
    entries: dict[str, dict[str, Any]],
    values: Mapping[str, Any],
) -> list[Problem]:
    """Everything that is wrong with the entries of a field with `overrides`; good ones get the types of the settings.

    That an entry cannot use one of the settings that are `optional_for_entries` is a mistake only if no entry can.

    Args:
        check: training.settings.check.
        values: of all settings, by name.
    """
    allowed: tuple[str, ...] = field.metadata["overrides"]
    known = {item.name for item in fields(settings_class)}
    optional = {item.name for item in fields(settings_class) if item.metadata.get("optional_for_entries")}
    shared = {name: value for name, value in values.items() if name != field.name}
    problems, found, can_do_without = [], {}, set()
    for name, own in entries.items():
        where = f"{field.name}.{name}"
        if not NAME.fullmatch(name):
            problems.append((where, "not a name", "up to 32 small letters, digits and _, the first of them a letter"))
        for key in own:
            if key not in allowed:
                what = f"one for all {field.name}" if key in known else "unknown hyperparameter"
                problems.append((f"{where}.{key}", what, ", ".join(allowed)))
        mine = {key: value for key, value in own.items() if key in allowed}
        settings, found[name] = check(settings_class, {**shared, **mine})
        if settings is None:
            without = {key: value for key, value in shared.items() if key not in optional}
            settings, remaining = check(settings_class, {**without, **mine})
            can_do_without |= {name} if {*remaining} <= {*found[name]} else set()
        if settings is not None:
            entries[name] = {key: getattr(settings, key) for key in mine}
    _, of_shared = check(settings_class, shared)
    for name, own_problems in found.items():
        for problem in own_problems:
            key, what, valid = problem
            setting, of_every = key.partition(".")[0], all(problem in others for others in found.values())
            if setting in optional and not of_every and name in can_do_without:
                continue
            is_shared = of_every and problem in of_shared and setting not in entries[name]
            problems.append(problem if is_shared else (f"{field.name}.{name}.{key}", what, valid))
    return problems

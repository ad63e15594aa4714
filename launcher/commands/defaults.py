"""`launcher defaults`: show and set what every job leaves to you: role, region, output, image, network and tags."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.config import defaults, yaml_edit, yaml_file
from launcher.config.issues import Issue, UserError
from launcher.record import records

HEAD = "# Defaults of vision-launcher, for what a job's config leaves out. `launcher defaults` shows those in force.\n"


def add(to: arguments.Add) -> None:
    made = to("defaults", "show or set your role, region, output, image, network and tags for every job", carry_out)
    made.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="set a default, for example region=us-west-2 or tags.team=vision; without a value, unset it. "
        "profile=NAME shows or sets those of a profile",
    )
    made.add_argument(
        "--project",
        action="store_true",
        help=f"set it in the project's {defaults.PROJECT_FILE} instead of in your own file",
    )
    arguments.json(made, "{files, profiles, defaults: [{key, value, origin}]}")


def carry_out(options: argparse.Namespace) -> int:
    changes = _read(options.overrides)
    profile = changes.pop("profile", None)
    if changes:
        file = defaults.project_file() if options.project else defaults.user_file()
        prefix = f"{defaults.PROFILES}.{profile}." if profile is not None else ""
        _set(file, {prefix + key: value for key, value in changes.items()})
        arguments.note(f"wrote {defaults.name_of(file)}")
    elif options.project:
        raise UserError([Issue(key="--project", found="nothing to set", fix="name what: --project region=us-west-2")])
    found = defaults.read(profile)
    print(_json(found) if options.json else _text(found, profile))
    return DONE


def _read(overrides: list[str]) -> dict[str, Any]:
    """Dotted key -> value. Raises UserError with every mistake."""
    values, issues = dict[str, Any](), list[Issue]()
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not all(key.split(".")):
            fix = "write key=value, for example region=us-west-2"
            issues.append(Issue(key=key or text, found="no default without a key and `=`", fix=fix))
            continue
        try:
            values[key] = _value(key, value)
        except UserError as error:
            issues += error.issues
    name = values.get("profile")
    if name is not None and not defaults.PROFILE_NAME.fullmatch(name):
        issues.append(Issue(key="profile", found=name, valid=defaults.A_PROFILE_NAME, fix="choose another name"))
    if issues:
        raise UserError(issues)
    return values


def _value(key: str, text: str) -> Any:
    """A default as it was typed: YAML, but no default is a number, and a tag and a name are texts. None unsets."""
    value = yaml_file.parse(f"value: {text}", key).values["value"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return text if text and (number or key == "profile" or key.startswith("tags.")) else value


def _set(file: Path, values: dict[str, Any]) -> None:
    """Set dotted keys in a file of defaults, which is made where there is none. Raises UserError and leaves it as it is where it would
    be no valid one."""
    text, name = HEAD, defaults.name_of(file)
    if file.exists():
        text = yaml_file.text_of(file)
        defaults.parsed(text, name)
    changed = yaml_edit.with_values(text, values)
    if issues := list(defaults.check(replace(defaults.parsed(changed, name), lines={}))):
        raise UserError(issues)
    file.parent.mkdir(parents=True, exist_ok=True)
    records.write_atomically(file, changed)


def _json(found: list[defaults.Default]) -> str:
    places = {"user": str(defaults.user_file()), "project": str(defaults.project_file())}
    values = [{"key": one.key, "value": one.value, "origin": one.origin} for one in found]
    return json.dumps({"files": places, "profiles": defaults.profile_names(), "defaults": values}, indent=2)


def _text(found: list[defaults.Default], profile: str | None) -> str:
    if found:
        shown = [
            (one.key, json.dumps(one.value) if not isinstance(one.value, str) else one.value, one.origin)
            for one in found
        ]
        first, second = (max(len(row[column]) for row in shown) for column in (0, 1))
        lines = [f"{key:<{first}}  {value:<{second}}  {origin}" for key, value, origin in shown]
    else:
        role, output = "arn:aws:iam::123456789012:role/SageMakerTraining", "s3://bucket/prefix"
        lines = [
            f"no defaults; what your jobs have in common is set once, in {defaults.name_of(defaults.user_file())}:",
            f"  launcher defaults role={role} region=us-west-2 output={output}",
        ]
    others = [name for name in defaults.profile_names() if name != profile]
    return "\n".join([*lines, *([f"other profiles, by profile=NAME: {', '.join(others)}"] if others else [])])

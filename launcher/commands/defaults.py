"""`launcher defaults`: show and set what every job leaves to you: role, region, output, image, network and tags."""

from __future__ import annotations

import argparse
import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.json_text import as_json
from launcher.config import defaults, yaml_edit, yaml_file
from launcher.config.issues import Issue, UserError
from launcher.config.redaction import REDACTED, is_secret, mentions_a_secret
from launcher.config.sections import A_PROFILE_NAME, PROFILE_NAME
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
        _change(file, {prefix + key: value for key, value in changes.items()})
        arguments.note(f"wrote {defaults.name_of(file)}")
    elif options.project:
        raise UserError([Issue(key="--project", found="nothing to set", fix="name what: --project region=us-west-2")])
    found = defaults.read(profile)
    print(_json(found) if options.json else _text(found, profile))
    return DONE


def _read(overrides: list[str]) -> dict[str, Any]:
    """Dotted key -> value. Raises UserError with every mistake; none shows a possible secret."""
    values, issues = dict[str, Any](), list[Issue]()
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        shown = REDACTED if is_secret("", key or text) else key or text
        if not equals or not all(key.split(".")):
            fix = "write key=value, for example region=us-west-2"
            issues.append(Issue(key=shown, found="no default without a key and `=`", fix=fix))
            continue
        try:
            values[key] = _value(key, value)
        except UserError as error:
            found = error.issues[0].found.partition(", at `")[0] if mentions_a_secret(text) else error.issues[0].found
            issues.append(Issue(key=shown, found=found, fix=f"quote it: {shown}='\"…\"'"))
    name = values.get("profile")
    if name is not None and not (re.match(PROFILE_NAME, name) and not is_secret("", name)):
        found = REDACTED if mentions_a_secret(name) else name
        issues.append(Issue(key="profile", found=found, valid=A_PROFILE_NAME, fix="choose another name"))
    if issues:
        raise UserError(issues)
    return values


def _value(key: str, text: str) -> Any:
    """A default as it was typed: YAML, but no default is a number, and tags and names are text. None unsets."""
    value = yaml_file.parse(f"value: {text}", key).values["value"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_text = key == "profile" or key.startswith("tags.")
    return text if text and (number or (is_text and not isinstance(value, str))) else value


def _change(file: Path, values: dict[str, Any]) -> None:
    """Set dotted keys in a file of defaults, or remove those whose value is None. A missing file is created.

    Raises:
        UserError: it would be invalid, by these values or by what it holds already, or aliases hide where a key is. It is
            left as it is.
    """
    name, text, mode = defaults.name_of(file), HEAD, None
    if file.exists() or file.is_symlink():
        text, mode = yaml_file.text_of(file), file.stat().st_mode
        ends = "\r\n" if b"\r\n" in file.read_bytes() else "\n"
    else:
        ends = "\n"
    before, edited = defaults.parsed(text, name), text
    wanted = deepcopy(before.values)
    for key, value in values.items():
        yaml_file.put(wanted, key, value)
        edited = yaml_edit.without(edited, key) if value is None else yaml_edit.with_values(edited, {key: value})
    try:
        after = defaults.parsed(edited, name)
    except UserError:
        after = None
    if after is None or _given(after.values) != _given(wanted):
        found = "its layout or its aliases hide where the key stands"
        raise UserError([Issue(key=name, found=found, fix="edit the file itself")])
    known = list(defaults.check(before))  # with the lines of the file as it is
    if issues := [
        next((other for other in known if _same(one, other)), one) for one in defaults.check(replace(after, lines={}))
    ]:
        raise UserError(issues, f"{name}, which is left as it is")
    file.parent.mkdir(parents=True, exist_ok=True)
    target = file.resolve()  # a link stays one
    records.write_atomically(target, edited.replace("\n", ends))
    if mode is not None:
        target.chmod(mode & 0o777)


def _given(values: Any) -> Any:
    """Values without null or empty ones, which are no defaults."""
    if not isinstance(values, dict):
        return values
    kept = {key: _given(value) for key, value in values.items()}
    return {key: value for key, value in kept.items() if value not in (None, {})}


def _same(one: Issue, other: Issue) -> bool:
    """Whether a mistake was there before, on a line of the file or without one."""
    return one.found == other.found and one.key == re.sub(r" \(line \d+\)", "", other.key)


def _json(found: list[defaults.Default]) -> str:
    places = {"user": str(defaults.user_file()), "project": str(defaults.project_file())}
    values = [{"key": one.key, "value": one.value, "origin": one.origin} for one in found]
    return as_json({"files": places, "profiles": defaults.profile_names(), "defaults": values})


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

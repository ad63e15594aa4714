"""`launcher explain`: what a config or a script takes, each key and setting with its meaning, type, default and range."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.json_text import as_json
from launcher.config import builtin_configs, yaml_file
from launcher.config.entrypoints import entrypoints_folder
from launcher.config.expressions import NotPlain
from launcher.config.issues import Issue, UserError, did_you_mean, mistake
from launcher.config.loading import load
from launcher.config.redaction import redact_setting

if TYPE_CHECKING:
    from launcher.config.descriptions import Described

_ABSENT = object()
"""The value of a key that a config leaves out."""

SETTING = "hyperparameters."
"""Where a config gives a script's settings, which the script defines."""

Explained = tuple["Described", Any]
"""A key or setting, and its value or _ABSENT."""

SHAPE = (
    "without a subject {configs, scripts}, each name -> what it is; else {subject, keys, settings}, lists of "
    "{name, takes, required, default, sentence, example, on_resume}, with `value` where a config sets it"
)


def add(to: arguments.Add) -> None:
    made = to("explain", "explain the keys of a config and the settings of a script", carry_out)
    made.add_argument(
        "subject",
        nargs="?",
        metavar="CONFIG|SCRIPT",
        help="a config, or a script: the kit's, as train_kd.py, or your own; without it, the built-in configs are listed. A key of "
        "configs, as compute.spot, needs neither",
    )
    made.add_argument(
        "names", nargs="*", metavar="KEY", help="only these keys and settings, for example compute.spot or epochs"
    )
    arguments.json(made, SHAPE)


def carry_out(options: argparse.Namespace) -> int:
    if options.subject is None:
        print(as_json(_all()) if options.json else _list(_all()))
        return DONE
    names, whole = options.names, options.subject
    if _is_a_key(options.subject):
        names, whole = [options.subject, *names], "quickstart"
        keys, settings = [(one, _ABSENT) for one, _, _ in _keys()], list[Explained]()
    else:
        _refuse_a_setting_alone(options.subject)
        keys, settings = _explained(options.subject)
        known = {one.name for one, _ in settings}
        names = [own if (own := name.removeprefix(SETTING)) in known else name for name in names]
    _refuse_unknown(names, [one.name for one, _ in [*keys, *settings]], whole)
    keys, settings = ([pair for pair in part if not names or pair[0].name in names] for part in (keys, settings))
    if options.json:
        found = {"keys": [_to_dict(*pair) for pair in keys], "settings": [_to_dict(*pair) for pair in settings]}
        print(as_json({"subject": options.subject, **found}))
    else:
        print("\n".join(_text(options.subject, keys, settings)))
    return DONE


def _all() -> dict[str, dict[str, str]]:
    """The built-in configs and the kit's scripts: name -> what it is."""
    configs = {
        name: builtin_configs.opening(builtin_configs.folder() / f"{name}.yaml") for name in builtin_configs.names()
    }
    scripts = {file.name: _opening(file) for file in sorted(entrypoints_folder().glob("*.py"))}
    return {"configs": configs, "scripts": scripts}


def _opening(script: Path) -> str:
    """The first line of a script's docstring."""
    import ast

    return (ast.get_docstring(ast.parse(script.read_bytes())) or "").partition("\n")[0]


def _list(found: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for title, members in (("Built-in configs", found["configs"]), ("The kit's scripts", found["scripts"])):
        lines.append(title)
        for name, what in members.items():
            lines += [f"  {name}", *_wrapped(what, "      ")]
    return "\n".join(
        [*lines, "", "launcher explain NAME says what one takes; launcher plan CONFIG says what it would do"]
    )


def _explained(subject: str) -> tuple[list[Explained], list[Explained]]:
    """The keys of a config, and the settings of its script; for a script, only the settings."""
    if subject.endswith(".py"):
        file = Path(subject)
        source = file.parent if file.is_file() else entrypoints_folder()
        return [], [(one, _ABSENT) for one in _settings(source, file.name if file.is_file() else subject)]
    job = load(subject)
    given = job.redacted(exclude_unset=True, exclude_none=False)
    written = yaml_file.read(subject).values
    if "smoke" in written:
        given["smoke"] = redact_setting("smoke", written["smoke"])
    keys = [(one, _at(given, path, name)) for one, path, name in _keys()]
    source = Path(job.source) if job.source is not None else entrypoints_folder()
    settings = [
        (one, _at(given.get("hyperparameters", {}), *one.name.rpartition(".")[::2]))
        for one in _settings(source, job.script)
    ]
    return keys, settings


def _is_a_key(subject: str) -> bool:
    """Whether a subject is a key of configs, or nearly one, and not an existing config or script."""
    if _is_there(subject) or subject.startswith(SETTING):
        return False
    known = [one.name for one, _, _ in _keys()]
    return subject in known or (subject.partition(".")[0] in known and not subject.endswith((".yaml", ".yml")))


def _refuse_a_setting_alone(subject: str) -> None:
    """Refuse a setting named without its script, which gives it its meaning, if the kit has such scripts; the message names them."""
    if _is_there(subject):
        return
    place, name = entrypoints_folder(), subject.removeprefix(SETTING)
    ours = sorted((file.name for file in place.glob("*.py")), key=lambda script: not script.startswith("train_"))
    having = [script for script in ours if name in {one.name for one in _settings(place, script)}]
    if having:
        fix = f"name the script or the config before it: launcher explain {having[0]} {name}"
        raise mistake(subject, f"a setting of {', '.join(having)}", fix)


def _is_there(subject: str) -> bool:
    """Whether a subject is a script, or an existing config."""
    return subject.endswith(".py") or Path(subject).exists() or subject in builtin_configs.names()


def _keys() -> Iterator[tuple[Described, str, str]]:
    """Every key of a config under its dotted name, the path of its section, and its own name."""
    from launcher.config import descriptions

    for path, model in descriptions.config_sections():
        for one in descriptions.config_keys(model):
            yield replace(one, name=f"{path}.{one.name}".removeprefix(".")), path, one.name


def _settings(source: Path, script: str) -> list[Described]:
    """A script's settings. Raises UserError if there is no such script or its settings cannot be read."""
    from launcher.config.descriptions import script_settings

    if not (source / script).is_file():
        ours = [file.name for file in sorted(entrypoints_folder().glob("*.py"))]
        raise mistake(script, "no such script", did_you_mean(script, ours, "check the path"), valid=", ".join(ours))
    try:
        return script_settings(source, script)
    except (NotPlain, SyntaxError, ValueError) as error:
        raise mistake(
            script,
            str(error),
            "declare its settings so that they can be read without running it; see docs/your-own-script.md",
        ) from None


def _at(values: Mapping[str, Any], path: str, name: str) -> Any:
    """The value that a config gives for a key; _ABSENT if it gives none or the path stands for many."""
    at: Any = values
    for part in filter(None, [*path.split("."), name]):
        if not isinstance(at, Mapping) or part not in at:
            return _ABSENT
        at = at[part]
    return at


def _to_dict(one: Described, value: Any) -> dict[str, Any]:
    return {**one.to_dict(), **({} if value is _ABSENT else {"value": value})}


def _refuse_unknown(names: list[str], known: list[str], whole: str) -> None:
    """Refuse unknown names.

    Args:
        whole: the subject for which `launcher explain` lists all names.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        fix = f"launcher explain {whole} lists them"
        raise UserError(
            [Issue(key=name, found="no such key or setting", fix=did_you_mean(name, known, fix)) for name in unknown]
        )


def _text(subject: str, keys: list[Explained], settings: list[Explained]) -> Iterator[str]:
    for title, part in (("keys of the config", keys), ("settings of the script, under hyperparameters", settings)):
        if part:
            yield f"{subject}: {title}"
        for one, value in part:
            yield f"  {one.name}" + ("" if value is _ABSENT else f": {json.dumps(value, ensure_ascii=False)}")
            default = one.default_text if one.required or not one.default_text else f"default {one.default_text}"
            about = [one.takes, default, "may change on resume" if one.on_resume else ""]
            yield from _wrapped("; ".join(filter(None, about)), "      ")
            yield from _wrapped(one.sentence, "      ")


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)

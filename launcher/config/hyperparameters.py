"""Check a job's hyperparameters against what the script declares, without running it."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.config import script_arguments
from launcher.config.entrypoints import entrypoints_folder, kit_modules
from launcher.config.expressions import NotPlain, Undefined
from launcher.config.issues import Issue, did_you_mean
from launcher.config.redaction import holds_a_secret
from launcher.config.settings_class import SettingsClasses, sentences

MAX_COUNT, MAX_NAME, MAX_VALUE = 100, 256, 2500
"""SageMaker's limits: hyperparameters of a job, characters of a name, characters of an encoded value.
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_AlgorithmSpecification.html and API_CreateTrainingJob.html"""


ARGPARSE_FAILS = (AttributeError, IndexError, MemoryError, OverflowError, RecursionError, TypeError, ValueError)
"""What argparse raises while parsing with an argument that it should not have accepted."""


def encode(hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """Name -> value as JSON: what SageMaker's SDK sends and its toolkit reads."""
    return {name: json.dumps(value) for name, value in hyperparameters.items()}


def argument(name: str, value: Any) -> tuple[str, str]:
    """(option, value) as the toolkit writes them on the command line (mapping.py of sagemaker-training 5.1.4)."""
    if isinstance(value, Mapping):
        text = ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    else:
        text = "" if value is None else str(value)
    return (f"--{name}" if len(name) > 1 else f"-{name}"), text


def check(source: Path, script: str, hyperparameters: Mapping[str, Any], channels: Collection[str]) -> list[Issue]:
    """Check a job's hyperparameters against SageMaker's limits, and the script's settings class or argparse parser.

    No user code runs: both are read from the script's syntax tree.

    Args:
        source: the folder that holds the script; it must exist.
        script: the script's path inside it; it must exist.
        hyperparameters: name -> value, as in the config.
        channels: names of the job's inputs. A settings class with a `channels` method names those it needs.
    """
    issues = list(_check_transport(hyperparameters))
    unusable = {issue.key for issue in issues if issue.key != "hyperparameters"}
    try:
        declared = declared_settings(source / script)
    except (RecursionError, MemoryError):  # as the parser calls it
        fix = "split the expression up"
        return issues + [Issue(key="script", found=f"{script}: an expression is nested too deeply to be read", fix=fix)]
    except (SyntaxError, ValueError) as error:
        return issues + [Issue(key="script", found=f"{script}: {error}", fix="correct the script")]
    usable = {name: value for name, value in hyperparameters.items() if f"hyperparameters.{name}" not in unusable}
    if declared is None:
        found = _by_parser(source / script, script, usable)
    else:
        found = _by_settings_class(source, script, declared, usable, channels)
    return issues + [issue for issue in found if issue.key not in unusable]


def _by_parser(file: Path, script: str, values: Mapping[str, Any]) -> list[Issue]:
    """Issues of hyperparameters with a script that may parse them by argparse."""
    try:
        issues = script_arguments.check(file, {name: argument(name, value) for name, value in values.items()})
    except (NotPlain, *ARGPARSE_FAILS) as error:
        fix = "a settings class is checked; see docs/your-own-script.md"
        return [_not_checked(f"the arguments of {script}: {error}", fix)]
    if issues is not None or not values:
        return issues or []
    fix = (
        "annotate main's first parameter with a dataclass from a module beside the script; see docs/your-own-script.md"
    )
    return [_not_checked(f"{script} declares no settings class", fix)]


def _by_settings_class(
    source: Path, script: str, declared: tuple[str, str], values: Mapping[str, Any], channels: Collection[str]
) -> list[Issue]:
    """Issues of hyperparameters and channels with a script's settings class."""
    module_name, class_name = declared
    issues: list[Issue] = []
    with kit_modules("training.settings", "training.settings.entries") as (settings_module, entries):
        classes = _classes(source, script)
        try:
            settings_class = classes.get(module_name, class_name)
            if not dataclasses.is_dataclass(settings_class):
                wrong = f"{script} imports {class_name} from {module_name}, where it is not a dataclass"
                return [Issue(key="script", found=wrong, fix=f"define a dataclass {class_name} in {module_name}.py")]
            settings, problems = settings_module.check(settings_class, values)
            each = {} if settings is None else entries.variants(settings)
            needed = tuple(dict.fromkeys(name for own in each.values() for name in _needed_channels(own, classes)))
        except Undefined as error:
            fix = f"define a dataclass {class_name} in {module_name}.py"
            return [Issue(key="script", found=f"{script} imports {class_name}: {error}", fix=fix)]
        except (NotPlain, RecursionError) as error:
            return [_not_checked(f"{class_name} of {script}: {error}", PLAIN)]
        except Exception as error:  # what the user's code would raise
            wrong = f"{class_name} of {module_name} cannot be made: {type(error).__name__}: {error}"
            fix = f"run python -c 'import {module_name}' in the script's folder to see where"
            return [Issue(key="script", found=wrong, fix=fix)]
        issues += [_issue(script, settings_class, values, problem, settings_module.describe) for problem in problems]
    if settings is not None:
        unread = dict.fromkeys(classes.unread)
        issues += [_not_checked(f"what {class_name} of {script} requires: {reason}", PLAIN) for reason in unread]
    issues += [
        Issue(
            key=f"inputs.{name}",
            found=f"missing; {script} reads it",
            valid="; ".join(needed),
            fix=f"add {name}: {{folder: ...}} under inputs",
        )
        for name in needed
        if name not in channels
    ]
    return issues


def _issue(
    script: str,
    settings_class: Any,
    values: Mapping[str, Any],
    problem: tuple[str, str, str],
    describe: Callable[[Any], str],
) -> Issue:
    """A problem that `training.settings.check` found, with its fix.

    Args:
        problem: (name, what was found, what is valid).
        describe: `training.settings.describe`.
    """
    name, found, valid = problem
    key = f"hyperparameters.{name}" if name else "hyperparameters"
    if found == "unknown hyperparameter":
        fix = did_you_mean(name.rpartition(".")[2], valid.split(", "))
        return Issue(key=key, found=f"{script} has no such hyperparameter", valid=valid, fix=fix)
    if found == "missing":
        example = _example(settings_class, name)
        return Issue(key=key, found=found, valid=valid, fix=f"write {name}: {example}" if example else f"add {name}")
    fix = f"correct {name}"
    value: Any = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    known = {item.name: item for item in dataclasses.fields(settings_class)}
    lacking = re.fullmatch(r"(\w+) without `?(\w+)`?", valid)
    if lacking and lacking[2] in known:
        other = lacking[2]
        words = _words(describe(typing.get_type_hints(settings_class)[other]))
        others = [word for word in words if word != json.dumps(known[other].default, default=str)]
        fix = f"write {other}: {' or '.join(others)}, or " if others else f"add {other}, or write "
        fix += f"{name}: {lacking[1]}"
    elif isinstance(value, str):
        words = _words(valid)
        fix = did_you_mean(value, words, did_you_mean(value.lower(), words, fix))
    return Issue(key=key, found=found, valid=valid, fix=fix)


def _words(valid: str) -> list[str]:
    """The words in a text of `training.settings.describe`: for "true or false or one of auto, max" these four."""
    parts = valid.split(" or ")
    listed = [word for part in parts if part.startswith("one of ") for word in part.removeprefix("one of ").split(", ")]
    return [part for part in parts if part in ("true", "false", "null")] + listed


def _example(settings_class: type, name: str) -> str:
    """The example in the docstring under a field; empty if it has none."""
    classes = [base for base in settings_class.__mro__ if dataclasses.is_dataclass(base)]
    sentence = next(filter(None, (sentences(base).get(name) for base in classes)), "")
    found = re.search(r"for example (\{[^{}]*\}|\[[^\[\]]*\]|[\w./-]*\w)(?=[.,;]| or |$)", sentence)
    return found[1] if found else ""


def kit_default(source: Path, script: str, name: str) -> Any:
    """The default of a setting of this kit's training scripts.

    Args:
        source: the folder that holds the script.
        script: the script's path inside it.
        name: the setting.

    Returns:
        None if the script's settings class is neither the kit's nor derived from it.
    """
    try:
        declared = declared_settings(source / script)
        if declared is None:
            return None
        with kit_modules("training.settings.scripts") as (scripts,):
            settings_class = _classes(source, script).get(*declared)
            return getattr(settings_class, name) if issubclass(settings_class, scripts.TrainingSettings) else None
    except Exception:  # `check` reports it
        return None


def _classes(source: Path, script: str) -> SettingsClasses:
    return SettingsClasses([(source / script).parent, source, entrypoints_folder()], entrypoints_folder())


def _needed_channels(settings: Any, classes: SettingsClasses) -> tuple[str, ...]:
    """The channels that the settings' `channels` method names; a field of that name is something else."""
    channels = getattr(settings, "channels", None)
    names = channels() if callable(channels) else ()
    if isinstance(names, (tuple, list, set, frozenset)) and all(isinstance(name, str) for name in names):
        return tuple(names)
    classes.unread.append(f"channels() gives {type(names).__name__}, where a tuple of names belongs")
    return ()


def _not_finite(value: Any) -> str:
    """What JSON cannot hold in a value: NaN or an infinity. Empty if it has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN, not a number" if math.isnan(value) else f"an infinite number ({value})"
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, map(_not_finite, inner)), "")


PLAIN = "keep defaults and conditions plain: planning reads the settings class and runs nothing of yours"


def _not_checked(found: str, fix: str) -> Issue:
    return Issue(key="hyperparameters", level="not checked", found=found, fix=fix)


def declared_settings(script: Path) -> tuple[str, str] | None:
    """The settings class that a script declares with `from module import X` and `def main(settings: X)`.

    Returns:
        (module, class), by name; None if the script declares none, or one of the standard library, such as argparse.Namespace.

    Raises:
        SyntaxError: the script is not Python.
    """
    tree = ast.parse(script.read_bytes(), str(script))
    main = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main" and node.args.args),
        None,
    )
    annotation = main.args.args[0].annotation if main else None
    name = annotation.id if isinstance(annotation, ast.Name) else getattr(annotation, "value", None)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.split(".")[0] not in sys.stdlib_module_names:
                    return node.module, alias.name
    return None


def _check_transport(hyperparameters: Mapping[str, Any]) -> Iterator[Issue]:
    """Hyperparameters that cannot pass through SageMaker's request or the toolkit's command line."""
    if len(hyperparameters) > MAX_COUNT:
        yield Issue(
            key="hyperparameters",
            found=f"{len(hyperparameters)} hyperparameters",
            valid=f"at most {MAX_COUNT}",
            fix="move some to a file in an input channel",
        )
    for name, value in hyperparameters.items():
        key = f"hyperparameters.{name}"
        if not name or len(name) > MAX_NAME:
            yield Issue(
                key=key[:80],
                found=f"a name of {len(name)} characters",
                valid=f"1 to {MAX_NAME} characters",
                fix="rename it",
            )
        if "=" in name or "\0" in name:
            yield Issue(key=key, found="a name with = or NUL, which no environment variable can hold", fix="rename it")
        if holds_a_secret(name, value):
            yield Issue(
                key=key,
                found="looks like a secret; the container toolkit writes hyperparameters to its log",
                fix=f"pass it as an environment variable: add {name.upper()}: env under secrets",
            )
        if name.startswith("sagemaker_"):
            yield Issue(
                key=key,
                found="a name that begins with sagemaker_",
                fix="rename it: the toolkit does not pass such names to the script",
            )
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            if infinite := _not_finite(value):
                yield Issue(key=key, found=infinite, valid="a finite number", fix="write a finite number")
                continue
            yield Issue(
                key=key,
                found=f"a {type(value).__name__}",
                valid="text, finite number, true/false, null, list or mapping",
                fix="quote it",
            )
            continue
        if len(text) > MAX_VALUE:
            yield Issue(
                key=key,
                found=f"{len(text)} characters as JSON",
                valid=f"at most {MAX_VALUE}",
                fix="move it to a file in an input channel",
            )
        if "\\u0000" in text or "\\u0000" in json.dumps(name):
            yield Issue(key=key, found="a NUL character", fix="remove it: a command line cannot hold one")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in name + json.dumps(value, ensure_ascii=False)):
            yield Issue(key=key, found="half of a surrogate pair", fix="remove it: UTF-8 cannot encode one")

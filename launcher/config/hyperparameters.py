"""Find a script's settings class without running the script, and check a job's hyperparameters against it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from launcher.config.entrypoints import entrypoints_folder
from launcher.config.issues import Issue, did_you_mean
from launcher.config.redaction import names_a_secret

MAX_COUNT, MAX_NAME, MAX_VALUE = 100, 256, 2500
"""SageMaker's limits: hyperparameters of a job, characters of a name, characters of an encoded value.
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_AlgorithmSpecification.html and API_CreateTrainingJob.html"""


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
    """Check a job's hyperparameters against SageMaker's limits and the script's settings class.

    Args:
        source: the folder that holds the script; it must exist.
        script: the script's path inside it; it must exist.
        hyperparameters: name -> value, as in the config.
        channels: names of the job's inputs. A settings class with a `channels` method names those that it needs.
    """
    issues = list(_check_transport(hyperparameters))
    unusable = {issue.key.partition(".")[2] for issue in issues}
    try:
        declared = declared_settings(source / script)
    except (SyntaxError, ValueError) as error:
        return issues + [Issue(key="script", found=f"{script}: {error}", fix="correct the script")]
    if declared is None:
        return issues + [
            Issue(
                key="hyperparameters",
                level="not checked",
                found=f"{script} declares no settings class",
                fix="annotate main's first parameter with a dataclass imported from a module beside the script; see training/settings",
            )
        ]
    module_name, class_name = declared
    folders = [(source / script).parent, source, entrypoints_folder()]
    heavy = _heavy_import(module_name, folders)
    if heavy:
        return issues + [
            Issue(
                key="hyperparameters",
                level="not checked",
                found=f"{class_name} of {script} cannot be read here: {heavy}",
                fix="keep the settings class in a module that imports only the standard library and training.settings",
            )
        ]
    usable = {name: value for name, value in hyperparameters.items() if name not in unusable}
    try:
        with imported([module_name, "training.settings"], folders) as (module, settings_module):
            settings_class = getattr(module, class_name, None)
            if not dataclasses.is_dataclass(settings_class):
                found = f"{script} imports {class_name} from {module_name}, where it is not a dataclass"
                fix = f"define a dataclass {class_name} in {module_name}.py"
                return [*issues, Issue(key="script", found=found, fix=fix)]
            settings, problems = settings_module.check(settings_class, usable)
            needed = settings.channels() if settings is not None and hasattr(settings, "channels") else ()
    except (
        Exception,
        SystemExit,
    ) as error:  # the module is the user's code, which may raise anything
        found = f"cannot import or create {class_name} from {module_name}: {type(error).__name__}: {error}"
        fix = f"run python -c 'import {module_name}' in the script's folder to see where"
        return [*issues, Issue(key="script", found=found, fix=fix)]
    for name, found, valid in problems:
        if name in unusable:
            continue
        key = f"hyperparameters.{name}" if name else "hyperparameters"
        if found == "unknown hyperparameter":
            fix = did_you_mean(name.rpartition(".")[2], valid.split(", "))
            issues.append(Issue(key=key, found=f"{script} has no such hyperparameter", valid=valid, fix=fix))
        else:
            fix = f"add {name}" if found == "missing" else f"correct {name}"
            issues.append(Issue(key=key, found=found, valid=valid, fix=fix))
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


def declared_settings(script: Path) -> tuple[str, str] | None:
    """The settings class that a script declares with `from module import X` and `def main(settings: X)`.

    Returns:
        (module, class), by name; None where the script declares none.

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
                if name is not None and (alias.asname or alias.name) == name:
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
        if isinstance(value, str) and names_a_secret(name):
            yield Issue(
                key=key,
                found="looks like a secret; the container toolkit writes hyperparameters to its log",
                fix=f"pass it as an environment variable: add {name.upper()}: ... under environment",
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


def _module_file(module_name: str, folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        base = folder.joinpath(*module_name.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _heavy_import(module_name: str, folders: Sequence[Path], seen: frozenset[str] = frozenset()) -> str:
    """Why a settings module cannot be imported here, in words; empty where it can."""
    file = _module_file(module_name, folders)
    if file is None:
        return f"its module {module_name} is not beside the script"
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"{file.name}: {error}"
    package = module_name.rpartition(".")[0]
    if package and package not in seen and _module_file(package, folders) is not None:
        deeper = _heavy_import(package, folders, seen | {module_name})  # importing p.settings runs p/__init__.py first
        if deeper:
            return deeper
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            return f"{file.name} has a relative import"
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom) and node.module
            else []
        )
        for name in names:
            if name.split(".")[0] in sys.stdlib_module_names or name in seen:
                continue
            if _module_file(name, folders) is None:
                return f"{file.name} imports {name}"
            deeper = _heavy_import(name, folders, seen | {module_name})
            if deeper:
                return deeper
    return ""


@contextlib.contextmanager
def imported(module_names: Sequence[str], folders: Sequence[Path]) -> Iterator[list[ModuleType]]:
    """Import modules of a script from its folders, as it would, and forget them afterwards. Writes no bytecode."""
    path, modules, bytecode = list(sys.path), dict(sys.modules), sys.dont_write_bytecode
    roots = {name.split(".")[0] for name in module_names} | {"training"}
    for name in [name for name in sys.modules if name.split(".")[0] in roots]:
        del sys.modules[name]
    sys.path[:0] = [str(folder) for folder in folders]
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield [importlib.import_module(name) for name in module_names]
    finally:
        sys.path[:], sys.dont_write_bytecode = path, bytecode
        for name in set(sys.modules) - set(modules):
            if name.split(".")[0] in roots or _module_file(name, folders):
                del sys.modules[name]
        sys.modules.update(modules)

"""Every mistake in a config's values, each with what would be valid and a fix."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from launcher.config import yaml_file
from launcher.config.entrypoints import entrypoints_folder
from launcher.config.issues import Issue, did_you_mean, near
from launcher.config.job import Job
from launcher.config.redaction import mentions_a_secret
from launcher.config.secret_shapes import names_a_secret
from launcher.config.sections import INSTANCE_TYPE, Input, Part

SDK_NAMES = {
    "entry_point": "script",
    "source_dir": "source",
    "image_uri": "image.uri",
    "py_version": "image.python",
    "volume_size": "compute.volume_gb",
    "volume_kms_key": "compute.volume_key",
    "max_run": "compute.max_hours",
    "max_wait": "compute.max_wait_hours",
    "use_spot_instances": "compute.spot",
    "keep_alive_period_in_seconds": "compute.keep_alive_minutes",
    "max_retry_attempts": "compute.max_attempts",
    "output_path": "output",
    "output_kms_key": "output_key",
    "code_location": "code",
    "disable_output_compression": "compress_output",
    "checkpoint_s3_uri": "checkpoints",
    "checkpoint_local_path": "checkpoints.path",
    "security_group_ids": "network.security_groups",
    "enable_network_isolation": "network.isolation",
    "encrypt_inter_container_traffic": "network.encrypt_traffic",
    "metric_definitions": "metrics",
    "profiler_config": "profiling",
    "debugger_hook_config": "debugger",
    "base_job_name": "name",
}
"""Argument of the PyTorch estimator in SageMaker's SDK v2 -> config key."""

REMOVE = "remove it"
"""The fix for a key that resembles no other."""

KINDS = {"string_type": "text", "model_type": "a mapping", "dict_type": "a mapping"}
"""pydantic's type of an error -> what is valid, where the key has no description."""

DISTRIBUTIONS = {"ddp": "torchrun", "pytorchddp": "torchrun", "torch_distributed": "torchrun", "smdistributed": "smddp"}
"""Other names for a value of `distribution` -> that value."""

A_BUCKET = "a bucket's name has 3 to 63 characters: a to z, digits, dots and hyphens, a letter or digit at both ends"
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""


def problems(config: yaml_file.Config) -> Iterator[Issue]:
    """Every mistake that keeps the values from being a Job."""
    try:
        Job.model_validate(config.values)
    except ValidationError as error:
        for item in error.errors():
            yield _issue(config, item)


def without_mistakes(values: Mapping[str, Any]) -> Job | None:
    """The job without its wrong keys; None if too little is left."""
    left: dict[str, Any] = {"name": "job", **deepcopy(dict(values))}
    while True:
        try:
            return Job.model_validate(left)
        except ValidationError as error:
            taken = [_take_out(left, item["loc"]) for item in error.errors()]
        left = {"name": "job", **left}
        if not any(taken):
            return None


def _take_out(values: dict[str, Any], place: Sequence[Any]) -> bool:
    """Remove a wrong key, or the list that holds a wrong item. Returns whether there was one."""
    at: Any = values
    path: list[Any] = []
    for part in place:
        if isinstance(part, int):
            break
        path += [part] if part != "[key]" else []
    for part in path[:-1]:
        at = at.get(part) if isinstance(at, dict) else None
    return bool(path) and isinstance(at, dict) and at.pop(path[-1], at) is not at


def _issue(config: yaml_file.Config, item: Mapping[str, Any]) -> Issue:
    """One pydantic error, with what would have been valid and a fix."""
    path = [str(part) for part in item["loc"] if part != "[key]"]
    key = ".".join(path) or config.source
    while len(path) > 1 and path[-1].isdigit():  # an item is described by its list
        path.pop()
    parent, field = _field_at(path)
    example = field.examples[0] if field is not None and field.examples else None
    valid = (field.description or "") if field is not None else ""
    leaf = path[-1] if path else ""
    if path == ["smoke"]:
        return Issue(
            key=key,
            found="a section of config files only, which no override changes",
            fix="override the key itself, for example hyperparameters.max_steps=3",
        )
    if item["type"] == "extra_forbidden":
        fields = list(parent.model_fields) + (["smoke"] if parent is Job else [])
        settings = _settings(config.values) if parent is Job else []
        fix = _fix_for_setting(config, leaf, item["input"]) if leaf in settings else _fix_for_key(leaf, fields)
        if fix == REMOVE and (meant := near(leaf, settings)):
            fix = f"did you mean hyperparameters.{meant}?"
        return Issue(key=config.where(key), found="unknown key", valid=", ".join(fields), fix=fix)
    if item["type"] == "missing":
        return Issue(key=key, found="missing", valid=valid, fix=f"add {leaf}: {example}" if example else f"add {leaf}")
    if item["type"] == "value_error":
        found, _, fix = str(item["ctx"]["error"]).partition(": ")  # as our validators write it
        return Issue(key=config.where(key), found=found, fix=fix)
    value = item["input"]
    shown = _kind(value) if _hides(path) else as_written(value)
    if item["type"] == "model_type" and path[0] == "inputs":
        place = f"data/{leaf}"
        if isinstance(value, str) and value:
            place = "…" if mentions_a_secret(value) else value
        return Issue(
            key=config.where(key),
            found=shown,
            valid="; ".join(Input.SOURCES),
            fix=f"write {leaf}: {{{'s3' if str(value).startswith('s3://') else 'folder'}: {place}}}",
        )
    fix = f"write {leaf}: {example}" if example is not None else f"correct {leaf}"
    bound = item.get("ctx", {}).get({"greater_than_equal": "ge", "less_than_equal": "le"}.get(item["type"], ""))
    if bound is not None and path[0] == "compute":  # no suggestion costs more than what was meant
        fix = f"write {leaf}: {int(bound) if bound == int(bound) else bound}"
    if leaf == "instance_type" and isinstance(value, str):
        kind = f"ml.{value.strip().lower().removeprefix('ml.')}"
        fix = f"write {leaf}: {kind}" if re.fullmatch(INSTANCE_TYPE, kind) else fix
    if item["type"] == "literal_error" and isinstance(value, str):
        words = [word.strip() for word in valid.replace(" or ", ", ").split(",")]
        meant = DISTRIBUTIONS.get(value.lower(), value) if leaf == "distribution" else value
        fix = did_you_mean(meant, words, fix)
    if key == "name" and isinstance(value, str) and (name := re.sub(r"[^a-zA-Z0-9]+", "-", value)[:42].strip("-")):
        fix = f"write name: {name}"
    if item["type"] == "bool_type":
        fix = f"write {leaf}: true or {leaf}: false"
    if item["type"] in ("model_type", "dict_type") and example is None:
        below = _model_at(path)
        fix = f"write under {leaf}: " + (" or ".join(below.model_fields) if below else "one key: value on each line")
    if item["type"] == "string_type" and isinstance(value, (int, float, bool)):
        text = shown.rpartition(" (")[0] or "…"
        fix = f"quote it: {_quoted(config, key, text)}"
        if leaf == "framework_version" and re.fullmatch(r"\d+\.\d", text):  # 2.10 is the number 2.1
            fix += f", or {_quoted(config, key, f'{text}0', alone=True)} if that is meant: unquoted, they are the same number"
    if path == ["image", "python"] and (minor := re.fullmatch(r"3\.(\d{1,2})", str(value))):
        version = f"py3{minor[1] if minor[1] != '1' else '10'}"  # 3.10 is the number 3.1
        fix = f"write {key}={version}" if _is_an_override(config, key) else f"write {leaf}: {version}"
    if item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"].startswith("^s3://"):
        valid += f"; {A_BUCKET}"
    return Issue(
        key=config.where(key),
        found=shown,
        valid=valid or KINDS.get(item["type"], item["msg"]),
        fix=fix,
    )


def _is_an_override(config: yaml_file.Config, key: str) -> bool:
    """Whether a key of a config file comes from an override: it has no line."""
    return bool(config.lines) and config.where(key) == key


def _quoted(config: yaml_file.Config, key: str, text: str, alone: bool = False) -> str:
    """A value as text, as a file or an override gives it; a shell strips the outer quotes of an override.

    Args:
        alone: without the key.
    """
    if _is_an_override(config, key):
        return f"'\"{text}\"'" if alone else f"{key}='\"{text}\"'"
    return f'"{text}"' if alone else f'{key.rpartition(".")[2]}: "{text}"'


def _fix_for_key(word: str, fields: Sequence[str]) -> str:
    """The fix for an unknown key: its right place, a similar name, or the key for a name from SageMaker's SDK."""
    places = {field: f"{name}.{field}" for name in Job.model_fields for field in _fields_below(name)}
    places |= {name: name for name in Job.model_fields}
    if word in places:
        return f"did you mean {places[word]}?"
    found = difflib.get_close_matches(word, SDK_NAMES, n=1, cutoff=0.8)
    from_sdk = f"did you mean {SDK_NAMES[found[0]]}, which SageMaker's SDK calls {found[0]}?" if found else REMOVE
    return from_sdk if word in SDK_NAMES else did_you_mean(word, fields, from_sdk)


def _fix_for_setting(config: yaml_file.Config, word: str, value: Any) -> str:
    """The fix for a setting of the script outside `hyperparameters`."""
    text = "…"
    if isinstance(value, (str, int, float)) and not mentions_a_secret(f"{word}={value}"):
        text = yaml_file.as_override(word, value).partition("=")[2]
    if _is_an_override(config, word):
        return f"write hyperparameters.{word}={text}"
    return f"write it under hyperparameters: {word}: {text}"


def _settings(values: Mapping[str, Any]) -> list[str]:
    """Names of the settings of a config's script; none if they cannot be read."""
    from launcher.config.descriptions import script_settings

    try:
        source = Path(values["source"]) if values.get("source") is not None else entrypoints_folder()
        return [one.name for one in script_settings(source, values["script"])]
    except Exception:  # whatever the script, or a wrong value here, would raise
        return []


def _fields_below(name: str) -> list[str]:
    model = _model_at([name])
    return list(model.model_fields) if model is not None and model is not Job else []


def _field_at(path: Sequence[str]) -> tuple[type[Part], FieldInfo | None]:
    """The model that the last part of a path belongs to, and its field there, if any."""
    model: type[Part] = Job
    field = None
    for depth, name in enumerate(path):
        field = model.model_fields.get(name)
        if depth == len(path) - 1:
            break
        model = _model_at(path[: depth + 1]) or model
    return model, field


def _model_at(path: Sequence[str]) -> type[Part] | None:
    """The model whose keys are below a path; None if any values are allowed there."""
    model: type[Part] | None = Job
    below: Any = None
    for name in path:
        if below is not None:  # a key of a mapping, or a place in a list
            model, below = _part_in(below)
            continue
        field = model.model_fields.get(name) if model is not None else None
        if field is None:
            return None
        model, below = _part_in(field.annotation)
    return model if below is None else None


def _part_in(annotation: Any) -> tuple[type[Part] | None, Any]:
    """What an annotation holds: a Part itself; or, for a mapping or a list, the annotation of its items."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        options = [_part_in(argument) for argument in arguments if argument is not type(None)]
        return next((option for option in options if option != (None, None)), (None, None))
    if origin is typing.Annotated:
        return _part_in(arguments[0])
    if origin in (dict, list) and _part_in(arguments[-1]) != (None, None):
        return None, arguments[-1]
    return (annotation, None) if isinstance(annotation, type) and issubclass(annotation, Part) else (None, None)


def _hides(path: Sequence[str]) -> bool:
    """Whether a value at this place may be a secret and is not printed."""
    return path[0] == "secrets" or path == ["environment"] or any(map(names_a_secret, path))


def _kind(value: Any) -> str:
    """A value's type in words."""
    kinds = {
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        str: "text",
        dict: "a mapping",
        list: "a list",
    }
    return kinds.get(type(value), type(value).__name__)


def as_written(value: Any) -> str:
    """A value as the user wrote it, shortened, with its type in words."""
    if value is None:
        return "nothing (null)"
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # Python writes at most 4,300 digits
        text = "a number with too many digits"
    if mentions_a_secret(text):
        return _kind(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({_kind(value)})"

"""Job: what one config file says, typed and frozen. A Job touches neither the network nor the disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from launcher import config_file
from launcher.findings import Finding, UserError, did_you_mean, mistake

Distribution = Literal["smddp", "torchrun", "none"]
Text = Annotated[str, StringConstraints(min_length=1)]


class Part(BaseModel):
    """A piece of a job: frozen, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Compute(Part):
    """The machines."""

    instance_count: int = Field(1, ge=1, description="a whole number from 1", examples=[2])
    """Hosts. On this machine each is a process tree with a loopback address of its own."""
    processes_per_host: int | None = Field(None, ge=1, description="a whole number from 1, or null", examples=[2])
    """Training processes a host; null: one a GPU, or one where there is none."""
    max_hours: float = Field(24.0, gt=0, le=28 * 24, description="hours, above 0 and at most 672", examples=[1.5])
    """The run is stopped after this long, in hours. 672 (28 days) is SageMaker's own maximum of MaxRuntimeInSeconds."""


class Input(Part):
    """One data channel: exactly one of the keys."""

    folder: Text | None = Field(None, description="a folder on this machine", examples=["data/digits/train"])
    """A folder on this machine, relative to where the command runs. Read in place, never copied."""
    file: Text | None = Field(None, description="a file on this machine", examples=["teacher/model.safetensors"])
    """A file on this machine; the channel holds it under its own name."""
    run: Text | None = Field(
        None, description="an earlier run, or the name of its job", examples=["quickstart-teacher"]
    )
    """An earlier run, by its name or by its job's name (then the latest that completed): the channel holds its model.tar.gz."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Input:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'none'} of {', '.join(type(self).model_fields)} given: give exactly one"
            )
        return self


class Job(Part):
    """What one config file says."""

    name: str = Field(
        pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$",
        max_length=42,
        examples=["kt-food-tag"],
        description="letters, digits and hyphens, 42 characters at most, a letter or digit at both ends",
    )
    """The job's name. A run's name adds 21 characters (time and four letters): SageMaker allows 63 in all."""
    script: str = Field(
        pattern=r"^[A-Za-z0-9._][A-Za-z0-9._+-]*(/[A-Za-z0-9._+-]+)*\.py$",
        examples=["train_kd.py"],
        description="a .py file, by its path inside the source folder: letters, digits and . _ + - /",
    )
    """The entry script. The pattern is that of AWS's container toolkit, which refuses other names after the start."""
    source: Text | None = Field(
        None, description="a folder on this machine, or null for this kit's entrypoints", examples=["src"]
    )
    """The folder that travels and holds `script`; null: this kit's own entrypoints."""
    compute: Compute = Field(default_factory=Compute, description="a mapping")
    distribution: Distribution = Field("none", description="smddp, torchrun or none", examples=["torchrun"])
    """How training processes are started: smddp (SageMaker's data parallel library, by mpirun), torchrun, or one plain process."""
    inputs: dict[str, Input] = Field(default_factory=dict, description="channel names, each with folder, file or run")
    """Data channels by name. The script finds each as SM_CHANNEL_<NAME>."""
    hyperparameters: dict[str, Any] = Field(default_factory=dict, description="the script's settings")
    """The script's settings, checked against the class that it declares."""
    environment: dict[str, str] = Field(
        default_factory=dict, description="texts by name", examples=['{NCCL_DEBUG: "INFO"}']
    )
    """Environment variables for the script."""


def load(path: str | Path, overrides: Sequence[str] = (), *, smoke: bool = False) -> Job:
    """Read a config file into a Job.

    Args:
        path: a YAML file.
        overrides: `dotted.key=value` texts, applied last; values are YAML.
        smoke: lay the file's own `smoke:` section over it first.

    Raises:
        UserError: every mistake in the file and the overrides, at once.
    """
    config = config_file.read(path)
    base = dict(config.values)
    changes = base.pop("smoke", None)
    if changes is not None and not isinstance(changes, dict):
        raise mistake(
            config.where("smoke"),
            _shown(changes),
            "write under smoke: the keys that --smoke changes",
            valid="a mapping",
        )
    if smoke and changes is None:
        raise mistake(
            f"{path}: smoke",
            "--smoke was asked for and the config has no smoke section",
            "add `smoke:` with the keys to change, for example `smoke: {hyperparameters: {max_steps: 3}}`",
        )
    smoked = config_file.merge(base, changes or {})
    chosen, found = config_file.override(replace(config, values=smoked if smoke else base), overrides)
    found += _problems(chosen)
    if not smoke:  # a mistake in the smoke section is one too, whoever meets it first
        usual = list(_problems(replace(config, values=base, lines={})))
        found += [
            replace(finding, key=config.where(f"smoke.{finding.key}"))
            for finding in _problems(replace(config, values=smoked, lines={}))
            if finding not in usual
        ]
    if found:
        raise UserError(found, str(path), rest=_without_mistakes(chosen.values))
    return Job.model_validate(chosen.values)


def from_values(values: Mapping[str, Any], source: str = "the job") -> Job:
    """A Job from a plain mapping, for Python and notebooks. Raises UserError with every mistake."""
    found = list(_problems(config_file.Config(source, dict(values))))
    if found:
        raise UserError(found, source)
    return Job.model_validate(dict(values))


def _problems(config: config_file.Config) -> Iterator[Finding]:
    """Every way in which the values are not a Job."""
    try:
        Job.model_validate(config.values)
    except ValidationError as error:
        for item in error.errors():
            yield _finding(config, item)


def _without_mistakes(values: Mapping[str, Any]) -> Job | None:
    """The job that is left when every wrong key is taken out; None where too little is left."""
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        left = deepcopy(dict(values))
        for item in error.errors():
            at, path = left, [part for part in item["loc"] if part != "[key]"]
            for part in path[:-1]:
                at = at.get(part, {}) if isinstance(at, dict) else {}
            if path and isinstance(at, dict):
                at.pop(path[-1], None)
    try:
        return Job.model_validate({"name": "job", **left})
    except ValidationError:
        return None


def _finding(config: config_file.Config, item: Mapping[str, Any]) -> Finding:
    """One pydantic error, with what would have been valid and a cure."""
    path = [str(part) for part in item["loc"] if part != "[key]"]
    key = ".".join(path) or config.source
    parent, field = _field_at(path)
    example = field.examples[0] if field is not None and field.examples else None
    valid = (field.description or "") if field is not None else ""
    leaf = path[-1] if path else ""
    if item["type"] == "extra_forbidden":
        fields = list(parent.model_fields) + (["smoke"] if parent is Job else [])
        return Finding(
            key=config.where(key), found="unknown key", valid=", ".join(fields), cure=did_you_mean(leaf, fields)
        )
    if item["type"] == "missing":
        return Finding(
            key=key, found="missing", valid=valid, cure=f"add {leaf}: {example}" if example else f"add {leaf}"
        )
    if item["type"] == "value_error":
        return Finding(
            key=config.where(key),
            found=str(item["ctx"]["error"]),
            cure=f"correct {leaf}",
            valid="; ".join(
                f"{name}: {part.description}" for name, part in (_model_at(path) or Job).model_fields.items()
            ),
        )
    value = item["input"]
    if item["type"] == "model_type" and path[0] == "inputs" and isinstance(value, str):
        return Finding(
            key=config.where(key),
            found=_shown(value),
            valid="; ".join(Input.model_fields),
            cure=f"write {leaf}: {{folder: {value}}}",
        )
    cure = f"write {leaf}: {example}" if example is not None else f"correct {leaf}"
    if item["type"] == "literal_error" and isinstance(value, str):
        words = [word.strip() for word in valid.replace(" or ", ", ").split(",")]
        cure = did_you_mean(value, words, cure)
    if key == "name" and isinstance(value, str) and (name := re.sub(r"[^a-zA-Z0-9]+", "-", value)[:42].strip("-")):
        cure = f"write name: {name}"
    if item["type"] == "string_type" and isinstance(value, (int, float, bool)):
        cure = f'quote it: {leaf}: "{str(value).lower() if isinstance(value, bool) else value}"'
    return Finding(key=config.where(key), found=_shown(value), valid=valid or item["msg"], cure=cure)


def _field_at(path: Sequence[str]):
    """The model that owns the last part of a path, and the field there if it knows one."""
    model, field = Job, None
    for depth, name in enumerate(path):
        field = model.model_fields.get(name) if model is not None else None
        if depth == len(path) - 1:
            break
        model = _model_at(path[: depth + 1]) or model
    return model, field


def _model_at(path: Sequence[str]) -> type[Part] | None:
    """The model whose keys stand below a path; None where free values do."""
    if not path:
        return Job
    if path[0] == "compute" and len(path) == 1:
        return Compute
    if path[0] == "inputs" and len(path) == 2:
        return Input
    return None


def _shown(value: Any) -> str:
    """A value as the user wrote it, shortened, with its kind."""
    kinds = {
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        str: "text",
        dict: "a mapping",
        list: "a list",
    }
    if value is None:
        return "nothing (null)"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kinds.get(type(value), type(value).__name__)})"

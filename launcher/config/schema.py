"""The JSON schema of a config, for editors: made from the classes that check it, so there is no second list of keys.

JSON Schema, draft 2020-12: https://json-schema.org/draft/2020-12. Conditions between keys are left to `launcher plan`.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from copy import deepcopy
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from launcher.config import descriptions
from launcher.config.descriptions import Described
from launcher.config.entrypoints import entrypoints_folder, kit_modules
from launcher.config.hyperparameters import declared_settings
from launcher.config.job import Job
from launcher.config.sections import Input

TITLE = "A config of vision-launcher"

Schema = dict[str, Any]


def config_schema() -> Schema:
    """The schema of a config file, JSON-ready, with its `smoke` section and the settings of the kit's own scripts."""
    made = Job.model_json_schema()
    made["properties"]["smoke"] = {"type": "object", "additionalProperties": False}
    definitions = made.pop("$defs")
    models = {model.__name__: model for _, model in descriptions.config_sections()}
    for name, definition in [("Job", made), *definitions.items()]:
        _describe(definition, models[name])
    definitions["Input"]["oneOf"] = [{"required": [name]} for name in Input.SOURCES]
    secret = definitions["Secret"]
    definitions["Secret"] = {"description": secret.pop("description"), "anyOf": [{"const": "env"}, secret]}
    address = definitions["Checkpoints"]["properties"]["s3"]  # the short form
    made["properties"]["checkpoints"]["anyOf"].insert(
        0, {key: address[key] for key in ("type", "pattern", "maxLength")}
    )
    made["properties"]["smoke"]["properties"] = {name: deepcopy(made["properties"][name]) for name in Job.model_fields}
    settings = _kit_settings()
    definitions |= {f"settings of {script}": schema for script, schema in settings.items()}
    made["allOf"] = [_with_settings(script) for script in settings]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": TITLE, "$defs": definitions}


def _describe(schema: Schema, model: type[BaseModel]) -> None:
    """Add the sentences of its keys to a section's schema, and remove pydantic's titles."""
    schema.pop("title")
    schema["description"] = descriptions.first_paragraph(model)
    for key in descriptions.config_keys(model):
        about = schema["properties"][key.name]
        about.pop("title", None)
        about["description"] = _text(key)


def _text(item: Described) -> str:
    """A key's sentence, then what it takes."""
    takes = f"Takes {item.takes}." if item.takes else ""
    return " ".join(filter(None, [item.sentence, takes]))


def _with_settings(script: str) -> Schema:
    """The hyperparameters' schema if one of the kit's scripts runs: one of that name without `source`."""
    known = f"#/$defs/settings of {script}".replace(" ", "%20")
    required = {"$ref": known}
    small = {"properties": {"hyperparameters": {"$ref": known + "/$defs/smoke"}}}
    return {
        "if": {"properties": {"script": {"const": script}}, "required": ["script"], "not": {"required": ["source"]}},
        "then": {"properties": {"hyperparameters": required, "smoke": small}},
    }


def _kit_settings() -> dict[str, Schema]:
    """Script -> the schema of its settings, for the kit's scripts; its own definition `smoke` requires none of them."""
    declared = {file.name: declared_settings(file) for file in sorted(entrypoints_folder().glob("*.py"))}
    found = {}
    with kit_modules("training.settings") as (settings,):  # once for all: what they share is described once
        for script, (module, name) in ((script, one) for script, one in declared.items() if one is not None):
            whole = _of_settings(getattr(importlib.import_module(module), name), settings)
            part = {key: value for key, value in whole.items() if key != "required"}
            found[script] = {**whole, "$defs": {"smoke": part}}
    return found


def _of_settings(cls: type, settings: ModuleType) -> Schema:
    """The schema of a settings class."""
    annotations, properties = typing.get_type_hints(cls), {}
    described = descriptions.settings_of(cls, settings)
    limits = {item.name: item.metadata.get("limits") for item in dataclasses.fields(cls)}
    for item in described:
        properties[item.name] = {
            **_typed(annotations[item.name], limits[item.name], settings),
            "description": _text(item),
            **({} if item.required else {"default": item.default}),
        }
    required = [item.name for item in described if item.required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _typed(annotation: Any, limits: Any, settings: ModuleType) -> Schema:
    """The schema of a setting's type, with its range on every number in it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_typed(part, limits, settings) for part in inner]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if annotation in (int, float):
        names = {"above": "exclusiveMinimum", "at_least": "minimum", "below": "exclusiveMaximum", "at_most": "maximum"}
        names |= {"multiple_of": "multipleOf"}
        bounds = {word: getattr(limits, name, None) for name, word in names.items()}
        kind = "integer" if annotation is int else "number"
        return {"type": kind, **{word: bound for word, bound in bounds.items() if bound is not None}}
    if origin in (list, tuple):
        fixed = origin is tuple and inner[1:] != (...,)
        if fixed:
            return {"type": "array", "prefixItems": [_typed(part, limits, settings) for part in inner], "items": False}
        return {"type": "array", "items": _typed(inner[0], limits, settings)}
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _of_settings(annotation, settings)
    kinds = {bool: "boolean", str: "string", type(None): "null", list: "array", tuple: "array"}
    named = "object" if dict in (origin, annotation) else kinds.get(annotation)
    return {"type": named} if named else {}

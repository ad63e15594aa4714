"""Importing this lets AWS's libraries read and validate once a process what is the same for all tests."""

from __future__ import annotations

import functools
from typing import Any

import botocore.session
import jsonschema


def _validated_once(validator: Any) -> Any:
    passed: dict[tuple[str, int], Any] = {}

    def validate(instance: Any, schema: Any, *arguments: Any, **options: Any) -> None:
        key = repr((instance, arguments, options)), id(schema)
        if key not in passed:
            validator(instance, schema, *arguments, **options)
            passed[key] = schema  # kept, so that no other takes its identity

    return validate


# SDK v2 validates the same settings for every argument of an estimator
jsonschema.validate = _validated_once(jsonschema.validate)
# each test has sessions of its own, and a session reads AWS's description of every service that it calls
botocore.session.create_loader = functools.cache(botocore.session.create_loader)

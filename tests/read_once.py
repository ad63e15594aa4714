"""What AWS's libraries read and judge again for every test, though it is always the same, is read and judged once a process."""

from __future__ import annotations

import functools
from typing import Any

import botocore.session
import jsonschema


def _judged_once(judge: Any) -> Any:
    passed: dict[tuple[str, int], Any] = {}

    def validate(instance: Any, schema: Any, *arguments: Any, **options: Any) -> None:
        key = repr((instance, arguments, options)), id(schema)
        if key not in passed:
            judge(instance, schema, *arguments, **options)
            passed[key] = schema  # kept, so that no other takes its identity

    return validate


# SDK v2 has the same settings judged for every argument of an estimator: 2 s each
jsonschema.validate = _judged_once(jsonschema.validate)
# each test has sessions of its own, and a session reads AWS's description of every service that it calls: 0.2 s a client
botocore.session.create_loader = functools.cache(botocore.session.create_loader)

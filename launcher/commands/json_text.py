"""What the commands print with --json."""

from __future__ import annotations

import json
import math
from typing import Any


def as_json(value: Any) -> str:
    """Indented JSON, in which numbers that JSON does not have, NaN and infinities, are null.
    https://www.rfc-editor.org/rfc/rfc8259#section-6"""
    return json.dumps(_without_nan(value), indent=2, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

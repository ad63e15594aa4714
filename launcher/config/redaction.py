"""What is printed and recorded in place of secrets that are not declared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher.config.secret_shapes import names_a_secret, secrets_in_text

REDACTED = "***"

_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")
"""User and password of a URL: RFC 3986, section 3.2.1."""


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable seems to hold a secret: by its name, or because its value looks like one."""
    return names_a_secret(name) or bool(_IN_URL.search(value) or secrets_in_text(value.encode("utf-8", "replace")))


def redact(values: Mapping[str, str]) -> dict[str, str]:
    """The values with REDACTED in place of every secret."""
    return {name: REDACTED if is_secret(name, value) else value for name, value in values.items()}


def secrets_in(values: Mapping[str, str]) -> dict[str, str]:
    """The secrets among the values."""
    return {name: value for name, value in values.items() if is_secret(name, value)}


def without_passwords(text: str) -> str:
    """A text with REDACTED in place of users and passwords in URLs."""
    return _IN_URL.sub(REDACTED, text)


def holds_a_secret(name: str, value: Any) -> bool:
    """Whether a setting, or one inside it, seems to be a secret. Of numbers only whole ones with four digits or more can be one."""
    if isinstance(value, Mapping):
        return any(holds_a_secret(str(key), item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return any(holds_a_secret(name, item) for item in value)
    if isinstance(value, str):
        return bool(value) and is_secret(name, value)
    return isinstance(value, int) and abs(value) > 999 and names_a_secret(name)

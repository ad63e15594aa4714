"""Secrets that are not declared: which names and values seem to hold one, and what is printed and recorded in place of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"

_KEYS = (
    "access|account|api|auth|aws|client|db|deploy|encryption|host|kaggle|license|master|openai|private|sa|secret|service|service_account"
    "|shared|signing|ssh|storage|subscription|wandb"
)
_SECRET = re.compile(
    rf"(^|_)(({_KEYS})_?keys?(_id)?|token(_(read|write|pypi))?|[a-z]*secrets?|[a-z]*password|passwd|pass|passphrase|pgpass|pwd|pat"
    r"|credentials?|auth(_config)?|cookie|webhook|connection_string|dsn"
    r"|(amqp|broker|celery|database|db|index|mongo(db)?|mysql|postgres(ql)?|rabbitmq|redis|webhook)_ur[il])$"
)
_TOKEN_OF_A_MODEL = re.compile(r"(^|_)(bos|class|cls|dist|eos|mask|max|min|num|pad|reg|sep|unk)_token$")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[.\-]")

_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")
"""User and password of a URL: RFC 3986, section 3.2.1."""


def names_a_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret: HF_TOKEN and apiKey do, num_tokens and key_frames do not."""
    words = _WORDS.sub("_", name).lower()
    return name not in ("PWD", "OLDPWD") and bool(_SECRET.search(words)) and not _TOKEN_OF_A_MODEL.search(words)


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable seems to hold a secret, by its name or because its value is a URL with a password."""
    return names_a_secret(name) or bool(_IN_URL.search(value))


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

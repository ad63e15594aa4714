"""Secrets: which names hold one, and what is printed and recorded in place of it."""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "***"

_SECRET = re.compile(
    r"(^|_)(api_?key|access_?key(_id)?|private_?key|secret_?key|ssh_?key|openai_?key|wandb_?key|token(_(read|write))?|secret|password"
    r"|passwd|passphrase|pgpass|pwd|pat|credentials?|auth|webhook(_url)?|dsn|database_url)$",
    re.IGNORECASE,
)


def names_a_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret: HF_TOKEN and api_key do, num_tokens and key_frames do not."""
    return bool(_SECRET.search(name))


def redact(values: Mapping[str, str]) -> dict[str, str]:
    """The values with REDACTED in place of every secret."""
    return {name: REDACTED if names_a_secret(name) else value for name, value in values.items()}


def secrets_in(values: Mapping[str, str]) -> dict[str, str]:
    """The secrets among the values."""
    return {name: value for name, value in values.items() if names_a_secret(name)}

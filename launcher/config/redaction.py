"""Redaction of undeclared secrets in what is printed and recorded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.secret_shapes import names_a_secret, secrets_in_text

REDACTED = "***"

_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")
"""User and password of a URL: RFC 3986, section 3.2.1."""


_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)=[^\s()\[\]{}\\$<>]")
"""A name and the value that follows, as in an option of mpirun or torchrun; regular expressions and references have none."""


_MAPPED = re.compile(r"""["']?([A-Za-z_][\w.-]*)["']?\s*:\s*(?:["'][^"']|\d{4})""")
"""A name and the text or number that it stands for, as in JSON and Python."""

_NAME = re.compile(r"""[^\s"'{};|&]+""")
"""Name of an option or a variable, or Hydra's `+name`; anything more is a command of its own."""


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable seems to hold a secret: by its name, or because its value looks like one or assigns one."""
    return (
        names_a_secret(name)
        or bool(_IN_URL.search(value) or secrets_in_text(value.encode("utf-8", "replace")))
        or any(map(names_a_secret, _ASSIGNED.findall(value)))
    )


def mentions_a_secret(text: str) -> bool:
    """Whether a text of the user's may show a secret: one of its words names one, or it looks like one."""
    return is_secret("", text) or any(map(names_a_secret, re.findall(r"[\w.-]+", text)))


def redact(values: Mapping[str, str]) -> dict[str, str]:
    """The values with REDACTED in place of every secret."""
    return {name: REDACTED if is_secret(name, value) else value for name, value in values.items()}


def secrets_in(values: Mapping[str, str]) -> dict[str, str]:
    """The secrets among the values."""
    return {name: value for name, value in values.items() if is_secret(name, value)}


def redact_text(text: str, values: Mapping[str, str]) -> str:
    """A text with REDACTED in place of the secrets among the values."""
    for secret in secrets_in(values).values():
        text = text.replace(secret, REDACTED)
    return text


def holds_a_secret(name: str, value: Any) -> bool:
    """Whether a setting, or one inside it, seems to be a secret. Among numbers, only whole ones with four digits or more can be one."""
    if isinstance(value, Mapping):
        return any(holds_a_secret(str(key), item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return any(holds_a_secret(name, item) for item in value)
    if isinstance(value, str):
        return bool(value) and is_secret(name, value)
    return isinstance(value, int) and abs(value) > 999 and names_a_secret(name)


def redact_setting(name: str, value: Any) -> Any:
    """A setting with REDACTED in place of every secret at and below it."""
    if isinstance(value, Mapping):
        return {key: redact_setting(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_setting(name, item) for item in value]
    return REDACTED if holds_a_secret(name, value) else value


def redact_command(words: Sequence[str]) -> list[str]:
    """A command's words with REDACTED in place of every secret: in `--token SECRET`, `--token=SECRET`, `TOKEN=SECRET` and other texts."""
    kept: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if option and not word.startswith("-") and names_a_secret(option):
            kept.append(REDACTED)
        elif equals and value and _NAME.fullmatch(name) and is_secret(name.lstrip("-"), value):
            kept.append(f"{name}={REDACTED}")
        else:
            kept.append(REDACTED if is_secret("", word) or _has_one_within(word) else word)
        option = word.lstrip("-") if word.startswith("-") and not equals else ""
    return kept


def _has_one_within(word: str) -> bool:
    """Whether a word of a command is itself a command, as for `bash -c`, or JSON, and contains a secret."""
    if any(map(names_a_secret, _MAPPED.findall(word))):
        return True
    try:
        words = shlex.split(word)
    except ValueError:  # an apostrophe
        words = word.split()
    return words != [word] and redact_command(words) != words

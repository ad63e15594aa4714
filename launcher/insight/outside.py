"""What can be set in a script without changing it: by LAUNCHER_SETTINGS, which the observer reads, and by other environment variables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETTINGS = "LAUNCHER_SETTINGS"
"""The variable that entrypoints/launcher_observer/setting_overrides.py reads."""

OUTSIDE = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "matmul_precision", "cudnn_benchmark")
"""What it can set."""

VARIABLES = ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings that are environment variables, whatever the script."""


@dataclass(frozen=True)
class Watched:
    """A command that `launcher watch` ran."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Its values of SETTINGS and VARIABLES."""

    def command(self, changes: Mapping[str, Any]) -> str:
        """The shell command that runs it again with some changes, in the same folder."""
        own = given_settings(self.environment.get(SETTINGS, "")) or {}  # the observer ignored what is no JSON object
        return watch_command({**self.environment, **variables(changes, own)}, self.words)


def changes_of(setting: str | None, value: Any) -> dict[str, Any]:
    """Setting -> value, for what a fix sets; {} if only the script or its config can."""
    section, _, name = (setting or "").rpartition(".")
    if name in OUTSIDE or (section == "environment" and name in VARIABLES):
        return {name: value}
    return {"matmul_precision": "high"} if name == "precision" and value == "tf32" else {}


def variables(changes: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that apply changes.

    Args:
        own: what SETTINGS sets already; it stays, unless the changes set it too.
    """
    settings = {name: value for name, value in changes.items() if name not in VARIABLES}
    found = {name: str(value) for name, value in changes.items() if name in VARIABLES}
    return {**({SETTINGS: json.dumps({**own, **settings})} if settings else {}), **found}


def watch_command(environment: Mapping[str, str], words: Sequence[str]) -> str:
    """The shell command that watches a command with some environment variables."""
    given = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*given, "launcher watch --", shlex.join(words)])


def given_settings(text: str) -> dict[str, Any] | None:
    """What a value of SETTINGS sets; None: it is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

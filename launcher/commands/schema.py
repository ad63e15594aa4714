"""`launcher schema`: the JSON schema of a config, for editors."""

from __future__ import annotations

import argparse
import functools
import json

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE


def add(to: arguments.Add) -> None:
    to("schema", "print the JSON schema of a config, for editors", carry_out)


def carry_out(options: argparse.Namespace) -> int:
    print(text(), end="")
    return DONE


@functools.cache  # `launcher init` compares it with what is there, then writes it
def text() -> str:
    """The schema as JSON."""
    from launcher.config.schema import config_schema

    return json.dumps(config_schema(), indent=1) + "\n"

"""Where plans run: one class a backend, each a `Backend` in a file that is imported only when it is asked for."""

from __future__ import annotations

import importlib

from launcher.backends.base import Backend
from launcher.config.issues import did_you_mean, mistake

BACKENDS = {
    "process": "launcher.backends.process:Process",
    "docker": "launcher.backends.docker:Docker",
    "aws": "launcher.backends.aws:Aws",
}
"""Name on the command line -> module and class."""

DEFAULT = "process"
"""The backend of a command that names none."""


def get(name: str) -> Backend:
    """The backend of that name. Raises UserError where there is none."""
    if name not in BACKENDS:
        fix = did_you_mean(name, BACKENDS, f"write --on {DEFAULT}")
        raise mistake("--on", f"no backend {name}", fix, valid=", ".join(BACKENDS))
    module, _, kind = BACKENDS[name].partition(":")
    made = getattr(importlib.import_module(module), kind)()
    assert isinstance(made, Backend)
    return made

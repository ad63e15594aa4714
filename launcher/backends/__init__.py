"""Where plans run: one `Backend` class each, in a file that is imported on use."""

from __future__ import annotations

import importlib

from launcher.backends.base import Backend
from launcher.config.issues import did_you_mean, mistake

BACKENDS = {
    "process": "launcher.backends.process:Process",
    "docker": "launcher.backends.docker:Docker",
    "aws": "launcher.backends.aws:Aws",
}
"""Name on the command line -> module:class."""

DEFAULT = "process"
"""The backend of a command without --on."""


def get(name: str) -> Backend:
    """A backend by its name. Raises UserError for an unknown name."""
    if name not in BACKENDS:
        fix = did_you_mean(name, BACKENDS, f"write --on {DEFAULT}")
        raise mistake("--on", f"no backend {name}", fix, valid=", ".join(BACKENDS))
    module, _, kind = BACKENDS[name].partition(":")
    made = getattr(importlib.import_module(module), kind)()
    assert isinstance(made, Backend)
    return made

"""Where plans run: one `Backend` class per file, imported on use."""

from __future__ import annotations

import importlib

from launcher.backends.base import Backend, Starter
from launcher.config.issues import did_you_mean, mistake

BACKENDS = {
    "process": "launcher.backends.process:Process",
    "docker": "launcher.backends.docker:Docker",
    "aws": "launcher.backends.aws:Aws",
}
"""Name on the command line -> module:class."""

STARTERS = {**BACKENDS, "watch": "launcher.backends.watch:Watch"}
"""Starter in a run's record -> module:class."""

OTHER_NAMES = {"sagemaker": "aws", "cloud": "aws", "local": "process", "here": "process", "container": "docker"}
"""Common alias -> name."""

DEFAULT = "process"
"""The backend of a command without --on."""


def get(name: str) -> Backend:
    """A backend by its name. Raises UserError for an unknown name."""
    if name not in BACKENDS:
        meant = OTHER_NAMES.get(name.lower(), name.lower())
        fix = f"write --on {meant}" if meant in BACKENDS else did_you_mean(meant, BACKENDS, f"write --on {DEFAULT}")
        raise mistake("--on", f"no backend {name}", fix, valid=", ".join(BACKENDS))
    made = _made(BACKENDS[name])
    assert isinstance(made, Backend)
    return made


def starter(name: str) -> Starter:
    """The starter of a recorded run, by the name in its record. Raises UserError for an unknown name."""
    return _made(STARTERS[name]) if name in STARTERS else get(name)


def _made(place: str) -> Starter:
    module, _, kind = place.partition(":")
    made = getattr(importlib.import_module(module), kind)()
    assert isinstance(made, Starter)
    return made

"""The models of timm by its version, so that a plan knows a name without timm, which would import torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.config.students import students

FILE = Path(__file__).with_name("timm_models.txt")
"""First line: the versions. Then a line for each architecture, with the names of its weights; `>=` and `<` bound the versions that
have a name. `python -m tests.launcher.timm_models` adds the installed version."""

SETTINGS = ("model", "student", "teacher")
"""Hyperparameters of this kit's scripts that name a model, or several."""


def check(job: Job, version: str | None) -> Iterator[Issue]:
    """Names in the hyperparameters of one of this kit's scripts that timm does not know.

    Args:
        version: of timm where the job runs; None: unknown.
    """
    named = {setting: job.hyperparameters.get(setting) for setting in SETTINGS if job.source is None}
    named |= {f"students.{name}.student": own.get("student") for name, own in students(job).items()}
    for setting, given in named.items():
        for name in given if isinstance(given, list) else [given]:
            if isinstance(name, str):
                yield from check_name(f"hyperparameters.{setting}", name, version)


def check_name(key: str, name: str, version: str | None) -> Iterator[Issue]:
    """An issue where timm knows no such model. A name with a colon is a folder or on a hub, and not timm's."""
    known = models(version) if version is not None else {}
    model, dot, weights = name.partition(".")
    if not known or ":" in name or (model in known and (not dot or weights in known[model])):
        return
    if model in known:
        found, near = f"timm {version} has no weights {weights} of {model}", sorted(known[model])
        nearest = difflib.get_close_matches(weights, near, n=1, cutoff=0)
        meant = f"{model}.{nearest[0]}" if nearest else model
    else:
        longer = sorted((each for each in known if model and each.startswith(model)), key=len)
        found, near = f"timm {version} has no model {model}", longer[:5] or difflib.get_close_matches(model, known, n=5)
        meant = near[0] if near else ""
    fix = f"did you mean {meant}?" if meant else "timm.list_models() names all"
    yield Issue(key=key, found=found, valid=", ".join(near), fix=fix)


@cache
def models(version: str) -> Mapping[str, frozenset[str]]:
    """Every architecture of a version of timm, with the names of its published weights; empty for an unlisted version."""
    head, *lines = FILE.read_text(encoding="utf-8").splitlines()
    versions = head.split()[1:]
    if version not in versions:
        return {}
    at, found = versions.index(version), {}
    for line in lines:
        name, *weights = line.split()
        for model in _there([name], versions, at):
            found[model] = frozenset(_there(weights, versions, at))
    return found


def _there(items: Iterable[str], versions: Sequence[str], at: int) -> Iterator[str]:
    """The names that the version at a place has, of items with bounds."""
    for item in items:
        rest, _, last = item.partition("<")
        name, _, first = rest.partition(">=")
        if versions.index(first or versions[0]) <= at and (not last or at < versions.index(last)):
            yield name

"""timm's models by version, so that a plan can check a name without timm, which would import torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.config.students import LABELS, LABELS_PIXELS, students
from launcher.planner.teachers import PIXELS

FILE = Path(__file__).with_name("timm_models.txt")
"""First line: the versions. Then a line for each architecture, with the names of its weights; `>=` and `<` bound the versions that
have a name. `python -m tests.launcher.timm_models` adds the installed version."""

SETTINGS = ("model", "student", "teacher")
"""Hyperparameters of this kit's scripts that name a model, or several."""

USUAL_OPTIONS = {
    *("in_chans", "num_classes", "global_pool", "drop_rate", "drop_path_rate", "features_only", "out_indices"),
    *("img_size", "patch_size", "embed_dim", "embed_dims", "depth", "depths", "num_heads", "mlp_ratio", "mlp_ratios"),
}
"""Options that many of timm's models take, so that these are hardly typos."""

LABELLING = (LABELS, LABELS_PIXELS)
"""Scripts that build the teacher alone."""


def check(job: Job, version: str | None) -> Iterator[Issue]:
    """Names in the hyperparameters of one of this kit's scripts that timm does not know, and options that only timm can check.

    Args:
        version: timm's where the job runs; None: unknown.
    """
    named = {setting: job.hyperparameters.get(setting) for setting in SETTINGS if job.source is None}
    named |= {f"students.{name}.student": own.get("student") for name, own in students(job).items()}
    for setting, given in named.items():
        for name in given if isinstance(given, list) else [given]:
            if isinstance(name, str):
                yield from check_name(f"hyperparameters.{setting}", name, version)
    if job.source is None:
        yield from _options(job)


def _options(job: Job) -> Iterator[Issue]:
    """The options of the models that one of this kit's scripts builds: timm's functions accept any, and only building validates them."""
    shown = job.redacted()["hyperparameters"]
    every = {name: (shown.get(name), shown.get(f"{name}_options")) for name in SETTINGS}
    for name, own in students(job.model_copy(update={"hyperparameters": shown})).items():
        every[f"students.{name}.student"] = (own.get("student", shown.get("student")), own.get("student_options"))
    features = {"features_only": True} if job.script == PIXELS else {}
    for name, (model, options) in every.items():
        built = name == "teacher" or job.script not in LABELLING
        if not built or not isinstance(model, str) or not isinstance(options, dict):
            continue
        if others := [str(option) for option in options if option not in USUAL_OPTIONS]:
            yield Issue(
                key=f"hyperparameters.{name}_options",
                level="not checked",
                found=f"{', '.join(others)}: whether {model} takes {'it' if len(others) == 1 else 'them'}",
                fix=f"try it where timm is installed: timm.create_model({model!r}, **{features | options})",
            )


def check_name(key: str, name: str, version: str | None) -> Iterator[Issue]:
    """An issue if timm knows no such model. A name with a colon is a folder or on a hub, and not timm's."""
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
    """The names in the version at index `at`, from items with bounds."""
    for item in items:
        rest, _, last = item.partition("<")
        name, _, first = rest.partition(">=")
        if versions.index(first or versions[0]) <= at and (not last or at < versions.index(last)):
            yield name

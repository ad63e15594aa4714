"""Add the installed timm's models to launcher/planner/timm_models.txt, where its version is not listed yet.

    .venv/bin/python -m tests.launcher.timm_models

Versions are added in their order; those that are listed stay as they are.
"""

from __future__ import annotations

import timm
from timm.models import _registry

from launcher.planner.model_names import FILE


def registered() -> dict[str, set[str]]:
    """Architecture -> the names of its published weights, as the installed timm has them."""
    found: dict[str, set[str]] = {name: set() for name in _registry._model_entrypoints}
    for name in _registry._model_pretrained_cfgs:
        model, dot, weights = name.partition(".")
        if dot:
            found[model].add(weights)
    return found


def updated(text: str, version: str, found: dict[str, set[str]]) -> str:
    """The file's text with one more version of timm."""
    head, *lines = text.splitlines() or ["timm"]
    first, left, made = len(head.split()) == 1, dict(found), []
    since = "" if first else f">={version}"
    for line in lines:
        name, *weights = line.split()
        if "<" in name or name.partition(">")[0] not in left:
            made.append(line if "<" in name else " ".join([f"{name}<{version}", *weights]))
            continue
        here = left.pop(name.partition(">")[0])
        kept = [item if "<" in item or item.partition(">")[0] in here else f"{item}<{version}" for item in weights]
        new = here - {item.partition(">")[0] for item in kept if "<" not in item}
        made.append(" ".join([name, *kept, *(f"{item}{since}" for item in sorted(new))]))
    made += [" ".join([f"{name}{since}", *sorted(weights)]) for name, weights in left.items()]
    return "\n".join([f"{head} {version}", *sorted(made)]) + "\n"


if __name__ == "__main__":
    before = FILE.read_text(encoding="utf-8") if FILE.is_file() else ""
    if timm.__version__ not in before.partition("\n")[0].split():
        FILE.write_text(updated(before, timm.__version__, registered()), encoding="utf-8")

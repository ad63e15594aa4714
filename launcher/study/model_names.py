"""The names of timm's models, read from its files: importing timm would import torch."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

DEFINED = re.compile(r"^@register_model(?:\([^)]*\))?\s+def (\w+)", re.MULTILINE)
RENAMED = re.compile(r"register_model_deprecations\(__name__, \{(.*?)\}\)", re.DOTALL)


@cache
def timm_models() -> frozenset[str]:
    """All architectures that this environment's timm registers; empty where timm is not installed."""
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        return frozenset()
    names: set[str] = set()
    for file in (Path(found.origin).parent / "models").glob("*.py"):
        text = file.read_text(encoding="utf-8", errors="replace")
        names.update(DEFINED.findall(text))
        for renamed in RENAMED.findall(text):
            names.update(re.findall(r"'(\w+)':", renamed))
    return frozenset(names)


def unknown(model: str) -> bool:
    """Whether timm has no such model; False where that cannot be known. What follows a dot names weights."""
    return bool(timm_models()) and ":" not in model and model.partition(".")[0] not in timm_models()

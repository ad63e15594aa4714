"""Runs the sitecustomize.py that the launcher's shadows, as Python would without it."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself takes milliseconds
    from importlib.machinery import ModuleSpec

OF_THE_SOURCE = "sitecustomize_of_the_source"
"""The module name under which the source folder's own travels, beside the launcher's."""

_under_way: list[str] = []
"""Files being executed now. An agent's sitecustomize may run the next one of the path, which is the launcher's again."""


def run_hidden(ours: str) -> None:
    """Run the next sitecustomize, if any: the source folder's own, else the first in another folder of the path.

    It replaces the launcher's in sys.modules, so that a script can import from it.

    Args:
        ours: path of the launcher's.

    Raises:
        What it raises, which Python reports.
    """
    here = os.path.dirname(os.path.abspath(ours))
    path = [os.path.abspath(place) for place in sys.path]
    after = path[path.index(here) + 1 :] if here in path else path
    folders = [os.path.dirname(os.path.abspath(file)) for file in _under_way]
    done = [*folders, *map(os.path.dirname, folders)]  # a package's file is one deeper
    spec = _found(OF_THE_SOURCE, [here])
    if spec is None or spec.origin in _under_way:
        spec = _found("sitecustomize", [place for place in after if place not in (here, *done)])
    if spec is None or spec.loader is None or spec.origin is None:
        return
    module = type(sys)(spec.name)  # as importlib.util.module_from_spec, whose import takes longer than all of this
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    sys.modules["sitecustomize"] = module
    _under_way.append(spec.origin)
    try:
        spec.loader.exec_module(module)
    finally:
        _under_way.remove(spec.origin)


def _found(name: str, path: list[str]) -> ModuleSpec | None:
    """A module in some folders, found by Python's own finders."""
    found = (finder.find_spec(name, path, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)

"""Calls a function once a module has been imported, whoever imports it, and imports nothing itself."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # each of these costs every Python process of a run milliseconds
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with a module when its import has finished: at once if it already has, with the next import if it is under way.

    Args:
        name: dotted.
    """
    module = sys.modules.get(name)
    under_way = module is not None and name not in _finder.finished and _is_under_way(module)
    if module is not None and not under_way:
        act(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(act)
    if under_way:
        _finder.under_way.add(name)


def _is_under_way(module: ModuleType) -> bool:
    """Whether Python still imports a module, which may itself have imported the one whose hooks ask for it."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """Finds the awaited modules through the other finders, and has their loaders report when they are done."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self.finished: set[str] = set()
        """Modules whose code has run, which Python itself does not say before it has returned from here."""
        self.under_way: set[str] = set()
        """Awaited modules whose import had begun before they were asked for, so that their loaders report nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        for awaited in [*self.under_way]:
            module = sys.modules.get(awaited)
            if module is None or not _is_under_way(module):
                self.under_way.discard(awaited)
                if module is not None:  # else its import failed, and the next one reports
                    self._tell(awaited, module)
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._tell_when_done(spec)
                return spec
        return None

    def _tell_when_done(self, spec: ModuleSpec) -> None:
        """The module keeps its own loader: only the next `exec_module` is ours."""
        loader: Any = spec.loader
        if not hasattr(loader, "__dict__") or not hasattr(loader, "exec_module"):
            return
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            execute(module)
            self.finished.add(spec.name)
            self._tell(spec.name, module)

        loader.exec_module = execute_and_tell

    def _tell(self, name: str, module: ModuleType) -> None:
        for act in self.waiting.pop(name, []):
            act(module)


_finder = _Finder()

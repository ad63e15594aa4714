"""The models of a process: which one an optimizer trains, which are frozen, and on which line the loop calls them."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from launcher_observer.addresses import Address, address, here, is_users, line_of

WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Class -> the attribute that holds the model itself."""

MAX_FROZEN = 5
"""Frozen models that are described."""

READS_VARIABLES = {"locals", "vars", "exec", "eval"}
"""Before Python 3.13, reading a function's variables from outside changes what these gave it."""

OPTIMIZED = 0x1
"""Flag of a function's code (inspect.CO_OPTIMIZED); a module's lacks it."""


def models_of(torch: Any, optimizer: Any) -> Iterator[tuple[Address, dict[str, Any]]]:
    """What is known of frozen models, then of the one that an optimizer trains, and where the running functions call each.

    Args:
        torch: the module.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    best, covered, frozen = None, 0, 0
    for model in _models(torch):
        parameters = _parameters(torch, model)
        inside = sum(id(parameter) in trained for parameter in parameters)
        if inside > covered:
            best, covered = model, inside
        elif parameters and frozen < MAX_FROZEN and not any(parameter.requires_grad for parameter in parameters):
            frozen += 1
            yield _called(model), _values(model, parameters)
    if best is not None:
        yield _called(best), {**_values(best, _parameters(torch, best)), **_layers(torch, best)}
    else:
        yield here(), _values(None, [parameter for group in optimizer.param_groups for parameter in group["params"]])


def _models(torch: Any) -> list[Any]:
    """The modules that are not part of others."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    made = [module for module in modules if {"_modules", "_parameters"} <= module.__dict__.keys()]  # by Module.__init__
    parts = {id(part) for module in made for part in module.__dict__["_modules"].values()}
    return [module for module in made if id(module) not in parts]


def _parameters(torch: Any, model: Any) -> list[Any]:
    """A model's parameters, without those of lazy layers that have not run yet."""
    is_lazy = torch.nn.parameter.is_lazy
    return [parameter for parameter in torch.nn.Module.parameters(model) if not is_lazy(parameter)]


def _values(model: Any, parameters: list[Any]) -> dict[str, Any]:
    """
    Args:
        model: None if only the parameters are known.
    """
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    return {
        "class": type(_itself(model)).__name__ if model is not None else "",
        "parameters": sum(count for count, _ in counts),
        "trainable": sum(count for count, trains in counts if trains),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else None,
    }


def _layers(torch: Any, model: Any) -> dict[str, int]:
    """How many convolutions a model has, and how many matrices: weights of linear layers, attention, embeddings, recurrent layers."""
    modules, parameters = list(torch.nn.Module.modules(model)), _parameters(torch, model)
    convolution = torch.nn.modules.conv._ConvNd
    return {
        "convolutions": sum(issubclass(type(module), convolution) for module in modules),
        "matrices": sum(parameter.dim() == 2 for parameter in parameters),
    }


def _itself(model: Any) -> Any:
    """A model without its wrappers."""
    while type(model).__name__ in WRAPPERS:
        model = getattr(model, WRAPPERS[type(model).__name__])
    return model


def _called(model: Any) -> Address:
    """Where the innermost of the user's functions that can see a model calls it; the current line if none does."""
    frame: FrameType | None = sys._getframe(1)
    same = {id(model), id(_itself(model))}
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            names = [name for name, value in _variables(frame) if id(value) in same]
            own = {line for _, _, line in frame.f_code.co_lines()}
            if lines := [line for name, line in _calls(file) if name in names and line in own]:
                done = [line for line in lines if line <= line_of(frame)]  # the loop's call, not one further below
                return address(file, max(done, default=lines[0]))
        frame = frame.f_back
    return here()


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """What a frame's code can call, by the name it has there: `model`, or `self.model`."""
    yield from list(frame.f_globals.items())
    code = frame.f_code
    if not code.co_flags & OPTIMIZED or READS_VARIABLES.intersection(code.co_names):
        return
    variables = frame.f_locals
    found = list(variables.items())
    if isinstance(variables, dict):  # before Python 3.13 a copy, which would keep the step's tensors
        variables.clear()
    yield from found
    own = getattr(dict(found).get("self"), "__dict__", {})
    for values in (own, own.get("_modules", {})):
        yield from ((f"self.{name}", value) for name, value in list(values.items()))


@functools.lru_cache(maxsize=16)
def _calls(file: str) -> list[tuple[str, int]]:
    """The names that a file calls, and the lines."""
    found = []
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            if isinstance(node, ast.Call):
                found.append((ast.unparse(node.func), node.lineno))
    return found

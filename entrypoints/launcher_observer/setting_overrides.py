"""Overrides a script's settings without changing it: LAUNCHER_SETTINGS, JSON by name.

    LAUNCHER_SETTINGS='{"num_workers": 2, "pin_memory": true}' launcher watch -- python train.py

num_workers, pin_memory, persistent_workers and prefetch_factor replace each DataLoader's own as it is made; matmul_precision and
cudnn_benchmark are set as torch is imported, so a script's own call wins. `launcher tune` sets them.

A loader whose samples depend on its number of workers keeps that number: one with an iterable dataset or a worker_init_fn.
One with persistent workers keeps them persistent, and at least one: otherwise later epochs would draw another order.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

from launcher_observer.report import report

VARIABLE = "LAUNCHER_SETTINGS"

OF_A_LOADER = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
OF_TORCH = ("matmul_precision", "cudnn_benchmark")

KEEPS_WORKERS = "_launcher_keeps_workers"
"""Attribute of a DataLoader whose workers persist by a setting of ours alone. A subclass may have no hash, and copies have it too."""


def apply(torch: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Apply the variable's settings, if there is one; report what cannot be set.

    Args:
        torch: the module, just imported.
    """
    if not environ.get(VARIABLE):
        return
    try:
        settings = dict(json.loads(environ[VARIABLE]))
    except (ValueError, TypeError):
        report(f"{VARIABLE} is not a JSON object and is ignored")
        return
    unknown = sorted({*settings} - {*OF_A_LOADER, *OF_TORCH})
    if unknown:
        report(f"{VARIABLE} cannot set {', '.join(unknown)}, only {', '.join((*OF_A_LOADER, *OF_TORCH))}")
    if "matmul_precision" in settings:
        torch.set_float32_matmul_precision(settings["matmul_precision"])
    if "cudnn_benchmark" in settings:
        torch.backends.cudnn.benchmark = bool(settings["cudnn_benchmark"])
    of_loaders = {name: settings[name] for name in OF_A_LOADER if name in settings}
    if of_loaders:
        _set_on_loaders(torch, of_loaders)


def _set_on_loaders(torch: Any, wanted: Mapping[str, Any]) -> None:
    loading = torch.utils.data.dataloader
    made, reset = loading.DataLoader.__init__, loading._MultiProcessingDataLoaderIter._reset
    signature = inspect.signature(made)

    @functools.wraps(made)
    def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(loader, *args, **kwargs)
        except TypeError:
            made(loader, *args, **kwargs)  # which says what is wrong
            return
        given.apply_defaults()
        own = dict(given.arguments)
        extra = own.pop("kwargs", {})
        changed = {**own, **arguments(torch, own, wanted)}
        if changed["persistent_workers"] and not own["persistent_workers"]:
            vars(loader)[KEEPS_WORKERS] = True
        made(**changed, **extra)

    @functools.wraps(reset)
    def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter and KEEPS_WORKERS in vars(loader):
            # a new iterator for each epoch would draw its workers' seed; without that draw the next epoch's order would differ
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        reset(iterator, loader, first_iter)

    loading.DataLoader.__init__ = __init__
    loading._MultiProcessingDataLoaderIter._reset = _reset


def why_workers_stay(torch: Any, dataset: Any, worker_init_fn: Any) -> str:
    """Why the number of a DataLoader's workers is not set from outside; "" if it may be."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return "its dataset is iterable, and each worker's share depends on num_workers"
    return "" if worker_init_fn is None else "its worker_init_fn may make samples depend on the worker"


def arguments(torch: Any, own: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a DataLoader that change.

    Args:
        own: all its arguments, by name.
    """
    workers = wanted.get("num_workers", own["num_workers"])
    why_not = why_workers_stay(torch, own["dataset"], own["worker_init_fn"])
    if not why_not and own["persistent_workers"] and not workers:
        why_not = "its workers persist, and without workers the order of later epochs changes"
    if why_not and workers != own["num_workers"]:
        report(f"num_workers={workers} is not set on a DataLoader: {why_not}")
        workers = own["num_workers"]
    changes = {name: wanted[name] for name in OF_A_LOADER if name in wanted} | {"num_workers": workers}
    if own["persistent_workers"]:
        changes["persistent_workers"] = True
    if not workers:  # what only workers have
        changes |= {"persistent_workers": False, "prefetch_factor": None, "timeout": 0, "multiprocessing_context": None}
    return changes

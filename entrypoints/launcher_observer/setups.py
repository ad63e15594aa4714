"""What a script set up, and on which line: loaders, models, optimizers, precision, and the calls of its loop."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from types import GetSetDescriptorType
from typing import Any

from launcher_observer.addresses import Address, here, is_users, lines_under_way, shown
from launcher_observer.setting_overrides import why_workers_stay
from launcher_observer.step import Loading

MAX_ENTRIES = 500
"""Per record: a script may make a loader for each of many epochs."""

IMAGES = 4
"""Dimensions from which a tensor holds several images, the first being the batch's."""

SHARDED = "DTensor"
"""The type of parameters that `fully_shard` has sharded across ranks."""


class Loader:
    """A source of batches, mostly a DataLoader: its arguments, and what it turned out to be for."""

    def __init__(self, number: int, made_at: Address, values: dict[str, Any], place: tuple[Any, ...] = ()):
        """
        Args:
            place: what the loaders that one call makes again and again have in common.
        """
        self.number, self.made_at, self.values, self.place = number, made_at, values, place
        self.passes = 0
        self.latest: Loading | None = None
        """The latest pass; None: it was never iterated."""
        self.role = "unknown"
        self.batches: int | None = None
        """Per pass, by its length or by the first pass seen to end; None: not known."""

    @property
    def batch_size(self) -> int | None:
        """Maximum samples per batch; None: not known."""
        size: int | None = self.values.get("batch_size")
        return size

    @property
    def was_asked(self) -> bool:
        """Whether the training thread has asked for a batch of its latest pass."""
        return self.latest is not None and self.latest.trained >= 0

    def next_pass(self) -> Loading:
        self.passes += 1
        self.latest = Loading(self, self.passes)
        return self.latest

    def entry(self) -> tuple[str, Address, dict[str, Any]]:
        return "loader", self.made_at, {"id": self.number, "role": self.role, "batches": self.batches, **self.values}


class Setups:
    """Keeps entries until the record begins; from then on writes new ones at once."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], tuple[str, Address, dict[str, Any]]] = {}
        self._write: Callable[..., None] | None = None
        self._loaders: list[Loader] = []
        self._numbers = itertools.count(1)
        self._of_datasets: dict[tuple[Any, ...], tuple[weakref.ref[Any] | None, Loader]] = {}
        """A weak reference to each dataset, if it can have one, and its loader, by line, the dataset's identity and values."""
        self._others: dict[Address, Loader] = {}
        self._first_makers: dict[int, tuple[weakref.ref[Any], Address]] = {}
        """A weak reference to each dataset and where it was first given to a loader, by the dataset's identity."""

    def begin(self, write: Callable[..., None]) -> None:
        """Write everything seen so far, and later entries at once.

        Args:
            write: takes a line's kind and values.
        """
        self._write = write
        for entry in [*self._entries.values()]:
            self._write_entry(*entry)

    def add(self, of: str, made_at: Address, values: dict[str, Any], which: object = None) -> None:
        """A part of the set-up was seen, or has changed.

        Args:
            which: tells it from others of its kind; its address if not given.
        """
        key = (of, which if which is not None else made_at[:2])
        entry = (of, made_at, values)
        if self._entries.get(key) == entry or (key not in self._entries and len(self._entries) >= MAX_ENTRIES):
            return
        self._entries[key] = entry
        if self._write is not None:
            self._write_entry(*entry)

    def knows(self, of: str) -> bool:
        return any(key[0] == of for key in [*self._entries])

    def loader(self, torch: Any, loader: Any) -> Loader:
        """A DataLoader was made. One with the dataset, line and values of an earlier one counts as the same."""
        made_at, dataset = self._maker(loader.dataset), _reference(loader.dataset)
        values = loader_values(torch, loader)
        described = tuple(sorted((name, str(value)) for name, value in values.items()))
        key = (made_at, id(loader.dataset), described)
        seen, known = self._of_datasets.get(key, (None, None))
        if known is not None and (seen is None or seen() is loader.dataset):
            return known
        samplers = (type(vars(loader).get(name)) for name in ("sampler", "batch_sampler"))
        place = (lines_under_way(), described, *samplers)
        if len(self._loaders) >= MAX_ENTRIES:
            return next((one for one in self._loaders if one.made_at == made_at), Loader(0, made_at, values, place))
        made = self._add_loader(Loader(next(self._numbers), made_at, values, place))
        self._of_datasets[key] = dataset, made
        return made

    def other_loader(self, batches: Any) -> Loader:
        """Another source of batches. It is noted once it turns out to be for training or evaluation."""
        made_at = here()
        known = self._others.get(made_at)
        if known is None:
            values = {"class": type(batches).__qualname__, "batch_size": None, "dataset": None}
            known = self._others[made_at] = self._add_loader(Loader(next(self._numbers), made_at, values))
            if type(batches) in (list, tuple):  # the user's own __len__ may do anything
                known.batches = len(batches)
        return known

    def _add_loader(self, loader: Loader) -> Loader:
        self._loaders.append(loader)
        return loader

    def first_iterated(self, loader: Loader, in_use: Sequence[Loader]) -> Loader:
        """A loader is iterated for the first time.

        Args:
            in_use: the loaders that some DataLoader still stands for.

        Returns:
            the one that it continues, as where each epoch makes a dataset of its own: the only earlier one of its place and length, if that
            is no longer in use. Else itself.
        """
        earlier = [
            one
            for one in self._loaders
            if one.place == loader.place and one.was_asked and loader.batches in (None, one.batches)
        ]
        if len(earlier) != 1 or any(one is earlier[0] for one in in_use):
            self.note(loader)
            return loader
        self._loaders = [one for one in self._loaders if one is not loader]
        self._of_datasets = {
            key: (seen, earlier[0] if one is loader else one)
            for key, (seen, one) in [*self._of_datasets.items()]
            if seen is None or seen() is not None
        }
        return earlier[0]

    def pass_ended(self, loading: Loading) -> None:
        """A finished pass shows the length of a loader that must not be asked."""
        loader: Loader = loading.loader
        if loader.batches is not None or not loading.batches:
            return
        loader.batches = loading.batches
        if loader.role != "unknown":
            self.note(loader)

    def _maker(self, dataset: Any) -> Address:
        """Where a loader is made; if a framework makes it, where the dataset's first one was, which it may stand for."""
        known, made_at = self._first_makers.get(id(dataset)), here()
        if known is not None and known[0]() is dataset:
            return made_at if made_at.via is None else known[1]
        if len(self._first_makers) >= MAX_ENTRIES:
            self._first_makers.clear()
        reference = _reference(dataset)
        if reference is not None:
            self._first_makers[id(dataset)] = reference, made_at
        return made_at

    def note(self, loader: Loader) -> None:
        """More is known about a loader."""
        self.add(*loader.entry(), which=loader.number)

    def _write_entry(self, of: str, made_at: Address, values: dict[str, Any]) -> None:
        assert self._write is not None
        file, line, text, via = made_at
        self._write("setup", of=of, file=file, line=line, text=text, values=values, via=via)


def _reference(dataset: Any) -> weakref.ref[Any] | None:
    """A weak reference; None if it can have none, such as a list."""
    try:
        return weakref.ref(dataset)
    except TypeError:
        return None


def loader_values(torch: Any, loader: Any) -> dict[str, Any]:
    """Relevant values of a torch.utils.data.DataLoader."""
    # a property of the user's own sampler may do anything
    batch_size = loader.batch_size or inspect.getattr_static(loader.batch_sampler, "batch_size", None)
    return {
        "batch_size": batch_size if isinstance(batch_size, int) and batch_size > 0 else None,
        "num_workers": int(loader.num_workers),
        "workers_stay": bool(why_workers_stay(torch, loader.dataset, loader.worker_init_fn)),
        "pin_memory": bool(loader.pin_memory),
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
        "persistent_workers": bool(loader.persistent_workers),
        "dataset": _dataset(loader.dataset),
    }


def batches_of(torch: Any, loader: Any) -> int | None:
    """A DataLoader's length; None if it has none, or must not be asked.

    A user's own sampler may draw its batches to count them, and so change the training's. An iterable dataset remembers that it was
    asked, and warns.
    """
    data = torch.utils.data
    if isinstance(loader.dataset, data.IterableDataset) or type(loader).__len__ is not data.DataLoader.__len__:
        return None
    if not _is_counted_by_torch(loader.sampler if loader.batch_sampler is None else loader.batch_sampler):
        return None
    with contextlib.suppress(Exception):  # the dataset's own __len__, which torch's samplers ask in each pass
        return len(loader)
    return None


def _is_counted_by_torch(sampler: Any) -> bool:
    """Whether only torch's code computes the length of a sampler, and of the sampler that it batches."""
    while sampler is not None:
        tells = getattr(type(sampler), "__len__", None)
        if not getattr(tells, "__module__", "").startswith("torch."):
            return False
        sampler = inspect.getattr_static(sampler, "sampler", None)
    return True


def _is_of_torch(thing: Any) -> bool:
    """Whether an object's class is torch's, not the user's."""
    return type(thing).__module__.startswith("torch.")


def _dataset(dataset: Any) -> dict[str, Any]:
    """A dataset's class, and the user's line where it makes a sample; for torch's own wrappers, those of the wrapped one."""
    for _ in range(5):
        if not _is_of_torch(dataset):  # where `dataset` may be a property that opens a file
            break
        inner = getattr(dataset, "dataset", None)
        if inner is None:
            break
        dataset = inner
    place: dict[str, Any] = {"file": None, "line": None}
    for name in ("__getitem__", "__iter__", "__getitems__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None and is_users(code.co_filename):
            place = {"file": shown(code.co_filename), "line": code.co_firstlineno}
            break
    return {"class": type(dataset).__qualname__, **place}


def samples_of(batch: Any, most: int | None) -> int:
    """The number of samples in a batch: the length of its first tensor; 0 if it has none.

    A list of samples, or lists of their parts, such as images of several sizes, has no batch dimension. The first tensor is then one
    image: what counts is the largest length on the way to it that does not exceed the loader's batch size.

    The user's code is never called: an iterator can be read only once, and a method or a property may do anything.

    Args:
        most: the loader's batch size; None: not known.
    """
    try:
        return _samples(batch, most)
    except Exception:  # a tensor that has no shape: a count is no reason to end
        return 0


def _samples(batch: Any, most: int | None) -> int:
    lengths, first = [], 0
    for _ in range(4):
        # implemented in C, like a tensor's and an array's
        if isinstance(getattr(type(batch), "shape", None), GetSetDescriptorType):
            shape = batch.shape
            first = int(shape[0]) if len(shape) else 0
            if most is None or len(shape) >= IMAGES:
                return first
            lengths.append(first)
            break
        length, batch = _inside(batch)
        lengths.append(length)
    return max((length for length in lengths if most is not None and 0 < length <= most), default=first)


def _inside(batch: Any) -> tuple[int, Any]:
    """The length of a list or a tuple, and the first item of it or of a dictionary, by their built-in methods; else (0, None)."""
    kind = type(batch)
    if issubclass(kind, UserDict):  # of transformers' tokenizers and image processors
        return _inside(vars(batch)["data"])
    if issubclass(kind, dict):
        return 0, next(iter(dict.values(batch)), None)
    for known in (list, tuple):
        if issubclass(kind, known):
            return known.__len__(batch), next(known.__iter__(batch), None)
    return 0, None


def optimizer_values(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    return {
        "class": type(optimizer).__name__,
        "fused": bool(groups[0].get("fused")),
        "foreach": groups[0].get("foreach"),
        "groups": len(groups),
    }


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def precision_values(torch: Any, autocast: str | None) -> dict[str, Any]:
    """
    Args:
        autocast: its dtype; None without it.
    """
    values: dict[str, Any] = {"autocast": autocast}
    matmul = torch.backends.cuda.matmul
    try:
        values["matmul_precision"] = torch.get_float32_matmul_precision()
        values["allow_tf32"] = bool(matmul.allow_tf32)
    except RuntimeError:  # from 2.9 on, if a script uses torch's new switches
        values["allow_tf32"] = matmul.fp32_precision == "tf32"
    cudnn = torch.backends.cudnn
    try:
        values["cudnn_allow_tf32"] = bool(cudnn.allow_tf32)
    except RuntimeError:  # as above
        values["cudnn_allow_tf32"] = cudnn.conv.fp32_precision == "tf32"
    return values

"""Hooks PyTorch when a script imports it: loaders, backward passes, optimizers, checkpoints, copies to a GPU.

    when_imported(folder)    waits for the import; never imports torch itself
    end(reason)              the script is measured otherwise: no hook does anything from now on

Each hook calls the original and adds one frame of ours to a traceback. An error in a hook ends the observer, not the script.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import perf_counter, process_time
from typing import Any

from launcher_observer import setting_overrides
from launcher_observer.after_import import after_import
from launcher_observer.batches import Batches
from launcher_observer.observer import LOADING, Observer
from launcher_observer.setups import samples_of

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a function and returns its replacement."""

_observers: list[Observer] = []
"""This process's, once torch was imported."""


def when_imported(folder: Path) -> None:
    """Observe this process once torch has been imported.

    Args:
        folder: the host's output folder, which exists.
    """
    after_import("torch", functools.partial(_install_hooks, folder=folder))


def current() -> Observer | None:
    """The observer of this process; None if torch is not imported, or the observer has ended."""
    return next((observer for observer in _observers if not observer.is_over), None)


def end(reason: str) -> None:
    """Stop observing: this process is measured otherwise.

    Args:
        reason: reported if steps were already recorded.
    """
    observer = current()
    if observer is not None:
        observer.end(reason)


def _install_hooks(torch: Any, folder: Path) -> None:
    observer = Observer(torch, folder, functools.partial(_copies, torch=torch))
    _observers.append(observer)
    observer.guarded(setting_overrides.apply, torch)  # first, so that the observer sees their effect
    for hooks in (_loaders, _steps, _setups, _exchanges, _modes, _checkpoints):
        observer.guarded(hooks, observer, torch)
    for module in (
        "torch._dynamo.trace_rules",
        "torch._dynamo.skipfiles",
    ):  # from torch 2.3 on, and before; 2.2 has both
        after_import(module, functools.partial(observer.guarded, _leave_uncompiled))


def _leave_uncompiled(rules: Any) -> None:
    """A compiled step calls the hooks uncompiled, so that the rest compiles as it would without them."""
    if hasattr(rules, "add"):
        rules.add(sys.modules[__package__])


def _loaders(observer: Observer, torch: Any) -> None:
    def restarting(original: Callable[..., Any]) -> Callable[..., Any]:
        def __iter__(loader: Any) -> Any:
            observer.guarded(observer.loader_restarts, loader)
            return original(loader)

        return __iter__

    def resetting(original: Callable[..., Any]) -> Callable[..., Any]:
        def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            original(iterator, loader, first_iter)
            if not first_iter:  # workers that persist, in their next pass
                observer.guarded(observer.iterates, iterator, loader)

        return _reset

    def asked(original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            loading = getattr(iterator, LOADING, None)
            if loading is None or (get_ident() != observer.thread and not observer.may_train_here()):
                observer.reads_elsewhere |= loading is not None
                return original(iterator)
            events, trains = observer.events, loading.is_trained_on or torch.is_grad_enabled()
            waiting, using = ("data_wait", "forward") if trains else ("evaluate", "evaluate")
            events.add(waiting, observer.batch_asked, loading, trains, process_time())
            events.settle_if_due()
            asked = perf_counter()
            try:
                batch = original(iterator)
            except StopIteration:
                events.add("between_passes", observer.loader_ended, loading)
                events.add("between_passes", observer.setups.pass_ended, loading)
                raise
            except BaseException:
                events.add(None, observer.batch_failed, loading)
                raise
            waited = perf_counter() - asked
            samples = samples_of(batch, loading.loader.batch_size)
            events.add(using, observer.batch_came, loading, samples, waited)
            return batch

        return __next__

    loading = torch.utils.data.dataloader
    _wrap(loading.DataLoader, "__init__", _then(observer, observer.loader_made))
    _wrap(loading.DataLoader, "__iter__", restarting)
    # not what `__iter__` returns: a subclass may wrap its iterator, or make a generator of it
    _wrap(loading._BaseDataLoaderIter, "__init__", _then(observer, observer.iterates))
    _wrap(loading._MultiProcessingDataLoaderIter, "_reset", resetting)
    for iterator in (loading._BaseDataLoaderIter, Batches):
        _wrap(iterator, "__next__", asked)


def _steps(observer: Observer, torch: Any) -> None:
    def backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != observer.thread and not observer.takes_this_thread():
                return original(*args, **kwargs)
            following = observer.backward_begins()
            observer.backward_passes += 1
            try:
                return original(*args, **kwargs)
            finally:
                observer.backward_passes -= 1
                observer.events.add(following, observer.clock.backward_ends)
                observer.events.settle_if_due()

        return backward

    def scaled(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not observer.takes_this_thread():
                return original(scaler, optimizer, *args, **kwargs)
            observer.guarded(observer.calls, "scaler", lambda: {"enabled": bool(scaler.is_enabled())})
            observer.optimizer_begins(optimizer)
            done = original(scaler, optimizer, *args, **kwargs)
            observer.optimizer_ends(optimizer)  # even if it skipped the optimizer's own
            return done

        return step

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() == observer.thread or observer.steps_here():
            observer.optimizer_begins(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() == observer.thread or observer.steps_here():
            observer.optimizer_ends(optimizer)

    _wrap(torch.autograd, "backward", backward)
    optimizers: Any = sys.modules["torch.optim.optimizer"]  # which torch.optim does not have as an attribute
    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    # before torch 2.3 CUDA's scaler was the only one
    _wrap(getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler), "step", scaled)


def _setups(observer: Observer, torch: Any) -> None:
    _wrap(torch.optim.Optimizer, "__init__", _then(observer, observer.made.optimizer_made))
    parallel = _then(observer, observer.made.data_parallel)
    _wrap(torch.nn.parallel.DistributedDataParallel, "__init__", parallel)
    after_import("torch.distributed.fsdp", lambda module: _wrap(module.FullyShardedDataParallel, "__init__", parallel))
    _wrap(torch, "compile", _then(observer, observer.made.compiled))
    _wrap(torch.amp.autocast_mode.autocast, "__enter__", _then(observer, observer.made.autocast_entered))


def _exchanges(observer: Observer, torch: Any) -> None:
    """Buffers that DistributedDataParallel synchronizes before a forward pass, where a rank waits for a slower one."""

    def exchanging(original: Callable[..., Any]) -> Callable[..., Any]:
        def _sync_buffers(model: Any) -> Any:
            if not observer.trains_here():
                return original(model)
            events = observer.events
            before = events.phase
            events.add("buffer_sync", observer.clock.part_begins)
            done = original(model)
            events.add(before, observer.clock.buffers_exchanged, before)
            return done

        return _sync_buffers

    _wrap_in("_sync_buffers", exchanging, torch.nn.parallel.DistributedDataParallel)


def _modes(observer: Observer, torch: Any) -> None:
    """Evaluations without a loader: the time between `eval()` and `train()` of one model."""
    compiling = _is_compiling(torch)

    def evaluating(original: Callable[..., Any]) -> Callable[..., Any]:
        def eval(module: Any) -> Any:
            if not compiling() and observer.trains_here():
                observer.guarded(observer.sets_to_evaluate, module)
            return original(module)

        return _as_of_torch(eval, original.__code__.co_filename)

    def training(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(module: Any, mode: bool = True) -> Any:
            if not compiling() and mode and id(module) in observer.in_eval_mode and observer.trains_here():
                observer.guarded(observer.sets_to_train)
            return original(module, mode)

        return _as_of_torch(train, original.__code__.co_filename)

    _wrap(torch.nn.Module, "eval", evaluating)
    _wrap(torch.nn.Module, "train", training)


def _is_compiling(torch: Any) -> Callable[[], bool]:
    """Tells whether torch.compile is tracing the caller: from torch 2.1 on."""
    asks: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
    return asks


def _as_of_torch(function: Callable[..., Any], file: str) -> Callable[..., Any]:
    """A function that torch.compile treats as torch's own, which it recognizes by the code's file.

    Args:
        file: one of torch's own.
    """
    seen: Any = function
    seen.__code__ = seen.__code__.replace(co_filename=file)
    return function


def _checkpoints(observer: Observer, torch: Any) -> None:
    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            counts = observer.trains_here() and observer.guarded(observer.checkpoint_begins)
            try:
                return original(*args, **kwargs)
            finally:
                if counts:
                    observer.guarded(observer.checkpoint_ends)

        return save

    _wrap(torch.serialization, "save", saving)
    torch.save = torch.serialization.save
    for module, name in (("safetensors.torch", "save_file"), ("torch.distributed.checkpoint", "save")):
        after_import(module, functools.partial(_wrap_in, name, saving))
    for module in ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"):
        # which saves to memory, and then writes the file
        after_import(module, lambda found: _wrap_in("save_checkpoint", saving, getattr(found, "Trainer", None)))
    for module in ("lightning.fabric.fabric", "lightning_fabric.fabric"):  # likewise
        after_import(module, lambda found: _wrap_in("save", saving, getattr(found, "Fabric", None)))


def _copies(observer: Observer, torch: Any) -> None:
    """Copies to a GPU, once the script is known to use one.

    Not if the script has called torch.compile by then: with fullgraph=True it refuses any Python function as a tensor subclass's method.
    """
    if observer.made.compiles:
        why = "the script calls torch.compile, which may refuse code whose copies are measured"
        observer.tell_not_measured("host_to_device", why)
        return
    compiling, plain = _is_compiling(torch), (torch.Tensor, torch.nn.Parameter)

    overrides = torch.overrides

    def copying(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            """Pass the original method on: a subclass's or a mode's `__torch_function__` would else get the replacement, but recognizes
            what it handles by identity, as torchvision's tv_tensors and lazy parameters do."""
            if overrides.has_torch_function((tensor, *args[:1])):
                return overrides.handle_torch_function(original, (tensor, *args[:1]), tensor, *args, **kwargs)
            return original(tensor, *args, **kwargs)

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(tensor, *args, **kwargs)
            # an attribute of a tensor subclass runs the subclass's code, whose compiled form may never return
            if type(tensor) not in plain or not tensor.is_cpu or not observer.trains_here():
                return called(tensor, *args, **kwargs)
            events = observer.events
            before = events.phase
            events.add("host_to_device", observer.clock.part_begins)
            copied = called(tensor, *args, **kwargs)
            if copied.is_cpu:
                events.phase = before
                return copied
            events.add(before, observer.clock.copy_ends, before)
            events.settle_if_due()
            observer.guarded(observer.calls, "copy", lambda: {"pinned": bool(tensor.is_pinned())})
            return copied

        return _as_of_torch(to, torch._tensor.__file__)

    for name in ("to", "cuda"):
        _wrap(torch.Tensor, name, copying)


def _wrap(owner: Any, name: str, around: Around) -> None:
    """Wrap a function of a module or a class, under its name and with its signature."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(around(original)))


def _wrap_in(name: str, around: Around, owner: Any) -> None:
    if hasattr(owner, name):  # not every version has it
        _wrap(owner, name, around)


def _then(observer: Observer, note: Callable[..., None]) -> Around:
    """Wraps a function so that its arguments are noted after it returns."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            observer.guarded(note, *args, **kwargs)
            return result

        return call

    return around

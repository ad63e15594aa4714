"""The observer of one training process: records what the hooks see in the rank's timeline."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from launcher_observer import process, setups
from launcher_observer.addresses import Address, here
from launcher_observer.contract import node_name
from launcher_observer.created_objects import CreatedObjects
from launcher_observer.events import WITHIN, Events
from launcher_observer.exchange import ExchangeRecord
from launcher_observer.lines import LineSampler
from launcher_observer.repeating_loaders import repeats_after
from launcher_observer.report import report
from launcher_observer.setups import Loader, Setups
from launcher_observer.step import Loading, Step
from launcher_observer.step_clock import Pause, StepClock
from launcher_observer.timeline_file import TimelineFile
from launcher_observer.timers import GpuTimer, HostTimer, Timer
from launcher_observer.windows import WARM_UP_STEPS, Windows

FIRST_LINES, LINES_GROWTH = 5.0, 1.5
"""Seconds until the sampled lines are first written, and the factor by which that time grows for each next write."""

LOADING = "_launcher_loading"
"""Attribute of a DataLoader's iterator that holds its Loading."""


class Observer:
    """Receives the hooks' calls. All but those on set-up come from the training thread: the first that runs a backward pass."""

    def __init__(self, torch: Any, folder: Path, hook_copies: Callable[[Observer], None]):
        """
        Args:
            torch: the module.
            folder: where the timeline goes.
            hook_copies: hooks copies to a GPU for this observer, from then on.
        """
        self.torch, self.folder, self._hook_copies = torch, folder, hook_copies
        self.thread: int | None = None
        self.is_over = False
        self.setups = Setups()
        self.made = CreatedObjects(torch, self.setups)
        self._loaders: dict[int, tuple[weakref.ref[Any], Loader]] = {}
        """By `id`: a subclass of DataLoader may have no hash."""
        self.reads_elsewhere = False
        """Whether another thread asks for batches."""
        self._reset()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._at_exit)

    def _reset(self) -> None:
        self._timer: Timer = HostTimer()
        self.clock = StepClock(self._step_ended, self._paused, self._evaluates)
        self.events = Events(self.clock, self._fail)
        self._windows = Windows(self._write_window)
        self._exchange = ExchangeRecord()
        self._sampler = LineSampler(lambda: self.events.phase, lambda: self.is_over, self.guarded)
        self._file: TimelineFile | None = None
        self._asking: Loading | None = None
        """The pass whose next batch is awaited."""
        self.backward_passes = 0
        """That the training thread is in, one within another."""
        self.in_eval_mode: set[int] = set()
        """`id`s of models set to evaluate, with nothing trained since."""
        self._evaluates_at: Address | None = None
        """Where the first of them was set."""
        self._between: str | None = None
        """The phase after an optimizer step: "forward" if no loader reports the next batch."""
        self._called: set[str] = set()
        """What the loop has called so far; only the first line of each is noted."""
        self._not_measured: dict[str, str] = {}
        self._lines_due = 0.0
        self._pid = os.getpid()

    # Shutdown

    def guarded(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a hook's action; None if the observer has ended, or if the action fails, which ends it."""
        if not self.is_over:
            try:
                return act(*args, **kwargs)
            except Exception as error:
                self._fail(error)
        return None

    def end(self, reason: str) -> None:
        """Observe nothing from now on."""
        self.events.settle()
        self.tell_not_measured("steps", reason)
        self._stop()

    def _stop(self) -> None:
        self.is_over, self.thread = True, None

    def _fail(self, error: Exception) -> None:
        """The observer failed: the script continues, unobserved.

        Raises:
            the error, if a handler of the script's own raised it.
        """
        if process.is_of_a_signal_handler(error):
            raise error
        if self.is_over:
            return
        self._stop()
        said = f"{type(error).__name__}: {error}"
        report(said)
        with contextlib.suppress(Exception):
            self.tell_not_measured("steps", f"the observer stopped on an error of its own: {said}")

    def _forked(self) -> None:
        """Called in the fork of a process that may be observed. It may train, but not in its parent's name."""
        if self._file is not None:
            self._stop()
        elif not self.is_over:
            self.thread = None
            self._reset()

    def _at_exit(self) -> None:
        if self.is_over or os.getpid() != self._pid:
            return
        self.guarded(self.close)
        self._stop()

    def close(self) -> None:
        """Write what is known by now; no further step follows."""
        self.events.add(None, self.clock.close)
        self.events.settle()
        self._windows.close()
        if self._file is not None:
            self._write_lines()

    # What the hooks see on the training thread

    def may_train_here(self) -> bool:
        """Whether this is the training thread; until that is known, whether it is the main thread."""
        ident = threading.get_ident()
        if self.thread is not None:
            return ident == self.thread
        return not self.is_over and ident == threading.main_thread().ident

    def trains_here(self) -> bool:
        """Whether this is the training thread."""
        return threading.get_ident() == self.thread

    def steps_here(self) -> bool:
        """Whether an optimizer's step on this thread is the training's: on its own, or on a device's thread of autograd, which calls hooks
        of gradients while the training thread waits for its backward pass. Python did not start such a thread."""
        ident = threading.get_ident()
        if ident == self.thread or not self.backward_passes:
            return self.takes_this_thread()
        return all(one.ident != ident or isinstance(one, threading._DummyThread) for one in threading.enumerate())

    def takes_this_thread(self) -> bool:
        """Whether this is the training thread: the first to ask, and it alone from then on."""
        ident = threading.get_ident()
        if self.thread is None and not self.is_over:
            self.thread = ident
            self._lines_due = time.perf_counter() + FIRST_LINES
            self.guarded(self._sampler.start, ident)
        return self.thread == ident

    def loader_made(self, loader: Any, *args: Any, **kwargs: Any) -> None:
        """A DataLoader was made."""
        self._note_loader(loader)

    def _note_loader(self, loader: Any) -> Loader:
        key, made = id(loader), self.setups.loader(self.torch, loader)
        self._loaders[key] = weakref.ref(loader, lambda _: self._loaders.pop(key, None)), made
        return made

    def _known_loader(self, loader: Any) -> Loader | None:
        seen, known = self._loaders.get(id(loader), (None, None))
        return known if seen is not None and seen() is loader else None

    def loader_restarts(self, loader: Any) -> None:
        """A DataLoader is asked for an iterator; workers may have to start."""
        if not self.may_train_here():
            self.reads_elsewhere = True
            return
        self.events.settle()
        known = self._known_loader(loader)
        training = known is not None and known.role == "training" and self.torch.is_grad_enabled()
        self.events.add(self.events.phase, self.clock.loader_restarts, training)
        self.events.settle()  # first, so that the new pass has the right number

    def iterates(self, iterator: Any, loader: Any) -> None:
        """A DataLoader's own iterator begins a pass."""
        known = self._known_loader(loader) or self._note_loader(loader)  # a copy is made without a call of __init__
        endless = repeats_after(self.torch, loader)
        if known.batches is None:
            known.batches = setups.batches_of(self.torch, loader) or endless
        if known.latest is None:
            known = self._first_iterated(loader, known)
        loading = self._next_pass(known)
        loading.repeats_after = endless
        setattr(iterator, LOADING, loading)

    def _first_iterated(self, loader: Any, known: Loader) -> Loader:
        """Returns what is known about the loader that this one continues, else about itself."""
        live = [one for seen, one in [*self._loaders.values()] if seen() is not None]
        found = self.setups.first_iterated(known, live)
        self._loaders[id(loader)] = self._loaders[id(loader)][0], found
        return found

    def passes_over(self, iterator: Any, batches: Any) -> None:
        """A pass begins over what the script gave to `launcher_steps`."""
        setattr(iterator, LOADING, self._next_pass(self.setups.other_loader(batches)))

    def _next_pass(self, known: Loader) -> Loading:
        if known.latest is not None and self.may_train_here():
            self.events.settle()
            self.clock.loader_begins_anew(known.latest)
        return known.next_pass()

    def calls(self, what: str, values: Callable[[], dict[str, Any]] = dict) -> None:
        """The loop calls backward, a scaler or a copy. The first line of each is noted."""
        if what not in self._called:
            self._called.add(what)
            self.setups.add(what, here(), values())

    def backward_begins(self) -> str | None:
        """Returns the phase that resumes after it, if any."""
        within = self.events.phase
        if self.in_eval_mode:
            self.in_eval_mode.clear()
        if "backward" not in self._called:
            self.guarded(self.calls, "backward")
        self.events.add("backward", self._trains_on)
        return within if within in WITHIN else None

    def optimizer_begins(self, optimizer: Any) -> None:
        if not self.made.knows(optimizer):
            self.guarded(self.made.describe, optimizer)
        if self.in_eval_mode:
            self.in_eval_mode.clear()
        self.events.add("optimizer", self._optimizes, id(optimizer))
        if self.events.at_once:
            self.events.settle()

    def optimizer_ends(self, optimizer: Any) -> None:
        self.events.add(self._between, self.clock.optimizer_ends, id(optimizer), time.process_time())
        self.events.settle_if_due()

    def sets_to_evaluate(self, model: Any) -> None:
        if self.events.phase == "forward" and self._between is None:
            return  # mid-step: a teacher, or a frozen part of the model
        if not self.in_eval_mode:
            self._evaluates_at = here()
            self.events.add("evaluate", self.clock.evaluation_may_begin)
        self.in_eval_mode.add(id(model))

    def sets_to_train(self) -> None:
        """A model set to evaluate is set to train again."""
        self.in_eval_mode.clear()
        self.events.add(self._between, self._evaluation_ends, self._evaluates_at, time.process_time())
        self.events.settle()

    def checkpoint_begins(self) -> bool:
        """Whether it counts: only the outermost save does, and none while a batch is made, such as of a sample cache."""
        if self.events.phase in ("checkpoint", "data_wait"):
            return False
        self.setups.add("checkpoint", here(), {})
        self.in_eval_mode.clear()
        self.events.add("checkpoint", self._checkpoint_begins, self._evaluates_at, time.process_time())
        return True

    def checkpoint_ends(self) -> None:
        self.events.add(None, self.clock.checkpoint_ends)
        self.events.settle()

    # Called as the events settle

    def batch_asked(self, loading: Loading, trains: bool, cpu: float) -> None:
        """
        Args:
            trains: gradients are on.
            cpu: CPU seconds of the process so far.
        """
        if self._asking is not None:  # by a loader that wraps this one and hands its batches on
            self._asking.loader = loading.loader
            return
        self._asking = loading
        self.clock.batch_asked(loading, trains, cpu)

    def batch_came(self, loading: Loading, samples: int, waited: float) -> None:
        if self._asking is loading:
            self._asking = None
            self.clock.batch_came(loading, samples, waited)

    def loader_ended(self, loading: Loading) -> None:
        if self._asking is loading:
            self._asking = None
            self.clock.loader_ended(loading)

    def batch_failed(self, loading: Loading) -> None:
        """Its loader raised an error, which a script may survive."""
        if self._asking is loading:
            self._asking = None

    def _evaluation_ends(self, began_at: Address, cpu: float) -> None:
        if self.clock.evaluation_ends(cpu):
            self.setups.add("evaluation", began_at, {})

    def _checkpoint_begins(self, evaluated_at: Address, cpu: float) -> None:
        self._evaluation_ends(evaluated_at, cpu)
        self.clock.checkpoint_begins()

    def _evaluates(self, loading: Loading) -> None:
        if loading.loader.role == "unknown":
            loading.loader.role = "evaluation"
            self.setups.note(loading.loader)

    def _trains_on(self) -> None:
        """A backward pass begins."""
        self._of_training(self.clock.backward_begins())

    def _optimizes(self, optimizer: int) -> None:
        """An optimizer's step begins, whatever produced its gradients."""
        self._of_training(self.clock.optimizer_begins(optimizer))

    def _of_training(self, passes: Sequence[Loading]) -> None:
        for loading in passes:
            if loading.loader.role != "training":
                loading.loader.role = "training"
                self.setups.note(loading.loader)

    # What is recorded

    def _step_ended(self, step: Step) -> None:
        if self.is_over:
            return
        if self._file is None:
            self._begin(step)
        self.events.at_once = step.number < WARM_UP_STEPS
        self._between = None if step.batches else "forward"
        self._exchange.step_ended(self.made.parallel_models)
        self._windows.add(self._timer, step)
        if step.number == 1 and self.made.device is not None and self.made.device.type not in process.NOT_GPUS:
            self._measure_gpu()
        if step.ended >= self._lines_due:
            self._write_lines()

    def _measure_gpu(self) -> None:
        module = getattr(self.torch, self.made.device.type, None)
        if hasattr(module, "Event"):
            self._timer = GpuTimer(module, self.made.device)
            self.clock.use(self._timer)
            self.events.moment = self._timer.now
            self.events.on_settled = self._release
            self._hook_copies(self)
        else:
            self.tell_not_measured("forward", f"PyTorch has no timed events for {self.made.device.type} devices")

    def _release(self) -> None:
        """Release the moments of an evaluation, or after training, that no step needs."""
        if self.clock.holds_a_moment():
            return
        self._windows.fold(evaluates=True)  # the last step had not passed on the device when it ended on the host
        if not self._windows.holds_a_moment():
            self._timer.release(self.clock.moment)

    def _begin(self, step: Step) -> None:
        """The first step is over: this process trains, and its record begins."""
        rank, size, backend = process.rank_and_size(self.torch)
        file = TimelineFile.begun(self.folder, rank)
        Finalize(None, self._at_exit, exitpriority=0)  # a process that multiprocessing forked ends without atexit
        self._file, self._windows.world_size = file, size
        file.write("start", **self._start(rank, size, backend, step))
        self.setups.begin(file.write)
        ended = time.time() - (time.perf_counter() - step.ended)
        known = [loader.values.get("num_workers") for loader in {one.loader: None for one in step.fed}]
        workers = [number for number in known if number is not None]
        file.first_step(step.number, sum(workers) if workers else None, ended)
        self._windows.extra = self._extra

    def _start(self, rank: int, size: int, backend: str | None, step: Step) -> dict[str, Any]:
        not_measured = self._not_measured
        if not step.batches:
            not_measured["data_wait"] = (
                "another thread reads the DataLoader" if self.reads_elsewhere else "no torch DataLoader was seen"
            )
        if size == 1:
            not_measured["grad_sync"] = "a single process exchanges nothing"
        elif not any(hasattr(model, "_get_ddp_logging_data") for model in self.made.parallel_models):
            not_measured["grad_sync"] = "only DistributedDataParallel keeps a record of it, and none was seen"
        return {
            "rank": rank,
            "node": node_name(),
            "world_size": size,
            "backend": backend,
            **process.described(self.torch, self.made.device),
            "not_measured": not_measured,
            "settings": {},
            "observed": True,
        }

    def _extra(self) -> dict[str, float]:
        """Additional metrics of a window."""
        module = getattr(self.torch, self.made.device.type, None) if isinstance(self._timer, GpuTimer) else None
        memory = module.max_memory_allocated(self.made.device) if module is not None else process.peak_host_memory()
        waited = [self._exchange.seconds(model) for model in self.made.parallel_models]
        known = [seconds for seconds in waited if seconds is not None]
        return {"memory_gib": memory / 2**30, **({"grad_sync": sum(known)} if known else {})}

    def _paused(self, kind: Pause, step: int, began: float, seconds: float) -> None:
        self._windows.resume(kind == "evaluate")
        if self._file is not None and not self.is_over:
            self._file.stall(kind, step, seconds, time.time() - (time.perf_counter() - began))

    def _write_window(
        self, epoch: int, step: int, ended: float, seconds: dict[str, float], extra: dict[str, float]
    ) -> None:
        if self._file is not None:
            self._file.steps(epoch, step, seconds, extra, ended)

    def _write_lines(self) -> None:
        assert self._file is not None
        now = time.perf_counter()
        self._lines_due = now + max(FIRST_LINES, (LINES_GROWTH - 1) * (now - self._windows.since))
        lines = self._sampler.lines()
        if lines["samples"]:
            self._file.write("lines", **lines)

    def tell_not_measured(self, what: str, why: str) -> None:
        if self._file is not None:
            self._file.write("not_measured", what=what, why=why)
        else:
            self._not_measured[what] = why

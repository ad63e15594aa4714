"""Splits the training thread's time into optimizer steps and their phases, from the hooks' events.

A step is one iteration of the training loop with at least one optimizer step. It ends when the next training batch is requested after
an optimizer step. It ends where its last optimizer step ended if a loader begins a new pass before that, or, if no loader is seen, when
the same optimizer steps again. Time in no phase is the script's own work in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from launcher_observer.fetched import Fetched
from launcher_observer.step import Cut, Held, Loading, Step, trains
from launcher_observer.timers import HostTimer, Timer

MAX_OPTIMIZER_STEPS = 64
"""Of one optimizer on one batch; further ones count as steps of a script that keeps its batch."""

MAX_PARTS = 50_000
"""Copies after an optimizer step without a batch request, from which on the trained model counts as in use; and phases of a step, from
which on it counts as one that no optimizer ends, such as attacks on the model. Loops that collect their training data make some thousands
between two steps."""

SHORTEST_EVALUATION = 0.001
"""Seconds between `eval()` and `train()`."""

Pause = Literal["checkpoint", "evaluate"]


class StepClock:
    """Called once per event of the training thread, in order, with `now` and `moment` set to when it happened."""

    def __init__(
        self,
        step_ended: Callable[[Step], None],
        paused: Callable[[Pause, int, float, float], None],
        evaluated: Callable[[Loading], None],
    ):
        """
        Args:
            step_ended: called with a finished step.
            paused: called with a pause's kind, the steps before it, its start by the host's clock, and its seconds.
            evaluated: called with a pass over a loader that is an evaluation, as far as that is certain.
        """
        self._step_ended, self._paused, self._evaluated_pass = step_ended, paused, evaluated
        self.now = 0.0
        """When the event happened, in seconds of the host's clock."""
        self.moment: Any = 0.0
        """The same by the timer."""
        self._stream_of: Callable[[Any], Any] = HostTimer().stream_of
        self._cpu = 0.0
        """CPU seconds of the process at the last event that reported them."""
        self.steps = 0
        """Finished ones."""
        self._trained = 0
        """Backward passes and optimizer steps."""
        self._optimized = 0
        """Optimizer steps, among them."""
        self._step: Step | None = None
        self._mark: Any = None
        """When the last observed activity ended."""
        self._read: Loading | None = None
        """The latest pass that a step read a batch of."""
        self._first_asked: dict[Loading, Held] = {}
        """In the first step: when each pass was first asked, with nothing trained yet. A batch that is only looked at before the training
        is none of the step."""
        self._latest_asked: tuple[Loading, Held] | None = None
        """The latest pass that was first asked in the current step, and when."""
        self._fed_before: set[Any] = set()
        """The loaders that the latest step with batches read."""
        self._exhausted = False
        """Whether a loader was exhausted, with nothing trained since."""
        self._untrained: Loading | None = None
        """A training loader's pass that is over, with nothing trained since its first request: an evaluation, unless its batches are kept
        and trained on next."""
        self._unused: Loading | None = None
        """A pass that is over, of a loader that is not known to be trained on, with backward passes but no optimizer step since its first
        request: an evaluation that attacks the model or explains it, unless an optimizer uses the gradients next."""
        self._part_began: Any = None
        """When the current copy or buffer exchange began."""
        self._copied = False
        """Whether a tensor of the batch was copied to the device."""
        self._evaluating: float | None = None
        self._evaluated = 0.0
        """When the current evaluation began, and when it was last seen."""
        self._paused_within = 0.0
        """Seconds of checkpoints between its batches."""
        self._fetched: Fetched | None = None
        """The evaluation's batches, while the current or the next step may still train on them."""
        self._set_to_evaluate: Cut | None = None
        """When a model was set to evaluate, with nothing trained since."""
        self._evaluated_at = 0
        """The steps before the last evaluation that no loader reported."""
        self._backward_depth = 0
        self._optimizer: int | None = None
        """The one whose step is running; steps nested in it are part of it."""
        self._asked: Held | None = None
        """When a batch was last requested during that step: the optimizer's own closure requested it, or its step has failed."""
        self._saving: float | None = None
        self._saved: tuple[float, float] | None = None
        """When the checkpoint that is not yet recorded began and ended."""

    def use(self, timer: Timer) -> None:
        """Measure by this timer from the next step on."""
        self.moment, self._stream_of = timer.now(), timer.stream_of
        if self._step is not None:  # perhaps within a backward pass
            self._step, self._mark = Step(self._step.number, self.now, self.moment, self._cpu), self.moment

    def holds_a_moment(self) -> bool:
        """Whether moments of something in progress are still needed."""
        return self._step is not None or self._fetched is not None

    # Batches

    def batch_asked(self, loading: Loading, training: bool, cpu: float) -> None:
        """A loader's next batch is requested.

        Args:
            training: gradients are on.
            cpu: CPU seconds of the process so far.
        """
        now, self._cpu = self.now, cpu
        if self._optimizer is not None and (step := self._step) is not None:
            self._asked = step.held(now, self.moment, cpu)
        self._settle_untrained(loading)
        begins = loading.trained < 0
        if begins:
            loading.began, loading.trained, loading.optimized = now, self._trained, self._optimized
        self._settle_fetched(loading)
        if not training and not loading.is_trained_on:
            self._begin_evaluation(loading, now)
            self._evaluated_pass(loading)
            return
        self._set_to_evaluate = None
        self._settle_evaluated_before(loading)
        if self._saved is not None or self._evaluating is not None:
            self._end_pauses(now)
        if self._step is not None and self._step.optimizers:
            self._leave_out_before(loading, self._step)
            self._end_step(now, self.moment)
        step = self._step
        if step is None or (self._exhausted and not trains(step)):  # else the gradients of its batches are kept
            step = self._begin_step(now)
        if begins:
            self._latest_asked = loading, step.held(now, self.moment, cpu)
        if not self._trained and loading not in self._first_asked:
            self._first_asked[loading] = step.held(now, self.moment, cpu)
        self._exhausted = False

    def batch_came(self, loading: Loading, samples: int, waited: float) -> None:
        """The batch arrived.

        Args:
            samples: in the batch.
            waited: seconds for it.
        """
        loading.count_batch()
        if self._evaluating is not None:
            self._evaluated = self.now
            if self._fetched is None:
                return
            if not self._fetched.add_batch(loading, samples, waited):
                self._fetched = None
        else:
            assert self._step is not None
            self._step.add_batch(loading, samples, waited)
            self._read = loading
        self._mark, self._copied = self.moment, False

    def loader_ended(self, loading: Loading) -> None:
        """The loader is exhausted. A pass in which nothing was trained was an evaluation, whether or not gradients were on."""
        if self._evaluating is not None:
            self._evaluated, self._fetched = self.now, None
            loading.is_no_epoch()
            self._evaluated_pass(loading)
            return
        step = self._step
        own = step.loader if step is not None else None
        self._exhausted |= own is None or own.loader is loading.loader
        if not self.steps:
            return
        self._evaluated = self.now
        if loading.trained != self._trained:
            alone = step is not None and all(one is loading for one in step.fed)
            if alone and loading.optimized == self._optimized and loading.loader not in self._fed_before:
                self._unused = loading
        elif loading.loader.role != "training":
            self._was_evaluation(loading, loading.began)
        elif loading.batches and (step is None or not trains(step)):
            self._untrained = loading

    def _settle_untrained(self, asked: Loading | None = None) -> None:
        """Something else happens before the batches of a pass, or their gradients, could be used in training: it was an evaluation.

        Args:
            asked: the pass whose next batch is requested.
        """
        loading, self._untrained = self._untrained, None
        if loading is None and self._unused is not asked:
            loading, self._unused = self._unused, None
        if loading is not None:
            loading.is_no_epoch()
            self._was_evaluation(loading, loading.began)

    def _was_evaluation(self, loading: Loading, began: float) -> None:
        """The latest pass was one. The current step is left out, or what it holds of it if gradients are kept in it from before.

        Args:
            began: when the evaluation did.
        """
        step, self._paused_within = self._step, 0.0
        if step is not None:
            asked, held = self._latest_asked or (None, None)
            before = held if asked is loading else None
            self._paused_within = step.paused - (before.cut.paused if before is not None else 0.0)
            if before is not None and before.batches and trains(step):
                step.take_back(before, loading)
            else:
                self._step = None
        self._evaluating = began
        self._evaluated_pass(loading)

    def _leave_out_before(self, asked: Loading, step: Step) -> None:
        """Leave out of the first step what came before the pass that the second one begins with, such as a batch that was drawn."""
        if asked not in self._first_asked or asked not in step.fed or asked is step.loader:
            return
        cut, _, samples, waited = self._first_asked[asked]
        step.began, step.begin, step.cpu = cut.time, cut.moment, cut.cpu
        del step.phases[: cut.phases]
        step.paused -= cut.paused
        step.samples, step.data_wait = step.samples - samples, step.data_wait - waited
        passes = [*step.fed]
        step.fed = {one: step.fed[one] for one in passes[passes.index(asked) :]}
        step.loader, step.epoch = asked, asked.number
        step.batches = sum(batches for one, batches in step.fed.items() if one.loader is asked.loader)

    def _settle_evaluated_before(self, asked: Loading) -> None:
        """A pass that was read with gradients on, but not trained on before the training loader's next request, was an evaluation."""
        step = self._step
        if step is None or step.optimizers or step.loader is None:
            return
        if step.loader.loader.role == "training" or asked.loader.role != "training" or trains(step):
            return
        self._was_evaluation(step.loader, step.began)

    def loader_begins_anew(self, latest: Loading) -> None:
        """A loader begins a new pass. Its latest is no epoch if nothing was trained since its first request, such as a look at one batch.

        Args:
            latest: its pass before.
        """
        if latest.trained == self._trained:
            latest.is_no_epoch()

    def loader_restarts(self, training: bool) -> None:
        """A loader begins a new pass, whose workers may have to start first.

        Args:
            training: it is a training loader, and gradients are on.
        """
        self._settle_untrained()
        if training:
            self._end_pauses(self.now)
        step = self._step
        if step is None or not step.optimizers or self._optimizer is not None:
            return
        own = step.loader or self._read
        if own is not None and own.batches > 1:
            # The pass has ended. Not every loop asks for a batch once more then: a prefetcher did so before its last batch, and islice
            # never does. A loop that takes one batch of each pass has nothing between two passes.
            self._end_step_at_its_cut(step)
            self._step = None

    # The step's own work

    def backward_begins(self) -> Sequence[Loading]:
        """Returns the loader passes whose batches are trained on, as far as they are known."""
        if self._backward_depth:
            self._backward_depth += 1
            return ()
        self._trained += 1
        self._set_to_evaluate = self._untrained = None
        step = self._under_way()
        self._backward_depth = 1
        self._add("forward", step)
        self._exhausted = False
        if self.steps and step.loader is not None and step.loader.loader not in self._fed_before:
            return ()  # until an optimizer uses the gradients
        return self._trained_on(step)

    def backward_ends(self) -> None:
        self._backward_depth -= 1
        if self._backward_depth > 0 or self._step is None:
            return
        self._add("backward", self._step)

    def optimizer_begins(self, optimizer: int) -> Sequence[Loading]:
        """An optimizer's step, or a scaler's around it, begins. One that begins within another is part of it.

        Args:
            optimizer: its identity.

        Returns:
            the loader passes whose batches are trained on, as far as they are known.
        """
        if self._optimizer is not None and not self._has_failed(optimizer):
            return ()
        self._trained += 1
        self._optimized += 1
        self._set_to_evaluate = self._untrained = self._unused = None
        step = self._under_way()
        done = step.optimizers.count(optimizer)
        if done:
            self._settle_fetched()
        if done and (not step.batches or done >= MAX_OPTIMIZER_STEPS):
            step = self._end_step_at_its_cut(step)
        if self._backward_depth:  # an optimizer for each parameter, as soon as its gradient is there
            self._add("backward", step)
        self._optimizer, self._mark = optimizer, self.moment
        return self._trained_on(step)

    def _has_failed(self, optimizer: int) -> bool:
        """Whether the running optimizer step has failed, since another optimizer's begins after a batch was requested. If so, what the
        current step held before that request is left out."""
        step = self._step
        if optimizer == self._optimizer or self._asked is None or step is None or step.optimizers:
            return False
        cut, batches, samples, waited = self._asked
        self._step = left = Step(step.number, cut.time, cut.moment, cut.cpu)
        left.phases, left.paused = step.phases[cut.phases :], step.paused - cut.paused
        left.loader, left.epoch, left.fed = step.loader, step.epoch, step.fed
        left.data_wait = step.data_wait - waited
        left.batches, left.samples = step.batches - batches, step.samples - samples
        self._optimizer = self._asked = None
        return True

    def optimizer_ends(self, optimizer: int, cpu: float) -> None:
        """
        Args:
            cpu: CPU seconds of the process so far.
        """
        step, self._cpu = self._step, cpu
        if self._optimizer != optimizer or step is None:
            return
        self._add("optimizer", step)
        step.optimizers.append(optimizer)
        step.ended = self.now
        step.cut = Cut(self.now, self.moment, cpu, len(step.phases), step.paused)
        self._optimizer, self._asked, self._copied = None, None, False

    def part_begins(self) -> None:
        """A tensor is copied to the device, or ranks exchange buffers."""
        self._part_began = self.moment

    def copy_ends(self, before: str | None) -> None:
        """
        Args:
            before: the phase in which it was copied.
        """
        # before the batch's first copy, the model has not started
        self._part_ends("host_to_device", before == "forward" and self._copied)
        self._copied = True

    def buffers_exchanged(self, before: str | None) -> None:
        """
        Args:
            before: the phase that it interrupted.
        """
        self._part_ends("buffer_sync", before == "forward")

    def _part_ends(self, name: str, is_within: bool) -> None:
        """
        Args:
            is_within: whether it interrupts the model's forward pass.
        """
        step = self._step
        if step is None or self._evaluating is not None or self._backward_depth or self._optimizer is not None:
            return
        if (step.optimizers or self._exhausted) and len(step.phases) - step.cut.phases >= MAX_PARTS:
            if step.optimizers:
                self._end_step_at_its_cut(step)
            self._step = None  # no training, but what follows it
            return
        # a prefetcher copies the next batch in a stream of its own
        is_beside = self._stream_of(self.moment) != self._stream_of(step.begin)
        if is_within and not is_beside:
            step.phases.append(("forward", self._mark, self._part_began))
        step.phases.append((name, self._part_began, self.moment))
        if not is_beside:
            self._mark = self.moment

    # Pauses

    def checkpoint_begins(self) -> None:
        """Files saved one after another are one checkpoint."""
        now = self.now
        self._settle_untrained()
        self._end_evaluation(now)
        self._saving = self._saved[1] if self._saved else now
        self._saved = (self._saved[0] if self._saved else now, now)

    def checkpoint_ends(self) -> None:
        now, step = self.now, self._step
        assert self._saving is not None and self._saved is not None
        if step is not None:
            step.paused += now - self._saving
            step.ended, self._mark = now, self.moment
        self._saving, self._saved = None, (self._saved[0], now)

    def close(self) -> None:
        """The process ends: count what is complete by now."""
        self._settle_untrained()
        self._end_checkpoint()
        if self._evaluating is not None:
            self._end_evaluation(self._evaluated)
        elif self._step is not None and self._step.optimizers:
            self._end_step_at_its_cut(self._step)

    def evaluation_may_begin(self) -> None:
        """A model was set to evaluate. What follows is an evaluation if it is set to train again with nothing trained in between."""
        if self._set_to_evaluate is None:
            phases = len(self._step.phases) if self._step is not None else 0
            self._set_to_evaluate = Cut(self.now, self.moment, self._cpu, phases, 0.0)

    def evaluation_ends(self, cpu: float) -> bool:
        """The model was set to train again, or is saved.

        Args:
            cpu: CPU seconds of the process so far.

        Returns:
            whether there was an evaluation that no loader reported.
        """
        began, self._set_to_evaluate = self._set_to_evaluate, None
        step = self._step
        if began is None or self._evaluating is not None or self.now - began.time < SHORTEST_EVALUATION:
            return False
        if step is not None and step.batches and not step.optimizers:
            return False  # mid-step: the model computes something that is trained on
        trained = self.steps + bool(step and step.optimizers)
        before, self._evaluated_at = self._evaluated_at, trained
        if trained - before < 2:
            return False  # likewise if it happens in every step
        self._end_checkpoint()
        if step is not None:
            del step.phases[began.phases :]
        if step is not None and step.optimizers:
            self._end_step(began.time, began.moment)
        elif step is not None:
            step.paused += self.now - began.time
            self._mark = self.moment
        self._cpu = cpu
        if step is not None and step.optimizers and not step.batches:
            self._begin_step(self.now)
        self._paused("evaluate", trained, began.time, self.now - began.time)
        return True

    def _begin_evaluation(self, loading: Loading, now: float) -> None:
        """An evaluation begins or continues with a batch of this pass, unless it turns out to be trained on: see `_fetched`."""
        self._end_checkpoint()
        self._evaluated, self._set_to_evaluate = now, None
        begins = self._evaluating is None
        if begins:
            if self._step is not None and self._step.optimizers:
                self._end_step(now, self.moment)
            self._evaluating = now
        holds_nothing = self._step is None or not (self._step.batches or self._step.phases)
        if holds_nothing and self._exhausted:  # the next one begins with its own batch
            self._step = None
        if holds_nothing and self._fetched is None and (begins or not loading.batches):
            self._fetched = Fetched(Step(self.steps + 1, now, self.moment, self._cpu))

    def _end_pauses(self, now: float) -> None:
        """Training resumes."""
        self._end_checkpoint()
        self._end_evaluation(now)

    def _end_checkpoint(self) -> None:
        if self._saved is None:
            return
        (began, ended), self._saved = self._saved, None
        steps = self.steps + bool(self._step and self._step.optimizers)
        if steps:
            self._paused("checkpoint", steps, began, ended - began)

    def _end_evaluation(self, now: float) -> None:
        if self._evaluating is None:
            return
        began, self._evaluating, self._fetched = self._evaluating, None, None
        if self._step is not None:  # in the middle of one, between two of its batches
            self._step.paused += now - began
            self._mark = self.moment
        within, self._paused_within = self._paused_within, 0.0
        if self.steps and now > began:
            self._paused("evaluate", self.steps, began, now - began - within)

    def _settle_fetched(self, asked: Loading | None = None) -> None:
        """Decide, if still open, whether the current step trains on batches that were requested with gradients off.

        Args:
            asked: pass whose next batch is requested; None: the step has ended otherwise, or goes on without a batch.
        """
        fetched = self._fetched
        if fetched is None or fetched.over is None:
            return
        self._fetched = None
        if fetched.is_asked_again(asked):
            return
        began, seconds = fetched.becomes_evaluation()
        if self.steps:
            self._paused("evaluate", self.steps, began, seconds)

    def _trained_on(self, step: Step) -> Sequence[Loading]:
        """The passes whose batches a step trains on, as far as that is certain. One beside the first is trained on if the step before read
        its loader too; else the script may have looked at a batch of its evaluation's."""
        if self._fetched is not None or step.loader is None or len(self._first_asked) > 1:
            return ()
        return [one for one in step.fed if one is step.loader or one.loader in self._fed_before]

    # Steps

    def _train_on_fetched(self, fetched: Fetched) -> None:
        """Assume, for now, that the current step trains on these batches."""
        self._step = None
        self._end_evaluation(fetched.step.began)  # of what came before
        fetched.over = Cut(self.now, self.moment, self._cpu, 0, 0.0)
        self._step, self._fetched, self._optimizer = fetched.step, fetched, None

    def _under_way(self) -> Step:
        """The current step; a new one if there is none, such as after an evaluation or without a loader."""
        if self._evaluating is not None and self._fetched is not None and self._fetched.step.batches:
            self._train_on_fetched(self._fetched)
        if self._saved is not None or self._evaluating is not None:
            self._end_pauses(self.now)
        return self._step or self._begin_step(self.now)

    def _begin_step(self, now: float) -> Step:
        self._step = step = Step(self.steps + 1, now, self.moment, self._cpu)
        self._mark = self.moment
        self._optimizer, self._asked, self._backward_depth = None, None, 0  # of a step that an exception ended
        self._first_asked.clear()
        self._latest_asked = None
        return step

    def _end_step(self, ended: float, end: Any, following: Step | None = None) -> None:
        """End the current step.

        Args:
            ended, end: when, by the host's clock and the timer's.
            following: the current step from then on.
        """
        self._settle_fetched()
        step, self._step = self._step, following
        assert step is not None
        step.end, step.ended = end, ended
        step.cpu = (following.cpu if following is not None else self._cpu) - step.cpu
        self.steps = step.number
        if step.fed:
            self._fed_before = {one.loader for one in step.fed}
        self._step_ended(step)

    def _end_step_at_its_cut(self, step: Step) -> Step:
        """End the step at its last optimizer step. Returns the next one, to which what came after belongs."""
        cut = step.cut
        following = Step(step.number + 1, cut.time, cut.moment, cut.cpu)
        following.phases, following.paused = step.phases[cut.phases :], step.paused - cut.paused
        del step.phases[cut.phases :]
        step.paused = cut.paused
        self._end_step(cut.time, cut.moment, following)
        assert self._step is not None  # another one where the timer has changed
        return self._step

    def _add(self, phase: str, step: Step) -> None:
        """Assign the time since the last mark to this phase."""
        if not step.optimizers and phase != "optimizer" and len(step.phases) >= MAX_PARTS:
            self._step = None  # gradients that no optimizer uses
            return
        step.phases.append((phase, self._mark, self.moment))
        self._mark = self.moment

"""What a tuning's trial shows: its steps over time, and its losses. Trials are compared over the images that all of
them trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from launcher.config.issues import mistake
from launcher.insight import windows
from launcher.record import records
from launcher.record.log_lines import complete_lines
from launcher.record.script_output import training_loss
from launcher.runner.run import Run
from launcher.show.spread import Spread

if TYPE_CHECKING:
    from launcher.insight.evidence import Evidence

Losses = Mapping[int, float]
"""Training losses by step; for a script that is not the kit's, numbered in the order it printed them."""


OWN_NOISE = 2.0
"""A loss is the same within this multiple of the largest difference between repeats of the same settings: two repeats do not show
all of a device's noise. On a CPU there is none."""

FLOAT32 = 1.3e-6
"""Minimum noise relative to a loss if repeats differ at all: what torch.testing.assert_close allows float32 results that should be equal.
https://docs.pytorch.org/docs/stable/testing.html"""

UNSEEDED = 1e-3
"""Relative difference between the first losses of repeats above which they are not of the same weights and images: rounding makes about
FLOAT32, other random numbers make per cents."""


@dataclass(frozen=True)
class Course:
    """When each part of a run was done. Time between steps counts: pauses, checkpoints, evaluations."""

    images: np.ndarray
    """(n,) images trained on by the end of each logged window after the first steps, which allocate memory, choose kernels and compile;
    the first value is at the end of these. Steps if the batch is unknown."""
    seconds: np.ndarray
    """(n,) seconds since the process started."""

    @property
    def last(self) -> float:
        return float(self.images[-1])

    @property
    def start(self) -> float:
        """Seconds until the first steps were done."""
        return float(self.seconds[0])

    def each(self, until: float) -> float:
        """Seconds per image, from the end of the first steps until that many images were done."""
        done = max(until, float(self.images[1]))
        passed = float(np.interp(done, self.images, self.seconds)) - self.start
        return passed / (done - float(self.images[0]))


def course(evidence: Evidence, name: str, batch: int | None) -> Course:
    """A run's course, from its first rank.

    Args:
        batch: images of a step; None: not known.

    Raises:
        UserError: it has too few steps.
    """
    steps = evidence.ranks[0] if evidence.ranks else None
    first = 0
    if steps is not None:
        begun = steps.step - windows.counts(steps) - (steps.step[0] - windows.counts(steps)[0])
        first = int(np.searchsorted(begun, windows.WARM_UP_STEPS)) - 1  # the last of the first steps
    if steps is None or len(steps.step) - first < 3:
        found = f"{name} recorded too few steps: {windows.WARM_UP_STEPS} warm-up steps and two more windows are needed"
        if evidence.facts.get("state") == records.COMPLETED:
            key, fixes = "steps", ["it came to its own end: train for more steps"]
        else:
            key, fixes = "--minutes", ["allow more minutes or fewer trials"]
        if evidence.script is None:
            fixes.append("lower hyperparameters.log_every")
        raise mistake(key, found, ", or ".join(fixes))
    usual, in_first = float(evidence.step_seconds or 0.0), float(windows.counts(steps)[0])
    began = float(steps.ended[0]) - (in_first - 1) * usual - float(evidence.facts.get("seconds_to_first_step", usual))
    return Course(
        (steps.step[first:] * (batch or 1)).astype(float),
        steps.ended[first:] - began,
    )


def costs(courses: Sequence[Course], until: float, images: float | None) -> Spread:
    """The job's seconds by each course: for all its images if their number is known, else per image.

    Args:
        until: images up to which the courses are compared.
        images: of the whole job. None: unknown; the start is then not counted.
    """
    if images is None:
        return Spread(tuple(one.each(until) for one in courses))
    left = (max(0.0, images - float(one.images[0])) for one in courses)
    return Spread(tuple(one.start + rest * one.each(until) for one, rest in zip(courses, left)))


def losses(run: Run) -> Losses | None:
    """A run's training losses: at full precision if one of the kit's scripts wrote them, else as the script printed them. The last one
    that a stopped script printed may be cut off, and is left out. None if the run was removed: what it logged is not known."""
    if not run.folder.plan.exists():
        return None
    if found := _logged(run):
        return found
    printed = (
        training_loss(line.decode("utf-8", "replace"))
        for line, _ in complete_lines(run.folder.log(run.hosts[0]), 0, last=False)
    )
    whole = [loss for loss in printed if loss is not None]
    return dict(enumerate(whole[:-1] if run.state == records.STOPPED else whole, 1))


def are_printed(run: Run) -> bool:
    """Whether a run's losses are those that its script printed, and so known to the printed digits only."""
    return run.folder.plan.exists() and not _logged(run)


def _logged(run: Run) -> Losses:
    """The losses in the metric lines that one of the kit's scripts wrote, on its first rank; {} for another script."""
    return {
        line["step"]: line["loss"]
        for line in run.metrics()
        if not line.get("observed") and line.get("rank", 0) == 0 and isinstance(line.get("loss"), float)
    }


@dataclass(frozen=True)
class LossesCompared:
    """Whether a change left the losses as they were."""

    same: bool
    """True also if there was nothing to compare: no step whose loss all of them logged or printed, or repeats without a seed."""
    text: str
    removed: bool = False
    """Whether a trial's run was removed, so that nothing shows whether they are the same."""


def compare(
    before: Sequence[Losses | None],
    after: Sequence[Losses | None],
    *,
    printed: bool = False,
    in_any_order: bool = False,
) -> LossesCompared:
    """Compare the losses after a change with those before it, over the steps that all of them have. None: of a run that was removed.

    Repeats of the same settings on a CPU are mostly equal bit for bit; then a change's losses must be too. Otherwise they may be up to
    OWN_NOISE times as far from the nearest repeat as the repeats are from each other. Repeats without a seed show nothing: a further one
    is often farther away than that.

    Args:
        printed: whether some are known to the printed digits only.
        in_any_order: whether several processes may have printed them. Then they are compared only if repeats on both sides show the same
            order, as they do if one process alone prints, and up to the step where they no longer do.
    """
    found = [one for one in (*before, *after) if one is not None]
    if len(found) < len(before) + len(after):
        return LossesCompared(False, "losses not compared: a trial's run was removed", removed=True)
    steps = sorted(set.intersection(*(set(one) for one in found)))
    if not steps:
        return LossesCompared(True, "losses not compared: none were logged or printed")
    every = np.array([[one[step] for step in steps] for one in found])
    every[:, _alike(every)] = 0.0  # a loss that is nan or inf in all of them has no difference that could be computed
    table = every[: len(before)]
    unlike = _unlike(table)
    # a last layer of zeros gives all of them the same first loss
    if unlike[0] or (_alike(table)[0] and unlike[1:2].any()):
        text = "losses not compared: two runs of the same settings differ from the first loss on; set a seed if it has none"
        return LossesCompared(True, text)
    if in_any_order and (unlike := unlike | _unlike(every[len(before) :])).any():
        until = int(np.argmax(unlike))
        if not until:
            why = "two runs of the same settings differ; set a seed if it has none, and print them in one process only"
            return LossesCompared(True, f"losses not compared: {why}")
        steps, every, table = steps[:until], every[:, :until], table[:, :until]
    noise = np.maximum.accumulate(_spread(table))  # what differs once, differs from then on
    if noise.any():
        noise = np.maximum(noise, FLOAT32 * np.abs(np.where(np.isfinite(table), table, 0.0)).max(axis=0))
    exact = True
    for values in every[len(before) :]:
        away = np.abs(table - values).min(axis=0)
        exact = exact and not away.any() and not noise.any()
        if (wrong := ~(away <= OWN_NOISE * noise)).any():  # negated, so that NaN against a number differs
            at = int(np.argmax(wrong))
            return LossesCompared(
                False, f"other losses, first at step {steps[at]}: {values[at]:.9g} instead of {table[0][at]:.9g}"
            )
    equal = "to the digits printed" if printed else "bit for bit"
    how = equal if exact else "within the spread of repeats of the same settings"
    return LossesCompared(True, f"the same losses in {len(steps)} logged steps, {how}")


def _alike(losses: np.ndarray) -> np.ndarray:
    """(steps,) whether runs, (runs, steps), have the same loss, or all have none that is a number."""
    same: np.ndarray = (losses == losses[0]).all(axis=0) | np.isnan(losses).all(axis=0)
    return same


def _spread(repeats: np.ndarray) -> np.ndarray:
    """(steps,) differences between repeats of the same settings, (repeats, steps)."""
    found: np.ndarray = np.ptp(np.where(_alike(repeats), 0.0, repeats), axis=0)
    return found


def _unlike(repeats: np.ndarray) -> np.ndarray:
    """(steps,) whether repeats differ by more than UNSEEDED; NaN or an infinity against a number does."""
    spread = _spread(repeats)
    found: np.ndarray = (~np.isfinite(spread) | ~(spread <= UNSEEDED * np.abs(repeats).max(axis=0))) & ~_alike(repeats)
    return found

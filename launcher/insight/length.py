"""How long a run was, whether that suffices to say where its time goes, how long its whole job is, and the part that two runs both did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.host_evidence import FEW_SAMPLES
from launcher.insight.measurements import Steps
from launcher.show.text import counted

ENOUGH_STEPS, ENOUGH_SECONDS = 10, 10.0
"""Usual steps, or seconds of them, that suffice. Steps that share their cores with data workers spread by about a third of their mean, so
the mean of ten is known to 0.33 / sqrt(10) = 0.10, what is NOTICEABLE. Seconds count too: a long step is itself a mean of much work."""

MIN_SECONDS = 1.0
"""Of usual steps, however many they are: in less, a single hiccup of a machine, a tenth of a second, would be NOTICEABLE."""


def too_short(evidence: Evidence) -> str | None:
    """How short a run was, as in `3 steps in 0.2 s`; None if shares of its time can be judged.

    Usual steps do not begin before memory is allocated and kernels are chosen (`windows.WARM_UP_STEPS`). If steps were not timed,
    the samples of the hosts count.
    """
    if not evidence.ranks:
        samples = [
            len(series.values) for host in evidence.hosts for series in (*host.cores.values(), *host.gpus.values())
        ]
        most = max(samples, default=0)
        return f"{counted(most, 'sample')} of the hosts" if samples and most < FEW_SAMPLES else None
    longest = max(evidence.ranks, key=windows.steps_done)
    steps, seconds = windows.steps_done(longest), windows.seconds(longest)
    usual = steps - windows.WARM_UP_STEPS
    usual_seconds = usual * windows.timed_mean(longest, "step")
    enough = usual >= ENOUGH_STEPS or usual_seconds >= ENOUGH_SECONDS
    if enough and windows.seconds_after_the_first(longest) >= MIN_SECONDS:
        return None
    return f"{counted(round(steps), 'step')} in {f'{seconds:.0f}' if seconds >= 10 else f'{seconds:.2g}'} s"


def epoch_steps(evidence: Evidence) -> float | None:
    """Steps per epoch; None: not known, such as when the run did not reach the end of one.

    They follow from the number of training images if it is known. The observer records them if the script's loader has a length.
    Else they follow from the logged steps: step s of epoch e shows that an epoch has at least s / e of them, and an epoch's last step
    gives the exact number. A part of the first epoch says nothing about the whole.
    """
    if not evidence.ranks:
        return None
    steps = evidence.ranks[0]
    images, batch = evidence.facts.get("training_images"), evidence.settings.get("global_batch_size")
    if isinstance(images, int) and isinstance(batch, int) and images >= batch:
        return images // batch
    recorded = steps.extra.get("epoch_steps", np.zeros(0))
    known = recorded[recorded >= 1]
    if len(known):
        return float(known[-1])
    ended = steps.epoch[-1] > steps.epoch[0]
    return float(np.ceil(steps.step / np.maximum(steps.epoch, 1)).max()) if ended else None


def job_steps(evidence: Evidence) -> float | None:
    """Optimizer steps of the whole job by its settings, of which the run may be a part; None: they do not say, or the length of an epoch
    is not known."""
    each = epoch_steps(evidence)
    epochs, most = (evidence.settings.get(name) for name in ("epochs", "max_steps"))
    by_epochs = epochs * each if isinstance(epochs, int) and each else None
    known = [float(steps) for steps in (by_epochs, most) if isinstance(steps, (int, float))]
    return min(known, default=None)


def work_of_a_step(before: Evidence, after: Evidence) -> tuple[str, tuple[int, int]]:
    """The unit in which the work of two runs is counted, and how much of it a step of each does: images, or steps if a batch is unknown."""
    first, second = (run.settings.get("global_batch_size") for run in (before, after))
    return ("images", (first, second)) if isinstance(first, int) and isinstance(second, int) else ("steps", (1, 1))


def common(before: Evidence, after: Evidence) -> tuple[Evidence, Evidence]:
    """The part of two runs that both did, by `work_of_a_step`: runs of the same length as they are, else the first steps of each.

    A run pays for its first steps once, however long it is, and a longer one reaches evaluations and starts of epochs that a shorter one
    does not: over the whole of both, their lengths alone would look like a speed-up. For the same reason pauses after the last common
    step count in neither: the end of a job brings an evaluation and a checkpoint.
    """
    if not (before.ranks and after.ranks):
        return before, after
    _, each = work_of_a_step(before, after)
    first, second = (windows.steps_done(run.ranks[0]) * one for run, one in zip((before, after), each))
    if first == second:
        return before, after
    done = min(first, second)
    return _first_steps(before, int(done // each[0])), _first_steps(after, int(done // each[1]))


def _first_steps(evidence: Evidence, count: int) -> Evidence:
    """A run's first steps, at least one, and the pauses between them."""
    ranks = tuple(_first_windows(steps, max(1, count)) for steps in evidence.ranks)
    stalls = tuple(stall for stall in evidence.measurements.stalls if stall.step < ranks[0].step[-1])
    return Evidence(replace(evidence.measurements, ranks=ranks, stalls=stalls))


def _first_windows(steps: Steps, count: int) -> Steps:
    """One rank's windows of its first steps. The window in which these end counts in part, as if all of its steps took equally long."""
    counts = windows.counts(steps)
    last = steps.step[0] - counts[0] + count
    number = min(int(np.searchsorted(steps.step, last)) + 1, len(steps.step))

    def kept(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: one[:number] for name, one in values.items()}

    beyond = np.zeros(number)
    beyond[-1] = max(0, steps.step[number - 1] - last)
    return replace(
        steps,
        step=steps.step[:number] - beyond.astype(steps.step.dtype),
        epoch=steps.epoch[:number],
        ended=steps.ended[:number] - beyond * steps.seconds["step"][:number],
        seconds=kept(steps.seconds),
        extra={**kept(steps.extra), "steps": np.maximum(counts[:number] - beyond, 1)},
        servers=kept(steps.servers),
    )

"""How long a run was, whether that suffices to say where its time goes, and how long its whole job is."""

from __future__ import annotations

import numpy as np

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.host_evidence import FEW_SAMPLES
from launcher.show.text import counted

ENOUGH_STEPS, ENOUGH_SECONDS = 10, 10.0
"""Usual steps, or seconds of them, that suffice. Steps that share their cores with data workers spread by about a third of their mean, so
the mean of ten is known to 0.33 / sqrt(10) = 0.10, what is NOTICEABLE. Seconds count too: a long step is itself a mean of much work."""

FEWEST_SECONDS = 1.0
"""Of usual steps, however many they are: a single hiccup of a machine, a tenth of a second, would be NOTICEABLE."""


def too_short(evidence: Evidence) -> str | None:
    """How short a run was, as in `3 steps in 0.2 s`; None where shares of its time can be judged.

    Usual steps do not begin before memory is allocated and kernels are chosen (`windows.WARM_UP_STEPS`). Where steps were not timed,
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
    if enough and windows.seconds_after_the_first(longest) >= FEWEST_SECONDS:
        return None
    return f"{counted(round(steps), 'step')} in {f'{seconds:.0f}' if seconds >= 10 else f'{seconds:.2g}'} s"


def epoch_steps(evidence: Evidence) -> float | None:
    """Steps of an epoch; None where no step was measured.

    They follow from the number of training images where it is known. Else from the logged steps: step s of epoch e says that an epoch
    has at least s / e of them, and an epoch's last step says exactly that.
    """
    if not evidence.ranks:
        return None
    steps = evidence.ranks[0]
    images, batch = evidence.facts.get("training_images"), evidence.settings.get("global_batch_size")
    if isinstance(images, int) and isinstance(batch, int) and images >= batch:
        return images // batch
    return float(np.ceil(steps.step / np.maximum(steps.epoch, 1)).max())


def job_steps(evidence: Evidence) -> float | None:
    """Optimizer steps of the whole job by its settings, of which the run may be a part; None: they do not say, or the length of an epoch
    is not known, for the run did not come to the end of its first."""
    ended = evidence.ranks and evidence.ranks[0].epoch[-1] > evidence.ranks[0].epoch[0]
    each = epoch_steps(evidence) if ended or "training_images" in evidence.facts else None
    epochs, most = (evidence.settings.get(name) for name in ("epochs", "max_steps"))
    by_epochs = epochs * each if isinstance(epochs, int) and each else None
    known = [float(steps) for steps in (by_epochs, most) if isinstance(steps, (int, float))]
    return min(known, default=None)

"""What makes a run's images cheaper to read and to prepare, and what that gains."""

from __future__ import annotations

import math

from launcher.insight import calibration
from launcher.insight.contention import WORKERS, cost_of_workers, lost_to, peers
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Fix, Gain, percent
from launcher.insight.gains import amdahl, bounded, estimated, in_steps, step_left

SHARD_SIZE = "100MB"
"""Of shards: a few large reads for many images, and still enough files to share among processes and workers."""


def cheaper_images(evidence: Evidence) -> tuple[Fix, ...]:
    """Fixes that lower the CPU time of an image, without those that the run already has."""
    settings, fixes = evidence.settings, []
    pipeline = settings.get("preprocessing")
    if pipeline == "cpu_reference":
        fixes.append(
            Fix(setting="hyperparameters.preprocessing", value="cpu", now=pipeline, why="the fast pipeline on the CPU")
        )
    if settings.get("augmentation_load") and not settings.get("compose_augmentation") and pipeline != "dali":
        fixes.append(
            Fix(
                setting="hyperparameters.compose_augmentation",
                value=True,
                now=False,
                why="all rounds of augmentation as one warp",
                also={"hyperparameters.preprocessing": "cpu"} if pipeline == "cpu_reference" else {},
            )
        )
    fixes.append(_scaled(evidence))
    if evidence.remote:
        return tuple(fixes)  # by servers, which decode on their CPUs
    if evidence.on_gpu and pipeline != "dali":
        fixes.append(dali(evidence, "decoding and augmentation move to the GPU"))
    fixes.append(
        Fix(setting=None, value=f"an instance type with more cores{' for each GPU' if evidence.on_gpu else ''}")
    )
    return tuple(fixes)


def gain_of_cheaper_images(evidence: Evidence, kind: str, touched: float, fix: Fix, starts: float = 0.0) -> Gain:
    """The gain of cheaper images, which take at least the share `touched` of the training time.

    If the model computes on the same cores, it also gets the cores that images free: more than the wait can go away.

    Args:
        starts: share of the training time in which epochs begin, while nothing is done but preparing images.
    """
    images = _image_cost(evidence, fix)
    if images is not None and images < 1 and evidence.workers_part is not None:
        step, why = _with_cheaper(evidence, images)
        free = _with_cheaper(evidence, 0.0)[0]
        left, most = (
            1 - max(0.0, in_steps(evidence) - starts) * (1 - min(one, 1.0)) - starts * (1 - cost)
            for one, cost in ((step, images), (free, 0.0))
        )
        wait = (
            ""
            if starts < NOTICEABLE
            else f", waits at the start of epochs ({percent(starts)} of the time) shrink as much"
        )
        formula = f"an image then costs {percent(images)} of its CPU time{wait}, and a step takes {why} of its time: 1 / {left:.2f}"
        return estimated(evidence, kind, 1 - most, left, formula)
    theirs = evidence.workers_part
    if evidence.on_gpu or theirs is None or theirs * evidence.steps_part <= touched:
        return bounded(touched, f"{amdahl(touched)}; how much cheaper images can be is not known")
    touched = theirs * evidence.steps_part
    return bounded(
        touched,
        f"{amdahl(touched)}: images take {percent(theirs)} of the CPU time, which they share with the model; how much cheaper they "
        "can be is not known",
    )


def _with_cheaper(evidence: Evidence, images: float) -> tuple[float, str]:
    """Time of a step with cheaper images, over its time now, and why: no step waits for data, nor for a core that workers had.

    A thread that waits for its peer spins, and the CPU time of all that spinning goes away. The model was made on three real runs, off by
    5 to 28 %; two others were off by 12 and 23 % (`planted_bottlenecks.py data_bound`). All had 2 cores; more threads were not measured.

    Args:
        images: CPU time of an image after the fix, over that before.
    """
    lost = (1 - images) * (lost_to(evidence, WORKERS) or 0.0)
    own, step = evidence.own_cpu, evidence.steady_step_seconds
    spun = 2 * peers(evidence) * lost * step / own if own and step else 0.0
    busy = max(0.0, 1 - (evidence.lost_to_data or 0.0) - (1 - images) * cost_of_workers(evidence))
    return step_left(evidence, busy, images=images, own_cpu=max(0.0, 1 - spun))


def _image_cost(evidence: Evidence, fix: Fix) -> float | None:
    """CPU time of an image after a fix, over that before; None: not known."""
    changes = {key.removeprefix("hyperparameters."): value for key, value in fix.keys.items()}
    return None if evidence.script else calibration.image_cost(evidence.settings, changes)


def dali(evidence: Evidence, why: str) -> Fix:
    """NVIDIA DALI instead of the CPU pipeline, without the settings that belong to that one."""
    settings = evidence.settings
    others = ("compose_augmentation", "copy_stream", "teacher_stream")
    off = {f"hyperparameters.{name}": False for name in others if settings.get(name)}
    now = settings.get("preprocessing")
    return Fix(setting="hyperparameters.preprocessing", value="dali", now=now, why=why, also=off)


def shards(evidence: Evidence, why: str) -> Fix:
    """A few large files instead of one for each image."""
    return _prepared(evidence, "--shards", SHARD_SIZE, why)


def gain_of_quick_reads(evidence: Evidence, lost: float) -> Gain:
    """The gain if reads do not wait, not in evaluations either."""
    reading = in_steps(evidence, evaluations=True)
    touched = lost * reading
    if evidence.worker_use is None:
        return bounded(touched)
    step, why = step_left(evidence, 1 - lost, own_cpu=1.0)
    left = 1 - reading * (1 - min(step, 1.0))
    return estimated(
        evidence,
        "storage_bound",
        touched,
        left,
        f"if reads do not wait, a step takes {why} of its time: 1 / {left:.2f}",
    )


def _scaled(evidence: Evidence) -> Fix:
    """Images no larger than the smallest random crop needs, if the settings say what that is."""
    settings, why = evidence.settings, "images are scaled down once instead of in every epoch"
    size, area = settings.get("view_size") or settings.get("image_size"), settings.get("min_crop_area", 1.0)
    if not isinstance(size, int) or not isinstance(area, (int, float)) or not 0 < area <= 1:
        return _advised("--size PIXELS", why)
    return _prepared(evidence, "--size", str(math.ceil(size / math.sqrt(area))), why)


def _prepared(evidence: Evidence, option: str, value: str, why: str) -> Fix:
    """The images prepared anew; if they are on this machine, with the commands that do so and then train on them."""
    replayed = evidence.measurements.replay
    if replayed is None or replayed.images is None:
        return _advised(f"{option} {value}", why)
    target = f"{replayed.images}-{option.removeprefix('--')}-{value}"
    return Fix(
        setting=None,
        value=f"launcher prepare {option} {value}",
        why=why,
        scope="kit",
        first=("launcher", "prepare", replayed.images, target, option, value),
        also={f"inputs.{part}.folder": f"{target}/{part}" for part in ("train", "validation")},
    )


def _advised(options: str, why: str) -> Fix:
    return Fix(setting=None, value=f"launcher prepare SOURCE TARGET {options}", why=why, scope="kit")

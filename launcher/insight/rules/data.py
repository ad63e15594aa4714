"""Does training wait for its data, and is that for want of workers, of cores, or of storage?

The three are told apart by what the cores do meanwhile: more workers help only where cores are idle, whatever the loader's wait.
"""

from __future__ import annotations

import math

import numpy as np

from launcher.insight import windows
from launcher.insight.evidence import IDLE_GPU, Evidence
from launcher.insight.verdicts import EXPLAINED, NOTICEABLE, Answer, Cure, NotMeasured, Verdict, bounded, percent

TOO_MANY = 2.0
"""Workers for each core that their process may use, from which there are too many: they then only take turns."""

WORKING = 0.5
"""Share of a core from which a data worker counts as busy; below, it waits for something other than the CPU."""

FULL = 0.9
"""Share of the usable cores from which they are full: no more than 1 / 0.9 = 1.11 times the work fits on them."""


def waiting(evidence: Evidence) -> Answer:
    """The loader does not keep up: why, and what helps."""
    wait, idle = evidence.share("data_wait"), evidence.gpu_idle
    looks_for = "waiting for data"
    if wait is None and idle is None:
        return NotMeasured(what=looks_for, reason=evidence.why_not("data_wait"))
    taken = _taken_by_workers(evidence)
    if taken is not None:
        return _too_many_workers(evidence, taken)
    if wait is None:  # system metrics alone
        return _from_system_metrics(evidence, idle)
    if wait < NOTICEABLE:
        return None
    if not _everywhere(evidence):
        return EXPLAINED
    if evidence.throttled is not None and evidence.throttled >= NOTICEABLE:
        return EXPLAINED  # by the quota: no number of workers helps against it
    if evidence.busy is None:
        return _without_cores(evidence, wait)
    if _blocked(evidence):
        return _storage(evidence, wait)
    room = min(1 / (1 - wait), 1 / max(evidence.busy, 0.01))
    sensible = sensible_workers(evidence)
    if room >= 1 + NOTICEABLE and (evidence.workers is None or evidence.workers < sensible):
        return _too_few_workers(evidence, wait, room, sensible)
    if evidence.busy >= 0.7:
        return _costly_images(evidence, wait)
    return _storage(evidence, wait)


def epoch_starts(evidence: Evidence) -> Answer:
    """The loader's wait is in the first steps of epochs, and nowhere else."""
    if evidence.share("data_wait") is None:
        return NotMeasured(what="pauses where epochs begin", reason=evidence.why_no_steps)
    shares = []
    for steps in evidence.ranks:
        first, later = _epoch_firsts(evidence, steps)
        between = float(windows.between(steps, evidence.measurements.stalls).sum()) / (evidence.training_seconds or 1)
        waited = 0.0
        if first is not None and later < NOTICEABLE * windows.mean_seconds(steps, "step"):
            everything = np.ones(len(first), bool)
            excess = windows.mean_seconds(steps, "data_wait", everything) - later
            waited = excess / windows.mean_seconds(steps, "step", everything)
        shares.append(between + waited * evidence.steps_seconds / (evidence.training_seconds or 1))
    share = float(np.median(shares)) if shares else 0.0
    if share < NOTICEABLE:
        return None
    return Verdict(
        kind="slow_epoch_starts",
        title="Each epoch begins with a wait for the first batches",
        share=share,
        evidence=(
            f"{percent(share)} of the training time passes before the first steps of epochs or in a wait of these for data",
            f"in all other steps waiting for data takes {percent(evidence.share('data_wait') or 0)}",
        ),
        cause="the loader starts again with every epoch: workers come up, or the list of images is made anew, while nothing is ready",
        cures=(
            Cure(
                setting=None, value="launcher prepare --shards", why="a list of few shards instead of a file an image"
            ),
            *_half_the_workers(evidence),
        ),
        gain=bounded(share, 1 / (1 - share), f"all of the wait at epochs' starts: 1 / (1 - {share:.2f})"),
    )


def _half_the_workers(evidence: Evidence) -> tuple[Cure, ...]:
    workers = evidence.workers
    if not workers or workers < 2:
        return ()
    why = "fewer are sooner ready"
    return (Cure(setting="hyperparameters.num_workers", value=workers // 2, now=workers, why=why),)


def crowded(evidence: Evidence) -> bool:
    """Whether there are too many workers for the cores."""
    each = evidence.cores_each
    return bool(evidence.workers and each and evidence.workers >= max(TOO_MANY * each, each + 2))


def _taken_by_workers(evidence: Evidence) -> float | None:
    """Share of a step that too many workers take, at least as far as it shows; None where there are not too many, or no harm.

    It shows as a wait for data, or without any, as in KT's job: the device idles, or steps that compute on the same cores falter.
    """
    if not crowded(evidence) or evidence.busy is None or evidence.busy < 0.6:
        return None
    wait, idle = evidence.share("data_wait") or 0.0, evidence.gpu_idle
    if wait >= NOTICEABLE:
        return max(wait, idle or 0.0)
    if evidence.busy < 0.8:
        return None
    if evidence.on_gpu:
        return idle if idle is not None and idle >= IDLE_GPU else None
    unsteady = evidence.unsteady or 0.0
    pressed = evidence.pressure is not None and evidence.pressure >= 0.5
    return max(unsteady, NOTICEABLE) if evidence.busy >= FULL and (pressed or unsteady >= NOTICEABLE) else None


def sensible_workers(evidence: Evidence) -> int:
    """Workers a process that fill what its own work leaves of its cores.

    Its own work is its measured CPU time, of which its own decoding is no part once there are workers; where that was not
    measured, one core, or none where it mostly waits.
    """
    cores, own = evidence.cores_each or 1.0, evidence.own_cpu
    waits = evidence.share("data_wait") or 0.0
    if own is not None and evidence.workers and evidence.step_seconds:
        taken = min(own / evidence.step_seconds, cores)
    else:
        taken = 0.0 if waits >= 0.5 else 1.0
    return max(1, math.floor(cores - taken + 0.5))


def _everywhere(evidence: Evidence) -> bool:
    """Whether the wait is in all of an epoch, and not only where it begins."""
    for steps in evidence.ranks:
        first, later = _epoch_firsts(evidence, steps)
        if first is not None and later < NOTICEABLE * windows.mean_seconds(steps, "step"):
            return False
    return True


def _epoch_firsts(evidence: Evidence, steps) -> tuple[np.ndarray | None, float]:
    """(which logged windows are an epoch's first, mean wait in the others); (None, 0) where one cannot tell."""
    first = np.concatenate([[True], np.diff(steps.epoch) > 0])
    kept = windows.steady(steps)
    if "data_wait" not in steps.seconds or not (kept & first).any() or (kept & ~first).sum() < 2:
        return None, 0.0
    return first, windows.mean_seconds(steps, "data_wait", ~first)


def _blocked(evidence: Evidence) -> bool:
    """Whether what fetches images waits for something other than a core."""
    if evidence.busy >= FULL:
        return False
    if (evidence.waiting_cores or 0) >= 0.5:
        return True
    if evidence.workers:
        return evidence.worker_use is not None and evidence.worker_use < WORKING
    own = evidence.own_cpu
    return evidence.workers == 0 and own is not None and own < WORKING * evidence.step_seconds


def _numbers(evidence: Evidence, wait: float | None) -> list[str]:
    """What every verdict of this file rests on."""
    told = []
    if wait is not None:
        told.append(f"waiting for data: {percent(wait)} of a step of {evidence.step_seconds:.3g} s")
    if evidence.gpu_idle is not None:
        told.append(f"GPUs idle {percent(evidence.gpu_idle)} of the time")
    if evidence.busy is not None:
        told.append(
            f"{percent(evidence.busy)} of {_cores(evidence)} in use; all of them full in {percent(evidence.full)} of the samples"
        )
    if evidence.workers is not None:
        told.append(f"{evidence.workers} workers a process, {evidence.cores_each or 0:.3g} cores for each process")
    if evidence.unsteady is not None and evidence.unsteady >= NOTICEABLE:
        told.append(f"steps falter: the mean lies {percent(evidence.unsteady)} above the quick ones among them")
    if evidence.pressure is not None and evidence.pressure >= NOTICEABLE:
        told.append(f"some process waits for a core in {percent(evidence.pressure)} of the time (CPU pressure)")
    if evidence.worker_use is not None:
        told.append(f"each worker keeps at most {evidence.worker_use:.2f} cores busy")
    if evidence.waiting_cores is not None:
        told.append(f"{evidence.waiting_cores:.1f} cores wait for disks (I/O wait)")
    return told


def _cores(evidence: Evidence) -> str:
    usable = sum(evidence.usable_cores(host) for host in evidence.hosts)
    known = all(host.usable_cores for host in evidence.hosts)
    return f"{usable:.3g} usable cores" if known else f"{usable:.3g} cores (a quota was not recorded)"


def _too_many_workers(evidence: Evidence, lost: float) -> Verdict:
    workers, sensible = evidence.workers, sensible_workers(evidence)
    work, expected, formula = evidence.all_cpu, None, ""
    if work is not None and evidence.step_seconds:
        needed = work / evidence.cores_each
        expected = evidence.step_seconds / needed if needed else None
        formula = (
            f"the step's {work:.3g} CPU seconds on {evidence.cores_each:.3g} cores take {needed:.3g} s "
            f"of its {evidence.step_seconds:.3g} s; what the workers lose by taking turns comes on top"
        )
    return Verdict(
        kind="too_many_workers",
        title=f"Too many workers: {workers} a process on {evidence.cores_each:.3g} cores",
        share=lost * evidence.steps_part,
        evidence=tuple(_numbers(evidence, evidence.share("data_wait"))),
        cause="the workers take turns on full cores, and take them from the training process too; more workers would only add to it",
        cures=(
            Cure(
                setting="hyperparameters.num_workers",
                value=sensible,
                now=workers,
                why="as many as fill what the training process leaves of its cores; more only if images come slowly",
            ),
            *_cheaper_images(evidence),
        ),
        gain=bounded(lost * evidence.steps_part, expected, formula),
    )


def _too_few_workers(evidence: Evidence, wait: float, room: float, sensible: int) -> Verdict:
    workers, busy, expected, formula = evidence.workers, 1 - wait, None, ""
    if workers:
        wanted = min(sensible, max(workers + 1, math.ceil(workers / busy * 1.1)))
        loader = workers / wanted
    else:
        wanted = min(sensible, max(1, math.ceil(wait / busy * 1.1)))
        loader = wait / wanted
    cause = "the workers are busy, and there are cores left for more of them"
    if workers is None:
        cause = "cores are left for workers; how many there were is not known"
    elif workers == 0:
        cause = "the training process decodes the images itself, between its steps"
    if workers is not None:
        cores = evidence.busy
        expected = 1 / max(busy, loader, cores)
        formula = (
            f"1 / max(rest of the step {busy:.2f}, loader with {wanted} workers {loader:.2f}, cores in use {cores:.2f})"
        )
    return Verdict(
        kind="too_few_workers",
        title="Too few workers: training waits for data while cores are idle",
        share=wait * evidence.steps_part,
        evidence=tuple(_numbers(evidence, wait)),
        cause=cause,
        cures=(
            Cure(
                setting="hyperparameters.num_workers",
                value=wanted,
                now=workers if workers is not None else evidence.settings.get("num_workers"),
                why=f"there is room for {room:.2f} times the work",
            ),
            *_cheaper_images(evidence),
        ),
        gain=bounded(wait * evidence.steps_part, expected, formula),
    )


def _costly_images(evidence: Evidence, wait: float) -> Verdict:
    cures = _cheaper_images(evidence)
    return Verdict(
        kind="data_bound",
        title="Preparing the images takes more than the cores can give",
        share=wait * evidence.steps_part,
        evidence=tuple(_numbers(evidence, wait)),
        cause="the cores are full with decoding and augmentation, and more workers would only take turns on them",
        cures=cures,
        gain=bounded(wait * evidence.steps_part),
    )


def _storage(evidence: Evidence, wait: float | None, lost: float | None = None) -> Verdict:
    lost = wait if lost is None else lost
    read = [
        float(np.mean(evidence.during(host.disk["read"]))) / 1e6
        for host in evidence.hosts
        if "read" in host.disk and len(host.disk["read"].values)
    ]
    received = [
        float(np.mean(evidence.during(host.network["receive"]))) / 1e6
        for host in evidence.hosts
        if "receive" in host.network and len(host.network["receive"].values)
    ]
    told = _numbers(evidence, wait)
    told += [f"read from disks {np.mean(read):.1f} MB/s a host"] if read else []
    told += [f"received {np.mean(received):.1f} MB/s a host"] if received else []
    return Verdict(
        kind="storage_bound",
        title="The images come too slowly from where they lie",
        share=lost * evidence.steps_part,
        evidence=tuple(told),
        cause="whoever fetches images waits for a disk or the network, while cores are idle: many small files, a cold disk, or a "
        "far one",
        cures=(
            Cure(
                setting=None,
                value="launcher prepare SOURCE TARGET --shards 100MB",
                why="few large reads instead of a file an image",
            ),
            Cure(
                setting=None,
                value="mode: File or FSx for Lustre for the input",
                why="the images then lie near the hosts",
            ),
            *(
                (
                    Cure(
                        setting="hyperparameters.num_workers",
                        value=2 * evidence.workers,
                        now=evidence.workers,
                        why="more reads at a time, where the storage answers slowly and not full",
                    ),
                )
                if evidence.workers and not crowded(evidence)
                else ()
            ),
        ),
        gain=bounded(lost * evidence.steps_part),
    )


def _without_cores(evidence: Evidence, wait: float) -> Verdict:
    """The wait is known, its cause is not."""
    return Verdict(
        kind="too_few_workers" if evidence.workers == 0 else "data_bound",
        title="Training waits for its data"
        + ("; the training process decodes the images itself" if evidence.workers == 0 else ""),
        share=wait * evidence.steps_part,
        evidence=tuple(_numbers(evidence, wait)),
        cause=f"whether workers, cores or storage are short was not measured: {evidence.why_no_hosts}",
        cures=(
            Cure(
                setting="hyperparameters.num_workers", value="auto", now=evidence.workers, why="by the cores there are"
            ),
        ),
        gain=bounded(wait * evidence.steps_part),
    )


def _from_system_metrics(evidence: Evidence, idle: float) -> Answer:
    """Without a step timeline: a GPU idles while cores are full or wait for disks. What fills them is not seen."""
    if idle < IDLE_GPU or evidence.busy is None or (evidence.throttled or 0) >= NOTICEABLE:
        return None
    if (evidence.waiting_cores or 0) >= 0.5 and evidence.busy < FULL:
        return _storage(evidence, None, idle)
    if evidence.busy < 0.85:
        return None
    return Verdict(
        kind="data_bound",
        title="All cores are full while the GPUs wait",
        share=idle,
        evidence=tuple(_numbers(evidence, None)),
        cause=f"most likely decoding and augmentation; that it is them was not measured ({evidence.why_no_steps})",
        cures=_cheaper_images(evidence),
        gain=bounded(idle),
    )


def _cheaper_images(evidence: Evidence) -> tuple[Cure, ...]:
    """What lets an image cost less CPU time, as far as the run does not do it already."""
    settings, cures = evidence.settings, []
    if settings.get("preprocessing") == "cpu_reference":
        cures.append(
            Cure(
                setting="hyperparameters.preprocessing", value="cpu", now="cpu_reference", why="the fast way on the CPU"
            )
        )
    if settings.get("augmentation_load") and not settings.get("compose_augmentation"):
        cures.append(
            Cure(
                setting="hyperparameters.compose_augmentation",
                value=True,
                now=False,
                why="all rounds of the augmentation as one warp",
            )
        )
    cures.append(
        Cure(
            setting=None,
            value="launcher prepare SOURCE TARGET --size PIXELS",
            why="images scaled down once, instead of in every epoch",
        )
    )
    if evidence.on_gpu and settings.get("preprocessing") != "dali":
        cures.append(
            Cure(
                setting="hyperparameters.preprocessing",
                value="dali",
                now=settings.get("preprocessing"),
                why="decoding and augmentation move to the GPU",
            )
        )
    cures.append(
        Cure(setting=None, value=f"an instance type with more cores{' for each GPU' if evidence.on_gpu else ''}")
    )
    return tuple(cures)

"""Does training wait for its data, and do workers, cores or storage limit it?

What the cores do meanwhile tells the three apart: more workers help only while cores are idle, however long the loader waits.
"""

from __future__ import annotations

import math

from launcher.insight import windows
from launcher.insight.answers import EXPLAINED, Answer, DoesNotApply, NotMeasured
from launcher.insight.contention import (
    PROGRAMS,
    WORKERS,
    lost_to,
    neighbours,
    runnable_per_core,
    spinning_cores,
    step_time_spread,
    thread_cpu,
    usable_cores,
    why_no_delay,
)
from launcher.insight.evidence import IDLE_GPU, Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, percent
from launcher.insight.gains import amdahl, bounded, estimated
from launcher.insight.length import epoch_steps
from launcher.insight.rules.images import cheaper_images, gain_of_cheaper_images
from launcher.insight.rules.neighbours import numbers as neighbour_numbers
from launcher.insight.rules.neighbours import outside, programs, programs_take_cores, without_programs
from launcher.insight.rules.pauses import after_epoch_firsts, epoch_start_share
from launcher.insight.rules.storage import disks_are_waited_for, slow_storage
from launcher.insight.rules.workers import (
    CROWDED,
    FULL,
    kept_by_workers,
    sensible_workers,
    suspected,
    taken_by_workers,
)
from launcher.show.text import counted

NOT_RECORDED = "the cost of an image was not recorded"
"""Why only the bound of a gain is known."""

OVERLAP = 0.01
"""Share of a step in which the device works while the process waits for data, from which it is reported."""

WORKING = 0.5
"""Share of a core from which a data worker counts as busy; below, it waits for something other than the CPU."""


def waiting(evidence: Evidence) -> Answer:
    """The loader does not keep up: why, and what helps."""
    if evidence.remote:
        return DoesNotApply("other hosts make the images")
    wait, lost, idle = evidence.share("data_wait"), evidence.lost_to_data, evidence.gpu_idle
    looks_for = "waiting for data"
    if wait is None and idle is None:
        return NotMeasured(what=looks_for, reason=evidence.why_not("data_wait"))
    taken = taken_by_workers(evidence)
    if taken is not None:
        keeps_thread = kept_by_workers(evidence) is not None or suspected(evidence)
        return (_noisy_workers if keeps_thread else _too_many_workers)(evidence, taken)
    if wait is None or lost is None:
        return _from_system_metrics(evidence)
    taken_from_model = _taken_from_model(evidence)
    if wait < NOTICEABLE and taken_from_model is not None:
        return _costly_images(evidence, taken_from_model)
    if lost < NOTICEABLE or (idle is not None and idle < NOTICEABLE):
        return None  # a host that waits while the device still has work loses nothing
    if explained(evidence):
        return EXPLAINED
    if evidence.busy is None:
        return _without_cores(evidence, lost)
    working = evidence.busy - spinning_cores(evidence) / usable_cores(evidence)
    # a further worker gets its share of the cores that other programs use, however full they are
    busy = max(0.0, working - outside(evidence) / usable_cores(evidence))
    if _blocked(evidence, busy):
        return slow_storage(evidence, _numbers(evidence), lost, lost=lost)
    room = min(1 / (1 - lost), 1 / max(busy, 0.01))
    sensible = sensible_workers(evidence)
    if room >= 1 + NOTICEABLE and (evidence.workers is None or evidence.workers < sensible):
        return _too_few_workers(evidence, wait, lost, room, sensible, busy)
    if working >= 0.7:
        return _costly_images(evidence)
    return slow_storage(evidence, _numbers(evidence), lost, lost=lost)


def _taken_from_model(evidence: Evidence) -> float | None:
    """Share of a step that a model on the CPU waits for cores that data workers hold, while all are full; None: too little, or not
    recorded."""
    taken, others = lost_to(evidence, WORKERS), neighbours(evidence)
    if evidence.on_gpu or taken is None or (evidence.busy or 0.0) < FULL or (evidence.throttled or 0.0) >= NOTICEABLE:
        return None
    return taken if taken >= NOTICEABLE and others[WORKERS] > others.get(PROGRAMS, 0.0) else None


def explained(evidence: Evidence) -> bool:
    """Whether another rule explains a wait for data: it lies where epochs begin, or comes from a quota, against which no number of
    workers helps."""
    starts = epoch_start_share(evidence) >= NOTICEABLE and not _everywhere(evidence)
    return starts or (evidence.throttled or 0.0) >= NOTICEABLE


def _everywhere(evidence: Evidence) -> bool:
    """Whether steps wait during the whole epoch, not only at its start."""
    for steps in evidence.ranks:
        others, later = after_epoch_firsts(evidence, steps)
        if others is not None and later < NOTICEABLE * windows.timed_mean(steps, "step"):
            return False
    return True


def _blocked(evidence: Evidence, cores: float) -> bool:
    """Whether, at this share of the cores in use, the readers of images wait for something other than a core.

    On full cores this holds only for workers that use hardly any of their turns: they would get a core in turn if they wanted one.
    """
    if cores >= FULL:
        turn = min(1.0, (evidence.cores_each or 1.0) / max(evidence.workers or 1, 1))
        return bool(evidence.workers) and evidence.worker_use is not None and evidence.worker_use < 0.1 * turn
    if disks_are_waited_for(evidence):
        return True
    working = WORKING * _turn(evidence)
    if evidence.workers:
        return evidence.worker_use is not None and evidence.worker_use < working
    reader, wait = thread_cpu(evidence), evidence.share("data_wait")
    process = evidence.cores_used(evidence.own_cpu)  # with all its compute threads, which may spin
    if process is not None:
        if reader is None:
            reader = process
        elif wait:
            # threads of its own may read for it: at least what the process uses beyond cores that are full while it does not wait
            reader = max(reader, (process - (1 - wait) * (evidence.cores_each or 1.0)) / wait)
    return evidence.workers == 0 and reader is not None and reader < working


def _turn(evidence: Evidence) -> float:
    """Share of a core that an always runnable task gets: less than all of it if tasks of other programs wait for cores too."""
    ready = runnable_per_core(evidence) if programs_take_cores(evidence) else None
    return 1.0 if ready is None else 1.0 / max(1.0, ready)


def numbers_of_the_wait(evidence: Evidence) -> list[str]:
    """How long steps wait for data, and what of that they lose; [] if it was not measured."""
    wait, lost = evidence.share("data_wait"), evidence.lost_to_data
    if wait is None or lost is None:
        return []
    numbers = [f"waiting for data: {percent(wait)} of a step of {evidence.step_seconds:.3g} s"]
    if wait - lost >= OVERLAP:
        numbers.append(
            f"the device needs {percent(evidence.device_share)} of a step, in part while the process waits: without the wait a step is "
            f"{percent(lost)} shorter"
        )
    return numbers


def _numbers(evidence: Evidence) -> list[str]:
    """The evidence that every finding of this file shares."""
    numbers = numbers_of_the_wait(evidence)
    if evidence.gpu_idle is not None:
        numbers.append(f"GPUs idle {percent(evidence.gpu_idle)} of the time")
    if evidence.busy is not None and evidence.full is not None:
        numbers.append(
            f"{percent(evidence.busy)} of {_cores(evidence)} in use; all of them full in {percent(evidence.full)} of the samples"
        )
    if evidence.workers is not None:
        cores = "" if evidence.cores_each is None else f", {evidence.cores_each:.3g} cores for each process"
        numbers.append(f"{counted(evidence.workers, 'worker')} per process{cores}")
    if evidence.unsteady is not None and evidence.unsteady >= NOTICEABLE:
        quick = evidence.unsteady / (1 - evidence.unsteady)
        numbers.append(f"steps are unsteady: their mean is {percent(quick)} above the quick ones")
    if evidence.pressure is not None and evidence.pressure >= NOTICEABLE:
        numbers.append(f"some process waits for a core in {percent(evidence.pressure)} of the time (CPU pressure)")
    if evidence.worker_use is not None:
        numbers.append(f"each worker keeps at most {evidence.worker_use:.2f} cores busy")
    if evidence.waiting_cores is not None:
        numbers.append(f"{evidence.waiting_cores:.1f} cores wait for disks (I/O wait)")
    if programs_take_cores(evidence):
        numbers.append(f"programs outside the run use {outside(evidence):.1f} of its cores ({programs(evidence)})")
    spinning = spinning_cores(evidence)
    if spinning >= 0.5:
        numbers.append(
            f"other threads of the training process hold {spinning:.1f} cores; they may only be waiting for the next operator "
            "(OpenMP's threads spin while they wait); a worker has no such threads"
        )
    return numbers


def _cores(evidence: Evidence) -> str:
    usable = sum(evidence.usable_cores(host) for host in evidence.hosts)
    known = all(host.usable_cores for host in evidence.hosts)
    return f"{usable:.3g} usable cores" if known else f"{usable:.3g} cores (a quota was not recorded)"


def _too_many_workers(evidence: Evidence, lost: float) -> Finding:
    workers, cores, busy = evidence.workers, evidence.cores_each, evidence.busy
    assert workers and cores and busy is not None, "taken_by_workers found them"
    sensible, starts = sensible_workers(evidence), epoch_start_share(evidence)
    share = min(1.0, lost * evidence.steps_part + starts)
    work, gain = evidence.all_cpu, bounded(share, NOT_RECORDED)
    if work is not None and evidence.step_seconds:
        needed = min(1.0, work / cores / evidence.step_seconds)
        left = 1 - evidence.steps_part * (1 - needed) - starts * (1 - sensible / workers)
        formula = (
            f"the step's {work:.3g} CPU seconds on {cores:.3g} cores take {needed * evidence.step_seconds:.3g} s of its "
            f"{evidence.step_seconds:.3g} s; waits at the start of epochs, {percent(starts)} of the time, become {sensible} / {workers} "
            "of that; the overhead of sharing cores is not counted"
        )
        if not evidence.on_gpu and busy > left:  # the same work on the same cores, whoever does it
            left = busy
            formula = (
                f"the cores are in use {percent(left)} of the time and the work stays the same; "
                "the overhead of sharing cores is not counted"
            )
        gain = estimated(evidence, "too_many_workers", share, left, formula)
    fewer = Fix(
        setting="hyperparameters.num_workers",
        value=sensible,
        now=workers,
        why="enough to prepare a step's images while it is computed; more would only compete for cores",
    )
    cheaper = cheaper_images(evidence)
    settings = tuple(fix for fix in cheaper if (fix.setting or "").startswith("hyperparameters."))
    fixes = (fewer, *cheaper)
    if settings and not evidence.on_gpu and busy >= FULL:
        # if the model computes on the same full cores, less work helps more than fewer workers
        fixes = (*settings, fewer, *(fix for fix in cheaper if fix not in settings))
        gain = gain_of_cheaper_images(evidence, "too_many_workers", share, settings[0], starts)
    numbers = _numbers(evidence)
    if starts >= NOTICEABLE:
        numbers.append(
            f"{percent(starts)} of the training time passes at the start of epochs, while all workers prepare their first batches"
        )
    return Finding(
        kind="too_many_workers",
        title=f"Too many workers: {workers} a process on {cores:.3g} cores",
        share=share,
        evidence=tuple(numbers),
        cause="the workers share fully used cores with the training process, so more workers would slow it down",
        fixes=fixes,
        gain=gain,
    )


def _noisy_workers(evidence: Evidence, lost: float) -> Finding:
    """KT's case: workers keep the thread that launches the device's work from its core, and no step waits for data."""
    workers, each, starts = evidence.workers, evidence.cores_each, epoch_start_share(evidence)
    assert workers and each, "taken_by_workers found them"
    share = min(1.0, lost * evidence.steps_part + starts)
    swings, is_suspicion = step_time_spread(evidence), suspected(evidence)
    everywhere = evidence if is_suspicion else evidence.slow_steps_too  # as the thread's wait for a core
    numbers = [*neighbour_numbers(evidence), *_numbers(everywhere)]
    if swings is not None:
        numbers.append(f"slow steps take {swings:.1f} times as long as quick ones (90th and 10th percentile)")
    if everywhere.saturated is not None:
        numbers.append(f"some core is at 95 % or more in {percent(everywhere.saturated)} of the samples")
    known = evidence.own_cpu is not None
    fewer = Fix(
        setting="hyperparameters.num_workers",
        value=sensible_workers(evidence) if known else 1,
        now=workers,
        why="as many as prepare a step's images while the device computes it"
        if known
        else "the cost of an image was not recorded; KT's job needed 0 or 1",
    )
    left = 1 - lost * evidence.steps_part - starts * (1 - fewer.value / workers)
    formula = "the wait for a core goes away" + (
        f", and waits at the start of epochs, {percent(starts)} of the time, become {fewer.value} / {workers} of that"
        if starts >= NOTICEABLE
        else ""
    )
    return Finding(
        kind="too_many_workers",
        title=f"{'Prime suspect: ' if is_suspicion else ''}{workers} workers a process keep the training thread from its core",
        share=share,
        evidence=tuple(numbers),
        cause="data workers take the core of the thread that launches the GPU's work, and the GPU runs dry though data are ready"
        + (f"; it is not proven ({why_no_delay(evidence)})" if is_suspicion else ""),
        fixes=(fewer, *cheaper_images(evidence)),
        gain=bounded(share) if is_suspicion else estimated(evidence, "too_many_workers", share, left, formula),
        experiment=f"run a few hundred steps of the same job with num_workers={fewer.value}: if the GPUs idle less, it was the workers"
        if is_suspicion
        else None,
    )


def _too_few_workers(evidence: Evidence, wait: float, lost: float, room: float, sensible: int, cores: float) -> Finding:
    """
    Args:
        wait: share of a step that the training process waits for data.
        lost: share of a step that is saved if it does not.
        room: times the work that there is room for.
        sensible: the most workers that are advised.
        cores: share of the usable cores that the run uses.
    """
    workers, busy = evidence.workers, 1 - lost
    if workers:
        wanted = min(sensible, math.ceil(workers / busy * 1.1))
        loader = workers / wanted
    else:
        wanted = min(sensible, math.ceil(wait / busy * 1.1))
        loader = wait / wanted
    spins = spinning_cores(evidence) > 0
    shared = programs_take_cores(evidence) and (evidence.busy or 0.0) >= CROWDED
    free = "more would get a share of the cores that other programs use" if shared else "cores are free for more"
    cause = f"the workers are busy, and {free}"
    if workers is None:
        cause = f"{free}; the number of workers in this run is not known"
    elif workers == 0:
        cause = "the training process itself decodes the images, between its steps"
    why = "how other programs share the cores with more workers is not known" if shared else NOT_RECORDED
    gain = bounded(lost * evidence.steps_part, "what its other threads do is not known" if spins else why)
    if workers is not None and not spins and not shared:
        first = wait / each if not workers and (each := epoch_steps(evidence)) else 0.0
        left = max(busy, loader, cores) + first
        after = 1 - evidence.steps_part * (1 - min(left, 1.0))
        formula = (
            f"a step takes {left:.2f} of its time: the largest of {busy:.2f} for the rest of the step, {loader:.2f} for the loader with "
            f"{wanted} workers and {cores:.2f} for the cores in use, plus {first:.3f} for the first batch of each epoch: 1 / {after:.2f}"
        )
        gain = estimated(evidence, "too_few_workers", lost * evidence.steps_part, after, formula)
    return Finding(
        kind="too_few_workers",
        title=f"Too few workers: training waits for data while {'other programs use its cores' if shared else 'cores are idle'}",
        share=lost * evidence.steps_part,
        evidence=tuple(_numbers(evidence)),
        cause=cause,
        fixes=(
            Fix(
                setting="hyperparameters.num_workers",
                value=wanted,
                now=workers if workers is not None else evidence.settings.get("num_workers"),
                why=f"there is room for {room:.2f} times the work",
            ),
            *without_programs(evidence),
            *cheaper_images(evidence),
        ),
        gain=gain,
        experiment=f"run a few hundred steps with num_workers={wanted}: if no faster, the other threads do work that workers cannot"
        if spins
        else None,
    )


def _costly_images(evidence: Evidence, taken_from_model: float | None = None) -> Finding:
    """Workers need more cores than there are: steps wait for data, or a model on the CPU waits for the workers' cores.

    Args:
        taken_from_model: share of a step that the model waits; None: steps wait for data.
    """
    fixes = (*cheaper_images(evidence), *without_programs(evidence))
    lost = ((evidence.lost_to_data or 0.0) if taken_from_model is None else taken_from_model) * evidence.steps_part
    if taken_from_model is None:
        title, numbers = "Preparing the images needs more cores than there are", _numbers(evidence)
    else:
        title = "Preparing the images takes the cores that the model computes on"
        numbers = [*neighbour_numbers(evidence), *_numbers(evidence)]
    return Finding(
        kind="data_bound",
        title=title,
        share=lost,
        evidence=tuple(numbers),
        cause="decoding and augmentation use all cores; more workers would only compete for them",
        fixes=fixes,
        gain=gain_of_cheaper_images(evidence, "data_bound", lost, fixes[0]),
    )


def _without_cores(evidence: Evidence, lost: float) -> Finding:
    """The wait was measured, its cause was not."""
    return Finding(
        kind="too_few_workers" if evidence.workers == 0 else "data_bound",
        title="Training waits for its data"
        + ("; the training process decodes the images itself" if evidence.workers == 0 else ""),
        share=lost * evidence.steps_part,
        evidence=tuple(_numbers(evidence)),
        cause=f"whether workers, cores or storage limit it was not measured: {evidence.why_no_hosts}",
        fixes=(
            Fix(
                setting="hyperparameters.num_workers", value="auto", now=evidence.workers, why="by the number of cores"
            ),
        ),
        gain=bounded(
            lost * evidence.steps_part,
            f"{amdahl(lost * evidence.steps_part)}; what it waits for was not measured",
        ),
    )


def _from_system_metrics(evidence: Evidence) -> Answer:
    """Without a step timeline: a GPU idles while cores are full or wait for disks; what fills the cores is unknown."""
    idle = evidence.gpu_idle
    if idle is None or idle < IDLE_GPU or evidence.busy is None or (evidence.throttled or 0) >= NOTICEABLE:
        return None
    if disks_are_waited_for(evidence) and evidence.busy < FULL:
        return slow_storage(evidence, _numbers(evidence), None, lost=idle)
    if evidence.busy < 0.85:
        return None
    share = idle * evidence.steps_part
    return Finding(
        kind="data_bound",
        title="All cores are busy while the GPUs wait",
        share=share,
        evidence=tuple(_numbers(evidence)),
        cause=f"probably decoding and augmentation, which was not measured ({evidence.why_not('data_wait')})",
        fixes=cheaper_images(evidence),
        gain=bounded(share),
    )

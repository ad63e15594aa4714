"""What host metrics alone show: a CPU quota that throttles, and memory that grows."""

from __future__ import annotations

import numpy as np

from launcher.insight.answers import EXPLAINED, Answer, DoesNotApply, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, Gain, percent
from launcher.insight.gains import amdahl, bounded, estimated, in_steps
from launcher.insight.measurements import Series
from launcher.insight.rules.workers import taken_by_workers

GROWTH = 5.0
"""Percentage points of memory within the later part of a run that count as growth: the increase of Debugger's GPUMemoryIncrease."""

SETTLED = 0.4
"""Share of the steps after which memory should be constant: data are cached and workers are up."""

SOON = 10
"""Multiple of the watched time: a run whose memory is full by then most likely does not reach its end."""

SAMPLES = 20
"""Fewer samples than this show no trend."""

ALLOCATOR, SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"

WITHOUT_SEGMENTS = ("1.", "2.0.")
"""PyTorch versions that fail with an error on expandable_segments: https://github.com/pytorch/pytorch/issues/123505"""


def throttled(evidence: Evidence) -> Answer:
    """A container's CPU quota throttles its processes."""
    share = evidence.throttled
    if share is None:
        return NotMeasured(what="cores throttled by a quota", reason=evidence.why_no_series("throttled"))
    if share < NOTICEABLE:
        return None
    if taken_by_workers(evidence) is not None:
        return EXPLAINED  # with too many workers it is they who use the quota up
    if evidence.on_gpu and (evidence.gpu_idle or 0) < NOTICEABLE and (evidence.lost_to_data or 0) < NOTICEABLE:
        return None  # the GPUs do not feel it
    lost = max(share, evidence.lost_to_data or 0.0, (evidence.gpu_idle or 0.0) if evidence.on_gpu else 0.0)
    cores = ", ".join(f"{host.name} {evidence.usable_cores(host):.3g}" for host in evidence.hosts if host.cores)
    return Finding(
        kind="cpu_throttled",
        title="The container's CPU quota throttles the processes",
        share=lost * evidence.steps_part,
        evidence=(
            f"throttled {percent(share)} of the time; cores of the quota: {cores or 'not recorded'}",
            *((f"{percent(evidence.busy)} of them in use",) if evidence.busy is not None else ()),
            *((f"GPUs idle {percent(evidence.gpu_idle)} of the time",) if evidence.gpu_idle is not None else ()),
        ),
        cause="the quota (cgroup cpu.max) is used up before each period ends, and every thread then waits",
        fixes=(
            Fix(setting=None, value="a larger quota (docker --cpus), or an instance type with more cores"),
            *(
                (
                    Fix(
                        setting="hyperparameters.num_workers",
                        value="auto",
                        now=evidence.settings.get("num_workers"),
                        why="no more processes than the quota has cores",
                    ),
                )
                if evidence.workers is None or evidence.cores_each is None or evidence.workers > evidence.cores_each
                else ()
            ),
        ),
        gain=_of_a_larger_quota(evidence, lost),
    )


def _of_a_larger_quota(evidence: Evidence, lost: float) -> Gain:
    """The gain if the quota becomes as large as the host: processes then use as many cores as they have threads and workers."""
    hosts = [host for host in evidence.hosts if len(evidence.busy_cores(host))]
    threads, workers = evidence.facts.get("threads"), evidence.workers
    touched = lost * in_steps(evidence, evaluations=True)
    if len(hosts) != 1 or threads is None or workers is None or evidence.usable_cores(hosts[0]) >= len(hosts[0].cores):
        return bounded(touched, f"{amdahl(touched)}; how many cores the processes would use is not known")
    [host] = hosts
    ranks, used = evidence.local_ranks(host), min(float(evidence.busy_cores(host).mean()), evidence.usable_cores(host))
    cores = evidence.cores_used(evidence.all_cpu)
    if cores is not None:
        used = ranks * cores  # without what else runs on the host
    wanted = min(float(len(host.cores)), ranks * (threads + workers))
    device = 1 - evidence.gpu_idle if evidence.gpu_idle is not None else 0.0
    left = max(min(used / wanted, 1.0), device)
    formula = (
        f"the processes use {used:.2f} cores, and would use {wanted:.3g} of the host's {len(host.cores)} without a quota, in the "
        f"{percent(lost)} of the time in which it throttles"
    )
    return estimated(evidence, "cpu_throttled", touched, 1 - touched * (1 - left), formula)


def host_memory(evidence: Evidence) -> Answer:
    """A host's memory grows without end."""
    series = {host.name: host.memory for host in evidence.measurements.hosts.values() if host.memory is not None}
    return _growth(
        evidence,
        series,
        "growth of a host's memory",
        "memory_growth",
        "the memory of {}",
        "something is never released: results with their graph, images in lists, unlimited caches, copies in worker processes",
        (
            Fix(
                setting=None,
                value="keep numbers (loss.item()) instead of tensors from step to step; give caches a limit",
            ),
            *(
                (
                    Fix(
                        setting="hyperparameters.worker_type",
                        value="threads",
                        why="each worker process ends up with a copy of the lists",
                    ),
                )
                if evidence.workers != 0 and not evidence.worker_threads
                else ()
            ),
        ),
    )


def gpu_memory(evidence: Evidence) -> Answer:
    """A GPU's memory grows without end."""
    if not evidence.on_gpu:
        return DoesNotApply("no GPU")
    own = evidence.gpu_means  # other GPUs of a host are other programs'
    series = {
        label: values
        for host in evidence.hosts
        for name, values in host.gpu_memory.items()
        if (label := f"{host.name} {name}") in own or not own
    }
    return _growth(
        evidence,
        series,
        "growth of a GPU's memory",
        "gpu_memory_growth",
        "the memory of {}",
        "tensors are kept from step to step, or shapes vary and fragment the allocator's memory",
        (
            Fix(setting=None, value="detach what you keep: total += loss.item() instead of total += loss"),
            *_segments(evidence),
        ),
    )


def _segments(evidence: Evidence) -> tuple[Fix, ...]:
    """The allocator's setting against fragments, beside its others; none if the run sets it, or its PyTorch does not know it."""
    watched = evidence.measurements.watched
    now = (watched.environment if watched else evidence.facts.get("environment") or {}).get(ALLOCATOR)
    if str(evidence.facts.get("torch", "")).startswith(WITHOUT_SEGMENTS) or SEGMENTS in (now or ""):
        return ()
    value = ",".join([*([now] if now else []), f"{SEGMENTS}:True"])
    return (Fix(setting=f"environment.{ALLOCATOR}", value=value, now=now, why="if shapes vary"),)


def _growth(
    evidence: Evidence, series: dict[str, Series], what: str, kind: str, thing: str, cause: str, fixes: tuple[Fix, ...]
) -> Answer:
    """The steepest growth of several records, if it continues through the later part of the steps.

    What is loaded before the first step is not growth, however long that takes. If no step was timed, all of the record counts.
    """
    records = {name: evidence.while_stepping(one) for name, one in series.items()}
    judged = {name: found for name, one in records.items() if (found := _steady_growth(one)) is not None}
    if not judged:
        few = f"fewer than {SAMPLES} samples{' while steps ran' if evidence.ranks else ''}"
        return NotMeasured(what=what, reason=few if series else evidence.why_no_hosts)
    name = max(judged, key=lambda key: judged[key][0])
    points, hours, now = judged[name]
    if points < GROWTH:
        return None
    rate = points / hours
    left = (100 - now) / rate
    return Finding(
        kind=kind,
        title=f"Memory grows: {thing.format(name)} is full in about {_hours(left)}",
        share=None,
        evidence=(
            f"{name}: {points:.0f} percentage points in the last {_hours(hours)}, {now:.0f} % at the end and rising",
        ),
        cause=cause,
        fixes=fixes,
        level="risk",
        urgent=left < SOON * hours,
    )


def _steady_growth(series: Series) -> tuple[float, float, float] | None:
    """(percentage points gained, hours, last value) of the later part of a record; 0 points if some of it does not grow.

    Compares the medians of its thirds, so that single samples do not count. None: too few samples.
    """
    start = int(len(series.values) * SETTLED)
    values, times = series.values[start:], series.times[start:]
    if len(series.values) < SAMPLES:
        return None
    thirds = [float(np.median(part)) for part in np.array_split(values, 3)]
    hours = max(float(times[-1] - times[0]) / 3600, 1e-9)
    points = (thirds[2] - thirds[0]) * 1.5  # the medians of the outer thirds lie two thirds of the time apart
    rising = thirds[1] - thirds[0] >= 0.25 * points and thirds[2] - thirds[1] >= 0.25 * points
    return (points if rising else 0.0), hours, float(np.median(values[-max(1, len(values) // 10) :]))


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.0f} s"

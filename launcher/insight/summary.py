"""The tables of a report: phases of a step, and the use of each resource."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Host, Series
from launcher.insight.phases import NO_PHASE, order, parents
from launcher.show.palette import PHASES

QUANTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
"""Columns of the table of use, and their percentiles; Debugger's report has no p90."""

Number = TypeVar("Number", float, "np.ndarray[Any, Any]")

UNNAMED = f"({NO_PHASE})"
"""The time of a step that is in no phase."""

PAUSES = "beside the steps: epochs' first batches, checkpoints, evaluations"
"""The training time outside usual steps."""


@dataclass(frozen=True)
class Use:
    """The use of one resource of one host."""

    host: str
    resource: str
    """CPU (mean of the cores), busiest core, GPU (mean), GPU memory, memory, I/O wait, disk read …"""
    unit: str
    samples: int
    quantiles: dict[str, float]
    """By the names in QUANTILES."""


def in_order(phases: dict[str, float]) -> list[str]:
    """Names of phases, in the order of a step; unknown ones come last."""
    known = order()
    return sorted(phases, key=lambda name: (known.index(name) if name in known else len(known), name))


def colour(phase: str) -> int:
    """A phase's number among palette.PHASES, the same in every run; unknown ones share them."""
    known = order()
    return known.index(phase) if phase in known else sum(phase.encode()) % len(PHASES)


def phase_rows(evidence: Evidence) -> list[tuple[str, float, float]]:
    """(phase, seconds a step, share of a step), and the time in no phase."""
    whole = evidence.step_seconds
    if not whole:
        return []
    rows = [(name, evidence.phases[name] * whole, evidence.phases[name]) for name in in_order(evidence.phases)]
    rest = evidence.unaccounted
    return rows + ([(UNNAMED, rest * whole, rest)] if rest and rest >= 0.001 else [])


def apart(phases: Mapping[str, Number]) -> dict[str, Number]:
    """Phases that do not overlap: each without its parts, such as backward without the exchange of gradients that it does not hide.

    Args:
        phases: seconds, numbers or arrays.
    """
    found = dict(phases)
    for part, whole in parents().items():
        if part in found and whole in found:
            found[whole] = np.maximum(found[whole] - found[part], 0.0)
    return found


def course(evidence: Evidence) -> dict[str, float]:
    """Where all of the training time goes, in parts that do not overlap.

    Returns:
        Part -> seconds of the whole training: the phases of usual steps, as from `apart`, then PAUSES. {} if no step was timed.
    """
    steps = windows.steps_done(evidence.ranks[0]) if evidence.ranks else 0
    if not steps or not evidence.step_seconds or not evidence.training_seconds:
        return {}
    found = apart({name: seconds * steps for name, seconds, _ in phase_rows(evidence)})
    return {**found, PAUSES: max(0.0, evidence.training_seconds - evidence.step_seconds * steps)}


def operators(evidence: Evidence, most: int) -> list[tuple[str, float, float]]:
    """(operator or kernel, seconds per step, share of all of them), longest first; [] if torch.profiler recorded no steps."""
    recorded = evidence.facts.get("operators") or {}
    return [(one["name"], one["seconds"], one["share"]) for one in recorded.get("operators", [])[:most]]


LINES = ["line of the training thread", "phase", "share", "code"]
"""Columns of the table of lines."""


def lines(evidence: Evidence, most: int) -> list[tuple[str, str, float, str]]:
    """(line of the user's code, phase, share of the training thread's samples, code), longest first; [] if none was sampled."""
    shares: dict[tuple[str, str, str], float] = {}
    for line in evidence.script.lines if evidence.script else ():
        place = str(line.at), line.phase or UNNAMED, line.at.text
        shares[place] = shares.get(place, 0.0) + line.share
    longest = sorted(shares.items(), key=lambda item: -item[1])[:most]
    return [(at, phase, share, code) for (at, phase, code), share in longest]


def uses(evidence: Evidence) -> list[Use]:
    """The use of each resource of each host, over the whole record."""
    return [
        Use(
            host.name,
            resource,
            unit,
            len(values),
            {name: float(np.percentile(values, q)) for name, q in QUANTILES.items()},
        )
        for host in evidence.measurements.hosts.values()
        for resource, unit, values in _records(host, evidence)
        if len(values)
    ]


def mean_of(series: list[Series]) -> Series:
    """The mean of several records, at the times of the first; to the end of the shortest."""
    shortest = min(len(one.values) for one in series)
    return Series(series[0].times[:shortest], np.mean([one.values[:shortest] for one in series], axis=0))


def _records(host: Host, evidence: Evidence) -> Iterator[tuple[str, str, np.ndarray]]:
    if host.cores:
        cores = list(host.cores.values())
        shortest = min(len(core.values) for core in cores)
        table = np.stack([core.values[:shortest] for core in cores])
        yield "CPU", "% of all cores", table.mean(axis=0)
        yield "busiest core", "%", table.max(axis=0)
        if host.usable_cores and host.usable_cores < len(cores):
            yield "CPU of the quota", f"% of {host.usable_cores:.3g} cores", table.sum(axis=0) / host.usable_cores
    if host.io_wait:
        yield "I/O wait", "% of all cores", mean_of(list(host.io_wait.values())).values
    if host.memory is not None:
        yield "memory", "%", host.memory.values
    if host.throttled is not None:
        yield "throttled by the quota", "% of the time", host.throttled.values
    if host.gpus:
        yield "GPU", "% mean" if len(host.gpus) > 1 else "%", mean_of(list(host.gpus.values())).values
    if host.gpu_memory:
        yield (
            "GPU memory",
            "% mean" if len(host.gpu_memory) > 1 else "%",
            mean_of(list(host.gpu_memory.values())).values,
        )
    for kind, records in (("disk", host.disk), ("network", host.network)):
        for name, series in records.items():
            yield f"{kind} {name}", "MB/s", series.values / 1e6

"""A run's measurements for the page's charts: thinned to what a screen shows, as means over bins of equal time."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from launcher.insight import summary, windows
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import Host, Series, Stall, Steps
from launcher.show import palette
from launcher.show.text import counted

CELLS = 1_500_000
"""Cells of all heat maps together, one byte each: 2 MB of the page as base64."""

MAX_BINS, MIN_BINS = 3000, 60
"""Bins of a chart's time axis: three for each of its pixels, so that zooming shows more; fewer would hide a minute of an hour."""

WINDOWS = 60_000
"""Windows of all ranks and phases together, one number each."""

MIN_SAMPLES = 2
"""Points that a chart over time needs: samples of a series, logged windows of a rank."""

NONE = 255
"""In a heat map: nothing was sampled in this bin."""


def payload(evidence: Evidence) -> dict[str, Any]:
    """What the page's script draws, JSON-ready. Times are seconds since `began`, Unix seconds."""
    measurements = evidence.measurements
    began, ended = _period(evidence)
    rows = sum(len(host.cores) + len(host.gpus) for host in measurements.hosts.values())
    bins = int(np.clip(CELLS // max(rows, 1), MIN_BINS, MAX_BINS))
    shown = CELLS // MIN_BINS
    hosts, left_out = [], 0
    for host in map(_drawable, measurements.hosts.values()):
        shown -= len(host.cores) + len(host.gpus)
        if not any(_all_series(host)):
            continue
        if shown < 0:
            left_out += 1
        else:
            hosts.append(_host(host, began, ended, bins))
    most = max(MIN_BINS, WINDOWS // max(len(evidence.ranks) * (len(evidence.phases) + 1), 1))
    timed = [steps for steps in evidence.ranks if len(steps.step) >= MIN_SAMPLES]
    ranks = timed[: max(1, WINDOWS // (MIN_BINS * (len(evidence.phases) + 1)))]
    return {
        "source": measurements.source,
        "began": began,
        "seconds": max(round(ended - began, 6), 0.001),
        "phases": summary.in_order(evidence.phases),
        "colours": [summary.colour(name) for name in summary.in_order(evidence.phases)],
        "hosts": hosts,
        "ranks": [_rank(steps, began, most) for steps in ranks],
        "stalls": [_stall(stall, began) for stall in _longest(measurements.stalls)],
        "notes": notes(evidence, hosts, left_out, len(timed) - len(ranks)),
    }


def notes(evidence: Evidence, hosts: list[dict[str, Any]], hosts_left_out: int, ranks_left_out: int) -> list[str]:
    """How the charts were thinned, and which are left out."""
    lines = [evidence.measurements.sampled] if evidence.measurements.sampled else []
    for host in hosts:
        if host["samples"] > host["bins"]:
            lines.append(
                f"{host['name']}: each of the {host['bins']} points over time is the mean of {host['samples'] / host['bins']:.3g} "
                "samples, with the highest as its peak. The table below counts all samples"
            )
    if hosts_left_out:
        lines.append(f"charts of {hosts_left_out} more hosts are left out to keep the page small; the table has them")
    if ranks_left_out:
        lines.append(f"step charts of {ranks_left_out} more ranks are left out; findings and comparison include them")
    rare = sum(
        any(0 < len(series.values) < MIN_SAMPLES for series in _all_series(host))
        for host in evidence.measurements.hosts.values()
    )
    if rare:
        lines.append(
            f"{counted(rare, 'host')}: no chart over time of what was sampled only once; the table below has it"
        )
    single = sum(len(steps.step) < MIN_SAMPLES for steps in evidence.ranks)
    if single:
        lines.append(
            f"{counted(single, 'rank')}: no chart over time of a single logged window; the table below has its phases"
        )
    return lines


def _drawable(host: Host) -> Host:
    """The host without what was sampled too rarely for a chart over time."""

    def kept(group: Mapping[str, Series]) -> dict[str, Series]:
        return {name: series for name, series in group.items() if len(series.values) >= MIN_SAMPLES}

    def one(series: Series | None) -> Series | None:
        return series if series is not None and len(series.values) >= MIN_SAMPLES else None

    return replace(
        host,
        cores=kept(host.cores),
        io_wait=kept(host.io_wait),
        memory=one(host.memory),
        gpus=kept(host.gpus),
        gpu_memory=kept(host.gpu_memory),
        disk=kept(host.disk),
        network=kept(host.network),
        throttled=one(host.throttled),
    )


def binned(series: Series, began: float, ended: float, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """(bins,) mean and highest value in each of `bins` equal parts of the time; nan where nothing was sampled."""
    place = ((series.times - began) / max(ended - began, 1e-9) * bins).astype(int).clip(0, bins - 1)
    inside = (series.times >= began) & (series.times <= ended) & np.isfinite(series.values)
    place, values = place[inside], series.values[inside]
    counts = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.bincount(place, values, minlength=bins) / counts
    highest = np.full(bins, -np.inf)
    np.maximum.at(highest, place, values)
    return means, np.where(counts > 0, highest, np.nan)


def _period(evidence: Evidence) -> tuple[float, float]:
    """Unix seconds of the first and the last measurement."""
    records = [
        series.times
        for host in evidence.measurements.hosts.values()
        for series in _all_series(host)
        if len(series.times)
    ]
    ends = [times[-1] for times in records] + [steps.ended[-1] for steps in evidence.ranks]
    begins = [times[0] for times in records]
    begins += [steps.ended[0] - steps.seconds["step"][0] * windows.counts(steps)[0] for steps in evidence.ranks]
    return (float(np.nanmin(begins)), float(np.nanmax(ends))) if begins else (0.0, 1.0)


def _all_series(host: Host) -> Iterable[Series]:
    for group in (host.cores, host.io_wait, host.gpus, host.gpu_memory, host.disk, host.network):
        yield from group.values()
    yield from (series for series in (host.memory, host.throttled) if series is not None)


def _host(host: Host, began: float, ended: float, bins: int) -> dict[str, Any]:
    rows = {**host.cores, **host.gpus}
    samples = max((len(series.values) for series in _all_series(host)), default=0)
    bins = max(1, min(bins, samples))
    heat = np.full((len(rows), bins), NONE, np.uint8)
    for row, series in enumerate(rows.values()):
        means = binned(series, began, ended, bins)[0]
        heat[row, np.isfinite(means)] = np.clip(np.round(means[np.isfinite(means)] * 2), 0, 200)
    return {
        "name": host.name,
        "bins": bins,
        "samples": samples,
        "rows": list(rows),
        "heat": base64.b64encode(heat.tobytes()).decode("ascii"),
        "percent": _lines(_percentages(host), began, ended, bins),
        "bytes": _lines(_rates(host), began, ended, bins),
    }


def _percentages(host: Host) -> dict[str, Series]:
    found = {}
    if host.cores:
        cores = list(host.cores.values())
        shortest = min(len(core.values) for core in cores)
        table = np.stack([core.values[:shortest] for core in cores])
        times = cores[0].times[:shortest]
        found["CPU, mean of the cores"] = Series(times, table.mean(axis=0))
        found["CPU, busiest core"] = Series(times, table.max(axis=0))
    if host.gpus:
        found["GPU, mean" if len(host.gpus) > 1 else "GPU"] = summary.mean_of(list(host.gpus.values()))
    if host.gpu_memory:
        found["GPU memory"] = summary.mean_of(list(host.gpu_memory.values()))
    if host.memory is not None:
        found["memory"] = host.memory
    if host.io_wait:
        found["I/O wait"] = summary.mean_of(list(host.io_wait.values()))
    if host.throttled is not None:
        found["throttled by the quota"] = host.throttled
    return found


def _rates(host: Host) -> dict[str, Series]:
    return {
        f"{kind} {name}": Series(series.times, series.values / 1e6)
        for kind, records in (("disk", host.disk), ("network", host.network))
        for name, series in records.items()
    }


def _lines(found: Mapping[str, Series], began: float, ended: float, bins: int) -> list[dict[str, Any]]:
    lines = []
    for name, series in found.items():
        means, highest = binned(series, began, ended, bins)
        lines.append(
            {
                "name": name,
                "colour": palette.resource(name),
                "mean": _numbers(means),
                **({"high": _numbers(highest)} if bins < len(series.values) else {}),
            }
        )
    return lines


def _numbers(values: np.ndarray) -> list[float | None]:
    """With one decimal, or as integers; null for what was not sampled."""
    return [
        None if value != value else int(value) if value == int(value) else value
        for value in np.round(values, 1).tolist()
    ]


def _rank(steps: Steps, began: float, most: int) -> dict[str, Any]:
    """A rank's logged windows, merged if there are too many."""
    counts = windows.counts(steps)
    together = -(-len(counts) // most)
    groups = np.arange(len(counts)) // together
    weights = np.bincount(groups, counts)

    def means(values: np.ndarray) -> np.ndarray:
        return np.bincount(groups, np.nan_to_num(values) * counts) / weights

    last = np.concatenate([np.flatnonzero(np.diff(groups)), [len(groups) - 1]])
    first = np.concatenate([[0], last[:-1] + 1])
    phases = {name: means(values) for name, values in steps.seconds.items() if name != "step"}
    begins = steps.ended - np.nan_to_num(steps.seconds["step"]) * counts
    return {
        "rank": steps.rank,
        "host": steps.host,
        "from": np.round(begins[first] - began, 6).tolist(),
        "to": np.round(steps.ended[last] - began, 6).tolist(),
        "step": steps.step[last].tolist(),
        "epoch": steps.epoch[last].tolist(),
        "whole": _significant(means(steps.seconds["step"])),
        "seconds": {name: _significant(values) for name, values in summary.apart(phases).items()},
    }


def _significant(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _longest(stalls: Iterable[Stall]) -> list[Stall]:
    """The first rank's stalls, the longest 500 of them."""
    own = [stall for stall in stalls if stall.rank == 0] or list(stalls)
    return sorted(own, key=lambda stall: -stall.seconds)[:500]


def _stall(stall: Stall, began: float) -> list[Any]:
    return [round(stall.began - began, 6), round(stall.seconds, 6), stall.kind, stall.step]

"""The tables of a scaling study: what was measured, the model's errors, and predictions for sizes that were not run."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.show.spread import Spread
from launcher.show.table import Table
from launcher.show.text import counted, dollars, three_digits
from launcher.study.results import NOT_MEASURED
from launcher.study.scaling_model import HeldOut, ScalingModel
from launcher.study.scaling_sizes import Line, Size, beyond

NO_PRICE = "no price known"

SHARED = "shares cores"
"""Shown in place of an efficiency."""


def measured(lines: Sequence[Line], usd_per_hour: float | None, own_price: str) -> Table:
    """Throughput, efficiency and cost of every size.

    Args:
        lines: at least one.
        usd_per_hour: for one host; None: unknown.
        own_price: why there is none; "": AWS's list may have it.
    """
    head = ["scaling", "hosts", "batch", "images/s", "ms a step", "efficiency", "exposed", "data_wait"]
    head += ["MFU", "s an epoch", "US$ an epoch", "US$ a million images"]
    rows = [_row(line, size, usd_per_hour) for line in lines for size in line.sizes]
    notes = [
        "images/s: median (min-max) of the repeats; each is the median over windows of five steps after the warm-up.",
        f"batch: images per process, with {counted(lines[0].processes_per_host, 'process', 'processes')} per host.",
        "efficiency: images/s per host, relative to the smallest size.",
        "exposed: the share of a step between the end of backward and the end of the exchange (mean of the first ten steps);",
        "it includes the wait for a slower rank.",
    ]
    if any(row[5] == SHARED for row in rows):
        notes.append(
            f"{SHARED}: more threads and data workers than this machine has cores. One machine per host would be faster."
        )
    if any(len(size.rows) == 1 for line in lines for size in line.sizes):
        notes.append("One run has no spread: a difference may be chance. --repeats 3 shows it.")
    if usd_per_hour is None:
        elsewhere = own_price or ", or read AWS's list with `launcher plan CONFIG --on aws --check`"
        notes.append(f"{NO_PRICE}: set compute.price_per_hour, US dollars a host-hour{elsewhere}.")
    return Table(head, rows, "throughput and efficiency", notes).without_empty("MFU")


def _row(line: Line, size: Size, usd_per_hour: float | None) -> list[str]:
    efficiency, images, waits = line.efficiency(size), size.images, size.share("data_wait_seconds")
    mfu = size.of("mfu")
    usd = None if usd_per_hour is None else usd_per_hour * size.hosts / 3600 / size.rate.median
    return [
        str(line),
        str(size.hosts),
        f"{size.batch:g}",
        _range(size.rate),
        f"{size.seconds * 1000:.1f}",
        percents(efficiency) if efficiency is not None else SHARED,
        percent(size.exposed),
        percent(waits),
        "-" if mfu is None else percents(mfu),
        f"{images / size.rate.median:.4g}" if images else NOT_MEASURED,
        NO_PRICE if usd is None else dollars(usd * images) if images else NOT_MEASURED,
        NO_PRICE if usd is None else dollars(usd * 1e6),
    ]


def errors(model: ScalingModel | None, held_out: Sequence[HeldOut], hosts_held_out: Sequence[HeldOut]) -> Table:
    """How well the model predicts held-out sizes, and its parameters."""
    title, head = "the model on held-out sizes", ["held out", "measured, ms a step", "predicted", "error"]
    rows = [[f"{counted(each.point.hosts, 'host')}, batch {each.point.batch:g}", *_error(each)] for each in held_out]
    for each in hosts_held_out:
        rows.append([f"all of {counted(each.point.hosts, 'host')}: batch {each.point.batch:g}", *_error(each)])
    if model is None:
        return Table(head, rows, title, ["No size has a machine or cores for each host: there is nothing to fit."])
    bandwidth = "no limit" if model.bandwidth is None else f"{model.bandwidth / 1e6:,.0f} MB/s"
    waiting = (
        f"{model.input_seconds_per_image * 1000:.3g} ms an image"
        if model.input_seconds_per_image
        else "never the limit"
    )
    notes = [
        f"computing: {model.fixed * 1000:.3g} ms a step and {model.compute_seconds_per_image * 1000:.3g} ms an image; "
        f"{model.backward * 100:.0f} % of it is backward.",
        f"input: {waiting}.",
        f"exchange: {model.gradient_bytes / 1e6:.1f} MB of gradients; bandwidth between hosts: {bandwidth}; "
        f"{model.latency * 1e3:.3g} ms a turn of the ring.",
        "launcher/study/scaling_model.py has the formulas.",
    ]
    if model.crowding:
        notes.append(
            f"Each further host on this machine adds {model.crowding * 1000:.3g} ms an image: hosts share memory, caches and power."
        )
    return Table(head, rows, title, [*notes, *(f"assumed: {assumption}" for assumption in model.assumptions)])


def _error(each: HeldOut) -> list[str]:
    actual = f"{each.point.seconds * 1000:.1f}"
    if each.predicted is None or each.error is None:
        return [actual, "-", each.why]
    return [actual, f"{each.predicted * 1000:.1f}", f"{each.error * 100:+.1f} %"]


def predictions(lines: Sequence[Line], model: ScalingModel | None) -> Table:
    """Predictions for two doublings that were not run."""
    head = ["scaling", "hosts", "batch", "images/s", "efficiency", "exposed"]
    rows = []
    for line in lines:
        for hosts, rate, exposed in beyond(line, model):
            processes = hosts * line.processes_per_host
            batch = line.global_batch(processes)
            assert batch is not None and line.first is not None
            efficiency = rate / line.first.rate.median / hosts * line.first.hosts
            share = batch / processes
            rows.append(
                [str(line), str(hosts), f"{share:g}", three_digits(rate), percent(efficiency), percent(exposed)]
            )
    notes = ["If every host has a machine like the measured one, on the same network."]
    if not rows:
        notes = ["none: no exchange was measured between hosts with machines or cores of their own."]
    return Table(head, rows, "predictions for sizes that were not run", notes)


def percents(value: Spread) -> str:
    several = len(value.values) > 1 and value.high > value.low
    return f"{_digits(value.median)} %" + (f" ({_digits(value.low)}-{_digits(value.high)})" if several else "")


def percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{_digits(share)} %"


def _range(value: Spread) -> str:
    ends = f" ({three_digits(value.low)}-{three_digits(value.high)})" if len(value.values) > 1 else ""
    return three_digits(value.median) + ends


def _digits(share: float) -> str:
    return f"{share * 100:.1f}"

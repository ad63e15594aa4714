"""The tables of a preprocessing study: the DALI post's own, what limits each cell, and what cores and instance types prepare."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.config.job import Job
from launcher.show.spread import Spread
from launcher.show.table import Table
from launcher.show.text import counted, dollars, three_digits
from launcher.study import sizing
from launcher.study.preprocessing_cells import (
    HIGHLY,
    MODERATELY,
    Cell,
    core_rate,
    heaviest,
    improvement,
    places,
    tried,
)
from launcher.study.preprocessing_demand import demands, image_size, input_size
from launcher.study.preprocessing_hosts import REMOTE
from launcher.study.preprocessing_measures import PERCENTILES
from launcher.study.results import NOT_MEASURED


def tables(cells: Sequence[Cell], pipelines: Sequence[str], job: Job, *, on_one_machine: bool) -> list[Table]:
    """All of them.

    Args:
        cells: at least one.
        pipelines: the others are compared with the first.
        on_one_machine: whether all hosts share one machine, so that remote is not compared.
    """
    there = tried(cells, pipelines)
    own = [name for name in there if name != REMOTE]
    return [
        _epochs(cells, there, job, REMOTE if on_one_machine else None),
        _limits(cells, job),
        _cores(cells, own, job),
        _supply(cells, own),
        _instances(cells, own, job),
    ]


def _epochs(cells: Sequence[Cell], pipelines: Sequence[str], job: Job, not_compared: str | None) -> Table:
    """The post's own table."""
    first, *others = pipelines
    head = ["model", "load", f"A {first}"]
    for letter, name in zip("BCDE", others):
        head += [f"{letter} {name}", f"{letter} saves, %"]
    rows = []
    for model, load in places(cells):
        here = {cell.pipeline: cell for cell in cells if (cell.model, cell.load) == (model, load)}
        row = [model, str(load), _range(here[first].seconds) if first in here else "-"]
        for name in others:
            both = name in here and first in here and not_compared not in (name, first)
            row.append(_range(here[name].seconds) if name in here else "-")
            row.append(_saving(here[first], here[name]) if both else "-")
        rows.append(row)
    counts = sorted({len(cell.rows) for cell in cells})
    images = ", ".join(sorted({row["training_images"] for cell in cells for row in cell.rows}))
    runs = counted(counts[0], "run") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
    notes = [
        f"{runs} of each cell: median (min-max).",
        f"An epoch is {images} images of {image_size(job)} pixels, at the speed after the warm-up.",
        "It leaves out validation, checkpoints and the start of workers.",
    ]
    if counts[0] == 1:
        notes.append("One run has no spread: a difference may be chance. --repeats 3 shows it.")
    if "cpu_composed" in pipelines:
        notes.append("cpu_composed applies the same draws as one warp: it interpolates once, the others at every step.")
    if not_compared in pipelines:
        notes.append(f"{not_compared} is not compared: its hosts share one machine.")
    if any("~" in cell for row in rows for cell in row):
        notes.append("~: the ranges overlap, so the difference may be chance.")
    return Table(head, rows, "seconds an epoch", notes)


def _limits(cells: Sequence[Cell], job: Job) -> Table:
    """What each cell waits for, and how busy it keeps the machine."""
    head = ["model", "load", "pipeline", "images/s", "input alone", "model alone", "lost", "data_wait"]
    head += [f"CPU p{'/'.join(map(str, PERCENTILES))} %", "MFU", "bound by"]
    rows = []
    for cell in cells:
        shares = [cell.of(f"cpu_share_p{percent}") for percent in PERCENTILES]
        cpu = "/".join(f"{share.median * 100:.0f}" for share in shares if share is not None) or NOT_MEASURED
        wait, probed, mfu = cell.of("data_wait_share"), cell.of("input_images_per_second"), cell.of("mfu")
        rows.append(
            [cell.model, str(cell.load), cell.pipeline, three_digits(cell.rate.median), _value(probed)]
            + [_value(cell.alone), percent(cell.lost), percent(wait.median if wait else None), cpu]
            + [percent(mfu.median if mfu else None), cell.verdict]
        )
    notes = [
        "input alone, model alone: images/s without the other half; the model trains on one batch over and over.",
        "lost: the share of the model's own speed that the cell does not reach.",
        f"A cell is partly input-bound from {percent(MODERATELY)} lost, input-bound from {percent(HIGHLY)}, as in TensorFlow's profiler.",
        "data_wait: the share of a step in which the process waits for a batch.",
        "MFU: the models' own arithmetic, of what the device could do in that time; of devices whose peak is known.",
    ]
    if any(cell.pipeline == REMOTE for cell in cells):
        notes.append(
            f"remote: CPU is that of the hosts that train; input alone is for images of {image_size(job)} pixels."
        )
    if input_size(job) != image_size(job):
        notes.append(f"input alone is for images of {input_size(job)} pixels; the model sees {image_size(job)} here.")
    if not any(row["gpu"] for cell in cells for row in cell.rows):
        cores = "/".join(sorted({f"{float(row['cores']):g}" for cell in cells for row in cell.rows if row["cores"]}))
        notes += [
            f"There is no GPU: model and preprocessing share the {cores or 'same'} cores and slow each other; dali runs on them too.",
            "So this says nothing about what a GPU loses, or gains with dali.",
        ]
    return Table(head, rows, "what limits each cell", notes)


def _cores(cells: Sequence[Cell], pipelines: Sequence[str], job: Job) -> Table:
    """What a core prepares, and what a GPU has left."""
    head = ["load", "pipeline", "images/s a core", "cores for 1000 images/s", "GPU memory left, GiB"]
    rows = []
    for load in dict.fromkeys(cell.load for cell in cells):
        for name in pipelines:
            rate = core_rate(cells, name, load)
            left = [cell.gpu_memory_left for cell in cells if (cell.load, cell.pipeline) == (load, name)]
            known = [value for value in left if value is not None]
            if rate is not None:
                memory = f"{min(known):.1f}" if known else NOT_MEASURED
                rows.append([str(load), name, three_digits(rate), f"{1000 / rate:.1f}", memory])
    notes = [
        f"Images of {input_size(job)} pixels, by the CPU seconds of the input side alone: the process and its workers.",
        "A core is a logical core of the operating system, like a vCPU.",
    ]
    return Table(head, rows, "what a core prepares", notes)


def _supply(cells: Sequence[Cell], pipelines: Sequence[str]) -> Table:
    """What the CPUs of SageMaker's instance types prepare for each of their GPUs, under the heaviest load."""
    load, rates = heaviest(cells, pipelines)
    head = ["instance type", "GPU", "vCPUs a GPU", *rates]
    rows = []
    for name in sizing.instance_types() if rates else ():
        fits = [sizing.fit(name, rate, {}) for rate in rates.values()]
        rows.append([name, fits[0].gpu, f"{fits[0].vcpus_per_gpu:g}", *(three_digits(each.fed) for each in fits)])
    notes = [
        f"images/s under load {load}. A vCPU counts as a core of this machine.",
        f"{counted(sizing.RESERVED, 'vCPU')} a GPU is reserved for the training process.",
        "For every GPU, the types with the fewest and the most vCPUs.",
    ]
    if set(pipelines) - set(rates) == {"dali"}:
        notes.append("dali is left out: its CPU load beside a GPU was not measured.")
    return Table(head, rows, "what an instance type's CPUs prepare for each GPU", notes)


def _instances(cells: Sequence[Cell], pipelines: Sequence[str], job: Job) -> Table:
    """Which instance types feed the models whose speed is known, under the heaviest load."""
    load, rates = heaviest(cells, pipelines)
    head = ["model", "GPU", "images/s it takes", "instance type", "fed by", "US$ a million images, by pipeline"]
    rows = []
    for model, speeds in demands(cells, job).items():
        for name in sizing.instance_types() if rates else ():
            fits = {pipeline: sizing.fit(name, rate, speeds, job) for pipeline, rate in rates.items()}
            best = max(fits, key=lambda pipeline: fits[pipeline].fed)
            demand, nearest = fits[best].demand, fits[best].share
            if demand is None or nearest is None:
                continue
            enough = ", ".join(pipeline for pipeline, each in fits.items() if each.share == 1)
            usd = [each.usd_per_million for each in fits.values()]
            rows.append(
                [model, fits[best].gpu, f"{three_digits(demand.images_per_second)} ({demand.source})", name]
                + [enough or f"none; {best} to {percent(nearest)}"]
                + [" / ".join(dollars(value) for value in usd if value is not None) or "-"]
            )
    notes = [
        f"Load {load}. fed by: the pipelines whose CPU side keeps up with the model, or the one that comes closest.",
        "dali also takes a part of the GPU, which these columns leave out.",
    ]
    if any("the post's" in row[2] for row in rows):
        notes += [
            "the post's: the speed of the DALI post's fastest trial on that GPU (fp32, PyTorch 1.8.1), not measured here.",
            "Its epochs include validation, so the model takes at least that.",
        ]
    if not rows:
        notes.append(
            f"{NOT_MEASURED}: a GPU's speed with {', '.join(demands(cells, job))} at {input_size(job)} pixels."
        )
    if any(row[-1] == "-" for row in rows):
        notes.append(
            "`launcher plan CONFIG compute.instance_type=TYPE --on aws --check` reads a price from AWS's list."
        )
    return Table(head, rows, "which instance types feed each model", notes)


def percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{share * 100:.0f} %"


def _range(value: Spread) -> str:
    return f"{value.median:.2f}" + (f" ({value.low:.1f}-{value.high:.1f})" if len(value.values) > 1 else "")


def _saving(first: Cell, other: Cell) -> str:
    found = improvement(first, other)
    several = len(found.values) > 1
    chance = " ~" if several and not first.seconds.apart(other.seconds) else ""
    return f"{found.median:.2f}" + (f" ({found.low:.1f} to {found.high:.1f})" if several else "") + chance


def _value(value: Spread | None) -> str:
    return NOT_MEASURED if value is None else three_digits(value.median)

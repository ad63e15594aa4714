"""A study of preprocessing in words: the DALI post's table and charts, where the time goes, and which machines would do."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import inf
from statistics import median

from launcher.config.job import Job
from launcher.show.text import dollars
from launcher.study import sizing
from launcher.study.cells import HIGHLY, INPUT_BOUND, MODERATELY, NOT_MEASURED, Cell, improvement
from launcher.study.charts import Chart, number, svg
from launcher.study.measures import PERCENTILES, Spread
from launcher.study.sections import Section, as_html, as_text


def text(cells: Sequence[Cell], ways: Sequence[str], job: Job, notes: Sequence[str]) -> str:
    """All of it for a terminal."""
    if not cells:
        return "\n".join(["no trial has completed", *notes])
    parts = as_text(sections(cells, ways, job))
    return "\n\n".join([*parts, "\n".join(["verdict", "", *verdict(cells, ways, job), *notes])])


def html(cells: Sequence[Cell], ways: Sequence[str], job: Job, notes: Sequence[str]) -> str:
    """All of it for a notebook."""
    if not cells:
        return f"<p>{escape('no trial has completed: ' + '; '.join(notes))}</p>"
    parts = [charts(cells, ways), *as_html(sections(cells, ways, job))]
    return "\n".join([*parts, *(f"<p>{escape(line)}</p>" for line in [*verdict(cells, ways, job), *notes])])


def sections(cells: Sequence[Cell], ways: Sequence[str], job: Job) -> list[Section]:
    """The tables, one after the other."""
    there = [way for way in ways if any(cell.way == way for cell in cells)]
    return [
        _epochs(cells, there, job),
        _bounds(cells, job),
        _needs(cells, there, job),
        _given(cells, there),
        _machines(cells, there, job),
    ]


def _epochs(cells: Sequence[Cell], ways: Sequence[str], job: Job) -> Section:
    """The post's own table."""
    first, *others = ways
    head = ["model", "load", f"A {first}"]
    for letter, way in zip("BCD", others):
        head += [f"{letter} {way}", f"{letter} saves, %"]
    rows = []
    for model, load in _places(cells):
        by_way = {cell.way: cell for cell in cells if (cell.model, cell.load) == (model, load)}
        row = [model, str(load), _range(by_way[first].seconds) if first in by_way else "-"]
        for way in others:
            both = way in by_way and first in by_way
            row.append(_range(by_way[way].seconds) if way in by_way else "-")
            row.append(_saving(by_way[first], by_way[way]) if both else "-")
        rows.append(row)
    counts = sorted({len(cell.rows) for cell in cells})
    images = ", ".join(sorted({row["training_images"] for cell in cells for row in cell.rows}))
    runs = f"{counts[0]} run{'s' if counts[0] > 1 else ''}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
    below = [
        f"{runs} of each: the median (least-most). An epoch is {images} images of {_image_size(job)} pixels at the speed after the",
        "warm-up, without validation, checkpoints and the start of workers.",
    ]
    if counts[0] == 1:
        below.append("One run has no spread, so any difference may be chance: --repeats 3 shows it.")
    if "cpu_composed" in ways:
        below.append(
            "cpu_composed: the same draws as one warp, so one interpolation in the place of many; the others turn step by step."
        )
    if any("~" in cell for row in rows for cell in row):
        below.append("~: the runs of both overlap, so the difference may be chance.")
    return "seconds an epoch", head, rows, below


def _bounds(cells: Sequence[Cell], job: Job) -> Section:
    """What each cell waits for, and how busy it keeps the machine."""
    head = ["model", "load", "way", "images/s", "input alone", "model alone", "lost", "data_wait"]
    head += [f"CPU p{'/'.join(map(str, PERCENTILES))} %", "GPU %", "bound by"]
    rows = []
    for cell in cells:
        shares = [cell.of(f"cpu_share_p{percent}") for percent in PERCENTILES]
        cpu = "/".join(f"{share.median * 100:.0f}" for share in shares if share is not None) or NOT_MEASURED
        wait, probed = cell.of("data_wait_share"), cell.of("input_images_per_second")
        rows.append(
            [cell.model, str(cell.load), cell.way, number(cell.rate.median), _value(probed), _value(cell.alone)]
            + [_percent(cell.lost), _percent(wait.median if wait else None), cpu, NOT_MEASURED, cell.verdict]
        )
    below = [
        "input alone, model alone: images/s without the other half; the model on one batch over and over. lost: how much of the",
        f"model's own speed. From {_percent(MODERATELY)} on a cell is partly input-bound, from {_percent(HIGHLY)} on input-bound: the",
        "lines of TensorFlow's profiler. data_wait: the share of the step in which the process waited for a batch.",
    ]
    if _input_size(job) != _image_size(job):
        below.append(
            f"input alone is that of images of {_input_size(job)} pixels, of which the model sees {_image_size(job)} here."
        )
    if not any(row["gpu"] for cell in cells for row in cell.rows):
        cores = "/".join(sorted({f"{float(row['cores']):g}" for cell in cells for row in cell.rows if row["cores"]}))
        below += [
            f"There is no GPU: the model computes on the {cores or 'same'} cores that preprocess too, so each slows the other, and dali",
            "decodes and turns on them too. What a GPU would lose, and what dali gains there, is not measured.",
        ]
    return "what it waits for", head, rows, below


def _needs(cells: Sequence[Cell], ways: Sequence[str], job: Job) -> Section:
    """What a core gives, and what a GPU has left."""
    head = ["load", "way", "images/s a core", "cores for 1000 images/s", "GPU memory left, GiB"]
    rows = []
    for load in dict.fromkeys(cell.load for cell in cells):
        for way in ways:
            rate = _core_rate(cells, way, load)
            left = [cell.gpu_memory_left for cell in cells if (cell.load, cell.way) == (load, way)]
            known = [value for value in left if value is not None]
            if rate is not None:
                memory = f"{min(known):.1f}" if known else NOT_MEASURED
                rows.append([str(load), way, number(rate), f"{1000 / rate:.1f}", memory])
    below = [
        f"Images of {_input_size(job)} pixels, by the CPU seconds of the input side alone, of the process and its workers. A core",
        "is one of the operating system's, as a vCPU is.",
    ]
    return "what a core gives", head, rows, below


def _core_rate(cells: Sequence[Cell], way: str, load: int) -> float | None:
    """Images a second that a core gives, the median over the models, which do not matter to it."""
    rates = [cell.core_rate for cell in cells if (cell.load, cell.way) == (load, way) and cell.core_rate]
    return median(rates) if rates else None


def _given(cells: Sequence[Cell], ways: Sequence[str]) -> Section:
    """What the CPUs of SageMaker's instance types give each of their GPUs, under the heaviest load."""
    load, rates = _heaviest(cells, ways)
    head = ["instance type", "GPU", "vCPUs a GPU", *rates]
    rows = []
    for name in sizing.instance_types() if rates else ():
        fits = [sizing.fit(name, rate, {}) for rate in rates.values()]
        rows.append([name, fits[0].gpu, f"{fits[0].vcpus_a_gpu:g}", *(number(each.fed) for each in fits)])
    below = [
        f"Load {load}, images/s: each vCPU as fast as a core here, {sizing.RESERVED} vCPU a GPU left to the training process. For every",
        "GPU the types with the fewest and the most vCPUs.",
    ]
    if set(ways) - set(rates) == {"dali"}:
        below.append(
            "dali is left out: what it takes of a machine's CPUs where a GPU decodes and turns was not measured."
        )
    return "what an instance's CPUs give each GPU", head, rows, below


def _machines(cells: Sequence[Cell], ways: Sequence[str], job: Job) -> Section:
    """Which instance types would feed the models, under the heaviest load, where the models' speed is known."""
    load, rates = _heaviest(cells, ways)
    head = ["model", "GPU", "images/s it takes", "instance type", "fed by", "US$ a million images, by way"]
    rows = []
    for model, demands in _demands(cells, job).items():
        for name in sizing.instance_types() if rates else ():
            fits = {way: sizing.fit(name, rate, demands, job) for way, rate in rates.items()}
            best = max(fits, key=lambda way: fits[way].fed)
            demand, nearest = fits[best].demand, fits[best].share
            if demand is None or nearest is None:
                continue
            enough = ", ".join(way for way, each in fits.items() if each.share == 1)
            usd = [each.usd_a_million for each in fits.values()]
            rows.append(
                [model, fits[best].gpu, f"{number(demand.images_per_second)} ({demand.source})", name]
                + [enough or f"none; {best} to {_percent(nearest)}"]
                + [" / ".join(dollars(value) for value in usd if value is not None) or "-"]
            )
    below = [
        f"Load {load}. fed by: the ways whose CPU side keeps up with the model there, or the nearest. On a GPU dali takes a part of it",
        "too, which is not in these columns but in the seconds an epoch of a study there.",
    ]
    if any("the post's" in row[2] for row in rows):
        below += [
            "the post's: the speed of its fastest trial on that GPU (fp32, PyTorch 1.8.1), not measured here. Its epochs validate too,",
            "so the model takes at least that.",
        ]
    if not rows:
        below.append(
            f"Not measured: a GPU's speed with {', '.join(_demands(cells, job))} at {_input_size(job)} pixels."
        )
    if any(row[-1] == "-" for row in rows):
        below.append(
            "Prices: `launcher plan CONFIG compute.instance_type=TYPE --on aws --check` reads them of AWS's list."
        )
    return "which machines would feed it", head, rows, below


def _heaviest(cells: Sequence[Cell], ways: Sequence[str]) -> tuple[int, dict[str, float]]:
    """The heaviest load, and the images/s that a core gives under it, by way: without dali where it had no GPU to work on."""
    load = max(cell.load for cell in cells)
    ways = [way for way in ways if way != "dali" or any(row["gpu"] for cell in cells for row in cell.rows)]
    return load, {way: rate for way in ways if (rate := _core_rate(cells, way, load)) is not None}


def _demands(cells: Sequence[Cell], job: Job) -> dict[str, dict[str, sizing.Demand]]:
    """What each model takes of images of the size at which the input side was measured, by GPU."""
    gpu = next((row["gpu"] for cell in cells for row in cell.rows if row["gpu"]), None)
    here = gpu is not None and _input_size(job) == _image_size(job)
    alone = {cell.model: cell.alone.median if here and cell.alone is not None else None for cell in cells}
    return {model: sizing.demands_of(model, _input_size(job), speed, gpu) for model, speed in alone.items()}


def _image_size(job: Job) -> int:
    """In pixels, of what the models see; the script's own where the job says nothing."""
    size: int = job.hyperparameters.get("image_size", 224)
    return size


def _input_size(job: Job) -> int:
    """In pixels, of the images by which the input side alone was measured."""
    return job.hyperparameters.get("probe_image_size") or _image_size(job)


def verdict(cells: Sequence[Cell], ways: Sequence[str], job: Job) -> list[str]:
    """The answer: a line a model and load that says which way is best, one for what all are bound by, and one a model that names
    the machine to take."""
    lines = []
    for model, load in _places(cells):
        here = {cell.way: cell for cell in cells if (cell.model, cell.load) == (model, load)}
        first = next((here[way] for way in ways if way in here), None)
        best = min(here.values(), key=lambda cell: cell.seconds.median)
        if first is None or len(here) < 2:
            lines.append(f"{model}, load {load}: {best.way} alone was tried; {best.verdict}")
        elif best is first or (len(best.rows) > 1 and not best.seconds.apart(first.seconds)):
            lines.append(f"{model}, load {load}: no way is surely faster than {first.way}; {first.verdict}")
        else:
            less = improvement(first, best).median
            sure = "" if min(len(first.rows), len(best.rows)) > 1 else " in one run each, which may be chance"
            lines.append(
                f"{model}, load {load}: {best.way} takes {less:.2f} % less time than {first.way}{sure} "
                f"({first.way} is {first.verdict}, {best.way} {best.verdict})"
            )
    waiting = [cell for cell in cells if cell.verdict == INPUT_BOUND]
    lines.append(f"{len(waiting)} of {len(cells)} cells are input-bound")
    there = [way for way in ways if any(cell.way == way for cell in cells)]
    return lines + [_advice(model, demands, cells, there, job) for model, demands in _demands(cells, job).items()]


def _advice(model: str, demands: dict[str, sizing.Demand], cells: Sequence[Cell], ways: Sequence[str], job: Job) -> str:
    """Which machine to take for a model: the one that feeds it for the least money, or with the fewest vCPUs without prices."""
    load, rates = _heaviest(cells, ways)
    if not rates:
        return f"machine for {model}: {NOT_MEASURED}, for the input side alone was not"
    known = [
        {way: sizing.fit(name, rate, demands, job) for way, rate in rates.items()} for name in sizing.instance_types()
    ]
    known = [fits for fits in known if any(each.demand for each in fits.values())]
    best = max(rates, key=lambda way: rates[way])
    if not known:
        vcpus = ", ".join(f"{1000 / rate:.1f} by {way}" for way, rate in rates.items())
        return f"machine for {model}: {NOT_MEASURED} how fast a GPU is; for 1000 images/s under load {load} it needs these vCPUs: {vcpus}"

    def price(fits: dict[str, sizing.Fit]) -> tuple[float, float]:
        one = fits[best]
        return (one.usd_a_million if one.usd_a_million is not None else inf, one.vcpus_a_gpu)

    enough = [fits for fits in known if fits[best].share == 1]
    fits = min(enough, key=price) if enough else max(known, key=lambda fits: fits[best].share or 0)
    one = fits[best]
    assert one.demand is not None
    shares = ", ".join(f"{way} {number(each.fed)}" for way, each in fits.items())
    cost = f", {dollars(one.usd_a_million)} a million images" if one.usd_a_million is not None else ""
    feeding = [way for way, each in fits.items() if each.share == 1]
    how = f"fed by {' and '.join(feeding)}" if feeding else f"no way feeds it, {best} is nearest"
    return (
        f"machine for {model} under load {load}: {one.instance_type}{cost}, {how}: its {one.gpu} takes "
        f"{number(one.demand.images_per_second)} images/s ({one.demand.source}), its CPUs give each GPU {shares}"
    )


def charts(cells: Sequence[Cell], ways: Sequence[str]) -> str:
    """The post's two charts as SVG."""
    there = [way for way in ways if any(cell.way == way for cell in cells)]
    places, by_place = _places(cells), {(cell.model, cell.load, cell.way): cell for cell in cells}
    models = dict.fromkeys(model for model, _ in places)
    axis = tuple((model, tuple(str(load) for name, load in places if name == model)) for model in models)

    def seconds(way: str) -> tuple[Spread | None, ...]:
        found = (by_place.get((*place, way)) for place in places)
        return tuple(None if cell is None else cell.seconds for cell in found)

    def savings(way: str) -> tuple[Spread | None, ...]:
        pairs = [(by_place.get((*place, there[0])), by_place.get((*place, way))) for place in places]
        return tuple(improvement(first, other) if first and other else None for first, other in pairs)

    title, below = "Training time by model and augmentation load", "augmentation load"
    drawn = [Chart(title, "seconds an epoch", axis, below, tuple((way, seconds(way)) for way in there))]
    if len(there) > 1:
        title, less = f"Less training time than with {there[0]}", tuple((way, savings(way)) for way in there[1:])
        drawn.append(Chart(title, "% of an epoch's time", axis, below, less, first_colour=1))
    return svg(drawn)


def _places(cells: Sequence[Cell]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((cell.model, cell.load) for cell in cells))


def _range(value: Spread) -> str:
    return f"{value.median:.2f}" + (f" ({value.low:.1f}-{value.high:.1f})" if len(value.values) > 1 else "")


def _saving(first: Cell, other: Cell) -> str:
    found = improvement(first, other)
    several = len(found.values) > 1
    chance = " ~" if several and not first.seconds.apart(other.seconds) else ""
    return f"{found.median:.2f}" + (f" ({found.low:.1f} to {found.high:.1f})" if several else "") + chance


def _value(value: Spread | None) -> str:
    return NOT_MEASURED if value is None else number(value.median)


def _percent(share: float | None) -> str:
    return NOT_MEASURED if share is None else f"{share * 100:.0f} %"

"""What the notebooks' texts say, held against their outputs."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator

import nbformat

WON = 1.3
"""Speed-up that KT's journey has to show, for a story of a fault that was found and fixed."""

WAIT = 0.1
"""Share of an iteration below which "the data are there when they are asked for"."""


def contradictions(name: str, book: nbformat.NotebookNode) -> list[str]:
    """What a notebook's outputs do not bear out, a sentence each."""
    return list(STORIES[name](book)) if name in STORIES else []


def printed(book: nbformat.NotebookNode) -> str:
    """What its cells printed and showed, without HTML's tags and styles."""
    parts = []
    for cell in book.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown = re.sub(r"(?s)<(style|script|svg)\b.*?</\1>", "", data.get("text/html", ""))
            parts += [
                output.get("text", ""),
                html.unescape(re.sub(r"<[^>]+>", "\n", shown)) or data.get("text/plain", ""),
            ]
    return "\n".join(parts)


def _kt_journey(book: nbformat.NotebookNode) -> Iterator[str]:
    text = printed(book)
    planted = (
        "16 workers a process keep the training thread from its core",
        "Preparing the images needs more cores than there are",
    )
    verdicts = re.findall(r"^1/\d+ +as it is: .*?; (.*)", text, re.MULTILINE)
    for verdict, right in zip([*verdicts, "", ""], planted):
        if not verdict.startswith(right):
            yield f"planted: {right}; first finding: {verdict or 'none'}"
    gains = [float(found) for found in re.findall(r"speed-up ([\d.]+) of the whole job", text)]
    if len(gains) != 2 or min(gains) < WON:
        yield f"fixed: a speed-up of at least {WON} for both jobs; measured {gains}"
    on_accelerator, _, distillation = text.rpartition("as it is: ")
    kept = [KEPT.findall(part) for part in (on_accelerator, distillation)]
    yield from (
        f"{change} was kept, and one pair of its runs shows {low}" for change, low in sum(kept, []) if float(low) < 1
    )
    if not any(0 <= int(workers) < 16 for workers in re.findall(r"num_workers=(\d+)", str(kept[0]))):
        yield f"KT's fix is fewer workers; kept {kept[0]}"
    compared = re.search(r"^speed-up [\d.]+ \(([\d.]+) to .*", text, re.MULTILINE)
    if compared is None or float(compared[1]) <= 1 or "no difference shown" in text:
        yield f"before and after: a comparison that shows a gain; {compared[0] if compared else 'it shows none'}"
    iterations = [
        [float(seconds) for seconds in found]
        for found in re.findall(r"dataloader: (\S+) sec, forward: (\S+) sec, backward: (\S+) sec", text)
    ]
    waits = sorted(wait / sum((wait, *rest)) for wait, *rest in iterations)
    if not waits or waits[len(waits) // 2] > WAIT:
        yield f"the data are there when they are asked for; shares of the iterations that were waited: {waits}"
    diff = re.findall(r"^\+ +(\w+): \S+$", text, re.MULTILINE)
    if not diff or {change.partition("=")[0] for change, _ in kept[1]} != {*diff}:
        yield f"the new config has what was kept: {kept[1]}; it has {diff}"


KEPT = re.compile(r"^(\S.*): kept, speed-up [\d.]+ \(([\d.]+) to", re.MULTILINE)
"""A change that `launcher tune` kept, and the least speed-up of a pair of its runs."""


def _quickstart(book: nbformat.NotebookNode) -> Iterator[str]:
    reported = re.search(r"a student with (\d+) times fewer parameters", book.cells[0].source)
    found = re.search(r"^(\d+) times fewer parameters; ([\d.]+)% .* its teacher ([\d.]+)%", printed(book), re.MULTILINE)
    if reported is None or found is None or reported[1] != found[1]:
        yield f"{reported and reported[0]}; measured: {found and found[0]}"
    if found is not None and float(found[2]) > float(found[3]):
        yield f"a student learns from its teacher, and is better: {found[0]}"


def _scaling_study(book: nbformat.NotebookNode) -> Iterator[str]:
    text, reported = printed(book), "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    first, second = (float(found) for found in re.findall(r"^speed-up per epoch +([\d.]+)", text, re.MULTILINE))
    [by_gpus] = re.findall(r"^from more GPUs, at most +([\d.]+)", text, re.MULTILINE)
    if f"At most {float(by_gpus):.0f} of the {first:.0f} come from the GPUs" not in reported:
        yield f"KT: at most {by_gpus} of {first} come from the GPUs"
    step, computing = map(float, re.findall(r"([\d.]+) s a step, of which computing explains ([\d.]+) s", text)[0])
    if "nine tenths of its" in reported and round(1 - computing / step, 1) != 0.9:
        yield f"{1 - computing / step:.2f} of KT's step were not computing"
    [(low, high)] = re.findall(r"^from five instances, about +([\d.]+) to ([\d.]+)", text, re.MULTILINE)
    if "Five instances explain half" in reported and not 0.4 < (float(low) + float(high)) / 2 / second < 0.6:
        yield f"five instances explain {low} to {high} of {second}"
    [each] = re.findall(r"^left for each instance, at least +([\d.]+)", text, re.MULTILINE)
    if "about twice as fast" in reported and round(float(each)) != 2:
        yield f"each instance must have gained a speed-up of {each}"


def _preprocessing_trials(book: nbformat.NotebookNode) -> Iterator[str]:
    text = printed(book)
    trials = re.findall(r"^\d/\d +resnet18, (\w+), load (\d+), repeat 1", text, re.MULTILINE)
    reported = {(pipeline, load) for pipeline in ("cpu_reference", "cpu", "cpu_composed") for load in ("1", "12")}
    if {*trials} != reported | {("remote", "12")}:
        yield f"three pipelines under load 1 and 12, and remote under 12; measured {sorted(trials)}"
        return
    if not re.search(r"^  cpus preprocesses: 1 host ", text, re.MULTILINE):
        yield "a second host of the job makes remote's images"
    if not re.search(
        r"^remote: its hosts share one machine .*, so it cannot win by them and is not judged", text, re.MULTILINE
    ):
        yield "the study does not judge remote here"
    epochs = {(pipeline, load): float(seconds) for pipeline, load, seconds in re.findall(SECONDS, text, re.MULTILINE)}
    for load, pipeline, share, than in re.findall(LESS_TIME, text, re.MULTILINE):
        less = 1 - epochs[pipeline, load] / epochs[than, load]
        if abs(100 * less - float(share)) > 0.2:
            yield f"{pipeline}, load {load}: {share} % less time than {than}; its trials say {100 * less:.1f} %"


SECONDS = r"^\d/\d +resnet18, (\w+), load (\d+), repeat 1: .*, ([\d.]+) s an epoch"
LESS_TIME = r"^resnet18, load (\d+): (\w+) takes ([\d.]+) % less time than (\w+)"


def _sagemaker(book: nbformat.NotebookNode) -> Iterator[str]:
    text = printed(book)
    most, spent = re.search(r"at most \$([\d.]+)", text), re.search(r"^billed \d+ s, \$([\d.]+)$", text, re.MULTILINE)
    if most is None or spent is None or float(spent[1]) > float(most[1]):
        yield f"it costs what the plan says: {most and most[0]}; {spent and spent[0]}"


STORIES: dict[str, Callable[[nbformat.NotebookNode], Iterator[str]]] = {
    "kt_journey": _kt_journey,
    "quickstart": _quickstart,
    "scaling_study": _scaling_study,
    "preprocessing_trials": _preprocessing_trials,
    "sagemaker": _sagemaker,
}
"""The notebook -> what of its texts its outputs contradict."""

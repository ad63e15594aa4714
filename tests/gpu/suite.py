"""The checks, their parts and time limits, and how a part runs."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import ROOT, isolation, outcomes
from tests.gpu.outcomes import NotChecked, Outcome, Result

ITEMS = {
    1: "Training scripts",
    2: "Resume",
    3: "No hidden synchronisation",
    4: "Stop flag",
    5: "Timeline",
    6: "Memory",
    7: "Fused kernels and operator times",
    8: "Compiled models",
    9: "Input side",
    10: "Throughput",
    11: "Checkpoint stall and GPU metrics",
    12: "Augmentation load",
    13: "KT's journey",
}
"""Titles of the page's sections."""

MODELS, LOADS = ("resnet18", "resnet50", "resnet152"), (1, 4, 8, 12)
"""Of the DALI post."""

PARTS = (
    *("scripts", "host", "kernels", "input", "throughput-36", "throughput-256"),
    *("throughput-settings", "throughput-streams", "throughput-fp8"),
    *(f"augmentation-{model}" for model in MODELS),
    "journey",
)
"""Each takes at most eight minutes, and runs alone by its name or number."""


HERE = Path(__file__).parent

NEARLY = 0.95
"""Share of its time after which a check is stopped; one that does not stop is killed."""


@dataclass(frozen=True, eq=False)
class Check:
    """A function of this package that fills a Result."""

    name: str
    item: int
    part: str
    title: str
    function: str
    """module:function."""
    seconds: float = 120
    """After which it is killed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""
    """Title of the table that this check's rows share with those of others of its item; empty: they have their own."""
    only_problems: bool = False
    """Whether the page has only the rows with a `problem`."""

    def __call__(self, bench: Any, result: Result) -> None:
        module, name = self.function.split(":")
        getattr(importlib.import_module(f"tests.gpu.{module}"), name)(bench, result, **self.options)


CHECKS = (
    Check("train-kd", 1, "scripts", "train_kd.py, bf16, 20 steps", "scripts:distillation"),
    Check("train-kd-cached", 1, "scripts", "train_kd.py, cache filled, then complete", "scripts:cached_distillation"),
    Check("train-kd-graphs", 1, "scripts", "train_kd.py as CUDA graphs, with an average of the weights and a cache", "scripts:graphs", 180),
    Check("train-classifier", 1, "scripts", "train_classifier.py", "scripts:classifier"),
    Check("train-segmentation", 1, "scripts", "train_segmentation.py with a teacher", "scripts:segmentation"),
    Check("train-kd-dali", 1, "scripts", "train_kd.py, images by DALI", "scripts:dali_distillation"),
    Check("resume-one-rank", 2, "scripts", "Save, load, one step: a group of one rank", "resuming:one_rank", only_problems=True),
    Check("resume-two-ranks", 2, "scripts", "Save, load, one step: two gloo ranks on one device", "resuming:two_ranks", only_problems=True),
    Check("no-waiting-distillation", 3, "host", "Distillation", "waiting:distillation"),
    Check("no-waiting-filling", 3, "host", "Distillation that fills a cache", "waiting:filling_distillation"),
    Check("no-waiting-cached", 3, "host", "Distillation, filled cache", "waiting:cached_distillation"),
    Check("no-waiting-segmentation", 3, "host", "Segmentation with a teacher", "waiting:segmentation"),
    Check("no-waiting-group", 3, "host", "Distillation under DDP with the stop flag", "waiting:grouped_distillation"),
    Check("no-waiting-dali", 3, "host", "DALI's hand-over", "waiting:dali"),
    Check("side-streams-ordered", 3, "host", "Side streams wait for one another", "side_streams:ordered"),
    Check("stop-flag", 4, "host", "The answer comes before later work ends", "waiting:stop_flag"),
    Check("timeline-known", 5, "host", "Phases of known length", "phases:known_phases"),
    Check("timeline-step", 5, "host", "Phases of real steps", "phases:real_steps"),
    Check("memory-classifier", 6, "kernels", "ViT student, bf16", "footprint:classifier"),
    Check("memory-distillation", 6, "kernels", "ViT student with a ViT teacher, bf16", "footprint:distillation"),
    Check("memory-segmentation", 6, "kernels", "Segmenter, bf16", "footprint:segmentation"),
    Check("memory-auto", 6, "kernels", "batch_size_per_device: auto", "footprint:automatic"),
    Check("fused-kernels", 7, "kernels", "Flash attention, fused AdamW, operator times", "kernels:fused"),
    Check("compiled", 8, "kernels", "A ragged evaluation, then training", "kernels:compiled", 240),
    Check("input-side", 9, "input", "One batch, and workers of each kind", "input_side:speeds", 180),
    Check("checkpoint-student", 11, "input", "Checkpoint of the student with EMA", "stalls:checkpoint", 180, options={"size": "student"}),
    Check("checkpoint-teacher", 11, "input", "Checkpoint of a model of the teacher's size with EMA", "stalls:checkpoint", 180, options={"size": "teacher"}),
    Check("gpu-metrics", 11, "input", "NVML's values and the system monitor's lines", "stalls:gpu_metrics"),
    *(
        Check(f"throughput-{batch}-{mode}", 10, f"throughput-{batch}", f"Batch {batch}, {mode}", "throughput:distillation",
              180, {"batch": batch, "mode": mode}, "Teacher ViT-L/16, student ViT-S/16, bf16, 224 pixels, one batch over and over")
        for batch in (36, 256)
        for mode in ("eager", "compiled", "reduce-overhead")
    ),
    Check("throughput-convolutions", 10, "throughput-settings", "A convolutional model, cudnn_benchmark and compiled", "throughput:convolutions", 360),
    Check("throughput-numa", 10, "throughput-settings", "numa_binding, on and off", "throughput:numa_binding"),
    Check("throughput-segmentation", 10, "throughput-256", "A segmenter, compiled", "throughput:segmentation", 180),
    Check("throughput-group", 10, "throughput-36", "Under DistributedDataParallel, compiled", "throughput:grouped", 180),
    *(
        Check(f"throughput-{kind}-{batch}", 10, f"throughput-{kind}", f"Batch {batch}, {what}", function, 200, {"batch": batch}, table)
        for kind, what, function, table in (
            ("streams", "side streams", "side_streams:speeds", "Copies and the teacher by streams of their own, compiled"),
            ("fp8", "a teacher in fp8", "throughput:fp8_teacher", "A teacher in fp8, its forward pass alone"),
        )
        for batch in (36, 256)
    ),
    Check("throughput-late-metrics", 10, "throughput-streams", "late_metrics, on and off", "throughput:late_metrics", 80, {"batch": 256}),
    *(
        Check(f"augmentation-{model}-{load}", 12, f"augmentation-{model}", f"{model}, augmentation load {load}", "augmentation:speeds",
              180, {"model": model, "load": load}, "Images of 500 × 375 pixels, a random crop to 224, and the load")
        for model in MODELS
        for load in LOADS
    ),
    Check("journey", 13, "journey", "`launcher tune` on a job as KT's began", "tuning:journey", 480),
)  # fmt: skip


def warm_up() -> None:
    """Import what the checks import, once for all forks; the checks that need it report what fails."""
    for module in ("bench", *sorted({check.function.split(":")[0] for check in CHECKS})):
        with suppress(Exception):
            importlib.import_module(f"tests.gpu.{module}")


def run_part(
    part: str,
    make_bench: Callable[[Path], Any],
    folder: Path,
    machine: Mapping[str, Any],
    *,
    minutes: float,
    wanted: Sequence[str] = (),
    skip_passed: bool = False,
) -> list[Outcome]:
    """Run a part's checks one after another, each in its own process, and keep each outcome as it comes.

    Args:
        make_bench: returns what a check works with, in an empty folder.
        folder: of the outcomes.
        wanted: names of checks. Empty: all of the part.
        skip_passed: without those that already passed for this commit on such a device.
    """
    ends, found = time.monotonic() + minutes * 60, []
    passed = _passed(folder, machine) if skip_passed else set()
    for check in CHECKS:
        if check.part != part or (wanted and check.name not in wanted) or check.name in passed:
            continue
        left = ends - time.monotonic()
        if left < 1:
            outcome = Outcome(check.name, "not checked", f"the part's {minutes:g} minutes were over")
        else:
            outcome = _run(check, make_bench, folder, min(check.seconds, left))
        outcome.machine, outcome.reason = machine, without_paths(outcome.reason)
        outcome.result.problems = [*map(without_paths, outcome.result.problems)]
        outcomes.write(folder, outcome)
        found.append(outcome)
        print(f"{outcome.status:12} {check.name} ({outcome.seconds:.1f} s) {first_line(outcome)}".rstrip(), flush=True)
    return found


def _passed(folder: Path, machine: Mapping[str, Any]) -> set[str]:
    """The checks that already passed, for the same commit on a device of the same name."""
    same = ("commit", "device")
    return {
        name
        for name, outcome in outcomes.read(folder).items()
        if outcome.status == "passed" and all(outcome.machine[key] == machine[key] for key in same)
    }


def without_paths(text: str) -> str:
    """A text without this machine's paths, fit for a page."""
    for place in (ROOT, Path(sys.prefix), Path(tempfile.gettempdir())):
        text = text.replace(f"{place}/", "")
    return text


def first_line(outcome: Outcome) -> str:
    """What is wrong, in a line."""
    text = outcome.reason or "; ".join(outcome.result.problems)
    return text.strip().rpartition("\n")[2][:300]


def _run(check: Check, make_bench: Callable[[Path], Any], folder: Path, seconds: float) -> Outcome:
    started, log = time.monotonic(), folder / "logs" / f"{check.name}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"gpu-{check.name}-") as place:
        answer = Path(place) / "answer"
        answering = functools.partial(_answer, check, make_bench, Path(place), answer, seconds, log)
        code = isolation.run_isolated(answering, log, seconds)
        taken = time.monotonic() - started
        if code == isolation.TIMED_OUT:
            return Outcome(
                check.name, "error", f"not done after {seconds:.0f} s; its log ends:\n{isolation.tail(log)}", taken
            )
        if not answer.is_dir():
            return Outcome(check.name, "error", f"ended with {code}; its log ends:\n{isolation.tail(log)}", taken)
        [outcome] = outcomes.read(answer).values()
    outcome.seconds = taken
    return outcome


class _OutOfTime(BaseException):
    """Raised in a check a little before it is killed, so that what it has measured stays. It is not an Exception: torch.compile and
    the fallback to eager models catch every one of those."""


def _answer(
    check: Check, make_bench: Callable[[Path], Any], place: Path, answer: Path, seconds: float, log: Path
) -> None:
    """Run a check in this process, and leave its outcome in the folder that the parent reads.

    Args:
        seconds: after which the parent kills this process.
        log: what this process prints goes there.
    """
    result, status, reason = Result(), "passed", ""
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, NEARLY * seconds)
    work = place / "work"
    work.mkdir()
    os.chdir(work)  # the scripts write to ./output
    try:
        try:
            check(make_bench(work), result)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        status = "failed" if result.problems else "passed"
    except NotChecked as why:
        status, reason = "not checked", str(why)
    except _OutOfTime as stopped:
        places = [at for at in traceback.extract_tb(stopped.__traceback__) if Path(at.filename).parent == HERE]
        where = f"{Path(places[-2].filename).name}:{places[-2].lineno}"  # the last one is where it is raised
        sys.stdout.flush()
        status, reason = "error", f"not done after {seconds:.0f} s, at {where}; its log ends:\n{isolation.tail(log)}"
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        status, reason = "error", f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    outcomes.write(answer, Outcome(check.name, status, reason, 0.0, result))


def _stop(_signal: int, _frame: object) -> None:
    raise _OutOfTime

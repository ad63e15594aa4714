"""Trains with a bottleneck of each kind planted, diagnoses the run, applies the fix and trains again. `make bench-planted`.

The table says what was planted, the top finding, the gain that it expects, and what the fix brought. Kinds that need a GPU are not here:
tests/insight/test_rules.py plants their measurements. A run takes some 10 to 50 s; name kinds to run only those:

    .venv/bin/python tests/benchmarks/planted_bottlenecks.py too_many_workers teacher_bound

`make bench-planted-others` gives the harsher form of each kind, and the healthy runs, to TraceML, gpuprof and Debugger's rules too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import other_diagnosers
from PIL import Image

from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Finding
from launcher.insight.measurements import read
from launcher.show.table import Table

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"

BASE = {
    "model": "mobilenetv3_small_050",
    "image_size": 96,
    "global_batch_size": 32,
    "epochs": 100_000,
    "max_steps": 60,
    "log_every": 2,
    "evaluate_every": 100_000,
    "num_workers": 1,
    "learning_rate": 1e-4,
    "worker_type": "processes",
}
"""A small model on photographs of 500 by 375 pixels."""

HEAVY = {"model": "resnet18", "image_size": 128, "max_steps": 30}
"""So much arithmetic that nothing else shows."""

TEACHER = {"model": "resnet34"}

DISTILS = {"image_size": 64, "epochs": 10, "max_steps": 120, "images_per_class": 38}
"""So many epochs that a cache of the teacher's answers is read more often than it is filled."""

# What is planted in code runs before the script. Each patches one place, and says by its numbers how harsh it is.
PYTHON_IN_THE_LOOP = """
import time
from training.engine import loop
step = loop._step
def slower(*arguments):
    until = time.perf_counter() + {seconds}
    while time.perf_counter() < until:
        sum(range(1000))
    return step(*arguments)
loop._step = slower
"""
SLEEP_SOMETIMES = """
import time
from training.engine import loop
step, calls = loop._step, []
def sometimes(*arguments):
    calls.append(1)
    if len(calls) % {every} == 0:
        time.sleep({seconds})
    return step(*arguments)
loop._step = sometimes
"""
SLOW_READS = """
import time
from training.data.sources import folders
encoded = folders.LabelledFolder.encoded
def slow(self, number):
    time.sleep({seconds})
    return encoded(self, number)
folders.LabelledFolder.encoded = slow
"""
MEMORY_THAT_IS_KEPT = """
from training.engine import loop
step, kept = loop._step, []
def keeping(*arguments):
    kept.append(b"x" * int({megabytes} * 1e6))
    return step(*arguments)
loop._step = keeping
"""
SLOW_RANK = """
import os, time
from training.tasks import classification
call = classification.Classification.__call__
def slow(self, batch):
    if os.environ["RANK"] == "1":
        with self.timeline.phase("augment"):
            until = time.perf_counter() + {seconds}
            while time.perf_counter() < until:
                sum(range(1000))
    return call(self, batch)
classification.Classification.__call__ = slow
"""
SLOW_EPOCHS = """
import time
from training.data import batches
start = batches.TrainingBatches.start
def slow(self, *arguments):
    time.sleep({seconds})
    return start(self, *arguments)
batches.TrainingBatches.start = slow
"""
SLOW_COPIES = """
import time
from training.data import batches
fields = batches.LabelledBatch._asdict
def slow(self):
    time.sleep({seconds})
    return fields(self)
batches.LabelledBatch._asdict = slow
"""
QUOTA = """
import os, pathlib
root = next(place for place in map(pathlib.Path, {roots!r}) if place.is_dir())
group = root / f"planted-{{os.getpid()}}"
group.mkdir()
if (group / "cpu.max").exists():
    (group / "cpu.max").write_text("{quota} 100000")
else:
    (group / "cpu.cfs_quota_us").write_text("{quota}")
(group / "cgroup.procs").write_text(str(os.getpid()))
"""
CONTROL_GROUPS = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"]
"""Where the CPU's quotas are set: version 1, version 2."""


@dataclass(frozen=True)
class Case:
    """One run with something planted; `kind` is the finding that is right, None for a healthy one."""

    kind: str | None
    form: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    plant: str = ""
    """Python that runs before the script."""
    ranks: int = 1
    threads: int | None = None
    """Of each process's arithmetic; None: torch's choice."""
    fixed: Mapping[str, Any] | None = None
    """Settings in place of the finding's fix, where that is none that can be applied here. {}: nothing but the plant is removed."""
    distils: bool = False
    checkpoints: bool = False


CASES = (
    Case("too_many_workers", "8 on 2 cores", {"num_workers": 4 * 2, "augmentation_load": 2}),
    Case("too_many_workers", "16 on 2 cores", {"num_workers": 8 * 2, "augmentation_load": 2}),
    Case(
        "too_few_workers",
        "none, cheap images",
        {**HEAVY, "num_workers": 0, "image_size": 48, "max_steps": 60},
        threads=1,
    ),
    Case(
        "too_few_workers",
        "none, costly images",
        {"num_workers": 0, "model": "resnet10t", "augmentation_load": 3},
        threads=1,
    ),
    Case("data_bound", "4 rounds of augmentation", {"num_workers": 2, "augmentation_load": 4}, threads=1),
    Case("data_bound", "12 rounds of augmentation", {"num_workers": 2, "augmentation_load": 12}, threads=1),
    Case("storage_bound", "20 ms an image", {"num_workers": 2}, SLOW_READS.format(seconds=0.02), fixed={}),
    Case("storage_bound", "80 ms an image", {"num_workers": 2}, SLOW_READS.format(seconds=0.08), fixed={}),
    Case("main_thread_bound", "a fifth of the step", HEAVY, PYTHON_IN_THE_LOOP.format(seconds=0.25), fixed={}),
    Case("main_thread_bound", "most of the step", HEAVY, PYTHON_IN_THE_LOOP.format(seconds=1.5), fixed={}),
    Case("teacher_bound", "twice the student", {**DISTILS, "student": "resnet18"}, distils=True, checkpoints=True),
    Case(
        "teacher_bound",
        "far larger than the student",
        {**DISTILS, "student": "mobilenetv3_small_050"},
        distils=True,
        checkpoints=True,
    ),
    Case(
        "checkpoint_stalls",
        "every 8 steps",
        {**HEAVY, "model": "resnet34", "image_size": 64, "checkpoint_every": 8},
        checkpoints=True,
    ),
    Case("checkpoint_stalls", "every step", {**HEAVY, "image_size": 64, "checkpoint_every": 1}, checkpoints=True),
    Case("evaluation_stalls", "every 12 steps", {**HEAVY, "evaluate_every": 1}),
    Case("evaluation_stalls", "every 2 steps", {**HEAVY, "evaluate_every": 1, "images_per_class": 8}),
    Case("small_batch", "4 images", {"model": "resnet18", "image_size": 32, "global_batch_size": 4, "max_steps": 200}),
    Case("small_batch", "1 image", {"model": "resnet18", "image_size": 32, "global_batch_size": 2, "max_steps": 200}),
    Case(
        "slow_rank",
        "by a third",
        {**HEAVY, "num_workers": 0},
        SLOW_RANK.format(seconds=0.25),
        ranks=2,
        threads=1,
        fixed={},
    ),
    Case(
        "slow_rank", "by far", {**HEAVY, "num_workers": 0}, SLOW_RANK.format(seconds=1.5), ranks=2, threads=1, fixed={}
    ),
    Case(
        "communication_bound",
        "45 MB",
        {"model": "resnet18", "image_size": 32, "global_batch_size": 8},
        ranks=2,
        threads=1,
    ),
    Case(
        "communication_bound",
        "160 MB",
        {"model": "resnet101", "image_size": 32, "global_batch_size": 4},
        ranks=2,
        threads=1,
    ),
    Case(
        "step_outliers",
        "4 s in every 25th",
        {**HEAVY, "max_steps": 75},
        SLEEP_SOMETIMES.format(every=25, seconds=4),
        fixed={},
    ),
    Case(
        "step_outliers",
        "10 s in every 20th",
        {**HEAVY, "max_steps": 60},
        SLEEP_SOMETIMES.format(every=20, seconds=10),
        fixed={},
    ),
    Case("memory_growth", "slow", {**HEAVY, "max_steps": 60}, MEMORY_THAT_IS_KEPT.format(megabytes="{slow}"), fixed={}),
    Case("memory_growth", "fast", {**HEAVY, "max_steps": 60}, MEMORY_THAT_IS_KEPT.format(megabytes="{fast}"), fixed={}),
    Case(
        "slow_epoch_starts",
        "1 s",
        {**HEAVY, "images_per_class": 16, "max_steps": 40},
        SLOW_EPOCHS.format(seconds=1.0),
        fixed={},
    ),
    Case(
        "slow_epoch_starts",
        "5 s",
        {**HEAVY, "images_per_class": 16, "max_steps": 40},
        SLOW_EPOCHS.format(seconds=5.0),
        fixed={},
    ),
    Case("host_to_device_bound", "a fifth of the step", HEAVY, SLOW_COPIES.format(seconds=0.25), fixed={}),
    Case("host_to_device_bound", "most of the step", HEAVY, SLOW_COPIES.format(seconds=1.5), fixed={}),
    Case("cpu_throttled", "1.2 cores", HEAVY, QUOTA.format(roots=CONTROL_GROUPS, quota=120_000), fixed={}),
    Case("cpu_throttled", "half a core", HEAVY, QUOTA.format(roots=CONTROL_GROUPS, quota=50_000), fixed={}),
    Case("slow_start", "150 s", HEAVY, "import time; time.sleep(150)", fixed={}),
    Case(None, "a worker", HEAVY),
    Case(None, "threads", {**HEAVY, "worker_type": "threads"}),
    Case(None, "cheap images in the process itself", {**HEAVY, "num_workers": 0, "image_size": 192}),
    Case(None, "two processes", {**HEAVY, "num_workers": 0, "image_size": 160, "max_steps": 20}, ranks=2, threads=1),
    Case(None, "some checkpoints", {**HEAVY, "checkpoint_every": 15}, checkpoints=True),
)


def photographs(folder: Path, train: int = 40, held_out: int = 20) -> None:
    """10 classes of so many images, about as detailed as photographs are."""
    random = np.random.default_rng(0)
    for part, each in (("train", train), ("validation", held_out)):
        for label in range(10):
            place = folder / part / f"class-{label}"
            place.mkdir(parents=True)
            for number in range(each):
                coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(
                    (500, 375), Image.BICUBIC
                )
                pixels = np.asarray(coarse, np.int16) + random.normal(0, 12, (375, 500, 3)).astype(np.int16)
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.jpg", quality=90)


def train(
    case: Case, settings: Mapping[str, Any], plant: str, data: Path, teacher: Path | None, tool: str = ""
) -> Path:
    """One run, watched by us or by another tool; returns its folder."""
    folder = Path(tempfile.mkdtemp(dir=data.parent))
    script = "train_kd" if case.distils else "train_classifier"
    kind = "DistillationSettings" if case.distils else "ClassifierSettings"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
    plant = plant.replace("{slow}", str(total * 0.15 / 60)).replace("{fast}", str(total * 0.25 / 60))
    run = f"{script}.main(read_settings({kind}))"
    if tool == "gpuprof":
        place = {"file": str(folder / "gpuprof.db"), "found": str(folder / "gpuprof.json"), "run": f"    {run}"}
        run = other_diagnosers.GPUPROF.format(**place)
    plant += other_diagnosers.TRACEML_STEPS if tool == "TraceML" else ""
    (folder / "planted.py").write_text(
        f"{plant}\nimport {script}\nfrom training.settings.scripts import {kind}\nfrom training.settings import read_settings\n"
        f"{run}\n"
    )
    places = {"SM_OUTPUT_DATA_DIR": "output", "SM_MODEL_DIR": "model"}
    path = os.pathsep.join([str(ENTRYPOINTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SM_")},
        **{name: str(folder / place) for name, place in places.items()},
        "SM_HPS": json.dumps(dict(settings)),
        "SAGEMAKER_BASE_DIR": str(folder),
        "SM_CURRENT_HOST": "algo-1",
        "PYTHONPATH": path,
        **{f"SM_CHANNEL_{part.upper()}": str(data / part) for part in ("train", "validation")},
        **({"SM_CHANNEL_TEACHER": str(teacher)} if case.distils else {}),
        **({"OMP_NUM_THREADS": str(case.threads)} if case.threads else {}),
    }
    if case.checkpoints:
        (folder / "checkpoints").mkdir()
    start = [sys.executable]
    if tool == "TraceML":
        start = [*other_diagnosers.TRACEML, str(folder / "logs"), "--nproc-per-node", str(case.ranks)]
    elif case.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case.ranks)]
    done = subprocess.run([*start, str(folder / "planted.py")], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case.kind} {case.form} {tool}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    for root in CONTROL_GROUPS:
        for group in Path(root).glob("planted-*"):
            group.rmdir()
    return folder


def others(case: Case, data: Path, teacher: Path | None, ours: Path) -> list[str]:
    """Two cells a tool: what it finds, and whether that leads to what was planted."""
    logs = train(case, base(case), case.plant, data, teacher, "TraceML") / "logs"
    watched = train(case, base(case), case.plant, data, teacher, "gpuprof") / "gpuprof.json"
    found = {
        "TraceML": other_diagnosers.traceml_findings(logs),
        "gpuprof": json.loads(watched.read_text()),
        "Debugger": other_diagnosers.debugger_findings(read(str(ours))),
    }
    return [
        cell
        for tool, findings in found.items()
        for cell in (
            ", ".join(findings) or "nothing",
            "yes" if other_diagnosers.right(tool, findings, case.kind) else "NO",
        )
    ]


def base(case: Case) -> dict[str, Any]:
    values = {**BASE, **case.settings}
    if case.distils:
        values.pop("model")
    return values


def changed(case: Case, top: Finding | None) -> Mapping[str, Any] | None:
    """The settings of the run after the fix; None: there is nothing to apply."""
    if case.kind is None or top is None:
        return None
    if case.fixed is not None:
        return case.fixed
    fix = next((fix for fix in top.fixes[:1] if (fix.setting or "").startswith("hyperparameters.")), None)
    return None if fix is None else {fix.setting.removeprefix("hyperparameters."): fix.value}


def whole(run: Diagnosis) -> float:
    """Seconds of a run with its start, which counts in no speed."""
    return run.evidence.facts["seconds_to_first_step"] + run.evidence.training_seconds


def row(case: Case, data: Path, teacher: Path | None, options: argparse.Namespace) -> list[str]:
    """What was planted, what was found and gained; with `--others` what other tools find."""
    folder = train(case, base(case), case.plant, data, teacher)
    before = Diagnosis(read(str(folder)))
    top = before.findings[0] if before.findings else None
    if options.tell:
        print(before, end="\n\n", flush=True)
    right = (top is None) if case.kind is None else (top is not None and top.kind == case.kind)
    cells = [case.kind or "healthy", case.form, "none" if top is None else top.kind, "yes" if right else "NO"]
    if options.others:
        return cells + others(case, data, teacher, folder)
    change = changed(case, top)
    if change is None or top is None or top.gain is None:
        return [*cells, "-", "-", "-"]
    fixed = {**base(case), **change}
    images = fixed["max_steps"] * base(case)["global_batch_size"]
    fixed["max_steps"] = images // fixed["global_batch_size"]
    after = Diagnosis(read(str(train(case, fixed, "" if case.fixed is not None else case.plant, data, teacher))))
    obtained = whole(before) / whole(after) if case.kind == "slow_start" else Comparison(before, after).speedup
    expected = top.gain.expected
    shown = f"at most {top.gain.at_most:.2f}" if expected is None else f"{expected:.2f}"
    near = "-" if expected is None else "yes" if abs(expected / obtained - 1) <= 0.25 else "no"
    return [*cells, shown, f"{obtained:.2f}", near]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="only these; `healthy` for those without a bottleneck")
    parser.add_argument("--tell", action="store_true", help="print every run's diagnosis too")
    parser.add_argument(
        "--others", action="store_true", help="give the runs to other tools too, instead of applying the fix"
    )
    parser.add_argument(
        "--harsher", action="store_true", help="only the harsher form of each kind, and the healthy runs"
    )
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.kinds or (case.kind or "healthy") in options.kinds]
    if options.harsher:
        harsher = {case.kind: case for case in chosen}
        chosen = [case for case in chosen if case.kind is None or case is harsher[case.kind]]
    if os.geteuid():
        chosen = [case for case in chosen if case.kind != "cpu_throttled"]
        print("cpu_throttled is not run: only root may set a quota", file=sys.stderr)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        data, teacher = Path(place) / "data", None
        photographs(data)
        if any(case.distils for case in chosen):
            teacher = (
                train(Case(None, "", TEACHER), {**BASE, **TEACHER, "max_steps": 1, "image_size": 64}, "", data, None)
                / "model"
            )
        for case in chosen:
            try:
                rows.append(row(case, data, teacher, options))
            except RuntimeError as error:  # what the others show is not lost
                print(error, file=sys.stderr)
                rows.append([case.kind or "healthy", case.form, "failed", "NO", *"-" * (6 if options.others else 3)])
            print("  ".join(rows[-1]), flush=True)
    gained = ["gain expected", "obtained", "within 25 %"]
    told = [cell for tool in other_diagnosers.ACCEPTED for cell in (tool, "right")] if options.others else gained
    print()
    print(Table(["planted", "form", "finding", "right", *told], rows))
    print(f"\nright: this kit {_share(rows, 3)}")
    if options.others:
        for number, tool in enumerate(other_diagnosers.ACCEPTED):
            print(f"right: {tool} {_share(rows, 5 + 2 * number)}")
    else:
        near = [cells[-1] for cells in rows if cells[-1] != "-"]
        print(f"gain within 25 % in {near.count('yes')} of {len(near)}")


def _share(rows: list[list[str]], column: int) -> str:
    return f"{sum(cells[column] == 'yes' for cells in rows)} of {len(rows)}"


if __name__ == "__main__":
    main()

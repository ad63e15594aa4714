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
from pathlib import Path
from typing import Any

import numpy as np
import other_diagnosers
from PIL import Image
from planted_cases import BASE, CASES, CONTROL_GROUPS, TEACHER, Case

from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Finding
from launcher.insight.measurements import read
from launcher.insight.ratio import Ratio
from launcher.show.table import Table

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"


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
    # what else runs on this machine was not planted
    top = next((finding for finding in before.findings if finding.kind != "noisy_neighbour"), None)
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
    both, expected = Comparison(before, after), top.gain.expected
    obtained, told = both.speedup or both.measured, "" if both.speedup else " (not comparable)"
    if case.kind == "slow_start":
        obtained = Ratio(whole(before) / whole(after), None, None)
    shown = f"at most {top.gain.at_most:.2f}" if expected is None else f"{expected:.2f}"
    near = "-" if expected is None else "yes" if abs(expected / obtained.value - 1) <= 0.25 else "no"
    return [*cells, shown, f"{obtained}{told}", near]


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

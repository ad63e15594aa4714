"""Bottlenecks planted in training scripts that do not use the kit: plain PyTorch, Lightning, transformers.Trainer, and plain PyTorch
on a simulated accelerator. `launcher watch` runs and `launcher diagnose` judges each: is the top finding right, and the line that
it names? `make bench-planted-foreign`.

A run takes some 15 to 60 s; name kinds, and frameworks, to run only those:

    .venv/bin/python tests/benchmarks/planted_foreign.py too_many_workers healthy --framework plain trainer
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import other_diagnosers
from planted_cases import photographs
from planted_foreign_cases import FRAMEWORKS, LINES, SIMULATED, Case, cases
from planted_gains import NEIGHBOUR

from launcher.show.table import Table

LAUNCHER = (sys.executable, "-m", "launcher")

BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that keeps a core busy until its parent ends, in whatever way."""


def command(framework: str, case: Case, data: Path) -> list[str]:
    """How a user would start the script."""
    start = [sys.executable]
    if case.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case.ranks)]
    return [*start, str(FRAMEWORKS[framework]), *([] if framework == SIMULATED else [str(data)]), *options_of(case)]


def options_of(case: Case) -> list[str]:
    """The arguments of the script."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
    given = []
    for name, value in case.arguments.items():
        if value is False:
            continue
        if share := re.fullmatch(r"\{([\d.]+)\}", str(value)):
            value = float(share[1]) * memory / int(case.arguments["steps"])
        given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return given


@contextlib.contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Processes outside the run that would each fill a core. The kernel shares cores among sessions first (autogroup)."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def watched(framework: str, case: Case, data: Path, name: str) -> Path:
    """The folder of a watched run."""
    place = data.parent / name
    place.mkdir()
    threads = {"OMP_NUM_THREADS": str(case.threads)} if case.threads else {}
    environment = {**os.environ, **threads, "LAUNCHER_RUNS": str(place / "runs")}
    environment = {key: value for key, value in environment.items() if not key.startswith("SM_")}
    with neighbours(case.neighbours):
        _done([*LAUNCHER, "watch", "--", *command(framework, case, data)], place, environment)
    return run_in(place)


def run_in(place: Path) -> Path:
    """The folder of the run that was watched there."""
    [run] = [file.parent for file in (place / "runs").glob("*/plan.json")]
    return run


def watched_by(tool: str, case: Case, data: Path, name: str) -> Path:
    """The folder of a run on the simulated accelerator, watched by another tool."""
    place = data.parent / name
    place.mkdir()
    with neighbours(case.neighbours):
        _done(other_diagnosers.on_a_device(tool, FRAMEWORKS[SIMULATED], options_of(case), place), place)
    return place


def findings(framework: str, case: Case, data: Path, name: str) -> list[dict[str, Any]]:
    """The findings in a watched run, worst first."""
    run = watched(framework, case, data, name)
    return json.loads(_done([*LAUNCHER, "diagnose", str(run), "--json"], run))["findings"]


def _done(command: list[str], place: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def addresses(part: Any) -> Iterator[tuple[str, int]]:
    """Every file and line that a finding names."""
    if isinstance(part, dict):
        if isinstance(part.get("file"), str) and isinstance(part.get("line"), int):
            yield part["file"], part["line"]
        for value in part.values():
            yield from addresses(value)
    elif isinstance(part, list):
        for value in part:
            yield from addresses(value)


def code_at(framework: str, file: str, line: int) -> str:
    return (FRAMEWORKS[framework].parent / file).read_text(encoding="utf-8").splitlines()[line - 1].strip()


def row(framework: str, case: Case, data: Path, name: str, tell: bool) -> list[str]:
    """What was planted, what was found, and the line it names."""
    every = findings(framework, case, data, name)
    planted = case.kind == NEIGHBOUR  # else it is what else runs on this machine
    found = [one for one in every if planted or one["kind"] != NEIGHBOUR]
    beside = "yes" if every[:1] != found[:1] else "no"
    if tell:
        print(json.dumps(found, indent=1), flush=True)
    kind = found[0]["kind"] if found else None
    named = [(Path(file).name, line, code_at(framework, file, line)) for file, line in addresses(found[:1])]
    right_line = "-"
    if case.kind in LINES:
        right_line = "yes" if any(code.startswith(LINES[case.kind][framework]) for *_, code in named) else "NO"
    shown = f"{named[0][0]}:{named[0][1]}" if named else "none"
    right = "yes" if kind == case.kind else "NO"
    return [framework, case.kind or "healthy", case.form, kind or "none", right, shown, right_line, beside]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="only these; `healthy` for those without a bottleneck")
    parser.add_argument("--framework", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), help="only these")
    parser.add_argument("--tell", action="store_true", help="print every run's findings too")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        photographs(data)
        for framework in options.framework:
            chosen = [
                case for case in cases(framework) if not options.kinds or (case.kind or "healthy") in options.kinds
            ]
            for number, case in enumerate(chosen):
                try:
                    rows.append(row(framework, case, data, f"{framework}-{number}", options.tell))
                except RuntimeError as error:  # what the others show is not lost
                    print(error, file=sys.stderr)
                    failed = [framework, case.kind or "healthy", case.form, "failed", "NO", "none"]
                    rows.append([*failed, "NO" if case.kind in LINES else "-", "-"])
                print("  ".join(rows[-1]), flush=True)
    print()
    print(Table(["framework", "planted", "form", "finding", "right", "line", "right", "after a neighbour"], rows))
    for column, what in ((4, "finding"), (6, "line")):
        judged = [cells[column] for cells in rows if cells[column] != "-"]
        print(f"{what} right in {judged.count('yes')} of {len(judged)}")
    print(f"first of all a neighbour that was not planted: {sum(cells[-1] == 'yes' for cells in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()

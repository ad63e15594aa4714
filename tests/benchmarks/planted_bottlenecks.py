"""Trains with a bottleneck of each kind planted, diagnoses the run, applies the fix and trains again. `make bench-planted`.

The table lists what was planted, the top finding, its expected gain, the fix's gain, and whether that is inside the range.
Kinds that only a GPU shows run on the simulated accelerator. Last come the figures for launcher/insight/calibration.yaml. A
run takes some 10 to 50 s; name kinds to run only those:

    .venv/bin/python tests/benchmarks/planted_bottlenecks.py too_many_workers teacher_bound

`make bench-planted-others` gives the harsher form of each kind, and the healthy runs, to TraceML, gpuprof and Debugger's rules too.
`make bench-planted-busy` diagnoses all runs while another program keeps a core busy, `--found-only` without one. Kept runs are
judged again in a minute, for example after a change of the rules:

    .venv/bin/python tests/benchmarks/planted_bottlenecks.py --busy 1 --runs kept
    .venv/bin/python tests/benchmarks/planted_bottlenecks.py --busy 1 --again kept
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import engine  # noqa: F401  # finds the entry scripts' modules
import other_diagnosers
from planted_cases import BASE, CASES, CONTROL_GROUPS, TEACHER, Case, photographs
from planted_foreign import run_in, watched, watched_by
from planted_foreign_cases import ON_A_DEVICE, SIMULATED
from planted_foreign_cases import Case as OnADevice
from planted_gains import GAINED, NEIGHBOUR, Row, first_finding, found_in, summary, with_gain
from training.settings.distillation import DistillationSettings
from training.settings.scripts import ClassifierSettings

from launcher.backends import local_hosts
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Finding
from launcher.insight.measurements import read
from launcher.insight.ratio import Ratio
from launcher.insight.speed import start_seconds
from launcher.show.table import Table

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"

SERVERS_END_SECONDS = 120
"""After the trainer has ended, hosts that prepare images with a part of a core have this long to end; then they are killed."""


def train(
    case: Case, settings: Mapping[str, Any], plant: str, data: Path, teacher: Path | None, name: str, tool: str = ""
) -> Path:
    """One run, watched by us or by another tool; returns its folder, of that name."""
    folder = data.parent / name
    folder.mkdir()
    script, kind = ("train_kd", DistillationSettings) if case.distils else ("train_classifier", ClassifierSettings)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
    plant = plant.replace("{slow}", str(total * 0.15 / 60)).replace("{fast}", str(total * 0.25 / 60))
    run = f"{script}.main(read_settings({kind.__name__}))"
    if tool == "gpuprof":
        run = other_diagnosers.GPUPROF.format(**other_diagnosers.gpuprof_places(folder), run=f"    {run}")
    plant += other_diagnosers.TRACEML_STEPS if tool == "TraceML" else ""
    (folder / "planted.py").write_text(
        f"{plant}\nimport {script}\nfrom {kind.__module__} import {kind.__name__}\nfrom training.settings import read_settings\n"
        f"{run}\n"
    )
    places = {"SM_OUTPUT_DATA_DIR": "output", "SM_MODEL_DIR": "model"}
    path = os.pathsep.join([str(ENTRYPOINTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SM_")},
        **{name: str(folder / place) for name, place in places.items()},
        "SM_HPS": json.dumps(dict(settings)),
        "SAGEMAKER_BASE_DIR": str(folder),
        "TRAINING_JOB_NAME": str(folder),  # without it nothing tells the run's processes from other programs
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
    with servers(case.servers, folder, environment) as grouped:
        done = subprocess.run(
            [*start, str(folder / "planted.py")], env=environment | grouped, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"{case.kind} {case.form} {tool}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    remove_groups(folder)
    return folder


def remove_groups(folder: Path) -> None:
    """Remove the control groups of a run's processes when they have ended: Ray's do later than those that started them, or not at all."""
    for root in CONTROL_GROUPS:
        for group in Path(root).glob(f"planted-{folder.parent.name}-{folder.name}-*"):
            until = time.monotonic() + SERVERS_END_SECONDS
            while left := (group / "cgroup.procs").read_text().split():
                if time.monotonic() > until:
                    for process in left:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(process), signal.SIGKILL)
                time.sleep(0.1)
            group.rmdir()


@contextlib.contextmanager
def servers(count: int, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Hosts that prepare a run's images, from its start to its end; yields the run's additional environment."""
    if not count:
        yield {}
        return
    port, reservation = local_hosts.servers_port(2)
    hosts = [f"127.0.0.{number + 1}" for number in range(1 + count)]
    groups = {
        name: {"instance_group_name": name, "hosts": listed}
        for name, listed in (("trains", hosts[:1]), ("serves", hosts[1:]))
    }
    grouped = {
        "SM_CURRENT_HOST": hosts[0],
        "SM_HOSTS": json.dumps(hosts),
        "SM_INSTANCE_GROUPS_DICT": json.dumps(groups),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_distribution_instance_groups": ["trains"]}),
        **port,
    }
    processes = []
    for host in hosts[1:]:
        with open(folder / f"{host}.log", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(folder / "planted.py")],
                    env={**environment, **grouped, "SM_CURRENT_HOST": host},
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        yield grouped
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its images have been trained on
                process.wait(SERVERS_END_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        assert reservation is not None
        reservation.close()


def base(case: Case) -> dict[str, Any]:
    values = {**BASE, **case.settings}
    if case.distils:
        values.pop("model")
    return values


def changed(case: Case, top: Finding) -> Mapping[str, Any] | None:
    """The run's settings after the fix; None: there is nothing to apply."""
    if case.fixed is not None:
        return case.fixed
    keys = top.fixes[0].keys
    settings = {key.removeprefix("hyperparameters."): value for key, value in keys.items()}
    return settings if settings and all(key.startswith("hyperparameters.") for key in keys) else None


def whole(run: Diagnosis) -> float:
    """Seconds of a run including its start, which counts in no speed."""
    start = start_seconds(run.evidence)
    assert start is not None, "the scripts record it"
    return start + run.evidence.training_seconds


def row(case: Case, data: Path, teacher: Path | None, options: argparse.Namespace) -> Row | list[str]:
    """What was planted, found and gained; with `--others`, what all tools find."""
    name = name_of(case)
    folder = data.parent / f"{name}-before"
    if not options.again:
        train(case, base(case), case.plant, data, teacher, folder.name)
    before = Diagnosis(read(str(folder)))
    top = first_finding(before)
    if options.tell:
        print(before, end="\n\n", flush=True)
    found = found_in(before, case.kind, case.form)
    if options.others:
        theirs = watched_by_others(
            lambda tool: train(case, base(case), case.plant, data, teacher, f"{name}-{tool}", tool)
        )
        return found.cells[:4] + other_diagnosers.cells(read(str(folder)), case.kind, *theirs)
    if options.found_only:
        return found
    if found.right and top is not None and case.servers:
        after_case = replace(case, servers=int(str(top.fixes[0].value).split()[0]))  # "2 serving hosts instead of 1"
        try:
            after = Diagnosis(read(str(train(after_case, base(case), case.plant, data, teacher, f"{name}-after"))))
        except RuntimeError as error:  # this machine cannot start them; the finding stands
            print(error, file=sys.stderr)
            return found
        return with_gain(found, top.gain, before, after)
    change = changed(case, top) if found.right and top is not None else None
    if change is None or top is None or top.gain is None:
        return found
    fixed = {**base(case), **change}
    images = fixed["max_steps"] * base(case)["global_batch_size"]
    fixed["max_steps"] = images // fixed["global_batch_size"]
    plant = "" if case.fixed is not None else case.plant
    after = Diagnosis(read(str(train(case, fixed, plant, data, teacher, f"{name}-after"))))
    if case.kind == "slow_start":
        return replace(found, gain=top.gain, obtained=Ratio(whole(before) / whole(after), None, None))
    if case.kind == "cpu_throttled":  # the fix is that the runs have other cores
        return replace(found, gain=top.gain, obtained=Comparison(before, after).measured)
    return with_gain(found, top.gain, before, after)


def watched_by_others(run: Callable[[str], Path]) -> list[Path | None]:
    """The folders of the runs that TraceML and gpuprof watched; None: such a run failed."""
    folders: list[Path | None] = []
    for tool in ("TraceML", "gpuprof"):
        try:
            folders.append(run(tool))
        except RuntimeError as error:  # what the others show is not lost
            print(error, file=sys.stderr)
            folders.append(None)
    return folders


def row_on_a_device(case: OnADevice, data: Path, options: argparse.Namespace) -> Row | list[str]:
    """The same on the simulated accelerator."""
    name = name_of(case)
    place = data.parent / f"{name}-before"
    folder = run_in(place) if options.again else watched(SIMULATED, case, data, place.name)
    before = Diagnosis(read(str(folder)))
    top = first_finding(before, outside=case.neighbours > 0)
    if options.tell:
        print(before, end="\n\n", flush=True)
    found = found_in(before, case.kind, case.form, outside=case.neighbours > 0)
    if options.others:
        theirs = watched_by_others(lambda tool: watched_by(tool, case, data, f"{name}-{tool}"))
        return found.cells[:4] + other_diagnosers.cells(read(str(folder)), case.kind, *theirs)
    if options.found_only:
        return found
    fixed = None if top is None or not found.right else case.after(top.fixes[0])
    if fixed is None or top is None or top.gain is None:
        return found
    after = Diagnosis(read(str(watched(SIMULATED, fixed, data, f"{name}-after"))))
    if case.kind == NEIGHBOUR:  # the fix is that other programs leave the runs other cores
        return replace(found, gain=top.gain, obtained=Comparison(before, after).measured)
    return with_gain(found, top.gain, before, after)


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
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="beside N other processes that compute; no fix is applied"
    )
    parser.add_argument("--found-only", action="store_true", help="apply no fix")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs in this new folder")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="judge the runs that --runs kept there; no fix")
    options = parser.parse_args()
    # what else runs changes between a run and its fix; of kept runs there is none with it
    options.found_only |= options.busy > 0 or options.again is not None
    if options.again and (options.others or options.runs):
        parser.error("--again makes no runs: leave out --runs and --others")
    chosen = chosen_of(CASES, options)
    on_a_device = chosen_of(ON_A_DEVICE, options)
    if not options.again and os.geteuid() and any(case.sets_a_quota for case in chosen):
        left_out = ", ".join(sorted({str(case.kind) for case in chosen if case.sets_a_quota}))
        chosen = [case for case in chosen if not case.sets_a_quota]
        print(f"not run, since only root may set a quota: {left_out}", file=sys.stderr)
    rows: list[Row | list[str]] = []
    if options.runs:
        options.runs.mkdir(parents=True)
    kept = options.again or options.runs
    with (
        contextlib.nullcontext(kept.absolute()) if kept else tempfile.TemporaryDirectory() as place,
        neighbours(0 if options.again else options.busy),
    ):
        data, teacher = Path(place) / "data", None
        if not options.again:
            photographs(data)
        if not options.again and any(case.distils for case in chosen):
            settings = {**BASE, **TEACHER, "max_steps": 1, "image_size": 64}
            teacher = train(Case(None, "", TEACHER), settings, "", data, None, "teacher") / "model"
        runs = [(case, partial(row, case, data, teacher, options)) for case in chosen]
        runs += [(case, partial(row_on_a_device, case, data, options)) for case in on_a_device]
        for case, run in runs:
            try:
                rows.append(run())
            except RuntimeError as error:  # what the others show is not lost
                print(error, file=sys.stderr)
                failed = Row(case.kind, case.form, "failed")
                rows.append(failed.cells[:4] + ["-"] * 6 if options.others else failed)
            print("  ".join(_cells(rows[-1])), flush=True)
    reported = [cell for tool in other_diagnosers.ACCEPTED for cell in (tool, "right")] if options.others else GAINED
    print()
    print(Table(["planted", "form", "finding", "right", *reported], [_cells(one) for one in rows]))
    if not options.others:
        print(summary([one for one in rows if isinstance(one, Row)], busy=options.busy > 0))
        return
    print(f"\nright: this kit {_share(rows, 3)}")
    for number, tool in enumerate(other_diagnosers.ACCEPTED):
        print(f"right: {tool} {_share(rows, 5 + 2 * number)}")


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Programs outside the runs, each computing all the time."""
    computing = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in computing:
            process.kill()
            process.wait()


def name_of(case: Case | OnADevice) -> str:
    """Name of a case's run folders, without the suffix of a single run."""
    where = "simulated-" if isinstance(case, OnADevice) else ""
    return where + re.sub(r"[^a-z0-9_.]+", "-", f"{case.kind or 'healthy'}-{case.form}".lower())


def chosen_of(cases: Sequence[Any], options: argparse.Namespace) -> list[Any]:
    chosen = [case for case in cases if not options.kinds or (case.kind or "healthy") in options.kinds]
    if options.again:
        chosen = [case for case in chosen if (options.again / f"{name_of(case)}-before").is_dir()]
    if not options.harsher:
        return chosen
    harsher = {case.kind: case for case in chosen}
    return [case for case in chosen if case.kind is None or case is harsher[case.kind]]


def _cells(one: Row | list[str]) -> list[str]:
    return one.cells if isinstance(one, Row) else one


def _share(rows: Sequence[Row | list[str]], column: int) -> str:
    return f"{sum(_cells(cells)[column] == 'yes' for cells in rows)} of {len(rows)}"


if __name__ == "__main__":
    main()

"""How long the launcher itself takes: `make bench`. CPU seconds of whole processes, commands in alternation, median of 15.

As if a user has run it before: modules are compiled, even if this shell keeps Python from storing them.

Targets on 2 cores: `import launcher` at most 0.2 s of CPU; `launcher plan` at most 0.3 s. In a store of 10,000 runs `launcher runs` under
1 s; `launcher show` of a run, of a job's latest run, and of an unknown name, under 0.3 s more than `launcher --help`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROUNDS = 15
RUNS = 10_000


def measure(command: list[str]) -> tuple[float, float]:
    """CPU seconds and wall seconds of one process."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, time.perf_counter() - start


def fill(store: Path) -> str:
    """Make a store of RUNS runs of 50 jobs; returns the name of one."""
    for number in range(RUNS):
        planned = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=number)
        job = {"name": f"job-{number % 50}", "script": "train_kd.py", "hyperparameters": {"epochs": number}}
        run = store / f"{job['name']}-{planned:%Y%m%d-%H%M%S}-abcd"
        run.mkdir()
        plan = {"name": run.name, "planned": planned.isoformat(), "backend": "process", "job": job}
        plan |= {"hosts": [{"name": "algo-1"}], "source": "/source", "channels": {}}
        (run / "plan.json").write_text(json.dumps(plan))
        (run / "outcome.json").write_text(json.dumps({"state": "Completed", "seconds": 1.5, "host_seconds": 1.5}))
        output = run / "hosts/algo-1/opt/ml/output/data/algo-1"
        output.mkdir(parents=True)
        (output / "result.json").write_text(json.dumps({"validation_accuracy": 0.9}))
    return run.name


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "validation"):
            (Path(folder) / split / "0").mkdir(parents=True)
            for number in range(64):  # a batch
                (Path(folder) / split / f"0/{number}.jpg").touch()
        inputs = [f"inputs.{split}.folder={folder}/{split}" for split in ("train", "validation")]
        store = Path(folder, "runs")
        store.mkdir()
        name = fill(store)
        os.environ["LAUNCHER_RUNS"] = str(store)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        launcher = [sys.executable, "-m", "launcher"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "import launcher": [sys.executable, "-c", "import launcher"],
            "launcher --help": [*launcher, "--help"],
            "plan KT on aws": [*launcher, "plan", "configs/kt_food_tag.yaml", "--on", "aws"],
            "launcher plan": [*launcher, "plan", "configs/quickstart_teacher.yaml", *inputs],
            "launcher runs": [*launcher, "runs"],
            "runs --all": [*launcher, "runs", "--all"],
            "show NAME": [*launcher, "show", name],
            "show JOBNAME": [*launcher, "show", "job-7"],
            "an unknown name": [*launcher, "show", "no-such-run"],
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for command in commands.values():
            measure(command)  # compiles
        for _ in range(ROUNDS):
            for name, command in commands.items():
                seconds[name].append(measure(command))
    print(
        f"{'command':<16} {'CPU median':>10} {'min':>6} {'max':>6}   {'wall median':>11}   (seconds, {ROUNDS} rounds in alternation)"
    )
    for name, pairs in seconds.items():
        cpu, wall = zip(*pairs, strict=True)
        print(
            f"{name:<16} {statistics.median(cpu):>10.3f} {min(cpu):>6.3f} {max(cpu):>6.3f}   {statistics.median(wall):>11.3f}"
        )


if __name__ == "__main__":
    main()

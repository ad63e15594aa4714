"""How long the launcher itself takes: `make bench`. CPU seconds of whole processes, commands in alternation, median of 15.

Targets on 2 cores: `import launcher` under 0.3 s of CPU; `launcher plan` under 1.5 s.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROUNDS = 15


def measure(command: list[str]) -> tuple[float, float]:
    """CPU seconds and wall seconds of one process."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "validation"):
            (Path(folder) / split / "0").mkdir(parents=True)
        inputs = [f"inputs.{split}.folder={folder}/{split}" for split in ("train", "validation")]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "import launcher": [sys.executable, "-c", "import launcher"],
            "plan KT on aws": [sys.executable, "-m", "launcher", "plan", "configs/kt_food_tag.yaml", "--on", "aws"],
            "launcher plan": [sys.executable, "-m", "launcher", "plan", "configs/quickstart_teacher.yaml", *inputs],
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
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

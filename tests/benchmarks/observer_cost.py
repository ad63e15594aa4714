"""What the observer costs a training step: one script with it and one without, in turn. `make bench-insight`.

Two processes run the same loop, a few steps at a time and never at once: a batch of a DataLoader, forward, backward, optimizer. The
short step trains one number, so that only the hooks make the difference; the long ones compute for about 5 and 50 ms on one
thread. CPU time is that of the whole process, with the thread that samples lines: medians of the differences of all rounds of several
such pairs, since two processes of one script differ by more than the observer costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"

PHASES = 4
"""Of a step: waiting for data, forward, backward, optimizer."""

START = "from launcher_observer.start import start; start()"

LOOP = """
import json, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
torch.set_num_threads(1)
width, batch = json.loads(sys.argv[1])
model = nn.Linear(width, width)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
samples = torch.randn(batch * 4, width)

class Ready(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        first = index % 4 * batch
        return samples[first : first + batch]

loader = DataLoader(Ready(), batch_size=None)

def steps(count):
    while True:
        for inputs in loader:
            loss = model(inputs).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            count -= 1
            if not count:
                return

for line in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    steps(int(line))
    print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall]), flush=True)
"""


class Loop:
    """The script in its own process, which waits between calls."""

    def __init__(self, folder: Path, step: tuple[int, int], *, observed: bool):
        script = folder / "loop.py"
        script.write_text((START if observed else "") + LOOP)
        environment = {**os.environ, "PYTHONPATH": str(ENTRYPOINTS), "LAUNCHER_OBSERVER_FOLDER": str(folder)}
        pipe = subprocess.PIPE
        command = [sys.executable, str(script), json.dumps(step)]
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def __call__(self, steps: int) -> tuple[float, float]:
        """CPU and wall seconds of a step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        cpu, wall = json.loads(self.process.stdout.readline())
        return cpu / steps, wall / steps

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(step: tuple[int, int], rounds: int, seconds: float) -> list[tuple[float, float, float]]:
    """For each round of one pair, in seconds per step: CPU without the observer, CPU that it adds, and wall time that it adds."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, kind) for kind in ("plain", "observed")]
        for folder in folders:
            folder.mkdir()
        loops = [Loop(folder, step, observed=folder.name == "observed") for folder in folders]
        warm = [loop(20) for loop in loops]
        count = max(2, int(seconds / warm[0][1]))
        time.sleep(1)  # the system monitor's start
        found: list[list[tuple[float, float]]] = [[], []]
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                found[which].append(loops[which](count))
        for loop in loops:
            loop.close()
        assert list(folders[1].rglob("timeline-0.jsonl")) and not list(folders[0].rglob("timeline-0.jsonl"))
    return [(theirs[0], ours[0] - theirs[0], ours[1] - theirs[1]) for theirs, ours in zip(*found, strict=True)]


def compared(step: tuple[int, int], pairs: int, rounds: int, seconds: float) -> tuple[float, float, float]:
    """The same for all rounds of several pairs: medians, in microseconds."""
    found = [one for _ in range(pairs) for one in measured(step, rounds, seconds)]
    plain, more, wall = (1e6 * statistics.median(values) for values in zip(*found, strict=True))
    return plain, more, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="of processes")
    parser.add_argument("--rounds", type=int, default=30, help="of each pair")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each loop in a round")
    asked = parser.parse_args()
    print(
        f"this machine, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; {asked.pairs} pairs, {asked.rounds} rounds\n"
    )
    print("| step | µs without | µs more | of them a phase | % | µs more by the wall clock |")
    print("| ---: | ---------: | ------: | --------------: | -: | -----------------------: |")
    for name, step in (("one number", (1, 1)), ("about 5 ms", (512, 448)), ("about 50 ms", (2048, 448))):
        plain, more, wall = compared(step, asked.pairs, asked.rounds, asked.seconds)
        print(
            f"| {name} | {plain:.0f} | {more:.1f} | {more / PHASES:.2f} | {100 * more / plain:.2f} | {wall:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

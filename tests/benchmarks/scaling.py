"""How much speed two processes lose by training together. `make bench-training`.

Two processes of one thread each train vit_tiny_patch16_224 at 224 px: in turn each for itself, at the same time, and both
together over gloo, with the same batch a process. So the same cores do the same work, and what differs is the exchange of
gradients and the waiting for each other. A round's ratio is the images/s of both together over those of both for themselves.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from engine import ALONE, STUDENT, TEACHER, Engine, machine, model, noise, open_engine, ratio, settings, table, teacher
from training.distributed import World, process_group

PROCESSES = 2


def engine(folder: Path, world: World, asked: argparse.Namespace) -> Engine:
    """A run of this rank's own, or one with the other."""
    share = asked.batch * world.size
    values = {"precision": asked.precision, "global_batch_size": share, "gradient_compression": asked.compression}
    values |= {"static_graph": asked.static_graph} if world.size > 1 else {"gradient_compression": "none"}
    frozen = None
    if asked.teacher:
        frozen = teacher(TEACHER, "bf16")
    else:
        values["hard_label_weight"] = 1.0
    return open_engine(folder, noise(2 * share), model(STUDENT, seed=0), frozen, settings(**values), world)


def rank(asked: argparse.Namespace) -> None:
    """One of the processes; rank 0 prints."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, process_group() as world:
        apart, together = (engine(Path(name) / str(one.size), one, asked) for one in (ALONE, world))
        kinds = {"apart": apart, "together": together}
        for one in kinds.values():
            one.steps(3)
        taken: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for number in range(asked.rounds):
            for kind in [*kinds][:: 1 if number % 2 else -1]:
                world.any(False)  # both begin at once
                cpu, wall = time.process_time(), time.perf_counter()
                kinds[kind].steps(asked.steps)
                own = torch.tensor([[time.perf_counter() - wall, time.process_time() - cpu]], dtype=torch.float64)
                taken[kind].append((world.gather_rows(own) / asked.steps).tolist())
        if world.is_first:
            report(taken, asked)


def report(taken: dict[str, list[list[list[float]]]], asked: argparse.Namespace) -> None:
    """Images/s are the sum over both processes; the CPU time that of a process's step."""
    speeds = {kind: [sum(asked.batch / wall for wall, _ in each) for each in rounds] for kind, rounds in taken.items()}
    cpu = {kind: [statistics.mean(used for _, used in each) for each in rounds] for kind, rounds in taken.items()}
    rows = [("two processes", "images/s", "CPU s a step", "images/s together/apart", "CPU together/apart")]
    for kind in taken:
        found = ["{:.3f} ({:.3f}…{:.3f})".format(*ratio(values[kind], values["apart"])) for values in (speeds, cpu)]
        rows.append((kind, f"{statistics.median(speeds[kind]):.2f}", f"{statistics.median(cpu[kind]):.3f}", *found))
    what = (
        f"{STUDENT}, {'with teacher' if asked.teacher else 'alone'}, {asked.precision}, batch {asked.batch} a process"
    )
    print(
        f"{what}; {machine(1)} a process\n{asked.rounds} rounds of {asked.steps} step(s) of each in turn; medians, quartiles in brackets\n"
    )
    print(table(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="of each in a round")
    parser.add_argument("--batch", type=int, default=32, help="of each process")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compression", choices=("none", "bf16"), default="none")
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--teacher", action="store_true", help="a bf16 teacher too")
    asked = parser.parse_args()
    if "RANK" in os.environ:
        rank(asked)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    places = [{"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(PROCESSES)]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **common, **place}) for place in places]
    sys.exit(max(abs(process.wait()) for process in ranks))


if __name__ == "__main__":
    main()

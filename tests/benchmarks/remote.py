"""Images that another host prepares, on two cores: the server on one, the trainer on the other. `make bench-remote`.

Both hosts are on this machine, 127.0.0.1 and 127.0.0.2, each with its own Ray node bound to its core. Images are
photographs of 500 x 375 pixels; views have 224. What is compared takes turns, round after round:

    server      images/s of a server, beside the same core without Ray: a process of one thread that keeps nothing
    trainer     what an image costs the trainer's core: in the process that takes the batches, and in Ray's own
    scale       the same extrapolated to 1,024 training processes and 512 servers, with the cost of a server lookup on the head
    job         train_classifier.py on one core alone, and with a server on the other
    trainers    two trainers on one server, beside one: what each gets, byte for byte, and how fast

    .venv/bin/python tests/benchmarks/remote.py --only server trainer
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine import ROOT, machine, progress, ratio, table
from planted_cases import photographs
from remote_hosts import (
    BATCH,
    FORKED,
    SERVER,
    SERVER_CORE,
    TRAINER_CORE,
    TRAINERS,
    Child,
    Measured,
    alone,
    bare_socket,
    free_port,
    serving_host,
    trainer,
)
from remote_scale import GPUS, HOSTS, SERVERS, of_head, reckoned

SIZE = 224

AS_LOCAL, TRAINER_MS, SPEED_UP, SHARED = 0.95, 0.1, 1.6, 0.9
"""Targets: a server's images/s over its core's alone; CPU ms per image; a job's speed-up; two trainers' images/s over one's."""

PARTS = ("server", "trainer", "scale", "job", "trainers")

JOB = {
    "model": "mobilenetv3_small_050",
    "image_size": 96,
    "augmentation_load": 3,
    "global_batch_size": 32,
    "min_crop_area": 0.4,
    "horizontal_flip": True,
    "epochs": 100_000,
    "max_steps": 120,
    "log_every": 5,
    "evaluate_every": 100_000,
    "learning_rate": 1e-4,
}
"""Its images take slightly longer than its model, so both cores have work."""

WARM_STEPS = 40
"""Before a job's speed counts: Ray's agents are still starting."""

Row = tuple[str, str, str, str]


def row(what: str, found: str, target: str, reached: bool) -> Row:
    return what, found, target, "yes" if reached else "NO"


def spread(first: Sequence[float], second: Sequence[float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*ratio(first, second))


# -- a server and one trainer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flow:
    """Measurements of a server and one trainer, round by round."""

    served: list[Measured]
    own: list[Measured]
    """The server's core alone."""
    sent: list[Measured]
    """A bare socket's two ends."""
    received: list[Measured]
    rest: Measured
    """Without requests."""


def flow_of(data: Path, port: int, asked: argparse.Namespace) -> Flow:
    with hosts(data, port, trainers=1) as (here, first, *_), bare_sockets() as (sender, receiver):
        served: list[Measured] = []
        own: list[Measured] = []
        sent: list[Measured] = []
        received: list[Measured] = []
        first.ask("flow", asked.batches), here.ask("flow", asked.batches)
        for number in range(asked.rounds):
            works = [(served, first), (own, here)]
            for found, child in works[:: 1 if number % 2 else -1]:
                found.append(child.ask("flow", asked.batches))
                time.sleep(1)  # what is in flight arrives
            sender.send("flow", asked.batches), receiver.send("flow", asked.batches)
            sent.append(sender.answer()), received.append(receiver.answer())
            progress(f"round {number + 1} of {asked.rounds}")
        return Flow(served, own, sent, received, first.ask("rest", 5))


def of_flow(flow: Flow) -> Iterator[Row]:
    """A server beside its core alone, and what its images cost the trainer."""
    flows, own, rest = flow.served, flow.own, flow.rest
    idle = rest.server.ray / rest.wall
    rows = [("", "images/s", "CPU ms an image", "of it Ray's own processes")]
    costs = [
        [1000 * (one.server.process + one.server.ray) / one.images for one in flows],
        [1000 * one.cpu / one.images for one in own],
    ]
    ray = [1000 * one.server.ray / one.images for one in flows]
    rows.append(
        ("a server", f"{middle(one.speed for one in flows):.0f}", f"{middle(costs[0]):.3f}", f"{middle(ray):.3f}")
    )
    rows.append(("the same core alone", f"{middle(one.speed for one in own):.0f}", f"{middle(costs[1]):.3f}", "-"))
    bare = [1000 * one.cpu / one.images for one in flow.sent]
    rows.append(("a bare socket that sends the same bytes", "-", f"{middle(bare):.3f}", "-"))
    print(f"\nA server's core\n\n{table(rows)}\n\nAt rest Ray's processes take {100 * idle:.1f} % of it.", flush=True)
    # at rest they take a part of the core from the other side of the comparison too, which would have it without them
    speeds = [one.speed for one in flows], [one.speed / (1 - idle) for one in own]
    yield row(
        "server, images/s over the same core's alone",
        spread(*speeds),
        f"{AS_LOCAL}",
        ratio(*speeds)[0] >= AS_LOCAL,
    )
    yield row(
        "the same by CPU time an image",
        spread(costs[1], costs[0]),
        f"{AS_LOCAL}",
        ratio(costs[1], costs[0])[0] >= AS_LOCAL,
    )
    process = [1000 * one.cpu / one.images for one in flows]
    raylet, others = ([1000 * getattr(one.trainer, kind) / one.images for one in flows] for kind in ("raylet", "rest"))
    rows = [("", "CPU ms an image"), ("the process that takes the batches", f"{middle(process):.3f}")]
    bare = [1000 * one.cpu / one.images for one in flow.received]
    rows += [("a bare socket that receives the same bytes", f"{middle(bare):.3f}")]
    rows += [("raylet", f"{middle(raylet):.3f}"), ("Ray's other processes", f"{middle(others):.3f}")]
    busy = rest.trainer.ray / rest.wall
    print(
        f"\nThe trainer's core\n\n{table(rows)}\n\nAt rest Ray's processes take {100 * busy:.1f} % of it, "
        f"the process itself {100 * rest.cpu / rest.wall:.1f} %.",
        flush=True,
    )
    yield row(
        "trainer, CPU ms an image in its process",
        f"{middle(process):.3f} ({min(process):.3f} to {max(process):.3f})",
        f"{TRAINER_MS}",
        middle(process) <= TRAINER_MS,
    )


def scale(flow: Flow, folder: Path) -> None:
    """These figures extrapolated to a large cluster."""
    few, many = of_head(free_port(), folder)
    found = reckoned(
        few,
        many,
        server_ms=middle(1000 * (one.server.process + one.server.ray) / one.images for one in flow.served),
        trainer_ms=middle(1000 * one.cpu / one.images for one in flow.served),
        host_ms=middle(1000 * one.trainer.ray / one.images for one in flow.served),
        kilobytes=3 * SIZE**2 / 1000,
    )
    print(f"\n{HOSTS} hosts of {GPUS} GPUs and {SERVERS} servers, on paper\n\n{found}", flush=True)


def middle(values: Iterator[float] | Sequence[float]) -> float:
    return statistics.median(values)


@contextmanager
def hosts(data: Path, port: int, trainers: int) -> Iterator[list[Child]]:
    """A process alone on the server's core, and the trainers; their servers live as long as the context."""
    children = [Child(SERVER_CORE, alone, data, SIZE)]
    serving = Child(SERVER_CORE, serving_host, port, data)
    try:
        for host in TRAINERS[:trainers]:
            children.append(Child(TRAINER_CORE, trainer, host, port, data, SIZE))
        node = serving.answer()
        for child in children[1:]:
            child.send(node)
        yield children
    finally:
        for child in [*children, serving][::-1]:
            child.end()


@contextmanager
def bare_sockets() -> Iterator[tuple[Child, Child]]:
    """Two processes joined by a TCP connection: the first sends on the server's core, the second receives on the trainer's."""
    port = free_port()
    sender = Child(SERVER_CORE, partial(bare_socket, sends=True), port, SIZE)
    receiver = Child(TRAINER_CORE, partial(bare_socket, sends=False), port, SIZE)
    try:
        receiver.send(sender.answer())
        yield sender, receiver
    finally:
        sender.end(), receiver.end()


# -- two trainers ------------------------------------------------------------------------------------------------------


def of_trainers(data: Path, port: int, asked: argparse.Namespace) -> Iterator[Row]:
    """Two trainers, each with its own epoch, one after the other and both at once."""
    views, epochs = (1, 1001), asked.batches
    with hosts(data, port, trainers=2) as (here, *both):
        for child, view in zip(both, views):
            child.ask("epoch", 4, view)
        proofs = [here.ask("digest", epochs, view) for view in views]
        same, single, together, shares = True, [], [], []
        for number in range(asked.rounds):
            for pair in (True, False)[:: 1 if number % 2 else -1]:
                if pair:
                    for child, view in zip(both, views):
                        child.send("epoch", epochs, view)
                    found = [child.answer() for child in both]
                    together.append(2 * epochs * BATCH / max(seconds for _, seconds in found))
                    shares.append(min(seconds for _, seconds in found) / max(seconds for _, seconds in found))
                else:
                    found = [child.ask("epoch", epochs, view) for child, view in zip(both, views)]
                    single.append(2 * epochs * BATCH / sum(seconds for _, seconds in found))
                same &= [proof for proof, _ in found] == proofs
                time.sleep(1)
            progress(f"round {number + 1} of {asked.rounds}")
    rows = [("images/s", ""), ("one trainer", f"{middle(single):.0f}"), ("two trainers", f"{middle(together):.0f}")]
    print(
        f"\nTwo trainers on one server\n\n{table(rows)}\n\nThe first had its epoch after {100 * middle(shares):.0f} % of the other's time.",
        flush=True,
    )
    yield row(
        "two trainers, images/s over one's", spread(together, single), f"{SHARED}", ratio(together, single)[0] >= SHARED
    )
    yield row(
        "two trainers, batches as without servers, byte for byte", "equal" if same else "DIFFERENT", "equal", same
    )


# -- a job -------------------------------------------------------------------------------------------------------------


def of_job(data: Path, port: int, asked: argparse.Namespace) -> Iterator[Row]:
    """A whole training, on one core and on two."""
    kinds: dict[str, Mapping[str, Any]] = {
        "one core, no workers": {"worker_type": "threads", "num_workers": 0},
        "one core, a thread": {"worker_type": "threads", "num_workers": 1},
        "a server on the other": {"worker_type": "remote"},
    }
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for number in range(asked.job_rounds):
        for kind in [*kinds][:: 1 if number % 2 else -1]:
            speed, waits, whole = train(data, port, {**JOB, **kinds[kind]})
            found[kind].append((speed, waits, whole))
            print(f"{kind}: {speed:.1f} images/s, {100 * waits:.0f} % of a step waiting, {whole:.0f} s", flush=True)
        progress(f"round {number + 1} of {asked.job_rounds}")
    rows = [("", "images/s", "of a step waiting for images", "whole run, s")]
    for kind, runs in found.items():
        speed, waits, whole = (middle(column) for column in zip(*runs))
        rows.append((kind, f"{speed:.0f}", f"{100 * waits:.0f} %", f"{whole:.0f}"))
    print(f"\nA job: {JOB['model']} on views of {JOB['image_size']} px\n\n{table(rows)}", flush=True)
    speeds = {kind: [speed for speed, _, _ in runs] for kind, runs in found.items()}
    alone, best = max(
        (middle(values), kind) for kind, values in speeds.items() if kinds[kind]["worker_type"] != "remote"
    )
    remote = speeds["a server on the other"]
    yield row(
        f"job, speed-up over {best}",
        spread(remote, speeds[best]),
        f"{SPEED_UP}",
        ratio(remote, speeds[best])[0] >= SPEED_UP,
    )


def train(data: Path, port: int, settings: Mapping[str, Any]) -> tuple[float, float, float]:
    """Images/s after the first steps, the share of those steps spent waiting for images, and seconds of the whole run."""
    cores = {TRAINERS[0]: TRAINER_CORE} | ({SERVER: SERVER_CORE} if settings["worker_type"] == "remote" else {})
    groups = {name: {"instance_group_name": name, "hosts": [host]} for name, host in zip(("trainer", "servers"), cores)}
    with tempfile.TemporaryDirectory(dir=data.parent) as name:
        started, processes = time.perf_counter(), []
        for host, core in cores.items():
            folder = Path(name) / host
            folder.mkdir()
            environment = {
                **{key: value for key, value in os.environ.items() if not key.startswith("SM_")},
                "PYTHONPATH": str(ROOT / "entrypoints"),
                "SM_CURRENT_HOST": host,
                "SM_HOSTS": json.dumps([*cores]),
                "SM_INSTANCE_GROUPS_DICT": json.dumps(groups),
                "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_distribution_instance_groups": ["trainer"]}),
                "SM_HPS": json.dumps(settings),
                "SM_MODEL_DIR": str(folder / "model"),
                "SM_OUTPUT_DATA_DIR": str(folder / "output"),
                "SAGEMAKER_BASE_DIR": str(folder),
                **{f"SM_CHANNEL_{part.upper()}": str(data / part) for part in ("train", "validation")},
                "TRAINING_SERVERS_PORT": str(port),
            }
            command = ["taskset", "-c", str(core), sys.executable, str(ROOT / "entrypoints" / "train_classifier.py")]
            with open(folder / "log", "wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            codes = [processes[0].wait()]
            whole = time.perf_counter() - started
            codes += [process.wait() for process in processes[1:]]
        finally:
            for process in processes:
                process.kill() if process.poll() is None else None
        if any(codes):
            raise RuntimeError("\n".join((Path(name) / host / "log").read_text()[-3000:] for host in cores))
        lines = (Path(name) / TRAINERS[0] / "output" / TRAINERS[0] / "timeline-0.jsonl").read_text().splitlines()
    windows = [line for line in map(json.loads, lines) if line["kind"] == "steps" and line["step"] > WARM_STEPS]
    steps = [line["extra"]["steps"] for line in windows]
    seconds, waits = (
        sum(n * line["seconds"][kind] for n, line in zip(steps, windows)) for kind in ("step", "data_wait")
    )
    return sum(steps) * settings["global_batch_size"] / seconds, waits / seconds, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=24, help=f"of {BATCH} images, in a round")
    parser.add_argument("--job-rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ray's processes end with this one
    os.environ["TRAINING_JOB_NAME"] = f"bench-remote-{os.getpid()}"
    print(machine(1), flush=True)
    print(
        f"{asked.rounds} rounds, {asked.job_rounds} of the job; medians, in brackets quartiles of the rounds' ratios",
        flush=True,
    )
    rows: list[Row] = [("", "measured", "target", "reached")]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        writer = FORKED.Process(target=photographs, args=(data,))
        writer.start(), writer.join()
        if {"server", "trainer", "scale"} & {*asked.only}:
            flow = flow_of(data, free_port(), asked)
            rows += of_flow(flow)
            if "scale" in asked.only:
                scale(flow, Path(folder))
        if "job" in asked.only:
            rows += of_job(data, free_port(), asked)
        if "trainers" in asked.only:
            rows += of_trainers(data, free_port(), asked)
    print(f"\nTargets\n\n{table(rows)}")


if __name__ == "__main__":
    main()

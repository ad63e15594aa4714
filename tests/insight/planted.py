"""Makes the measurements of runs with a bottleneck of a known kind, milder or harsher, and of healthy ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from launcher.insight.measurements import Host, Measurements, Series, Stall, Steps
from launcher.insight.phases import NO_PHASE

BEGAN = 1_800_000_000.0
"""Unix seconds of the first step's beginning."""


def plant(
    *,
    phases: Mapping[str, float] | None = None,
    ranks: Mapping[int, Mapping[str, float]] | int = 1,
    ranks_per_host: int = 8,
    steps: int = 200,
    log_every: int = 10,
    steps_per_epoch: int = 50,
    gap: float = 0.0,
    noise: float = 0.05,
    cores: int = 8,
    busy: float = 2.0,
    saturated: int = 0,
    io_wait: float = 0.0,
    usable: float | None = None,
    throttled: float | None = 0.0,
    pressure: float | None = None,
    gpu: float | None = None,
    gpus: list[float] | None = None,
    gpu_memory: float = 70.0,
    gpu_memory_growth: float = 0.0,
    memory: float = 40.0,
    memory_growth: float = 0.0,
    disk: float = 5e6,
    checkpoint: tuple[int, float] | None = None,
    evaluate: tuple[int, float] | None = None,
    slow_steps: Mapping[int, tuple[str, float]] | None = None,
    epoch_start: float = 0.0,
    cpu_seconds: float | None = None,
    worker_cpu_seconds: float | None = None,
    servers: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    system: bool = True,
    seconds: float = 60.0,
    interval: float = 0.5,
    not_measured: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Measurements:
    """The measurements of one run.

    Args:
        phases: seconds a step of each phase; None: a run whose steps were not timed.
        ranks: how many, or what differs on each from `phases`; NO_PHASE in place of the gap.
        gap: seconds of a step that lie in no phase.
        noise: relative standard deviation of each logged window's phases and each sample.
        pressure: percent of the time in which some process waited for a core.
        busy: cores that compute, beside those that wait for disks; `saturated` of them are single cores at exactly 100 %, the rest is spread over the others.
        gpu, gpus: mean use in percent, of one GPU a rank on each host, or of each.
        memory_growth, gpu_memory_growth: percentage points over the whole run.
        checkpoint, evaluate: (every so many steps, seconds each).
        slow_steps: seconds that a phase, or what is in none, takes more in the window that ends with a step.
        epoch_start: seconds of waiting for data more in the first step of every epoch.
        cpu_seconds, worker_cpu_seconds: of the training process with its workers, and of the workers alone, a step.
        servers: of a run whose images other hosts make, what `serving` takes.
        system: whether hosts were watched; seconds: for how long where no step says it.
    """
    random = np.random.default_rng(seed)
    differing = ranks if isinstance(ranks, Mapping) else {rank: {} for rank in range(ranks)}
    hosts_number = -(-len(differing) // ranks_per_host)
    timed, stalls, ended = [], [], BEGAN + seconds
    batch = {"global_batch_size": 256, **(settings or {})}["global_batch_size"]
    if phases is not None:
        at = np.arange(log_every, steps + 1, log_every)
        epoch = (at - 1) // steps_per_epoch + 1
        for rank, more in differing.items():
            own = {**phases, **more}
            outside = np.full(len(at), own.pop(NO_PHASE, gap))
            values = {name: mean * _noisy(random, len(at), noise) for name, mean in own.items()}
            if epoch_start:
                values["data_wait"] += epoch_start / log_every * np.concatenate([[True], np.diff(epoch) > 0])
            for step, (phase, extra) in (slow_steps or {}).items():
                {**values, NO_PHASE: outside}[phase][at == step] += extra / log_every
            whole = sum(values[name] for name in values if name != "grad_sync") + outside
            values["step"] = whole
            times = BEGAN + np.cumsum(whole * log_every)
            due = {"checkpoint": checkpoint, "evaluate": evaluate}
            pauses = [(step, kind) for kind, one in due.items() if one for step in range(one[0], steps + 1, one[0])]
            for step, kind in sorted(pauses):
                place, host = min(int(np.searchsorted(at, step)), len(at) - 1), f"algo-{rank // ranks_per_host + 1}"
                began = max(
                    [times[place], *(stall.began + stall.seconds for stall in stalls[-1:] if stall.rank == rank)]
                )
                stalls.append(Stall(rank=rank, host=host, kind=kind, began=began, seconds=due[kind][1], step=step))
                times[place + 1 :] += due[kind][1]
            extra = {}
            if cpu_seconds is not None:
                own = cpu_seconds - (worker_cpu_seconds or 0.0)  # a record tells the two apart
                extra["cpu_seconds"] = own * _noisy(random, len(at), noise)
            if worker_cpu_seconds is not None:
                extra["worker_cpu_seconds"] = worker_cpu_seconds * _noisy(random, len(at), noise)
            timed.append(
                Steps(
                    rank=rank,
                    host=f"algo-{rank // ranks_per_host + 1}",
                    step=at,
                    epoch=epoch,
                    ended=times,
                    seconds=values,
                    extra=extra,
                    servers={}
                    if servers is None
                    else serving(random, whole * log_every, batch / len(differing) * log_every, noise, **servers),
                )
            )
        ended = max(steps.ended[-1] for steps in timed)
    interval = min(interval, (ended - BEGAN) / 40)  # short runs are watched closely
    times = np.arange(BEGAN, ended, interval)
    hosts = {}
    for number in range(hosts_number) if system else ():
        each = min(ranks_per_host, len(differing))
        means = gpus if gpus is not None else [] if gpu is None else [gpu] * each
        rest = (busy - saturated) / max(cores - saturated, 1) * 100
        core_means = [100.0] * saturated + [rest] * (cores - saturated)
        waiting = [_series(random, times, io_wait / cores * 100) for _ in range(cores)]  # part of a core's use
        hosts[f"algo-{number + 1}"] = Host(
            name=f"algo-{number + 1}",
            cores={
                f"cpu{core}": Series(
                    times,
                    np.full(len(times), 100.0)
                    if core < saturated
                    else np.clip(mean * _noisy(random, len(times), 0.1) + waiting[core].values, 0, 100),
                )
                for core, mean in enumerate(core_means)
            },
            io_wait={f"cpu{core}": series for core, series in enumerate(waiting)},
            memory=_series(random, times, memory, memory_growth, 0.005),
            gpus={f"gpu{index}": _series(random, times, mean, noise=0.08) for index, mean in enumerate(means)},
            gpu_memory={
                f"gpu{index}": _series(random, times, gpu_memory, gpu_memory_growth, 0.005)
                for index in range(len(means))
            },
            disk={
                "read": Series(times, disk * _noisy(random, len(times), 0.3)),
                "write": Series(times, np.zeros(len(times))),
            },
            network={name: Series(times, 2e6 * _noisy(random, len(times), 0.3)) for name in ("receive", "transmit")},
            throttled=None if throttled is None else _series(random, times, throttled),
            other={}
            if pressure is None
            else {("pressure", "CPUPressurePercent", ""): _series(random, times, pressure)},
            usable_cores=usable if usable is not None else float(cores),
        )
    groups: dict[str, Any] = {}
    if servers is not None:
        count = servers["hosts"]
        names = [f"algo-{hosts_number + number + 1}" for number in range(count)]
        groups = {
            "serving_hosts": names,
            "serving_groups": [{"index": 1, "instance_type": "ml.c5.4xlarge", "instance_count": count}],
            "training_group": 0,
            "one_machine": False,
        }
        cores_of_each = servers["threads"] // count
        for name in names if "cores_in_use" in servers else ():
            used = [_series(random, times, 100 * servers["cores_in_use"]) for _ in range(cores_of_each)]
            hosts[name] = Host(name=name, cores={f"cpu{core}": series for core, series in enumerate(used)})
    defaults = {
        "num_workers": 4,
        "worker_type": "auto" if servers is None else "remote",
        "preprocessing": "cpu",
        "precision": "bf16",
        "global_batch_size": 256,
        "batch_size_per_device": None,
        "epochs": 100,
        "evaluate_every": 1,
        "checkpoint_every": None,
        "log_every": 10,
        "gradient_compression": "none",
        "compile": False,
        "compile_teacher": False,
        "teacher_cache": None,
    }
    return Measurements(
        source="planted",
        hosts=hosts,
        ranks=tuple(timed),
        stalls=tuple(stalls),
        settings={**defaults, "log_every": log_every, **(settings or {})}
        if phases is not None
        else dict(settings or {}),
        facts={
            "world_size": len(differing),
            "device": "cuda" if gpu is not None or gpus else "cpu",
            "seconds_to_first_step": 12.0,
            **groups,
            **(facts or {}),
        }
        if phases is not None
        else dict(facts or {}),
        not_measured=dict(not_measured or {}),
    )


def serving(
    random: np.random.Generator,
    seconds: np.ndarray,
    images: float,
    noise: float,
    *,
    hosts: int,
    threads: int,
    milliseconds: float,
    in_flight: float,
    receiving: float,
    alone: float = 0.0,
    failures: int = 0,
    late: int = 0,
    kilobytes: float = 150.0,
    cores_in_use: float | None = None,
    part: float = 1.0,
    teacher: float = 0.0,
) -> dict[str, np.ndarray]:
    """What servers did for one rank, as the timeline has it.

    Args:
        seconds: (n,) of each logged window.
        images: that the rank trains on in a window.
        hosts, threads: that serve, and of all of them together.
        milliseconds, kilobytes: of an image, in one thread.
        in_flight: parts that were asked for and are in no thread: mean number.
        receiving: share of the time in which the receiving thread is busy.
        alone: share of the images that the rank makes itself.
        failures, late: of the whole run, in its second half.
        part: of the servers' threads, that the rank asks.
        teacher: share of the threads' busy time.
        cores_in_use: share of the serving hosts' cores; None: they were not watched.
    """
    count, received = len(seconds), images * (1 - alone)
    making = received * milliseconds / 1000 * _noisy(random, count, noise)
    once = np.arange(count) == count // 2
    return {
        "servers": np.full(count, float(-(-threads // 4))),
        "threads": np.full(count, threads * part),
        "part": np.full(count, part),
        "images": np.full(count, received),
        "alone": np.full(count, images * alone),
        "megabytes": np.full(count, received * kilobytes / 1000),
        "server_seconds": making,
        "teacher_seconds": teacher * making,
        "waited_seconds": making + in_flight * seconds * _noisy(random, count, noise),
        "receiving_seconds": receiving * seconds * _noisy(random, count, noise / 5),
        "failures": failures * once.astype(float),
        "late": late * once.astype(float),
    }


def write(measurements: Measurements, folder: Path) -> Path:
    """The same as files: every rank's timeline, and the cores, GPUs and I/O wait in Debugger's format and layout."""
    for steps in measurements.ranks:
        lines = [
            {
                "kind": "start",
                "rank": steps.rank,
                "node": steps.host,
                "not_measured": {},
                "backend": "nccl",
                "torch": measurements.facts.get("torch", "2.0.0"),
                "device_name": None,
                "instance_type": None,
                "threads": 1,
                "process_started": BEGAN,
                **{name: measurements.facts[name] for name in ("world_size", "device")},
                "settings": dict(measurements.settings),
            },
            {
                "kind": "first_step",
                "step": 1,
                "ended": BEGAN,
                "seconds": measurements.facts["seconds_to_first_step"],
                "workers": measurements.settings["num_workers"],
            },
        ]
        lines += [
            {
                "kind": "steps",
                "epoch": int(steps.epoch[at]),
                "step": int(steps.step[at]),
                "ended": float(steps.ended[at]),
                "seconds": {name: float(values[at]) for name, values in steps.seconds.items()},
                "extra": {
                    **{name: float(values[at]) for name, values in steps.extra.items()},
                    **(
                        {"servers": {name: float(one[at]) for name, one in steps.servers.items()}}
                        if steps.servers
                        else {}
                    ),
                },
            }
            for at in range(len(steps.step))
        ]
        place = folder / steps.host
        place.mkdir(parents=True, exist_ok=True)
        (place / f"timeline-{steps.rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for host in measurements.hosts.values():
        kinds = ((host.cores, "cpu", "CPUUtilization"), (host.io_wait, "cpu", "I/OWaitPercentage"))
        kinds += ((host.gpus, "gpu", "GPUUtilization"), (host.gpu_memory, "gpu", "GPUMemoryUtilization"))
        minutes: dict[int, list[str]] = {}
        for records, kind, dimension in kinds:
            for name, series in records.items():
                for at, value in zip(series.times.tolist(), series.values.tolist()):
                    sample = {"Type": kind, "Name": name, "Dimension": dimension, "Value": value, "NodeId": host.name}
                    minutes.setdefault(math.ceil(at / 60) * 60, []).append(json.dumps({**sample, "Timestamp": at}))
        for minute, samples in minutes.items():
            hour = datetime.fromtimestamp(minute, timezone.utc).strftime("%Y%m%d%H")
            place = folder / "profiler-output/system/incremental" / hour
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{minute}.{host.name}.json").write_text("\n".join(samples) + "\n")
    return folder


def _noisy(random: np.random.Generator, count: int, noise: float) -> np.ndarray:
    return np.maximum(random.normal(1.0, noise, count), 0.0)


def _series(
    random: np.random.Generator, times: np.ndarray, mean: float, growth: float = 0.0, noise: float = 0.05
) -> Series:
    values = (mean + growth * np.linspace(0, 1, len(times))) * _noisy(random, len(times), noise)
    return Series(times, np.clip(values, 0, 100))

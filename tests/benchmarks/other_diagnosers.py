"""What other tools find in a run with something planted: TraceML, gpuprof, and the rules that SageMaker Debugger had.

TraceML and gpuprof each watch their own run, started as their users would. Debugger's rules read our system metrics, by the formulas
of its public source (https://github.com/awslabs/sagemaker-debugger, smdebug/profiler/analysis/rules before 225e39b9) with the defaults
that the SageMaker SDK sends. A tool is right if one of its findings could lead to what was planted; ACCEPTED lists which do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from launcher.insight import windows
from launcher.insight.measurements import Measurements, Series

STARVED = {"data_bound", "too_few_workers", "storage_bound", "slow_epoch_starts"}

ACCEPTED: dict[str, dict[str, set[str]]] = {
    "TraceML": {
        "INPUT_BOUND": STARVED,  # "increase workers, prefetch, or storage throughput"
        "H2D_BOUND": {"host_to_device_bound"},
        "COMPUTE_BOUND": {"teacher_bound", "fp32_compute"},
        "RESIDUAL_HEAVY": {"main_thread_bound", "checkpoint_stalls", "evaluation_stalls", "step_outliers"},
        "INPUT_STRAGGLER": {"slow_rank"},
        "COMPUTE_STRAGGLER": {"slow_rank"},
        "STRAGGLER": {"slow_rank"},
        "CREEP_EARLY": {"memory_growth", "gpu_memory_growth"},
        "CREEP_CONFIRMED": {"memory_growth", "gpu_memory_growth"},
    },
    "gpuprof": {
        "dataloader_stall": STARVED,
        "prefetch_queue_starved": STARVED,
        "cpu_bound_dataloader": {"data_bound", "too_many_workers"},
        "io_bound_dataloader": {"storage_bound"},
        "cold_cache": {"storage_bound"},
        "cache_thrashing": {"storage_bound"},
        "worker_imbalance": {"slow_rank"},
        "host_memory_pressure": {"memory_growth"},
        "kernel_launch_overhead": {"main_thread_bound", "small_batch", "synchronising_calls", "noisy_neighbour"},
        "low_mfu": {"small_batch", "fp32_compute", "synchronising_calls", "main_thread_bound"},
        "memory_pressure": {"gpu_memory_growth"},
        "pcie_saturation": {"host_to_device_bound"},
        "small_batch": {"small_batch"},
        "compilation_warmup": {"slow_start"},
        "first_step_outlier": {"slow_start"},
        "high_step_variance": {"step_outliers", "checkpoint_stalls", "evaluation_stalls"},
        "comm_dominant": {"communication_bound"},
    },
    "Debugger": {
        "CPUBottleneck": {"data_bound", "too_few_workers", "too_many_workers", "main_thread_bound", "cpu_throttled"},
        "IOBottleneck": {"storage_bound"},
        "LowGPUUtilization": {"gpu_starved", "synchronising_calls", "small_batch", "main_thread_bound"},
        "BatchSize": {"small_batch"},
        "GPUMemoryIncrease": {"gpu_memory_growth"},
        "LoadBalancing": {"uneven_gpus", "slow_rank"},
        "StepOutlier": {"step_outliers"},
        "MaxInitializationTime": {"slow_start"},
    },
}
"""Tool -> finding -> the kinds of tests/insight that it may mean. Findings that name no bottleneck are left out."""

HEALTHY_TOO = {"COMPUTE_BOUND"}
"""Findings that blame nothing: something always computes."""

TRACEML = [sys.executable, "-c", "from traceml_ai.launcher.cli import main; main()", "run", "--logs-dir"]

TRACEML_STEPS = """
import itertools
from traceml_ai.api import init, trace_step
from training.engine import loop
init()
untraced, on_device = loop._step, loop.on_device
loop.on_device = lambda *arguments: arguments
def traced(task, states, batches, accumulation, *rest):
    waiting, *place = batches
    fetched = [*itertools.islice(waiting, accumulation)]
    with trace_step(states[0].trained):
        return untraced(task, states, on_device(iter(fetched), *place), accumulation, *rest)
loop._step = traced
"""
"""Python after the plant: marks where a step begins and ends, as TraceML's users do in their own loops: after the wait for a batch,
which it times itself, and before the batch is copied to the device."""

GPUPROF = """
import os, gpuprof
with gpuprof.profile("planted", summary=False, db_path={file!r} + os.environ.get("RANK", "0")):
{run}
if os.environ.get("RANK", "0") == "0":
    import json, sqlite3
    from gpuprof import insights
    with sqlite3.connect({file!r} + "0") as database:
        context = insights._build_ctx(database, 1)
    context.db_path = {file!r} + "0"
    fired = [rule.__name__.removeprefix("rule_") for rule in insights.RULES if rule(context)]
    with open({found!r}, "w") as stream:
        json.dump(fired, stream)
"""
"""Python around a planted run."""

TRACEML_LOOP = {
    "import argparse\n": "import argparse\nfrom traceml_ai.api import init, trace_step\ninit()\n",
    "            came = time.perf_counter()\n": "            came = time.perf_counter()\n"
    "            traced = trace_step(model)\n            traced.__enter__()\n",
    "            asked = time.perf_counter()\n": "            traced.__exit__(None, None, None)\n"
    "            asked = time.perf_counter()\n",
}
"""What TraceML's users add to the loop of the simulated accelerator's script: line -> lines."""

MAIN = 'if __name__ == "__main__":\n    main()\n'


def on_a_device(tool: str, script: Path, arguments: list[str], folder: Path) -> list[str]:
    """The command with which a tool watches the simulated accelerator's script; writes it to the folder as its user would change it."""
    text = script.read_text(encoding="utf-8")
    watched = {MAIN: GPUPROF.format(**gpuprof_places(folder), run="    main()")} if tool == "gpuprof" else TRACEML_LOOP
    given = f"import sys\nsys.path.insert(0, {str(script.parent)!r})\nsys.argv[1:] = {arguments!r}\n"
    for line, lines in {**watched, "import hashlib\n": f"import hashlib\n{given}"}.items():
        assert text.count(line) == 1, f"{script} holds {line!r} {text.count(line)} times"
        text = text.replace(line, lines)
    (folder / "planted.py").write_text(text)
    start = [*TRACEML, str(folder / "logs"), "--nproc-per-node", "1"] if tool == "TraceML" else [sys.executable]
    return [*start, str(folder / "planted.py")]


def gpuprof_places(folder: Path) -> dict[str, str]:
    return {"file": str(folder / "gpuprof.db"), "found": str(folder / "gpuprof.json")}


def right(tool: str, findings: list[str], kind: str | None) -> bool:
    """Whether a tool's findings could lead to what was planted; for a healthy run, whether they name no bottleneck."""
    accepted = ACCEPTED[tool]
    if kind is None:
        return not any(finding in accepted and finding not in HEALTHY_TOO for finding in findings)
    return any(kind in accepted.get(finding, ()) for finding in findings)


def cells(ours: Measurements, kind: str | None, traceml: Path | None, gpuprof: Path | None) -> list[str]:
    """Two cells per tool: its findings in a run, and whether they lead to what was planted.

    Args:
        traceml, gpuprof: the folders of the runs they watched; None: the run failed.
    """
    found = {
        "TraceML": traceml and traceml_findings(traceml / "logs"),
        "gpuprof": gpuprof and json.loads((gpuprof / "gpuprof.json").read_text()),
        "Debugger": debugger_findings(ours),
    }
    reported = []
    for tool, findings in found.items():
        if findings is None:
            reported += ["its run failed", "NO"]
        else:
            reported += [", ".join(findings) or "nothing", "yes" if right(tool, findings, kind) else "NO"]
    return reported


def traceml_findings(logs: Path) -> list[str]:
    """TraceML's run-level finding, and its finding on memory."""
    [file] = logs.glob("*/final_summary.json")
    summary = json.loads(file.read_text())
    kinds = [summary["primary_diagnosis"].get("kind")]
    memory = (summary.get("step_memory") or {}).get("diagnosis") or {}
    return [str(kind) for kind in (*kinds, memory.get("kind")) if kind]


def debugger_findings(found: Measurements) -> list[str]:
    """Debugger's rules that fire. Each sample counts as a 500 ms one, so that their patience keeps its meaning."""
    cores = [_values(series) for host in found.hosts.values() for series in host.cores.values()]
    waits = [_values(series) for host in found.hosts.values() for series in host.io_wait.values()]
    gpus = [_values(series) for host in found.hosts.values() for series in host.gpus.values()]
    memory = [_values(series) for host in found.hosts.values() for series in host.gpu_memory.values()]
    rules = {
        "CPUBottleneck": _starved(cores, gpus, 90),
        "IOBottleneck": _starved(waits, gpus, 50),
        "LowGPUUtilization": any(len(gpu) > PATIENCE and _low(gpu[-500:]) for gpu in gpus),
        "BatchSize": _all_low(cores, gpus, memory),
        "GPUMemoryIncrease": any(
            len(one) > PATIENCE and np.mean(one[-10:]) - np.mean(one[-11:-2]) > 5 for one in memory
        ),
        "LoadBalancing": _unbalanced(gpus),
        "StepOutlier": _step_outliers(found),
        "MaxInitializationTime": (found.facts.get("seconds_to_first_step") or 0) > 20 * 60,
    }
    return [name for name, fired in rules.items() if fired]


PATIENCE = 1000
"""Samples before a rule may fire: 500 s at 500 ms."""


def _values(series: Series) -> np.ndarray:
    return series.values


def _starved(busy: list[np.ndarray], gpus: list[np.ndarray], threshold: float) -> bool:
    """In over half of the samples some core is above the threshold while some GPU is below 10 %."""
    if not busy or not gpus:
        return False
    length = min(len(values) for values in (*busy, *gpus))
    both = (np.max([values[:length] for values in busy], axis=0) > threshold) & (
        np.min([values[:length] for values in gpus], axis=0) < 10
    )
    return length > PATIENCE and float(both.mean()) > 0.5


def _low(values: np.ndarray) -> bool:
    return np.percentile(values, 95) < 70 or np.percentile(values, 5) < 10


def _all_low(cores: list[np.ndarray], gpus: list[np.ndarray], memory: list[np.ndarray]) -> bool:
    """Cores, a GPU and its memory: the 95th percentile of each below 70 %."""
    if not cores or not gpus or not memory or min(len(one) for one in (*cores, *gpus, *memory)) <= PATIENCE:
        return False
    length = min(len(one) for one in cores)
    mean = np.mean([one[:length] for one in cores], axis=0)
    return bool(
        np.percentile(mean[-500:], 95) < 70
        and min(np.percentile(one[-500:], 95) for one in gpus) < 70
        and max(np.percentile(one[-500:], 95) for one in memory) < 70
    )


def _unbalanced(gpus: list[np.ndarray]) -> bool:
    """The square root of the Jensen-Shannon divergence of two GPUs' histograms above 0.5; its bins end at 98 %."""
    if len(gpus) < 2 or min(len(one) for one in gpus) <= PATIENCE:
        return False
    histograms = [np.histogram(one, bins=np.arange(0, 100, 2))[0] for one in gpus]
    return any(
        _distance(first, second) > 0.5
        for number, first in enumerate(histograms)
        for second in histograms[:number]
        if first.sum() and second.sum()
    )


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    one, other = first / first.sum(), second / second.sum()
    middle = (one + other) / 2
    parts = [np.sum(p[p > 0] * np.log(p[p > 0] / middle[p > 0])) for p in (one, other)]
    return float(np.sqrt(sum(parts) / 2))


def _step_outliers(found: Measurements) -> bool:
    """More than ten steps, of more than a hundred, are three standard deviations above the mean."""
    for steps in found.ranks:
        each = np.repeat(np.nan_to_num(steps.seconds["step"]), windows.counts(steps).astype(int))
        if len(each) > 100 and (each > each.mean() + 3 * each.std()).sum() > 10:
            return True
    return False

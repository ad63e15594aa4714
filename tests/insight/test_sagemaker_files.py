"""The same measurements as SageMaker's agent writes them and as our monitor does give the same report.

The agent's layout is that of the files which AWS publishes as test data of smdebug (awslabs/sagemaker-debugger, Apache-2.0:
tests/profiler/resources/test_traces/system): a group of metrics at a time, some milliseconds apart, its lines in no order, whole
numbers without a point, with or without blanks. Those files hold two samples of a core; here they are as long as a run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from launcher_observer.system.monitor import Writer

from launcher.insight.diagnosis import Diagnosis
from launcher.insight.measurements import Host, Measurements, read
from tests.insight.planted import plant, write
from tests.insight.test_rules import CPU, GPU, PLANTED

Values = dict[tuple[str, str, str], float]

AGENTS_GROUPS = ("cpu", "gpu", "memory", "i/o", "network")
"""Types of which the agent samples each at a time of its own, by a thread of its own."""


def samples(host: Host) -> Iterator[tuple[float, Values]]:
    """What a host was measured to do, sample by sample, to two decimals."""
    rows: dict[float, Values] = {}
    kinds = [("cpu", "CPUUtilization", host.cores), ("cpu", "I/OWaitPercentage", host.io_wait)]
    kinds += [("gpu", "GPUUtilization", host.gpus), ("gpu", "GPUMemoryUtilization", host.gpu_memory)]
    kinds += [("memory", "", {"MemoryUsedPercent": host.memory})]
    kinds += [("i/o", "", {f"{name.title()}ThroughputInBytesPerSecond": one for name, one in host.disk.items()})]
    kinds += [("network", "Algorithm", {f"{name.title()}BytesPerSecond": one for name, one in host.network.items()})]
    for kind, dimension, found in kinds:
        for name, series in found.items():
            for when, value in zip(series.times.tolist(), series.values.tolist()):
                rows.setdefault(when, {})[kind, name, dimension] = round(value, 2)
    yield from sorted(rows.items())


def by_our_monitor(measured: Measurements, folder: Path, limits: Values | None = None) -> Path:
    """As launcher_observer.system.monitor writes; `limits` of the cgroup, which SageMaker's agent has no name for, in every sample."""
    for host in measured.hosts.values():
        writer = Writer(folder / "profiler-output", host.name)
        for when, values in samples(host):
            writer.write(when, {**values, **(limits or {})})
    return folder


def by_sagemakers_agent(measured: Measurements, folder: Path) -> Path:
    """As the agent writes, with what only it has: operations a second, and its own traffic that brings the data."""
    shuffled = random.Random(0)
    for host in measured.hosts.values():
        minutes: dict[int, list[str]] = {}
        for number, (when, values) in enumerate(samples(host)):
            values |= {("i/o", "IOPS", ""): 5357.94, ("network", "ReceiveBytesPerSecond", "Platform"): 66775126.66}
            events = [
                {
                    "Type": kind,
                    "Name": name,
                    "Dimension": dimension,
                    "Value": int(value) if value == int(value) else value,
                    "NodeId": host.name,
                    "Timestamp": when + AGENTS_GROUPS.index(kind) / 1000,
                }
                for (kind, name, dimension), value in values.items()
            ]
            shuffled.shuffle(events)
            separators = (", ", ": ") if number % 2 else (",", ":")
            lines = [json.dumps(event, separators=separators) for event in events]
            minutes.setdefault(int(when) // 60 * 60, []).extend(lines)
        for minute, lines in minutes.items():
            hour = datetime.fromtimestamp(minute, timezone.utc).strftime("%Y%m%d%H")
            place = folder / "profiler-output/system/incremental" / hour / f"{minute}.{host.name}.json"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("\n".join(lines) + "\n")
    return folder


def reported(folder: Path) -> tuple[Diagnosis, dict]:
    """The diagnosis of what lies in a folder, and its report for machines without the folder's name."""
    found = Diagnosis(read(str(folder)))
    return found, {name: value for name, value in found.to_dict().items() if name != "source"}


SYSTEM_ALONE = [
    ("data_bound", "all cores full, half-idle GPU, system metrics alone"),
    ("storage_bound", "system metrics alone"),
    ("gpu_starved", "the same, and the number of workers is not known"),
    ("gpu_starved", "KT's system metrics alone, and the number of workers is not known"),
    ("uneven_gpus", "harsh: one at 100 %, others idle"),
]
"""Jobs of any script."""

WITH_STEPS = [
    *(("too_few_workers", "harsh"), ("data_bound", "harsh"), ("storage_bound", "harsh"), ("teacher_bound", "harsh")),
    *(
        ("slow_rank", "harsh, its data"),
        ("memory_growth", "harsh"),
        ("gpu_memory_growth", "mild"),
        ("too_many_workers", "harsh"),
    ),
]
"""Jobs of this kit's scripts on SageMaker: each rank's steps come beside the agent's files."""


@pytest.mark.parametrize("case", [*SYSTEM_ALONE, *WITH_STEPS], ids=" ".join)
def test_sagemakers_files_give_the_report_that_ours_give(case, tmp_path):
    measured = plant(**PLANTED[case])
    for part in ("ours", "theirs"):
        if measured.ranks:
            write(Measurements(**{**vars(measured), "hosts": {}}), tmp_path / part)
    ours, ours_told = reported(by_our_monitor(measured, tmp_path / "ours"))
    theirs, theirs_told = reported(by_sagemakers_agent(measured, tmp_path / "theirs"))
    assert theirs.findings[0].kind == case[0], "and it is the right one"
    assert theirs_told == ours_told, "every finding, share, gain, percentile and phase"
    assert str(theirs).splitlines()[1:] == str(ours).splitlines()[1:]


def test_what_ours_hold_besides_adds_to_the_report_and_changes_no_number(tmp_path):
    """Cores that the cgroup allows and its throttling: SageMaker's agent does not tell them, and the report says so."""
    measured = plant(**PLANTED["data_bound", "all cores full, half-idle GPU, system metrics alone"])
    limits = {("cgroup", "UsableCores", ""): 8.0, ("cgroup", "CPUThrottledPercent", ""): 0.0}
    ours, ours_told = reported(by_our_monitor(measured, tmp_path / "ours", limits))
    theirs, theirs_told = reported(by_sagemakers_agent(measured, tmp_path / "theirs"))
    for one, other in zip(ours.findings, theirs.findings, strict=True):
        assert (one.kind, one.share, one.gain, one.fixes) == (other.kind, other.share, other.gain, other.fixes)
    theirs_use = {use["resource"]: use for use in theirs_told["use"]}
    assert all(use == theirs_use[use["resource"]] for use in ours_told["use"] if use["resource"] in theirs_use)
    assert "8 usable cores" in str(ours) and "8 cores (a quota was not recorded)" in str(theirs)
    missing = {missing["what"] for missing in theirs_told["not_measured"]}
    assert missing - {missing["what"] for missing in ours_told["not_measured"]} == {"cores throttled by a quota"}


@pytest.mark.parametrize("phases", [GPU, CPU], ids=["on GPUs", "on the CPU"])
def test_a_healthy_job_is_accused_by_neither(phases, tmp_path):
    measured = plant(phases=phases, ranks=2, gpu=96 if phases is GPU else None, cores=8, busy=3)
    for part in ("ours", "theirs"):
        write(Measurements(**{**vars(measured), "hosts": {}}), tmp_path / part)
    _, ours = reported(by_our_monitor(measured, tmp_path / "ours"))
    _, theirs = reported(by_sagemakers_agent(measured, tmp_path / "theirs"))
    assert ours == theirs and theirs["findings"] == []


def test_what_debuggers_framework_profiling_left_beside_is_passed_over(tmp_path):
    """Timelines of the retired framework profiling, in smdebug's layout: other times than a step's, and no torch 2 writes them."""
    measured = plant(**PLANTED["storage_bound", "system metrics alone"])
    _, alone = reported(by_sagemakers_agent(measured, tmp_path / "alone"))
    folder = by_sagemakers_agent(measured, tmp_path / "beside")
    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1800000000000000}},
        {
            "name": "Step:ModeKeys.TRAIN",
            "pid": 1,
            "ph": "X",
            "ts": 2664345,
            "dur": 9020725,
            "args": {"pid": 9, "step_num": "0"},
        },
    ]
    place = folder / "profiler-output/framework/pevents/2027011508/1800000002664345_9-algo-1_pythontimeline.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(events))
    assert reported(folder)[1] == alone

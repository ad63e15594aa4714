"""The system monitor as a real process, on this machine's files, and with a stand-in for NVIDIA's library."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launcher_observer.contract import node_name
from launcher_observer.system import background, monitor
from launcher_observer.system.background import FOLDER, MONITOR, PRESENT, RUN, locked
from launcher_observer.system.monitor import FREE_BYTES, FULL_RATE_BYTES, Writer, interval_ms, slowed, system_monitor

from launcher.insight.measurements import read
from tests.conftest import ROOT, has_ended, processes_of, wait_until
from tests.device import nvml


@pytest.fixture
def fast(tmp_path, monkeypatch) -> Path:
    """A job that samples every 100 ms, as SageMaker would say it; the folder of its profilerconfig.json."""
    config = tmp_path / "opt/input/config"
    config.mkdir(parents=True)
    (config / "profilerconfig.json").write_text(
        json.dumps({"DisableProfiler": False, "ProfilingIntervalInMilliseconds": 100, "S3OutputPath": "s3://bucket"})
    )
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "opt"))
    return config


def lines(folder: Path) -> list[str]:
    return [line for file in sorted(folder.rglob("*.algo-*.json")) for line in file.read_text().splitlines(True)]


def events(folder: Path) -> list[dict]:
    """All complete samples."""
    return [json.loads(line) for line in lines(folder) if line.endswith("\n")]


def sampled(folder: Path, samples: int) -> list[dict]:
    """All events once N samples lie in a folder."""
    wait_until(lambda: len({one["Timestamp"] for one in events(folder)}) >= samples, what=f"{samples} samples")
    return events(folder)


def monitors(output: Path) -> list[psutil.Process]:
    """A host's monitor, if there is one: the last one's number may be nobody's any more, or not be replaced yet."""
    file = output / "profiler-output" / MONITOR
    text = file.read_text() if file.exists() else ""
    try:
        found = [psutil.Process(int(text))] if text.endswith("\n") else []
    except psutil.NoSuchProcess:
        found = []
    return [process for process in found if not has_ended(process)]


def monitor_of(output: Path) -> psutil.Process:
    """A host's monitor, once it runs."""
    found = []
    wait_until(lambda: found.extend(monitors(output)) or found, what="the monitor")
    return found[0]


class Present:
    """A process that is present on a host until it is ended."""

    CODE = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from launcher_observer.system.background import Presence
        Presence(sys.argv[2], quiet=True)
        print("present", flush=True)
        sys.stdin.read()
    """

    def __init__(self, output: Path):
        command = [sys.executable, "-c", textwrap.dedent(self.CODE), str(ROOT / "entrypoints"), str(output)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"present\n"

    def end(self) -> None:
        self.process.communicate(timeout=60)


def test_a_sample_has_every_core_memory_disk_and_network_in_debuggers_format(fast, tmp_path, capfd):
    with system_monitor(tmp_path / "out", 0):
        found = sampled(tmp_path / "out", 3)
        found = [event for event in found if event["Timestamp"] != found[-1]["Timestamp"]]  # that may not be whole
        process = monitor_of(tmp_path / "out")
        assert process not in psutil.Process().children(recursive=True), (
            "a script that waits for its children would wait for it"
        )
    wait_until(lambda: has_ended(process), what="the end of the monitor")
    file = min((tmp_path / "out").rglob("*.json")).relative_to(tmp_path / "out")  # another minute may have begun
    minute = int(found[0]["Timestamp"]) // 60 * 60
    assert re.fullmatch(rf"profiler-output/system/incremental/\d{{10}}/{minute}\.algo-1\.json", str(file))
    assert all([*event] == ["Type", "Name", "Dimension", "Value", "NodeId", "Timestamp"] for event in found)
    cores = [line.split()[0] for line in Path("/proc/stat").read_text().splitlines() if re.match(r"cpu\d", line)]
    keys = Counter(
        (event["Type"], event["Name"], event["Dimension"])
        for event in found
        if not event["Type"].startswith("neighbour")  # which are looked at after a second
    )
    assert {("cpu", core, dimension) for core in cores for dimension in ("CPUUtilization", "I/OWaitPercentage")} <= set(
        keys
    )
    for name in ("IOPS", "ReadThroughputInBytesPerSecond", "WriteThroughputInBytesPerSecond"):
        assert ("i/o", name, "") in keys
    assert {("memory", "MemoryUsedPercent", ""), ("network", "ReceiveBytesPerSecond", "Algorithm")} <= set(keys)
    assert len(set(keys.values())) == 1  # smdebug's heat map is as short as its shortest series
    percents = [event["Value"] for event in found if event["Type"] in ("cpu", "memory", "pressure")]
    assert all(0 <= value <= 100 for value in percents) and any(percents)
    assert "system metrics every 100 ms (as profilerconfig.json says)" in capfd.readouterr().out


def test_it_lives_as_long_as_a_process_of_the_run_and_ends_with_the_last_however_that_ends(fast, tmp_path):
    first, second = Present(tmp_path / "out"), Present(tmp_path / "out")
    process = monitor_of(tmp_path / "out")
    first.end()
    before = len(lines(tmp_path / "out"))
    wait_until(
        lambda: len(lines(tmp_path / "out")) > before, what="samples after the end of the process that started it"
    )
    assert monitor_of(tmp_path / "out") == process
    second.process.send_signal(signal.SIGKILL)
    second.process.communicate()
    wait_until(lambda: has_ended(process), what="the monitor's end")
    assert all(json.loads(line) for line in lines(tmp_path / "out"))


def test_processes_that_start_at_once_share_one_monitor_and_the_next_one_takes_over_from_one_that_was_killed(
    fast, tmp_path
):
    with ThreadPoolExecutor() as pool:
        present = list(pool.map(Present, [tmp_path / "out"] * 6))
    process = monitor_of(tmp_path / "out")
    assert [other for other in processes_of(tmp_path / "out") if RUN in other.cmdline()] == [process]
    process.kill()
    wait_until(lambda: has_ended(process), what="its end")
    present.append(Present(tmp_path / "out"))
    other = monitor_of(tmp_path / "out")
    assert other != process
    for one in present:
        one.end()
    wait_until(lambda: has_ended(other), what="the monitor's end")


def test_one_that_comes_as_the_monitor_ends_has_a_monitor(fast, tmp_path):
    for number in range(8):
        output = tmp_path / f"out-{number}"
        first = Present(output)
        sampled(output, 1)
        first.process.kill()
        second = Present(output)
        sampled(output, len({event["Timestamp"] for event in events(output)}) + 2)
        assert monitors(output)
        first.process.communicate()
        second.end()


def test_who_comes_while_a_monitor_ends_is_present_when_it_has(tmp_path, monkeypatch):
    (tmp_path / FOLDER).mkdir()
    ending, other = (os.open(tmp_path / FOLDER / PRESENT, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert locked(ending, fcntl.LOCK_EX)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(ending)

    monkeypatch.setattr(background, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(waits)))
    monkeypatch.setattr(background, "_start", lambda *_: None)
    presence = background.Presence(tmp_path, quiet=True)
    assert len(waits) == 3 and not locked(other, fcntl.LOCK_EX)
    presence.leave()
    assert locked(other, fcntl.LOCK_EX)
    os.close(other)


def test_a_monitor_that_ends_is_no_monitor_before_anybody_can_be_present(tmp_path):
    """Who is present from then on starts another."""
    code = """
        import fcntl, os, sys
        from launcher_observer.system import background, monitor
        def end(code):
            place = os.path.join(sys.argv[1], background.FOLDER, background.MONITOR)
            print(background.locked(os.open(place, os.O_RDWR), fcntl.LOCK_EX), flush=True)
            leave(code)
        leave, os._exit, monitor.sample_while_needed = os._exit, end, lambda *_: None
        monitor.main()
    """
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / PRESENT).touch()
    with open(tmp_path / FOLDER / MONITOR, "w+") as own:
        assert locked(own.fileno(), fcntl.LOCK_EX)
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), "--starter=0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "entrypoints")}
        process = subprocess.Popen(command, stdin=own, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.communicate(timeout=60)[0] == "True\n"


def test_sigterm_does_not_end_it_and_a_removed_run_does(fast, tmp_path):
    present = Present(tmp_path / "out")
    process = monitor_of(tmp_path / "out")
    sampled(tmp_path / "out", 1)
    process.terminate()
    sampled(tmp_path / "out", len({event["Timestamp"] for event in events(tmp_path / "out")}) + 2)
    (tmp_path / "out").rename(tmp_path / "removed")  # at once, while it may write
    wait_until(lambda: has_ended(process), what="the monitor's end")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "removed")
    present.end()


class Holding(Present):
    """One with a file that its monitor inherits; the monitor can close no range of numbers."""

    CODE = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from launcher_observer.system import background
        background.RUN = "import os; os.closerange = None; " + background.RUN
        os.dup2(0, 700)
        background.Presence(sys.argv[2], quiet=True)
        print("present", flush=True)
        sys.stdin.read()
    """


def test_it_closes_what_it_inherited_and_tries_no_other_number(fast, tmp_path):
    present = Holding(tmp_path / "out")
    process = monitor_of(tmp_path / "out")
    sampled(tmp_path / "out", 1)
    assert "700" in os.listdir(f"/proc/{present.process.pid}/fd") and "700" not in os.listdir(f"/proc/{process.pid}/fd")
    present.end()
    wait_until(lambda: has_ended(process), what="the monitor's end")


def test_what_it_cannot_write_is_said_once_and_harms_nobody(fast, tmp_path, capfd):
    (tmp_path / "out/profiler-output").mkdir(parents=True)
    (tmp_path / "out/profiler-output/system").write_text("a file where the folder should be")
    errors = []
    with system_monitor(tmp_path / "out", 0):
        process = monitor_of(tmp_path / "out")

        def reported() -> int:
            errors.append(capfd.readouterr().err)
            return "".join(errors).count("system monitor: not written")

        wait_until(lambda: reported() == 1, what="the error")
        began = process.num_ctx_switches().voluntary
        wait_until(lambda: process.num_ctx_switches().voluntary > began + 5, what="some more samples")
        assert process.is_running() and reported() == 1


def test_a_folder_that_cannot_be_made_leaves_the_run_without_system_metrics(tmp_path, capfd):
    (tmp_path / "out").write_text("a file where the folder should be")
    with system_monitor(tmp_path / "out", 0):
        pass
    assert "no system metrics: " in capfd.readouterr().err


def test_a_run_shorter_than_an_interval_has_a_sample(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "none"))
    with system_monitor(tmp_path / "out", 0):
        pass
    sampled(tmp_path / "out", 1)
    wait_until(lambda: not monitors(tmp_path / "out"), what="its end, which may have taken longer than was waited for")
    assert len({event["Timestamp"] for event in events(tmp_path / "out")}) == 1


def test_one_process_a_host_samples_and_none_where_nobody_wants_it(fast, tmp_path):
    for local_rank, wanted in ((1, True), (0, False)):
        with system_monitor(tmp_path / "out", local_rank, wanted=wanted):
            assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "interval", "why"),
    [
        (None, 500, "SageMaker's own rate"),
        ("{}", 500, "as profilerconfig.json says"),
        ('{"ProfilingIntervalInMilliseconds": "1000"}', 1000, "as profilerconfig.json says"),
        ('{"ProfilingIntervalInMilliseconds": 250}', 500, "250 in profilerconfig.json is not one of 100, 200"),
        ('{"ProfilingIntervalInMilliseconds": null}', 500, "could not be read"),
        ("[]", 500, "could not be read"),
        ("{", 500, "could not be read"),
    ],
)
def test_the_interval_is_the_jobs_or_sagemakers_own(fast, tmp_path, text, interval, why):
    if text is None:
        (fast / "profilerconfig.json").unlink()
    else:
        (fast / "profilerconfig.json").write_text(text)
    found, said = interval_ms({"SAGEMAKER_BASE_DIR": str(tmp_path / "opt")})
    assert found == interval and why in said


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "algo-1"),
        ({"SM_CURRENT_HOST": "algo-12", "SM_HOSTS": '["algo-1", "algo-12"]'}, "algo-12"),
        ({"SM_CURRENT_HOST": "127.0.0.2", "SM_HOSTS": '["127.0.0.1", "127.0.0.2"]'}, "algo-2"),
        ({"SM_CURRENT_HOST": "elsewhere", "SM_HOSTS": '["127.0.0.1"]'}, "algo-1"),
    ],
)
def test_a_host_is_named_as_debuggers_readers_want_it(environ, name):
    assert node_name(environ) == name


def test_a_months_samples_of_a_large_host_stay_within_bounds():
    sample, seconds, written, count = 25_000, 0.0, 0, 0
    while seconds < 28 * 24 * 3600:
        seconds, written, count = seconds + slowed(0.5, written), written + sample, count + 1
    assert written < 11 * FULL_RATE_BYTES and slowed(0.5, FULL_RATE_BYTES - 1) == 0.5


def test_nothing_is_written_on_a_disk_that_is_nearly_full(tmp_path, monkeypatch):
    free = [FREE_BYTES // 2]
    monkeypatch.setattr(monitor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    writer = Writer(tmp_path, "algo-1")
    with pytest.raises(OSError, match="512 MiB left on the disk"):
        writer.write(120.0, {("cpu", "cpu0", "CPUUtilization"): 1.0})
    assert not list(tmp_path.rglob("*.json"))
    free[0] = FREE_BYTES
    writer.write(179.5, {("cpu", "cpu0", "CPUUtilization"): 1.0})
    assert [file.name for file in tmp_path.rglob("*.json")] == ["120.algo-1.json"]


@pytest.fixture
def nvidia(tmp_path, monkeypatch) -> None:
    """NVIDIA's library, for processes started from now on."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.build(tmp_path / "nvidia")))


def gpu_values(found: list[dict]) -> dict[tuple[str, str], float]:
    kinds = ("gpu", "clocks")
    return {(event["Name"], event["Dimension"]): event["Value"] for event in found if event["Type"] in kinds}


@pytest.mark.parametrize("visible", [None, "GPU-two,0", ""])
def test_gpus_are_those_that_the_job_sees(fast, tmp_path, nvidia, monkeypatch, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with system_monitor(tmp_path / "out", 0):
        values = gpu_values(sampled(tmp_path / "out", 1))
    first, second, third = (
        {("gpu0", "GPUUtilization"): 40, ("gpu0", "GPUMemoryUtilization"): 25, ("ThrottledPercent", "gpu0"): 100},
        {("gpu1", "GPUMemoryUtilization"): 50, ("ThrottledPercent", "gpu1"): 0},
        {("gpu2", "GPUUtilization"): 42, ("gpu2", "GPUMemoryUtilization"): 75, ("ThrottledPercent", "gpu2"): 0},
    )
    if visible is None:
        assert values == {**first, **second, **third}
    elif visible:
        moved = {"gpu2": "gpu0", "gpu0": "gpu1", "ThrottledPercent": "ThrottledPercent"}
        expected = {
            (moved[name], moved.get(where, where)): value for (name, where), value in {**first, **third}.items()
        }
        assert values == expected
    else:
        assert values == {}


def test_each_gpus_uuid_is_recorded_once(fast, tmp_path, nvidia, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-two,1,0")
    with system_monitor(tmp_path / "out", 0):
        found = sampled(tmp_path / "out", 3)
    recorded = [(event["Name"], event["Dimension"]) for event in found if event["Type"] == "identity"]
    assert recorded == [("gpu0", "GPU-two"), ("gpu2", "GPU-zero")], "the second has none"
    [host] = read(str(tmp_path / "out")).hosts.values()
    assert host.gpu_uuids == dict(recorded) and not [key for key in host.other if key[0] == "identity"]


def test_a_value_that_the_driver_refuses_takes_no_other_with_it_and_is_named_once(
    fast, tmp_path, nvidia, monkeypatch, capfd
):
    monkeypatch.setenv("NVML_DENIES", "1")
    monkeypatch.setenv("NVML_LOSES", "1")
    with system_monitor(tmp_path / "out", 0):
        found = gpu_values(sampled(tmp_path / "out", 3))
    assert {name for name, what in found if what == "GPUMemoryUtilization"} == {"gpu0", "gpu1"}
    assert ("ThrottledPercent", "gpu2") in found and not any(what == "GPUUtilization" for _, what in found)
    lines = [line for line in capfd.readouterr().err.splitlines() if "nvml" in line]
    assert sorted(lines) == [
        "system monitor: no gpu0 nvmlDeviceGetUtilizationRates: Insufficient Permissions",
        "system monitor: no gpu2 nvmlDeviceGetMemoryInfo: GPU is lost",
        "system monitor: no gpu2 nvmlDeviceGetUtilizationRates: Insufficient Permissions",
    ]


def test_a_driver_that_fails_leaves_the_rest(fast, tmp_path, nvidia, monkeypatch):
    monkeypatch.setenv("NVML_FAILS", "1")
    with system_monitor(tmp_path / "out", 0):
        found = sampled(tmp_path / "out", 1)
    assert not gpu_values(found) and any(event["Name"] == "cpu0" for event in found)

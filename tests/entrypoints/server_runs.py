"""A script of the kit on hosts of this machine, some that train and some that prepare their images; and what kills servers meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.entrypoints.ranks import free_port

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"

SERVER = "ImageServer"
"""In the title that Ray gives a server's process."""


def environment(
    folder: Path, host: str, hosts: list[str], trainers: int, data: Path, settings: Mapping[str, Any], ports: list[int]
) -> dict[str, str]:
    """What SageMaker's toolkit and torchrun give a script on one of the hosts, of which the first ones train.

    Args:
        data: its folders are the channels; hosts that prepare images have `train` alone. The channel `teacher` is on the hosts that run it.
    """
    served = {"teacher"} if "teacher_servers" in settings else set()
    channels = {folder.name for folder in data.iterdir()} - served if host in hosts[:trainers] else {"train"} | served
    groups = {"gpus": {"instance_group_name": "gpus", "hosts": hosts[:trainers]}}
    if hosts[trainers:]:
        groups["cpus"] = {"instance_group_name": "cpus", "hosts": hosts[trainers:]}
    ranks = {}
    if trainers > 1 and host in hosts[:trainers]:
        ranks = {"RANK": str(hosts.index(host)), "WORLD_SIZE": str(trainers), "LOCAL_RANK": "0"}
        ranks |= {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(ports[1])}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "RAY_"))}
    return {
        **kept,
        **ranks,
        "PYTHONPATH": str(ENTRYPOINTS),
        "OMP_NUM_THREADS": "1",
        "TRAINING_JOB_NAME": str(folder),
        "TRAINING_SERVERS_PORT": str(ports[0]),
        "SAGEMAKER_BASE_DIR": str(folder / host),
        "SM_CURRENT_HOST": host,
        "SM_HOSTS": json.dumps(hosts),
        "SM_INSTANCE_GROUPS_DICT": json.dumps(groups),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_distribution_instance_groups": ["gpus"]}),
        "SM_HPS": json.dumps(dict(settings)),
        "SM_MODEL_DIR": str(folder / host / "model"),
        "SM_OUTPUT_DIR": str(folder / host / "output"),
        "SM_OUTPUT_DATA_DIR": str(folder / host / "output" / "data"),
        **{f"SM_CHANNEL_{channel.upper()}": str(data / channel) for channel in channels},
    }


class ServedRun:
    """One run; its logs and results lie below `<folder>/<host>`."""

    def __init__(
        self,
        folder: Path,
        data: Path,
        settings: Mapping[str, Any],
        *,
        servers: int,
        trainers: int = 1,
        script: str = "train_classifier.py",
    ):
        self.folder = folder
        self.hosts = [f"127.0.0.{number + 1}" for number in range(trainers + servers)]
        ports = [free_port() for _ in range(2)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for host in self.hosts:
            (folder / host / "checkpoints").mkdir(parents=True, exist_ok=True)
            with open(folder / host / "log", "ab") as log:
                command = [sys.executable, str(ENTRYPOINTS / script)]
                env = environment(folder, host, self.hosts, trainers, data, settings, ports)
                self.processes.append(
                    subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
                )

    def wait(self, seconds: float) -> list[int]:
        """Exit codes of the hosts' scripts, that of the one that trains first."""
        until = time.monotonic() + seconds
        return [process.wait(max(0.0, until - time.monotonic())) for process in self.processes]

    def log(self, host: int = 0) -> str:
        return (self.folder / self.hosts[host] / "log").read_text(errors="replace")

    def weights(self) -> bytes:
        return (self.folder / self.hosts[0] / "model" / "model.safetensors").read_bytes()

    def trained(self) -> bool:
        """Whether a first step is done."""
        return " step " in self.log()

    def server_processes(self) -> list[psutil.Process]:
        """Those of this run's servers."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("ray::") and SERVER in " ".join(process.cmdline()):
                    found += [process] * (process.environ().get("TRAINING_JOB_NAME") == str(self.folder))
        return found

    def left(self) -> list[psutil.Process]:
        """Every process of this run that is there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found += [process] * (process.environ().get("TRAINING_JOB_NAME") == str(self.folder))
        return found

    def close(self) -> None:
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def served_run(folder: Path, data: Path, settings: Mapping[str, Any], **options: Any) -> Iterator[ServedRun]:
    run = ServedRun(folder, data, settings, **options)
    try:
        yield run
    finally:
        run.close()


def kill_servers(run: ServedRun, kills: int, pause: tuple[float, float], seed: int = 0) -> int:
    """Kill servers at random moments, as often as asked or until training ends. Returns how many were."""
    rng, killed = random.Random(seed), 0
    while killed < kills and run.processes[0].poll() is None:
        time.sleep(rng.uniform(*pause))
        servers = run.server_processes()
        if servers and run.trained():
            with contextlib.suppress(psutil.Error):
                rng.choice(servers).send_signal(signal.SIGKILL)
                killed += 1
    return killed

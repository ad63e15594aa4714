"""A host's /opt/ml in a run's folder, laid out as on SageMaker: code, channels, checkpoints and input/config."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher.aws.request import profiler_config
from launcher.config.job import Job
from launcher.planner.plan import HostPlan, Plan
from launcher.planner.source_package import COMMIT_FILE, copy_files
from launcher.record import records

NAMED = re.compile(rb"""/opt/ml\b|["']/?opt/?["'].{0,20}["']/?ml\b""")
"""How a script names /opt/ml: whole, or in parts for os.path.join or pathlib."""

HOMOGENEOUS = "homogeneousCluster"
"""SageMaker's name for the only instance group of a job without groups."""

LARGEST_SEARCHED = 2**20
"""Largest source file, in bytes, that is searched for /opt/ml: larger ones are data."""


def lay_out(
    plan: Plan, host: HostPlan, folder: records.RunFolder, *, interface: str, left_out: Collection[str] = ()
) -> None:
    """Write a host's /opt/ml without its channels.

    Args:
        interface: the script's network interface.
        left_out: paths of source files that are kept only in the record.
    """
    base = folder.host(host.name)
    for place in ("code", "model", "output/data", "input/data", "input/config", "checkpoints"):
        (base / place).mkdir(parents=True)
    copy_files([file for file in plan.files if file.path not in left_out], base / "code")
    if plan.resumes is not None:
        earlier = records.RunFolder(records.store() / plan.resumes).checkpoints(host.name)
        if earlier.is_dir():  # copied, not linked: a script may change its files in place
            there = folder.checkpoints(host.name)
            shutil.copytree(earlier, there, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    for name, text in config_files(plan, host, interface).items():
        records.write_atomically(base / "input/config" / name, text, durable=False)


def names_opt_ml(job: Job, files: Iterable[tuple[str, Path]]) -> str:
    """Where the user's own script, or its settings, name /opt/ml: `train.py:12`, or the job's key; "" if nowhere.

    Args:
        files: the source files, each as (its path in the code folder, where it is now).
    """
    if job.source is None:
        return ""
    for key, values in (("hyperparameters", job.hyperparameters), ("environment", job.environment)):
        for name, value in values.items():
            if "/opt/ml" in str(value):
                return f"{key}.{name}"
    known = dict(files)
    kits = ("launcher_observer/", "training/") if COMMIT_FILE in known else ("launcher_observer/",)
    for path, file in sorted(known.items()):
        if not path.startswith(kits) and file.is_file() and file.stat().st_size <= LARGEST_SEARCHED:
            content = file.read_bytes()
            found = NAMED.search(content)
            if found is not None:
                line = content.count(b"\n", 0, found.start()) + 1
                return f"{path}:{line}"
    return ""


def show_channel(at: Path, place: Path) -> None:
    """Link a channel's folder, or its file inside a new folder."""
    if place.is_dir():
        at.symlink_to(place, target_is_directory=True)
    else:
        at.mkdir()
        (at / place.name).symlink_to(place)


def resource_config(
    host: tuple[str, str, str], hosts: Sequence[tuple[str, str, str]], interface: str
) -> dict[str, Any]:
    """resourceconfig.json of a host.

    Args:
        host: its address, instance group and instance type.
        hosts: the same for every host, in SageMaker's order.
        interface: the script's network interface.
    """
    groups: dict[str, dict[str, Any]] = {}
    for address, group, instance_type in hosts:
        entry = {"instance_group_name": group, "instance_type": instance_type, "hosts": []}
        groups.setdefault(group, entry)["hosts"].append(address)
    address, group, instance_type = host
    return {
        "current_host": address,
        "current_instance_type": instance_type,
        "current_group_name": group,
        "hosts": [other for other, _, _ in hosts],
        "instance_groups": list(groups.values()),
        "network_interface_name": interface,
    }


def config_files(plan: Plan, host: HostPlan, interface: str = "lo") -> dict[str, str]:
    """Name -> text of SageMaker's files below input/config."""
    in_order = sorted(plan.hosts, key=lambda other: int(other.name.removeprefix("algo-")))
    this, *hosts = [(other.address, other.group or HOMOGENEOUS, "local") for other in (host, *in_order)]
    channels = {
        name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        for name in plan.channels_of(host)
    }
    written: dict[str, Any] = {
        "hyperparameters.json": plan.hyperparameters,
        "resourceconfig.json": resource_config(this, hosts, interface),
        "inputdataconfig.json": channels,
    }
    if plan.job.profiling is not None:
        written["profilerconfig.json"] = profiler_config(plan.job)
    return {name: json.dumps(value, indent=1) for name, value in written.items()}

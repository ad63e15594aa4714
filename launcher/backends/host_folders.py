"""A host's /opt/ml in a run's folder, laid out as on SageMaker: code, channels, checkpoints and input/config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from launcher.aws.request import profiler_config
from launcher.planner.plan import HostPlan, Plan
from launcher.planner.source_package import copy_files
from launcher.record import records


def lay_out(plan: Plan, host: HostPlan, folder: records.RunFolder, *, interface: str) -> None:
    """Write a host's /opt/ml without its channels.

    Args:
        interface: the script's network interface.
    """
    base = folder.host(host.name)
    for place in ("code", "model", "output/data", "input/data", "input/config", "checkpoints"):
        (base / place).mkdir(parents=True)
    copy_files(list(plan.files), base / "code")
    if plan.resumes is not None:
        earlier = records.RunFolder(records.store() / plan.resumes).host(host.name) / "checkpoints"
        if earlier.is_dir():  # copied, not linked: a script may change its files in place
            shutil.copytree(earlier, base / "checkpoints", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    for name, text in config_files(plan, host, interface).items():
        records.write_atomically(base / "input/config" / name, text, durable=False)


def show_channel(at: Path, place: Path) -> None:
    """Link a channel's folder, or its file in a new folder."""
    if place.is_dir():
        at.symlink_to(place, target_is_directory=True)
    else:
        at.mkdir()
        (at / place.name).symlink_to(place)


def config_files(plan: Plan, host: HostPlan, interface: str = "lo") -> dict[str, str]:
    """Name -> text of SageMaker's files below input/config."""
    resources = {
        "current_host": host.address,
        "current_instance_type": "local",
        "current_group_name": "homogeneousCluster",
        "hosts": [other.address for other in plan.hosts],
        "network_interface_name": interface,
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": "local",
                "hosts": [other.address for other in plan.hosts],
            }
        ],
    }
    channels = {
        name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        for name in plan.channels
    }
    written: dict[str, Any] = {
        "hyperparameters.json": plan.hyperparameters,
        "resourceconfig.json": resources,
        "inputdataconfig.json": channels,
    }
    if plan.job.profiling is not None:
        written["profilerconfig.json"] = profiler_config(plan.job)
    return {name: json.dumps(value, indent=1) for name, value in written.items()}

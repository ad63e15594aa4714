"""The SageMaker container contract as a script sees it, with defaults for a plain shell. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher_observer.contract import contract_value


@dataclass(frozen=True)
class Environment:
    """Where a script finds its data and leaves its results."""

    host: str
    """This host's name; algo-1 in a plain shell."""
    model_dir: Path
    """What is here becomes model.tar.gz."""
    output_data_dir: Path
    """This host's own folder below SM_OUTPUT_DATA_DIR, for measurements and reports."""
    failure_file: Path
    """Its first 1,024 characters become the job's FailureReason."""
    channels: Mapping[str, Path]
    checkpoint_dir: Path | None
    """Where checkpoints are read and written; None in a job without any: SageMaker makes the folder for jobs with `checkpoints`."""

    def channel(self, name: str) -> Path:
        """A data channel's folder: SM_CHANNEL_<NAME>, or data/<name> in a plain shell.

        Raises:
            FileNotFoundError: there is no such folder; the message says how to give one.
        """
        folder = self.channels.get(name, Path("data") / name)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no channel {name}: {folder} is not a folder. In a job, add inputs.{name}; in a shell, set SM_CHANNEL_{name.upper()}"
            )
        return folder


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """The contract's SM_* variables; without them everything lies below ./output."""
    # the toolkits of SDK v2 and v3 both set these (the names: sagemaker-training's ENVIRONMENT_VARIABLES.md)
    channels = {
        name: Path(environ[f"SM_CHANNEL_{name.upper()}"]) for name in json.loads(environ.get("SM_CHANNELS", "[]"))
    }
    prefix = "SM_CHANNEL_"  # in a plain shell, SM_CHANNEL_TRAIN alone is enough
    channels |= {key[len(prefix) :].lower(): Path(value) for key, value in environ.items() if key.startswith(prefix)}
    output = Path(environ.get("SM_OUTPUT_DIR", "output"))
    host = environ.get("SM_CURRENT_HOST", "algo-1")
    return Environment(
        host=host,
        model_dir=Path(environ.get("SM_MODEL_DIR", output / "model")),
        output_data_dir=Path(environ.get("SM_OUTPUT_DATA_DIR", output / "data")) / host,
        failure_file=output / "failure",
        channels=channels,
        checkpoint_dir=_checkpoint_dir(environ),
    )


def processes_on_host(environ: Mapping[str, str] = os.environ) -> int:
    """Training processes on this host, as torchrun or mpirun says; 1 without them."""
    return int(environ.get("LOCAL_WORLD_SIZE") or environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)


def training_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The hosts that train, in the order of their ranks: those of the instance groups that the job's distribution names; all, if there
    is one group or none is named. Empty in a plain shell."""
    hosts: list[str] = contract_value(environ, "SM_HOSTS", [])
    groups = contract_value(environ, "SM_INSTANCE_GROUPS_DICT", {})
    named = contract_value(environ, "SM_FRAMEWORK_PARAMS", {}).get("sagemaker_distribution_instance_groups") or []
    training = {host for name in named for host in groups.get(name, {}).get("hosts", [])}
    return [host for host in hosts if host in training] or hosts


def is_streamed(folder: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a channel's folder streams from S3 (FastFile), so that each read of a file goes there."""
    channels = contract_value(environ, "SM_INPUT_DATA_CONFIG", {})
    return any(
        isinstance(how, dict)
        and how.get("TrainingInputMode") == "FastFile"
        and Path(environ.get(f"SM_CHANNEL_{name.upper()}", "")) == folder
        for name, how in channels.items()
    )


def _checkpoint_dir(environ: Mapping[str, str]) -> Path | None:
    if "SM_CURRENT_HOST" not in environ:
        return Path("output/checkpoints")
    # the toolkits have no variable for it
    folder = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")) / "checkpoints"
    return folder if folder.is_dir() else None

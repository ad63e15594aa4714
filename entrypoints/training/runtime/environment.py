"""The SageMaker container contract as a script sees it, with defaults for a plain shell. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTRACT_FILES = {
    "SM_HPS": "hyperparameters.json",
    "SM_FRAMEWORK_PARAMS": "hyperparameters.json",
    "SM_HOSTS": "resourceconfig.json",
    "SM_INPUT_DATA_CONFIG": "inputdataconfig.json",
}
"""What the toolkit makes each variable of."""


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
    """Where checkpoints are found and left; None in a job that keeps none: SageMaker makes the folder for jobs with `checkpoints`."""

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
    """Training processes of this host, as torchrun or mpirun says; 1 without them."""
    return int(environ.get("LOCAL_WORLD_SIZE") or environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)


def contract_value(environ: Mapping[str, str], name: str, default: Any) -> Any:
    """The value of one of the contract's variables that hold JSON; from SageMaker's own file where the variable was cut short.

    On hosts 2 … n of an mpirun job the variables come from /etc/environment, of which PAM before 1.4 (Ubuntu 20.04, so every image with
    smddp) keeps 1,023 characters a line (https://github.com/linux-pam/linux-pam/issues/31).

    Args:
        name: SM_HPS, SM_FRAMEWORK_PARAMS, SM_HOSTS or SM_INPUT_DATA_CONFIG.
        default: where there is no such variable.

    Raises:
        ValueError: the variable is no JSON, and there is no file in its place.
    """
    if not environ.get(name):
        return default
    try:
        return json.loads(environ[name])
    except ValueError as error:
        config = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "input/config")
        try:
            found = json.loads((config / CONTRACT_FILES[name]).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ValueError(
                f"{name} is cut short or no JSON ({error}), and {config / CONTRACT_FILES[name]} cannot be read"
            ) from error
    if name == "SM_HOSTS":
        return found["hosts"]
    if name == "SM_INPUT_DATA_CONFIG":
        return found
    values = {key: _typed(value) for key, value in found.items()}
    if name == "SM_FRAMEWORK_PARAMS":
        return {key: value for key, value in values.items() if key.startswith("sagemaker_")}
    return values


def _typed(value: Any) -> Any:
    """A hyperparameter as the toolkit reads it from its file: JSON in a text, or the text itself."""
    try:
        return json.loads(value)
    except (ValueError, TypeError):
        return value


def is_streamed(folder: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a channel's folder shows S3 as it is (FastFile), so that each read of a file goes there."""
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

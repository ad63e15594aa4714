"""The SageMaker container contract: its variables that hold JSON, and the host's name. Standard library only."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTRACT_FILES = {
    "SM_HPS": "hyperparameters.json",
    "SM_FRAMEWORK_PARAMS": "hyperparameters.json",
    "SM_HOSTS": "resourceconfig.json",
    "SM_INPUT_DATA_CONFIG": "inputdataconfig.json",
    "SM_INSTANCE_GROUPS_DICT": "resourceconfig.json",
}
"""The file that the toolkit makes each variable from."""


def contract_value(environ: Mapping[str, str], name: str, default: Any) -> Any:
    """The value of a contract variable that holds JSON; read from SageMaker's own file if the variable was truncated.

    On hosts 2 … n of an mpirun job the variables come from /etc/environment, whose lines PAM before 1.4 (Ubuntu 20.04, so every image
    with smddp) truncates to 1,023 characters (https://github.com/linux-pam/linux-pam/issues/31).

    Args:
        name: one of CONTRACT_FILES.
        default: if there is no such variable.

    Raises:
        ValueError: the variable is not JSON, and its file cannot be read.
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
                f"{name} is truncated or not JSON ({error}), and {config / CONTRACT_FILES[name]} cannot be read"
            ) from error
    if name == "SM_HOSTS":
        return found["hosts"]
    if name == "SM_INSTANCE_GROUPS_DICT":
        return {group["instance_group_name"]: group for group in found.get("instance_groups", [])}
    if name == "SM_INPUT_DATA_CONFIG":
        return found
    values = {key: _typed(value) for key, value in found.items()}
    if name == "SM_FRAMEWORK_PARAMS":
        return {key: value for key, value in values.items() if key.startswith("sagemaker_")}
    return values


def _typed(value: Any) -> Any:
    """A hyperparameter as the toolkit reads it from its file: parsed JSON, or the text itself."""
    try:
        return json.loads(value)
    except (ValueError, TypeError):
        return value


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This host as Debugger's readers name it, algo-N; by its position among the hosts if they have other names."""
    own = environ.get("SM_CURRENT_HOST", "algo-1")
    hosts = contract_value(environ, "SM_HOSTS", [])
    if re.fullmatch(r"algo-\d+", own) or own not in hosts:
        return own if own.startswith("algo-") else "algo-1"
    return f"algo-{hosts.index(own) + 1}"

"""The conditions under which trials may be compared: their code, their settings, and the machine that they run on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.config.issues import mistake
from launcher.config.job import Job
from launcher.planner import git
from launcher.planner.source_package import SourceFile, code_checksum

CONDITIONS = ("code", "settings", "machine")
"""Columns that are the same in every row of a table: a checksum of the packaged code; the job's settings, as JSON, except those that
the study varies; and where the trials run."""


class Code:
    """The code of trials, as it is when the first of them begins."""

    def __init__(self, files: Sequence[SourceFile]):
        self.files, self.checksum = files, code_checksum(files)
        self._each = {file.path: code_checksum([file]) for file in files}

    def refuse_changes(self, table: Path) -> None:
        """Before a trial starts: raise UserError if a file was changed or removed meanwhile.

        New files do not count: the table may be one, or what a script writes beside itself.

        Args:
            table: of the trials.
        """
        gone = [file.path for file in self.files if file.source is not None and not file.source.is_file()]
        left = [file for file in self.files if file.path not in gone]
        changed = gone + [file.path for file in left if code_checksum([file]) != self._each[file.path]]
        if changed:
            fix = (
                f"put it back, and the same command continues; or start anew: rm {table}, or name another file with --table; "
                "if trials write it, remove it and the table first"
            )
            raise mistake("source", f"was changed while trials run: {', '.join(changed[:5])}", fix)


def commit_of(source: Path) -> str:
    """The commit that a folder is at, with a + if it has uncommitted changes; "" outside a repository."""
    state = git.state(source)
    return (state["commit"][:12] + ("" if state["clean"] else "+")) if state.get("commit") else ""


def settings_of(job: Job, varied: Sequence[str]) -> str:
    """Everything in a job that its measurements depend on, except the hyperparameters that the study varies; as JSON."""
    parts = ("script", "distribution", "custom_mpi_options", "inputs", "environment", "profiling", "debugger")
    whole = job.with_whole_paths(job.model_dump(exclude_none=True))
    values = {name: value for name, value in whole.items() if name in parts}
    compute = (
        "instance_type",
        "instance_count",
        "instance_groups",
        "training_groups",
        "processes_per_host",
        "shm_gb",
        "memory_gb",
    )
    values["compute"] = {name: value for name, value in job.compute.model_dump().items() if name in compute and value}
    if job.network.encrypt_traffic:
        values["network"] = {"encrypt_traffic": True}
    values["hyperparameters"] = {name: value for name, value in job.hyperparameters.items() if name not in varied}
    if values.pop("environment", None):  # it may hold secrets, and tables are shared
        values["environment"] = hashlib.sha256(json.dumps(job.environment, sort_keys=True).encode()).hexdigest()[:16]
    return json.dumps(values, sort_keys=True)


def machine_of(job: Job, on: str) -> str:
    """Where the trials run, with the hardware and the software that compute."""
    return f"{on}: {backends.get(on).machine(job)}"


COMPUTING = (
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH_",
    "LD_",
    "PYTHONPATH",
)
"""Prefixes of environment variables that may change how a command computes."""


def software(program: str) -> str:
    """The software a command computes with: the program, its Python's version of torch, and the variables that matter.

    Args:
        program: the command's first word.
    """
    place = shutil.which(program) or program
    python = place if Path(place).name.startswith("python") else _interpreter(Path(place))
    version = "no torch found"
    if python:
        asked = [python, "-c", "import importlib.metadata as found; print(found.version('torch'))"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
            version = f"torch {done.stdout.strip()}" if done.returncode == 0 else version
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith(COMPUTING)}
    checksum = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:8]
    return f"{place}, {version}" + (f", {' '.join(given)} ({checksum})" if given else "")


def _interpreter(program: Path) -> str:
    """The Python in a script's shebang line, such as `torchrun`'s; "" if it starts another program."""
    try:
        with open(program, "rb") as file:
            line = file.readline(200)
    except OSError:
        return ""
    words = line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
    return words[-1] if words and Path(words[-1]).name.startswith("python") else ""


def difference(condition: str, before: str, now: str, commit_before: str, commit: str) -> str:
    """How a table's trials differ from those to come, in words."""
    if condition == "code":
        if commit_before == commit:  # none, or one with other uncommitted changes
            of = f", with other changes since commit {commit.rstrip('+')}" if commit else ", in no git repository"
            return f"different code: its files were changed, or are another folder's{of}"
        return f"different code: commit {commit_before or 'unknown'}, now {commit or 'unknown'}"
    if condition == "machine":
        return f"a different machine: {before}; now {now}"
    try:
        one, other = _flat(json.loads(before)), _flat(json.loads(now))
    except ValueError:
        return "different settings, which cannot be read"
    changed = [
        f"{key} {one.get(key, 'not set')!r}, now {other.get(key, 'not set')!r}"
        for key in sorted({**one, **other})
        if one.get(key) != other.get(key)
    ]
    return "different settings: " + "; ".join(changed)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {key: value for name, below in values.items() for key, value in _flat(below, f"{prefix}{name}.").items()}

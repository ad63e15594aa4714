"""The machine that the suite runs on: GPU, driver, versions, commit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.gpu import ROOT

DRIVER = Path("/proc/driver/nvidia/version")

PACKAGES = (
    "torch",
    "timm",
    "numpy",
    "opencv-python-headless",
    "pillow",
    "psutil",
    "safetensors",
    "simplejpeg",
    "triton",
)
DALI = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")


def no_gpu() -> str | None:
    """Why the suite cannot run here, in a line; None if there is a GPU. It does not start CUDA, so that forks may use it."""
    if importlib.util.find_spec("torch") is None:
        return "no GPU suite here: torch is not installed"
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if torch.cuda.is_available():
        return None
    return f"no GPU here: torch {torch.__version__} finds no CUDA device, and every check of the GPU suite needs one"


def describe(command: str, commit: str | None) -> dict[str, Any]:
    """What the page says about this machine and this call. It starts CUDA: call it in its own process.

    Args:
        command: as given, without this machine's paths.
        commit: of the source if git cannot tell. None: ask git.
    """
    import torch

    found: dict[str, Any] = {
        "device": "CPU",
        "driver": None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: version for name in (*PACKAGES, *DALI) if (version := _version(name))},
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or _commit(),
        "command": command,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "gpu_memory_gib": properties.total_memory / 2**30,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": _driver(),
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    reported = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    if reported is None and DRIVER.is_file():
        found = re.search(r"Module\D+([\d.]+)", DRIVER.read_text(encoding="ascii", errors="replace"))
        reported = found and found[1]
    return reported


def _commit() -> str:
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    if commit is None:
        return "unknown"
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--", "entrypoints", "tests/gpu"])
    return f"{commit} with uncommitted changes" if changed else commit


def _output(command: Sequence[str]) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None

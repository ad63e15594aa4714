"""What a training process and its workers take of their machine: CPU seconds, usable cores, the GPU's memory."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from launcher_observer.system.host import usable_cores

from training.runtime import accelerator

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def worker_cpu_seconds() -> float:
    """CPU seconds, user's and system's, that this process's living worker processes have used so far."""
    ticks = 0
    for worker in multiprocessing.active_children():
        try:
            text = Path(f"/proc/{worker.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:  # it has ended in this moment
            continue
        ticks += sum(int(field) for field in text.rpartition(")")[2].split()[11:13])  # proc(5): utime and stime
    return ticks / TICKS_A_SECOND


def hardware(device: torch.device) -> dict[str, Any]:
    """What this process runs on, JSON-ready: `cores`, `cpu`, `torch`; on a GPU also `gpu`, `gpu_memory_gib` (all of it) and
    `gpu_used_gib` (what is taken of it now: torch's cache, which keeps the most that training held, and all else)."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "cores": usable_cores(),
        "cpu": names[0] if names else os.uname().machine,
        "torch": torch.__version__,
    }
    if accelerator.is_gpu(device):
        free, total = accelerator.memory(device)
        found |= {
            "gpu": accelerator.name(device),
            "gpu_memory_gib": total / 2**30,
            "gpu_used_gib": (total - free) / 2**30,
        }
    return found

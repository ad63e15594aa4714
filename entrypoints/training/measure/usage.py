"""What a training process runs on: usable cores, the GPU and its memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from launcher_observer.system.host import usable_cores

from training.runtime import accelerator


def hardware(device: torch.device) -> dict[str, Any]:
    """What this process runs on, JSON-ready: `cores`, `cpu`, `torch`; on a GPU also `gpu`, `gpu_memory_gib` (all of it) and
    `gpu_used_gib` (in use now: torch's cache, which keeps the most that training held, and all else)."""
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

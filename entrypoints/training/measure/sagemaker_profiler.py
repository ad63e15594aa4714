"""SageMaker Profiler, if a job's `profiling.profiler` asks for it and its image has it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from training.measure.annotate import sagemaker_profiler
from training.runtime import accelerator
from training.settings.scripts import TrainingSettings

STEPS = 300
"""The most steps that are recorded: https://docs.aws.amazon.com/sagemaker/latest/dg/profiler-prepare.html."""


class SageMakerProfiler:
    """Records a window of this process's steps: `profile_steps` of them, or STEPS, after `profile_after`. Every rank records its own.

    Args:
        log: logs what is recorded, or why nothing is although the job asks for it.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        device: torch.device,
        log: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
    ):
        self._device, self._log = device, log
        self._first, self._steps = settings.profile_after, settings.profile_steps or STEPS
        self._seen, self._running = 0, False
        module, asked = sagemaker_profiler(), is_asked_for(environ)
        self._module = module if asked else None  # two profilers at once would take the GPU's events from each other
        if asked and module is None:
            log(
                "SageMaker Profiler was requested (profiling.profiler) but records nothing: this image lacks the module smprof. "
                "Take an image with AWS's wheel of it, or set profile_steps, which uses PyTorch's own profiler"
            )

    def step(self) -> None:
        """A step begins now."""
        if self._module is not None and self._seen == self._first:
            self._start(self._module)
        elif self._running and self._seen == self._first + self._steps:
            self.close()
        self._seen += 1

    def close(self) -> None:
        """End the recording, if one is under way."""
        if self._running:
            assert self._module is not None
            accelerator.synchronize(self._device)
            self._module.SMProfiler.instance().stop_profiling()
            self._running = False

    def _start(self, module: Any) -> None:
        profiler, config = module.SMProfiler.instance(), module.Config()
        config.profiler = {"EnableCuda": "1" if accelerator.is_gpu(self._device) else "0"}
        profiler.configure(config)
        profiler.start_profiling()
        self._running = True
        self._log(f"SageMaker Profiler records steps {self._first + 1} to {self._first + self._steps} of each process")


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the job's profiler configuration, which SageMaker passes in a file, has the Profiler's parameters."""
    file = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "input/config/profilerconfig.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return "CPUProfilingDuration" in (config.get("ProfilingParameters") or {})
    except (OSError, ValueError, AttributeError, TypeError):
        return False

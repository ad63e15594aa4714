"""Where a plan runs. Each backend is one module with these functions, and none knows what a job trains:

check(job, source) -> list[Finding]              what this machine lacks for it, and what it will ignore
hosts(job) -> tuple[HostPlan, ...]               what each host will be and run
processes_per_host(job) -> int                   training processes on each
toolkit_hyperparameters(job, run_name) -> dict   what is added to the job's own for the container toolkit
LEFT_BEHIND                                      files of the source folder that do not travel
start(plan, folder, lock, lifeline) -> None      the effects; returns when the run is under way
stop(folder, reason) -> None                     asks a run to stop; returns at once
"""

from __future__ import annotations

import importlib
from types import ModuleType

BACKENDS = {"process": "launcher.backends.process"}
"""Name on the command line -> module."""


def get(name: str) -> ModuleType:
    """The backend of that name, which must be one of BACKENDS."""
    return importlib.import_module(BACKENDS[name])

"""Where a plan runs. Each backend is one module with these functions, and none knows what a job trains:

hosts(job, script_arguments) -> tuple[HostPlan, ...]     what each host will be and run; pure but for counting devices
check(job) -> list[Finding]                              what this machine lacks for it
start(plan, folder, lifeline) -> None                    the effects; returns when the run is under way
stop(folder, reason) -> None                             asks a run to stop; returns at once
"""

from __future__ import annotations

import importlib
from types import ModuleType

BACKENDS = {"process": "launcher.backends.process"}
"""Name on the command line -> module."""


def get(name: str) -> ModuleType:
    """The backend of that name, which must be one of BACKENDS."""
    return importlib.import_module(BACKENDS[name])

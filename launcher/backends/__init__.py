"""Where a plan runs. Each backend is one module with these functions, and none knows what a job trains:

check(job, source, files) -> list[Finding]       what is wrong with the job there, and what will be ignored
travelling(job, files) -> list[TravelFile]       of the source folder, and what this kit adds
channels(job, places) -> (channels, uploads)     what each channel shows, and what is uploaded for it
hosts(job) -> tuple[HostPlan, ...]               what each host will be and run
world_size(job) -> int                           training processes on all of them
toolkit_hyperparameters(job, run_name) -> dict   what is added to the job's own for the container toolkit
request(job, run_name, channels) -> dict | None  what SageMaker is sent
about(job) -> dict[str, str]                     what else the plan shows, by name
DIFFERENCES: Mapping[str, str]                   what differs from SageMaker there, and why
price(job) -> Price | None                       what it costs at most
check_online(plan) -> list[Finding]              what a look beyond this machine shows, read-only
start(plan, folder, lock, lifeline) -> None      the effects; returns when the run is under way
stop(folder, reason) -> None                     asks a run to stop; returns at once
spend(folder) -> float | None                    US dollars so far
refresh(folder) -> bool                          brings what is new into the run's folder; whether anything was. Raises Unreachable

`aws` alone has also: bring(plan), which uploads for plan.estimator(); adopt(name, region), for a job that another machine
started; profile(folder, interval_ms), which switches system metrics.
"""

from __future__ import annotations

import importlib
from types import ModuleType

BACKENDS = {
    "process": "launcher.backends.process",
    "docker": "launcher.backends.docker",
    "aws": "launcher.backends.aws",
}
"""Name on the command line -> module."""


def get(name: str) -> ModuleType:
    """The backend of that name, which must be one of BACKENDS."""
    return importlib.import_module(BACKENDS[name])

"""The start of a local run's supervisor, and the environment of its hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.aws import secrets_manager
from launcher.backends import local_hosts
from launcher.config.issues import mistake
from launcher.config.redaction import secrets_in
from launcher.planner.plan import HostPlan, Plan
from launcher.record import disk, records

SECRETS = "LAUNCHER_SECRETS"
"""The variable that passes the job's secrets to the supervisor."""


def start_supervisor(module: str, plan: Plan, folder: records.RunFolder, lock: int, lifeline: int | None) -> None:
    """Start a run's supervisor, and wait until it runs."""
    folder.supervisor_log.parent.mkdir(exist_ok=True)
    disk.hold_reserve(folder.reserve)
    command = [sys.executable, "-m", module, str(folder.path)]
    command += ["--lifeline", str(lifeline)] if lifeline is not None else []
    package = str(Path(__file__).parents[2])  # the supervisor starts in another folder
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        SECRETS: json.dumps(
            {**secrets_in(plan.job.environment), **secrets_manager.values(plan.job)}
        ),  # never written to disk
    }
    with open(folder.supervisor_log, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder.path,  # a user's module in the current folder must not replace ours
            pass_fds=[lock] if lifeline is None else [lock, lifeline],
            env=environment,
        )
    while not folder.supervisor.exists():
        if process.poll() is not None:
            raise mistake(
                "run", f"the supervisor ended with status {process.returncode}", f"read {folder.supervisor_log}"
            )
        time.sleep(0.01)
    threading.Thread(target=process.wait, daemon=True).start()  # reaps it


def shim_environment(plan: Plan, host: HostPlan, folder: records.RunFolder, outer: Mapping[str, str]) -> dict[str, str]:
    """A host's environment: inherited variables of `outer`, SageMaker's, and the job's."""
    return {
        **local_hosts.inherited(outer),
        "SAGEMAKER_BASE_DIR": str(folder.host(host.name)),
        "TRAINING_JOB_NAME": plan.name,
        **host.environment,
        **json.loads(outer.get(SECRETS, "{}")),
    }

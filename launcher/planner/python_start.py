"""sitecustomize.py of the source package: what every Python process of a job does before the script's own code.

It reads the job's secrets where the job itself must, starts the observer, and runs the sitecustomize.py that it hides. The
container toolkit puts the code's folder on PYTHONPATH; Python imports a module of this name as it starts, wherever on its path:
https://docs.python.org/3/library/site.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from launcher.config.job import Job
from launcher.planner.source_package import SourceFile, kit_files

FILE, OF_THE_SOURCE = "sitecustomize.py", "sitecustomize_of_the_source.py"
"""The launcher's file, and the name under which the source folder's own travels (launcher_observer/hidden_start.py)."""

HEAD = b'"""Made by vision-launcher. Every Python process of the job runs it first."""'
PACKAGE = "launcher_observer"

SWITCH = "LAUNCHER_OBSERVE"
"""The variable by which a job's environment switches the observer off, for all or for some of its processes."""

OFF = ("false", "off", "no", "0")
"""Its values that do, as in launcher_observer/start.py."""

MEASURED_RUN = re.compile(rb"^\s*(?:from|import)\s+training\.engine\.run\b", re.MULTILINE)
"""What this kit's scripts have in common, and others that train with its loop."""


def with_python_start(
    files: list[SourceFile], *, observe: bool, secrets: Mapping[str, Mapping[str, str]]
) -> list[SourceFile]:
    """The files, with FILE and what it imports if there is anything to start. For a recorded run, FILE is rebuilt.

    Args:
        observe: whether the observer starts.
        secrets: variable -> {"secretsmanager": …}, which the job reads itself. Only their names travel.
    """
    files = [file for file in files if file.path != FILE or not file.read().startswith(HEAD)]
    if not observe and not secrets:
        return [replace(file, path=FILE) if file.path == OF_THE_SOURCE else file for file in files]
    files = [replace(file, path=OF_THE_SOURCE) if file.path == FILE else file for file in files]
    if not any(file.path.startswith(f"{PACKAGE}/") for file in files):
        files += kit_files(PACKAGE)
    content = text(observe=observe, secrets=secrets)
    return sorted([*files, SourceFile(FILE, None, len(content), content)], key=lambda file: file.path)


def text(*, observe: bool, secrets: Mapping[str, Mapping[str, str]]) -> bytes:
    """FILE's text."""
    lines = [HEAD.decode(), "", f"from {PACKAGE}.hidden_start import run_hidden"]
    if secrets:
        lines += [f"from {PACKAGE}.declared_secrets import provide", "", f"provide({dict(secrets)!r})"]
    if observe:
        lines += [f"from {PACKAGE}.start import start", "", "start()"]
    return ("\n".join([*lines, "run_hidden(__file__)"]) + "\n").encode()


def switched_off(environment: Mapping[str, str]) -> str:
    """The value of SWITCH by which an environment switches the observer off; "" if it does not."""
    value = environment.get(SWITCH, "")
    return value if value.lower() in OFF else ""


def why_not_observed(job: Job, files: list[SourceFile]) -> str:
    """Why the observer does not start in a job's processes; "" if it does.

    Args:
        files: the source files.
    """
    if any(file.path == job.script and MEASURED_RUN.search(file.read()) for file in files):
        return f"{job.script} opens its run with training.engine.run, which measures it"
    if not job.observe:
        return "observe: false"
    if value := switched_off(job.environment):
        return f"environment.{SWITCH} is {value}"
    return ""

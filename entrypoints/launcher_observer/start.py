"""Called as every Python process of a run starts, from the sitecustomize.py that the launcher puts on its path.

It decides whether and where to record, keeps the host's system monitor running, and installs the hooks once torch is imported.
This is all that a process without torch pays for, so this file and those that it imports import next to nothing.
"""

from __future__ import annotations

import os

from launcher_observer.report import report

TYPE_CHECKING = False
if TYPE_CHECKING:  # `types` and `typing` take milliseconds
    from types import ModuleType

SWITCH, PLACE = "LAUNCHER_OBSERVE", "LAUNCHER_OBSERVER_FOLDER"
"""Variables: a word of OFF switches the observer off; the folder to record in, instead of the job's own."""

OFF = ("false", "off", "no", "0")
"""In small or capital letters."""

BELOW_OUTPUT = "launcher-observer"
"""Folder in a job's output, since a script may want to make one with its host's name."""

_started = False


def start() -> None:
    """Observe this process if its run is observed. An error is reported, and the process goes on without the affected part."""
    global _started
    if _started:  # two folders of the path hold a launcher's sitecustomize.py: a watched command watches another
        return
    try:
        folder = recording_folder()
    except OSError as error:
        report(f"nothing is measured: {error}")
        return
    if folder is None:  # a notebook may name one later
        return
    _started = True
    try:
        from launcher_observer.system.background import Presence

        Presence(folder, quiet=True)
    except Exception as error:
        report(f"no system metrics: {error!r}")
    from launcher_observer.after_import import after_import

    def take_hold(_: ModuleType) -> None:
        try:
            from pathlib import Path

            from launcher_observer.torch_hooks import when_imported

            when_imported(Path(folder))
        except Exception as error:
            report(f"no steps are measured: {error!r}")

    after_import("torch", take_hold)


def recording_folder() -> str | None:
    """The folder to record in, which exists; None: record nothing.

    Raises:
        OSError: it cannot be created, or the named one is not a folder.
    """
    environ = os.environ
    if environ.get(SWITCH, "").lower() in OFF:
        return None
    if PLACE in environ:
        if not os.path.isdir(environ[PLACE]):
            raise NotADirectoryError(f"{PLACE}={environ[PLACE]} is not a folder: create it, or unset the variable")
        environ[PLACE] = os.path.abspath(environ[PLACE])  # the script may change folders
        return environ[PLACE]
    output = environ.get("SM_OUTPUT_DATA_DIR", "")
    if not os.path.isdir(output):  # outside a job, or in its toolkit
        return None
    folder = os.path.join(output, BELOW_OUTPUT, environ.get("SM_CURRENT_HOST", "algo-1"))
    os.makedirs(folder, exist_ok=True)
    return folder

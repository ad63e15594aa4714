"""Runs of `launcher watch`: commands on this machine, with no job to plan or restart."""

from __future__ import annotations

from launcher.backends.base import Starter
from launcher.config.issues import Issue
from launcher.record.records import RunFolder


class Watch(Starter):
    """A command that `launcher watch` started and waits for."""

    name = "watch"

    def stop(self, folder: RunFolder, reason: str) -> None:
        """Ask the launcher that watches the command, perhaps on another machine, to send it SIGTERM."""
        folder.request_stop(reason)

    def why_not_planned_again(self, folder: RunFolder) -> Issue:
        fix = f"run the command again: launcher watch --name {folder.job_name} -- …; launcher show {folder.name} prints it"
        return Issue(
            key="run", found=f"{folder.name} was started by launcher watch: a command without a config", fix=fix
        )

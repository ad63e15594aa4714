"""What a script does on a host that prepares images for others: it keeps a node until the training hosts are gone."""

from __future__ import annotations

import signal
import time

from launcher_observer.system.monitor import system_monitor

from training.runtime.environment import read_environment
from training.runtime.failure import failure_file
from training.runtime.reporting import write_line
from training.servers.groups import Groups, read_groups
from training.servers.ray_node import is_reachable, node, require_package, wait_for_head
from training.settings.scripts import TrainingSettings

LOOK_SECONDS = 1.0

GONE_SECONDS = 5.0
"""The meeting place refuses connections so long before the training hosts count as gone."""


def serves(settings: TrainingSettings) -> bool:
    """Whether this host prepares images for others, instead of training."""
    return settings.worker_type == "remote" and read_groups().serves


def serve(settings: TrainingSettings) -> None:
    """Serve until the training hosts have ended, however they did: their own end is the job's.

    SIGTERM is not heeded: trainers that get it too still need images for their last steps.

    Raises:
        TimeoutError: they did not begin in time.
        ConnectionError: Ray's node of this host failed while they were there.
    """
    environment, groups = read_environment(), read_groups()
    require_package()
    with (
        failure_file(environment.failure_file),
        system_monitor(environment.output_data_dir, 0, wanted=settings.system_monitor),
    ):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_line(f"{groups.host} prepares images for {', '.join(groups.training)}")
        wait_for_head(groups, settings.process_group_minutes * 60)
        failures = 0
        while True:
            with node(groups, environment.output_data_dir / "ray.log") as process:
                while process.poll() is None and not _is_gone(groups):
                    time.sleep(LOOK_SECONDS)
                if _is_gone(groups):
                    break
            failures += 1  # the node ended and the head is there: it joins again
            if failures > 3:
                raise ConnectionError(
                    f"Ray's node on {groups.host} ended {failures} times, the last time with code {process.returncode}: "
                    f"see {environment.output_data_dir / 'ray.log'}"
                )
            write_line(f"Ray's node on {groups.host} ended with code {process.returncode}: starting it again")
        write_line("the training hosts have ended, and so do their servers")


def _is_gone(groups: Groups) -> bool:
    """Whether the meeting place has refused connections for a while. Lost packets are no refusal."""
    until = time.monotonic() + GONE_SECONDS
    while is_reachable(groups) is False:
        if time.monotonic() > until:
            return True
        time.sleep(LOOK_SECONDS)
    return False

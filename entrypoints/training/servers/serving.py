"""Serves images on a host that prepares them for others: keeps a node until the training hosts are gone."""

from __future__ import annotations

import signal
import time

from launcher_observer.system.monitor import system_monitor

from training.runtime.environment import read_environment
from training.runtime.failure import failure_file
from training.runtime.reporting import write_line
from training.servers.groups import read_groups
from training.servers.ray_node import is_reachable, node, require_package, wait_for_head
from training.settings.scripts import TrainingSettings

LOOK_SECONDS = 1.0

REFUSED_SECONDS, SILENT_SECONDS = 3.0, 15.0
"""Once they have started, the training hosts count as gone after this many seconds of refused connections; or of no answer at all, as when
their name is gone too, once this host's Ray node has given them up."""

RESTART_SECONDS, STARTED_SECONDS = 20.0, 40.0
"""Until the training hosts have answered for STARTED_SECONDS without a break, their Ray node may be started again, so they count as gone
only after RESTART_SECONDS: Ray gives up a start after 30 s, and listens only once it is imported."""


def serves(settings: TrainingSettings) -> bool:
    """Whether this host prepares images for others, instead of training."""
    return settings.worker_type == "remote" and read_groups().serves


class _Stopped(Exception):
    """SIGTERM came before the training hosts were there."""


def serve(settings: TrainingSettings) -> None:
    """Serve until the training hosts have ended, for whatever reason: their own end is the job's.

    SIGTERM ends a host that is still waiting for them. Once they are there, it is ignored: trainers that get it too still need images
    for their last steps.

    Raises:
        TimeoutError: they did not start in time, or vanished.
        ConnectionError: Ray's node of this host failed while they were there.
    """
    environment, groups = read_environment(), read_groups()
    require_package()
    with (
        failure_file(environment.failure_file),
        system_monitor(environment.output_data_dir, 0, wanted=settings.system_monitor),
    ):
        try:
            signal.signal(signal.SIGTERM, _stop)  # before anybody can know that it is here
            write_line(f"{groups.host} prepares images for {', '.join(groups.training)}")
            wait_for_head(groups, 2 * settings.process_group_minutes * 60)  # which itself waits for the ranks
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except _Stopped:
            write_line("stopped on SIGTERM before the training hosts were up")
            return
        with node(groups, environment.output_data_dir / "ray.log") as own:
            heard = answering = time.monotonic()
            started = False
            while True:
                reachable, now = is_reachable(groups), time.monotonic()
                if reachable:
                    heard, started = now, started or now - answering > STARTED_SECONDS
                else:
                    answering = now
                silent = now - heard
                if reachable is False:
                    gone = silent > (REFUSED_SECONDS if started else RESTART_SECONDS)
                else:
                    gone = own.has_ended() and silent > SILENT_SECONDS
                if gone:
                    break
                if silent > settings.process_group_minutes * 60:
                    minutes = f"{settings.process_group_minutes:g} min"
                    raise TimeoutError(f"{groups.training[0]} has not answered for {minutes}")
                if reachable:
                    own.keep()
                time.sleep(LOOK_SECONDS)
        write_line("the training hosts have ended; their servers stop too")


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not disturb the end
    raise _Stopped

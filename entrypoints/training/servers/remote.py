"""Training batches that other hosts make, for this process's loader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from training.data.batches import TrainingBatches
from training.data.loaders import Batches, Data
from training.data.workers import choose_threads
from training.distributed.world import World
from training.runtime.environment import Environment
from training.runtime.reporting import write_line
from training.servers.actor import Opened, Teacher
from training.servers.groups import read_groups
from training.servers.pool import Counts, Pool
from training.servers.ray_node import connected, node, require_package, wait_for_head
from training.servers.stream import Stream
from training.settings.scripts import TrainingSettings

if TYPE_CHECKING:  # it imports ray, which other jobs lack
    from training.servers.cluster import RayServers

PATIENCE = 30.0
"""Seconds without a server until this process goes on alone, or fails. With teachers, half of process_group_minutes if that is longer: a
restarted server reloads its teacher."""


class RemoteLoader:
    """The batches of a sampler, in its order, made by other hosts."""

    def __init__(self, pool: Pool, batches: TrainingBatches):
        self._pool, self._batches = pool, batches
        self._stream: Stream | None = None

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self._stream = Stream(self._pool, iter(self._batches))  # the epoch is fixed here, as in a DataLoader
        return iter(self._stream)

    def close(self) -> None:
        """End an iteration and what it has in flight."""
        if self._stream is not None:
            self._stream.close()


class ImageServers:
    """The servers of a job, for one training process.

    Attributes:
        teacher: asks servers for the logits of a teacher that they have; a script sets it before the first loader.
    """

    def __init__(self, settings: TrainingSettings, world: World, stack: contextlib.ExitStack):
        self._settings, self._world, self._stack = settings, world, stack
        self.teacher: Teacher | None = None
        self._placed = False
        self._pool: Pool | None = None
        self._servers: RayServers | None = None
        self._before = Counts()

    def asked(self, data: Data[Any, Any]) -> RayServers:
        """The servers as this process sees them. They open the data when this is first called."""
        from training.servers.cluster import Placement, RayServers

        assert data.elsewhere is not None, "every script's data can be opened on another host"
        if self._world.is_first and not self._placed:
            self._placed = True
            self._stack.enter_context(Placement(data.elsewhere, self.log))
        return RayServers(self._world.rank, self._world.size)

    def loader(self, data: Data[Any, Any], batches: TrainingBatches) -> Batches:
        """The training batches of these data."""
        self._servers = self.asked(data)
        wait_seconds = self._settings.process_group_minutes * 60
        patience = PATIENCE if self.teacher is None else max(PATIENCE, wait_seconds / 2)
        self._pool = Pool(
            self._servers,
            Opened(data.training, data.collate_training),
            go_on=self._settings.without_servers == "go_on",
            patience=patience,
            first_patience=max(PATIENCE, wait_seconds),
            threads=choose_threads(self._settings, self._world).count,
            device=self._world.device,
            processes=self._world.size,
            log=self.log,
            teacher=self.teacher,
        )
        self._before = Counts()
        loader = RemoteLoader(self._pool, batches)
        self._stack.callback(loader.close)  # before Ray goes, also after a failure
        return loader

    def window(self) -> dict[str, float]:
        """What servers did for this process since the last call, for the timeline: the numbers of Counts; and, as of now, `servers` and
        `threads`, the live ones that this process asks, and `part`, its share of all servers' threads."""
        if self._pool is None or self._servers is None:
            return {}
        now, before = replace(self._pool.counts), self._before
        self._before = now
        live = self._pool.live
        happened = {name: value - getattr(before, name) for name, value in asdict(now).items()}
        threads = sum(one.threads for one in live)
        return {"servers": len(live), "threads": threads, "part": self._servers.part, **happened}

    def log(self, text: str) -> None:
        """Log a line with this process's rank."""
        write_line(f"rank {self._world.rank}: {text}")


@contextlib.contextmanager
def image_servers(settings: TrainingSettings, environment: Environment, world: World) -> Iterator[ImageServers | None]:
    """The servers of a job whose images other hosts make, as long as the context lasts; None for any other job. A collective.

    Raises:
        ValueError: there are no such hosts, or Ray is missing.
        TimeoutError, ConnectionError: the cluster did not come together.
    """
    if settings.worker_type != "remote":
        yield None
        return
    groups, wait_seconds = read_groups(), settings.process_group_minutes * 60
    if not groups.serving:
        raise ValueError(
            "worker_type remote needs hosts that do not train: give the job a second group in compute.instance_groups, and name the "
            "training one in compute.training_groups"
        )
    require_package()
    with contextlib.ExitStack() as outer:
        process = None
        if world.is_first_on_host:
            if not groups.is_head:
                wait_for_head(groups, wait_seconds)
            process = outer.enter_context(node(groups, environment.output_data_dir / "ray.log"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(connected(groups, process, wait_seconds, talks=world.is_first))
            yield ImageServers(settings, world, stack)
        world.on_rank_zero(lambda: None)  # without a limit: rank 0 may still export
        world.any(False)  # the head goes when all have left

"""A script's run: what it opens first, and what the loop works with besides the task and the state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from launcher_observer.system.monitor import system_monitor

from training.data.broken import LISTING
from training.data.worker_processes import begin_server
from training.distributed.rendezvous import read_place
from training.distributed.stop_flag import StopSignal
from training.distributed.world import World, process_group
from training.engine.checkpoints import Checkpoints
from training.measure.arithmetic import Arithmetic, Counted
from training.measure.operators import OperatorWindow
from training.measure.sagemaker_profiler import SageMakerProfiler
from training.measure.timeline import Timeline
from training.measure.timeline_record import TimelineRecord
from training.models.precision import resolved
from training.runtime import numa
from training.runtime.environment import Environment, processes_on_host, read_environment
from training.runtime.failure import failure_file
from training.runtime.reporting import Reporter, write_line
from training.servers.remote import ImageServers, image_servers
from training.settings.scripts import TrainingSettings

Settings = TypeVar("Settings", bound=TrainingSettings)


@dataclass(frozen=True)
class Run:
    """What the loop works with besides the task and the state."""

    settings: TrainingSettings
    environment: Environment
    world: World
    report: Reporter
    stop: StopSignal
    checkpoints: Checkpoints
    timeline: Timeline
    record: TimelineRecord
    operators: OperatorWindow
    profiler: SageMakerProfiler
    arithmetic: Arithmetic
    servers: ImageServers | None = None
    """The servers, if other hosts make the job's training images. None: they do not."""


@contextlib.contextmanager
def started(settings: Settings) -> Iterator[tuple[Settings, Run]]:
    """A script's run, from its first line to its last.

    Inside, exceptions go to the failure file, each host's system is monitored, and the processes form one group.

    Returns:
        As `open_run`.
    """
    environment = read_environment()
    with (
        failure_file(environment.failure_file),
        system_monitor(environment.output_data_dir, read_place().local_rank, wanted=settings.system_monitor),
        process_group(settings.process_group_minutes) as world,
    ):
        if settings.numa_binding:  # before anything that inherits it, and after the monitor, which watches all cores
            world = _bound(world)
        with image_servers(settings, environment, world) as servers:
            settings, run = open_run(settings, environment, world)
            yield settings, replace(run, servers=servers)


def _bound(world: World) -> World:
    """The world of a process that stays next to its GPU from now on."""
    sharing, about = numa.bind(world.device, processes_on_host())
    if world.is_first or sharing is None:
        write_line(f"rank {world.rank}: {about}" if world.size > 1 else about)
    return replace(world, sharing_cores=sharing)


def open_run(settings: Settings, environment: Environment, world: World) -> tuple[Settings, Run]:
    """Open what a script needs from its first line on; from here on, SIGTERM requests a checkpoint and an early end.

    Returns:
        The settings, with the precision that `auto` stands for on this device; and the run, with the same settings.
    """
    precision, why = resolved(settings.precision, world.device)
    settings = replace(settings, precision=precision)
    begin_server(settings, world.device)
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    report = Reporter(environment.output_data_dir, active=world.is_first)
    if world.is_first_on_host:
        (environment.output_data_dir / LISTING).unlink(missing_ok=True)  # an earlier run's, in a plain shell
    report.log(str(world))
    report.log(f"precision {precision} ({why})")
    checkpoints = Checkpoints(
        environment.checkpoint_dir,
        world,
        fingerprint=settings.fingerprint(),
        keep=settings.keep_checkpoints,
        writing=settings.checkpoint_writing,
        log=report.log,
    )
    if not checkpoints.enabled:
        report.log("no checkpoints: the job has no checkpoint folder (set `checkpoints` in the config)")
    record = TimelineRecord(environment.output_data_dir, world, settings)
    record.passed("imports")
    operators = OperatorWindow(settings, world, environment.output_data_dir, report.log)
    profiler = SageMakerProfiler(settings, world.device, report.log)
    timeline = Timeline(world.device)
    run = Run(
        settings,
        environment,
        world,
        report,
        StopSignal(world),
        checkpoints,
        timeline,
        record,
        operators,
        profiler,
        Arithmetic(world.device),
    )
    return settings, run


def count_arithmetic(run: Run, image: torch.Tensor, trained: Iterable[Counted], asked: Iterable[Counted] = ()) -> None:
    """Count and record the operations of a run's models; from here on, its windows include utilisation. A probe skips this.

    Args:
        image, trained, asked: as `Arithmetic.count` takes them.
    """
    if run.settings.probe_seconds:  # time is short, and no window shows how fast training is
        return
    run.arithmetic.count(image, trained, asked)
    about = run.arithmetic.about()
    run.record.write("arithmetic", **about)
    if about["why_no_mfu"]:
        run.report.log(f"no MFU: {about['why_no_mfu']}")


def total_steps(settings: TrainingSettings, images: int) -> int:
    """Optimizer steps of a whole run over N training images."""
    steps = settings.epochs * (images // settings.global_batch_size)
    return min(steps, settings.max_steps or steps)

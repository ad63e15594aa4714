"""A run's measurements as arrays, read from its folder, a profiler-output folder, or an S3 prefix.

SageMaker's own files and those of this kit's monitor share one format. Times are Unix seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher import backends
from launcher.config.issues import UserError, mistake
from launcher.config.redaction import REDACTED
from launcher.insight import shapes, system_files, timelines
from launcher.insight.outside import Watched
from launcher.insight.replay import Replay, replay_of
from launcher.insight.script import Script
from launcher.planner.source_package import code_checksum, recorded_files
from launcher.record import records
from launcher.record.records import RunFolder

MAX_BYTES = 2**30
"""Most bytes of system metrics that are read: about 9 million samples, which take half a minute and 400 MB of memory."""


@dataclass(frozen=True)
class Series:
    """One number over time."""

    times: np.ndarray
    """(n,) Unix seconds, increasing; with gaps between minutes if the record was thinned."""
    values: np.ndarray
    """(n,)"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The system metrics of one host. Percentages are of the time since the previous sample."""

    name: str
    """algo-1 …"""
    cores: Mapping[str, Series] = field(default_factory=dict)
    """cpu0 … -> percent of time not idle. SageMaker's agent counts waits for disks as well: subtract `io_wait` for the
    time of computing."""
    io_wait: Mapping[str, Series] = field(default_factory=dict)
    """cpu0 … -> percent of time in which the core had nothing to do but wait for a disk."""
    memory: Series | None = None
    """Percent used of the machine's memory, or of the container's if that is less."""
    gpus: Mapping[str, Series] = field(default_factory=dict)
    """gpu0 … -> percent of time in which some kernel ran on it."""
    gpu_memory: Mapping[str, Series] = field(default_factory=dict)
    """gpu0 … -> percent used."""
    gpu_uuids: Mapping[str, str] = field(default_factory=dict)
    """gpu0 … -> the GPU's UUID, as NVML spells it: GPU-… SageMaker's agent records none."""
    disk: Mapping[str, Series] = field(default_factory=dict)
    """read, write -> bytes a second of all disks."""
    network: Mapping[str, Series] = field(default_factory=dict)
    """receive, transmit -> bytes a second of the container."""
    throttled: Series | None = None
    """Percent of the cgroup quota's periods in which it throttled processes."""
    usable_cores: float | None = None
    """By affinity and quota; the minimum over the record."""
    memory_limit_bytes: int | None = None
    """Of the container, if it has less than the machine."""
    other: Mapping[tuple[str, str, str], Series] = field(default_factory=dict)
    """(Type, Name, Dimension) -> everything else that was sampled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """The logged windows of one rank's steps."""

    rank: int
    host: str
    step: np.ndarray
    """(n,) the window's last step."""
    epoch: np.ndarray
    """(n,)"""
    ended: np.ndarray
    """(n,) Unix seconds."""
    seconds: Mapping[str, np.ndarray]
    """Phase -> (n,) mean seconds per step; nan if a window lacks the phase. `step` is the whole step, `grad_sync` a part of
    `backward`."""
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name -> (n,): steps (of the window), slowest_step (seconds), images_per_second, memory_gib, cpu_seconds (per step, of the
    training process with all its threads), worker_cpu_seconds (per step, of all its worker processes), epoch_steps (of the current
    epoch, for an observed script whose loader has a length) …"""
    device_uuid: str | None = None
    """Of the rank's GPU, as torch spells it: without NVML's GPU-; None: not known."""
    servers: Mapping[str, np.ndarray] = field(default_factory=dict)
    """If other hosts make the images, name -> (n,): servers and threads (live ones that this rank asks), part (the share of all servers'
    threads that these are), and per window, not per step: images and megabytes (received from servers), alone (images made here),
    server_seconds (of one server thread), teacher_seconds (of these, the teacher's), waited_seconds (from asking for a part of a batch
    to having it, over all parts), receiving_seconds (of the receiving thread), failures, late."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A pause between steps."""

    rank: int
    host: str
    kind: str
    """checkpoint or evaluate."""
    began: float
    seconds: float
    step: int


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that was measured of a run."""

    source: str
    hosts: Mapping[str, Host] = field(default_factory=dict)
    ranks: tuple[Steps, ...] = ()
    stalls: tuple[Stall, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The script's settings, as it ran; for a user script, as the observer saw them."""
    script: Script | None = None
    """A user script; None: one of the kit's, which measures itself."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is known: result.json's values; world_size, device, device_name, compute_capability, backend, torch, threads,
    instance_type, seconds_to_first_step (of the slowest rank, from its process's start), parts_to_first_step (of the same, by the names in
    training/runtime/metrics.py) and num_workers (per process, as they ran); for a run also state, hosts, serving_hosts (the names of those
    outside the training groups), serving_groups (index in the config, type and count of each such group), training_group (the index of
    the first that trains), one_machine (whether all hosts share one), started_by, code (a checksum of its source package, or of its commit
    and changes) and inputs (the config's)."""
    sampled: str | None = None
    """Which part of the record was read: one of several trainings, or a sample of a long record; None: all of it."""
    not_measured: Mapping[str, str] = field(default_factory=dict)
    """Name -> why."""
    unreadable: tuple[str, ...] = ()
    """What could not be read, and is left out: `timeline-0.jsonl: 3 of 120 lines`."""
    replay: Replay | None = None
    """The run, if `launcher replay` can run it again with other settings."""
    watched: Watched | None = None
    """The command, if `launcher watch` ran it and its record holds all of it."""


def read(source: str, *, max_bytes: int = MAX_BYTES) -> Measurements:
    """All measurements of a source.

    Args:
        source: a run's or a job's name; a run's folder; a profiler-output folder, or any folder around one; an s3:// prefix
            of one, as SageMaker's ProfilerConfig fills it.
        max_bytes: of system metrics; if there are more, whole minutes are left out evenly, and `sampled` says so.

    Raises:
        UserError: the source does not exist or holds no measurements, or S3 does not answer.
    """
    if source.startswith("s3://"):
        return _measurements(source, system_files.in_s3(source), [], max_bytes, Script())
    folder = Path(source)
    if not folder.is_dir():
        return _read_run(records.find(source), max_bytes)
    if (folder / "plan.json").is_file():
        return _read_run(RunFolder(folder.absolute()), max_bytes)
    return _measurements(source, system_files.below([folder]), timelines.below([folder]), max_bytes, Script())


def read_steps(run: RunFolder) -> Measurements | None:
    """A run's steps without its system metrics; None if no step was recorded."""
    lines = timelines.below(_places(run))
    return _measurements(run.name, [], lines, MAX_BYTES, Script()) if lines else None


def _places(run: RunFolder) -> list[Path]:
    """Folders that hold the files of a run's hosts."""
    return [*sorted(run.path.glob("hosts/*/opt/ml/output/data")), run.path / "profiler-output"]


def _read_run(run: RunFolder, max_bytes: int) -> Measurements:
    """The files of a run's hosts, and its records."""
    plan, outcome, result = run.read(run.plan), run.read(run.outcome), run.result()
    places = _places(run)
    system, lines = system_files.below(places), timelines.below(places)
    elsewhere, trouble = (None if system else _sagemakers_own(run)), {}
    if elsewhere is not None:
        try:
            system = system_files.in_s3(elsewhere)
        except UserError as error:
            if not lines:
                raise
            trouble = {"system": error.issues[0].found}
    if not system and not lines:
        raise _nothing_measured_by(run, plan)
    job = plan["job"]
    compute = job.get("compute") or {}
    training = compute.get("training_groups", [])
    known = {
        "state": outcome.get("state"),
        "started_by": plan["backend"],
        "hosts": len(plan["hosts"]),
        "serving_hosts": [host["name"] for host in plan["hosts"] if training and host.get("group") not in training]
        or None,
        **_groups(compute),
        "one_machine": backends.starter(plan["backend"]).on_this_machine,
        "distribution": job.get("distribution"),
        "instance_type": None if backends.starter(plan["backend"]).on_this_machine else _training_type(compute),
        **{name: value for name, value in result.items() if name != "settings"},
        "code": _code(run),
        "inputs": job.get("inputs") or None,
        "environment": job.get("environment") or {},
    }
    settings = {**(job.get("hyperparameters") or {}), **(result.get("settings") or {})}
    described = bool(job.get("script"))  # a watched command has no config
    is_kit_script = described and not job.get("source")
    command = plan["hosts"][0].get("command") or []
    arguments = settings if described else _arguments(command)
    script = None if is_kit_script else Script(arguments=arguments, by_launcher=described)
    found = _measurements(run.name, system, lines, max_bytes, script, known, settings)
    watched = None if described else _watched(command, plan["hosts"][0].get("environment", {}))
    return replace(found, not_measured={**found.not_measured, **trouble}, replay=replay_of(run), watched=watched)


def _watched(command: list[str], environment: dict[str, str]) -> Watched | None:
    """None if no command was recorded, or something of it was redacted."""
    if not command or any(REDACTED in text for text in (*command, *environment.values())):
        return None
    return Watched(tuple(command), environment)


def _groups(compute: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about a job's groups if some do not train, by their index in the config."""
    training, groups = compute.get("training_groups", []), compute.get("instance_groups", [])
    if not training:
        return {}
    names = ("instance_type", "instance_count")
    serving = [
        {"index": index, **{name: group[name] for name in names}}
        for index, group in enumerate(groups)
        if group["name"] not in training
    ]
    first = next((index for index, group in enumerate(groups) if group["name"] in training), None)
    return {"serving_groups": serving or None, "training_group": first}


def _training_type(compute: Mapping[str, Any]) -> str | None:
    """The instance type of a job's training hosts."""
    training, groups = compute.get("training_groups", []), compute.get("instance_groups", [])
    types = [group["instance_type"] for group in groups if not training or group["name"] in training]
    return next(iter(types), compute.get("instance_type"))


def _code(run: RunFolder) -> str | None:
    """A checksum of a run's source package; for a watched command, which has none, of its repository's commit and the changes since.
    None: neither was recorded."""
    try:
        files = recorded_files(run.code)
        if files:
            return code_checksum(files)
        commit = run.read(run.git).get("commit")
        patch = run.git_patch.read_bytes() if run.git_patch.exists() else b""
        return hashlib.sha256(f"{commit}\n".encode() + patch).hexdigest() if commit else None
    except OSError:
        return None


def _arguments(command: list[str]) -> dict[str, str]:
    """A command's options, `--name value` and `--name=value`, by name; one that another follows has no value."""
    found = {}
    for word, following in zip(command, [*command[1:], ""]):
        name, given, value = word.partition("=")
        if name.startswith("--"):
            found[name.removeprefix("--")] = value if given else "" if following.startswith("--") else following
    return found


def _sagemakers_own(run: RunFolder) -> str | None:
    """S3 prefix where SageMaker's agent wrote a run's system metrics; None unless the job, `launcher profile`, or another program that
    started the job asked for them."""
    request = run.read(run.request) or run.read(run.plan).get("request") or {}
    # if profiling was switched off midway, the earlier metrics are still there
    either = (run.read(run.remote).get("ProfilerConfig"), request.get("ProfilerConfig"))
    profiling = next((one for one in either if one and not one.get("DisableProfiler")), None)
    if profiling is None:
        return None
    output = profiling.get("S3OutputPath") or request.get("OutputDataConfig", {}).get("S3OutputPath")
    if not output:
        return None
    return f"{output.rstrip('/')}/{run.name}/profiler-output"


def _nothing_measured_by(run: RunFolder, plan: Mapping[str, Any]) -> UserError:
    """The mistake of asking for the measurements of a run that has none: why it has none, or when they come."""
    state, job = run.state(), plan["job"]
    of_the_kit = job.get("script") and not job.get("source")
    switch = "hyperparameters.system_monitor" if of_the_kit else "observe"
    value = (job.get("hyperparameters") or {}).get("system_monitor") if of_the_kit else job.get("observe")
    if value is False:
        return mistake("source", f"{run.name} holds no measurements: {switch} is false", "leave it out, and run again")
    if state == records.COMPLETED:
        return _nothing_measured(run.name)
    if state in records.OVER:
        shown = f"launcher show {run.name}" if run.path.parent.resolve() == records.store().resolve() else str(run.path)
        return mistake("source", f"{run.name} holds no measurements: {state}", f"{shown} has the reason")
    if backends.starter(plan["backend"]).on_this_machine:
        fix = f"wait for its first steps: launcher logs {run.name} -f"
    else:
        fix = f"they arrive when it ends, for which launcher attach {run.name} waits"
    return mistake("source", f"{run.name} holds no measurements yet: {state}", fix)


def _nothing_measured(source: str) -> UserError:
    """The mistake of asking for measurements where there are none."""
    fix = (
        "give a run (launcher runs lists them), a folder with profiler-output, or an s3:// prefix of one; a run measures itself if its "
        "script steps an optimizer, unless `observe`, or hyperparameters.system_monitor of this kit's scripts, is false"
    )
    return mistake("source", f"{source} holds no measurements", fix)


def _measurements(
    source: str,
    system: list[system_files.SystemFile],
    lines: list[Path],
    max_bytes: int,
    script: Script | None,
    known: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Measurements:
    """All measurements, read and combined.

    Args:
        script: what the records say about a script that may not be the kit's; None: it is.
        known, settings: from the run's records; what the ranks recorded takes precedence.
    """
    if not system and not lines:
        raise _nothing_measured(source)
    chosen, thinned = system_files.thin(system, max_bytes)
    samples = system_files.read(chosen)
    ranks = timelines.read(lines, max_bytes // 4)
    sampled = [text for text in (ranks.chosen, thinned, ranks.thinned) if text]
    hosts = {name: _host(name, series) for name, series in samples.series.items()}
    facts = {name: value for name, value in {**(known or {}), **ranks.facts}.items() if value is not None}
    facts, wrong_facts = shapes.readable(shapes.FACTS, facts)
    steps = tuple(Steps(**values) for values in ranks.steps)
    script = None if ranks.measure_themselves else script or ranks.script
    if script is not None:
        seen = ranks.script or Script()
        script = replace(script, parts=seen.parts, lines=seen.lines, other_ranks=seen.other_ranks)
        settings = {**script.settings(), **_global_batch_size(steps, script, facts.get("world_size"))}
    settings, wrong_settings = shapes.readable(shapes.SETTINGS, {**(settings or {}), **ranks.settings})
    return Measurements(
        source=source,
        hosts=hosts,
        ranks=steps,
        stalls=tuple(Stall(**values) for values in ranks.stalls),
        settings=settings,
        script=script,
        facts=facts,
        sampled="; ".join(sampled) or None,
        not_measured={**_missing(hosts, bool(lines), script), **ranks.not_measured},
        unreadable=(
            *samples.unreadable,
            *ranks.unreadable,
            *(f"result {one}" for one in wrong_facts),
            *(f"setting {one}" for one in wrong_settings),
        ),
    )


def _global_batch_size(steps: tuple[Steps, ...], script: Script, world_size: Any) -> dict[str, int]:
    """That of an observed script: its images per second times the seconds of its steps.

    Windows with an epoch's last, smaller batch have fewer, and how many these are depends on how fast steps are. So it is a whole number
    of its DataLoader's batches in every process, if it has one for training.
    """
    if not steps or "images_per_second" not in steps[0].extra:
        return {}
    images = steps[0].extra["images_per_second"] * steps[0].seconds["step"]
    known = images[np.isfinite(images)]
    usual = float(np.median(known)) if len(known) else 0.0
    loaders = script.loaders("training")
    # an epoch of a single batch may have fewer images than the batch size
    size = loaders[0].values.get("batch_size") if len(loaders) == 1 and loaders[0].values.get("batches") != 1 else None
    if isinstance(size, int) and isinstance(world_size, int) and usual > 0:
        whole = max(1, size * world_size)
        usual = whole * max(1, round(usual / whole))
    return {"global_batch_size": round(usual)} if round(usual) >= 1 else {}


def _host(name: str, series: Mapping[system_files.Key, tuple[np.ndarray, np.ndarray]]) -> Host:
    """A host from its series by (Type, Name, Dimension)."""
    left = {key: Series(*arrays) for key, arrays in series.items()}

    def take(fits: Callable[[str, str, str], bool]) -> dict[str, Series]:
        keys = sorted((key for key in left if fits(*key)), key=lambda key: (len(key[1]), key[1]))
        return {key[1]: left.pop(key) for key in keys}

    def one(found: dict[str, Series]) -> Series | None:
        return next(iter(found.values()), None)

    uuids = {gpu: uuid for kind, gpu, uuid in left if kind == "identity"}
    take(lambda kind, _, __: kind == "identity")
    limits = one(take(lambda _, name, __: name == "MemoryLimitBytes"))
    usable = one(take(lambda _, name, __: name == "UsableCores"))
    disk = take(lambda kind, name, _: kind == "i/o" and name.endswith("ThroughputInBytesPerSecond"))
    # SageMaker's "Platform" is its own agent's traffic, which brings the data
    network = take(lambda kind, name, dimension: kind == "network" and dimension == "Algorithm")
    return Host(
        name=name,
        cores=take(lambda _, __, dimension: dimension == "CPUUtilization"),
        io_wait=take(lambda _, __, dimension: dimension == "I/OWaitPercentage"),
        memory=one(take(lambda _, name, __: name == "MemoryUsedPercent")),
        gpus=take(lambda _, __, dimension: dimension == "GPUUtilization"),
        gpu_memory=take(lambda _, __, dimension: dimension == "GPUMemoryUtilization"),
        gpu_uuids=uuids,
        disk={short: disk[long] for short, long in _DISK.items() if long in disk},
        network={short: network[long] for short, long in _NETWORK.items() if long in network},
        throttled=one(take(lambda _, name, __: name == "CPUThrottledPercent")),
        usable_cores=float(usable.values.min()) if usable and usable.values.min() > 0 else None,
        memory_limit_bytes=int(limits.values.min()) if limits else None,
        other=left,
    )


_DISK = {"read": "ReadThroughputInBytesPerSecond", "write": "WriteThroughputInBytesPerSecond"}
_NETWORK = {"receive": "ReceiveBytesPerSecond", "transmit": "TransmitBytesPerSecond"}


def _missing(hosts: Mapping[str, Host], timelines_found: bool, script: Script | None) -> dict[str, str]:
    """What no host and no rank recorded, and why."""
    missing = {}
    if not hosts:
        switch = "hyperparameters.system_monitor" if script is None else "observe"
        missing["system"] = f"no files of system metrics: {switch} was false, or the run ended before the first sample"
    else:
        for name, why in (
            ("gpus", "no host showed a GPU"),
            ("memory", "the files hold none"),
            ("disk", "the files hold none"),
            ("network", "the files hold none"),
            ("throttled", "the files hold no cgroup counters; SageMaker's own never do"),
            ("usable_cores", "the files do not say, and SageMaker's own never do; every core counts"),
        ):
            if not any(getattr(host, name) for host in hosts.values()):
                missing[name] = why
    if not timelines_found:
        missing["steps"] = f"no {timelines.PATTERN}: " + (
            "the run ended before its first step"
            if script is None
            else "no step of a torch optimizer was observed, or the files are elsewhere"
        )
    return missing

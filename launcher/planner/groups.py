"""Instance groups: a job's hosts in SageMaker's order, what each group does, and what is wrong with them, whatever the backend.

SageMaker starts the script on every host of every group. The container toolkit starts torchrun or mpirun on the hosts of
`training_groups` alone, and plain Python on the others (train in sagemaker_pytorch_container/training.py of 3.0.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.config.issues import Issue, did_you_mean
from launcher.config.job import Job
from launcher.config.sections import InstanceGroup
from launcher.planner.plan import GroupPlan

TRAINS, PREPROCESSES, TEACHES, RUNS = "trains", "preprocesses", "preprocesses and runs the teacher", "runs the script"
"""What the hosts of a group do."""

IMAGES, TEACHER = ("train", "unlabelled"), "teacher"
"""The channels whose images preprocessing hosts decode, and whose teacher they run with teacher_servers."""


@dataclass(frozen=True)
class Place:
    """A host's place in a job."""

    index: int
    """From 0, group after group, as SageMaker numbers its hosts."""
    rank: int | None
    """Among the hosts that train, from 0; None: it does not train."""
    group: str = ""
    """The instance group, if the job has groups."""
    instance_type: str = ""

    @property
    def name(self) -> str:
        return f"algo-{self.index + 1}"


def places(job: Job) -> tuple[Place, ...]:
    """Every host of a job, those that train first. Without training_groups all of them do."""
    compute = job.compute
    kinds = [
        (group.name, group.instance_type) for group in compute.instance_groups for _ in range(group.instance_count)
    ]
    kinds = kinds or [("", compute.instance_type or "")] * compute.instance_count
    training = {group.name for group in training_groups(job)} or {""}
    found, rank = [], 0
    for index, (group, instance_type) in enumerate(kinds):
        found.append(Place(index, rank if group in training else None, group, instance_type))
        rank += group in training
    return tuple(sorted(found, key=lambda place: place.rank is None))


def host_count(job: Job) -> int:
    """Hosts of all groups."""
    return len(places(job))


def training_host_count(job: Job) -> int:
    """Hosts that train."""
    return sum(place.rank is not None for place in places(job))


def training_groups(job: Job) -> list[InstanceGroup]:
    """The groups that train: those of training_groups, else all."""
    groups = job.compute.instance_groups
    return [group for group in groups if group.name in job.compute.training_groups] or list(groups)


def is_remote(job: Job) -> bool:
    """Whether hosts that do not train preprocess for those that do."""
    return job.hyperparameters.get("worker_type") == "remote"


def has_teacher_servers(job: Job) -> bool:
    """Whether hosts that do not train run the teacher too."""
    return is_remote(job) and job.hyperparameters.get("teacher_servers") is not None


def shown(job: Job, usd_per_hour: Mapping[str, float]) -> tuple[GroupPlan, ...]:
    """A job's groups for its plan, in their own order.

    Args:
        usd_per_hour: for all hosts of a group, by its name, if known.
    """
    others = TEACHES if has_teacher_servers(job) else PREPROCESSES if is_remote(job) else RUNS
    training = job.compute.training_groups
    return tuple(
        GroupPlan(
            name=group.name,
            instance_type=group.instance_type,
            hosts=tuple(place.name for place in places(job) if place.group == group.name),
            does=TRAINS if group.name in training else others,
            usd_per_hour=usd_per_hour.get(group.name),
        )
        for group in job.compute.instance_groups
    )


def check(job: Job) -> Iterator[Issue]:
    """Issues with `compute.instance_groups`, `training_groups` and the channels' groups, and with `worker_type: remote`."""
    compute = job.compute
    names = [group.name for group in compute.instance_groups]
    if names and compute.instance_count != 1:
        yield Issue(
            key="compute.instance_count",
            found=f"{compute.instance_count}, beside instance_groups, each of which has its own count",
            fix="remove it; or write instance_groups: [] and training_groups: []",
        )
    if len(set(names)) < len(names):
        yield Issue(key="compute.instance_groups", found="two groups with the same name", fix="rename one")
    for name in compute.training_groups:
        if name not in names:
            yield _unknown("compute.training_groups", name, names)
    yield from _training(job)
    if job.source is None:
        yield from _kit_script(job)
    yield from _channels(job)


def _training(job: Job) -> Iterator[Issue]:
    """Issues with the number of groups that train."""
    compute = job.compute
    several, count = len(compute.instance_groups) > 1, len(compute.training_groups)
    distributed = (compute.instance_groups and job.distribution == "smddp") or (
        several and job.distribution == "torchrun"
    )
    remote = several and job.source is None and is_remote(job)
    if count == 1 or not (distributed or remote):
        return
    why = ": the container toolkit would train a separate model in each" if distributed and not count else ""
    yield Issue(
        key="compute.training_groups",
        found=f"{count} groups for {job.distribution if distributed else 'worker_type: remote'}{why}",
        valid="exactly one",
        fix=f"write training_groups: [{_likely(job)}]",
    )


def _kit_script(job: Job) -> Iterator[Issue]:
    """Issues with several groups for this kit's scripts, whose other hosts can only preprocess."""
    names = [group.name for group in job.compute.instance_groups]
    training = next((name for name in job.compute.training_groups if name in names), _likely(job))
    others = [name for name in names if name != training]
    if is_remote(job) and not others:
        yield Issue(
            key="hyperparameters.worker_type",
            found="remote, but every host trains and none is left to preprocess",
            valid="remote with a group in compute.instance_groups beside that in training_groups; auto, threads, processes",
            fix="add a group: compute: {instance_groups: [{name: gpus, …}, {name: cpus, …}], training_groups: [gpus]}; "
            "or write worker_type: auto",
        )
    elif not is_remote(job) and others:
        yield Issue(
            key="compute.instance_groups",
            found=f"{job.script} on several groups: it starts on every host, so the hosts of {', '.join(others)} would train a "
            "separate model",
            valid="one group; several with worker_type: remote, or with your own script, which reads SM_CURRENT_INSTANCE_GROUP",
            fix=f"write hyperparameters.worker_type: remote and training_groups: [{training}], so that the other hosts "
            "preprocess; or write one group",
        )


def _channels(job: Job) -> Iterator[Issue]:
    """Issues with channels' groups: unknown ones, and ones that lack what this kit's scripts read."""
    names = [group.name for group in job.compute.instance_groups]
    of_the_kit = job.source is None and is_remote(job) and len(names) > 1
    for channel, given in job.inputs.items():
        key = f"inputs.{channel}.instance_groups"
        for name in given.instance_groups or ():
            if name not in names:
                yield _unknown(key, name, names)
        if given.sharded and job.source is None and not of_the_kit and training_host_count(job) > 1:
            yield Issue(
                key=f"inputs.{channel}.sharded",
                found=f"true for {training_host_count(job)} hosts that train: {job.script} needs all of it on each of them",
                valid="false",
                fix="remove it; mode: FastFile copies no file that a host does not read",
            )
        if not of_the_kit:
            continue
        readers = _readers(job, channel)
        without = [name for name in readers if name in names and name not in (given.instance_groups or names)]
        if without:
            yield Issue(
                key=key,
                found=f"{', '.join(without)} without {channel}, which its hosts read",
                valid=f"with {', '.join(readers)}",
                fix=f"add {', '.join(without)}",
            )
        if given.sharded and channel in ((*IMAGES, TEACHER) if has_teacher_servers(job) else IMAGES):
            yield Issue(
                key=f"inputs.{channel}.sharded",
                found=f"true with worker_type: remote: a host would lack {'the images' if channel in IMAGES else 'files'} of the others",
                valid="false",
                fix="remove it; mode: FastFile copies no file that a host does not read",
            )


def _readers(job: Job, channel: str) -> list[str]:
    """The groups whose hosts read a channel."""
    names, training = [group.name for group in job.compute.instance_groups], job.compute.training_groups
    if channel == TEACHER and has_teacher_servers(job):
        return [name for name in names if name not in training]
    return names if channel in IMAGES else list(training)


def _unknown(key: str, name: str, names: list[str]) -> Issue:
    return Issue(
        key=key,
        found=f"no group {name}",
        valid=", ".join(names) or "no groups are given",
        fix=did_you_mean(name, names),
    )


def _likely(job: Job) -> str:
    """The group that most likely trains: the first with accelerators, else the first; "gpus" if there is none."""
    groups = job.compute.instance_groups
    likely = [group.name for group in groups if group.instance_type.startswith(("ml.g", "ml.p"))]
    return next(iter([*likely, *(group.name for group in groups)]), "gpus")

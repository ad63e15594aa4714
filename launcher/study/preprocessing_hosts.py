"""The hosts of a preprocessing study's trials: those that train, alone or with serving hosts that preprocess for them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.issues import Issue
from launcher.config.job import Job, Pipeline, StudySection
from launcher.config.sections import InstanceGroup
from launcher.planner import groups

REMOTE: Pipeline = "remote"
"""The pipeline whose images serving hosts prepare, as `cpu` does."""

SERVING = InstanceGroup(name="cpus", instance_type="ml.c6i.4xlarge", instance_count=1)
"""The hosts that preprocess if the config names none."""

TRAINING = "gpus"
"""The name of the group that trains if the job has no groups."""

OF_REMOTE = ("worker_type", "without_servers")
"""Hyperparameters that the pipeline remote sets."""


def own_serving_groups(job: Job) -> list[InstanceGroup]:
    """The job's groups that do not train."""
    training = groups.training_groups(job)
    return [group for group in job.compute.instance_groups if group not in training]


def are_named(job: Job, grid: StudySection) -> bool:
    """Whether the config says which hosts preprocess."""
    return bool(grid.serving_groups or own_serving_groups(job)) or groups.is_remote(job)


def serving_groups(job: Job, grid: StudySection) -> list[InstanceGroup]:
    """The hosts that preprocess: the job's own, those of the `study` section, or SERVING."""
    return own_serving_groups(job) or list(grid.serving_groups) or [SERVING]


def alone(job: Job) -> Job:
    """The job on its training hosts alone, which also preprocess. A job whose groups train one model each stays as it is."""
    kept = {name: value for name, value in job.hyperparameters.items() if name not in OF_REMOTE}
    job = job.model_copy(update={"hyperparameters": kept if groups.is_remote(job) else job.hyperparameters})
    training = groups.training_groups(job)
    if len(training) != 1:
        return job
    hosts = {"instance_type": training[0].instance_type, "instance_count": training[0].instance_count}
    compute = job.compute.model_copy(update={**hosts, "instance_groups": [], "training_groups": []})
    inputs = {name: given.model_copy(update={"instance_groups": None}) for name, given in job.inputs.items()}
    return job.model_copy(update={"compute": compute, "inputs": inputs})


def served(job: Job, serving: list[InstanceGroup]) -> Job:
    """The job with hosts that preprocess for those that train; unchanged if it already has them.

    Args:
        job: with instance groups, or an instance type.
    """
    compute = job.compute
    own = list(compute.instance_groups)
    if not own:
        assert compute.instance_type is not None
        own = [InstanceGroup(name=TRAINING, instance_type=compute.instance_type, instance_count=compute.instance_count)]
    cluster = {
        "instance_type": None,
        "instance_count": 1,
        "instance_groups": [*own, *(group for group in serving if group not in own)],
        "training_groups": compute.training_groups or [group.name for group in own],
    }
    return job.model_copy(update={"compute": compute.model_copy(update=cluster)})


def check(job: Job, grid: StudySection) -> Iterator[Issue]:
    """Issues with the hosts of the pipeline remote, before the backend's own."""
    if grid.serving_groups and own_serving_groups(job):
        names = ", ".join(group.name for group in own_serving_groups(job))
        yield Issue(
            key="study.serving_groups",
            found=f"given beside {names} of compute.instance_groups, which do not train",
            fix="remove one of the two",
        )
    if not job.compute.instance_groups and job.compute.instance_type is None:
        yield Issue(
            key="compute.instance_type",
            found="not set, and with the pipeline remote each instance group needs one",
            fix="write it, for example ml.g5.2xlarge; or leave remote out of study.pipelines",
        )


def text(job: Job) -> str:
    """The job's hosts: `1 ml.g5.2xlarge`, or `1 ml.g5.2xlarge, 2 ml.c6i.4xlarge`."""
    kinds = [place.instance_type for place in groups.places(job)]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

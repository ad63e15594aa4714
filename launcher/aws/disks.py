"""Whether the data that SageMaker copies to a host fits the host's disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.aws import catalog
from launcher.config.issues import Issue
from launcher.config.job import Job

STREAMED = "mode: FastFile for large channels, which are then streamed"


def check(job: Job, sizes: Mapping[str, int]) -> Iterator[Issue]:
    """Issues of disks that are too small: one per group of hosts with disks of their own, one for all whose size is `compute.volume_gb`.

    Args:
        sizes: channel -> bytes of all its objects, if known.
    """
    compute, too_small = job.compute, list[tuple[float, str]]()
    kinds = [
        (f"compute.instance_groups.{index}.instance_type", group.name, group.instance_type)
        for index, group in enumerate(compute.instance_groups)
    ] or [("compute.instance_type", "", compute.instance_type or "")]
    for key, group, kind in kinds:
        machine = catalog.instance(kind)
        own = machine.local_storage_gb if machine is not None else 0
        disk = own or compute.volume_gb
        total = sum(copied(job, name, size, group) for name, size in sizes.items()) / 1e9
        found = f"{total:,.0f} GB of data for a disk of {disk} GB{f' on each host of {group}' if group else ''}"
        if total > disk and own:
            yield _issue(key, found, f"write {STREAMED}")
        elif total > disk:
            too_small.append((total, found))
    if too_small:
        total, found = max(too_small)
        yield _issue("compute.volume_gb", found, f"write volume_gb: {int(total * 1.2) + 10}; or {STREAMED}")


def copied(job: Job, channel: str, size: int, group: str) -> float:
    """Bytes of a channel that a host copies; its share of a sharded channel, if the objects are alike.

    Args:
        size: bytes of the channel.
        group: the host's group; "" if the job has none.
    """
    given, groups = job.inputs[channel], job.compute.instance_groups
    takers = [each for each in groups if not given.instance_groups or each.name in given.instance_groups]
    if given.mode not in (None, "File") or (groups and all(each.name != group for each in takers)):
        return 0
    hosts = sum(each.instance_count for each in takers) if groups else job.compute.instance_count
    return size / hosts if given.sharded else size


def _issue(key: str, found: str, fix: str) -> Issue:
    return Issue(key=key, found=found, valid="room for data, model and checkpoints", fix=fix)

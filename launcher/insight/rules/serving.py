"""Does training wait for images that other hosts make, and do those hosts, the network or the receiving thread limit it?

The servers' threads and the receiving thread each have a utilisation, and the busier one is the limit. If neither is at its limit and
parts of batches are still in transit most of the time, the network is.
"""

from __future__ import annotations

import math

import numpy as np

from launcher.insight.answers import EXPLAINED, Answer, DoesNotApply, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, Gain, percent
from launcher.insight.gains import amdahl, bounded, estimated
from launcher.insight.rules.data import WORKING, explained, numbers_of_the_wait
from launcher.insight.rules.images import cheaper_images, shards
from launcher.insight.servers import Served, happened, served
from launcher.show.text import counted

AT_LIMIT = 0.85
"""Utilisation from which threads count as the limit: between parts, they also wait for the next one to be requested."""

TRAVELS = 1.0
"""Parts in transit over parts in the making from which the transit is long: what waits at a server besides those in its threads (QUEUED in
training/servers/pool.py) is less if threads are free."""

TEACHER = 0.5
"""Share of the busy time of servers' threads from which the teacher is what fills them; on a GPU their cores idle meanwhile."""

ALONE = 0.5
"""Share of the images that the training processes make themselves from which servers are missing, not slow."""

WHAT = "what training waits for: servers, the network, or receiving"


def waiting(evidence: Evidence) -> Answer:
    """Servers do not keep up, or their images do not come through: why, and what helps."""
    if not evidence.remote:
        return DoesNotApply("images are made by the training hosts")
    lost, idle = evidence.lost_to_data, evidence.gpu_idle
    if lost is None:
        return NotMeasured(what=WHAT, reason=evidence.why_not("data_wait"))
    if lost < NOTICEABLE or (idle is not None and idle < NOTICEABLE):
        return None
    if explained(evidence):
        return EXPLAINED
    now = served(evidence)
    if now is None:
        return NotMeasured(what=WHAT, reason="the timeline has no numbers of servers")
    if now.busy is None or now.alone_share >= ALONE:
        return _no_servers(evidence, now, lost)
    if max(now.busy, now.receiving) >= AT_LIMIT:
        if now.receiving > now.busy:
            return _receiving(evidence, now, lost)
        idle_cores = evidence.serving_busy is not None and evidence.serving_busy < WORKING
        reads = idle_cores and now.teacher_share < TEACHER
        return (_slow_reads if reads else _too_few)(evidence, now, lost)
    if now.in_flight >= TRAVELS * now.making:
        return _network(evidence, now, lost)
    return NotMeasured(
        what=WHAT,
        reason=f"servers' threads are busy {percent(now.busy)} of the time, the receiving thread {percent(now.receiving)}, and "
        f"{now.in_flight:.1f} parts of batches are in flight: nothing is at its limit",
    )


def _numbers(evidence: Evidence, now: Served) -> list[str]:
    """The evidence that every finding of this file shares."""
    numbers = numbers_of_the_wait(evidence)
    if evidence.gpu_idle is not None:
        numbers.append(f"GPUs idle {percent(evidence.gpu_idle)} of the time")
    if now.busy is not None:
        hosts = serving_hosts(evidence)
        of = "" if hosts is None else f" of {counted(hosts, 'serving host')}"
        numbers.append(f"servers: {now.threads:.3g} threads{of}, busy {percent(now.busy)} of the time")
    if now.seconds_per_image is not None:
        numbers.append(
            f"{now.images:.4g} images/s received, each takes {1000 * now.seconds_per_image:.3g} ms of a server's thread; "
            f"{now.megabytes:.3g} MB/s"
        )
    if evidence.settings.get("teacher_servers"):
        numbers.append(f"the teacher takes {percent(now.teacher_share)} of the time that servers' threads are busy")
    numbers.append(f"the receiving thread of a training process is busy {percent(now.receiving)} of the time")
    if evidence.serving_busy is not None:
        numbers.append(f"{percent(evidence.serving_busy)} of the serving hosts' cores in use")
    counts = happened(evidence)
    if counts is not None and counts.failures:
        numbers.append(f"servers failed: {counts.failures}; images made by the training processes: {counts.alone:,}")
    if evidence.facts.get("one_machine"):
        numbers.append("all hosts of this run share one machine: the advised numbers of hosts assume one machine each")
    return numbers


def serving_hosts(evidence: Evidence) -> int | None:
    """Hosts that make images; None: not known."""
    groups = evidence.facts.get("serving_groups") or ()
    planned = sum(group["instance_count"] for group in groups) or len(evidence.facts.get("serving_hosts", ()))
    return planned or len(evidence.serving_hosts) or None


def _training_hosts(evidence: Evidence) -> int:
    """Hosts that train; those that were seen if the run's record does not say how many."""
    return evidence.recorded_hosts or len({steps.host for steps in evidence.ranks})


def _needed(now: Served, lost: float) -> float:
    """Images per second that steps take when they never wait."""
    return (now.images + now.alone) / (1 - lost)


def _gain(
    evidence: Evidence,
    now: Served,
    lost: float,
    kind: str,
    *,
    servers: float | None = None,
    receiving: float | None = None,
) -> Gain:
    """The gain, limited by the slowest of the training process, the servers and the receiving thread.

    Args:
        servers, receiving: busy share of a step's time after the fix; None: as it is.
    """
    limits = {
        "the training process": 1 - lost,
        "the servers": now.busy or 0.0 if servers is None else servers,
        "receiving": now.receiving if receiving is None else receiving,
    }
    step = min(1.0, max(limits.values()))
    left = 1 - evidence.steps_part * (1 - step)
    said = ", ".join(f"{name} {share:.2f}" for name, share in limits.items())
    return estimated(
        evidence, kind, lost * evidence.steps_part, left, f"a step takes max({said}) of its time: 1 / {left:.2f}"
    )


def _too_few(evidence: Evidence, now: Served, lost: float) -> Finding:
    fix, factor = _more_servers(evidence, now, lost)
    cores = math.ceil(now.most_threads / (serving_hosts(evidence) or 1) * factor - 0.01)
    instance = Fix(setting=None, value=f"an instance type with {cores} cores, for the same number of serving hosts")
    cause, others = "decoding and augmentation occupy", (instance, *cheaper_images(evidence))
    if now.teacher_share >= TEACHER:
        cause = "the teacher occupies"
        others = (Fix(setting=None, value="serving hosts with GPUs for the teacher, or with more or faster ones"),)
    return Finding(
        kind="too_few_servers",
        title="Too few servers: training waits for images from other hosts, whose threads are busy",
        share=lost * evidence.steps_part,
        evidence=tuple(_numbers(evidence, now)),
        cause=f"{cause} all threads of the servers, one for each core of their hosts",
        fixes=(fix, *others),
        gain=_gain(evidence, now, lost, "too_few_servers", servers=now.making / now.most_threads / factor),
    )


def _more_servers(evidence: Evidence, now: Served, lost: float) -> tuple[Fix, float]:
    """The number of serving hosts at which no step waits, and its ratio to today's."""
    hosts, needed, seconds = serving_hosts(evidence), _needed(now, lost), now.seconds_per_image
    assert seconds is not None, "a busy server has made an image"
    threads = needed * seconds
    why = (
        f"steps that never wait take {needed:.4g} images/s; at {1000 * seconds:.3g} ms of a thread each, these need "
        f"{threads:.1f} threads"
    )
    if hosts is None:
        wanted = max(math.floor(now.most_threads) + 1, math.ceil(threads - 0.01))
        return Fix(setting=None, value=f"serving hosts with {wanted} cores in all", why=why), (
            wanted / now.most_threads
        )
    each = now.most_threads / hosts
    wanted = max(hosts + 1, math.ceil(threads / each - 0.01))
    why += f", and a host has {each:.3g}"
    groups = evidence.facts.get("serving_groups") or ()
    if not groups:
        return Fix(setting=None, value=f"{wanted} serving hosts instead of {hosts}", why=why), wanted / hosts
    largest = max(groups, key=lambda group: group["instance_count"])
    count = largest["instance_count"]
    key = f"compute.instance_groups.{largest['index']}.instance_count"
    return Fix(setting=key, value=count + wanted - hosts, now=count, why=why), wanted / hosts


def _slow_reads(evidence: Evidence, now: Served, lost: float) -> Finding:
    """The servers' threads are busy, their cores are not."""
    fix, _ = _more_servers(evidence, now, lost)
    share = lost * evidence.steps_part
    return Finding(
        kind="storage_bound",
        title="Storage is too slow: servers wait for reads",
        share=share,
        evidence=tuple(_numbers(evidence, now)),
        cause="all threads of the servers are working on images while their cores idle: they wait for the disk or network that "
        "delivers the images",
        fixes=(
            shards(evidence, "few large reads instead of a file per image"),
            Fix(
                setting=None,
                value="FSx for Lustre for the input, or S3 with mode File, which copies it to the hosts first",
                why="the images are then near the servers",
                scope="job",
            ),
            fix,
        ),
        gain=bounded(share),
    )


def _network(evidence: Evidence, now: Served, lost: float) -> Finding:
    training, serving = _training_hosts(evidence), serving_hosts(evidence)
    each = now.megabytes / training
    whole = each * _needed(now, lost) / (now.images + now.alone)
    numbers = _numbers(evidence, now)
    whole_wait = now.in_flight + now.making
    numbers.append(f"making the images takes {percent(now.making / whole_wait)} of the time from request to receipt")
    received = [
        float(np.mean(evidence.during(host.network["receive"]))) / 1e6
        for host in evidence.training_hosts
        if "receive" in host.network and len(host.network["receive"].values)
    ]
    in_all = f", {np.mean(received):.3g} MB/s in all" if received else ""
    numbers.append(f"a training host receives {each:.3g} MB/s of images{in_all}")
    kilobytes = 1000 * now.megabytes / now.images if now.images else 0.0
    bits = f"{whole * 8 / 1000:.3g} Gbit/s for each training host"
    if serving is not None:
        bits += f", {whole * training / serving * 8 / 1000:.3g} Gbit/s for each serving host"
    return Finding(
        kind="servers_network_bound",
        title="The network between servers and training hosts is too slow",
        share=lost * evidence.steps_part,
        evidence=tuple(numbers),
        cause="servers have spare threads and the receiving thread has spare time: images are delayed on the network between the hosts",
        fixes=(
            Fix(
                setting=None,
                value=f"instance types with more network bandwidth: {bits}, sustained",
                why=f"steps that never wait take {whole:.3g} MB/s a training host",
            ),
            Fix(setting=None, value=f"fewer pixels an image: each takes {kilobytes:.3g} kB on the network"),
            _by_this_host(evidence),
        ),
        gain=_gain(evidence, now, lost, "servers_network_bound"),
    )


def _receiving(evidence: Evidence, now: Served, lost: float) -> Finding:
    world, hosts = evidence.world_size or len(evidence.ranks), _training_hosts(evidence)
    wanted = max(world + 1, math.ceil(world * now.receiving / (1 - lost) - 0.01))
    fix, factor = _more_processes(evidence, world, hosts, wanted)
    return Finding(
        kind="receiving_bound",
        title="Receiving is the limit: one thread of a training process receives all its images",
        share=lost * evidence.steps_part,
        evidence=tuple(_numbers(evidence, now)),
        cause="the thread that puts the servers' images into batches is busy all the time; more servers would not help",
        fixes=(fix, _by_this_host(evidence)),
        gain=_gain(evidence, now, lost, "receiving_bound", receiving=now.receiving / factor),
    )


def _more_processes(evidence: Evidence, world: int, hosts: int, wanted: int) -> tuple[Fix, float]:
    """Training processes at which receiving keeps up, and their ratio to today's."""
    why = f"{wanted} processes receive what {world} compute; the global batch stays the same"
    each, batch = max(1, world // hosts), evidence.settings.get("global_batch_size")
    place = evidence.facts.get("training_group")
    grouped = world > 1 or evidence.facts.get("distribution") in ("torchrun", "smddp")
    joined = {} if grouped else {"distribution": "torchrun"}  # without a group each would train its own model
    if evidence.facts.get("one_machine") and not evidence.on_gpu:
        number = _divisor(batch, math.ceil(wanted / hosts), hosts)
        fix = Fix(setting="compute.processes_per_host", value=number, now=each, why=why, also=joined)
        return fix, number * hosts / world
    if place is not None and not evidence.facts.get("one_machine"):
        number = _divisor(batch, math.ceil(wanted / each), each)
        key = f"compute.instance_groups.{place}.instance_count"
        return Fix(setting=key, value=number, now=hosts, why=why, also=joined), number * each / world
    return Fix(setting=None, value=f"{wanted} training processes instead of {world}", why=why), wanted / world


def _divisor(batch: object, least: int, beside: int) -> int:
    """The smallest number from `least` on that, times `beside`, divides a batch; `least` if there is none."""
    if not isinstance(batch, int):
        return least
    return next((number for number in range(least, batch + 1) if batch % (number * beside) == 0), least)


def _by_this_host(evidence: Evidence) -> Fix:
    used = "" if evidence.busy is None else f", {percent(evidence.busy)} of whose cores are in use"
    without = (
        "the serving group and teacher_servers" if evidence.settings.get("teacher_servers") else "the serving group"
    )
    return Fix(setting=None, value=f"worker_type auto without {without}: images made by the training hosts{used}")


def _no_servers(evidence: Evidence, now: Served, lost: float) -> Finding:
    share = lost * evidence.steps_part
    return Finding(
        kind="too_few_servers",
        title=f"Servers are missing: the training processes make {percent(now.alone_share)} of the images themselves",
        share=share,
        evidence=tuple(_numbers(evidence, now)),
        cause="no server answers, or those that answered have failed",
        fixes=(
            Fix(
                setting=None,
                value="see why: lines with `server` in the log of the first training host, and ray.log among the outputs of all hosts",
            ),
        ),
        gain=bounded(share, f"{amdahl(share)}; what servers can make was not measured"),
    )

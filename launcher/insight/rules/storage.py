"""Storage that is too slow for the workers that read from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from launcher.insight.contention import usable_cores
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, Fix
from launcher.insight.rules.images import gain_of_quick_reads, shards
from launcher.insight.rules.workers import workers_exceed_cores

A_CORE = 2
"""Workers per core up to which more than twice today's are advised: what the storage gives is not known, and each takes memory."""


def disks_are_waited_for(evidence: Evidence) -> bool:
    """Whether at least as many cores wait for disks as an eighth of a host's readers, which may be its training processes themselves, or,
    if these are not known, as a 32nd of its cores; at least half a core, which is little beside the readers of a host with eight GPUs."""
    waiting = evidence.waiting_cores
    if waiting is None or not evidence.hosts:
        return False
    known = evidence.workers is not None
    enough = evidence.ranks_each * max(evidence.workers or 0, 1) / 8 if known else usable_cores(evidence) / 32
    return waiting >= max(0.5, enough)


def slow_storage(evidence: Evidence, numbers: Sequence[str], wait: float | None, *, lost: float) -> Finding:
    """Workers wait for reads.

    Args:
        numbers: the evidence.
        wait: share of a step that is saved if it does not wait for data; None: not measured.
        lost: share of a step that quick reads would save.
    """
    read = [
        float(np.mean(evidence.during(host.disk["read"]))) / 1e6
        for host in evidence.hosts
        if "read" in host.disk and len(host.disk["read"].values)
    ]
    received = [
        float(np.mean(evidence.during(host.network["receive"]))) / 1e6
        for host in evidence.hosts
        if "receive" in host.network and len(host.network["receive"].values)
    ]
    shown = [*numbers]
    shown += [f"read from disks {np.mean(read):.1f} MB/s a host"] if read else []
    shown += [f"received {np.mean(received):.1f} MB/s a host"] if received else []
    return Finding(
        kind="storage_bound",
        title="Storage is too slow: workers wait for reads",
        share=lost * evidence.steps_part,
        evidence=tuple(shown),
        cause="reads wait for a disk or the network while cores are idle: many small files, or a cold or remote disk",
        fixes=(
            shards(evidence, "few large reads instead of a file per image"),
            Fix(
                setting=None,
                value="FSx for Lustre for the input, or S3 with mode File, which copies it to the hosts first",
                why="the images are then near the hosts",
                scope="job",
            ),
            *(
                (
                    Fix(
                        setting="hyperparameters.num_workers",
                        value=_more_reads(evidence.workers, wait, evidence.cores_each),
                        now=evidence.workers,
                        why="more reads in flight: latency limits the storage, not bandwidth",
                    ),
                )
                if evidence.workers and not workers_exceed_cores(evidence)
                else ()
            ),
        ),
        gain=gain_of_quick_reads(evidence, lost),
    )


def _more_reads(workers: int, wait: float | None, cores: float | None) -> int:
    """Workers with which no step would wait if each read took as long as now: a worker that reads needs no core.

    Args:
        wait: share of a step that is saved if it does not wait for data; None: not measured.
        cores: of each training process; None: not known.
    """
    if wait is None or wait >= 1:
        return 2 * workers
    most = max(2 * workers, round(A_CORE * (cores or 0)))
    return min(max(workers + 1, math.ceil(workers / (1 - wait) * 1.1)), most)

"""Noisy neighbours: who keeps the thread that drives the device from its core, if it is not too many data workers."""

from __future__ import annotations

from launcher.insight.answers import EXPLAINED, Answer, DoesNotApply, NotMeasured
from launcher.insight.contention import (
    PROGRAMS,
    THREADS,
    WORKERS,
    neighbours,
    oversubscribed,
    programs_outside,
    run_delay,
    runnable_per_core,
    thread_cpu,
    usable_cores,
    why_no_delay,
)
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, percent
from launcher.insight.gains import amdahl, estimated
from launcher.insight.rules.images import dali
from launcher.insight.rules.workers import kept_from_core, taken_by_workers
from launcher.show.text import counted

NAMED = 3
"""Programs outside the run that the evidence names."""

SHOWN = 0.05
"""Cores from which a neighbour is worth showing."""

CAUSES = {
    WORKERS: "decoding and augmentation use all cores, so the thread that launches the device's work has to wait for one",
    THREADS: "the training processes run more threads than they have cores, and these compete with the thread that drives the step",
    PROGRAMS: "programs outside the run use its cores",
    None: "what else uses the cores was not recorded",
}


def noisy(evidence: Evidence) -> Answer:
    """Something other than too many workers has the training thread's core."""
    if run_delay(evidence) is None:
        return NotMeasured(what="a training thread kept from its core", reason=why_no_delay(evidence))
    lost = kept_from_core(evidence)
    if lost is None:
        return None
    if taken_by_workers(evidence) is not None or (evidence.throttled or 0.0) >= NOTICEABLE:
        return EXPLAINED
    others = neighbours(evidence)
    if not evidence.on_gpu and not oversubscribed(evidence):  # its own threads have cores if nobody else takes them
        own = {one: others.pop(one) for one in (WORKERS, THREADS) if one in others}
        if own and others.get(PROGRAMS, 0.0) < max(NOTICEABLE * usable_cores(evidence), own.get(WORKERS, 0.0)):
            return DoesNotApply("a model on the CPU shares its cores with its data workers and its own threads")
    who = max(others, key=lambda one: others[one]) if others else None
    if who != PROGRAMS and evidence.workers != 0 and (evidence.share("data_wait") or 0.0) >= NOTICEABLE:
        return EXPLAINED  # what waits for the workers does not need its core
    share = lost * evidence.steps_part
    return Finding(
        kind="noisy_neighbour",
        title=f"Noisy neighbour: {_named(who, evidence)} the training thread from its core",
        share=share,
        evidence=tuple(numbers(evidence)),
        cause=CAUSES[who],
        fixes=_fixes(who, evidence),
        gain=estimated(
            evidence, "noisy_neighbour", share, 1 - share, f"the wait for a core goes away: {amdahl(share)}"
        ),
    )


def numbers(evidence: Evidence) -> list[str]:
    """The evidence for every thread that is kept from its core; empty if none was recorded."""
    delay, own, others = run_delay(evidence), thread_cpu(evidence), neighbours(evidence)
    if delay is None or own is None:
        return []
    found = [
        f"the training thread is ready but has no core in {percent(delay)} of the time (run-queue delay); it computes in {percent(own)}"
    ]
    ready = runnable_per_core(evidence.slow_steps_too)
    if ready is not None:
        found.append(f"{ready:.1f} tasks run or are ready to for each usable core")
    if any(cores >= SHOWN for cores in others.values()):
        said = {
            WORKERS: "data workers",
            THREADS: "other threads of the training processes",
            PROGRAMS: f"programs outside the run ({programs(evidence)})",
        }
        found.append(
            "who else uses a host's cores: "
            + ", ".join(f"{said[who]} {cores:.1f}" for who, cores in others.items() if cores >= SHOWN)
        )
    return found


def outside(evidence: Evidence) -> float:
    """Cores of a host that programs outside the run use; 0 if none was seen."""
    return neighbours(evidence).get(PROGRAMS, 0.0)


def programs_take_cores(evidence: Evidence) -> bool:
    """Whether programs outside the run use a noticeable part of the host."""
    return outside(evidence) >= NOTICEABLE * usable_cores(evidence) if evidence.hosts else False


def without_programs(evidence: Evidence) -> tuple[Fix, ...]:
    """Advice to end those programs, if they crowd the host."""
    return (_fixes(PROGRAMS, evidence)[0],) if programs_take_cores(evidence) else ()


def programs(evidence: Evidence) -> str:
    """Programs that use most, by name, with their cores."""
    named = [(name, cores) for name, cores in programs_outside(evidence).items() if cores >= SHOWN][:NAMED]
    return ", ".join(f"{name} {cores:.1f}" for name, cores in named)


def _named(who: str | None, evidence: Evidence) -> str:
    if who == PROGRAMS:
        return f"{next(iter(programs_outside(evidence)))}, a program outside the run, keeps"
    if who == THREADS:
        return "the training process's other threads keep"
    if who == WORKERS:
        return f"{counted(evidence.workers or 0, 'data worker')} a process, all of them needed, keep"
    return "something keeps"


def _fixes(who: str | None, evidence: Evidence) -> tuple[Fix, ...]:
    if who == PROGRAMS:
        return (
            Fix(setting=None, value=f"stop or move the host's other programs: {programs(evidence)}"),
            Fix(setting=None, value="bind the training to cores of its own (taskset, docker --cpuset-cpus)"),
        )
    if who == THREADS and not oversubscribed(evidence):
        return (Fix(setting=None, value="fewer threads in the training process, or more cores for it"),)
    if who == THREADS:
        each = max(1, int(evidence.cores_each or 1))
        return (
            Fix(
                setting="environment.OMP_NUM_THREADS",
                value=str(max(1, each // 2)),
                now=evidence.facts.get("threads"),
                why=f"each training process has {counted(each, 'core')}, for its data workers too",
            ),
        )
    if who == WORKERS:
        return (
            dali(evidence, "decoding and augmentation move to the GPU"),
            Fix(setting=None, value="an instance type with more cores for each GPU"),
        )
    return (Fix(setting=None, value="run `top -H` on the host during training to see what else runs there"),)

"""Time between steps, or in a few of them: checkpoints, evaluations, the start, epoch starts, outliers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from launcher.insight import speed, start_up, windows
from launcher.insight.answers import EXPLAINED, Answer, DoesNotApply, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, percent
from launcher.insight.gains import amdahl, bounded, estimated
from launcher.insight.length import epoch_steps, job_steps
from launcher.insight.measurements import Steps
from launcher.insight.phases import NO_PHASE
from launcher.insight.rules.images import shards
from launcher.insight.rules.neighbours import noisy
from launcher.insight.rules.workers import kept_by_workers, sensible_workers, taken_by_workers
from launcher.record.records import COMPLETED

SLOW_START = 120.0
"""Seconds to the first step from which a start can be slow: loading torch, models and data takes most of a minute."""

ENDLESS_START = 1200.0
"""Seconds to the first step that are too long for any run: the limit of Debugger's MaxInitializationTime."""


def checkpoints(evidence: Evidence) -> Answer:
    """Training pauses while checkpoints are written."""
    every = evidence.settings.get("checkpoint_every")

    def rarer(count: int, factor: int) -> Fix:
        steps = (
            every if isinstance(every, int) else max(1, round(windows.steps_done(evidence.ranks[0]) / max(count, 1)))
        )
        value, also = _with_evaluations(evidence, factor * steps)
        return Fix(
            setting="hyperparameters.checkpoint_every",
            value=value,
            now=every,
            why=f"{factor} times fewer; a run that is killed loses that many more steps"
            + ("; each evaluation has a checkpoint before it" if also else ""),
            also=also,
        )

    return _stalls(
        evidence,
        "checkpoint",
        "checkpoint_stalls",
        "Writing checkpoints delays training",
        "checkpoints are too frequent for the time each one takes, or the disk is slow",
        lambda count, factor: (
            rarer(count, factor),
            Fix(setting=None, value="checkpoints on a faster disk, such as FSx for Lustre or the host's own"),
        ),
    )


def _with_evaluations(evidence: Evidence, steps: int) -> tuple[int, dict[str, int]]:
    """The interval of checkpoints of the kit's own scripts, which also write one before each evaluation: one is a multiple of the other.

    Args:
        steps: the least between two checkpoints.

    Returns:
        Steps between two, and other settings that this takes.
    """
    each, epochs = epoch_steps(evidence), evidence.settings.get("evaluate_every")
    if evidence.script is not None or not each or not isinstance(epochs, int):
        return steps, {}
    per_epoch = round(each)
    between = epochs * per_epoch
    if steps > between:
        fewer = math.ceil(steps / per_epoch)
        return fewer * per_epoch, {"hyperparameters.evaluate_every": fewer}
    return next(number for number in range(steps, between + 1) if between % number == 0), {}


def evaluations(evidence: Evidence) -> Answer:
    """Training pauses while the model is evaluated."""
    every = evidence.settings.get("evaluate_every")
    return _stalls(
        evidence,
        "evaluate",
        "evaluation_stalls",
        "Evaluations take much of the time",
        "there are many held-out images for the training images between two evaluations",
        lambda count, factor: (
            Fix(
                setting="hyperparameters.evaluate_every",
                value=(every if isinstance(every, int) else 1) * factor,
                now=every,
                why=f"{factor} times fewer; one still follows the last step",
            ),
        ),
    )


def epoch_starts(evidence: Evidence) -> Answer:
    """Only the first steps of epochs wait for data."""
    if evidence.share("data_wait") is None:
        return NotMeasured(what="pauses at the start of epochs", reason=evidence.why_not("data_wait"))
    share = epoch_start_share(evidence)
    if share < NOTICEABLE:
        return None
    if taken_by_workers(evidence) is not None:
        return EXPLAINED  # all workers make their first batches at once, on too few cores
    return Finding(
        kind="slow_epoch_starts",
        title="Each epoch starts with a wait for the first batches",
        share=share,
        evidence=(
            f"{percent(share)} of the training time passes before the first steps of epochs, or in these beyond what other steps take",
            f"in all other steps, waiting for data takes {percent(_wait_in_others(evidence))}",
        ),
        cause="the loader restarts with every epoch: workers start, or images are listed again, while no batch is ready; "
        "after a fork the process also copies the memory that it writes to"
        if evidence.workers != 0
        else "there are no workers to start: the script does something else between epochs, or lists images again",
        fixes=(
            shards(evidence, "a list of a few shards instead of one file per image"),
            *_half_the_workers(evidence),
        ),
        gain=estimated(
            evidence, "slow_epoch_starts", share, 1 - share, f"the whole wait at epoch starts: {amdahl(share)}"
        ),
    )


def epoch_start_share(evidence: Evidence) -> float:
    """Share of the training time spent between epochs and in their first steps, beyond what other steps take; of the rank where it is
    least, which waits for no other rank, such as one that writes a checkpoint there.

    Besides waiting for data, a process that has just forked its workers copies each page of memory as it first writes to it again:
    https://man7.org/linux/man-pages/man2/fork.2.html
    """
    shares = []
    for steps in evidence.ranks:
        others, later = after_epoch_firsts(evidence, steps)
        of_epochs = np.concatenate([[False], np.diff(steps.epoch) > 0])  # other gaps are clock errors or unexplained
        gaps = windows.between(steps, evidence.measurements.stalls)[of_epochs]
        between = float(gaps.sum()) / (evidence.training_seconds or 1)
        waited = 0.0
        if others is not None and later < NOTICEABLE * windows.timed_mean(steps, "step"):
            everything = np.ones(len(others), bool)
            waits = windows.timed_mean(steps, "data_wait", everything) - later
            whole = windows.timed_mean(steps, "step", everything)
            slower = whole - windows.timed_mean(steps, "step", others) if evidence.workers else 0.0
            waited = max(waits, slower) / whole
        shares.append(between + waited * evidence.steps_seconds / (evidence.training_seconds or 1))
    return min(shares, default=0.0)


def _wait_in_others(evidence: Evidence) -> float:
    """Share of a step spent waiting for data, in steps after an epoch's first ones; the median rank's."""
    shares = []
    for steps in evidence.ranks:
        others, later = after_epoch_firsts(evidence, steps)
        if others is not None:
            shares.append(later / windows.timed_mean(steps, "step", others))
    return float(np.median(shares)) if shares else evidence.share("data_wait") or 0.0


def after_epoch_firsts(evidence: Evidence, steps: Steps) -> tuple[np.ndarray | None, float]:
    """(which logged windows are not an epoch's first, mean wait in these); (None, 0) if that is unknown."""
    begun = np.diff(steps.epoch) > 0
    follows = np.diff(steps.step) == windows.counts(steps)[1:]
    first = np.concatenate([[True], begun & follows])
    others = np.concatenate([[False], ~begun])  # unknown if the window before was not read
    kept = windows.steady(steps)
    if "data_wait" not in steps.seconds or not (kept & first).any() or (kept & others).sum() < 2:
        return None, 0.0
    return others, windows.timed_mean(steps, "data_wait", others)


def start(evidence: Evidence) -> Answer:
    """The first step comes late."""
    seconds = evidence.facts.get("seconds_to_first_step")
    if not isinstance(seconds, (int, float)):
        return NotMeasured(what="a slow start", reason=evidence.why_not("seconds_to_first_step"))
    compiling, begun = _slow_first_steps(evidence), speed.start_seconds(evidence)
    begun = float(seconds) if begun is None else begun
    whole = begun + evidence.training_seconds
    share = (begun + compiling) / whole if whole else 0.0
    if begun + compiling < ENDLESS_START and (begun + compiling < SLOW_START or share < NOTICEABLE):
        return None
    fixes = []
    for name in ("compile", "compile_teacher"):
        if evidence.settings.get(name) is not True:
            continue
        fixes.append(
            Fix(setting=f"hyperparameters.{name}", value=False, now=True, why="the run is too short for it to pay off")
        )
    if evidence.settings.get("pretrained") or evidence.settings.get("teacher_pretrained"):
        fixes.append(Fix(setting=None, value="weights as an input channel instead of a download at start"))
    fixes.append(
        Fix(
            setting=None,
            value="FSx for the inputs, or S3 with mode FastFile",
            why="training starts before all data are copied",
            scope="job",
        )
    )
    fixes.append(shards(evidence, "few files to copy and list"))
    parts = start_up.parts(evidence)
    whole_steps = job_steps(evidence)
    later = (whole_steps or 0.0) - windows.steps_done(evidence.ranks[0]) if evidence.ranks else 0.0
    in_job = (begun + compiling) / (whole + max(0.0, later) * (evidence.step_seconds or 0.0))
    return Finding(
        kind="slow_start",
        title=f"The first step came after {seconds:.0f} s",
        share=share,
        evidence=(
            f"{seconds:.0f} s until the first step, {evidence.training_seconds:.0f} s of training after it",
            f"the first logged steps took {compiling:.0f} s longer than later ones",
            *([f"until the first step: {start_up.parts_text(parts)}"] if parts else []),
        ),
        cause=start_up.longest(parts)
        if parts
        else "before the first step, data are copied or listed, weights downloaded, or models compiled",
        fixes=tuple(fixes),
        gain=bounded(
            in_job,
            f"{amdahl(in_job)} over {'this run' if whole_steps is None else 'the whole job'}; "
            "how much of the start is needed is not known",
        ),
    )


def _of_a_missing_core(steps: Steps, mask: np.ndarray, far: np.ndarray) -> bool:
    """Whether most of the extra time of slow windows is the training thread's wait for a core.

    Args:
        mask, far: which windows count, and which of these are slow.
    """
    if "run_delay_seconds" not in steps.extra:
        return False
    delay, step = (
        np.nan_to_num(values[mask])[far].mean() - np.median(np.nan_to_num(values[mask]))
        for values in (steps.extra["run_delay_seconds"], steps.seconds["step"])
    )
    return bool(delay >= 0.5 * step)


def outliers(evidence: Evidence) -> Answer:
    """A few steps take far longer than the others, and a noticeable share of the time."""
    if not evidence.ranks:
        return NotMeasured(what="steps that take far longer than the others", reason=evidence.why_no_steps)
    steps = evidence.ranks[0]
    mask = windows.steady(steps)
    seconds, counts = np.nan_to_num(steps.seconds["step"][mask]), windows.counts(steps)[mask]
    if len(seconds) < 8:
        return NotMeasured(
            what="steps that take far longer than the others",
            reason=f"only {len(seconds)} logged windows, and 8 are needed",
        )
    median = float(np.median(windows.each_step(steps, steps.seconds["step"], mask)))
    far = windows.far(steps)[mask]
    excess = float(((seconds - median) * counts)[far].sum() / (seconds * counts).sum())
    share = excess * evidence.steps_seconds / evidence.training_seconds
    if not far.any() or share < NOTICEABLE:
        return None
    if taken_by_workers(evidence) is not None and (evidence.full or 0) >= 0.8:
        return EXPLAINED
    kept = kept_by_workers(evidence) is not None or isinstance(noisy(evidence), Finding)
    if ((evidence.throttled or 0.0) >= NOTICEABLE or kept) and _of_a_missing_core(steps, mask, far):
        return EXPLAINED
    waits = max(epoch_start_share(evidence), evidence.share("data_wait") or 0.0)
    if _at_epoch_starts(steps.epoch[mask], far) and waits >= NOTICEABLE:
        return EXPLAINED
    limit = windows.FAR if far[seconds > windows.FAR * median].all() else windows.FAR_STEP
    where = {
        phase: float(np.nan_to_num(values[mask])[far].mean() - np.median(np.nan_to_num(values[mask])))
        for phase, values in {**steps.seconds, NO_PHASE: evidence.outside_phases(steps)}.items()
        if phase != "step" and values is not None
    }
    phase = max(where, key=where.__getitem__, default=NO_PHASE)
    cause = "something else uses the device or the cores now and then: other jobs, garbage collection, compilation for new shapes"
    if phase == "data_wait":
        cause = "the loader runs dry now and then: other users of the storage or a shared file system"
    elif phase == "backward" and (evidence.world_size or 1) > 1:
        cause = "another rank or the network is late now and then"
    elif phase == NO_PHASE and where:
        cause = "the script itself does something now and then, such as a metric, a log or a file, or something else takes the cores"
    numbers, pressure = ", ".join(str(number) for number in steps.step[mask][far][:5]), evidence.pressure or 0.0
    return Finding(
        kind="step_outliers",
        title="A few steps take far longer than the others",
        share=share,
        evidence=(
            f"{int(far.sum())} of {len(seconds)} logged windows above {limit:.0f} times the median of {median:.3g} s a step; "
            f"the slowest {seconds.max():.3g} s"
            + (f", the longest single step {evidence.slowest_step:.3g} s" if evidence.slowest_step else ""),
            f"at steps {numbers}{' …' if far.sum() > 5 else ''}",
            *((f"most of it in {phase}: {where[phase]:.3g} s more than usual",) if where else ()),
            *(
                (f"some process waits for a core in {percent(pressure)} of the time (CPU pressure)",)
                if pressure >= NOTICEABLE
                else ()
            ),
        ),
        cause=cause,
        fixes=(
            Fix(setting=None, value="compare the step chart with the heat map of the page at these times"),
            *(
                (
                    Fix(
                        setting="hyperparameters.compile",
                        value=False,
                        now=True,
                        why="if shapes vary, each is compiled separately",
                    ),
                )
                if evidence.settings.get("compile") is True
                else ()
            ),
        ),
        gain=estimated(
            evidence, "step_outliers", share, 1 - share, f"without the excess of these steps: {amdahl(share)}"
        ),
    )


def _stalls(
    evidence: Evidence,
    kind: str,
    name: str,
    title: str,
    cause: str,
    fixes: Callable[[int, int], tuple[Fix, ...]],
) -> Answer:
    what = {"checkpoint": "checkpoints", "evaluate": "evaluations"}[kind]
    if not evidence.ranks:
        return NotMeasured(what=what, reason=evidence.why_no_steps)
    if kind in evidence.measurements.not_measured:
        return NotMeasured(what=what, reason=evidence.why_not(kind))
    stalls = [stall for stall in evidence.measurements.stalls if stall.kind == kind]
    if {stall.step for stall in stalls} == {_steps(evidence)}:
        return DoesNotApply("only after the last step, however many steps a run has")
    share = evidence.stall_seconds(kind) / evidence.training_seconds if evidence.training_seconds else 0.0
    if share < NOTICEABLE:
        return None
    first = min(stall.rank for stall in stalls)
    lengths = [stall.seconds for stall in stalls if stall.rank == first]
    factor = int(np.ceil(share / (1 - share) / 0.05)) if share < 0.9 else 100
    left, which = _left_of_the_job(evidence, len(lengths), factor)
    return Finding(
        kind=name,
        title=title,
        share=share,
        evidence=(
            f"{len(lengths)} of {np.mean(lengths):.3g} s on average (longest {max(lengths):.3g} s): {percent(share)} of "
            f"{evidence.training_seconds:.3g} s",
        ),
        cause=cause,
        fixes=fixes(len(lengths), factor),
        gain=estimated(
            evidence,
            name,
            share,
            1 - share * (1 - left),
            f"{which}: 1 / (1 - {share:.2f} · {1 - left:.2f})",
        ),
    )


def _left_of_the_job(evidence: Evidence, seen: int, factor: int) -> tuple[float, str]:
    """Share of the pauses of a kind that remains if one in `factor` does, and the same in words: over the whole job, of which the run may
    be a part. One follows the last step."""
    steps = job_steps(evidence)
    if steps is None and evidence.facts.get("state") != COMPLETED:
        return 1 / factor, f"one in {factor}, in a job whose length is not known"
    number = max(seen, round(seen * (steps or 0.0) / windows.steps_done(evidence.ranks[0])))
    kept = np.ceil(number / factor)
    return float(kept / number), f"{kept:.0f} instead of {number:.0f} in the whole job"


def _steps(evidence: Evidence) -> int:
    return int(evidence.ranks[0].step[-1])


def _slow_first_steps(evidence: Evidence) -> float:
    """Seconds that the first steps took beyond steady ones."""
    if not evidence.ranks:
        return 0.0
    steps = evidence.ranks[0]
    first = ~windows.steady(steps)
    usual = float(np.median(windows.each_step(steps, steps.seconds["step"], np.ones(len(steps.step), bool))))
    return float((np.maximum(steps.seconds["step"] - usual, 0) * windows.counts(steps))[first].sum())


def _at_epoch_starts(epochs: np.ndarray, far: np.ndarray) -> bool:
    """Whether most of the slow windows are an epoch's first."""
    first = np.concatenate([[False], np.diff(epochs) > 0])
    return bool(first.any() and first.mean() < 0.5 and (far & first).sum() > 0.7 * far.sum())


def _half_the_workers(evidence: Evidence) -> tuple[Fix, ...]:
    """Half the workers, or as few as prepare a step's images in time, if that is known to be fewer than there are."""
    workers = evidence.workers
    if not workers or workers < 2:
        return ()
    known = evidence.own_cpu is not None and evidence.all_cpu is not None
    fewer = max(workers // 2, sensible_workers(evidence) if known else 1)
    why = "fewer are ready sooner"
    return (Fix(setting="hyperparameters.num_workers", value=fewer, now=workers, why=why),) if fewer < workers else ()

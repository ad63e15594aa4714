"""The gain of a fix: a point estimate from a model of the step, and a range that should hold the obtained gain."""

from __future__ import annotations

from launcher.insight import calibration, speed
from launcher.insight.evidence import Evidence
from launcher.insight.findings import MAX_SHARE, Finding, Gain, percent
from launcher.insight.length import job_steps
from launcher.insight.ratio import Ratio, ratio


def bounded(share: float, formula: str = "") -> Gain:
    """A gain of which only the bound is known.

    Args:
        formula: of the bound, or why only the bound is known; "": the bound's own.
    """
    share = min(max(share, 0.0), 1.0)
    return Gain(share=share, formula=formula or amdahl(share))


def amdahl(share: float) -> str:
    """The formula of a bound, `1 / (1 - 0.653)`: the share with two digits, or as many as give the bound as it is printed."""
    share = min(share, MAX_SHARE)
    exact = f"{1 / (1 - share):.2f}"
    digits = (n for n in range(2, 9) if round(share, n) < 1 and f"{1 / (1 - round(share, n)):.2f}" == exact)
    return f"1 / (1 - {share:.{next(digits, 9)}f})"


def of_other_fixes(finding: Finding) -> Gain:
    """The gain of a finding if the run already has its first fix, which the rule's gain is for."""
    share = finding.share or 0.0
    return bounded(share, f"{amdahl(share)}; how much of it the remaining fixes save is not known")


def estimated(evidence: Evidence, kind: str, share: float, left: float, formula: str, unsure: float = 1.0) -> Gain:
    """A gain with a point estimate.

    Its range is a prediction: it counts the spread of the logged windows, in this run and in an equally long one after the fix; how far the
    estimates of this kind were off in real runs; and what the estimate itself leaves open. All are independent.

    Args:
        kind: of the finding.
        share: of the training time that the fix can touch.
        left: training time after the fix, over that before.
        unsure: the factor, either way, by which `left` may be off.
    """
    share = min(max(share, 0.0), 1.0)
    bound = 1 / (1 - min(share, MAX_SHARE))
    value = float(min(max(1 / max(left, 0.001), 1.0), bound))
    spread = Ratio(1.0, None, None)
    if evidence.ranks:
        seconds = speed.training(evidence)
        spread = ratio(seconds, seconds, calibration.CONFIDENCE)
    return Gain(
        share=share, formula=formula, expected=spread.times(value).widened(calibration.error(kind)).widened(unsure)
    )


def step_left(
    evidence: Evidence, own: float, *, images: float = 1.0, own_cpu: float | None = None
) -> tuple[float, str]:
    """Time of a usual step after a change, over its time now, and why: the slowest of the training process, its data workers and the
    cores. This is the utilisation law (Denning and Buzen 1978, https://doi.org/10.1145/356733.356735), as in Plumber
    (https://arxiv.org/abs/2111.04131).

    Args:
        own: share of the step in which the training process itself works after the change.
        images: CPU time of an image after the change, over that before.
        own_cpu: the same for the training process. None: it is not known, and the cores are no limit.
    """
    limits = {"the training process": own}
    step, cores, workers = evidence.steady_step_seconds, evidence.cores_each, evidence.workers
    theirs, process = evidence.mean_extra("worker_cpu_seconds"), evidence.own_cpu
    if step and cores and workers and theirs is not None and process is not None:
        limits["the workers"] = images * theirs / min(workers, cores) / step
        if own_cpu is not None:
            limits["the cores"] = (images * theirs + own_cpu * process) / cores / step
    said = ", ".join(f"{name} {share:.2f}" for name, share in limits.items())
    return max(limits.values()), f"max({said})" if len(limits) > 1 else f"{own:.2f}"


def in_steps(evidence: Evidence, *, evaluations: bool = False) -> float:
    """Share of the training time in steps, including the first and slow ones, and in epoch starts: all of it but pauses.

    Args:
        evaluations: whether they count too, for what touches them as it does steps.
    """
    whole = evidence.training_seconds
    kinds = {stall.kind for stall in evidence.measurements.stalls if not (evaluations and stall.kind == "evaluate")}
    pauses = sum(evidence.stall_seconds(kind) for kind in kinds)
    return max(0.0, 1 - pauses / whole) if whole else 1.0


def compiling(evidence: Evidence) -> str:
    """What to say about a gain from compiling: it costs time once, which counts over the job's own length."""
    steps, seconds = job_steps(evidence), evidence.step_seconds
    if not steps or not seconds:
        return "how much compiling saves is not known beforehand, nor is the job's length, over which it must pay off"
    minutes = steps * seconds / 60
    share = percent(1 / (1 + minutes))
    return (
        "how much compiling saves is not known beforehand; a minute of it at the start is "
        f"{share} of this job's {minutes + 1:.3g} minutes"
    )

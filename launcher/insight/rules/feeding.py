"""Is the device fed? Synchronising calls, small batches, and a training process whose one thread is the limit."""

from __future__ import annotations

import math
from typing import Any

from launcher.insight.answers import EXPLAINED, Answer, NotMeasured
from launcher.insight.contention import run_delay
from launcher.insight.evidence import IDLE_GPU, Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, Gain, percent
from launcher.insight.gains import bounded, compiling, estimated, in_steps, step_left
from launcher.insight.rules.storage import disks_are_waited_for
from launcher.insight.rules.workers import OFTEN_FULL, kept_from_core, suspected

SELDOM = 20
"""Steps between two metric lines that are advised if each step has its own line."""

SHORT_STEP = 0.06
"""Seconds of a micro-batch below which a GPU waits for kernel launches: some thousand kernels at about 10 µs each."""

FIXED = 0.2
"""Share of a step in work that no batch size changes (optimizer, the loop itself) from which batches are small."""

FEW, FIXED_OF_FEW = 8, 0.1
"""With so few images, a step also reads the weights and writes their gradients for hardly any of them, which takes about as long as the
optimizer: half its share is enough. `make bench-planted`: steps of 2 and 4 images with 15 to 24 % in the optimizer gain 2.6 to 2.9 times
the images per second from four times the images."""

PROFILED = 5
"""Steps that torch.profiler records: enough to see their kernels, in a trace of a few megabytes."""

LARGER = 4
"""Factor on the images of a step that is advised if batches are small."""

MOVE_CODE = "move your own code out of the step: metrics, drawing, conversions"

MEASURE_STEPS = Fix(setting=None, value="measure its steps: launcher run, or launcher watch -- COMMAND")

OFTEN = 0.02
"""Share of the samples from which a line of the loop is worth showing."""


def starved(evidence: Evidence) -> Answer:
    """The device, or the step, waits for the training process itself: synchronising calls, small batches, or its one thread."""
    wait, gap, idle = evidence.share("data_wait"), evidence.loop_share, evidence.gpu_idle
    if not evidence.on_gpu:
        if gap is None:
            missing = next(name for name in ("data_wait", "backward", "forward") if name not in evidence.phases)
            return NotMeasured(what="time of the training process outside all phases", reason=evidence.why_not(missing))
        return _main_thread(evidence, gap) if gap >= 1.5 * NOTICEABLE else None
    if idle is None and gap is None:
        return NotMeasured(what="a GPU that waits for the training process", reason=evidence.why_no_hosts)
    # the kernels of NCCL keep a GPU busy while it waits for other ranks
    exchange = () if evidence.facts.get("backend") == "nccl" else ("grad_sync", "buffer_sync")
    lost = max(
        gap or 0.0,
        (idle or 0.0) - (wait or 0.0) - (evidence.share(*exchange, "host_to_device") or 0.0),
    )
    if idle is not None:
        lost = min(lost, idle)  # the device may work while the loop does other things
    enough = IDLE_GPU if (gap or 0) < 1.5 * NOTICEABLE else NOTICEABLE
    if lost < enough:
        return None
    if wait is None and evidence.busy is not None and (evidence.busy >= 0.85 or disks_are_waited_for(evidence)):
        return EXPLAINED  # full cores or slow disks: the data's finding
    if not evidence.ranks and evidence.uneven:
        return EXPLAINED
    if _contended(evidence):
        return EXPLAINED  # the process does not get its core: the workers', the neighbours' or the quota's finding
    kept = kept_from_core(evidence)
    if kept is not None:
        lost -= kept  # the rest is its own
        if lost < enough:
            return EXPLAINED
    if _synchronises(evidence):
        return _synchronising(evidence, lost)
    if _small(evidence):
        return _small_batch(evidence, lost)
    if not evidence.ranks and evidence.workers is None and (evidence.saturated or 0.0) >= OFTEN_FULL:
        return _suspects(evidence, lost)
    if _one_core(evidence):
        return _main_thread(evidence, lost)
    return Finding(
        kind="gpu_starved",
        title="The GPUs idle, but not for lack of data" if wait is not None else "The GPUs idle",
        share=lost * evidence.steps_part,
        evidence=tuple(_numbers(evidence, lost)),
        cause="not measured: "
        + (
            evidence.why_no_steps
            if not evidence.ranks
            else "no small steps, fully used core or synchronising calls were seen"
        ),
        fixes=(MEASURE_STEPS,)
        if not evidence.ranks
        else (
            Fix(
                setting="hyperparameters.compile",
                value=True,
                now=evidence.settings.get("compile"),
                why="fewer launches",
            ),
            Fix(
                setting="hyperparameters.profile_steps",
                value=PROFILED,
                now=evidence.settings.get("profile_steps"),
                why="torch.profiler shows what runs in a step, and for how long",
            ),
        ),
        gain=bounded(lost * evidence.steps_part, compiling(evidence) if evidence.ranks else ""),
    )


def fixed_cost(evidence: Evidence) -> Answer:
    """Steps so small that their fixed cost is much of them."""
    optimizer = evidence.share("optimizer")
    if optimizer is None:
        return NotMeasured(what="steps too small for their fixed cost", reason=evidence.why_not("optimizer"))
    small = evidence.images_per_micro_batch
    enough = FIXED_OF_FEW if small is not None and small <= FEW else FIXED
    if optimizer < enough or (small is not None and small > 64):
        return None
    if small is None:
        return NotMeasured(what="steps too small for their fixed cost", reason="the batch size is not known")
    share = optimizer * evidence.steps_part
    at_once = max(1.0, min(LARGER, math.floor(min(LARGER, largest_factor(evidence)))))
    least, most = optimizer / LARGER + (1 - optimizer) / at_once, 1 - optimizer * (1 - 1 / LARGER)
    return Finding(
        kind="small_batch",
        title="The batch is small: each step runs the optimizer for few images",
        share=share,
        evidence=(
            f"optimizer: {percent(optimizer)} of a step of {evidence.step_seconds:.3g} s",
            f"{small} images per process and step",
        ),
        cause="the optimizer takes the same time for any number of images",
        fixes=(larger_batch(evidence, LARGER, "scale learning_rate and the warm-up with it"),),
        gain=of_larger_batch(
            evidence,
            "small_batch",
            LARGER,
            math.sqrt(most * least),
            f"a step with {LARGER} times the images, {at_once:.0f} times as many at once, takes {LARGER * least:.2f} times as "
            f"long at best and, apart from its optimizer, {LARGER} times at worst: "
            f"1 / sqrt({most:.2f} · {least:.2f})",
            unsure=math.sqrt(most / least),
        ),
    )


def of_larger_batch(evidence: Evidence, kind: str, factor: float, left: float, said: str, unsure: float = 1.0) -> Gain:
    """The gain of `factor` times the images at once.

    Args:
        kind: of the finding.
        left: time per image in a step, over that before.
        unsure: the factor, either way, by which it may be off.
    """
    steps = in_steps(evidence)  # the first steps and the slow ones too: all become fewer
    after = 1 - steps * (1 - left)
    return estimated(evidence, kind, (1 - 1 / factor) * steps, after, said, unsure)


def larger_batch(evidence: Evidence, factor: int, why: str) -> Fix:
    """A global batch of `factor` times the images; in parts, if a GPU's memory holds no more at once."""
    batch = evidence.settings.get("global_batch_size")
    if not isinstance(batch, int):
        return Fix(setting=None, value=f"a global batch of {factor} times the images", why=why)
    parts: dict[str, Any] = {}
    each = evidence.settings.get("batch_size_per_device")
    if largest_factor(evidence) < factor:
        parts = {"hyperparameters.batch_size_per_device": "auto"}
    elif isinstance(each, int):  # else it would be made of more parts of the same size
        parts = {"hyperparameters.batch_size_per_device": factor * each}
    return Fix(setting="hyperparameters.global_batch_size", value=factor * batch, now=batch, why=why, also=parts)


def largest_factor(evidence: Evidence) -> float:
    """At least how many times the images a GPU's memory holds at once: weights and optimizer do not grow with them. inf: not known."""
    return 100 / evidence.gpu_memory if evidence.gpu_memory else math.inf


def larger_parts(evidence: Evidence) -> int:
    """How many parts of a step can be one: as many as memory holds, and the step's gradients stay the same."""
    parts = evidence.accumulation
    return next(n for n in range(parts, 0, -1) if parts % n == 0 and (n == 1 or n <= largest_factor(evidence)))


def _contended(evidence: Evidence) -> bool:
    if (evidence.throttled or 0) >= NOTICEABLE or suspected(evidence):
        return True
    if run_delay(evidence) is not None:
        return False  # it is known how much of the time that is
    return evidence.busy is not None and evidence.busy >= 0.9


def _synchronises(evidence: Evidence) -> bool:
    """Whether the host waits for the device in every step, as reading a loss does."""
    if evidence.settings.get("log_every") == 1 and not evidence.settings.get("late_metrics"):
        return True
    return (evidence.share("synchronise") or _waiting_line_share(evidence)) >= NOTICEABLE


def _waiting_line_share(evidence: Evidence) -> float:
    """Share of the training thread's samples in the line that most often reads a number from the device."""
    line = evidence.script.waiting_line if evidence.script else None
    return line.share if line else 0.0


def _small(evidence: Evidence) -> bool:
    """Whether a GPU gets little work at a time and has memory for more."""
    if (evidence.gpu_memory if evidence.gpu_memory is not None else 0) >= 60:
        return False
    if evidence.step_seconds is not None:
        own = evidence.step_seconds * (1 - (kept_from_core(evidence) or 0.0))
        return own / evidence.accumulation < SHORT_STEP
    return evidence.gpu_memory is not None and (evidence.saturated or 0) < OFTEN_FULL


def _one_core(evidence: Evidence) -> bool:
    """Whether the training process keeps one core busy all the time."""
    own = evidence.cores_used(evidence.own_cpu)
    if own is not None:
        return own >= 0.85 * (1 - (kept_from_core(evidence) or 0.0))
    saturated, busy = evidence.saturated, evidence.busy
    return saturated is not None and saturated >= OFTEN_FULL and busy is not None and busy < 0.7


def _numbers(evidence: Evidence, lost: float) -> list[str]:
    numbers = []
    if evidence.gpu_idle is not None:
        numbers.append(f"GPUs idle {percent(evidence.gpu_idle)} of the time")
    if evidence.unaccounted is not None:
        numbers.append(
            f"{percent(evidence.unaccounted)} of a step of {evidence.step_seconds:.3g} s is outside all phases"
        )
    for line in evidence.script.loop_lines[:3] if evidence.script else ():
        if line.share >= OFTEN:
            numbers.append(
                f"the training thread is at {line.at} in {percent(line.share)} of the samples: {line.at.text}"
            )
    wait = evidence.share("data_wait")
    if wait is not None:
        numbers.append(f"waiting for data only {percent(wait)}")
    if evidence.gpu_memory is not None:
        numbers.append(f"GPU memory at most {evidence.gpu_memory:.0f} % in use (95th percentile)")
    own = evidence.cores_used(evidence.own_cpu)
    if own is not None:
        numbers.append(f"the training process uses {own:.2f} cores")
    if evidence.saturated is not None and evidence.busy is not None:
        numbers.append(
            f"a core at 95 % or more in {percent(evidence.saturated)} of the samples, {percent(evidence.busy)} of all in use"
        )
    return numbers


def _synchronising(evidence: Evidence, lost: float) -> Finding:
    share = lost * evidence.steps_part
    every = evidence.settings.get("log_every")
    fixes = [Fix(setting=None, value="no .item(), .cpu(), print of a tensor or torch.cuda.synchronize() in the step")]
    if every == 1:
        fixes.insert(
            0,
            Fix(
                setting="hyperparameters.log_every",
                value=SELDOM,
                now=1,
                why="each metric line reads the loss, and waits for it",
            ),
        )
    goes = 1.0 if every != 1 else 1 - 1 / SELDOM
    left, why = step_left(evidence, max(0.0, 1 - lost * goes))
    synchronise = evidence.share("synchronise")
    numbers = _numbers(evidence, lost)
    if synchronise is not None:
        numbers.append(f"waiting for the device to read a number: {percent(synchronise)} of a step")
    if every is not None:
        numbers.append(f"log_every is {every}")
    return Finding(
        kind="synchronising_calls",
        title="The training process waits for the GPU in every step, then the GPU waits for it",
        share=share,
        evidence=tuple(numbers),
        cause="reading a number from the device drains the kernel queue",
        fixes=tuple(fixes),
        gain=_of_shorter_steps(
            evidence, "synchronising_calls", share, left, f"without the waits a step takes {why} of its time"
        ),
    )


def _of_shorter_steps(evidence: Evidence, kind: str, share: float, left: float, said: str) -> Gain:
    """The gain if usual steps take only a part of their time."""
    after = 1 - evidence.steps_part * (1 - min(left, 1.0))
    return estimated(evidence, kind, share, after, f"{said}: 1 / {after:.2f}")


def _small_batch(evidence: Evidence, lost: float) -> Finding:
    share = lost * evidence.steps_part
    settings = evidence.settings
    fixes = []
    factor = larger_parts(evidence) if evidence.accumulation > 1 else math.floor(min(LARGER, largest_factor(evidence)))
    if evidence.accumulation > 1 and factor > 1:
        fixes.append(
            Fix(
                setting="hyperparameters.batch_size_per_device",
                value="auto",
                now=settings.get("batch_size_per_device"),
                why=f"fewer than {evidence.accumulation} parts a step; the training stays the same",
            )
        )
    elif evidence.accumulation == 1 and factor > 1:
        fixes.append(larger_batch(evidence, factor, "scale learning_rate and the warm-up with it"))
    fixes.append(
        Fix(
            setting="hyperparameters.compile",
            value=True,
            now=settings.get("compile"),
            why="fewer kernel launches a step; compiling takes a minute, which pays off over thousands of steps",
        )
    )
    fixes.append(Fix(setting=None, value="a smaller instance type or machine", why="if the batch must stay as it is"))
    numbers = _numbers(evidence, lost)
    if evidence.images_per_micro_batch:
        numbers.append(f"{evidence.images_per_micro_batch} images at a time")
    return Finding(
        kind="small_batch",
        title="The batch is too small to keep the GPU busy",
        share=share,
        evidence=tuple(numbers),
        cause="launching the kernels takes longer than running them",
        fixes=tuple(fixes),
        gain=bounded(share)
        if evidence.gpu_idle is None or not evidence.ranks or factor == 1
        else of_larger_batch(
            evidence,
            "small_batch",
            factor,
            max(1 / factor, 1 - evidence.gpu_idle),
            f"{factor} times the images at once need no more launches, and the GPU is busy {percent(1 - evidence.gpu_idle)} of the time: "
            f"1 / {max(1 / factor, 1 - evidence.gpu_idle):.2f}",
        ),
    )


def _suspects(evidence: Evidence, lost: float) -> Finding:
    """System metrics alone show full cores and an idle GPU, as in KT's job: who has those cores, only an experiment tells."""
    share = lost * evidence.steps_part
    return Finding(
        kind="gpu_starved",
        title="Suspects: data workers, or the training process's own Python code",
        share=share,
        evidence=tuple(_numbers(evidence, lost)),
        cause=f"not measured: who uses the full cores ({evidence.why_no_steps}, and the number of data workers is not known)",
        fixes=(
            Fix(setting=None, value="try the DataLoader with num_workers=1", why="KT's job needed 0 or 1"),
            Fix(setting=None, value=MOVE_CODE, why="if fewer workers change nothing"),
            MEASURE_STEPS,
        ),
        gain=bounded(share),
        experiment="run a few hundred steps of the same job with num_workers=1: if the GPUs idle less, it was the workers, else the code",
    )


def _main_thread(evidence: Evidence, lost: float) -> Finding:
    share, gap = lost * evidence.steps_part, evidence.loop_share or 0.0
    compiled = Fix(
        setting="hyperparameters.compile",
        value=True,
        now=evidence.settings.get("compile"),
        why="fewer operations to launch",
    )
    moved = Fix(setting=None, value=MOVE_CODE)
    if gap >= 1.5 * NOTICEABLE:
        fixes, left = (moved, compiled), step_left(evidence, 1 - gap)
        said = f"without the loop's own code a step takes {left[1]} of its time"
        gain = _of_shorter_steps(evidence, "main_thread_bound", share, left[0], said)
    else:
        fixes, gain = (compiled, moved), bounded(share, compiling(evidence))
    return Finding(
        kind="main_thread_bound",
        title="The training process's own Python code limits the step",
        share=share,
        evidence=tuple(_numbers(evidence, lost)),
        cause="the device waits for one thread: work in the loop outside the model, or very many small operations",
        fixes=fixes,
        gain=gain,
    )

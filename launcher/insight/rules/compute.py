"""Where the time of a step goes that does not wait for data: copies, teacher, arithmetic, and a GPU that is not fed."""

from __future__ import annotations

from launcher.aws import catalog
from launcher.insight.evidence import COMPUTE_PHASES, Evidence
from launcher.insight.verdicts import (
    EXPLAINED,
    NOTICEABLE,
    Answer,
    Cure,
    DoesNotApply,
    NotMeasured,
    Verdict,
    bounded,
    percent,
)

IDLE_GPU = 0.3
"""Idle share of a GPU from which something starves it; Debugger's LowGPUUtilization speaks of below 70 % too."""

TEACHER = 0.25
"""Share of a step from which a teacher is worth keeping out of it; a KD step without a cache always holds some of it."""

SHORT_STEP = 0.06
"""Seconds of a micro-batch below which starting kernels is what a GPU waits for: some thousand kernels at about 10 µs each."""

FASTER_ARITHMETIC = 2.0
"""Times that 16-bit or TF32 matrix products are faster than fp32, taken low: the peak is 8 times on an A100 (312 and 156 to 19.5
TFLOPS, https://www.nvidia.com/en-us/data-center/a100/), and memory-bound kernels only halve their bytes."""

FIXED = 0.25
"""Share of a step in what costs the same for any batch (optimizer, the loop itself) from which batches are small."""


def transfer(evidence: Evidence) -> Answer:
    """Batches take long to reach the device."""
    share = evidence.share("host_to_device")
    if share is None:
        return NotMeasured(what="copying batches to the device", reason=_why(evidence, "host_to_device"))
    if share < NOTICEABLE:
        return None
    settings = evidence.settings
    cures = [
        Cure(
            setting=None, value="smaller image_size or view_size, where accuracy allows", why="bytes go with its square"
        )
    ]
    if evidence.on_gpu and settings.get("preprocessing", "dali") != "dali":
        cures.insert(
            0,
            Cure(
                setting="hyperparameters.preprocessing",
                value="dali",
                now=settings["preprocessing"],
                why="JPEGs cross to the GPU instead of pixels",
            ),
        )
    share *= evidence.steps_part
    return Verdict(
        kind="host_to_device_bound",
        title="Copying batches to the device takes long",
        share=share,
        evidence=(
            f"host to device: {percent(evidence.share('host_to_device'))} of a step of {evidence.step_seconds:.3g} s",
        ),
        cause="the batches are large for the link, or come from memory that is not pinned",
        cures=tuple(cures),
        gain=bounded(share),
    )


def teacher(evidence: Evidence) -> Answer:
    """The teacher takes much of the step, though its answers can be kept."""
    share = evidence.share("teacher_forward")
    if share is None:
        if evidence.ranks:
            return DoesNotApply("no teacher ran")
        return NotMeasured(what="a teacher that takes much of the step", reason=evidence.why_no_steps)
    if share < TEACHER:
        return None
    settings = evidence.settings
    epochs, cached = int(settings.get("epochs") or 1), settings.get("teacher_cache")
    precision = settings.get("teacher_precision") or settings.get("precision")
    halved = evidence.on_gpu and precision in (None, "fp32")
    half = Cure(
        setting="hyperparameters.teacher_precision",
        value=_sixteen_bits(evidence),
        now=precision or "fp32",
        why="half the bytes, and tensor cores",
    )
    share_of_run = share * evidence.steps_part
    cures, expected, formula = [], None, ""
    if not cached and epochs > 1:
        views = max(1, epochs // 10)
        saved = 1 - views / epochs
        expected = 1 / (1 - share_of_run * saved)
        formula = f"the teacher runs in {views} of {epochs} epochs: 1 / (1 - {share_of_run:.2f} · {saved:.2f})"
        cures.append(
            Cure(
                setting="hyperparameters.teacher_cache",
                value={"views": views},
                now=None,
                why=f"its logits are kept; images come in {views} reproducible {'views' if views > 1 else 'view'}, so watch the accuracy",
            )
        )
    if halved:
        if expected is None:
            expected = 1 / (1 - share_of_run / 2)
            formula = f"a teacher twice as fast: 1 / (1 - {share_of_run:.2f} / 2)"
        cures.append(half)
    if not settings.get("compile_teacher"):
        cures.append(
            Cure(setting="hyperparameters.compile_teacher", value=True, now=False, why="fewer and larger kernels")
        )
    if not cures:
        cures.append(Cure(setting=None, value="a smaller teacher"))
    note = "; its cache is being filled" if cached else ""
    return Verdict(
        kind="teacher_bound",
        title=f"The teacher takes {percent(share)} of each step{note}",
        share=share_of_run,
        evidence=(
            f"teacher forward: {percent(share)} of a step of {evidence.step_seconds:.3g} s"
            + (f", student forward {percent(evidence.forward_share)}" if evidence.forward_share is not None else ""),
            f"teacher in {precision or 'fp32'}, {'with' if cached else 'without'} a cache, {epochs} epochs",
        ),
        cause="it answers the same for the same pixels, and is asked again on every step",
        cures=tuple(cures),
        gain=bounded(share_of_run, expected, formula),
    )


def fp32(evidence: Evidence) -> Answer:
    """A GPU is busy with arithmetic that it could do in fewer bits."""
    if not evidence.on_gpu:
        return DoesNotApply("no GPU")
    precision, share = evidence.settings.get("precision"), evidence.share(*COMPUTE_PHASES)
    if precision is None or (share is None and evidence.gpu_idle is None):
        reason = "the precision of this run is not known" if precision is None else evidence.why_no_steps
        return NotMeasured(what="arithmetic in fp32", reason=reason)
    share = 1 - evidence.gpu_idle if share is None else share
    if precision != "fp32" or share < 0.5 or (evidence.gpu_idle or 0) >= IDLE_GPU:
        return None
    bits = _sixteen_bits(evidence)
    share_of_run = share * evidence.steps_part
    return Verdict(
        kind="fp32_compute",
        title="The GPU computes in fp32",
        share=share_of_run,
        evidence=(
            f"precision fp32; forward, backward and optimizer take {percent(share)} of a step",
            *((f"GPUs busy {percent(1 - evidence.gpu_idle)} of the time",) if evidence.gpu_idle is not None else ()),
        ),
        cause="tensor cores stand idle: fp32 products do not use them",
        cures=(
            Cure(setting="hyperparameters.precision", value=bits, now="fp32", why="autocast; weights stay in fp32"),
            *(
                (
                    Cure(
                        setting="hyperparameters.precision",
                        value="tf32",
                        now="fp32",
                        why="fp32's range, 10 bits of mantissa",
                    ),
                )
                if bits == "bf16"
                else ()
            ),
        ),
        gain=bounded(
            share_of_run,
            1 / (1 - share_of_run * (1 - 1 / FASTER_ARITHMETIC)),
            f"arithmetic {FASTER_ARITHMETIC:.0f} times as fast: 1 / (1 - {share_of_run:.2f} · {1 - 1 / FASTER_ARITHMETIC:.2f})",
        ),
    )


def starved(evidence: Evidence) -> Answer:
    """The device, or the step, waits for the training process itself: synchronising calls, small batches, or its one thread."""
    wait, gap, idle = evidence.share("data_wait"), evidence.unaccounted, evidence.gpu_idle
    if not evidence.on_gpu:
        if gap is None:
            return NotMeasured(
                what="time of the training process in no phase", reason=_why(evidence, "phases of the step")
            )
        return _main_thread(evidence, gap) if gap >= 1.5 * NOTICEABLE else None
    if idle is None and gap is None:
        return NotMeasured(what="a GPU that waits for the training process", reason=evidence.why_no_hosts)
    lost = max(gap or 0.0, (idle or 0.0) - (wait or 0.0) - (evidence.share("grad_sync", "host_to_device") or 0.0))
    if lost < (IDLE_GPU if (gap or 0) < 1.5 * NOTICEABLE else NOTICEABLE):
        return None
    if wait is None and evidence.busy is not None and (evidence.busy >= 0.85 or (evidence.waiting_cores or 0) >= 0.5):
        return EXPLAINED  # full cores or slow disks: the data's finding
    if not evidence.ranks and evidence.uneven:
        return EXPLAINED
    if _contended(evidence):
        return EXPLAINED  # the process does not get its core: the workers' or the quota's finding
    if _synchronises(evidence):
        return _synchronising(evidence, lost)
    if _small(evidence):
        return _small_batch(evidence, lost)
    if _one_core(evidence):
        return _main_thread(evidence, lost)
    return Verdict(
        kind="gpu_starved",
        title="The GPUs idle, and not for want of data" if wait is not None else "The GPUs idle",
        share=lost * evidence.steps_part,
        evidence=tuple(_numbers(evidence, lost)),
        cause="not measured: "
        + (
            evidence.why_no_steps
            if not evidence.ranks
            else "neither small steps, nor a full core, nor synchronising calls show"
        ),
        cures=(Cure(setting=None, value="a run of this kit's scripts, whose step timeline tells more"),)
        if not evidence.ranks
        else (
            Cure(
                setting="hyperparameters.compile",
                value=True,
                now=evidence.settings.get("compile"),
                why="fewer launches",
            ),
        ),
        gain=bounded(lost * evidence.steps_part),
    )


def fixed_cost(evidence: Evidence) -> Answer:
    """Steps so small that what every step costs, whatever its batch, is much of them."""
    optimizer = evidence.share("optimizer")
    if optimizer is None:
        return NotMeasured(what="steps too small for their fixed cost", reason=_why(evidence, "optimizer"))
    small = evidence.images_per_micro_batch
    if optimizer < FIXED or (small is not None and small > 64):
        return None
    share = optimizer * evidence.steps_part
    batch = evidence.settings.get("global_batch_size")
    return Verdict(
        kind="small_batch",
        title="The batch is small: each step pays the optimizer for few images",
        share=share,
        evidence=(
            f"optimizer: {percent(optimizer)} of a step of {evidence.step_seconds:.3g} s",
            f"{small} images a process and step" if small else "images a step: not known",
        ),
        cause="the optimizer costs the same for any number of images",
        cures=(
            Cure(
                setting="hyperparameters.global_batch_size",
                value=4 * batch if isinstance(batch, int) else "four times as many",
                now=batch,
                why="scale learning_rate and the warm-up with it",
            ),
        ),
        gain=bounded(
            share, 1 / (1 - 0.75 * share), f"a quarter of the optimizer's steps: 1 / (1 - 0.75 · {share:.2f})"
        ),
    )


def _contended(evidence: Evidence) -> bool:
    full = evidence.busy is not None and evidence.busy >= 0.9
    return full or (evidence.throttled or 0) >= NOTICEABLE


def _synchronises(evidence: Evidence) -> bool:
    """Whether the host waits for the device on every step: reading a loss does."""
    return (evidence.share("synchronise") or 0) >= NOTICEABLE or evidence.settings.get("log_every") == 1


def _small(evidence: Evidence) -> bool:
    """Whether a GPU gets little work at a time, and has memory for more."""
    if (evidence.gpu_memory if evidence.gpu_memory is not None else 0) >= 60:
        return False
    if evidence.step_seconds is not None:
        return evidence.step_seconds / evidence.accumulation < SHORT_STEP
    return evidence.gpu_memory is not None and (evidence.pegged or 0) < 0.5


def _one_core(evidence: Evidence) -> bool:
    """Whether the training process keeps one core busy all the time."""
    own = evidence.mean_extra("cpu_seconds")
    if own is not None and evidence.step_seconds:
        return own / evidence.step_seconds >= 0.85
    return evidence.pegged is not None and evidence.pegged >= 0.5 and evidence.busy < 0.7


def _numbers(evidence: Evidence, lost: float) -> list[str]:
    told = []
    if evidence.gpu_idle is not None:
        told.append(f"GPUs idle {percent(evidence.gpu_idle)} of the time")
    if evidence.unaccounted is not None:
        told.append(f"{percent(evidence.unaccounted)} of a step of {evidence.step_seconds:.3g} s lies in no phase")
    if evidence.share("data_wait") is not None:
        told.append(f"waiting for data only {percent(evidence.share('data_wait'))}")
    if evidence.gpu_memory is not None:
        told.append(f"GPU memory at most {evidence.gpu_memory:.0f} % in use (95th percentile)")
    own = evidence.mean_extra("cpu_seconds")
    if own is not None:
        told.append(f"the training process uses {own / evidence.step_seconds:.2f} cores")
    if evidence.pegged is not None:
        told.append(
            f"a core at 95 % or more in {percent(evidence.pegged)} of the samples, {percent(evidence.busy)} of all in use"
        )
    return told


def _synchronising(evidence: Evidence, lost: float) -> Verdict:
    share = lost * evidence.steps_part
    every = evidence.settings.get("log_every")
    cures = [Cure(setting=None, value="no .item(), .cpu(), print of a tensor or torch.cuda.synchronize() in the step")]
    if every == 1:
        cures.insert(
            0, Cure(setting="hyperparameters.log_every", value=20, now=1, why="a metric line reads the loss, and waits")
        )
    synchronise = evidence.share("synchronise")
    told = _numbers(evidence, lost)
    if synchronise is not None:
        told.append(f"waiting for the device to read a number: {percent(synchronise)} of a step")
    if every is not None:
        told.append(f"log_every is {every}")
    return Verdict(
        kind="synchronising_calls",
        title="The training process waits for the GPU in every step, and the GPU for it afterwards",
        share=share,
        evidence=tuple(told),
        cause="a number is read from the device while the queue of kernels runs empty",
        cures=tuple(cures),
        gain=bounded(share),
    )


def _small_batch(evidence: Evidence, lost: float) -> Verdict:
    share = lost * evidence.steps_part
    settings = evidence.settings
    cures = []
    if evidence.accumulation > 1:
        cures.append(
            Cure(
                setting="hyperparameters.batch_size_per_device",
                value="auto",
                now=settings.get("batch_size_per_device"),
                why=f"{evidence.accumulation} parts of a step become fewer; the training stays the same",
            )
        )
    else:
        batch = settings.get("global_batch_size")
        cures.append(
            Cure(
                setting="hyperparameters.global_batch_size",
                value=4 * batch if isinstance(batch, int) else "a larger one",
                now=batch,
                why="scale learning_rate and the warm-up with it",
            )
        )
    cures.append(
        Cure(setting="hyperparameters.compile", value=True, now=settings.get("compile"), why="fewer launches a step")
    )
    cures.append(Cure(setting="compute.instance_type", value="a smaller one", why="where the batch must stay"))
    told = _numbers(evidence, lost)
    if evidence.images_per_micro_batch:
        told.append(f"{evidence.images_per_micro_batch} images at a time")
    return Verdict(
        kind="small_batch",
        title="The batch is too small to keep the GPU busy",
        share=share,
        evidence=tuple(told),
        cause="starting the kernels takes longer than running them",
        cures=tuple(cures),
        gain=bounded(share),
    )


def _main_thread(evidence: Evidence, lost: float) -> Verdict:
    share = lost * evidence.steps_part
    return Verdict(
        kind="main_thread_bound",
        title="The training process's own Python holds the step up",
        share=share,
        evidence=tuple(_numbers(evidence, lost)),
        cause="one thread prepares what the device waits for: work in the loop outside the model, or very many small operations",
        cures=(
            Cure(
                setting="hyperparameters.compile",
                value=True,
                now=evidence.settings.get("compile"),
                why="fewer operations to start",
            ),
            Cure(setting=None, value="move own code out of the step: metrics, drawing, conversions"),
        ),
        gain=bounded(share),
    )


def _sixteen_bits(evidence: Evidence) -> str:
    """bf16, or fp16 where the GPU is known to lack it."""
    host = catalog.instance(str(evidence.facts.get("instance_type", "")))
    if host is not None and host.gpu is not None:
        return "bf16" if catalog.gpu(host.gpu).bf16 else "fp16"
    name = str(evidence.facts.get("device_name", ""))  # as CUDA says it: Tesla V100-SXM2-16GB
    return "fp16" if any(old in name.split("-")[0].split() for old in ("K80", "V100", "T4")) else "bf16"


def _why(evidence: Evidence, phase: str) -> str:
    return evidence.why_not(phase) if evidence.ranks else evidence.why_no_steps

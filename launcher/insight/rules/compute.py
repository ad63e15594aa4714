"""Where the device's time goes: copies to it, a teacher, and fp32 arithmetic."""

from __future__ import annotations

from launcher.aws import catalog
from launcher.insight import phases
from launcher.insight.answers import Answer, DoesNotApply, NotMeasured
from launcher.insight.contention import cost_of_workers
from launcher.insight.evidence import IDLE_GPU, Evidence
from launcher.insight.findings import NOTICEABLE, Finding, Fix, Gain, percent
from launcher.insight.gains import amdahl, bounded, estimated, step_left
from launcher.insight.length import epoch_steps, job_steps
from launcher.insight.rules.images import dali

TEACHER = 0.25
"""Share of a step from which caching the teacher is worth it; a KD step without a cache always spends some time on it."""

FASTER_ARITHMETIC = 2.0
"""Speed-up of 16-bit or TF32 matrix products over fp32, taken low: on an A100 the peak of TF32 is 8 times as high (156 to
19.5 TFLOPS) and that of 16 bits 16 times (312; https://www.nvidia.com/en-us/data-center/a100/), but memory-bound kernels only halve
their bytes."""

BF16_OVER_TF32 = 2.0
"""Peak of bf16 products over that of TF32, and bytes of a TF32 number over those of a bf16 one: 312 to 156 TFLOPS on an A100 (the same
page)."""

TENSOR_CORES, BF16 = 7.0, 8.0
"""Compute capabilities from which GPUs have tensor cores, and these multiply in bfloat16 and TF32 (NVIDIA, CUDA C++ programming guide,
appendix "Compute Capabilities")."""


def transfer(evidence: Evidence) -> Answer:
    """Batches take long to reach the device."""
    share = evidence.share("host_to_device")
    if share is None:
        if evidence.ranks and not evidence.on_gpu:
            return DoesNotApply("no GPU")
        return NotMeasured(what="copying batches to the device", reason=evidence.why_not("host_to_device"))
    if share < NOTICEABLE:
        return None
    fixes = [
        Fix(
            setting=None,
            value="a smaller image_size or view_size, if accuracy allows",
            why="bytes grow with the square of the size",
            scope="kit",
        )
    ]
    if evidence.on_gpu and evidence.settings.get("preprocessing", "dali") != "dali":
        fixes.insert(0, dali(evidence, "JPEGs are copied to the GPU instead of pixels"))
        if evidence.settings.get("copy_stream") is False:
            beside = "each batch is copied during the previous step; the numbers stay the same"
            fixes.insert(1, Fix(setting="hyperparameters.copy_stream", value=True, now=False, why=beside))
    share_of_run = share * evidence.steps_part
    return Finding(
        kind="host_to_device_bound",
        title="Copying batches to the device is slow",
        share=share_of_run,
        evidence=(f"host to device: {percent(share)} of a step of {evidence.step_seconds:.3g} s",),
        cause="the batches are large for the link, or their memory is not pinned",
        fixes=tuple(fixes),
        gain=bounded(share_of_run, f"{amdahl(share_of_run)}; how much less can be copied is not known"),
    )


def teacher(evidence: Evidence) -> Answer:
    """The teacher takes much of the step, though its logits can be cached."""
    if evidence.settings.get("teacher_servers"):
        return DoesNotApply("other hosts run the teacher")
    cached = evidence.settings.get("teacher_cache")
    if isinstance(cached, dict) and cached.get("complete"):
        return DoesNotApply("a label bank provides the teacher's logits")
    share = evidence.share("teacher_forward")
    if share is None:
        frozen = evidence.script and evidence.script.frozen_model
        if frozen:
            reason = f"the forward pass of {frozen.values.get('class') or 'a frozen model'} is timed together with the trained model's"
            return NotMeasured(what="a teacher that takes much of the step", reason=reason)
        if evidence.ranks:
            return DoesNotApply("no teacher ran")
        return NotMeasured(what="a teacher that takes much of the step", reason=evidence.why_no_steps)
    settings = evidence.settings
    if share < TEACHER and settings.get("teacher_stream"):
        waited = "teacher_stream runs it during the student's previous step: only the remaining wait is timed"
        return NotMeasured(what="a teacher that takes much of the step", reason=waited)
    if share < TEACHER:
        return None
    epochs = int(settings.get("epochs") or 1)
    precision = settings.get("teacher_precision") or settings.get("precision")
    halved = evidence.on_gpu and precision in (None, "fp32") and _capability(evidence) >= TENSOR_CORES
    half = Fix(
        setting="hyperparameters.teacher_precision",
        value=_sixteen_bits(evidence),
        now=precision or "fp32",
        why="half the bytes, and tensor cores",
    )
    share_of_run = share * evidence.steps_part
    fixes, gain = [], bounded(share_of_run)
    if not cached and epochs > 1:
        together = int(settings.get("views_per_decode") or 1)
        views, whole = -(-max(1, epochs // 10) // together) * together, _epochs_of_the_job(evidence, epochs)
        said = f"the teacher runs in {min(views, whole):.3g} of {whole:.3g} epochs"
        gain = _without_teacher(evidence, share, min(1.0, views / whole), said)
        replayed = evidence.measurements.replay
        place = replayed.checkpoints if replayed else None  # the bank being filled lies among the checkpoints
        fixes.append(
            Fix(
                setting="hyperparameters.teacher_cache",
                value={"views": views},
                now=None,
                why=f"its answers are kept; images come in {views} reproducible {'views' if views > 1 else 'view'}, so watch the accuracy",
                also={
                    **({"checkpoints.s3": place} if place else {}),
                    **({"hyperparameters.teacher_stream": False} if settings.get("teacher_stream") else {}),
                },
            )
        )
    if halved:
        if not fixes:
            gain = _without_teacher(
                evidence, share, 1 / FASTER_ARITHMETIC, f"a speed-up of {FASTER_ARITHMETIC:.0f} for the teacher"
            )
        fixes.append(half)
    if settings.get("compile_teacher") is not True:
        fixes.append(
            Fix(setting="hyperparameters.compile_teacher", value=True, now=False, why="fewer and larger kernels")
        )
    if not fixes:
        fixes.append(Fix(setting=None, value="a smaller teacher"))
    note = "; its cache is being filled" if cached else ""
    labels = evidence.forward_share is None  # of a run that fills a label bank, with no student
    return Finding(
        kind="teacher_bound",
        title=f"The teacher takes {percent(share)} of each step{note}",
        share=share_of_run,
        evidence=(
            f"teacher forward: {percent(share)} of a step of {evidence.step_seconds:.3g} s"
            + (f", student forward {percent(evidence.forward_share)}" if evidence.forward_share is not None else ""),
            f"teacher in {precision or 'fp32'}, {'with' if cached else 'without'} a cache, {epochs} epochs",
        ),
        cause="it runs once for each view of an image, which is the purpose of this run"
        if labels
        else "it computes the same logits for the same pixels again in every epoch",
        fixes=tuple(fixes),
        gain=gain,
    )


def _epochs_of_the_job(evidence: Evidence, set_to: int) -> float:
    """Epochs of the job: fewer than `set_to` if it ends before."""
    steps, each = job_steps(evidence), epoch_steps(evidence)
    return min(set_to, steps / each) if steps and each else set_to


def _without_teacher(evidence: Evidence, share: float, remaining: float, said: str) -> Gain:
    """The gain if the teacher takes only a part of its time.

    Args:
        share: of a step that the teacher takes.
        remaining: the part of it that remains.
    """
    working = 1 - (evidence.share("data_wait") or 0.0)
    # a worker begins with its next batch as a step begins, when the teacher runs: without it, the student loses these cores
    theirs = min(share, cost_of_workers(evidence))
    bare, why = step_left(evidence, 1 - share + theirs, own_cpu=1 - share / working)
    left = 1 - evidence.steps_part * (1 - remaining) * (1 - min(bare, 1.0))
    formula = f"{said}; a step without it takes {why} of its time: 1 / {left:.2f}"
    return estimated(evidence, "teacher_bound", share * evidence.steps_part, left, formula)


def fp32(evidence: Evidence) -> Answer:
    """A GPU computes in fp32 although fewer bits would do."""
    if not evidence.on_gpu:
        return DoesNotApply("no GPU")
    precision, share, idle = evidence.settings.get("precision"), evidence.share(*phases.computing()), evidence.gpu_idle
    if share is None and idle is not None:
        share = 1 - idle
    if share is not None:
        share -= evidence.share("grad_sync") or 0.0  # within backward, and of gradients in fp32 under autocast too
        if evidence.settings.get("teacher_precision") not in (None, "fp32"):
            share -= evidence.share("teacher_forward") or 0.0
    if precision is None or share is None:
        reason = "the precision of this run is not known" if precision is None else evidence.why_no_steps
        return NotMeasured(what="arithmetic in fp32", reason=reason)
    if precision != "fp32" or share < 0.5 or (idle or 0) >= IDLE_GPU:
        return None
    if _capability(evidence) < TENSOR_CORES:
        return DoesNotApply("the GPU has no tensor cores")
    bits = _sixteen_bits(evidence)
    share_of_run = share * evidence.steps_part
    by_cudnn = evidence.facts.get("device") == "cuda" and bits == "bf16"
    if by_cudnn and evidence.script and evidence.script.convolves_in_tf32:
        return _tf32_convolutions(evidence, share)
    return Finding(
        kind="fp32_compute",
        title="The GPU computes in fp32",
        share=share_of_run,
        evidence=(
            f"precision fp32; forward, backward and optimizer take {percent(share)} of a step, not counting the exchange",
            *((f"GPUs busy {percent(1 - evidence.gpu_idle)} of the time",) if evidence.gpu_idle is not None else ()),
        ),
        cause="tensor cores are idle: fp32 matrix products do not use them",
        fixes=(
            Fix(setting="hyperparameters.precision", value=bits, now="fp32", why="autocast; weights stay in fp32"),
            *(
                (
                    Fix(
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
        gain=estimated(
            evidence,
            "fp32_compute",
            share_of_run,
            1 - share_of_run * (1 - 1 / FASTER_ARITHMETIC),
            f"a speed-up of {FASTER_ARITHMETIC:.0f} for arithmetic: 1 / (1 - {share_of_run:.2f} · {1 - 1 / FASTER_ARITHMETIC:.2f})",
        ),
    )


def _tf32_convolutions(evidence: Evidence, share: float) -> Finding:
    """A convolutional network in torch's defaults: matrix products in fp32, convolutions in TF32.

    Args:
        share: of a step in which the device computes.
    """
    saved = share * evidence.steps_part * (1 - 1 / BF16_OVER_TF32)
    return Finding(
        kind="fp32_compute",
        title="The GPU's convolutions compute in TF32, not in bf16",
        share=saved,
        evidence=(
            f"forward, backward and optimizer take {percent(share)} of a step, not counting the exchange",
            "precision fp32, but cuDNN's convolutions may use TF32 (torch.backends.cudnn.allow_tf32)",
        ),
        cause="tensor cores are in use; in 16 bits they multiply twice as fast, from half the bytes",
        fixes=(
            Fix(setting="hyperparameters.precision", value="bf16", now="tf32", why="autocast; weights stay in fp32"),
        ),
        gain=bounded(
            saved,
            f"{amdahl(saved)}: at most a speed-up of {BF16_OVER_TF32:.0f} for arithmetic; how much of it memory-bound kernels and "
            "casts leave is not known",
        ),
    )


def _sixteen_bits(evidence: Evidence) -> str:
    return "bf16" if _capability(evidence) >= BF16 else "fp16"


def _capability(evidence: Evidence) -> float:
    """The GPU's compute capability: as recorded or, from SageMaker's system metrics alone, that of the instance type; BF16 if neither is
    known."""
    recorded = evidence.facts.get("compute_capability")
    if isinstance(recorded, float):
        return recorded
    host = catalog.instance(str(evidence.facts.get("instance_type", "")))
    return float(catalog.gpu(host.gpu).compute_capability) if host is not None and host.gpu is not None else BF16

"""How far a run's devices are from their peak, and what takes the rest of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.insight.evidence import Evidence
from launcher.insight.findings import percent

INPUT, EXCHANGE = "data wait", "gradient exchange"
IDLE = "idle device with data there (launches, copies)"
KERNELS = "memory-bound or small kernels"
UNKNOWN = "small or memory-bound kernels and an idle device, whose use was not recorded"

SMALL = 0.005
"""Share of a step below which a part is not reported."""


@dataclass(frozen=True)
class Utilisation:
    """Where a usual step's time goes, seen from the device's peak."""

    mfu: float
    """Model FLOP utilisation, 0 to 1: training/measure/arithmetic.py defines it."""
    rest: dict[str, float]
    """What takes the other time -> share of a step, the largest first; with `mfu` they add up to 1."""


def utilisation(evidence: Evidence) -> Utilisation | None:
    """The utilisation of a run's devices; None: its MFU is not known.

    A GPU counts as busy while it waits within the exchange, and as idle while it waits for data. So the exchange is taken from its busy
    time, and the wait for data from the idle time, which may be less than the host waits.
    """
    mfu = evidence.mfu
    if mfu is None:
        return None
    left = max(0.0, 1 - mfu)
    exchange = min(evidence.share("grad_sync", "buffer_sync") or 0.0, left)
    waits, idle = evidence.share("data_wait") or 0.0, evidence.gpu_idle
    left -= exchange
    if idle is None:
        waits = min(waits, left)
        parts = {INPUT: waits, EXCHANGE: exchange, UNKNOWN: left - waits}
    else:
        idle = min(idle, left)
        waits = min(waits, idle)
        parts = {INPUT: waits, EXCHANGE: exchange, IDLE: idle - waits, KERNELS: left - idle}
    return Utilisation(mfu, dict(sorted(parts.items(), key=lambda part: -part[1])))


def sentence(evidence: Evidence) -> str:
    """The utilisation in a few sentences, or why it is not known; "" if the run's record says nothing about arithmetic."""
    about = evidence.facts.get("arithmetic")
    if not isinstance(about, dict):
        return ""
    found, done = utilisation(evidence), evidence.mean_rate("tflops")
    if found is None:
        computed = "" if done is None else f"the models' own arithmetic is {done:.3g} TFLOP/s a process; "
        return f"{computed}no MFU: {about['why_no_mfu'] or 'no steps were timed'}"
    peaks = ", ".join(f"{peak:g} TFLOP/s in {name}" for name, peak in about.get("peak_tflops", {}).items())
    if found.mfu > 1:
        return f"MFU {percent(found.mfu)} (peak {peaks}): more than the peak, so the count of operations or the peak is wrong"
    rest = ", ".join(f"{percent(share)} {part}" for part, share in found.rest.items() if share >= SMALL)
    return f"MFU {percent(found.mfu)} (peak {peaks}). Rest of a step: {rest}"


def to_dict(evidence: Evidence) -> dict[str, Any]:
    """JSON-ready."""
    found, about = utilisation(evidence), evidence.facts.get("arithmetic")
    known = about if isinstance(about, dict) else {"why_no_mfu": "the models' operations were not counted"}
    rest = {} if found is None else found.rest
    return {"mfu": evidence.mfu, "tflops": evidence.mean_rate("tflops"), "rest": rest, **known}

"""Compare two runs of the same job: their curves, value by value, and their final weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.record import metrics_file
from launcher.runner.run import Run

MEASURED = re.compile(r".*(/s|_s|_share|_gib)|tflops|mfu")
"""Metrics of speed, time, utilisation and memory, which differ from run to run."""

WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of files in SM_MODEL_DIR that hold nothing but weights."""

Curve = dict[int, dict[str, Any]]
"""Step -> rank 0's metrics by name, without those of MEASURED."""


def curve(run: Run) -> Curve:
    """Rank 0's metrics at full precision, as far as the run got."""
    if not run.folder.outcome.is_file():  # its supervisor was killed before it wrote them
        metrics_file.merge(run.folder, run.hosts)
    found: Curve = {}
    for line in run.metrics():
        if line.get("rank", 0) == 0 and "step" in line and metrics_file.OBSERVED not in line:
            values = {name: value for name, value in line.items() if not MEASURED.fullmatch(name)}
            found.setdefault(line["step"], {}).update(values)
    return found


def weights(run: Run) -> dict[str, str]:
    """File of weights on the first host -> SHA-256."""
    root = run.folder.host(run.hosts[0]) / "model"
    files = sorted(file for file in root.rglob("*") if file.suffix in WEIGHTS)
    return {file.relative_to(root).as_posix(): _checksum(file) for file in files}


def _checksum(file: Path) -> str:
    """SHA-256; a safetensors header's keys are sorted first, since the library writes them in a hash map's order."""
    contents = file.read_bytes()
    end = 8 + int.from_bytes(contents[:8], "little")
    with contextlib.suppress(ValueError, RecursionError):  # not such a file, or a damaged one
        if file.suffix == ".safetensors":
            contents = json.dumps(json.loads(contents[8:end]), sort_keys=True).encode() + contents[end:]
    return hashlib.sha256(contents).hexdigest()


def compare(reference: Curve, found: Curve, tolerance: float) -> tuple[float, str]:
    """Differences between values of the same step and name, as shares of the metric's largest value in `reference`.

    Returns:
        The largest difference; and the first above the tolerance, in words, or "".
    """
    largest = _largest(reference)
    furthest = 0.0
    for step in sorted(set(found) & set(reference)):
        for name in sorted(set(found[step]) & set(reference[step])):
            expected, value = reference[step][name], found[step][name]
            off = _off(expected, value, largest.get(name, 0.0))
            furthest = max(furthest, off)
            if off > tolerance:
                return furthest, f"step {step}: {name} is {expected!r} undisturbed and {value!r}"
    return furthest, ""


def missing(reference: Curve, found: Curve) -> str:
    """The first metric that only `reference` has, in words; "" if there is none."""
    for step in sorted(reference):
        for name in sorted(set(reference[step]) - set(found.get(step, {}))):
            return f"step {step}: only the undisturbed run reported {name}"
    return ""


def other_file(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """The first file whose checksum differs, or that only one side has; "" if there is none."""
    return next((name for name in sorted({**expected, **found}) if expected.get(name) != found.get(name)), "")


def _largest(reference: Curve) -> dict[str, float]:
    """The largest finite magnitude of each metric."""
    found: dict[str, float] = {}
    for values in reference.values():
        for name, value in values.items():
            if isinstance(value, (int, float)) and abs(value) < float("inf"):
                found[name] = max(found.get(name, 0.0), abs(value))
    return found


def _off(expected: Any, value: Any, largest: float) -> float:
    """The difference of two values as a share of `largest`; 0 only if they are equal."""
    if value == expected or (value != value and expected != expected):
        return 0.0
    numbers = isinstance(value, (int, float)) and isinstance(expected, (int, float))
    share = abs(value - expected) / largest if numbers and largest else float("inf")
    return share if share == share else float("inf")

"""What real runs teach about gains: how far the expected ones were off, and what an image costs in each pipeline. calibration.yaml has
the figures with their sources."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import yaml

from launcher.insight.ratio import student

CONFIDENCE = 0.90
"""Share of gain ranges that hold the speed-up that a fix then brings."""

PRIOR = 4
"""Runs that all kinds together count as, beside those of one kind: a kind has few runs, and two that agree say little about its error."""


@functools.cache
def _figures() -> dict[str, Any]:
    figures: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return figures


def errors() -> dict[str, list[float]]:
    """Logarithms of obtained over expected speed-ups of real runs, by kind of finding."""
    return {
        kind: [math.log(obtained / expected) for expected, obtained in pairs]
        for kind, pairs in _figures()["gains"].items()
    }


def error(kind: str) -> float:
    """Factor, either way, within which obtained speed-ups of a kind lie around the expected ones, with CONFIDENCE.

    The variance of a kind pools its runs with that of all kinds, which counts as PRIOR more runs: a scaled inverse chi-squared prior, whose
    predictive distribution is Student's t (Gelman et al., Bayesian Data Analysis, 3rd edition, sections 2.6 and 3.2). That of all kinds
    comes from their median, so that one kind that is far off does not widen all others. Errors are taken around 0: a kind that is always
    expected too high has a wider range.
    """
    known = errors()
    own, pool = known.get(kind, []), [abs(one) for many in known.values() for one in many]
    usual = statistics.median(pool) / NormalDist().inv_cdf(0.75)
    degrees_of_freedom = PRIOR + len(own)
    variance = (math.fsum(one**2 for one in own) + PRIOR * usual**2) / degrees_of_freedom
    return math.exp(student(degrees_of_freedom, CONFIDENCE) * math.sqrt(variance))


def image_cost(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> float | None:
    """CPU time of an image after a change of settings, over that before; None: no figures for one of the pipelines.

    Rounds of augmentation and decoding work on the whole image, so the ratio does not depend on its size.
    """
    before, after = (_image_seconds({**settings, **more}) for more in ({}, changes))
    return None if before is None or after is None else after / before


def _image_seconds(settings: Mapping[str, Any]) -> float | None:
    pipeline = f"{settings.get('preprocessing')}{'_composed' if settings.get('compose_augmentation') else ''}"
    speeds: dict[int, float] | None = _figures()["images_a_second"].get(pipeline)
    load = settings.get("augmentation_load")
    if speeds is None or not isinstance(load, int):
        return None
    (few, fast), (many, slow) = speeds.items()
    a_round = (1 / slow - 1 / fast) / (many - few)
    return max(1 / max(fast, slow), 1 / fast + (load - few) * a_round)  # rounds that cost nothing are noise

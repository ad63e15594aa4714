"""The phases of a step, by the scripts' own table: entrypoints/training/runtime/metrics.py."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from launcher.config.metrics import metric_table

NO_PHASE = "no phase"
"""What a step does outside its phases, in findings."""


@functools.cache
def order() -> tuple[str, ...]:
    """Names of all phases, in the order of a step."""
    return tuple(phase.name for phase in metric_table().PHASES)


@functools.cache
def computing() -> tuple[str, ...]:
    """Names of the phases in which the device computes."""
    return tuple(phase.name for phase in metric_table().PHASES if phase.computes)


@functools.cache
def parents() -> Mapping[str, str]:
    """Phase -> the phase that it is a part of; phases that are no part are left out."""
    return MappingProxyType({phase.name: phase.inside for phase in metric_table().PHASES if phase.inside})


def labelled(name: str) -> str:
    """A phase's name, with the phase that it is a part of: a table shows both, and its shares would else add up to more than a step."""
    return f"{name} (part of {parents()[name]})" if name in parents() else name

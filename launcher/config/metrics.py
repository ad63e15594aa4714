"""The scripts' own table of metrics and phases, which the launcher reads too: entrypoints/training/runtime/metrics.py."""

from __future__ import annotations

import functools
import threading
from typing import Any

from launcher.config.entrypoints import kit_modules

_LOADING = threading.Lock()  # several threads read logs, and an import changes what all of them share


def metric_table() -> Any:
    """The module: METRICS, PHASES, LINE, PAIR, `sagemaker_metrics` …; imported once, and without torch."""
    with _LOADING:
        return _loaded()


@functools.cache
def _loaded() -> Any:
    with kit_modules("training.runtime.metrics") as (module,):
        return module

"""One name for a part of a step in every available profiler: torch.profiler, NVIDIA's Nsight by NVTX, SageMaker Profiler."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

from training.runtime import accelerator

NAMES: set[str] = set()
"""Names annotated so far: in a profiler's list these are no operators."""


@contextlib.contextmanager
def annotate(name: str) -> Iterator[None]:
    """Name the body in the timeline of every profiler that is recording.

    Without a profiler it costs some two microseconds, and two calls of NVTX on a GPU.
    """
    with contextlib.ExitStack() as stack:
        # record_function would cost three times as much even if nobody records
        if torch.autograd._profiler_enabled():
            NAMES.add(name)
            stack.enter_context(torch.profiler.record_function(name))
        nvtx = accelerator.nvtx()
        if nvtx is not None:
            nvtx.range_push(name)
            stack.callback(nvtx.range_pop)
        sagemaker = sagemaker_profiler()
        if sagemaker is not None:
            stack.enter_context(sagemaker.annotate(name))
        yield


@functools.cache
def sagemaker_profiler() -> ModuleType | None:
    """SageMaker Profiler's module: smprof, smppy in images before 2024; None elsewhere.

    PyPI's smppy is another program, a server for text messages: a module without SMProfiler is ignored.
    """
    for name in ("smprof", "smppy"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if hasattr(module, "SMProfiler") and hasattr(module, "annotate"):
                return module
    return None

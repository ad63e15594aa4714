"""Decides whether a run's models are compiled and run as CUDA graphs: what `auto` stands for, from the length of the run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import replace
from typing import Any, TypeVar

import torch

from training.distributed.world import World
from training.engine.run import Run
from training.runtime import accelerator
from training.settings.scripts import TrainingSettings

PAYS_FROM = 5_000
"""Steps from which `auto` compiles. On an H100, compiling took up to 55 s, beside other checks, and CUDA graphs saved 17 to 50 ms per
step of a ViT-L teacher and a ViT-S student (docs/results/gpu.md), so 1,000 to 3,300 steps repaid it."""

HOPPER = 9
"""Major compute capability of the only GPU that was measured (CUDA C++ programming guide, "Compute Capabilities")."""

MIN_TORCH = (2, 6)
"""Oldest torch with which `auto` compiles and makes graphs: older compilers give up on more models. The figures are of 2.11."""

Settings = TypeVar("Settings", bound=TrainingSettings)


def decide_compiling(settings: Settings, run: Run, *, trained: int = 0, answered: int = 0) -> tuple[Settings, Run]:
    """The settings and the run with `compile`, `compile_teacher` and `cuda_graphs` resolved; recorded, and logged if there is a GPU.

    Args:
        trained, answered: steps of the whole run in which a model is trained, and in which this process's teacher answers, including
            steps already done, so that a resumed run decides as before. 0: there is no such model.
    """
    world, decided = run.world, dict[str, Any]()

    def log(name: str, why_not: str | None, yes: str) -> None:
        if accelerator.is_gpu(world.device):
            run.report.log(f"{name} auto: {f'no, {why_not}' if why_not else f'yes, {yes}'}")

    for name, steps in {"compile": trained, "compile_teacher": answered}.items():
        asked = getattr(settings, name, False)
        if asked == "auto" and steps:
            why_not = _why_not(settings, world, steps)
            log(name, why_not, f"into CUDA graphs: it pays off over {steps:,} steps")
            asked = why_not is None
        decided[name] = asked is True and steps > 0
    graphs = settings.cuda_graphs
    if graphs == "auto":
        no_graphs = _no_graphs(settings, world)
        graphs = no_graphs is None
        if True in (settings.compile, getattr(settings, "compile_teacher", False)):  # else it was logged already
            log("cuda_graphs", no_graphs, "each compiled pass is launched as one")
    decided["cuda_graphs"] = graphs and any(decided.values())
    if settings.cuda_graphs is True and not decided["cuda_graphs"]:
        run.report.log(
            "cuda_graphs true has no effect, as no model is compiled: set compile or compile_teacher to true"
        )
    decided = {name: value for name, value in decided.items() if hasattr(settings, name)}
    run.record.write("decided", settings=decided)
    settings = replace(settings, **decided)
    return settings, replace(run, settings=settings)


def _why_not(settings: TrainingSettings, world: World, steps: int) -> str | None:
    """Why `auto` does not compile, for messages; None: it does. Only into graphs: without them, it was not shown to pay for every model."""
    no_graphs = _no_graphs(settings, world)
    if no_graphs is not None:
        return no_graphs
    if steps < PAYS_FROM:
        return f"{steps:,} steps are too few for it to pay off; that takes about {PAYS_FROM:,}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if shutil.which(os.environ.get("CC", "")) is None and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "there is no C compiler, which Triton needs: gcc or clang"
    return None


def _no_graphs(settings: TrainingSettings, world: World) -> str | None:
    """Why `auto` makes no CUDA graphs; None: it may."""
    if world.device.type != "cuda" or accelerator.capability(world.device)[0] != HOPPER:
        return "it was measured on an H100 only"
    if world.size > 1:
        return "it was not measured on several GPUs"
    if tuple(map(int, torch.__version__.split(".")[:2])) < MIN_TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, MIN_TORCH))}"
    if settings.cuda_graphs is False:
        return "cuda_graphs is false, and without them it does not always pay"
    if getattr(settings, "teacher_stream", False):
        return "teacher_stream runs two models at once, and CUDA graphs share memory; without graphs it does not always pay"
    if not settings.one_pass_per_step:
        return "a step has several passes, whose gradients CUDA graphs would overwrite; without graphs it does not always pay"
    return None

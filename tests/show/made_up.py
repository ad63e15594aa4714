"""Diagnoses, a comparison and a tuning of made-up measurements, as pages and notebooks show them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.replay import Replay
from launcher.record.records import RunFolder
from launcher.runner.run import Run
from launcher.show.spread import Spread
from launcher.study.tune_result import Tuning
from launcher.study.tune_search import Proposal, Search, Step, Trial
from launcher.study.tune_subject import CommandSubject
from tests.insight.planted import plant
from tests.study import made_up as studies

STEP = {
    "data_wait": 0.1,
    "teacher_forward": 0.1,
    "student_forward": 0.1,
    "backward": 0.3,
    "grad_sync": 0.1,
    "optimizer": 0.02,
}


def distillation(**values: Any) -> Diagnosis:
    """Four GPUs that wait for images and for each other, with checkpoints and evaluations."""
    shape = {"phases": STEP, "ranks": 4, "steps": 400, "cores": 16, "busy": 12, "gpu": 55}
    return Diagnosis(plant(**{**shape, "checkpoint": (100, 4.0), "evaluate": (150, 6.0), **values}))


def crowded() -> Diagnosis:
    """Too many workers on two cores, in a run that can be replayed."""
    crowd = plant(phases={**STEP, "data_wait": 0.6}, cores=2, busy=1.9, settings={"num_workers": 16})
    return Diagnosis(dataclasses.replace(crowd, replay=Replay("slow-20261122-100000-abcd")))


def system_metrics_alone() -> Diagnosis:
    """All that SageMaker records of a job without the kit."""
    return Diagnosis(plant(phases=None, cores=8, busy=7.5, saturated=6, gpu=40))


def too_short() -> Diagnosis:
    return Diagnosis(plant(phases=STEP, steps=3, log_every=1, cores=2, busy=1.5))


def healthy() -> Diagnosis:
    busy = {"data_wait": 0.001, "student_forward": 0.1, "backward": 0.2, "optimizer": 0.01}
    return Diagnosis(plant(phases=busy, steps=400, cores=8, busy=3.0, gpu=97))


def many_ranks() -> Diagnosis:
    return distillation(ranks=256, steps=100, cores=96, busy=50)


def comparison() -> Comparison:
    return Comparison(distillation(), distillation(phases={**STEP, "data_wait": 0.01}, busy=6, gpu=85, checkpoint=None))


def tuning() -> Tuning:
    """Fewer workers were kept, and a setting that changes losses was rolled back."""

    def trial(name: str, changes: dict[str, Any], diagnosis: Diagnosis, loss: float) -> Trial:
        made = Trial(changes, Run(RunFolder(Path(name))))
        made.diagnosis = diagnosis
        made.losses = {step: loss / step for step in range(1, 40)}
        return made

    before, after = trial("a", {}, crowded(), 2.0), trial("b", {"num_workers": 1}, distillation(), 2.0)
    worse = trial("c", {"num_workers": 1, "precision": "bf16"}, distillation(), 2.2)
    finding = before.diagnosis.findings[0]
    search = Search(CommandSubject(["python", "train.py"], "train"), frozenset(), None, lambda first: None, print)
    search.first, search.best, search.ended = [before], [after], "nothing that helps is left"
    kept = Proposal({"num_workers": 1}, finding, "speed-up 1.34 to 1.86 (90 %), about 1.58")
    costs = Spread((120.0, 122.0)), Spread((80.0, 81.0))
    search.steps = [
        Step(
            kept,
            [before],
            [after],
            True,
            "faster in both pairs",
            costs=costs,
            losses="the same losses, to the digits printed",
        ),
        Step(Proposal({"precision": "bf16"}, finding, ""), [after], [worse], why="slower", same_losses=False),
    ]
    return Tuning(search.subject, Path("trials.csv"), search, None)


SHOWN: dict[str, Callable[[], Any]] = {
    "report": distillation,
    "report of a command to paste": crowded,
    "report of system metrics alone": system_metrics_alone,
    "report of a run too short": too_short,
    "report of a healthy run": healthy,
    "report of 256 ranks": many_ranks,
    "comparison": comparison,
    "tuning": tuning,
    "preprocessing study": studies.post,
    "scaling study": studies.known,
    "study without a trial": lambda: studies.scaling([]),
}
"""By name, what has a page and a display in notebooks."""

"""Start vision training jobs on Amazon SageMaker, run the same jobs without AWS, and find out why one is slow.

>>> import launcher
>>> job = launcher.load("configs/quickstart_teacher.yaml", smoke=True)
>>> plan = launcher.plan(job)
>>> print(plan)                      # nothing has happened yet
plan quickstart-teacher-...
>>> run = launcher.run(plan)
>>> run.wait()
'Completed'
>>> run.result()["model"]
'pvt_v2_b0'
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher import study
    from launcher.backends.plans import check, plan, upload
    from launcher.config.issues import Issue, UserError
    from launcher.config.job import Job
    from launcher.config.loading import from_values, load
    from launcher.insight.comparison import Comparison
    from launcher.insight.diagnosis import Diagnosis
    from launcher.planner.plan import Plan
    from launcher.runner.diagnose import diagnose
    from launcher.runner.replay import diff, replay, resume
    from launcher.runner.run import Run, attach, runs
    from launcher.runner.run import start as run
    from launcher.runner.unfinished import resume_unfinished
    from launcher.study.tune_study import tune

__all__ = [
    "Comparison",
    "Diagnosis",
    "Issue",
    "Job",
    "Plan",
    "Run",
    "UserError",
    "attach",
    "check",
    "diagnose",
    "diff",
    "from_values",
    "load",
    "plan",
    "replay",
    "resume",
    "resume_unfinished",
    "run",
    "runs",
    "study",
    "tune",
    "upload",
]


_PLACES = {
    "Comparison": "launcher.insight.comparison:Comparison",
    "Diagnosis": "launcher.insight.diagnosis:Diagnosis",
    "Issue": "launcher.config.issues:Issue",
    "Job": "launcher.config.job:Job",
    "Plan": "launcher.planner.plan:Plan",
    "Run": "launcher.runner.run:Run",
    "UserError": "launcher.config.issues:UserError",
    "attach": "launcher.runner.run:attach",
    "check": "launcher.backends.plans:check",
    "diagnose": "launcher.runner.diagnose:diagnose",
    "diff": "launcher.runner.replay:diff",
    "from_values": "launcher.config.loading:from_values",
    "load": "launcher.config.loading:load",
    "plan": "launcher.backends.plans:plan",
    "replay": "launcher.runner.replay:replay",
    "resume": "launcher.runner.replay:resume",
    "resume_unfinished": "launcher.runner.unfinished:resume_unfinished",
    "run": "launcher.runner.run:start",
    "runs": "launcher.runner.run:runs",
    "tune": "launcher.study.tune_study:tune",
    "upload": "launcher.backends.plans:upload",
}
"""Where each name above is, as module:name. It is imported on first use, so that a program pays only for what it uses."""


def __getattr__(name: str) -> object:
    if name == "study":
        return importlib.import_module("launcher.study")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, there = _PLACES[name].partition(":")
    if name == "tune":
        from launcher.insight.diagnose import numpy_needed

        with numpy_needed(name):
            found: object = getattr(importlib.import_module(module), there)
    else:
        found = getattr(importlib.import_module(module), there)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

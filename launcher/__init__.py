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

from typing import TYPE_CHECKING

from launcher import study
from launcher.backends.plans import check, plan, upload
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job
from launcher.config.loading import from_values, load
from launcher.insight.diagnose import numpy_needed
from launcher.planner.plan import Plan
from launcher.runner.diagnose import diagnose
from launcher.runner.replay import diff, replay, resume
from launcher.runner.run import Run, attach, runs
from launcher.runner.run import start as run
from launcher.runner.unfinished import resume_unfinished

if TYPE_CHECKING:
    from launcher.insight.comparison import Comparison
    from launcher.insight.diagnosis import Diagnosis
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


def __getattr__(name: str) -> object:
    """Import what needs numpy on first use."""
    if name == "Comparison":
        from launcher.insight import comparison

        return comparison.Comparison
    if name == "Diagnosis":
        from launcher.insight import diagnosis

        return diagnosis.Diagnosis
    if name == "tune":
        with numpy_needed("tune"):
            from launcher.study import tune_study
        return tune_study.tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

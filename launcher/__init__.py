"""Start vision training jobs on Amazon SageMaker, run the very same jobs without AWS, and see what came out.

import launcher

job = launcher.load("configs/quickstart.yaml", smoke=True)
plan = launcher.plan(job)
print(plan)                      # nothing has happened yet
run = launcher.run(plan)
run.wait()
print(run.result())
"""

from launcher import study
from launcher.diagnosing import diagnose
from launcher.findings import Finding, UserError
from launcher.job import Job
from launcher.loading import from_values, load
from launcher.planning import Plan, check, plan
from launcher.repeating import diff, replay, resume
from launcher.running import Run, attach, runs, upload
from launcher.running import start as run

__all__ = [
    "Finding",
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
    "run",
    "runs",
    "study",
    "upload",
]

"""Job -> Plan, for the backend of a name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher import backends
from launcher.config.issues import UserError
from launcher.config.job import Job
from launcher.config.loading import load
from launcher.planner.plan import Plan, refuse_errors


def plan(job: Job, *, on: str = backends.DEFAULT) -> Plan:
    """Work a job out in full. Nothing is written, started, imported or asked over a network.

    >>> plan = launcher.plan(launcher.load("configs/kt_food_tag.yaml"), on="aws")
    >>> plan.errors, plan.request["ResourceConfig"]["InstanceCount"]
    ((), 4)

    Args:
        job: what to run.
        on: the backend's name.

    Returns:
        A Plan; its `issues` hold everything that validation found, errors too.

    Raises:
        UserError: no such backend.
    """
    return backends.get(on).plan(job)


def check(planned: Plan) -> Plan:
    """The plan with what a look online shows: read-only requests to AWS about data, role, network, quota and price.

    Where something could not be looked at, the issue says "not checked". A plan for this machine comes back as it is.

    >>> plan = launcher.check(launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True), on="aws"))
    >>> plan.checked, plan.errors
    (True, ())
    """
    return backends.get(planned.backend).checked(planned)


def plan_config(
    path: str | Path, overrides: Sequence[str] = (), *, on: str = backends.DEFAULT, smoke: bool = False
) -> Plan:
    """`load` and `plan` in one, so that the mistakes of both come at once.

    Raises:
        UserError: the file is no job; what is wrong with the rest of it is told too.
    """
    try:
        return plan(load(path, overrides, smoke=smoke), on=on)
    except UserError as error:
        if error.rest is None:
            raise
        known = [issue.key.split(" (line")[0] for issue in error.issues]
        rest = [
            issue
            for issue in plan(error.rest, on=on).errors
            if not any(issue.key == key or key.startswith(f"{issue.key}.") for key in known)
        ]
        raise UserError([*error.issues, *rest], error.title) from None


def upload(planned: Plan) -> None:
    """Bring a plan's data and code to S3, so that its estimator can be fitted: `estimator, inputs = plan.estimator()`.

    >>> plan = launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True), on="aws")
    >>> launcher.upload(plan)
    >>> estimator, inputs = plan.estimator()           # then estimator.fit(inputs, job_name=plan.name)
    >>> estimator.instance_type, sorted(inputs)
    ('ml.m5.xlarge', ['teacher', 'train', 'validation'])

    Raises:
        UserError: the plan has errors, is not for SageMaker, or AWS refuses.
    """
    refuse_errors(planned)
    backends.get(planned.backend).upload(planned)

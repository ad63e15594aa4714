"""A job's plan, by the backend's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from launcher import backends
from launcher.config.issues import UserError
from launcher.config.job import Job
from launcher.config.loading import load
from launcher.planner.plan import Plan, refuse_errors


def plan(job: Job, *, on: str = backends.DEFAULT, source: Path | None = None) -> Plan:
    """Plan a job in full. It writes nothing, starts nothing, and uses no network.

    >>> plan = launcher.plan(launcher.load("configs/kt_food_tag.yaml"), on="aws")
    >>> plan.errors, plan.request["ResourceConfig"]["InstanceCount"]
    ((), 4)

    Args:
        job: what to run.
        on: the backend's name.
        source: the code, if it is not where the job says, such as a recorded run's. None: it is there.

    Returns:
        A Plan. Its `issues` hold everything that validation found, errors too.

    Raises:
        UserError: no such backend.
    """
    return backends.get(on).plan(job, source)


def check(planned: Plan) -> Plan:
    """Validate a plan against the AWS account or the Docker engine: data, role, network, quota, price. Read-only.

    Whatever could not be read is an issue of level "not checked". A plan for `process` is returned unchanged.

    >>> plan = launcher.check(launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True), on="aws"))
    >>> plan.checked, plan.errors
    (True, ())
    """
    return backends.get(planned.backend).checked(planned)


def plan_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    on: str = backends.DEFAULT,
    smoke: bool = False,
    change: Callable[[Job], Job] = lambda job: job,
) -> Plan:
    """`load` and `plan` in one call, so that the mistakes of both are reported together.

    Args:
        change: turns the loaded job into the one that is planned.

    Raises:
        UserError: the file is not a valid job. The error lists the plan's errors too.
    """
    try:
        return plan(change(load(path, overrides, smoke=smoke)), on=on)
    except UserError as error:
        if error.rest is None:
            raise
        known = [issue.key.split(" (line")[0].removeprefix("smoke." if smoke else "") for issue in error.issues]
        rest = [
            issue
            for issue in plan(change(error.rest), on=on).errors
            if not any(issue.key == key or key.startswith(f"{issue.key}.") for key in known)
        ]
        raise UserError([*error.issues, *rest], error.title) from None


def upload(planned: Plan) -> None:
    """Upload a plan's data and code to S3, before its estimator is fitted.

    >>> plan = launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True), on="aws")
    >>> launcher.upload(plan)
    >>> estimator, inputs = plan.estimator()           # then estimator.fit(inputs, job_name=plan.name)
    >>> estimator.instance_type, sorted(inputs)
    ('ml.m5.xlarge', ['teacher', 'train', 'validation'])

    Raises:
        UserError: the plan has errors, is not for SageMaker, its code has changed since it was planned, or AWS refuses.
    """
    refuse_errors(planned)
    backends.get(planned.backend).upload(planned)

"""CreateTrainingJob, through the SDK's estimator where SDK v2 is installed, else through boto3. Both send the same request."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from launcher.aws import sdk, session
from launcher.config.issues import UserError, mistake
from launcher.config.redaction import redact_text
from launcher.planner.plan import Plan


def sender() -> str:
    """What sends the request, for the record: `sagemaker 2.257.7` or `boto3`."""
    return f"sagemaker {sdk.v2()}" if sdk.supports_estimators() else "boto3"


def create(plan: Plan) -> None:
    """Create the training job.

    Raises:
        botocore's errors; UserError where the SDK would change the planned request.
    """
    if sdk.supports_estimators():
        through_estimator(plan)
    else:
        through_boto3(plan)


def through_boto3(plan: Plan) -> None:
    """Create the job by the planned request itself."""
    assert plan.request is not None
    session.client("sagemaker", str(plan.job.region)).create_training_job(**plan.request)


def is_refusal(error: BaseException) -> bool:
    """Whether an error of `create` means that it created no job: SageMaker's first answer refused it, or nothing was sent.

    If an answer is lost or an attempt is throttled, botocore sends the request again. A job that SageMaker then refuses may exist:
    the first attempt has taken the name (ResourceInUse) or the last of the quota (ResourceLimitExceeded).
    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html

    Args:
        error: as it was raised, or as a UserError of `session.as_user_error`.
    """
    reason = error.__cause__ or error
    if isinstance(reason, UserError) or type(reason).__name__ == "ParamValidationError":
        return True
    answer = getattr(reason, "response", None) or {}
    is_first = answer.get("ResponseMetadata", {}).get("RetryAttempts") == 0
    return is_first and session.code(reason) not in ("ResourceInUse", *session.THROTTLED)


def is_there(plan: Plan) -> bool:
    """Whether SageMaker knows the training job by now. If not, it may still exist: a new job takes a moment to be known."""
    try:
        session.client("sagemaker", str(plan.job.region)).describe_training_job(TrainingJobName=plan.name)
    except session.errors():
        return False
    return True


def through_estimator(plan: Plan) -> None:
    """Create the job by `PyTorch.fit`, and check the request before it is sent; through boto3 if the SDK fails before it makes one.

    SDK v2 refuses Debugger and profiling in regions that are not in its own list, for example.
    """
    made_requests: list[dict[str, Any]] = []
    try:
        with _quiet():
            _fit(plan, made_requests)
    except Exception as error:
        if made_requests or isinstance(error, (UserError, *session.errors())):  # a request may have been sent
            raise
        reason = redact_text(f"{type(error).__name__}: {error}", plan.job.environment)
        text = f"{plan.name}: sagemaker {sdk.v2()} sent nothing ({reason}); boto3 sends the planned request instead"
        print(text, file=sys.stderr, flush=True)
        through_boto3(plan)


def _fit(plan: Plan, made_requests: list[dict[str, Any]]) -> None:
    """Call `PyTorch.fit`, and append its CreateTrainingJob request to `made_requests` before it is compared and sent."""
    made, inputs = plan.estimator(session.boto_session(str(plan.job.region)))
    events = made.sagemaker_session.sagemaker_client.meta.events
    event = "provide-client-params.sagemaker.CreateTrainingJob"
    events.register(event, lambda params, **_: made_requests.append(params))
    events.register(event, _same_as(plan.request or {}))
    made.fit(inputs or None, wait=False, job_name=plan.name)
    if made.latest_training_job is None:  # the SDK's telemetry ends in a `finally: return`, which swallows Ctrl-C
        raise KeyboardInterrupt


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the SDK, which prints INFO lines of every library once it is imported."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers


def _same_as(planned: dict[str, Any]) -> Callable[..., None]:
    def compare(params: dict[str, Any], **_: Any) -> None:
        if comparable(params) != comparable(planned):
            keys = [key for key in {**params, **planned} if comparable(params).get(key) != comparable(planned).get(key)]
            raise mistake(
                "estimator",
                f"this SageMaker SDK would change {', '.join(sorted(keys))} of the planned request; nothing was sent",
                "pip install 'sagemaker==2.257.7', or uninstall it: boto3 alone sends the planned request",
            )

    return compare


def comparable(request: dict[str, Any]) -> dict[str, Any]:
    """A request with Debugger's collections sorted: the SDK keeps them in a set."""
    hook = request.get("DebugHookConfig")
    if hook is None:
        return request
    collections = sorted(hook.get("CollectionConfigurations", []), key=lambda item: item["CollectionName"])
    return {**request, "DebugHookConfig": {**hook, "CollectionConfigurations": collections}}

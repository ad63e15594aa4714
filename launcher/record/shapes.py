"""Shapes of a run folder's JSON files, checked when they are read, so that no other code meets a wrong type."""

from __future__ import annotations

import functools
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, TypeAdapter
from pydantic_core import ErrorDetails
from typing_extensions import NotRequired, TypedDict  # pydantic takes typing's own from Python 3.12 on

STRICT = ConfigDict(strict=True, extra="allow")
"""Numbers are not text, nor text numbers. Keys that a shape does not name may hold anything."""


def _with_zone(text: str) -> str:
    try:
        known = datetime.fromisoformat(text).tzinfo is not None and bool(utc(text))
    except OverflowError:
        known = False
    if not known:
        raise ValueError("no time with its zone")
    return text


def utc(text: str) -> datetime:
    """A Time in UTC."""
    return datetime.fromisoformat(text).astimezone(timezone.utc)


def iso(seconds: float) -> str:
    """A Unix time as a Time."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


Time = Annotated[str, AfterValidator(_with_zone)]
"""ISO 8601 with a time zone."""


class HostShape(TypedDict):
    name: Annotated[str, Field(pattern=r"^algo-[1-9][0-9]*$")]  # part of paths
    address: NotRequired[str]
    command: NotRequired[list[str]]
    environment: NotRequired[dict[str, str]]
    group: NotRequired[str]


class GroupShape(TypedDict):
    name: str
    instance_type: str


class ComputeShape(TypedDict):
    instance_type: NotRequired[str | None]
    instance_groups: NotRequired[list[GroupShape]]
    training_groups: NotRequired[list[str]]


class JobShape(TypedDict):
    name: str
    script: NotRequired[str]
    region: NotRequired[str | None]
    compute: NotRequired[ComputeShape | None]
    inputs: NotRequired[dict[str, dict[str, Any]]]
    hyperparameters: NotRequired[dict[str, Any]]


class OutputShape(TypedDict):
    S3OutputPath: str


class ProfilerShape(TypedDict):
    DisableProfiler: NotRequired[bool]
    S3OutputPath: NotRequired[str]


class RequestShape(TypedDict):
    """A CreateTrainingJob request."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    OutputDataConfig: NotRequired[OutputShape]
    ProfilerConfig: NotRequired[ProfilerShape]
    EnableManagedSpotTraining: NotRequired[bool]


class PriceShape(TypedDict):
    text: NotRequired[str]
    usd_per_hour: NotRequired[FiniteFloat | None]


class PlanShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    name: str
    planned: Time
    backend: str
    job: JobShape
    hosts: Annotated[list[HostShape], Field(min_length=1)]
    source: NotRequired[str]
    channels: NotRequired[dict[str, str]]
    hyperparameters: NotRequired[dict[str, str]]
    request: NotRequired[RequestShape | None]
    price: NotRequired[PriceShape | None]
    replay_of: NotRequired[str | None]
    resumes: NotRequired[str | None]


def _with_region(plan: dict[str, Any]) -> dict[str, Any]:
    if plan.get("request") and not (plan["job"].get("region") and plan["request"].get("OutputDataConfig")):
        raise ValueError("a request without job.region or OutputDataConfig")
    return plan


class OutcomeShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    state: Literal["Completed", "Failed", "Stopped"]
    started: NotRequired[str | None]
    ended: NotRequired[str | None]
    seconds: NotRequired[FiniteFloat | None]
    host_seconds: NotRequired[FiniteFloat | None]
    billable_seconds: NotRequired[int]
    cost_usd: NotRequired[FiniteFloat]
    warm_pool_usd: NotRequired[FiniteFloat]
    saving: NotRequired[FiniteFloat]
    interruptions: NotRequired[int]
    stop_reason: NotRequired[str]
    failed_host: NotRequired[str]
    exit_code: NotRequired[int | None]
    failure: NotRequired[str]
    traceback: NotRequired[str]
    cause: NotRequired[str]
    fix: NotRequired[str]
    not_saved: NotRequired[list[str]]
    model_uri: NotRequired[str | None]


class TransitionShape(TypedDict):
    Status: str
    StartTime: str
    StatusMessage: NotRequired[str]


class WarmPoolShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    Status: str


class ResourcesShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    KeepAlivePeriodInSeconds: NotRequired[int]


class RemoteShape(TypedDict):
    """SageMaker's last answer, and what the launcher knew before the first: when, by what and to which account the job was sent."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    TrainingJobArn: NotRequired[Annotated[str, Field(pattern=r"^arn:[^:]*:[^:]*:[^:]*:[^:]*:")]]  # its parts are read
    TrainingJobStatus: NotRequired[str]
    SecondaryStatusTransitions: NotRequired[list[TransitionShape]]
    WarmPoolStatus: NotRequired[WarmPoolShape]
    ResourceConfig: NotRequired[ResourcesShape]
    TrainingStartTime: NotRequired[Time]
    TrainingEndTime: NotRequired[Time]
    asked: NotRequired[str]
    sent: NotRequired[FiniteFloat]
    sent_by: NotRequired[str]
    account: NotRequired[str]
    emulator: NotRequired[str]
    no_logs: NotRequired[str]


class GitShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    commit: str | None
    clean: NotRequired[bool]
    changed: NotRequired[list[str]]
    reason: NotRequired[str]


class StopShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    reason: str


class SupervisorShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    pid: int


class StreamsShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    sizes: dict[str, Annotated[int, Field(ge=0)]]
    tokens: dict[str, str]


class ResultShape(TypedDict):
    """What a script wrote: any JSON object."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    settings: NotRequired[dict[str, Any]]


_SHAPES: dict[str, Any] = {
    "plan.json": Annotated[PlanShape, AfterValidator(_with_region)],
    "outcome.json": OutcomeShape,
    "remote.json": RemoteShape,
    "request.json": RequestShape,
    "git.json": GitShape,
    "versions.json": dict[str, str],
    "stop.json": StopShape,
    "supervisor.json": SupervisorShape,
    "streams.json": StreamsShape,
    "result.json": ResultShape,
}


@functools.cache
def shape(file: str) -> TypeAdapter[dict[str, Any]]:
    """The shape of a run folder's file by its name; any object for a file that has none of its own."""
    return TypeAdapter(_SHAPES.get(file, dict[str, Any]))


def prepare() -> None:
    """Build the shapes of all files now, not on first reading: pydantic swallows a Ctrl-C that comes meanwhile."""
    for file in _SHAPES:
        shape(file)


def complaint(error: ErrorDetails) -> str:
    """What is wrong with one value: `seconds: input should be a valid number, not 'soon'`."""
    where = ".".join(map(str, error["loc"]))
    wrong = error["msg"][:1].lower() + error["msg"][1:]
    if error["type"] == "json_invalid":
        return wrong if error["input"].strip() else "the file is empty"
    found = "" if error["type"] == "missing" else f", not {_short(error['input'])}"
    return f"{where}: {wrong}{found}" if where else f"{wrong}{found}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

"""Shapes of a run's measurements, checked as they are read, so that no rule meets a wrong type or a number that is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict  # pydantic takes typing's own from Python 3.12 on

from launcher.record import trust
from launcher.record.shapes import STRICT, complaint

LATEST = 253_402_300_800.0
"""Unix seconds of the year 10000, after the last time that Python and JavaScript show."""

LARGEST = 1e15
"""Limit of a measured number, either way: its sums and squares stay floats, whole numbers exact. No disk reads as many bytes a second."""

Time = Annotated[FiniteFloat, Field(ge=0, lt=LATEST)]
Seconds = Annotated[FiniteFloat, Field(ge=0, lt=1e9)]
Number = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
Speed = Annotated[FiniteFloat, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=int(LARGEST))]
Positive = Annotated[int, Field(ge=1, le=int(LARGEST))]


def _with_step(seconds: dict[str, float]) -> dict[str, float]:
    if not seconds.get("step"):
        raise ValueError("no time of a whole step")
    return seconds


class StartShape(TypedDict):
    """A timeline's first line."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    rank: Count
    node: str
    settings: dict[str, Any]
    not_measured: dict[str, str]
    world_size: Positive | None
    backend: str | None
    device: str | None
    device_name: str | None
    instance_type: str | None
    torch: str | None
    threads: Count | None
    compute_capability: NotRequired[Speed | None]
    device_uuid: NotRequired[str | None]
    observed: NotRequired[bool]
    """Whether the observer wrote it, for a user script."""


def _one_level(extra: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for name, value in extra.items() if name != "servers"):
        raise ValueError("several numbers where one is expected")
    if not isinstance(extra.get("servers", {}), dict):
        raise ValueError("one number of the servers")
    return extra


class WindowShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    epoch: Count
    step: Positive
    ended: Time
    seconds: Annotated[dict[str, Seconds], AfterValidator(_with_step)]
    extra: Annotated[dict[str, Number | bool | dict[str, Number]], AfterValidator(_one_level)]


class FirstStepShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    seconds: Seconds
    workers: Count | None
    parts: NotRequired[dict[str, Seconds]]


class StallShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    kind: Literal["checkpoint", "evaluate"]
    step: Count
    began: Time
    seconds: Seconds


DatasetShape = TypedDict(
    "DatasetShape", {"class": str, "file": NotRequired[str | None], "line": NotRequired[Count | None]}
)
"""A loader's dataset: its class, and where that makes a sample."""

PartShape = TypedDict(
    "PartShape",
    {
        "id": Count,
        "role": str,
        "batches": Count | None,
        "batch_size": Positive | None,
        "num_workers": Count,
        "workers_stay": bool,
        "pin_memory": bool,
        "prefetch_factor": Positive | None,
        "persistent_workers": bool,
        "dataset": DatasetShape | None,
        "class": str,
        "parameters": Count,
        "trainable": Count,
        "dtype": str | None,
        "convolutions": Count,
        "matrices": Count,
        "autocast": str | None,
        "matmul_precision": str,
        "allow_tf32": bool,
        "cudnn_allow_tf32": bool,
        "world_size": Count,
        "groups": Count,
    },
    total=False,
)
"""What is known about an object that an observed script set up."""


class SetupShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    of: str
    file: str
    line: Count
    text: str
    values: PartShape
    via: str | None


class SampledLineShape(TypedDict):
    file: str
    line: Count
    text: str
    phase: str | None
    package: str | None
    in_model: bool
    samples: Count


class LinesShape(TypedDict):
    """Where the training thread of an observed script was."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    samples: Positive
    lines: list[SampledLineShape]


class NotMeasuredShape(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    what: str
    why: str


class ArithmeticShape(TypedDict):
    """What the models of a run compute: training/measure/arithmetic.py."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    gflop_per_image: NotRequired[list[Number]]
    teacher_gflop_per_image: NotRequired[list[Number]]
    peak_tflops: NotRequired[dict[str, Speed]]
    peak_source: NotRequired[str]
    peak_date: NotRequired[str]
    why_no_mfu: str


class DecidedShape(TypedDict):
    """Values of settings that were decided after the start."""

    settings: dict[str, Any]


class OperatorShape(TypedDict):
    name: str
    seconds: Seconds
    share: Share


class OperatorsShape(TypedDict):
    """operators.json."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    operators: list[OperatorShape]


class InputOnlyShape(TypedDict):
    workers: Count
    images_per_second: Speed
    cpu_seconds_per_image: Seconds


class WithWorkersShape(TypedDict):
    workers: Count
    images_per_second: Speed


class ProbeShape(TypedDict):
    """probe.json."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    as_it_is: list[Speed]
    one_batch: Speed | None
    one_batch_without_teacher: Speed | None
    input_alone: list[InputOnlyShape]
    with_workers: WithWorkersShape | None
    workers: Count
    worker_kind: str
    cores_per_process: Speed
    world_size: Positive
    device: str
    device_name: str | None
    left_out: dict[str, str]
    finished: bool


class SettingsShape(TypedDict, total=False):
    """The settings that rules compute with."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    epochs: Positive
    global_batch_size: Positive
    batch_size_per_device: Positive | Literal["auto"] | None
    num_workers: Count | Literal["auto"] | None
    log_every: Positive
    evaluate_every: Positive
    checkpoint_every: Positive | None


class ServingGroupShape(TypedDict):
    index: Count
    instance_type: str
    instance_count: Positive


class FactsShape(TypedDict, total=False):
    """The facts that rules compute with; a script's result.json may hold some."""

    __pydantic_config__ = STRICT  # type: ignore[misc]  # pydantic reads it on a TypedDict
    world_size: Positive
    num_workers: Count
    threads: Count
    training_images: Count
    seconds_to_first_step: Seconds
    parts_to_first_step: dict[str, Seconds]
    backend: str
    device: str
    device_name: str
    compute_capability: Speed
    instance_type: str
    distribution: str
    serving_hosts: list[str]
    serving_groups: list[ServingGroupShape]
    training_group: Count
    one_machine: bool
    operators: OperatorsShape
    arithmetic: ArithmeticShape


START, WINDOW, FIRST_STEP, STALL = (
    TypeAdapter[Any](kind) for kind in (StartShape, WindowShape, FirstStepShape, StallShape)
)
SETUP, LINES, NOT_MEASURED = (TypeAdapter[Any](kind) for kind in (SetupShape, LinesShape, NotMeasuredShape))
ARITHMETIC, DECIDED = TypeAdapter[Any](ArithmeticShape), TypeAdapter[Any](DecidedShape)
OPERATORS, PROBE = TypeAdapter[Any](OperatorsShape), TypeAdapter[Any](ProbeShape)
SETTINGS, FACTS = TypeAdapter[Any](SettingsShape), TypeAdapter[Any](FactsShape)


def readable(shape: TypeAdapter[Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values without those of a wrong type, and what is wrong with each of these."""
    try:
        shape.validate_python(values)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        names = {item["loc"][0] for item in wrong}
        said = {item["loc"][0]: complaint(item) for item in reversed(wrong)}  # the first of a union's
        return {name: value for name, value in values.items() if name not in names}, [*said.values()]
    return dict(values), []


def read(shape: TypeAdapter[Any], file: Path) -> tuple[dict[str, Any], str]:
    """A JSON file's values, or none and why it cannot be read."""
    try:
        values: dict[str, Any] = shape.validate_json(trust.content(file))
    except OSError as error:
        return {}, f"{file.name}: {error.strerror}"
    except ValidationError as error:
        return {}, f"{file.name}: {complaint(error.errors(include_url=False)[0])}"
    return values, ""

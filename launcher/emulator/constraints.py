"""Why SageMaker refuses a CreateTrainingJob: values outside their shapes, and values that exclude each other."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import botocore.session

from launcher.emulator.router import AwsError


def check_shapes(service: str, operation: str, parameters: dict[str, Any]) -> None:
    """Check parameters against the patterns, enums, lengths and ranges of botocore's service model. Messages are AWS's.

    Raises:
        AwsError: ValidationException that lists every violation.
    """
    shape = _service_model(service).operation_model(operation).input_shape
    found = list(_violations(shape, parameters, ""))
    if found:
        count = f"{len(found)} validation error{'s' if len(found) > 1 else ''} detected"
        raise AwsError("ValidationException", f"{count}: {'; '.join(found)}")


def check_combination(request: dict[str, Any]) -> None:
    """Check for values that are valid alone but refused together.

    Raises:
        AwsError: ValidationException.
    """
    stopping = request.get("StoppingCondition", {})
    longest, wait = stopping.get("MaxRuntimeInSeconds", 86400), stopping.get("MaxWaitTimeInSeconds")
    if request.get("EnableManagedSpotTraining"):
        if wait is None or wait < longest:
            raise AwsError(
                "ValidationException",
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds",
            )
        if request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
            raise AwsError(
                "ValidationException", "KeepAlivePeriodInSeconds is not supported with managed spot training"
            )
    elif wait is not None:
        raise AwsError("ValidationException", "MaxWaitTimeInSeconds is not supported without EnableManagedSpotTraining")
    for definition in request.get("AlgorithmSpecification", {}).get("MetricDefinitions", []):
        try:
            re.compile(definition["Regex"])
        except re.error as error:
            raise AwsError(
                "ValidationException", f"Invalid regular expression in metric {definition['Name']}: {error}"
            ) from error
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig", [])]
    if len(names) != len(set(names)):
        raise AwsError("ValidationException", "Duplicate channel names are not allowed in InputDataConfig")
    for channel in request.get("InputDataConfig", []):
        if "FileSystemDataSource" in channel["DataSource"] and not request.get("VpcConfig"):
            raise AwsError(
                "ValidationException",
                f"VpcConfig is required: channel {channel['ChannelName']} has a FileSystemDataSource",
            )


@functools.cache
def _service_model(service: str) -> Any:
    """botocore's description of a service."""
    return botocore.session.get_session().get_service_model(service)


def _violations(shape: Any, value: Any, path: str) -> Iterator[str]:
    if shape.type_name == "structure":
        for name in shape.required_members:
            if value.get(name) is None:
                yield _violation("null", _joined(path, name), "Member must not be null")
        for name, member in value.items():
            if name in shape.members and member is not None:
                yield from _violations(shape.members[name], member, _joined(path, name))
    elif shape.type_name == "list":
        yield from _size(shape, len(value), value, path, "length")
        for index, member in enumerate(value):
            yield from _violations(shape.member, member, f"{path}.{index + 1}.member")
    elif shape.type_name == "map":
        yield from _size(shape, len(value), value, path, "length")
        for key, member in value.items():
            yield from _violations(shape.key, key, f"{path}.key")
            yield from _violations(shape.value, member, f"{path}.{key}")
    elif shape.type_name == "string":
        yield from _size(shape, len(value), value, path, "length")
        if shape.enum and value not in shape.enum:
            yield _violation(value, path, f"Member must satisfy enum value set: [{', '.join(shape.enum)}]")
        pattern = shape.metadata.get("pattern")
        if pattern and not _matches(pattern, value):
            yield _violation(value, path, f"Member must satisfy regular expression pattern: {pattern}")
    elif shape.type_name in ("integer", "long", "float", "double"):
        yield from _size(shape, value, value, path, "value")


def _size(shape: Any, size: float, value: Any, path: str, what: str) -> Iterator[str]:
    lowest, highest = shape.metadata.get("min"), shape.metadata.get("max")
    if lowest is not None and size < lowest:
        yield _violation(value, path, f"Member must have {what} greater than or equal to {lowest}")
    if highest is not None and size > highest:
        yield _violation(value, path, f"Member must have {what} less than or equal to {highest}")


def _matches(pattern: str, value: str) -> bool:
    """Whether the whole value matches. A pattern that only Java's regular expressions know (\\p{L} …) accepts everything."""
    try:
        return re.fullmatch(pattern, value, re.DOTALL) is not None
    except re.error:
        return True


def _violation(value: Any, path: str, rule: str) -> str:
    return f"Value '{value}' at '{path}' failed to satisfy constraint: {rule}"


def _joined(path: str, name: str) -> str:
    """A member's path in AWS's messages, in camelCase."""
    name = name[:1].lower() + name[1:]
    return f"{path}.{name}" if path else name

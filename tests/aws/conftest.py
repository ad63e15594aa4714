"""What the tests of SageMaker's side share: a request as the real SDK sends it, and as botocore's service model judges it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No credentials, no settings and no prices of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Sent(Exception):
    """Raised in the place of sending."""

    def __init__(self, params: dict[str, Any]):
        self.params = params


@functools.cache
def sagemaker_session(region: str) -> Any:
    """A session of the real SDK whose CreateTrainingJob stops after botocore took the parameters, before anything is sent."""
    import boto3
    import sagemaker.utils

    from launcher.aws.estimator import NO_TELEMETRY

    sagemaker.utils.validate_sagemaker_config = lambda _config: (
        None
    )  # it judges our constant 19 times an estimator: 2 s

    def stop(params: dict[str, Any], **_: Any) -> None:
        raise Sent(dict(params))

    boto_session = boto3.Session(region_name=region, aws_access_key_id="testing", aws_secret_access_key="testing")
    session = sagemaker.Session(
        boto_session=boto_session, sagemaker_config=NO_TELEMETRY, default_bucket="amzn-s3-demo-bucket"
    )
    session.sagemaker_client.meta.events.register("before-parameter-build.sagemaker.CreateTrainingJob", stop)
    return session


def sent_by(estimator: Any, inputs: Any, name: str) -> dict[str, Any]:
    """What an estimator's fit() would send."""
    with pytest.raises(Sent) as sent:
        estimator.fit(inputs or None, wait=False, job_name=name)
    return sent.value.params


def complaints(request: dict[str, Any]) -> list[str]:
    """Everything in a CreateTrainingJob request that botocore's service model does not allow: types, patterns, enums, lengths."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(request, shape).generate_report()
    return ([report] if report else []) + list(_strict(request, shape, ""))


def _strict(value: Any, shape: Any, at: str) -> Iterator[str]:
    """What botocore itself leaves to the service."""
    if shape.type_name == "structure":
        for name, item in value.items():
            if name in shape.members:
                yield from _strict(item, shape.members[name], f"{at}.{name}")
    elif shape.type_name == "list":
        yield from _length(len(value), shape, at)
        for number, item in enumerate(value):
            yield from _strict(item, shape.member, f"{at}[{number}]")
    elif shape.type_name == "map":
        yield from _length(len(value), shape, at)
        for name, item in value.items():
            yield from _strict(name, shape.key, f"{at} key {name!r}")
            yield from _strict(item, shape.value, f"{at}[{name!r}]")
    elif shape.type_name == "string":
        yield from _length(len(value), shape, at)
        pattern = shape.metadata.get("pattern")
        if pattern and not re.fullmatch(pattern.replace(r"\p{L}\p{Z}\p{N}", r"\w\s"), value):
            yield f"{at}: {value!r} does not match {pattern}"
        if shape.enum and value not in shape.enum:
            yield f"{at}: {value!r} is none of {shape.enum}"
    elif shape.type_name in ("integer", "long"):
        yield from _length(value, shape, at)


def _length(size: int, shape: Any, at: str) -> Iterator[str]:
    if size < shape.metadata.get("min", size) or size > shape.metadata.get("max", size):
        yield f"{at}: {size} is not in {shape.metadata.get('min')} to {shape.metadata.get('max')}"

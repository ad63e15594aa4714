"""What the tests for SageMaker share: a request of the real SDK, its check by botocore's service model, runs on the emulator."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import pytest

import launcher
import tests.read_once  # noqa: F401 - imported for its effect
from launcher.aws import follow, session
from launcher.emulator import Emulator, execution
from launcher.emulator.hosts import Host, RunningHosts, log_file
from launcher.emulator.training_job import TrainingJob
from launcher.runner import run as running
from tests.aws.jobs import with_a_script
from tests.aws_calls import aws_calls  # noqa: F401 - a fixture

os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")

REGION, BUCKET = "us-west-2", "amzn-s3-demo-bucket"
ROLE = "arn:aws:iam::123456789012:role/SageMakerTraining"


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No credentials, no settings and no prices of whoever runs the tests, nor of an earlier module's emulator."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
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
    import sagemaker

    from launcher.aws.estimator import NO_TELEMETRY

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
        for index, item in enumerate(value):
            yield from _strict(item, shape.member, f"{at}[{index}]")
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


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Any]:
    """A job's values that SageMaker accepts, with a script of the user's own."""
    return with_a_script(tmp_path_factory.mktemp("source"))


# -- runs on the emulator -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    with Emulator(tmp_path_factory.mktemp("emulator")) as emulator:
        emulator.add_bucket(BUCKET, REGION)
        emulator.add_role(ROLE)
        emulator.set_price("ml.m5.xlarge", 0.23, REGION)
        emulator.set_price("ml.g5.xlarge", 1.41, REGION)
        for kind in ("ml.m5.xlarge", "ml.g5.xlarge"):
            for use in ("training job", "spot training job", "training warm pool"):
                emulator.set_quota(f"{kind} for {use} usage", 4.0, REGION)
        yield emulator


@pytest.fixture
def connected(emulator, nobody, monkeypatch):
    """This process as a client of the emulator, with short pauses."""
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(running, "LONGEST_PAUSE", 0.3)
    monkeypatch.setattr(running, "PAUSE_IN_TROUBLE", 0.3)
    monkeypatch.setattr(follow, "LAST_LINES_SECONDS", 0.3)
    session.forget_clients()
    yield
    session.forget_clients()


@pytest.fixture
def sagemaker_job(connected, script_job):
    """Makes a job of a script's text that SageMaker can take."""

    def make(text: str, **values) -> launcher.Job:
        compute = {"instance_type": "ml.m5.xlarge", "max_hours": 0.5, **values.pop("compute", {})}
        base = {
            "role": ROLE,
            "region": REGION,
            "output": f"s3://{BUCKET}/runs",
            "image": {"framework_version": "2.8.0", "python": "py312"},
        }
        return script_job(text, compute=compute, **{**base, **values})

    return make


def started(job: launcher.Job, **options) -> launcher.Run:
    return launcher.run(launcher.plan(job, on="aws"), **options)


class DoneHosts(RunningHosts):
    """In the place of a job's hosts and their processes: the script has left a model and is done."""

    def start(self, job: TrainingJob, hosts: list[Host], *_: Any) -> None:
        for host in hosts:
            log_file(host).write_text("done\n")
            (host.base / "model/weights.txt").write_text("1 2 3")

    def close(self, folder: Path) -> None:
        """Nothing is left to end."""


@pytest.fixture
def done_at_once(monkeypatch) -> None:
    """A job goes through its stages, leaves a model and starts no process: for tests of what the client does after a job."""
    monkeypatch.setattr(execution, "RunningHosts", DoneHosts)


class WaitingHosts(RunningHosts):
    """In the place of a job's hosts and their processes: the script is ready, and ends once the job is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = False

    def start(self, job: TrainingJob, hosts: list[Host], *_: Any) -> None:
        for host in hosts:
            log_file(host).write_text("ready\n")
        self.waits = True

    def running(self) -> bool:
        return self.waits

    def terminate(self) -> None:
        self.waits = False

    def close(self, folder: Path) -> None:
        self.waits = False


@pytest.fixture
def trains_until_stopped(monkeypatch) -> None:
    """A job goes through its stages, trains until it is stopped, and starts no process: for tests of the client alone."""
    monkeypatch.setattr(execution, "RunningHosts", WaitingHosts)


def described(name: str) -> dict:
    return boto3.client("sagemaker", region_name=REGION).describe_training_job(TrainingJobName=name)


def replacing(service: str, **calls: Callable[..., Any]) -> Callable[[str, str], Any]:
    """`session.client` with some calls of a service's clients replaced: what AWS answers is the boundary that tests fake."""
    client = session.client

    def made(name: str, region: str) -> Any:
        found = client(name, region)
        if name != service:
            return found
        own = {call: staticmethod(answer) for call, answer in calls.items()}
        return type("Client", (), {**own, "__getattr__": lambda _, call: getattr(found, call)})()

    return made


def lost(*_: Any, **__: Any) -> None:
    """A call whose answer never comes."""
    raise botocore.exceptions.ReadTimeoutError(endpoint_url="https://sagemaker")


def not_found(**_: Any) -> None:
    """SageMaker's answer about a job that the account does not have (yet)."""
    answer = {"Error": {"Code": "ValidationException", "Message": "Requested resource not found."}}
    raise botocore.exceptions.ClientError(answer, "DescribeTrainingJob")


TRAINS = """
    import json, os, pathlib
    channel = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"])
    print(f"read {sorted(path.name for path in channel.rglob('*') if path.is_file())}", flush=True)
    print("epoch 1/2 step 5/10 loss 0.5000 images/s 100.0", flush=True)
    print("epoch 2/2 step 10/10 validation_accuracy 0.9000", flush=True)
    pathlib.Path(os.environ["SM_MODEL_DIR"], "weights.txt").write_text("1 2 3")
    output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"])
    output.mkdir(parents=True)
    (output / "result.json").write_text(json.dumps({"validation_accuracy": 0.9}))
    (output / "metrics.jsonl").write_text(json.dumps({"rank": 0, "epoch": 2, "step": 10, "loss": 0.5}) + chr(10))
"""


SLEEPS = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    time.sleep(120)
"""


def is_ready(run: launcher.Run) -> bool:
    return any(line == "ready" for _, line in run.logs())


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.txt", "b ü.txt"):
        (folder / name).write_text(name)
    return folder

"""An emulator for each module of tests, and a client of it that knows the requests which the tests vary."""

from __future__ import annotations

import io
import json
import tarfile
import textwrap

import boto3
import pytest

import tests.read_once  # noqa: F401 - imported for its effect
from launcher.emulator import Emulator
from tests.conftest import wait_until

REGION = "eu-west-1"
BUCKET = "amzn-s3-demo-bucket"
ROLE = "arn:aws:iam::123456789012:role/SageMakerTraining"
GROUP = "/aws/sagemaker/TrainingJobs"
OVER = ("Completed", "Failed", "Stopped")
NOBODY = 65534
"""Another user's number."""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    with Emulator(tmp_path_factory.mktemp("emulator")) as emulator:
        emulator.add_bucket(BUCKET, REGION)
        emulator.add_role(ROLE)
        yield emulator


@pytest.fixture(scope="module")
def aws(emulator) -> Aws:
    return Aws(emulator.environment)


class Aws:
    """AWS as a client sees it through boto3, with the emulator's key."""

    def __init__(self, environment: dict[str, str]):
        """`environment` is the emulator's."""
        self.url = environment["AWS_ENDPOINT_URL"]
        self.credentials = environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
        self.clients = {}

    def client(self, service: str, region: str = REGION):
        if (service, region) not in self.clients:
            session = boto3.Session(*self.credentials, region_name=region)
            self.clients[service, region] = session.client(service, endpoint_url=self.url)
        return self.clients[service, region]

    def put(self, key: str, text: str | bytes = "") -> None:
        self.client("s3").put_object(Bucket=BUCKET, Key=key, Body=text)

    def objects(self, prefix: str) -> dict[str, bytes]:
        """What lies below a prefix: the rest of each key, and its bytes."""
        s3 = self.client("s3")
        found = s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        keys = [entry["Key"] for entry in found]
        return {key[len(prefix) :]: s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    def request(self, name: str, script: str = "", files: dict[str, str] | None = None, **changes) -> dict:
        """A CreateTrainingJob request whose source, with the script as train.py, has been put into S3.

        Args:
            changes: members of the request; HyperParameters, ResourceConfig and AlgorithmSpecification are added to.
        """
        self.put(f"source/{name}/sourcedir.tar.gz", pack({"train.py": textwrap.dedent(script), **(files or {})}))
        request = {
            "TrainingJobName": name,
            "RoleArn": ROLE,
            "AlgorithmSpecification": {"TrainingImage": "pytorch-training:2.8.0", "TrainingInputMode": "File"},
            "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/output"},
            "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
            "StoppingCondition": {"MaxRuntimeInSeconds": 600},
            "HyperParameters": {
                "sagemaker_program": json.dumps("train.py"),
                "sagemaker_submit_directory": json.dumps(f"s3://{BUCKET}/source/{name}/sourcedir.tar.gz"),
            },
        }
        for key in ("HyperParameters", "ResourceConfig", "AlgorithmSpecification"):
            request[key] |= changes.pop(key, {})
        return {**request, **changes}

    def start(self, name: str, script: str = "", **given) -> str:
        """Start a job; see `request`."""
        self.client("sagemaker").create_training_job(**self.request(name, script, **given))
        return name

    def describe(self, name: str) -> dict:
        return self.client("sagemaker").describe_training_job(TrainingJobName=name)

    def ended(self, name: str) -> dict:
        """The description of a job once it is over."""
        wait_until(lambda: self.describe(name)["TrainingJobStatus"] in OVER, 240, f"end of {name}")
        return self.describe(name)

    def log(self, name: str, host: str = "algo-1") -> list[str]:
        """All lines of a host, over all attempts; none where no job has written yet."""
        logs = self.client("logs")
        if not logs.describe_log_groups(logGroupNamePrefix=GROUP)["logGroups"]:
            return []
        given = {"logGroupName": GROUP, "logStreamNamePrefix": f"{name}/{host}-"}
        streams = sorted(stream["logStreamName"] for stream in logs.describe_log_streams(**given)["logStreams"])
        return [
            event["message"]
            for stream in streams
            for event in logs.get_log_events(logGroupName=GROUP, logStreamName=stream, startFromHead=True)["events"]
        ]

    def said(self, name: str, host: str = "algo-1") -> dict:
        """The JSON object that a script wrote in one line behind `said `."""
        return next(json.loads(line[5:]) for line in self.log(name, host) if line.startswith("said "))


def interrupt(emulator: Emulator, name: str) -> None:
    """Take away a spot job's instances, without a warning to its processes."""
    [job] = [job for (_, known), job in emulator.jobs.jobs.items() if known == name]
    assert job.secondary == "Training" and job.request["EnableManagedSpotTraining"]
    job.interrupted.set()


def pack(files: dict[str, str]) -> bytes:
    """A sourcedir.tar.gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def channel(name: str, prefix: str, mode: str = "File", distribution: str = "FullyReplicated", **source) -> dict:
    """An entry of InputDataConfig with objects of the tests' bucket."""
    found = {
        "S3DataType": "S3Prefix",
        "S3Uri": f"s3://{BUCKET}/{prefix}",
        "S3DataDistributionType": distribution,
        **source,
    }
    return {"ChannelName": name, "InputMode": mode, "DataSource": {"S3DataSource": found}}


SAY = """
    import json, os, pathlib, sys
    def say(**values):
        sys.stdout.write("said " + json.dumps(values) + "\\n")
    def files(folder):
        folder = pathlib.Path(folder)
        return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
"""
"""How a script reports to a test: one line of JSON, which the toolkit leaves whole."""

"""A run folder for a training job without one on this machine: from the record in its output, or from DescribeTrainingJob."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from launcher.aws import session
from launcher.aws.upload import RECORD, split
from launcher.config.issues import mistake
from launcher.record import records
from launcher.record.records import RunFolder


def adopt(name: str, region: str) -> RunFolder:
    """Make a training job's run folder in this machine's store.

    Raises:
        UserError: no such job in the region, or AWS does not answer.
    """
    folder = RunFolder(records.store() / name)
    with session.as_user_error(f"attach {name}"):
        try:
            described = session.client("sagemaker", region).describe_training_job(TrainingJobName=name)
        except session.errors() as error:
            if not session.is_unknown_job(error):
                raise
            fix = "launcher runs lists this machine's runs, aws sagemaker list-training-jobs the region's jobs"
            raise mistake("run", f"{name}: no such training job in {region}", fix) from None
        client = session.client("s3", region)
        bucket, key = split(f"{described['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/{RECORD}")
        try:
            record = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except session.errors() as error:
            if session.code(error) not in ("NoSuchKey", "NoSuchBucket", "404", *session.DENIED):
                raise
            record = None
    records.store().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=records.store(), prefix=".adopting-") as temporary:
        made = RunFolder(Path(temporary) / name)
        made.path.mkdir()
        if record is not None:
            with tarfile.open(fileobj=io.BytesIO(record), mode="r:gz") as archive:
                archive.extractall(made.path, filter="data")
        else:
            _write_what_is_known(made, described, region)
        records.write_json(made.remote, {"TrainingJobStatus": records.IN_PROGRESS, "adopted": True})
        made.path.replace(folder.path)  # whole, or not at all
    return folder


def _write_what_is_known(folder: RunFolder, described: dict[str, Any], region: str) -> None:
    """Write plan.json of a job that another program started."""
    resources = described["ResourceConfig"]
    groups = resources.get("InstanceGroups", [])
    count = sum(group["InstanceCount"] for group in groups) or resources.get("InstanceCount", 1)
    sources = {
        channel["ChannelName"]: next(
            source.get("S3Uri") or f"{source.get('FileSystemId')}:{source.get('DirectoryPath')}"
            for source in channel["DataSource"].values()
        )
        for channel in described.get("InputDataConfig", [])
    }
    parameters = described.get("HyperParameters", {})
    own = {name: value for name, value in parameters.items() if not name.startswith("sagemaker_")}
    script = parameters.get("sagemaker_program", "unknown").strip('"')
    plan = {
        "name": folder.name,
        "planned": described["CreationTime"].isoformat(),
        "backend": "aws",
        "job": {"name": folder.name, "script": script, "region": region, "hyperparameters": own},
        "source": "unknown: another program started this job",
        "hosts": [{"name": f"algo-{index + 1}", "address": f"algo-{index + 1}"} for index in range(count)],
        "hyperparameters": parameters,
        "channels": sources,
        "request": {
            name: described[name]
            for name in ("OutputDataConfig", "ResourceConfig", "StoppingCondition", "EnableManagedSpotTraining")
            if name in described
        }
        | {"ProfilerConfig": described.get("ProfilerConfig", {"DisableProfiler": True})},
    }
    records.write_json(folder.plan, plan)

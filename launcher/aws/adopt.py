"""A run folder for a training job without one on this machine: from the record in its output, or from DescribeTrainingJob."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from launcher.aws import follow, session
from launcher.aws.upload import RECORD
from launcher.config.issues import mistake
from launcher.config.redaction import redact_setting
from launcher.record import archives, records, trust
from launcher.record.records import RunFolder

MAX_RECORD_BYTES = 2**30
"""Limit of an unpacked record: texts, and code of at most 100 MiB."""


@trust.closed_umask()
def adopt(name: str, region: str) -> RunFolder:
    """Make a training job's run folder in this machine's store.

    Raises:
        UserError: no such job in the region, a damaged record, or AWS does not answer.
    """
    folder = RunFolder(records.store() / name)
    key = f"attach {name}"
    with session.as_user_error(key):
        try:
            described = session.client("sagemaker", region).describe_training_job(TrainingJobName=name)
        except session.errors() as error:
            if not session.is_unknown_job(error):
                raise
            fix = "launcher runs lists this machine's runs, aws sagemaker list-training-jobs the region's jobs"
            raise mistake("run", f"{name}: no such training job in {region}", fix) from None
    record = f"{described['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{name}/{RECORD}"
    records.store().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=records.store(), prefix=".adopting-") as temporary, session.as_user_error(key):
        made = RunFolder(Path(temporary) / name)
        archive = Path(temporary) / Path(RECORD).name
        try:
            follow.fetch(session.client("s3", region), record, archive)
            archives.unpack(archive, made.path, MAX_RECORD_BYTES)
        except session.errors() as error:
            if session.code(error) not in ("NoSuchKey", "NoSuchBucket", "404", *session.DENIED):
                raise
            made.path.mkdir()
            _write_what_is_known(made, described, region)
        except archives.ArchiveError as error:
            fix = f"remove it (aws s3 rm {record}) and attach again: the run then has what SageMaker knows of it"
            raise mistake(key, f"the run's record, {record}, is {error}", fix) from error
        known = {"TrainingJobStatus": records.IN_PROGRESS, "TrainingJobArn": described["TrainingJobArn"]}
        records.write_json(made.remote, {**known, "emulator": session.emulator(), "adopted": True})
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
    parameters = {name: _shown(name, value) for name, value in described.get("HyperParameters", {}).items()}
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


def _shown(name: str, sent: str) -> str:
    """A hyperparameter as it was sent, with anything that looks like a secret redacted."""
    try:
        value = json.loads(sent)  # AWS's SDK sends JSON
    except ValueError:
        value = sent
    shown = redact_setting(name, value)
    return sent if shown == value else json.dumps(shown)

"""The real SageMaker SDK v2 starts a job, streams its log and waits for it, against the emulator."""

from __future__ import annotations

import boto3
import pytest

from tests.emulator.conftest import BUCKET, REGION, ROLE, unpack

SCRIPT = """
import os, pathlib, sys
pathlib.Path(os.environ["SM_MODEL_DIR"], "arguments.txt").write_text(" ".join(sys.argv[1:]))
sys.stdout.write("written by the script\\n")
"""

NO_TELEMETRY = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}


@pytest.fixture
def estimator(emulator, monkeypatch, tmp_path):
    """A PyTorch estimator that knows of the emulator by nothing but the environment."""
    for name, value in {**emulator.environment, "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}.items():
        monkeypatch.setenv(name, value)
    import sagemaker
    from sagemaker.pytorch import PyTorch

    (tmp_path / "source").mkdir()
    (tmp_path / "source/train.py").write_text(SCRIPT)
    session = sagemaker.Session(boto3.Session(region_name=REGION), default_bucket=BUCKET, sagemaker_config=NO_TELEMETRY)
    return PyTorch(
        entry_point="train.py",
        source_dir=str(tmp_path / "source"),
        role=ROLE,
        image_uri="763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.3.0-gpu-py311",
        instance_type="ml.p4d.24xlarge",
        instance_count=1,
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
        hyperparameters={"epochs": 2, "name": "it's"},
        max_run=300,
        sagemaker_session=session,
    )


def test_the_sdk_starts_a_job_and_waits_for_it(aws, estimator, capsys):
    aws.put("data/a.txt", "a")
    estimator.fit({"train": f"s3://{BUCKET}/data/"}, wait=False)
    name = estimator.latest_training_job.name
    assert aws.describe(name)["ProfilingStatus"] == "Enabled"
    assert aws.ended(name)["TrainingJobStatus"] == "Completed", aws.log(name)
    estimator.latest_training_job.wait(logs="All")
    printed = capsys.readouterr().out
    assert "written by the script" in printed
    assert "Training job completed" in printed
    assert "Billable seconds:" in printed
    model = aws.objects(estimator.model_data.removeprefix(f"s3://{BUCKET}/"))[""]
    assert unpack(model) == {"arguments.txt": "--epochs 2 --name it's"}

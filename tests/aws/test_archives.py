"""Damaged archives in S3: a job's output, and the record by which another machine attaches."""

from __future__ import annotations

import boto3
import pytest

import launcher
from launcher.aws import follow
from tests.aws.conftest import BUCKET, REGION, TRAINS, started


def flip_a_bit(key: str) -> None:
    s3 = boto3.client("s3", region_name=REGION)
    packed = bytearray(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    packed[-6] ^= 1  # of gzip's checksum, which tarfile does not read
    s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(packed))


def test_a_damaged_output_is_reported_and_the_rest_of_the_run_is_kept(sagemaker_job, data, monkeypatch):
    fetch = follow.fetch

    def damaged(client, uri, target):
        if uri.endswith("/output.tar.gz"):
            flip_a_bit(uri.removeprefix(f"s3://{BUCKET}/"))
        fetch(client, uri, target)

    monkeypatch.setattr(follow, "fetch", damaged)
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    assert run.wait(120) == "Completed"
    [reported] = run.outcome()["not_saved"]
    assert reported.startswith("output.tar.gz: damaged (CRC check failed")
    assert reported.endswith(f"it is in s3://{BUCKET}/runs/{run.name}/output")
    assert run.artifacts()["model"].stat().st_size > 0 and "output algo-1" not in run.artifacts()


@pytest.mark.slow
def test_a_damaged_record_is_named_and_once_it_is_removed_the_run_can_be_attached(sagemaker_job, monkeypatch, tmp_path):
    run = started(sagemaker_job("print('hello')\n"))
    key = f"runs/{run.name}/record/record.tar.gz"
    flip_a_bit(key)
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "another machine"))
    with pytest.raises(launcher.UserError) as refused:
        launcher.attach(run.name, region=REGION)
    [issue] = refused.value.issues
    assert issue.key == f"attach {run.name}" and f"s3://{BUCKET}/{key}, is damaged" in issue.found
    assert f"aws s3 rm s3://{BUCKET}/{key}" in issue.fix
    assert launcher.runs() == []
    boto3.client("s3", region_name=REGION).delete_object(Bucket=BUCKET, Key=key)
    assert launcher.attach(run.name, region=REGION).wait(120) == "Completed"

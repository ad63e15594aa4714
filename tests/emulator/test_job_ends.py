"""What goes wrong with a job: stops, time limits, interruptions, refused requests, a killed emulator."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from botocore.exceptions import ClientError

from launcher.emulator import Emulator
from launcher.emulator.storage import Checkpoints
from tests.conftest import SLEEPER, processes_of, wait_until
from tests.emulator.conftest import BUCKET, REGION, ROLE, SAY, Aws, interrupt, unpack

LEAVES_A_MODEL = SLEEPER.replace(
    "time.sleep(120)",
    'pathlib.Path(os.environ["SM_MODEL_DIR"], "half.txt").touch()\n    print("ready", flush=True)\n    time.sleep(120)',
)

COUNTS = (
    SAY
    + """
    import time
    place = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints/deep/count.txt")
    begun_at = int(place.read_text()) if place.exists() else 0
    say(begun_at=begun_at)
    place.parent.mkdir(exist_ok=True)
    for step in range(begun_at, 1000 if begun_at == 0 else begun_at + 3):
        place.with_suffix(".tmp").write_text(str(step + 1))
        place.with_suffix(".tmp").replace(place)
        time.sleep(0.2)
    pathlib.Path(os.environ["SM_MODEL_DIR"], "count.txt").write_text(place.read_text())
"""
)

SPOT = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 300, "MaxWaitTimeInSeconds": 600},
    "CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/checkpoints/counts"},
}


@pytest.fixture(scope="module", autouse=True)
def jobs(emulator, aws):
    """The jobs that take long, started at once."""
    aws.start("is-stopped", LEAVES_A_MODEL, ResourceConfig={"KeepAlivePeriodInSeconds": 600})
    aws.start("takes-too-long", LEAVES_A_MODEL, StoppingCondition={"MaxRuntimeInSeconds": 1})
    aws.start("counts", COUNTS, **SPOT)
    aws.start("is-over")


def is_ready(aws, name: str) -> bool:
    return aws.describe(name)["SecondaryStatus"] == "Training" and "ready" in aws.log(name)


def refusal(operation, **given) -> tuple[str, str]:
    """The code and the message with which an operation is refused."""
    with pytest.raises(ClientError) as refused:
        operation(**given)
    return refused.value.response["Error"]["Code"], refused.value.response["Error"]["Message"]


def test_a_running_job_is_updated_and_stopped_and_keeps_what_it_has(aws):
    sagemaker = aws.client("sagemaker")
    wait_until(lambda: is_ready(aws, "is-stopped"), 90, "a ready script")
    assert aws.describe("is-stopped")["WarmPoolStatus"]["Status"] == "InUse"
    sagemaker.update_training_job(
        TrainingJobName="is-stopped",
        ProfilerConfig={"S3OutputPath": f"s3://{BUCKET}/profile", "ProfilingIntervalInMilliseconds": 100},
    )
    updated = aws.describe("is-stopped")
    assert (
        updated["ProfilerConfig"]["ProfilingIntervalInMilliseconds"] == 100 and updated["ProfilingStatus"] == "Enabled"
    )
    sagemaker.update_training_job(TrainingJobName="is-stopped", ProfilerConfig={"DisableProfiler": True})
    assert aws.describe("is-stopped")["ProfilingStatus"] == "Disabled"
    sagemaker.stop_training_job(TrainingJobName="is-stopped")
    assert aws.describe("is-stopped")["TrainingJobStatus"] in ("Stopping", "Stopped")
    job = aws.ended("is-stopped")
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert "FailureReason" not in job
    assert [entry["Status"] for entry in job["SecondaryStatusTransitions"]][-3:] == ["Stopping", "Uploading", "Stopped"]
    assert job["WarmPoolStatus"]["Status"] == "Available"
    archives = aws.objects("output/is-stopped/output/")
    assert set(unpack(archives["output.tar.gz"])) == {"ready-0", "told-0"}
    assert set(unpack(archives["model.tar.gz"])) == {"half.txt"}


def test_a_warm_pool_ends_on_request_and_only_once_the_job_is_over(aws):
    sagemaker, now = aws.client("sagemaker"), {"KeepAlivePeriodInSeconds": 0}
    aws.start("keeps-hosts", LEAVES_A_MODEL, ResourceConfig={"KeepAlivePeriodInSeconds": 600})
    given = {"TrainingJobName": "keeps-hosts", "ResourceConfig": now}
    code, message = refusal(sagemaker.update_training_job, **given)
    assert (code, "not Available: InUse" in message) == ("ValidationException", True)
    wait_until(lambda: is_ready(aws, "keeps-hosts"), 90, "a ready script")
    sagemaker.stop_training_job(TrainingJobName="keeps-hosts")
    aws.ended("keeps-hosts")
    sagemaker.update_training_job(TrainingJobName="keeps-hosts", ResourceConfig={"KeepAlivePeriodInSeconds": 1200})
    kept = aws.describe("keeps-hosts")
    assert kept["WarmPoolStatus"]["Status"] == "Available" and kept["ProfilingStatus"] == "Disabled"
    sagemaker.update_training_job(**given)
    ended = aws.describe("keeps-hosts")["WarmPoolStatus"]
    assert ended["Status"] == "Terminated" and 0 < ended["ResourceRetainedBillableTimeInSeconds"] < 60
    assert refusal(sagemaker.update_training_job, **given)[0] == "ValidationException"
    refused = refusal(sagemaker.update_training_job, TrainingJobName="is-over", ResourceConfig=now)
    assert "not Available: None" in refused[1]


def test_a_job_is_stopped_at_its_max_runtime(aws):
    job = aws.ended("takes-too-long")
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert [entry["Status"] for entry in job["SecondaryStatusTransitions"]][-3:] == [
        "Stopping",
        "Uploading",
        "MaxRuntimeExceeded",
    ]
    assert "FailureReason" not in job and job["BillableTimeInSeconds"] >= 1


def test_an_interrupted_spot_job_goes_on_from_its_checkpoints_and_does_not_pay_for_the_pause(aws, emulator):
    wait_until(lambda: int(aws.objects("checkpoints/counts/deep/count.txt").get("", b"0")) > 3, 90, "a few checkpoints")
    interrupt(emulator, "counts")
    job = aws.ended("counts")
    assert job["TrainingJobStatus"] == "Completed", job.get("FailureReason")
    states = [entry["Status"] for entry in job["SecondaryStatusTransitions"]]
    attempt = ["Starting", "Downloading", "Training"]
    assert states == [*attempt, "Interrupted", *attempt, "Uploading", "Completed"]
    begun = [line for line in aws.log("counts") if line.startswith("said ")]
    assert begun[0] == 'said {"begun_at": 0}' and begun[1] != begun[0]
    counted = int(unpack(aws.objects("output/counts/output/")["model.tar.gz"])["count.txt"])
    assert counted == int(begun[1].split()[-1][:-1]) + 3
    # and nothing of what it deleted
    assert aws.objects("checkpoints/counts/") == {"deep/count.txt": str(counted).encode()}
    begun_at = [entry["StartTime"] for entry in job["SecondaryStatusTransitions"]]
    pause = (begun_at[5] - begun_at[3]).total_seconds()  # until it downloads again
    assert pause > 1.9 and job["TrainingTimeInSeconds"] - job["BillableTimeInSeconds"] == pytest.approx(pause, abs=1.1)


def test_what_a_host_deletes_among_its_checkpoints_is_deleted_in_s3_and_what_it_never_had_is_not(aws, tmp_path):
    s3, hosts = aws.client("s3"), [tmp_path / "algo-1", tmp_path / "algo-2"]
    s3.put_object(Bucket=BUCKET, Key="checkpoints/deleted/step-1", Body=b"1")
    kept = Checkpoints(s3, f"s3://{BUCKET}/checkpoints/deleted", hosts)
    kept.restore()
    (hosts[0] / "step-2").write_text("2")
    s3.put_object(Bucket=BUCKET, Key="checkpoints/deleted/of-another", Body=b"3")
    (hosts[0] / "step-1").unlink()
    kept.save()
    assert aws.objects("checkpoints/deleted/") == {"step-2": b"2", "of-another": b"3"}
    kept.save()
    assert (hosts[1] / "step-1").exists() and "step-1" not in aws.objects("checkpoints/deleted/"), (
        "its own copy is no news"
    )


def test_a_job_for_which_there_are_no_instances_fails_while_it_starts(aws):
    job = aws.ended(aws.start("gets-nothing", ResourceConfig={"InstanceCount": 17, "KeepAlivePeriodInSeconds": 60}))
    assert job["TrainingJobStatus"] == "Failed" and "at most 16 hosts" in job["FailureReason"]
    assert [entry["Status"] for entry in job["SecondaryStatusTransitions"]] == ["Starting", "Failed"]
    assert "TrainingTimeInSeconds" not in job and job["WarmPoolStatus"] == {"Status": "Terminated"}


def test_what_the_emulator_does_not_emulate_is_refused(aws):
    code, message = refusal(aws.client("sagemaker").search, Resource="TrainingJob")
    assert (code, message) == ("NotImplemented", "the SageMaker emulator has no Search")
    code, message = refusal(aws.client("sagemaker").list_training_jobs, CreationTimeAfter=0)
    assert (code, message) == ("NotImplemented", "the SageMaker emulator's ListTrainingJobs takes no CreationTimeAfter")


def test_jobs_are_listed_by_name_state_and_age(aws):
    sagemaker = aws.client("sagemaker")
    names = [aws.start(f"listed-{letter}") for letter in "bac"]
    for name in names:
        aws.ended(name)

    def listed(**given):
        pages = sagemaker.get_paginator("list_training_jobs").paginate(NameContains="listed-", **given)
        return [job for page in pages for job in page["TrainingJobSummaries"]]

    assert [job["TrainingJobName"] for job in listed()] == names
    assert [job["TrainingJobName"] for job in listed(SortOrder="Descending", MaxResults=2)] == names[::-1]
    assert [job["TrainingJobName"] for job in listed(SortBy="Name", MaxResults=1)] == sorted(names)
    [first, *_] = listed(StatusEquals="Completed")
    described = sagemaker.describe_training_job(TrainingJobName=names[0])
    assert first == {name: described[name] for name in first} and "TrainingEndTime" in first
    assert listed(StatusEquals="InProgress") == []
    going = aws.start("listed-z", LEAVES_A_MODEL)
    assert [job["TrainingJobName"] for job in listed(StatusEquals="InProgress")] == [going]
    cut_first = sagemaker.list_training_jobs(NameContains="listed-", StatusEquals="InProgress", MaxResults=2)
    assert cut_first["TrainingJobSummaries"] == [] and "NextToken" in cut_first
    sagemaker.stop_training_job(TrainingJobName=going)
    aws.ended(going)


def test_a_job_that_is_over_is_neither_stopped_nor_updated(aws):
    aws.ended("is-over")
    sagemaker = aws.client("sagemaker")
    rejected = ("ValidationException", "The request was rejected because the training job is in status Completed.")
    assert refusal(sagemaker.stop_training_job, TrainingJobName="is-over") == rejected
    profiler = {"DisableProfiler": True}
    assert refusal(sagemaker.update_training_job, TrainingJobName="is-over", ProfilerConfig=profiler) == rejected


def test_a_job_that_nobody_knows_is_not_found_in_this_region(aws):
    not_found = ("ValidationException", "Requested resource not found.")
    assert refusal(aws.client("sagemaker").describe_training_job, TrainingJobName="never-was") == not_found
    assert refusal(aws.client("sagemaker", "us-east-1").describe_training_job, TrainingJobName="is-over") == not_found


def test_a_name_is_used_once(aws):
    code, message = refusal(aws.start, name="is-over")
    assert code == "ResourceInUse"
    assert message.startswith("Training job names must be unique within an AWS account and region")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RoleArn": "arn:aws:iam::1234:role/short-account"}, "at 'roleArn' failed to satisfy constraint: Member must satisfy regular"),
        ({"ResourceConfig": {"InstanceType": "ml.p4d.24xlarg"}}, "Value 'ml.p4d.24xlarg' at 'resourceConfig.instanceType' failed"),
        ({"OutputDataConfig": {"S3OutputPath": "bucket/output"}}, "at 'outputDataConfig.s3OutputPath'"),
        ({"EnableManagedSpotTraining": True}, "Invalid MaxWaitTimeInSeconds"),
        ({"AlgorithmSpecification": {"MetricDefinitions": [{"Name": "loss", "Regex": "loss: ("}]}}, "Invalid regular expression in metric loss"),
    ],
)  # fmt: skip
def test_a_request_that_sagemaker_would_refuse_is_refused(aws, changes, expected):
    code, message = refusal(aws.start, name="refused", **changes)
    assert code == "ValidationException" and expected in message
    assert refusal(aws.client("sagemaker").describe_training_job, TrainingJobName="refused")


def test_a_quota_that_was_set_is_kept(aws, emulator):
    emulator.set_quota("ml.p5.48xlarge for training job usage", 2, REGION)
    code, message = refusal(
        aws.start, name="too-many", ResourceConfig={"InstanceType": "ml.p5.48xlarge", "InstanceCount": 3}
    )
    assert code == "ResourceLimitExceeded"
    assert "'ml.p5.48xlarge for training job usage' is 2 Instances, with current utilization of 0 Instances" in message


SERVER = f"""
import json, pathlib, sys
from launcher.emulator import Emulator
from launcher.emulator.storage import Checkpoints
emulator = Emulator(pathlib.Path(sys.argv[1]))
emulator.add_bucket("{BUCKET}", "{REGION}")
emulator.add_role("{ROLE}")
print(json.dumps(emulator.environment), flush=True)
sys.stdin.readline()
emulator.close()
print("closed", flush=True)
sys.stdin.readline()
"""
"""Closes its emulator when a line comes, and stays."""


@pytest.fixture
def server(tmp_path):
    """An emulator in another process, with a job of two hosts that wait for SIGTERM."""
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            aws = Aws(json.loads(process.stdout.readline()))
            aws.start("waits", LEAVES_A_MODEL, ResourceConfig={"InstanceCount": 2})
            wait_until(
                lambda: len(list(tmp_path.glob("*/waits/*/opt/ml/output/data/ready-0"))) == 2, 90, "two ready hosts"
            )
            assert len(processes_of(tmp_path)) >= 5
            yield process
        finally:
            process.kill()


def test_jobs_die_with_an_emulator_that_is_killed(server, tmp_path):
    server.send_signal(signal.SIGKILL)
    server.wait()
    wait_until(lambda: not processes_of(tmp_path), what="no process left")


def test_close_ends_every_job_at_once(server, tmp_path):
    server.stdin.write("\n")
    server.stdin.flush()
    begun = time.monotonic()
    assert server.stdout.readline() == "closed\n"
    assert time.monotonic() - begun < 60, "their script would end in two minutes"
    wait_until(lambda: [process.pid for process in processes_of(tmp_path)] == [server.pid], 10, "no other process")


def test_a_process_has_one_emulator(emulator, tmp_path):
    with pytest.raises(RuntimeError, match="close it first"):
        Emulator(tmp_path)

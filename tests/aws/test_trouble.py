"""What goes wrong between this machine and AWS: an answer that is lost, rights that are missing, archives that are odd."""

from __future__ import annotations

import io
import subprocess
import tarfile
import threading

import boto3
import pytest

import launcher
from launcher.aws import adopt, follow, session
from launcher.runner import run as running
from tests.aws.test_runs import (  # noqa: F401 - fixtures
    BUCKET,
    REGION,
    SLEEPS,
    TRAINS,
    connected,
    data,
    far_side,
    is_ready,
    sagemaker_job,
    started,
)
from tests.conftest import wait_until


def test_a_job_whose_answer_was_lost_is_followed_and_not_called_failed(sagemaker_job):  # noqa: F811
    """CreateTrainingJob went through, and botocore's second try is told that the name is taken."""
    plan = launcher.plan(sagemaker_job(SLEEPS), on="aws")
    launcher.upload(plan)
    boto3.client("sagemaker", region_name=REGION).create_training_job(**plan.request)
    run = launcher.run(plan)
    assert run.state == "InProgress"
    run.stop()
    assert run.wait(60) == "Stopped"


def test_a_job_that_sagemaker_does_not_know_any_more_is_over(sagemaker_job, far_side, monkeypatch):  # noqa: F811
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    far_side.inject("DescribeTrainingJob", code="ValidationException", times=1, message="Requested resource not found.")
    monkeypatch.setattr(follow, "UNKNOWN_SECONDS", 0)
    wait_until(lambda: run.state == "Failed", 30, "the end")
    assert "does not know this job" in run.outcome()["failure"]
    boto3.client("sagemaker", region_name=REGION).stop_training_job(TrainingJobName=run.name)


def test_without_the_right_to_read_logs_a_run_is_still_followed_to_its_end(sagemaker_job, data, far_side):  # noqa: F811
    far_side.inject("DescribeLogStreams", code="AccessDeniedException", times=1000, message="not authorized: logs")
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    try:
        assert run.wait(120) == "Completed"
    finally:
        far_side.inject("DescribeLogStreams", code="none", times=0)
    assert any("logs: not allowed" in text for text in run.outcome()["not_saved"])
    assert run.result() == {"validation_accuracy": 0.9}


LINKS = """
    import os, pathlib
    output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "algo-1")
    output.mkdir(parents=True)
    (output / "result.json").write_text('{"validation_accuracy": 0.5}')
"""


def test_an_output_archive_with_a_link_to_elsewhere_costs_that_link_only(sagemaker_job, tmp_path):  # noqa: F811
    target = tmp_path / "target"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        link = tarfile.TarInfo("latest")
        link.type, link.linkname = tarfile.SYMTYPE, "/opt/ml/output/data/algo-1"
        archive.addfile(link)
        entry = tarfile.TarInfo("algo-1/result.json")
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    s3 = boto3.client("s3", region_name=REGION)
    s3.put_object(Bucket=BUCKET, Key="odd/output.tar.gz", Body=packed.getvalue())
    [left_out] = follow._fetch_archive(s3, f"s3://{BUCKET}/odd/output.tar.gz", target, tmp_path)
    assert "latest" in left_out and (tmp_path / "output.tar.gz").is_file()
    assert (target / "algo-1/result.json").read_text() == "{}"


def test_output_that_is_not_packed_is_fetched_too(sagemaker_job):  # noqa: F811
    run = started(sagemaker_job(LINKS, compress_output=False))
    assert run.wait(120) == "Completed"
    assert run.result() == {"validation_accuracy": 0.5}


def test_a_run_that_is_stopped_while_it_is_uploaded_is_never_created(sagemaker_job, data, far_side):  # noqa: F811
    plan = launcher.plan(sagemaker_job(SLEEPS, inputs={"train": {"folder": str(data)}}), on="aws")
    far_side.inject("PutObject", code="SlowDown", times=3, status=503)  # botocore tries again after growing pauses
    starting = threading.Thread(target=launcher.run, args=(plan,))
    starting.start()
    wait_until(lambda: (running.records.store() / plan.name / "plan.json").exists(), 30, "the record")
    launcher.attach(plan.name).stop("changed my mind")
    starting.join()
    run = launcher.attach(plan.name)
    assert run.state == "Stopped"
    assert "not started" in run.outcome()["stop_reason"]
    with pytest.raises(launcher.UserError, match="no such training job"):
        adopt.adopt(plan.name, REGION)


def test_an_upload_that_is_not_allowed_is_told_without_a_traceback(sagemaker_job, data, far_side, monkeypatch):  # noqa: F811
    monkeypatch.setattr(session, "MAX_ATTEMPTS", 1)
    far_side.inject(
        "PutObject", code="AccessDenied", times=1, status=403, message="not authorized to perform: s3:PutObject"
    )
    plan = launcher.plan(sagemaker_job(SLEEPS, inputs={"train": {"folder": str(data)}}), on="aws")
    with pytest.raises(launcher.UserError, match="not authorized to perform: s3:PutObject"):
        launcher.run(plan)
    assert "not started" in launcher.attach(plan.name).outcome()["failure"]


def test_uncommitted_secrets_stay_here(sagemaker_job):  # noqa: F811
    """The uploaded record holds the uncommitted patch of the source, unless that looks like a secret."""
    job = sagemaker_job("print('hello')\n")
    git = ["git", "-C", job.source, "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    with open(f"{job.source}/script.py", "a") as script:
        script.write("# changed\n")
    assert "# changed" in record_of(started(job))["git.patch"]
    beside = f"{job.source}/ignored.py"
    for text in ("x = 1\n", "key = 'AKIA" + "ABCDEFGHIJKLMNOP" + "'\n"):
        with open(beside, "w") as file:
            file.write(text)
        subprocess.run([*git, "add", "."], check=True)
        if "AKIA" not in text:
            subprocess.run([*git, "commit", "-qm", "second"], check=True)
    with open(f"{job.source}/.launcherignore", "w") as file:
        file.write("ignored.py\n")
    assert "git.patch" not in record_of(started(job))


def record_of(run: launcher.Run) -> dict[str, str]:
    run.wait(120)
    body = boto3.client("s3", region_name=REGION).get_object(Bucket=BUCKET, Key=f"runs/{run.name}/record/record.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(body["Body"].read())) as archive:
        return {
            name: archive.extractfile(name).read().decode()
            for name in archive.getnames()
            if archive.getmember(name).isfile()
        }


def test_log_pages_without_lines_are_not_the_end():
    """https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html: only an equal token is."""
    pages = {None: ("1", ["a"]), "1": ("2", []), "2": ("3", ["b"]), "3": ("3", [])}

    class Wire:
        def get_log_events(self, **options):
            token, lines = pages[options.get("nextToken")]
            return {"nextForwardToken": token, "events": [{"message": line} for line in lines]}

    assert [line for _, lines in follow._events(Wire(), "stream", None) for line in lines] == ["a", "b"]


def test_credentials_that_do_not_work_refuse_a_run_and_leave_no_record(sagemaker_job, far_side):  # noqa: F811
    far_side.inject("GetCallerIdentity", code="ExpiredToken", times=1, status=403)
    with pytest.raises(launcher.UserError, match="the AWS credentials have expired"):
        started(sagemaker_job(SLEEPS))
    assert launcher.runs() == []


def test_a_known_name_needs_no_region_and_a_broken_adoption_can_be_repeated(sagemaker_job, data):  # noqa: F811
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    assert launcher.attach("test", region="eu-west-1").name == run.name
    assert run.wait(120) == "Completed"
    (running.records.store() / "half").mkdir()
    with pytest.raises(launcher.UserError, match="no such training job"):
        launcher.attach("half", region=REGION)


@pytest.mark.parametrize("name", session.WHOSE)
def test_where_the_environment_names_another_account_another_client_is_asked(name, monkeypatch, tmp_path):
    """As in a notebook: an emulator that was closed and started again has another port."""
    (tmp_path / "config").write_text("[profile http://127.0.0.1:1]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    first = session.client("s3", REGION)
    assert session.client("s3", REGION) is first
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    if name == "AWS_ACCESS_KEY_ID":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    assert session.client("s3", REGION) is not first
    session.forget_clients()

"""Runs on SageMaker, against the emulator: uploaded, submitted, followed, found again and repeated."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

import boto3
import pytest

import launcher
from launcher.aws import checkpoint_prefix, follow, session
from launcher.commands import main
from launcher.record.metric_lines import parse_line
from launcher.record.records import write_json
from launcher.study.engine import report_price
from tests.aws.conftest import BUCKET, REGION, SLEEPS, TRAINS, described, is_ready, replacing, started
from tests.conftest import wait_until
from tests.launcher.test_replay import COUNTS


def as_sent(answer, sent):
    """Of an answer, the members that the request had: DescribeTrainingJob adds defaults and omits Tags."""
    if isinstance(sent, dict):
        return {name: as_sent(answer[name], item) if name in answer else item for name, item in sent.items()}
    if isinstance(sent, list) and len(sent) == len(answer):
        return [as_sent(item, other) for item, other in zip(answer, sent)]
    return answer


def test_a_run_is_submitted_followed_and_accounted_for(sagemaker_job, data):
    plan = launcher.plan(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}), on="aws")
    run = launcher.run(plan)
    assert run.wait(120) == "Completed"
    lines = [line for _, line in run.logs()]
    assert "read ['a.txt', 'b ü.txt']" in lines
    assert [metric.step for metric in map(parse_line, lines) if metric] == [5, 10]
    assert run.result() == {"validation_accuracy": 0.9}
    assert run.metrics() == [{"rank": 0, "epoch": 2, "step": 10, "loss": 0.5}]
    assert run.artifacts()["model"].stat().st_size > 0
    outcome = run.outcome()
    assert outcome["cost_usd"] == pytest.approx(outcome["billable_seconds"] / 3600 * 0.23, abs=1e-4)
    assert outcome["model_uri"] == f"s3://{BUCKET}/runs/{run.name}/output/model.tar.gz"
    kept = {path.name for path in run.folder.path.iterdir()}
    assert {
        "job.yaml",
        "plan.json",
        "request.json",
        "git.json",
        "versions.json",
        "files.txt",
        "code",
        "logs",
        "outcome.json",
    } <= kept
    assert as_sent(described(run.name), plan.request) == plan.request


@pytest.mark.slow
def test_boto3_alone_sends_the_same_request_as_the_sdk(sagemaker_job, data, tmp_path, monkeypatch):
    """With SDK v3 installed there is no estimator; its own metadata says so."""
    job = sagemaker_job(
        TRAINS, inputs={"train": {"folder": str(data)}}, hyperparameters={"name": "it's", "flag": False}
    )
    by_sdk = started(job)
    metadata = tmp_path / "site" / "sagemaker-3.27.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sagemaker\nVersion: 3.27.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    by_boto3 = started(job)
    sent_by = [run.folder.read(run.folder.remote)["sent_by"] for run in (by_sdk, by_boto3)]
    assert sent_by == ["sagemaker 2.257.7", "boto3"]

    one, other = (as_sent(described(run.name), run.folder.read(run.folder.request)) for run in (by_sdk, by_boto3))
    assert json.dumps(one).replace(by_sdk.name, "<run>") == json.dumps(other).replace(by_boto3.name, "<run>")
    assert {by_sdk.wait(120), by_boto3.wait(120)} == {"Completed"}


def test_data_that_did_not_change_is_uploaded_once(sagemaker_job, data, capsys):
    job = sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}})
    first, second = launcher.plan(job, on="aws"), launcher.plan(job, on="aws")
    assert first.uploads == second.uploads
    assert (first.uploads[0].files, first.uploads[0].size) == (2, sum(file.stat().st_size for file in data.iterdir()))
    launcher.upload(first)
    launcher.upload(second)
    printed = capsys.readouterr().err
    assert printed.count(f"2 files, {first.uploads[0].size} B, to") == 1
    assert printed.count("is uploaded already") == 1
    (data / "a.txt").write_text("changed")
    assert launcher.plan(job, on="aws").uploads[0].target != first.uploads[0].target


def test_the_estimator_of_a_plan_sends_what_was_planned(sagemaker_job, data):
    plan = launcher.plan(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}), on="aws")
    launcher.upload(plan)
    estimator, inputs = plan.estimator()
    estimator.fit(inputs, job_name=plan.name, wait=False)
    answer = described(plan.name)
    assert answer["HyperParameters"] == plan.request["HyperParameters"]
    assert launcher.attach(plan.name, region=REGION).wait(120) == "Completed"


def test_an_earlier_runs_model_is_an_input_without_a_second_upload(sagemaker_job, data):
    first = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}, name="first"))
    assert first.wait(120) == "Completed"
    plan = launcher.plan(sagemaker_job(TRAINS, inputs={"train": {"run": "first"}}), on="aws")
    assert plan.uploads == ()
    assert plan.channels["train"] == first.outcome()["model_uri"]
    second = launcher.run(plan)
    assert second.wait(120) == "Completed"
    assert "read ['model.tar.gz']" in [line for _, line in second.logs()]
    boto3.client("s3", region_name=REGION).delete_object(Bucket=BUCKET, Key=f"runs/{first.name}/output/model.tar.gz")
    [missing] = launcher.check(plan).errors
    assert missing.key == "inputs.train" and f"no objects under {plan.channels['train']}" in missing.found


@pytest.mark.parametrize(
    "where",
    [
        {"TrainingJobArn": f"arn:aws:sagemaker:{REGION}:210987654321:training-job/first"},
        {"emulator": "http://127.0.0.1:1"},
        {"region": "eu-west-1"},
    ],
    ids=["another account", "another emulator", "another region"],
)
def test_an_earlier_runs_model_that_the_job_cannot_read_in_s3_is_uploaded_from_here(sagemaker_job, done_at_once, where):
    first = started(sagemaker_job("print(1)\n", name="first"))
    assert first.wait(120) == "Completed"
    later = sagemaker_job(TRAINS, inputs={"train": {"run": "first"}})
    if "region" in where:
        later = later.model_copy(update=where)
    else:
        write_json(first.folder.remote, {**first.folder.read(first.folder.remote), **where})
    [upload] = launcher.plan(later, on="aws").uploads
    assert upload.source == first.folder.model
    first.folder.model.unlink()
    [missing] = launcher.plan(later, on="aws").errors
    assert missing.key == "inputs.train" and f"the model of {first.name} is in S3 only" in missing.found


def test_a_run_is_found_again_from_another_machine(sagemaker_job, data, monkeypatch, tmp_path):
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "another machine"))
    with pytest.raises(launcher.UserError, match="no such run"):
        launcher.attach(run.name)
    again = launcher.attach(run.name, region=REGION)
    assert again.wait(120) == "Completed"
    assert again.result() == {"validation_accuracy": 0.9}
    assert again.folder.job.read_text() == run.folder.job.read_text()
    assert (again.folder.code / "script.py").is_file()


@pytest.mark.slow
def test_a_job_that_something_else_started_can_be_followed(sagemaker_job, data):
    plan = launcher.plan(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}), on="aws")
    launcher.upload(plan)
    boto3.client("sagemaker", region_name=REGION).create_training_job(**plan.request)
    run = launcher.attach(plan.name, region=REGION)
    assert run.wait(120) == "Completed"
    assert run.result() == {"validation_accuracy": 0.9}
    with pytest.raises(launcher.UserError, match="no such training job in us-west-2"):
        launcher.attach("nobody-started-this", region=REGION)


def test_system_profiling_is_switched_while_the_job_runs(sagemaker_job):
    run = started(sagemaker_job(SLEEPS, profiling={"system_interval_ms": 1000}))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    run.profile(500)
    assert described(run.name)["ProfilerConfig"]["ProfilingIntervalInMilliseconds"] == 500
    run.profile(None)
    assert described(run.name)["ProfilerConfig"]["DisableProfiler"] is True
    run.stop()
    assert run.wait(60) == "Stopped"
    with pytest.raises(launcher.UserError, match="is over"):
        run.profile(500)


def test_a_secret_reaches_the_script_and_nothing_else(sagemaker_job):
    secret = "s3cr3t-" + "x" * 20
    job = sagemaker_job(
        "import os\nprint(f\"length {len(os.environ['HF_TOKEN'])}\")\n", environment={"HF_TOKEN": secret}
    )
    plan = launcher.plan(job, on="aws")
    assert plan.request["Environment"]["HF_TOKEN"] == secret
    assert secret not in str(plan) + plan.to_json()
    run = launcher.run(plan)
    assert run.wait(120) == "Completed"
    assert f"length {len(secret)}" in [line for _, line in run.logs()]
    for file in run.folder.path.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
    s3 = boto3.client("s3", region_name=REGION)
    for item in s3.list_objects_v2(Bucket=BUCKET, Prefix=f"runs/{run.name}/")["Contents"]:
        body = s3.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
        assert secret.encode() not in (gzip.decompress(body) if item["Key"].endswith(".gz") else body)


@pytest.mark.slow
def test_the_same_again_and_what_differed(sagemaker_job, data, tmp_path):
    job = sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}, hyperparameters={"rate": 0.1})
    first = started(job)
    Path(job.source, "script.py").write_text("print('somebody changed it')\n")
    plan = launcher.replay(first.name)
    assert plan.replay_of == first.name and plan.backend == "aws"
    second = launcher.run(plan)
    assert launcher.diff(first, second) == []
    third = launcher.run(launcher.replay(first.name, ["hyperparameters.rate=0.2"]))
    differences = [(item.about, item.key, item.first, item.second) for item in launcher.diff(first, third)]
    assert differences == [("job", "hyperparameters.rate", "0.1", "0.2")]
    assert {run.wait(120) for run in (first, second, third)} == {"Completed"}
    assert second.result() == first.result()


def test_every_hosts_lines_are_kept_apart(sagemaker_job):
    text = "import os\nprint(f\"I am {os.environ['SM_CURRENT_HOST']} rank {os.environ['RANK']}\", flush=True)\n"
    run = started(sagemaker_job(text, compute={"instance_count": 2}, distribution="torchrun"))
    assert run.wait(180) == "Completed"
    lines = {host: [line for own, line in run.logs() if own == host and line.startswith("I am")] for host in run.hosts}
    assert [len(found) for found in lines.values()] == [1, 1]
    assert lines["algo-1"] != lines["algo-2"]


def test_the_same_command_again_resumes_a_job_from_the_checkpoints_that_it_left_in_s3(sagemaker_job, tmp_path, capfd):
    job = sagemaker_job(COUNTS, checkpoints=f"s3://{BUCKET}/checkpoints/counts")
    first = started(job)
    assert first.wait(120) == "Failed"
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(job.model_dump(exclude_none=True)))
    assert main.main(["run", str(config), "--on", "aws"]) == 0
    out, err = capfd.readouterr()
    found = f"{first.name}, of the same job and code, is Failed and can be resumed"
    assert f"{found}: the new job continues from s3://{BUCKET}/checkpoints/counts; another `checkpoints`" in err
    assert f"resumes {first.name} from its last checkpoint" in out
    second = launcher.attach("test")
    assert "begins at 1" in [line for _, line in second.logs()]
    with pytest.raises(launcher.UserError, match="wrote no checkpoints to S3\n.*checkpoints: s3://"):
        launcher.resume(first.name, ["checkpoints=null"])
    with pytest.raises(
        launcher.UserError, match=f"{first.name} kept its checkpoints under s3://.*/counts\n"
    ) as refused:
        launcher.resume(first.name, [f"checkpoints=s3://{BUCKET}/checkpoints/elsewhere"])
    again = f"launcher replay {first.name} checkpoints=s3://{BUCKET}/checkpoints/elsewhere"
    assert again in refused.value.issues[0].fix
    assert launcher.replay(*shlex.split(again)[2:3], shlex.split(again)[3:]).job.checkpoints.s3.endswith("/elsewhere")
    assert launcher.resume(first.name, [f"checkpoints=s3://{BUCKET}/checkpoints/counts/"]).resumes == first.name
    again = launcher.check(launcher.replay(first.name))
    assert again.errors == () and re.fullmatch(
        r"s3://[^/]*/checkpoints/replay-[0-9a-f]{8}/counts", again.job.checkpoints.s3
    )
    assert not [issue for issue in again.issues if issue.key == "checkpoints"], "it starts from the beginning"
    assert launcher.replay(first.name, on="process").job.checkpoints == job.checkpoints
    first.folder.job.write_text("- no\n- mapping\n")
    assert main.main(["show", first.name]) == 0, "a damaged job is a matter of what reads it"


def test_a_run_that_left_no_checkpoint_is_not_resumed(sagemaker_job, tmp_path, capfd):
    job = sagemaker_job("raise SystemExit('at once')", checkpoints=f"s3://{BUCKET}/checkpoints/none")
    first = started(job)
    assert first.wait(120) == "Failed"
    with pytest.raises(launcher.UserError, match=rf"{first.name} left no checkpoint under s3://.*\n.*launcher replay"):
        launcher.run(launcher.resume(first.name))
    assert [run.name for run in launcher.runs()] == [first.name]
    s3 = boto3.client("s3", region_name=REGION)
    for key in ("none/", "none/.writing/part", "tune-0a1b2c3d/none/step-1", "none-of-these/step-1"):
        s3.put_object(Bucket=BUCKET, Key=f"checkpoints/{key}", Body=b"1")  # none of them is its checkpoint
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(job.model_dump(exclude_none=True)))
    assert main.main(["run", str(config), "--on", "aws", "--resume", "auto"]) == 1
    out, err = capfd.readouterr()
    assert f"{first.name} left no checkpoint under {job.checkpoints.s3}, so the job starts from the beginning" in err
    assert "resumes" not in out and "resumes" not in launcher.attach("test").folder.plan.read_text().replace(
        '"resumes": null', ""
    )


def test_two_jobs_under_way_do_not_share_a_prefix_for_their_checkpoints(sagemaker_job, monkeypatch):
    prefix = f"s3://{BUCKET}/checkpoints/shared"
    first = started(sagemaker_job(SLEEPS, checkpoints=prefix))
    uses = f"{first.name} is under way and keeps its checkpoints under"
    for given, found in (
        (f"{prefix}/", [f"{uses} {prefix}/"]),
        (f"{prefix}/below", [f"{uses} {prefix}, this job under {prefix}/below"]),
        (f"s3://{BUCKET}/checkpoints", [f"{uses} {prefix}, this job under s3://{BUCKET}/checkpoints"]),
        (f"{prefix}-by-its-start-only", []),
    ):
        plan = launcher.check(launcher.plan(sagemaker_job(SLEEPS, checkpoints=given, name="other"), on="aws"))
        assert [issue.found for issue in plan.errors] == found
    small = sagemaker_job(SLEEPS, checkpoints=prefix)
    report_price([small], "aws", None, lambda line: None)  # of a study, whose trials have prefixes of their own
    with monkeypatch.context() as fewer:
        fewer.setattr(checkpoint_prefix, "MAX_JOBS", 0)
        plan = launcher.check(launcher.plan(small, on="aws"))
    [unseen] = [issue for issue in plan.issues if issue.level == "not checked" and issue.key == "checkpoints"]
    assert "more than 0 are" in unseen.found
    first.stop()
    assert first.wait(60) == "Stopped"
    assert launcher.check(launcher.plan(small, on="aws")).errors == ()


def test_a_job_that_another_launcher_started_during_the_upload_keeps_its_prefix(sagemaker_job, data, monkeypatch):
    """Both found the prefix free before they uploaded."""
    prefix = f"s3://{BUCKET}/checkpoints/raced"
    other = launcher.plan(sagemaker_job(SLEEPS, checkpoints=prefix, name="other"), on="aws")
    job = sagemaker_job(SLEEPS, checkpoints=prefix, inputs={"train": {"folder": str(data)}})
    plan = launcher.check(launcher.plan(job, on="aws"))
    assert plan.errors == ()
    launcher.upload(other)
    upload_file = session.client("s3", REGION).upload_file
    sagemaker = boto3.client("sagemaker", region_name=REGION)

    def raced(*what, **options) -> None:
        with contextlib.suppress(sagemaker.exceptions.ClientError):  # the name is in use: the second file
            sagemaker.create_training_job(**other.request)
        upload_file(*what, **options)

    with monkeypatch.context() as uploading:
        uploading.setattr(session, "client", replacing("s3", upload_file=raced))
        with pytest.raises(
            launcher.UserError, match=f"{other.name} is under way and keeps its checkpoints under {prefix}"
        ):
            launcher.run(plan)
    run = launcher.attach(plan.name)
    assert run.state == "Failed" and run.outcome()["failure"].startswith("not started: ")
    with pytest.raises(sagemaker.exceptions.ClientError, match="not found"):
        described(plan.name)
    sagemaker.stop_training_job(TrainingJobName=other.name)


def test_a_job_that_may_not_list_others_starts_and_that_is_said_once(sagemaker_job, aws_calls, capsys):
    aws_calls.fail("ListTrainingJobs", code="AccessDeniedException", times=4)
    job = sagemaker_job("print('started')\n", checkpoints=f"s3://{BUCKET}/checkpoints/unlisted")
    plan = launcher.check(launcher.plan(job, on="aws"))
    assert "checkpoints" in [issue.key for issue in plan.issues if issue.level == "not checked"]
    assert launcher.run(plan).wait(120) == "Completed"
    assert "not checked" not in capsys.readouterr().err


def test_a_job_that_is_stopping_still_writes_its_last_checkpoint():
    class Client:
        def get_paginator(self, operation):
            assert operation == "list_training_jobs"
            return self

        def paginate(self, StatusEquals):
            return [{"TrainingJobSummaries": [{"TrainingJobName": StatusEquals}]}]

        def describe_training_job(self, TrainingJobName):
            return {"CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/{TrainingJobName}/"}}

    for state, refused in (("InProgress", True), ("Stopping", True), ("Stopped", False)):
        found = [*checkpoint_prefix.check_users(f"s3://{BUCKET}/{state}", REGION, Client())]
        assert [issue.found.partition(" ")[0] for issue in found] == [state] * refused


LINKS = """
    import os, pathlib
    output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "algo-1")
    output.mkdir(parents=True)
    (output / "result.json").write_text('{"validation_accuracy": 0.5}')
"""


def test_an_output_archive_with_a_link_to_elsewhere_costs_that_link_only(sagemaker_job, tmp_path):
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


def test_output_that_is_not_packed_is_fetched_too(sagemaker_job):
    run = started(sagemaker_job(LINKS, compress_output=False))
    assert run.wait(120) == "Completed"
    assert run.result() == {"validation_accuracy": 0.5}


def test_uncommitted_secrets_stay_here(sagemaker_job):
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

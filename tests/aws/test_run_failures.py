"""Runs on SageMaker that fail, are stopped, are interrupted or are refused, with the reason and its fix."""

from __future__ import annotations

import datetime
import textwrap
import threading

import boto3
import pytest

import launcher
from launcher.aws import adopt, session, upload
from launcher.emulator.execution import Execution, JobFailed
from launcher.runner import run as running
from tests.aws.conftest import BUCKET, REGION, SLEEPS, TRAINS, is_ready, started
from tests.conftest import wait_until
from tests.emulator.conftest import interrupt


def test_a_failed_run_names_the_first_real_traceback_the_cause_and_the_fix(sagemaker_job):
    run = started(sagemaker_job("import numpy\nimport a_module_that_is_not_there\n"))
    assert run.wait(120) == "Failed"
    outcome = run.outcome()
    assert outcome["failure"] == "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    assert outcome["traceback"].startswith("Traceback (most recent call last)")
    assert "ExecuteUserScriptError" not in outcome["traceback"]
    assert "a_module_that_is_not_there" in outcome.get("cause", ""), outcome
    assert "requirements.txt" in outcome["fix"]


def test_a_script_that_ends_without_a_traceback_is_explained_by_its_last_lines(sagemaker_job):
    text = """
        import argparse
        parser = argparse.ArgumentParser(prog="train.py")
        parser.add_argument("--depth", choices=[name.upper() for name in ("a", "b")])
        print("epoch 0")
        parser.parse_args(["--depth", "c"])
    """
    run = started(sagemaker_job(textwrap.dedent(text)))
    assert run.wait(120) == "Failed"
    outcome = run.outcome()
    *first, last = outcome["failure"].splitlines()
    assert last.startswith("train.py: error: argument --depth: invalid choice: 'c'"), outcome
    assert first == ["the last lines of its output:", "epoch 0", "usage: train.py [-h] [--depth {A,B}]"]
    assert outcome["exit_code"] == 2 and "hyperparameters" in outcome["fix"]


def test_capacity_that_is_not_there_is_explained(sagemaker_job, monkeypatch):
    def no_instances(_):
        raise JobFailed("CapacityError: Unable to provision requested ML compute capacity.")

    monkeypatch.setattr(Execution, "attempt", no_instances)
    run = started(sagemaker_job(SLEEPS))
    assert run.wait(60) == "Failed"
    assert "compute." in run.outcome()["fix"]


def test_no_objects_under_a_prefix_is_found_before_the_start(sagemaker_job):
    job = sagemaker_job(TRAINS, inputs={"train": {"s3": f"s3://{BUCKET}/nothing-here/"}})
    with pytest.raises(launcher.UserError, match="no objects under s3://amzn-s3-demo-bucket/nothing-here/"):
        started(job)


def test_a_run_is_stopped(sagemaker_job):
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    run.stop("a test")
    assert run.state == "Stopping"
    assert run.wait(60) == "Stopped"
    assert run.outcome()["stop_reason"] == "a test"
    run.stop()  # one that is over


def test_a_run_that_is_stopped_while_it_is_uploaded_is_never_created(sagemaker_job, data, monkeypatch):
    plan = launcher.plan(sagemaker_job(SLEEPS, inputs={"train": {"folder": str(data)}}), on="aws")
    send, begun, stopped = upload.upload, threading.Event(), threading.Event()

    def slowly(*what):
        begun.set()
        assert stopped.wait(60)
        send(*what)

    monkeypatch.setattr(upload, "upload", slowly)
    starting = threading.Thread(target=launcher.run, args=(plan,))
    starting.start()
    assert begun.wait(60)
    launcher.attach(plan.name).stop("changed my mind")
    stopped.set()
    starting.join()
    run = launcher.attach(plan.name)
    assert run.state == "Stopped"
    assert "not started" in run.outcome()["stop_reason"]
    with pytest.raises(launcher.UserError, match="no such training job"):
        adopt.adopt(plan.name, REGION)


@pytest.mark.slow
def test_the_time_limit_is_named_where_it_stopped_the_run(sagemaker_job):
    run = started(sagemaker_job(SLEEPS, compute={"max_hours": 12 / 3600}))
    assert run.wait(90) == "Stopped"
    assert run.outcome()["stop_reason"] == "compute.max_hours was reached"


def test_what_aws_refuses_is_reported_with_its_fix_and_recorded(sagemaker_job, aws_calls):
    aws_calls.fail(
        "CreateTrainingJob",
        code="AccessDeniedException",
        message="User: me is not authorized to perform: sagemaker:CreateTrainingJob",
    )
    plan = launcher.plan(sagemaker_job(SLEEPS), on="aws")
    with pytest.raises(launcher.UserError, match="not authorized to perform: sagemaker:CreateTrainingJob"):
        launcher.run(plan)
    run = launcher.attach(plan.name)
    assert run.state == "Failed"
    assert "not started" in run.outcome()["failure"]


def test_an_upload_that_is_not_allowed_is_reported_without_a_traceback(sagemaker_job, data, aws_calls, monkeypatch):
    monkeypatch.setattr(session, "MAX_ATTEMPTS", 1)
    aws_calls.fail(
        "PutObject", code="AccessDenied", times=1, status=403, message="not authorized to perform: s3:PutObject"
    )
    plan = launcher.plan(sagemaker_job(SLEEPS, inputs={"train": {"folder": str(data)}}), on="aws")
    with pytest.raises(launcher.UserError, match="not authorized to perform: s3:PutObject"):
        launcher.run(plan)
    assert "not started" in launcher.attach(plan.name).outcome()["failure"]


def test_credentials_that_do_not_work_refuse_a_run_and_leave_no_record(sagemaker_job, aws_calls):
    aws_calls.fail("GetCallerIdentity", code="ExpiredToken", times=1, status=403)
    with pytest.raises(launcher.UserError, match="the AWS credentials have expired"):
        started(sagemaker_job(SLEEPS))
    assert launcher.runs() == []


def test_a_price_above_the_limit_or_not_known_is_refused(sagemaker_job):
    plan = launcher.plan(sagemaker_job(SLEEPS, compute={"max_hours": 10}), on="aws")
    assert "price not known" in plan.price.text
    with pytest.raises(launcher.UserError, match=r"at most \$2.31: 10 h and 2 min to stop at \$0.23 an hour"):
        launcher.run(plan, max_cost=2)
    unknown = launcher.plan(sagemaker_job(SLEEPS, compute={"instance_type": "ml.c5.xlarge"}), on="aws")
    with pytest.raises(launcher.UserError, match="price not known for ml.c5.xlarge"):
        launcher.run(unknown, max_cost=1000)
    assert launcher.runs() == []


RESUMES = """
    import os, pathlib, time
    folder = pathlib.Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "checkpoints")
    step = int((folder / "step").read_text()) if (folder / "step").exists() else 0
    begun = step
    print(f"starting at {begun}", flush=True)
    while step < (1000 if begun == 0 else begun + 3):
        step += 1
        (folder / "next").write_text(str(step))
        (folder / "next").replace(folder / "step")  # whole, whenever the host is taken away
        time.sleep(0.2)
"""


def kept_step() -> int:
    """That of the checkpoint in S3; 0: there is none."""
    s3, key = boto3.client("s3", region_name=REGION), "checkpoints/spot/step"
    there = s3.list_objects_v2(Bucket=BUCKET, Prefix=key).get("Contents")
    return int(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()) if there else 0


@pytest.mark.slow
def test_spot_interruptions_are_counted_and_the_saving_is_reported(sagemaker_job, emulator):
    job = sagemaker_job(
        RESUMES, compute={"instance_type": "ml.g5.xlarge", "spot": True}, checkpoints=f"s3://{BUCKET}/checkpoints/spot"
    )
    run = started(job)
    wait_until(lambda: any("starting at 0" in line for _, line in run.logs()), 60, "the start")
    wait_until(lambda: kept_step() > 0, 90, "a checkpoint in S3")
    interrupt(emulator, run.name)
    assert run.wait(120) == "Completed"
    starts = [int(line.split()[-1]) for _, line in run.logs() if line.startswith("starting at")]
    assert starts[0] == 0 and starts[1] > 0
    assert run.outcome()["interruptions"] == 1
    assert 0 < run.outcome()["saving"] < 1


@pytest.mark.parametrize(
    ("name", "sent", "recorded"),
    [
        ("epochs", "3", "3"),
        ("model", '"resnet18"', '"resnet18"'),
        ("wandb_api_key", '"0123456789abcdef0123456789abcdef01234567"', '"***"'),
        ("api_token", "hunter2hunter2", '"***"'),
        ("options", '{"depth": 2, "password": "hunter2"}', '{"depth": 2, "password": "***"}'),
    ],
)
def test_a_job_of_another_program_is_recorded_without_its_secrets(tmp_path, name, sent, recorded):
    folder = running.records.RunFolder(tmp_path / "job")
    folder.path.mkdir()
    described = {
        "ResourceConfig": {"InstanceCount": 1},
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/theirs"},
        "HyperParameters": {"sagemaker_program": '"train.py"', name: sent},
        "CreationTime": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
    }
    adopt._write_what_is_known(folder, described, REGION)
    plan = folder.read(folder.plan)
    assert plan["hyperparameters"][name] == plan["job"]["hyperparameters"][name] == recorded
    assert plan["job"]["script"] == "train.py"

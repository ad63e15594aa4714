"""Runs on SageMaker, against the emulator: submitted, followed through trouble, stopped, found again, paid and explained."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import boto3
import pytest

import launcher
from launcher.aws import follow, session
from launcher.emulator import Emulator
from launcher.record.metric_lines import parse_line
from launcher.runner import run as running
from tests.conftest import wait_until
from tests.launcher.test_repeating import COUNTS

REGION, BUCKET = "us-west-2", "amzn-s3-demo-bucket"
ROLE = "arn:aws:iam::123456789012:role/SageMakerTraining"


@pytest.fixture(scope="module")
def far_side(tmp_path_factory):
    with Emulator(tmp_path_factory.mktemp("far-side")) as emulator:
        emulator.add_bucket(BUCKET, REGION)
        emulator.add_role(ROLE)
        emulator.set_price("ml.m5.xlarge", 0.23, REGION)
        emulator.set_price("ml.g5.xlarge", 1.41, REGION)
        for kind in ("ml.m5.xlarge", "ml.g5.xlarge"):
            for use in ("training job", "spot training job", "training warm pool"):
                emulator.set_quota(f"{kind} for {use} usage", 4.0, REGION)
        yield emulator


@pytest.fixture(autouse=True)
def connected(far_side, nobody, monkeypatch):
    """This process as a client of the emulator, with pauses that a test can wait for."""
    for name, value in far_side.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(running, "LONGEST_PAUSE", 0.3)
    monkeypatch.setattr(running, "PAUSE_IN_TROUBLE", 0.3)
    monkeypatch.setattr(follow, "LAST_LINES_SECONDS", 0.3)
    session.forget_clients()
    yield
    session.forget_clients()


@pytest.fixture
def sagemaker_job(script_job):
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


def described(name: str) -> dict:
    return boto3.client("sagemaker", region_name=REGION).describe_training_job(TrainingJobName=name)


def as_sent(answer, sent):
    """Of an answer, the members that the request had: DescribeTrainingJob adds defaults, and Tags it does not tell."""
    if isinstance(sent, dict):
        return {name: as_sent(answer[name], item) if name in answer else item for name, item in sent.items()}
    if isinstance(sent, list) and len(sent) == len(answer):
        return [as_sent(item, other) for item, other in zip(answer, sent)]
    return answer


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
    told = capsys.readouterr().err
    assert told.count("2 files, 0.0 MiB") == 1
    assert told.count("is there already") == 1
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


def test_a_failed_run_names_the_first_real_traceback_the_cause_and_the_fix(sagemaker_job):
    run = started(sagemaker_job("import numpy\nimport a_module_that_is_not_there\n"))
    assert run.wait(120) == "Failed"
    outcome = run.outcome()
    assert outcome["failure"].startswith("AlgorithmError")
    assert outcome["traceback"].startswith("Traceback (most recent call last)")
    assert "ExecuteUserScriptError" not in outcome["traceback"]
    assert "a_module_that_is_not_there" in outcome.get("cause", ""), outcome
    assert "requirements.txt" in outcome["fix"]


def test_capacity_that_is_not_there_is_explained(sagemaker_job, far_side):
    far_side.fail_start(
        "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
    )
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


def test_the_time_limit_is_named_where_it_stopped_the_run(sagemaker_job):
    run = started(sagemaker_job(SLEEPS, compute={"max_hours": 12 / 3600}))
    assert run.wait(90) == "Stopped"
    assert run.outcome()["stop_reason"] == "compute.max_hours is over"


def test_expired_credentials_and_throttling_do_not_lose_the_run(sagemaker_job, far_side):
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    far_side.inject("DescribeTrainingJob", code="ExpiredTokenException", times=1)
    wait_until(lambda: run.state and run.trouble, 20, "trouble")
    assert "expired" in run.trouble and "aws sso login" in run.trouble
    assert run.folder.state() == "InProgress"
    wait_until(lambda: run.state and not run.trouble, 20, "an answer")
    far_side.inject("DescribeTrainingJob", code="ThrottlingException", times=2)
    run.stop("a test")
    assert run.wait(60) == "Stopped"


def test_a_throttled_start_is_tried_again_and_starts_one_job(sagemaker_job, far_side):
    """https://github.com/aws/sagemaker-python-sdk/issues/645"""
    far_side.inject("CreateTrainingJob", code="ThrottlingException", times=2)
    run = started(sagemaker_job("print('started')\n"))
    assert run.wait(120) == "Completed"
    jobs = boto3.client("sagemaker", region_name=REGION).list_training_jobs(NameContains=run.name)[
        "TrainingJobSummaries"
    ]
    assert [job["TrainingJobName"] for job in jobs] == [run.name]


def test_what_aws_refuses_is_told_with_its_cure_and_recorded(sagemaker_job, far_side):
    far_side.inject(
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


def test_a_job_that_something_else_started_can_be_followed(sagemaker_job, data):
    plan = launcher.plan(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}), on="aws")
    launcher.upload(plan)
    boto3.client("sagemaker", region_name=REGION).create_training_job(**plan.request)
    run = launcher.attach(plan.name, region=REGION)
    assert run.wait(120) == "Completed"
    assert run.result() == {"validation_accuracy": 0.9}
    with pytest.raises(launcher.UserError, match="no such training job in us-west-2"):
        launcher.attach("nobody-started-this", region=REGION)


RESUMES = """
    import os, pathlib, time
    folder = pathlib.Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "checkpoints")
    step = int((folder / "step").read_text()) if (folder / "step").exists() else 0
    print(f"starting at {step}", flush=True)
    while step < 60:
        step += 1
        (folder / "next").write_text(str(step))
        (folder / "next").replace(folder / "step")  # whole, whenever the host is taken away
        time.sleep(0.2)
"""


def test_spot_interruptions_are_counted_and_the_saving_is_told(sagemaker_job, far_side):
    job = sagemaker_job(
        RESUMES, compute={"instance_type": "ml.g5.xlarge", "spot": True}, checkpoints=f"s3://{BUCKET}/checkpoints/spot"
    )
    run = started(job)
    wait_until(lambda: any("starting at 0" in line for _, line in run.logs()), 60, "the start")
    threading.Event().wait(4)
    far_side.interrupt(run.name)
    assert run.wait(120) == "Completed"
    starts = [int(line.split()[-1]) for _, line in run.logs() if line.startswith("starting at")]
    assert starts[0] == 0 and starts[1] > 0
    assert run.outcome()["interruptions"] == 1
    assert 0 < run.outcome()["saving"] < 1


def test_a_price_above_the_limit_or_not_known_is_refused(sagemaker_job):
    plan = launcher.plan(sagemaker_job(SLEEPS, compute={"max_hours": 10}), on="aws")
    assert "price not known" in plan.price.text
    with pytest.raises(launcher.UserError, match=r"at most \$2.30: 10 h at \$0.23 an hour"):
        launcher.run(plan, max_cost=2)
    unknown = launcher.plan(sagemaker_job(SLEEPS, compute={"instance_type": "ml.c5.xlarge"}), on="aws")
    with pytest.raises(launcher.UserError, match="price not known for ml.c5.xlarge"):
        launcher.run(unknown, max_cost=1000)
    assert launcher.runs() == []


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


def test_two_followers_of_one_run_write_each_line_once(sagemaker_job):
    text = "import time\nfor number in range(60):\n    print(f'line {number}', flush=True)\n    time.sleep(0.1)\n"
    run = started(sagemaker_job(text))
    other = launcher.attach(run.name)
    watching = threading.Thread(target=other.wait, args=(120,))
    watching.start()
    assert run.wait(120) == "Completed"
    watching.join()
    numbers = [int(line.split()[1]) for _, line in run.logs() if line.startswith("line ")]
    assert numbers == list(range(60))


def test_lines_that_a_crash_left_half_recorded_are_not_doubled(sagemaker_job, data):
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    wait_until(
        lambda: run.state and run.folder.log("algo-1").exists() and run.folder.log("algo-1").stat().st_size,
        90,
        "a line",
    )
    with open(run.folder.log("algo-1"), "ab") as log:
        log.write(b"written before the power failed, and not noted in streams.json\n")
    assert run.wait(120) == "Completed"
    text = run.folder.log("algo-1").read_text()
    assert "power" not in text
    assert text.count("epoch 1/2 step 5/10") == 1


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


def test_the_record_can_be_read_while_aws_does_not_answer(sagemaker_job, monkeypatch, far_side):
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    monkeypatch.setattr(session, "MAX_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    session.forget_clients()
    offline = launcher.attach(run.name)
    assert offline.state == "InProgress"
    assert "cannot be reached" in offline.trouble
    assert "ready" in [line for _, line in offline.logs()]
    with pytest.raises(launcher.UserError, match="cannot be reached"):
        offline.stop()
    monkeypatch.setenv("AWS_ENDPOINT_URL", far_side.url)
    session.forget_clients()
    offline.stop()
    assert offline.wait(60) == "Stopped"


def test_every_hosts_lines_are_kept_apart(sagemaker_job):
    text = "import os\nprint(f\"I am {os.environ['SM_CURRENT_HOST']} rank {os.environ['RANK']}\", flush=True)\n"
    run = started(sagemaker_job(text, compute={"instance_count": 2}, distribution="torchrun"))
    assert run.wait(180) == "Completed"
    lines = {host: [line for own, line in run.logs() if own == host and line.startswith("I am")] for host in run.hosts}
    assert [len(found) for found in lines.values()] == [1, 1]
    assert lines["algo-1"] != lines["algo-2"]


def test_a_job_goes_on_from_the_checkpoints_that_its_failed_one_left_in_s3(sagemaker_job):
    first = started(sagemaker_job(COUNTS, checkpoints=f"s3://{BUCKET}/checkpoints/counts"))
    assert first.wait(120) == "Failed"
    second = launcher.run(launcher.resume(first.name))
    assert second.wait(120) == "Completed"
    assert "begins at 1" in [line for _, line in second.logs()]
    with pytest.raises(launcher.UserError, match="had no place in S3 for them\n.*checkpoints: s3://"):
        launcher.resume(first.name, ["checkpoints=null"])

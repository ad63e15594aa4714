"""The moment in which a job is created on SageMaker: whatever is lost there, no job runs that its record calls not started."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable

import boto3
import pytest

import launcher
from launcher.aws import follow, session, submit, upload
from launcher.backends import aws
from launcher.backends.interrupts import deferred, interruptible
from launcher.commands import live
from launcher.commands.exit_codes import INTERRUPTED, RUN_FAILED
from launcher.record import disk, records
from launcher.runner.run_to_completion import run_to_completion
from tests.aws.conftest import REGION, SLEEPS, described, lost, not_found, replacing, started
from tests.conftest import exit_code, wait_until

pytestmark = pytest.mark.usefixtures("trains_until_stopped")


@pytest.fixture
def plan(sagemaker_job) -> launcher.Plan:
    return launcher.plan(sagemaker_job(SLEEPS), on="aws")


def stop(run: launcher.Run) -> None:
    """End a run, and see SageMaker confirm it."""
    run.stop("a test")
    assert run.wait(60) == "Stopped"
    status = boto3.client("sagemaker", region_name=REGION).describe_training_job(TrainingJobName=run.name)
    assert status["TrainingJobStatus"] == "Stopped"


def test_the_record_says_that_a_job_was_sent_before_it_is(plan, monkeypatch):
    """SIGKILL or a power cut may come at any moment from then on."""
    create, kept = submit.create, {}

    def watched(plan):
        folder = launcher.attach(plan.name).folder
        kept.update(folder.read(folder.remote))
        create(plan)

    monkeypatch.setattr(submit, "create", watched)
    run = launcher.run(plan)
    assert kept["TrainingJobStatus"] == "InProgress" and kept["sent"] > 0 and kept["account"] == "123456789012"
    stop(run)


def test_a_job_whose_starter_was_killed_while_it_was_created_is_found_and_stopped(plan, monkeypatch):
    create = submit.create

    def killed(plan):
        create(plan)
        raise SystemExit  # no Exception, as at a kill: nothing is recorded after it

    monkeypatch.setattr(submit, "create", killed)
    monkeypatch.setattr(submit, "is_there", lambda plan: False)
    with pytest.raises(SystemExit):
        launcher.run(plan)
    run = launcher.attach(plan.name)
    assert run.state == "InProgress"
    stop(run)


def test_a_job_whose_starter_was_killed_before_it_was_sent_is_over_after_a_while(plan, monkeypatch):
    def killed(plan):
        raise SystemExit

    monkeypatch.setattr(submit, "create", killed)
    with pytest.raises(SystemExit):
        launcher.run(plan)
    run = launcher.attach(plan.name)
    assert run.state == "InProgress"
    monkeypatch.setattr(follow, "UNKNOWN_SECONDS", 0)
    wait_until(lambda: run.state == "Failed", 30, "the end")
    assert "never created" in run.outcome()["failure"]


def test_a_full_disk_after_the_job_was_created_does_not_keep_it_from_being_stopped(plan, monkeypatch):
    create, write, sent = submit.create, records.write_json, []

    def created(plan):
        create(plan)
        sent.append(plan.name)

    def full(file, value, **options):
        if sent and file.name in ("remote.json", "outcome.json"):
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write(file, value, **options)

    with monkeypatch.context() as no_room:
        no_room.setattr(submit, "create", created)
        no_room.setattr(records, "write_json", full)
        run = launcher.run(plan)
        assert run.state == "InProgress" and "no space left" in run.trouble
        launcher.attach(plan.name).stop("a test")
        assert run.state == "Stopping"
    assert run.wait(60) == "Stopped"
    assert run.outcome()["stop_reason"] == "a test" and not run.folder.reserve.exists()


def test_a_run_on_sagemaker_keeps_room_for_its_stop(plan):
    run = launcher.run(plan)
    assert run.folder.reserve.stat().st_size == disk.RESERVE_BYTES
    stop(run)
    assert not run.folder.reserve.exists()


def test_a_job_that_is_known_late_after_a_lost_answer_is_followed(plan, monkeypatch, capsys):
    """CreateTrainingJob went through, its answer came not, and DescribeTrainingJob takes a moment to know the job."""
    create = submit.create

    def created(plan):
        create(plan)
        lost()

    with monkeypatch.context() as late:
        late.setattr(submit, "create", created)
        late.setattr(session, "client", replacing("sagemaker", describe_training_job=not_found))
        run = launcher.run(plan)
        assert run.state == "InProgress"
        assert f"{plan.name} may have been started: AWS cannot be reached" in capsys.readouterr().err
        with pytest.raises(launcher.UserError, match=f"{plan.name} was NOT stopped and goes on: .*not know such a job"):
            late.setattr(session, "client", replacing("sagemaker", stop_training_job=not_found))
            late.setattr(aws, "UNKNOWN_JOB_SECONDS", 0)
            late.setattr(aws, "SECONDS_BETWEEN_STOPS", 0)
            run.stop()
        assert run.state == "InProgress"
    stop(run)


def test_a_job_whose_last_attempt_may_have_got_through_after_minutes_is_followed(plan, monkeypatch):
    """botocore tries again after each 60 s without an answer, and DescribeTrainingJob takes a moment to know the job."""

    def slowly_lost(plan):
        folder = launcher.attach(plan.name).folder
        known = folder.read(folder.remote)
        records.write_json(folder.remote, {**known, "sent": known["sent"] - 5 * follow.UNKNOWN_SECONDS})
        create(plan)
        lost()

    create = submit.create
    with monkeypatch.context() as late:
        late.setattr(submit, "create", slowly_lost)
        late.setattr(session, "client", replacing("sagemaker", describe_training_job=not_found))
        run = launcher.run(plan)
        assert run.state == "InProgress" and not run.folder.outcome.exists()
        assert run.folder.read(run.folder.remote)["account"] == "123456789012"
    stop(run)


def test_a_full_disk_does_not_keep_a_job_that_may_run_from_being_handed_over(plan, monkeypatch):
    def full_and_lost(plan):
        late.setattr(records, "write_json", full)
        lost()

    def full(file, value, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    with monkeypatch.context() as late:
        late.setattr(submit, "create", full_and_lost)
        late.setattr(session, "client", replacing("sagemaker", describe_training_job=not_found))
        run = launcher.run(plan)
        assert run.folder.state() == "InProgress" and not run.folder.supervisor_lives()


def test_a_job_whose_creation_and_the_look_after_it_time_out_may_run_and_is_followed(plan, monkeypatch, capsys):
    launcher.upload(plan)
    boto3.client("sagemaker", region_name=REGION).create_training_job(**plan.request)
    with monkeypatch.context() as offline:
        offline.setattr(submit, "create", lost)
        offline.setattr(session, "client", replacing("sagemaker", describe_training_job=lost))
        run = launcher.run(plan)
        assert "may have been started: AWS cannot be reached" in capsys.readouterr().err
        assert run.state == "InProgress" and "cannot be reached" in run.trouble
    stop(run)


def test_a_job_whose_answer_was_lost_is_followed_and_not_called_failed(plan):
    """CreateTrainingJob went through, and botocore's second try is refused because the name is taken."""
    launcher.upload(plan)
    boto3.client("sagemaker", region_name=REGION).create_training_job(**plan.request)
    run = launcher.run(plan)
    assert run.state == "InProgress"
    stop(run)


@pytest.mark.parametrize("code", ["ResourceLimitExceeded", "AccessDeniedException"])
def test_a_refusal_after_another_attempt_may_be_of_the_job_that_the_first_one_created(plan, aws_calls, code):
    aws_calls.fail("CreateTrainingJob", code="ThrottlingException")
    aws_calls.fail("CreateTrainingJob", code=code)
    assert launcher.run(plan).state == "InProgress"


def test_what_aws_refuses_at_once_has_not_started_though_it_cannot_be_looked_for(plan, aws_calls):
    for call in ("CreateTrainingJob", "DescribeTrainingJob"):
        aws_calls.fail(call, code="AccessDeniedException")
    with pytest.raises(launcher.UserError, match="not allowed"):
        launcher.run(plan)
    run = launcher.attach(plan.name)
    assert run.state == "Failed" and not run.folder.remote.exists() and not run.folder.reserve.exists()


@pytest.mark.parametrize("part", ["debugger", "profiling"])
def test_what_the_sdk_refuses_in_a_region_unknown_to_it_is_sent_by_boto3(emulator, sagemaker_job, capsys, part):
    """SDK v2 raises ValueError for Debugger, RuntimeError for profiling."""
    region, bucket = "eu-south-2", f"amzn-s3-demo-bucket-{part}"
    emulator.add_bucket(bucket, region)
    emulator.set_quota("ml.m5.xlarge for training job usage", 4.0, region)
    emulator.set_price("ml.m5.xlarge", 0.23, region)
    job = sagemaker_job(SLEEPS, region=region, output=f"s3://{bucket}/runs", **{part: {"output": f"s3://{bucket}/x"}})
    plan = launcher.plan(job, on="aws")
    run = launcher.run(plan)
    assert "sent nothing (" in (printed := capsys.readouterr().err) and "boto3 sends the planned request" in printed
    made = boto3.client("sagemaker", region_name=region).describe_training_job(TrainingJobName=run.name)
    assert made["ProfilerConfig"] == plan.request["ProfilerConfig"]
    run.stop("a test")
    assert run.wait(60) == "Stopped"


def test_what_the_sdk_raises_after_its_request_may_have_been_sent(plan, aws_calls):
    def fails():
        raise RuntimeError("a test")

    aws_calls.during["CreateTrainingJob"] = fails
    with pytest.raises(RuntimeError, match="a test"):
        launcher.run(plan)
    assert aws_calls.made.count(("sagemaker", "CreateTrainingJob")) == 1
    stop(launcher.attach(plan.name))


def test_a_look_at_a_job_that_is_just_created_does_not_call_it_gone(plan, monkeypatch):
    create = submit.create
    monkeypatch.setattr(follow, "UNKNOWN_SECONDS", 0)

    def slowly(plan):
        assert launcher.attach(plan.name).state == "InProgress"
        create(plan)

    monkeypatch.setattr(submit, "create", slowly)
    stop(launcher.run(plan))


def test_a_stop_that_comes_while_the_job_is_created_stops_it(sagemaker_job, monkeypatch):
    create = submit.create

    def slowly(plan):
        launcher.attach(plan.name).stop("changed my mind")  # SageMaker does not know the job yet
        create(plan)

    monkeypatch.setattr(submit, "create", slowly)
    run = started(sagemaker_job(SLEEPS))
    assert run.wait(60) == "Stopped"
    assert run.outcome()["stop_reason"] == "changed my mind"


def test_ctrl_c_while_the_job_is_created_says_that_it_goes_on(plan, monkeypatch, capsys):
    create = submit.create

    def interrupted(plan):
        create(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher.run(plan)
    assert f"launcher stop {plan.name} stops it" in capsys.readouterr().err
    stop(launcher.attach(plan.name))


def test_ctrl_c_in_a_study_ends_an_upload_before_there_is_a_job(plan, monkeypatch):
    """An upload may take hours, and nothing runs yet."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(upload, "upload", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        monkeypatch.setattr(submit, "create", lambda plan: pytest.fail("the job was created"))
        with pytest.raises(KeyboardInterrupt):
            run_to_completion(
                lambda: launcher.run(plan), log=print, interrupted=lambda: pytest.fail("no run is there to stop")
            )
    finally:
        signal.signal(signal.SIGINT, handler)
    [run] = launcher.runs()
    assert run.state == "Failed" and "not started: KeyboardInterrupt" in run.outcome()["failure"]


@pytest.mark.parametrize("within", [True, False], ids=["as it is uploaded", "as it is created"])
def test_signals_wait_for_what_may_not_be_cut_and_for_nothing_else(within):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    try:
        with contextlib.suppress(KeyboardInterrupt), deferred() as came:
            with interruptible():
                if within:
                    os.kill(os.getpid(), signal.SIGINT)
                    reached.append("after it came")
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(len(came))
            with interruptible():
                reached.append("again")
        assert reached == ([] if within else [1])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with interruptible():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


def arrives(number: signal.Signals) -> Callable[[], None]:
    """A signal that does not end this process, the tests', where the launcher does not expect it."""

    def come() -> None:
        assert signal.getsignal(number) is not signal.SIG_DFL, f"{number.name} would end the launcher here"
        signal.raise_signal(number)

    return come


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGINT, INTERRUPTED, "Ctrl-C"), (signal.SIGTERM, RUN_FAILED, "launcher run received SIGTERM")],
)
def test_a_signal_while_the_job_is_created_stops_it(plan, as_typed, aws_calls, capsys, number, code, reason):
    aws_calls.during["CreateTrainingJob"] = arrives(number)
    assert exit_code(plan) == code
    run = launcher.attach(plan.name)
    assert run.state == "Stopped" and run.outcome()["stop_reason"] == reason
    assert described(plan.name)["TrainingJobStatus"] == "Stopped"
    printed = capsys.readouterr()
    assert "stopping: " in printed.err and f"{plan.name}: Stopped" in printed.out


def test_ctrl_c_in_a_terminal_while_a_detached_job_is_created_is_asked_about(plan, as_typed, aws_calls, monkeypatch):
    asked = []
    monkeypatch.setattr(live, "_ask", lambda: asked.append(plan.name) or "leave")
    aws_calls.during["CreateTrainingJob"] = arrives(signal.SIGINT)
    assert exit_code(plan, detach=True) == INTERRUPTED
    assert asked == [plan.name] and ("sagemaker", "StopTrainingJob") not in aws_calls.made
    run = launcher.attach(plan.name)
    assert run.state == "InProgress"
    stop(run)


def test_sigterm_ends_an_upload_before_there_is_a_job(plan, as_typed, aws_calls):
    aws_calls.during["PutObject"] = arrives(signal.SIGTERM)
    assert exit_code(plan) == INTERRUPTED
    run = launcher.attach(plan.name)
    assert run.state == "Failed" and "not started: KeyboardInterrupt" in run.outcome()["failure"]
    assert ("sagemaker", "CreateTrainingJob") not in aws_calls.made

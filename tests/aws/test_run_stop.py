"""Stops that SageMaker did not get: who asked for one learns which job goes on, and the record does not call it Stopping."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from argparse import Namespace
from types import SimpleNamespace

import boto3
import botocore.exceptions
import pytest

import launcher
from launcher.aws import follow, session
from launcher.backends import aws
from launcher.commands import foreground, live, main, options
from launcher.commands.exit_codes import INTERRUPTED, RUN_FAILED
from launcher.config.issues import mistake
from launcher.record import records
from launcher.runner.run_to_completion import run_to_completion
from tests.aws.conftest import REGION, SLEEPS, described, not_found, replacing
from tests.conftest import exit_code
from tests.launcher.test_store import recorded

NAME = "sleeper-20261121-031500-abcd"


@pytest.fixture
def run(connected, monkeypatch) -> launcher.Run:
    """A run that SageMaker describes as InProgress."""
    hosts = [{"name": "algo-1"}]
    folder = recorded(NAME, state="", backend="aws", job={"name": "sleeper", "region": REGION}, hosts=hosts)
    records.write_json(folder.remote, {"TrainingJobStatus": "InProgress"})
    answer = {"TrainingJobStatus": "InProgress"}
    monkeypatch.setattr(session, "client", replacing("sagemaker", describe_training_job=lambda **_: answer))
    monkeypatch.setattr(session, "client", replacing("logs", get_paginator=no_streams))
    return launcher.attach(NAME)


def no_streams(_: str) -> SimpleNamespace:
    return SimpleNamespace(paginate=lambda **_: [])


def expired(**_) -> None:
    answer = {"Error": {"Code": "ExpiredTokenException", "Message": "a test"}}
    raise botocore.exceptions.ClientError(answer, "StopTrainingJob")


def interrupted(**_) -> None:
    raise KeyboardInterrupt


def refused_by(monkeypatch, stop_training_job) -> None:
    monkeypatch.setattr(session, "client", replacing("sagemaker", stop_training_job=stop_training_job))


def test_a_stop_that_fails_names_the_job_that_goes_on(run, monkeypatch):
    refused_by(monkeypatch, expired)
    with pytest.raises(launcher.UserError) as error:
        run.stop()
    [issue] = error.value.issues
    assert issue.found == f"{NAME} was NOT stopped and goes on: the AWS credentials have expired"
    assert issue.fix == f"renew them, for example with aws sso login; then launcher stop {NAME} tries again"
    assert run.state == "InProgress" and not run.folder.stop_request.exists()


def test_a_stop_that_is_interrupted_names_the_job_and_leaves_it_in_progress(run, monkeypatch, capsys):
    """Ctrl-C, S, the network hangs, Ctrl-C again."""
    refused_by(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.stop()
    reported = capsys.readouterr().err
    assert f"{NAME} was NOT stopped and goes on" in reported and f"launcher stop {NAME} tries again" in reported
    assert run.state == "InProgress"


def test_a_second_request_that_fails_leaves_the_first_one_in_force(run, monkeypatch):
    with monkeypatch.context() as answered:
        refused_by(answered, lambda **_: {})
        run.stop("the first")
    refused_by(monkeypatch, expired)
    with pytest.raises(launcher.UserError, match=f"{NAME} was asked to stop before, and may go on: .*expired"):
        run.stop("the second")
    assert run.state == "Stopping" and run.folder.read(run.folder.stop_request)["reason"] == "the first"


def test_a_stop_of_a_job_that_is_not_known_yet_is_sent_again_until_it_is(run, monkeypatch, capsys):
    """`launcher stop` right after an answer to CreateTrainingJob that was lost."""
    records.write_json(run.folder.remote, {"TrainingJobStatus": "InProgress", "sent": time.time(), "account": ""})
    asked: list[str] = []

    def known_the_third_time(TrainingJobName: str) -> None:
        asked.append(TrainingJobName)
        if len(asked) < 3:
            not_found()

    monkeypatch.setattr(aws, "SECONDS_BETWEEN_STOPS", 0)
    monkeypatch.setattr(session, "client", replacing("sagemaker", describe_training_job=not_found))
    refused_by(monkeypatch, known_the_third_time)
    run.stop("a test")
    assert asked == [NAME] * 3 and run.folder.stop_request.exists() and not run.folder.outcome.exists()
    assert capsys.readouterr().err.count("the stop is repeated for up to 60 s") == 1


def test_a_stop_of_a_job_that_is_none_of_this_account_is_not_repeated(run, monkeypatch, capsys):
    """A colleague's, sent days ago, in a folder that cannot be written."""
    asked: list[str] = []

    def unknown(TrainingJobName: str) -> None:
        asked.append(TrainingJobName)
        not_found()

    records.write_json(run.folder.remote, {"TrainingJobStatus": "InProgress", "sent": time.time() - 1e5})
    monkeypatch.setattr(follow, "refresh", lambda folder: False)
    refused_by(monkeypatch, unknown)
    with pytest.raises(launcher.UserError, match="SageMaker does not know such a job"):
        run.stop("a test")
    assert asked == [NAME] and "repeated" not in capsys.readouterr().err


@pytest.fixture(params=[errno.ENOSPC, errno.EACCES, errno.EROFS], ids=["full disk", "a colleague's", "read-only"])
def unwritable(run, request, monkeypatch) -> str:
    """Nothing can be written to the run's folder; returns the reason in words."""

    def refuses(file, *_, **__) -> None:
        raise OSError(request.param, os.strerror(request.param), str(file))

    monkeypatch.setattr(records, "write_json", refuses)
    monkeypatch.setattr(follow, "open", refuses, raising=False)
    monkeypatch.setattr(records, "open", refuses, raising=False)
    return os.strerror(request.param)


@pytest.mark.parametrize("is_being_created", [False, True])
def test_a_stop_that_cannot_be_noted_is_sent_all_the_same(run, unwritable, monkeypatch, capsys, is_being_created):
    """Whoever is creating the job would not see the request, so SageMaker is asked."""
    asked: list[str] = []
    refused_by(monkeypatch, lambda TrainingJobName: asked.append(TrainingJobName))
    with open(run.folder.lock, "wb") as lock:
        if is_being_created:
            fcntl.flock(lock, fcntl.LOCK_EX)
        run.stop("a test")
    assert asked == [NAME]
    assert f"{NAME}: SageMaker stops it; the request could not be noted in {run.folder.path}: {unwritable}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("unwritable", [errno.EACCES, errno.EPERM, errno.EROFS], indirect=True)
@pytest.mark.parametrize("was_asked", [False, True])
def test_the_command_does_not_wait_for_an_end_that_it_cannot_see(run, unwritable, monkeypatch, capsys, was_asked):
    """In a colleague's folder, whether or not they have asked the run to stop before."""
    if was_asked:
        run.folder.stop_request.write_text('{"reason": "the owner", "time": 0.0}')
    asked: list[str] = []
    refused_by(monkeypatch, lambda TrainingJobName: asked.append(TrainingJobName))
    monkeypatch.setattr("launcher.runner.run.Run.wait", lambda *_: pytest.fail("it waits"))
    assert main.main(["stop", NAME]) == 0 and asked == [NAME]
    assert f"its folder is another user's or read-only: {run.folder.path}\n" in capsys.readouterr().out


def test_a_stop_that_can_neither_be_noted_nor_sent_names_the_job_that_goes_on(run, unwritable, monkeypatch):
    refused_by(monkeypatch, expired)
    with pytest.raises(
        launcher.UserError, match=f"{NAME} was NOT stopped and goes on: the AWS credentials have expired"
    ):
        run.stop("a test")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_cannot_stop_the_job_says_so_and_ends_the_launcher(run, as_typed, monkeypatch, capsys, number):
    """In the middle of a request too, whose errors are kept as the run's trouble."""
    came = []

    def answered(**_) -> dict[str, str]:
        if not came:
            came.append(number)
            signal.raise_signal(number)
        return {"TrainingJobStatus": "InProgress"}

    refused_by(monkeypatch, expired)
    monkeypatch.setattr(session, "client", replacing("sagemaker", describe_training_job=answered))
    options.end_like_ctrl_c()
    assert foreground.follow_to_the_end(run, Namespace(logs=False, all=False)) == INTERRUPTED
    printed = capsys.readouterr()
    assert f"{NAME} was NOT stopped and goes on" in printed.err and f"{NAME} goes on; launcher attach" in printed.out


def test_a_signal_while_a_client_is_made_stops_the_job_and_follows_it_to_its_end(
    sagemaker_job, as_typed, aws_calls, monkeypatch
):
    """The launcher then holds a lock, which the request to stop needs. A client is made again once AWS has not answered."""
    make, came = boto3.Session.client, []

    def made(self, *names, **options):
        asked = ("sagemaker", "DescribeTrainingJob") in aws_calls.made
        if asked and session.ONE_AT_A_TIME.locked() and not came:
            came.append(names)
            signal.raise_signal(signal.SIGTERM)
        return make(self, *names, **options)

    monkeypatch.setattr(boto3.Session, "client", made)
    aws_calls.fail("DescribeTrainingJob", code="ExpiredTokenException")
    plan = launcher.plan(sagemaker_job(SLEEPS), on="aws")
    assert exit_code(plan) == RUN_FAILED and came
    assert described(plan.name)["TrainingJobStatus"] == "Stopped"
    assert launcher.attach(plan.name).outcome()["stop_reason"] == "launcher run received SIGTERM"


def test_a_second_sigterm_while_the_job_is_asked_to_stop_does_not_keep_it_from_that(run, as_typed, monkeypatch):
    """Who ends a job in CI sends SIGINT, and SIGTERM seconds later."""
    received, signals = [], iter([signal.SIGINT, signal.SIGTERM])

    def stop_training_job(**_) -> None:
        signal.raise_signal(next(signals))
        received.append(NAME)

    def idle(_) -> None:
        if received:
            records.write_json(run.folder.outcome, {"state": "Stopped"})
        else:
            signal.raise_signal(next(signals))

    options.end_like_ctrl_c()
    refused_by(monkeypatch, stop_training_job)
    monkeypatch.setattr(live._PlainLines, "idle", idle)
    assert live.follow(run) is True and received == [NAME]
    assert run.folder.read(run.folder.stop_request)["reason"] == "Ctrl-C"


def test_ctrl_c_while_following_counts_where_python_drops_its_exception(run, dropped_interrupt, monkeypatch, capsys):
    refused_by(monkeypatch, expired)
    monkeypatch.setattr(live._PlainLines, "idle", dropped_interrupt)
    assert live.follow(run) is True
    assert f"{NAME} was NOT stopped and goes on" in capsys.readouterr().err


@pytest.fixture
def studied(run, monkeypatch):
    """Follows the run as a study does, and returns what it said."""

    def follow(**options) -> list[str]:
        said: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            run_to_completion(lambda: run, log=said.append, interrupted=lambda: said.append("stopping"), **options)
        return said

    return follow


def test_ctrl_c_in_a_study_names_the_job_that_it_cannot_stop(run, studied, interrupt, monkeypatch):
    refused_by(monkeypatch, expired)
    said = studied(until=interrupt)
    assert said[0] == "stopping" and f"{NAME} was NOT stopped and goes on: the AWS credentials" in said[1]
    assert run.state == "InProgress"


def test_ctrl_c_in_a_study_counts_where_python_drops_its_exception(run, studied, dropped_interrupt, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("launcher.runner.run.Run.wait", lambda run, *_, **__: "InProgress")
    monkeypatch.setattr("launcher.runner.run.Run.stop", lambda run, reason: asked.append(reason))
    assert studied(until=dropped_interrupt) == ["stopping"] and asked == ["Ctrl-C"]


def test_a_limit_that_cannot_stop_the_job_at_first_stops_it_later_and_that_is_said_once(run, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(
        "launcher.runner.run.Run.wait", lambda run, *_, **__: "Stopped" if len(asked) > 2 else "InProgress"
    )

    def stop(run, reason):
        asked.append(reason)
        if len(asked) < 3:
            raise mistake("run", "AWS does not answer", "try again")

    monkeypatch.setattr("launcher.runner.run.Run.stop", stop)
    said: list[str] = []
    ended = run_to_completion(lambda: run, log=said.append, interrupted=lambda: None, until=lambda _: "long enough")
    assert ended is run and asked == 3 * ["long enough"] and len(said) == 1


def test_ctrl_c_while_a_limit_cannot_stop_the_job_tries_once_more(run, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("launcher.runner.run.Run.wait", lambda run, *_, **__: "InProgress")

    def stop(run, reason: str) -> None:
        asked.append(reason)
        if len(asked) == 2:
            raise KeyboardInterrupt
        raise mistake("stop", f"{NAME} was NOT stopped", "again")

    monkeypatch.setattr("launcher.runner.run.Run.stop", stop)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_to_completion(
            lambda: run, log=said.append, interrupted=lambda: said.append("stopping"), until=lambda _: "long enough"
        )
    assert asked == ["long enough", "long enough", "Ctrl-C"] and "stopping" in said


def test_a_limit_that_cannot_stop_the_job_is_reported_once(run, monkeypatch):
    refused_by(monkeypatch, expired)
    monkeypatch.setattr("launcher.runner.run_to_completion.STOP_AGAIN", -1.0)
    said: list[str] = []
    with pytest.raises(launcher.UserError, match=f"{NAME} was NOT stopped and goes on"):
        run_to_completion(lambda: run, log=said.append, interrupted=lambda: None, until=lambda _: "long enough")
    assert said == []


def test_ctrl_c_while_following_names_the_job_that_it_cannot_stop(run, interrupt, monkeypatch, capsys):
    refused_by(monkeypatch, expired)
    monkeypatch.setattr(live._PlainLines, "idle", interrupt)
    assert live.follow(run) is True
    assert f"{NAME} was NOT stopped and goes on: the AWS credentials" in capsys.readouterr().err

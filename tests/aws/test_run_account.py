"""Runs that are looked at with the credentials of another account, or under an emulator, which both answer that there is no such job."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

import launcher
from launcher.aws import follow, session
from launcher.record import records
from tests.aws.conftest import REGION, SLEEPS, is_ready, not_found, replacing, started
from tests.conftest import wait_until
from tests.launcher.test_store import recorded

ELSEWHERE = "999999999999"


@pytest.fixture
def run(sagemaker_job, monkeypatch) -> launcher.Run:
    """A run whose job its account knows for long."""
    run = started(sagemaker_job(SLEEPS))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    monkeypatch.setattr(follow, "UNKNOWN_SECONDS", 0)
    yield run
    session.forget_clients()
    run.stop()
    assert run.wait(60) == "Stopped", "it could be stopped, and its results fetched, with the right credentials"


def looked_at(run: launcher.Run, monkeypatch, account: str = ELSEWHERE) -> launcher.Run:
    """The run as credentials of another account find it."""
    client = replacing("sagemaker", describe_training_job=not_found, stop_training_job=not_found)
    monkeypatch.setattr(session, "client", client)
    monkeypatch.setattr(session, "client", replacing("sts", get_caller_identity=lambda: {"Account": account}))
    return launcher.attach(run.name)


def test_a_look_with_another_accounts_credentials_leaves_the_run_alone(run, monkeypatch):
    with monkeypatch.context() as other:
        seen = looked_at(run, other)
        assert seen.state == "InProgress" and not run.folder.outcome.exists()
        assert f"of account {ELSEWHERE}, and the job is in 123456789012; set AWS_PROFILE" in seen.trouble
        with pytest.raises(launcher.UserError, match=f"{run.name} was NOT stopped and goes on: .*{ELSEWHERE}"):
            seen.stop()
        assert seen.state == "InProgress"


def test_before_sagemakers_first_answer_the_account_that_it_was_sent_to_is_compared(run, monkeypatch):
    known = run.folder.read(run.folder.remote)
    with monkeypatch.context() as other:
        sent = {name: known[name] for name in ("TrainingJobStatus", "sent", "account", "emulator")}
        records.write_json(run.folder.remote, sent)
        seen = looked_at(run, other)
        assert seen.state == "InProgress" and ELSEWHERE in seen.trouble
    records.write_json(run.folder.remote, known)


def test_a_run_of_an_earlier_version_is_compared_by_its_arn(run, monkeypatch):
    known = run.folder.read(run.folder.remote)
    with monkeypatch.context() as other:
        old = {name: value for name, value in known.items() if name not in ("account", "emulator")}
        records.write_json(run.folder.remote, old)
        seen = looked_at(run, other)
        assert seen.state == "InProgress" and ELSEWHERE in seen.trouble
    records.write_json(run.folder.remote, known)


def test_a_job_found_by_its_region_has_its_account_from_the_first(run, monkeypatch, tmp_path):
    with monkeypatch.context() as another_machine:
        another_machine.setenv("LAUNCHER_RUNS", str(tmp_path / "another machine"))
        adopted = launcher.attach(run.name, region=REGION)
        seen = looked_at(adopted, another_machine)
        assert seen.state == "InProgress" and ELSEWHERE in seen.trouble


def test_a_job_at_aws_is_not_looked_for_on_an_emulator(run, monkeypatch):
    known = run.folder.read(run.folder.remote)
    with monkeypatch.context() as emulated:
        records.write_json(run.folder.remote, {**known, "emulator": ""})
        seen = looked_at(run, emulated, account="123456789012")
        assert seen.state == "InProgress"
        assert "and the job is on AWS; unset AWS_ENDPOINT_URL" in seen.trouble
    records.write_json(run.folder.remote, known)


@pytest.mark.parametrize("other", ["", "http://127.0.0.1:9"])
def test_a_job_on_an_emulator_is_not_looked_for_elsewhere_while_that_runs(run, monkeypatch, emulator, other):
    with monkeypatch.context() as elsewhere:
        seen = looked_at(run, elsewhere)
        elsewhere.setenv("AWS_ENDPOINT_URL", other)
        assert seen.state == "InProgress"
        assert f"the job is on the SageMaker emulator at {emulator.url}; export the variables" in seen.trouble


@pytest.fixture
def closed_address() -> Iterator[str]:
    """Where nobody listens, and nobody else can meanwhile."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(("account", "state"), [("123456789012", "Failed"), (ELSEWHERE, "InProgress")])
def test_the_jobs_of_an_emulator_end_with_it(account, state, connected, closed_address, monkeypatch):
    """Not those of a real account behind an address on this machine, a tunnel's for example."""
    folder = recorded("test", state="", backend="aws", job={"name": "test", "region": REGION})
    known = {"TrainingJobStatus": "InProgress", "sent": 1.0, "account": account, "emulator": closed_address}
    records.write_json(folder.remote, known)
    seen = looked_at(launcher.attach("test"), monkeypatch)
    assert seen.state == state
    assert "emulator" in (seen.outcome().get("failure") or seen.trouble)

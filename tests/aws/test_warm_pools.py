"""The hosts that a job with `keep_alive_minutes` leaves: said at its end, with what they cost, and ended by `launcher stop`."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone

import boto3
import pytest

import launcher
from launcher.aws import warm_pool
from launcher.commands import main
from launcher.commands.foreground import print_end
from launcher.record.records import RunFolder
from launcher.runner.run import Run
from tests.aws.conftest import REGION, SLEEPS, described, is_ready, started
from tests.conftest import wait_until
from tests.launcher.test_store import recorded

SIX_HOURS = {"keep_alive_minutes": 360}


def typed(capsys, *words: str) -> str:
    """What a command prints."""
    assert main.main([*words]) == 0
    return capsys.readouterr().out


def updates(calls) -> int:
    return calls.made.count(("sagemaker", "UpdateTrainingJob"))


def test_a_stopped_job_says_that_its_hosts_stay_and_a_second_stop_ends_them(sagemaker_job, aws_calls, capsys):
    run = started(sagemaker_job(SLEEPS, compute={**SIX_HOURS, "instance_count": 2}))
    wait_until(lambda: is_ready(run), 60, "the script's line")
    assert run.remaining_costs == "", "as long as it runs"
    said = typed(capsys, "stop", run.name)
    stays = re.search(
        r"2 hosts stay until (\d\d:\d\d) UTC, at most \$(\S+) more; to end that: launcher stop (\S+)\n", said
    )
    assert stays is not None, said
    assert re.search(r": Stopped after \d+ s \(launcher stop\) for \$\S+ without the warm pool\n", said), said
    until = datetime.fromisoformat(run.outcome()["ended"]) + timedelta(hours=6)
    assert stays[1] == f"{until:%H:%M}" and stays[3] == run.name
    assert float(stays[2]) == pytest.approx(6 * 2 * 0.23, abs=0.02)
    assert updates(aws_calls) == 0, "a similar job may be about to take them"
    assert f"\n  warm pool   {run.remaining_costs}\n" in typed(capsys, "show", run.name)

    ended = typed(capsys, "stop", run.name)
    assert re.fullmatch(rf"ended the warm pool of {run.name}: 2 hosts stayed for \S+( \S+)+, about \$\S+\n", ended)
    assert updates(aws_calls) == 1
    assert described(run.name)["WarmPoolStatus"]["Status"] == "Terminated"
    assert run.remaining_costs == ""
    assert typed(capsys, "stop", run.name) == f"{run.name} is over: Stopped\n"
    assert updates(aws_calls) == 1
    assert "\n  warm pool   cost $" in typed(capsys, "show", run.name)
    seconds = described(run.name)["WarmPoolStatus"]["ResourceRetainedBillableTimeInSeconds"]
    outcome = run.outcome()
    assert outcome["warm_pool_seconds"] == seconds
    assert outcome["warm_pool_usd"] == pytest.approx(seconds / 3600 * 2 * 0.23, abs=1e-4)
    assert run.cost == pytest.approx(outcome["cost_usd"] + outcome["warm_pool_usd"])


def test_the_bill_of_a_warm_pool_is_asked_for_until_its_hosts_are_gone(sagemaker_job, done_at_once, aws_calls, capsys):
    run = started(sagemaker_job("print('done')", compute={"keep_alive_minutes": 60}))
    assert run.wait(120) == "Completed"
    assert run.usd_after_end == pytest.approx(0.23), "an hour, as long as nobody knows better"
    assert "warm_pool_usd" not in run.outcome()
    typed(capsys, "show", run.name)
    assert "warm_pool_usd" not in run.outcome(), "they are still there"
    client = boto3.client("sagemaker", region_name=REGION)
    client.update_training_job(TrainingJobName=run.name, ResourceConfig={"KeepAlivePeriodInSeconds": 0})
    shown = json.loads(typed(capsys, "show", run.name, "--json"))
    assert 0 < run.usd_after_end == run.outcome()["warm_pool_usd"] < 0.23
    assert shown["spent_usd"] == run.cost
    asked = len(aws_calls.made)
    typed(capsys, "show", run.name)
    assert len(aws_calls.made) == asked, "it is known"


@pytest.mark.parametrize("closed", [True, False], ids=["its emulator was closed", "the job was deleted"])
def test_a_warm_pool_of_which_nobody_knows_any_more_is_settled(tmp_path, connected, monkeypatch, closed):
    folder = over(tmp_path, {"Status": "Available"}, price={"usd_per_hour": 130.0}, account="123456789012")
    folder.outcome.write_text(json.dumps({"state": "Stopped", "cost_usd": 1.0}))
    assert warm_pool.usd_at_most(folder) == 130.0
    if closed:
        monkeypatch.setattr("launcher.aws.accounts.was_emulated", lambda known: True)
        monkeypatch.setattr(warm_pool.session, "client", None)  # it is not asked
    warm_pool.settle(folder)
    assert warm_pool.usd_at_most(folder) == 0 and warm_pool.of(folder) is None


def test_a_run_whose_results_are_still_to_be_fetched_gets_no_outcome_from_its_warm_pool(tmp_path, monkeypatch):
    folder = over(tmp_path, {"Status": "Available"}, price={"usd_per_hour": 130.0})

    class Client:
        def describe_training_job(self, TrainingJobName):
            return {"WarmPoolStatus": {"Status": "Available"}}

        def update_training_job(self, **changes):
            pass

    monkeypatch.setattr(warm_pool.session, "client", lambda service, region: Client())
    assert "2 hosts stayed for 30 min" in warm_pool.end(folder)
    assert not folder.outcome.exists(), "nobody would fetch them"


def test_another_accounts_warm_pool_stays_unsettled(tmp_path, connected):
    folder = over(tmp_path, {"Status": "Available"}, price={"usd_per_hour": 130.0}, account="210987654321")
    folder.outcome.write_text(json.dumps({"state": "Stopped"}))
    with pytest.raises(launcher.UserError, match="these credentials are of account 123456789012"):
        warm_pool.settle(folder)
    assert warm_pool.usd_at_most(folder) == 130.0


def test_the_end_of_a_run_whose_hosts_are_gone_tells_all_that_it_cost(tmp_path, capsys):
    folder = over(tmp_path, {"Status": "Terminated"})
    folder.outcome.write_text(json.dumps({"state": "Stopped", "cost_usd": 5.0, "warm_pool_usd": 36.0}))
    print_end(Run(folder))
    assert f"{folder.name}: Stopped for $41.00\n" in capsys.readouterr().out


def test_where_sagemaker_does_not_answer_a_run_is_shown_without_the_bill_of_its_warm_pool(
    sagemaker_job, done_at_once, aws_calls, capsys
):
    run = started(sagemaker_job("print('done')", compute={"keep_alive_minutes": 60}))
    assert run.wait(120) == "Completed"
    aws_calls.fail("DescribeTrainingJob", code="AccessDeniedException", message="not authorized to describe")
    assert "\n  not checked not allowed: not authorized to describe" in typed(capsys, "show", run.name)


def test_a_failed_jobs_hosts_stay_until_aws_lets_them_go(sagemaker_job, aws_calls, capsys):
    run = started(sagemaker_job("raise SystemExit('no data')", compute=SIX_HOURS))
    assert run.wait(120) == "Failed"
    assert main.main(["attach", run.name]) == 1
    assert "1 host stays until " in capsys.readouterr().out
    aws_calls.fail(
        "UpdateTrainingJob", code="AccessDeniedException", message="not authorized to perform: UpdateTrainingJob"
    )
    with pytest.raises(launcher.UserError, match="not authorized to perform: UpdateTrainingJob"):
        run.release()
    assert run.remaining_costs, "it was not ended"
    assert run.release().startswith(f"ended the warm pool of {run.name}: 1 host stayed for ")


def test_a_run_without_a_warm_pool_asks_aws_for_nothing(sagemaker_job, done_at_once, aws_calls, capsys):
    run = started(sagemaker_job("print('done')"))
    assert run.wait(120) == "Completed"
    asked = len(aws_calls.made)
    assert typed(capsys, "stop", run.name) == f"{run.name} is over: Completed\n"
    assert len(aws_calls.made) == asked


# -- by SageMaker's last answer ---------------------------------------------------------------------------------------


def over(tmp_path, status: dict | None, *, kept: int = 3600, price: dict | None = None, **remote) -> RunFolder:
    """The folder of a run on two hosts that ended half an hour ago."""
    folder = RunFolder(tmp_path / "pool-20260101-000000-abcd")
    folder.path.mkdir()
    ended = (datetime.now(timezone.utc) - timedelta(minutes=30)).isoformat()
    hosts = [{"name": "algo-1"}, {"name": "algo-2"}]
    job = {"name": "pool", "region": REGION}
    plan = {"name": folder.name, "planned": ended, "backend": "aws", "job": job, "hosts": hosts, "price": price}
    known = {
        "TrainingJobStatus": "Stopped",
        "TrainingEndTime": ended,
        "ResourceConfig": {"KeepAlivePeriodInSeconds": kept},
        **({"WarmPoolStatus": status} if status else {}),
        **remote,
    }
    folder.plan.write_text(json.dumps(plan))
    folder.remote.write_text(json.dumps(known))
    return folder


@pytest.mark.parametrize("status", ["Available", "InUse"])
def test_what_a_warm_pool_costs_at_most_is_the_rest_of_its_time(tmp_path, status):
    folder = over(tmp_path, {"Status": status}, price={"usd_per_hour": 130.0})
    said = re.fullmatch(
        r"2 hosts stay until (\S+) UTC, at most \$(\S+) more; to end that: .*", warm_pool.text_of(folder)
    )
    until = datetime.fromisoformat(folder.read(folder.remote)["TrainingEndTime"]) + timedelta(hours=1)
    assert said[1] == f"{until:%H:%M}"
    assert 64 <= float(said[2]) <= 65, "half an hour of two hosts"


def test_without_a_price_it_is_said_that_they_are_billed(tmp_path):
    assert " UTC, billed; to end that: launcher stop " in warm_pool.text_of(over(tmp_path, {"Status": "Available"}))


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        ({"Status": "Reused", "ReusedByJob": "next"}, {}),
        ({"Status": "Terminated"}, {}),
        (None, {}),
        ({"Status": "Available"}, {"kept": 1700}),
        ({"Status": "Available"}, {"TrainingJobStatus": "Stopping"}),
    ],
    ids=["another job has them", "they are gone", "there were none", "their time is over", "the job is not over"],
)
def test_no_warm_pool_is_claimed_where_none_is_paid(tmp_path, status, changes):
    assert warm_pool.of(over(tmp_path, status, **changes)) is None


def test_hosts_that_another_job_has_taken_meanwhile_are_left_to_it(tmp_path, connected, monkeypatch):
    folder = over(tmp_path, {"Status": "Available"})

    class Client:
        """SageMaker, half an hour later."""

        def describe_training_job(self, TrainingJobName):
            return {"WarmPoolStatus": {"Status": "Reused", "ReusedByJob": "the-next-job"}}

    monkeypatch.setattr(warm_pool.session, "client", lambda service, region: Client())
    assert warm_pool.end(folder) == f"the warm pool of {folder.name} is gone already: Reused by the-next-job"
    assert warm_pool.of(folder) is None


def test_a_jobs_name_ends_the_warm_pool_of_its_latest_run_that_left_one(store, connected, monkeypatch, capsys):
    store.mkdir()
    folder = over(store, {"Status": "Available"})
    folder.outcome.write_text(json.dumps({"state": "Completed"}))
    recorded("pool-20260101-000001-abcd", state="Failed")

    class Client:
        def describe_training_job(self, TrainingJobName):
            return {"WarmPoolStatus": {"Status": "Reused", "ReusedByJob": "the-next-job"}}

    monkeypatch.setattr(warm_pool.session, "client", lambda service, region: Client())
    assert f"the warm pool of {folder.name} is gone" in typed(capsys, "stop", "pool")


@pytest.mark.parametrize("words", [["rm", "pool-20260101-000000-abcd"], ["prune", "--older-than", "1h"]])
def test_a_run_whose_hosts_are_still_billed_is_not_removed(store, monkeypatch, capsys, words):
    store.mkdir()
    folder = over(store, {"Status": "Available"})
    folder.outcome.write_text(json.dumps({"state": "Completed"}))
    asked = main.main([*words, "--yes"])
    reported = capsys.readouterr()
    assert folder.path.is_dir()
    if words[0] == "rm":
        assert (
            asked == 2
            and f"launcher stop {folder.name}, then remove it" in reported.err
            and "2 hosts stay until" in reported.err
        )
    else:
        assert asked == 0 and "1 in use" in reported.out

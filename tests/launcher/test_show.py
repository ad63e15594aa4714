"""`launcher show` for people: units, rounded numbers, nothing in Python's spelling, the room a run takes, and what to do next."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone

import pytest

import launcher
from launcher.commands import runs as runs_command
from launcher.commands.main import main
from launcher.commands.show import print_run
from launcher.show.text import duration, shown
from tests.launcher.test_store import recorded

SCRIPT = """
import json, os, pathlib
output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"]) / "algo-1"
output.mkdir(parents=True, exist_ok=True)
(output / "result.json").write_text(json.dumps(RESULT))
"""

RESULT = {
    "validation_accuracy": 0.56888888, "loss": 1.29208886951, "parameters": 2519978, "stopped": False, "images_per_second": None,
    "hardware": {"cores": 2, "cpu": "a CPU"}, "classes": ["a", "b"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min"),
        (750.9, "12 min 30 s"),
        (3600, "1 h"),
        (11_100, "3 h 5 min"),
        (187_200, "2 d 4 h"),
        (float("nan"), "-"),
        (float("inf"), "-"),
        (10**400, f"{10**400 // 86400} d {10**400 % 86400 // 3600} h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_values_are_shown_as_people_write_them():
    assert {name: shown(name, value) for name, value in RESULT.items()} == {
        "validation_accuracy": "56.89 %",
        "loss": "1.292",
        "parameters": "2,519,978",
        "stopped": "no",
        "images_per_second": "not measured",
        "hardware": "cores 2, cpu a CPU",
        "classes": "a, b",
    }
    assert shown("accuracy", 1.5) == "1.5", "what is no share is left as it is"


def test_a_run_is_shown_with_its_room_and_the_next_command(script_job, capsys, monkeypatch):
    run = launcher.run(
        launcher.plan(script_job(SCRIPT.replace("RESULT", repr(RESULT)), hyperparameters={"a": {"b": [1, 2]}}))
    )
    assert run.wait(60) == "Completed"
    monkeypatch.chdir(run.folder.path.parent)
    print_run(run)
    text = capsys.readouterr().out
    assert (
        "  result      validation accuracy: 56.89 %\n" in text
        and "  result      hardware: cores 2, cpu a CPU\n" in text
    )
    assert "{'" not in text and "None" not in text and "False" not in text
    assert re.search(rf"  folder      {re.escape(str(run.folder.path))}, [\d.]+ [kM]B\n", text)
    assert re.search(r"  planned     \d{4}-\d\d-\d\d \d\d:\d\d UTC\n", text) and re.search(
        r"  took        [\d.]+ s\n", text
    )
    assert (
        f"  file        metrics: {run.name}/metrics.jsonl\n" in text
        or f"  file        log algo-1: {run.name}/logs/algo-1.log\n" in text
    )
    assert text.rstrip().endswith(f"  next        launcher diagnose {run.name}")


def test_a_failed_run_is_followed_by_its_log_and_how_to_go_on(script_job, capsys):
    run = launcher.run(launcher.plan(script_job("raise SystemExit(3)")))
    assert run.wait(60) == "Failed"
    print_run(run)
    text = capsys.readouterr().out
    assert f"  next        launcher logs {run.name}\n  next        launcher replay {run.name}\n" in text
    left = run.folder.checkpoints("algo-1") / "last.pt"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()
    print_run(run)
    assert f"  next        launcher resume {run.name}\n" in capsys.readouterr().out


def test_a_stopped_run_is_shown_with_the_reason_and_not_as_failed(capsys):
    folder = recorded("job-20260101-000000-abcd", git={})
    reason = "compute.max_hours (0.002 h) was reached"
    outcome = {"state": "Stopped", "stop_reason": reason, "failed_host": "algo-1", "exit_code": -15}
    folder.outcome.write_text(json.dumps({**outcome, "failure": "the script printed nothing (killed by SIGTERM)"}))
    print_run(launcher.Run(folder))
    text = capsys.readouterr().out
    assert f"  state       Stopped ({reason})\n" in text and "failed" not in text and "SIGTERM" not in text


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("fatal: not a git repository (or any of the parent directories): .git", "none (not in a git repository)"),
        ("git is not installed", "not known: git is not installed"),
    ],
)
def test_a_run_without_a_commit_says_why(reason, said, capsys):
    folder = recorded("job-20260101-000000-abcd")
    folder.git.write_text(json.dumps({"commit": None, "reason": reason}))
    print_run(launcher.Run(folder))
    assert f"  commit      {said}\n" in capsys.readouterr().out


RESUMED = "resuming from the checkpoint of step 180\n"


@pytest.mark.parametrize(
    ("plan", "log", "epochs", "each"),
    [
        ({}, RESUMED + "epoch 19/20 step 190/200 loss 1.0\n", (19, 19, 20), "$1.50"),
        ({"resumes": "spot-20251231-000000-abcd"}, "its own words\n", (19, 19, 20), "$1.50"),
        ({}, "epoch 1/20 step 10/200 loss 1.0\n" + RESUMED, (19, 19, 20), "$0.15"),
        ({}, "epoch 2/80 step 10/400 loss 1.0\n", range(2, 81, 2), "$0.0375"),
        ({}, "", (1, 2), "$1.50"),
    ],
    ids=["resumed", "resumed by its plan", "interrupted", "short epochs", "observed"],
)
def test_an_epoch_costs_its_share_of_those_that_the_run_trained(plan, log, epochs, each, capsys):
    folder = recorded("spot-20260101-000000-abcd", price={"text": "at most $9.00"}, git={}, **plan)
    folder.outcome.write_text(json.dumps({"state": "Completed", "cost_usd": 3.0}))
    folder.metrics.write_text("".join(f'{{"rank": 0, "epoch": {epoch}, "step": {epoch}}}\n' for epoch in epochs))
    folder.log("algo-1").write_text(log)
    print_run(launcher.Run(folder))
    assert f"  cost        $3.00, {each} an epoch\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "hyperparameters"), [("Stopped", {}), ("Failed", {}), ("Completed", {"max_steps": "9"})]
)
def test_a_run_that_ended_within_an_epoch_has_no_price_of_one(state, hyperparameters, capsys):
    folder = recorded(
        "job-20260101-000000-abcd", price={"text": "at most $9.00"}, git={}, hyperparameters=hyperparameters
    )
    folder.outcome.write_text(json.dumps({"state": state, "cost_usd": 5.0, "failure": "lost"}))
    folder.metrics.write_text('{"rank": 0, "epoch": 1, "step": 9}\n')
    print_run(launcher.Run(folder))
    assert "  cost        $5.00\n" in capsys.readouterr().out


@pytest.mark.parametrize("spot", [False, True])
def test_what_a_job_has_spent_is_on_demand_and_of_spot_hosts_an_upper_bound(spot, capsys):
    started = (datetime.now(timezone.utc) - timedelta(hours=1)).isoformat()
    price = {"text": "at most $9.00", "usd_per_hour": 3000.0}
    request = {"OutputDataConfig": {"S3OutputPath": "s3://bucket/runs"}, "EnableManagedSpotTraining": spot}
    job = {"name": "far", "region": "us-east-1"}
    folder = recorded("far-20260101-000000-abcd", state="", backend="aws", job=job, price=price, request=request)
    folder.remote.write_text(json.dumps({"TrainingJobStatus": "InProgress", "TrainingStartTime": started}))
    run = launcher.Run(folder)
    run._ask_at = float("inf")  # SageMaker is not asked
    print_run(run)
    short = rf"{'at most ' if spot else ''}\$3,0\d\d\.\d\d so far"
    said = f"{short}, on demand: spot costs less" if spot else short
    assert re.search(f"^  spent       {said}$", capsys.readouterr().out, re.MULTILINE)
    assert re.fullmatch(short, runs_command._cost(run, {}))


@pytest.mark.parametrize("command", ["show", "compare"])
def test_numbers_that_json_does_not_have_are_null(command, capsys):
    folder = recorded("nan-20260101-000000-abcd", source="/nowhere")
    result = folder.host("algo-1") / "output/data/algo-1/result.json"
    result.parent.mkdir(parents=True)
    result.write_text('{"loss": NaN, "accuracies": [1.5, -Infinity], "of": {"student": Infinity}}')
    assert main([command, folder.name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    [of_run] = found if command == "compare" else [found]
    assert of_run["result"] == {"loss": None, "accuracies": [1.5, None], "of": {"student": None}}


def test_a_damaged_metric_line_is_no_epoch(capsys):
    folder = recorded("whole-20260101-000000-abcd", price={"text": "at most $9.00"}, git={})
    folder.outcome.write_text(json.dumps({"state": "Completed", "cost_usd": 3.0}))
    folder.metrics.write_text(f'{{"rank": 0, "epoch": 2, "step": 2}}\n{{"rank": 0, "epoch": {10**320}, "step": 3}}\n')
    print_run(launcher.Run(folder))
    assert "  cost        $3.00, $1.50 an epoch\n" in capsys.readouterr().out

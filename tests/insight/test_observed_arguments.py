"""An observed run with its config or command: which argument of it a line takes, and what advice on a config is for."""

from __future__ import annotations

import re

import pytest

from launcher.commands.compare import learned_from, print_comparison
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.measurements import read
from launcher.record import records
from launcher.record.records import RunFolder
from launcher.runner.run import Run
from tests.insight.observed import loader, observed
from tests.insight.test_observed_runs import CROWD
from tests.insight.test_rules import CPU, PLANTED


def run_folder(store, job: dict, planted: dict, *setups, command=("python", "train.py")) -> RunFolder:
    """A run in the store, with what the observer wrote of it."""
    folder = RunFolder(store / job["name"])
    folder.path.mkdir(parents=True)
    plan = {
        "name": job["name"],
        "planned": "2026-11-22T10:00:00+00:00",
        "hosts": [{"name": "algo-1", "command": [*command]}],
    }
    records.write_json(folder.outcome, {"state": "Completed", "seconds": 60.0})
    observed(folder.host("algo-1") / "output/data/launcher-observer", planted, *setups)
    records.write_json(folder.plan, {**plan, "backend": "process" if "script" in job else "watch", "job": job})
    return folder


def test_a_hyperparameter_that_the_line_takes_is_named_with_it(store):
    values = {"workers": 16, "batch": 256, "depth": 16}
    job = {"name": "mine", "script": "train.py", "source": "src", "hyperparameters": values}
    found = Diagnosis(read(str(run_folder(store, job, CROWD).path)))
    assert "set num_workers=2, in the config hyperparameters.workers=2 (" in str(found.findings[0].fixes[0])
    assert found.measurements.settings["hyperparameters.depth"] == 16, "by its own name: no rule takes it for another"


@pytest.mark.parametrize("option", [["--workers", "16"], ["--workers=16"]], ids=" ".join)
def test_an_option_of_a_watched_command_that_the_line_takes_is_named_with_it(option, store):
    command = ["python", "train.py", *option, "--batch", "256", "--amp"]
    found = Diagnosis(read(str(run_folder(store, {"name": "watched"}, CROWD, command=command).path)))
    assert "set num_workers=2, in the command --workers=2 (" in str(found.findings[0].fixes[0])
    assert found.measurements.settings["--workers"] == "16"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"workers": 8}, "DataLoader(data, num_workers=args.workers)"),
        ({"workers": 16, "num_workers": 16}, "DataLoader(data, num_workers=args.workers)"),
        ({"workers": 16}, "loader = DataLoader("),
        ({"num_workers": 16}, "DataLoader(data, num_workers=16)"),
    ],
    ids=["another value", "two of them", "a line that does not say", "a number on the line"],
)
def test_a_hyperparameter_that_may_be_another_is_not_named(values, text, store):
    job = {"name": "mine", "script": "train.py", "source": "src", "hyperparameters": values}
    folder = run_folder(store, job, CROWD, {**loader(num_workers=16, batch_size=256), "text": text})
    found = Diagnosis(read(str(folder.path)))
    assert "set num_workers=2 (" in str(found.findings[0].fixes[0])


def test_advice_on_a_config_is_for_runs_that_have_one(store):
    slow = PLANTED["storage_bound", "far storage, no I/O wait"]
    mine = read(str(run_folder(store, {"name": "mine", "script": "train.py", "source": "src"}, slow).path))
    watched = read(str(run_folder(store, {"name": "watched"}, slow).path))
    assert "FSx for Lustre" in str(Diagnosis(mine)) and "FSx for Lustre" not in str(Diagnosis(watched))
    assert mine.script.by_launcher and not watched.script.by_launcher


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "labels"),
        ({"hard_label_weight": 1}, "labels"),
        ({"hard_label_weight": 0}, "teacher"),
        ({"hard_label_weight": 0.25}, "labels 0.25 + teacher 0.75"),
        ({"hard_label_weight": 1, "teacher_loss_weight": 2}, "labels 1 + teacher 2"),
        ({"hard_label_weight": 1, "features": {"weight": 5}}, "labels 1 + features 5"),
    ],
)
def test_a_comparison_says_what_each_run_learned_from(settings, text):
    assert learned_from(settings) == text


def test_runs_are_compared_by_what_the_observer_saw(store, capsys):
    quick = {name: seconds / 2 for name, seconds in CPU.items()}
    runs = [Run(run_folder(store, {"name": name}, dict(phases=phases))) for name, phases in (("a", CPU), ("b", quick))]
    print_comparison(runs)
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0][-4:] == ["accuracy", "s/step", "images/s", "seconds"]
    first, second = (dict(zip(rows[0], row)) for row in rows[2:4])
    assert first["model"] == "ResNet" and float(first["s/step"]) == pytest.approx(2 * float(second["s/step"]), rel=0.05)
    assert float(second["images/s"]) == pytest.approx(256 / float(second["s/step"]), rel=0.05)


def test_a_flag_has_no_value_of_the_option_behind_it(store):
    """Else two runs whose options stand in another order differ in it, and have no control."""
    orders = ["--amp --batch 256 --shift -1 --workers 16", "--amp --workers 2 --shift -1 --batch 256 --last"]
    before, after = (
        Diagnosis(
            read(
                str(
                    run_folder(
                        store, {"name": f"run-{number}"}, CROWD, command=("python", "train.py", *text.split())
                    ).path
                )
            )
        )
        for number, text in enumerate(orders)
    )
    for one in (before, after):
        assert one.measurements.settings["--amp"] == "" and one.measurements.settings["--shift"] == "-1"
    changed = {name for name, *_ in Comparison(before, after).changed()}
    assert {name for name in changed if name.startswith("--")} == {"--workers", "--last"}

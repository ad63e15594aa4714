"""The same command again: an unfinished run of the same job and code is named, and resumed where that is wanted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.runner.unfinished import unfinished
from tests.conftest import SLEEPER, wait_for_ready
from tests.launcher.test_commands import Terminal, typed
from tests.launcher.test_replay import COUNTS, begins, over


def latest() -> launcher.Run:
    return launcher.runs()[-1]


@pytest.fixture
def config(tmp_path, script_job) -> str:
    """A job that fails at first, and completes once it has resumed."""
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(script_job(COUNTS).model_dump(exclude_none=True)))
    return str(file)


@pytest.mark.slow
def test_the_same_command_again_names_the_run_and_resumes_it_when_told(config):
    assert typed("run", config).returncode == 1
    first = latest()
    again = typed("run", config)
    found = f"{first.name}, of the same job and code, is Failed and can be resumed: launcher resume {first.name},"
    assert f"{found} or this command with --resume auto. This is a new run\n" in again.stderr
    second = latest()
    assert begins(second) == {"algo-1": "0"} and second.name != first.name
    assert "resume" not in typed("run", config, "--resume", "never").stderr
    third = latest()
    resumed = typed("run", config, "--resume", "auto")
    assert f"resumes {third.name} from its last checkpoint\n" in resumed.stdout and resumed.returncode == 0
    assert begins(latest()) == {"algo-1": "1"}
    anew = typed("run", config, "--resume", "auto")
    assert "resume" not in anew.stdout + anew.stderr and begins(latest()) == {"algo-1": "0"}, "the latest had completed"


@pytest.mark.parametrize(("answer", "count"), [("r\n", "1"), ("\n", "0")])
def test_in_a_terminal_it_asks(config, answer, count):
    first = over(launcher.plan(launcher.load(config)))
    terminal = Terminal("run", config)
    terminal.until(
        f"{first.name}, of the same job and code, is Failed and can be resumed. Resume it, or start a new run? [r/N]"
    )
    terminal.type(answer)
    terminal.until("Completed" if count == "1" else "Failed after")
    assert begins(latest()) == {"algo-1": count}


def test_who_gives_no_answer_wants_neither(config):
    first = over(launcher.plan(launcher.load(config)))
    terminal = Terminal("run", config)
    terminal.until("[r/N]")
    terminal.type("\x04")
    assert terminal.exit_code() == 130 and latest().name == first.name


def test_what_makes_the_same_job_and_code(script_job, tmp_path):
    job = script_job(COUNTS, environment={"HF_TOKEN": "hf_one", "FLAG": "1"}, hyperparameters={"rate": 0.1})
    run = over(launcher.plan(job))
    moved = shutil.copytree(job.source, tmp_path / "moved")
    same = [
        job,
        job.model_copy(update={"source": str(moved)}),
        job.model_copy(update={"environment": {"HF_TOKEN": "hf_two", "FLAG": "1"}}),
        launcher.load(run.folder.job, ["environment.HF_TOKEN=hf_three"]),
    ]
    others = [
        job.model_copy(update={"name": "other"}),
        job.model_copy(update={"environment": {"HF_TOKEN": "hf_one", "FLAG": "2"}}),
        job.model_copy(update={"hyperparameters": {"rate": 0.2}}),
        job.model_copy(update={"compute": job.compute.model_copy(update={"instance_count": 2})}),
    ]
    assert [launcher.resume_unfinished(launcher.plan(each)).resumes for each in same] == [run.name] * 4
    assert [launcher.resume_unfinished(launcher.plan(each)).resumes for each in others] == [None] * 4
    Path(moved, "script.py").write_text("print('changed')\n")
    assert launcher.resume_unfinished(launcher.plan(same[1])).resumes is None
    Path(job.source, "more.py").write_text("")
    assert unfinished(launcher.plan(job)) is None, "a file more is other code too"


def test_a_run_that_ended_before_its_first_checkpoint_is_passed_over(script_job):
    text = """
        import pathlib, sys
        checkpoints = pathlib.Path('../checkpoints')
        (checkpoints / ('.writing' if pathlib.Path('{}').exists() else 'step-1')).mkdir()
        sys.exit(1)
    """
    mark = Path(os.environ["LAUNCHER_RUNS"] + "-mark")
    job = script_job(text.format(mark))
    left_one = over(launcher.plan(job))
    mark.touch()
    left_none = over(launcher.plan(job))
    assert (left_one.folder.left_checkpoints(), left_none.folder.left_checkpoints()) == (True, False)
    assert launcher.resume_unfinished(launcher.plan(job)).resumes == left_one.name
    (left_none.folder.checkpoints("algo-1") / "teacher_cache").mkdir()
    assert left_none.folder.left_checkpoints(), "a label bank spares the next run the teacher"


def test_an_interrupted_run_is_resumed_and_one_under_way_is_not(script_job):
    job = script_job(SLEEPER)
    run = launcher.run(launcher.plan(job))
    wait_for_ready(run, 1)
    (run.folder.host("algo-1") / "checkpoints/step-1").touch()
    assert unfinished(launcher.plan(job)) is None
    with pytest.raises(
        launcher.UserError, match=f"{run.name}, of the same job and code, is InProgress\n.*launcher stop"
    ):
        launcher.resume_unfinished(launcher.plan(job))
    psutil.Process(run.folder.read(run.folder.supervisor)["pid"]).kill()
    assert run.wait(60) == "Failed"
    assert launcher.resume_unfinished(launcher.plan(job)).resumes == run.name

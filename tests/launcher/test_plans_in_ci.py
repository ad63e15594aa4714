"""Plans of several configs at once: by hand, before a commit, and in a workflow that plans what a push changes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.commands import main
from tests.conftest import ROOT
from tests.docs.documents import the_block

GOOD = {
    "script": "train.py", "source": "code", "role": "arn:aws:iam::210987654321:role/Trains", "region": "us-west-2",
    "output": "s3://team-a/runs", "compute": {"instance_type": "ml.g5.xlarge"},
    "image": {"uri": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker"},
}  # fmt: skip
WARNED = {**GOOD, "profiling": {"system_interval_ms": 500}}
BAD = {**GOOD, "script": "tarin.py", "compute": {"instance_type": "ml.g5.xlarge", "max_hour": 2}}

ACTION = yaml.safe_load((ROOT / ".github/actions/plan/action.yml").read_text())


def git(*words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of configs, in which the last commit changes one, adds one and deletes one."""
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    Path("code/train.py").write_text("print('trains')\n")
    Path("configs").mkdir()

    def write(name: str, values: dict) -> None:
        Path("configs", f"{name}.yaml").write_text(yaml.safe_dump({"name": name.replace(" ", "-"), **values}))

    for name in ("good", "left", "gone"):
        write(name, GOOD)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "configs")
    write("good", {**GOOD, "environment": {"A": "1"}})
    write("with space", GOOD)
    git("rm", "--quiet", "configs/gone.yaml")
    git("add", ".")
    git("commit", "--quiet", "-m", "changes")
    return write


def test_of_several_configs_each_is_reported_and_the_worst_decides(repository, capsys):
    repository("warned", WARNED)
    repository("bad", BAD)
    good, warned, bad = (f"configs/{name}.yaml" for name in ("good", "warned", "bad"))
    assert main.main(["plan", good, warned, good, "--on", "aws"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{good}: aws, 1 host, no mistakes" and rest[0] == f"{warned}: 1 warning"
    assert "closed to new customers" in "\n".join(rest) and "fix:" in "\n".join(rest) and good not in rest
    assert main.main(["plan", good, warned, "--on", "aws", "--strict"]) == 2
    capsys.readouterr()
    assert main.main(["plan", good, bad, "compute.instance_count=2", "--on", "aws", "--json"]) == 2
    whole, broken = json.loads(capsys.readouterr().out)
    assert (
        whole["config"] == good
        and not any(one["level"] == "error" for one in whole["issues"])
        and len(whole["plan"]["hosts"]) == 2
    ), "an override is all configs'"
    assert {one["key"] for one in broken["issues"]} >= {"compute.max_hour (line 3)", "script"} and broken[
        "plan"
    ] is None


@pytest.mark.parametrize("name, mistake", [("bad", "compute.max_hour (line 3)"), ("nowhere", "configs/nowhere.yaml")])
def test_a_config_that_is_no_job_has_the_json_of_a_plan_with_its_mistakes(repository, capsys, name, mistake):
    repository("bad", BAD)
    repository("warned", WARNED)
    assert main.main(["plan", "configs/warned.yaml", "--on", "aws", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main.main(["plan", f"configs/{name}.yaml", "--on", "aws", "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and {*found} <= {*whole} and found["backend"] == "aws" and found["job"] is None
    assert mistake in {one["key"] for one in found["issues"]} and {*found["issues"][0]} == {*whole["issues"][0]}


def test_what_several_configs_cannot_show_is_refused(repository, capsys):
    words = ["plan", "configs/good.yaml", "configs/left.yaml", "--on", "aws"]
    assert main.main([*words, "--files", "--env", "--differences"]) == 2
    reported = capsys.readouterr().err
    assert all(f"fix:   name one config, or leave --{part} out" in reported for part in ("files", "env", "differences"))
    assert main.main([*words[:2], *words[3:], "--files"]) == 0


def test_one_config_with_a_warning_fails_where_that_is_asked_for(repository, capsys):
    repository("warned", WARNED)
    words = ["plan", "configs/warned.yaml", "--on", "aws"]
    assert main.main(words) == 0 and main.main([*words, "--strict"]) == 2
    assert main.main(["plan", "configs/good.yaml", "--on", "aws", "--strict"]) == 0
    assert "plan good-" in capsys.readouterr().out


def test_the_hook_plans_what_it_is_given_before_a_commit(repository):
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    [asked] = yaml.safe_load(the_block("yaml", "# .pre-commit-config.yaml"))["repos"][0]["hooks"]
    assert asked["id"] == hook["id"]
    name, *words = shlex.split(hook["entry"])
    command = [str(Path(sys.executable).with_name(name)), *words, *asked.get("args", [])]
    done = subprocess.run([*command, "configs/good.yaml", "configs/left.yaml"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("no mistakes") == 2, done.stderr
    repository("bad", BAD)
    done = subprocess.run([*command, "configs/bad.yaml", "configs/left.yaml"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean max_hours?" in done.stdout and done.stdout.count("no mistakes") == 1


def action(runner: Path, before: str, **given: str) -> list[subprocess.CompletedProcess]:
    """The steps of the action, up to the first that fails, as a runner would carry them out."""
    inputs = {name: about["default"] for name, about in ACTION["inputs"].items()} | given
    known = {f"inputs.{name}": value for name, value in inputs.items()}
    known |= {
        "github.action_path": str(ROOT / ".github/actions/plan"),
        "github.event.pull_request.base.sha || github.event.before": before,
    }
    done = []
    for step in ACTION["runs"]["steps"]:
        values = {name: text for name, text in step["env"].items()}
        for name, text in values.items():
            for expression, value in known.items():
                text = text.replace(f"${{{{ {expression} }}}}", value)
            assert "${{" not in text, text
            values[name] = text
        environment = {**os.environ, "RUNNER_TEMP": str(runner), **values}
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        done.append(subprocess.run(command, env=environment, capture_output=True, text=True))
        if done[-1].returncode:
            break
    return done


def lines(done: subprocess.CompletedProcess) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition(":")[0] for line in done.stdout.splitlines()]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A runner's folder in which the first step has installed the kit: this one."""
    runner = tmp_path / "runner"
    runner.mkdir()
    (runner / "vision-launcher").symlink_to(Path(sys.executable).parents[1])
    monkeypatch.setitem(ACTION["runs"], "steps", ACTION["runs"]["steps"][1:])
    return runner


def test_the_action_plans_the_configs_that_a_push_changes(repository, installed):
    before = git("rev-parse", "HEAD~")
    [done] = action(installed, before)
    assert lines(done) == ["configs/good.yaml", "configs/with space.yaml"], "neither what is as it was nor what is gone"
    [done] = action(installed, before, changed="false")
    assert lines(done) == ["configs/good.yaml", "configs/left.yaml", "configs/with space.yaml"]
    [done] = action(installed, "0" * 40)
    assert len(lines(done)) == 3, "a branch's first push"
    [done] = action(installed, before, configs="other/*.yaml train.yaml")
    assert lines(done) == ["no config to plan"]
    git("commit", "--quiet", "--allow-empty", "-m", "nothing")
    [done] = action(installed, git("rev-parse", "HEAD~"))
    assert lines(done) == ["no config to plan"]


def test_the_action_fails_where_a_changed_config_has_a_mistake_or_a_warning(repository, installed):
    repository("bad", BAD)
    repository("warned", WARNED)
    git("add", ".")
    git("commit", "--quiet", "-m", "worse")
    [done] = action(installed, git("rev-parse", "HEAD~"))
    assert (
        done.returncode == 2
        and "configs/bad.yaml: 2 errors" in done.stdout
        and "configs/warned.yaml: 1 warning" in done.stdout
    )
    [done] = action(installed, git("rev-parse", "HEAD~"), configs="configs/warned.yaml", options="")
    assert done.returncode == 0 and done.stdout.startswith("plan warned-"), "one config's plan is shown whole"


@pytest.mark.slow
@pytest.mark.timeout(600)  # it installs packages
def test_the_documents_workflow_gives_the_action_what_it_takes_and_it_installs_itself(repository, tmp_path):
    [job] = yaml.safe_load(the_block("yaml", "# .github/workflows/plan.yml"))["jobs"].values()
    [step] = [step for step in job["steps"] if "vision-launcher/" in step["uses"]]
    assert step["uses"].partition("@")[0].endswith("/.github/actions/plan") and {*step["with"]} <= {*ACTION["inputs"]}
    installing, planning = action(tmp_path, git("rev-parse", "HEAD~"), **step["with"])
    assert installing.returncode == 0, installing.stderr
    assert lines(planning) == ["configs/good.yaml", "configs/with space.yaml"]
    packages = (tmp_path / "vision-launcher/lib").glob("python*/site-packages/*")
    assert not {"torch", "sagemaker"} & {package.name for package in packages}

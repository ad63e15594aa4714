"""A plan as people read it: one screen, what is wrong first and last, and what fills screens folded until it is asked for."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

import launcher
from launcher.commands import main
from launcher.commands.plan import carry_out
from tests.conftest import write_batch

SCREEN = 40
"""Lines of a usual terminal window."""


def lines_of(plan: launcher.Plan, *opened: str) -> list[str]:
    return plan.text(*opened).splitlines()


@pytest.mark.parametrize("on", ["process", "docker", "aws"])
@pytest.mark.parametrize(
    "config", ["quickstart_teacher", "kt_food_tag", "hyundai_segmentation", "remote_preprocessing"]
)
def test_a_plan_of_every_story_is_one_screen(config, on):
    lines = lines_of(launcher.plan(launcher.load(config), on=on))
    assert len(lines) <= SCREEN, "\n".join(lines)


def test_what_is_wrong_comes_first_in_a_line_each_and_last_in_full(script_job):
    inputs = {f"c{number}": {"folder": f"nowhere-{number}"} for number in range(6)}
    plan = launcher.plan(script_job("x = 1", inputs=inputs, environment={"HF_TOKEN": "hf_hunter2"}))
    lines = lines_of(plan)
    assert lines[0] == f"plan {plan.name}: 6 errors, 1 warning"
    assert all(line.startswith(f"  error       inputs.c{number}: ") for number, line in enumerate(lines[1:5]))
    assert lines[5] == "  error       and 2 more, below" and lines[6].startswith("  warning     environment.HF_TOKEN: ")
    assert max(map(len, lines[:7])) <= 110
    reported = "\n".join(lines[lines.index("  errors") :])
    for issue in plan.issues:
        assert issue.fix in reported and issue.key in reported
    assert "nothing has started" not in reported, "it cannot be started"


def test_a_plan_without_a_fault_says_nothing_of_any():
    plan = launcher.plan(launcher.load("hyundai_segmentation"), on="aws")
    sound = launcher.plan(launcher.load("many_students"))
    assert lines_of(plan)[0].endswith(" warnings") and plan.issues
    assert lines_of(sound)[0].startswith(f"plan {sound.name}")


def test_what_is_folded_says_how_much_it_is_and_how_to_open_it(script_job, tmp_path):
    plan = launcher.plan(script_job("x = 1", environment={"A": "1"}), on="docker")
    folded = plan.text()
    variables, points = len(plan.hosts[0].environment), len(plan.differences)
    assert f"  environment {variables} variables set by the kit (--env)\n" in folded
    assert f"  differs     from SageMaker in {points} points (--differences)\n" in folded
    assert re.search(r"  code +2 files, \d+ B, and this kit's launcher_observer and training \(\d+ files, .+ [kM]B\), from .* \(--files\)\n", folded)  # fmt: skip
    for part, shown in (
        ("env", [f"    {name}=" for name in plan.hosts[0].environment]),
        ("files", [f"    {file.path} " for file in plan.files]),
        ("differences", [f"    {name}: " for name in plan.differences]),
    ):
        opened = plan.text(part)
        assert all(text in opened for text in shown) and f"(--{part})" not in opened
        assert not any(text in folded for text in shown if text.strip() not in ("image:", "network:", "user:"))


def test_a_large_file_is_named_although_files_are_folded(script_job):
    job = script_job("x = 1")
    (launcher.plan(job).source / "weights.bin").write_bytes(b"0" * 1_500_000)
    [code] = [line for line in lines_of(launcher.plan(job)) if line.startswith("  code ")]
    assert "3 files, 1.5 MB" in code and "; weights.bin has 1.5 MB" in code


def test_of_many_hosts_the_first_show_their_commands(script_job):
    job = script_job("x = 1", distribution="torchrun", compute={"instance_count": 5})
    shown = [line for line in lines_of(launcher.plan(job)) if line.startswith("  algo-")]
    assert len(shown) == 3 and "--node_rank 0" in shown[0] and "--node_rank 1" in shown[1]
    assert shown[2] == "  algo-3 to algo-5: likewise (--json has each command)"


def test_the_command_opens_what_it_is_asked_for(capsys):
    def shown(*options: str) -> str:
        carry_out(main.read(["plan", "many_students", *options]))
        return capsys.readouterr().out

    plain, opened = shown(), shown("--files", "--env")
    assert "launcher_observer/__init__.py" not in plain and "launcher_observer/__init__.py" in opened


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--files", "--env", "--differences", "--strict"], "launcher run mine.yaml"),
        (["--smoke", "--on", "docker", "--hosts", "2"], "launcher run mine.yaml compute.instance_count=2 --on docker --smoke"),
        (["--label", "name=a"], "launcher label mine.yaml name=a"),
        (["tags={a: b}"], "launcher run mine.yaml 'tags={a: b}'"),
        (["environment.API_TOKEN=hunter2"], "launcher run mine.yaml 'environment.API_TOKEN=***'"),
    ],
)  # fmt: skip
def test_a_plan_ends_with_the_command_that_starts_it(tmp_path, monkeypatch, capsys, words, command):
    monkeypatch.chdir(tmp_path)
    write_batch(tmp_path / "train", 4)
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/model.pt").touch()
    values = {
        "name": "mine",
        "script": "train_kd.py",
        "distribution": "torchrun",
        "smoke": {"compute": {"max_hours": 1}},
    }
    values["inputs"] = {name: {"folder": name} for name in ("train", "teacher")} | {"validation": {"folder": "train"}}
    values["hyperparameters"] = {"student": "resnet18", "teacher_cache": {"views": 1}, "global_batch_size": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    assert main.main(["plan", "mine.yaml", *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"  nothing has started; `{command}` starts it"
    started = main.read(shlex.split(command)[1:])
    assert started.command == command.split()[1] and started.config == "mine.yaml"


def test_a_plan_in_python_ends_with_the_call_that_starts_it(script_job):
    assert lines_of(launcher.plan(script_job("x = 1")))[-1] == "  nothing has started; launcher.run(plan) starts it"


def test_in_a_notebook_what_is_wrong_comes_first_and_the_rest_unfolds(script_job):
    shown = launcher.plan(script_job("x = 1", inputs={"train": {"folder": "nowhere"}}))._repr_html_()
    assert shown.index("nowhere") < shown.index("<table") and "1 error: see above" in shown
    sound = launcher.plan(script_job("x = 1"), on="docker")
    page = sound._repr_html_()
    for title in (
        f"{len(sound.files)} files",
        f"{len(sound.differences)} differences from SageMaker",
        f"{len(sound.hosts[0].environment)} variables of the environment",
    ):
        assert f"<summary>{title}</summary>" in page

"""The command line itself: help, version, the nearest word for a wrong one, completion in real shells, colours."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import backends
from launcher.commands import parser as parsing
from launcher.commands.main import GROUPS, command_line, main
from launcher.config import builtin_configs


def said(words: list[str], capsys) -> tuple[int, str]:
    """Exit code and text of a command that argparse answers."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def test_the_launcher_alone_shows_every_command_under_a_title_and_succeeds(capsys):
    code, text = said([], capsys)
    assert code == 0
    places = [text.index(f"\n{title}\n") for title in GROUPS]
    assert places == sorted(places)
    for name, one in parsing.commands_of(command_line()).items():
        assert f"\n  {name} " in text and str(one.description) in text


def test_the_version_is_that_of_the_installed_package(capsys):
    from importlib import metadata

    assert said(["--version"], capsys) == (0, f"launcher {metadata.version('vision-launcher')}\n")


@pytest.mark.parametrize(
    "words, meant",
    [
        (["plna"], "did you mean launcher plan?"),
        (["study", "scalin"], "did you mean launcher study scaling?"),
        (["zzz"], "launcher --help lists them"),
        (["plan", "job.yaml", "--hots", "2"], "did you mean --hosts?"),
        (["run", "--detatch", "job.yaml"], "did you mean --detach?"),
        (["plan", "job.yaml", "--zzz"], "launcher plan --help lists what it takes"),
        (["run", "job.yaml", "--json"], "launcher run --help lists what it takes"),
        (["plan"], "the following arguments are required: CONFIG\n"),
    ],
)
def test_a_wrong_command_or_option_names_the_nearest(words, meant, capsys):
    code, text = said(words, capsys)
    assert code == 2 and meant in text and "invalid choice" not in text


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        *(("--max-cost", value, "valid: US dollars, above 0\n  fix:   write --max-cost 20") for value in ("-5", "0", "abc", "nan")),
        ("--hosts", "two", "valid: a whole number from 1 to 1000\n  fix:   write --hosts 2"),
    ],
)  # fmt: skip
def test_a_number_that_an_option_does_not_take_is_answered_with_what_is_valid(option, value, fix, capsys):
    code, text = said(["run", "job.yaml", option, value], capsys)
    assert code == 2 and f"argument {option}: '{value}'\n  {fix}" in text


def test_a_command_loads_no_other_command(tmp_path):
    """Loading all of them took a third of a plan's time."""
    code = (
        "import sys\nfrom launcher.commands.main import main\nmain(sys.argv[1:])\n"
        "print(*(name.rpartition('.')[2] for name in sys.modules if name.startswith('launcher.commands.')))"
    )
    words = ["--debug", "schema"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path)
    loaded = {*done.stdout.splitlines()[-1].split()}
    commands = {name for names in GROUPS.values() for name in names}
    assert "schema" in loaded and loaded & commands == {"schema"}, done.stderr


def test_one_command_is_parsed_as_beside_all_others():
    every = parsing.commands_of(command_line())
    for name, one in every.items():
        alone = parsing.commands_of(command_line(["--debug", name, "--help"]))
        assert {name: alone[name].format_help()} == {name: one.format_help()} and len(alone) == 1


@pytest.mark.parametrize("words", [["--help"], ["--help", "plan"], ["-h", "plan"], ["--debug"], ["--version", "plan"]])
def test_a_command_behind_another_option_is_one_of_all(words):
    assert len(parsing.commands_of(command_line(words))) > 20


def test_every_option_for_json_says_its_shape():
    for name, one in parsing.every_command(command_line()).items():
        for action in one._actions:
            if "--json" in action.option_strings:
                assert action.help.startswith("print JSON: ") and ("{" in action.help or "list" in action.help), name


@pytest.fixture
def completed(tmp_path):
    """Completes a line in a real bash, in a folder with two runs and a config."""
    for run in ("mine-20260101-000000-abcd", "other-20260101-000000-abcd"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "plan.json").touch()
    (tmp_path / "my job.yaml").touch()
    made = subprocess.run([sys.executable, "-m", "launcher", "completion", "bash"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr

    def complete(*words: str) -> list[str]:
        line = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _launcher; printf "%s\\n" "${COMPREPLY[@]}"'
        environment = {name: value for name, value in os.environ.items() if name != "LAUNCHER_RUNS"}
        done = subprocess.run(
            ["bash", "-c", f"{made.stdout}\n{line}", "bash", "launcher", *words],
            cwd=tmp_path, env={**environment, "PATH": "/nowhere"}, executable=shutil.which("bash"), capture_output=True, text=True,
        )  # fmt: skip
        assert "command not found" not in done.stderr, "a completion starts no program"
        return [word for word in done.stdout.splitlines() if word]

    complete.script = made.stdout
    return complete


def test_bash_completes_commands_options_configs_backends_and_runs(completed):
    assert completed("pla") == ["plan"] and "diagnose" in completed("")
    assert completed("study", "sc") == ["scaling"]
    assert completed("plan", "--j") == ["--json"] and completed("study", "scaling", "--mo") == ["--mode"]
    assert completed("run", "quickstart_t") == ["quickstart_teacher"]
    assert set(completed("run", "")) >= {*builtin_configs.names(), "my job.yaml"}
    assert completed("run", "my") == ["my job.yaml"]
    assert set(completed("run", "x.yaml", "--on", "")) == set(backends.BACKENDS)
    assert completed("show", "mi") == ["mine-20260101-000000-abcd"] and len(completed("show", "")) == 2
    assert completed("show", "none") == [] and completed("watch", "--", "py") == []


def test_bash_runs_nothing_that_stands_in_the_name_of_a_folder(completed, tmp_path):
    for name in ("$(echo>PWNED)", "`echo>PWNED`", "a run"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "plan.json").touch()
    assert len(completed("show", "")) == 5 and not (tmp_path / "PWNED").exists()
    assert completed("show", "$") == [r"\$\(echo\>PWNED\)"] == completed("show", r"\$\(e"), (
        "as a shell takes it literally"
    )
    assert completed("show", "a") == [r"a\ run"] and not (tmp_path / "PWNED").exists()


def test_bash_knows_the_completion_once_the_script_is_read(completed):
    done = subprocess.run(["bash", "-c", completed.script + "\ncomplete -p launcher"], capture_output=True, text=True)
    assert done.stdout == "complete -o default -F _launcher launcher\n"


@pytest.mark.parametrize("shell", [name for name in ("bash", "zsh") if shutil.which(name)])
def test_a_shell_reads_its_script_without_an_error(shell):
    made = subprocess.run([sys.executable, "-m", "launcher", "completion", shell], capture_output=True, text=True)
    done = subprocess.run([shutil.which(shell) or shell, "-n"], input=made.stdout, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "launcher" in made.stdout


def test_no_completion_script_names_a_place_of_this_machine():
    for shell in ("bash", "zsh"):
        made = subprocess.run([sys.executable, "-m", "launcher", "completion", shell], capture_output=True, text=True)
        assert str(Path.home()) not in made.stdout and str(Path(__file__).parents[2]) not in made.stdout


COLOURS = [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)]


@pytest.mark.parametrize("environment, wanted", COLOURS)
def test_a_terminal_shows_severity_in_colour_unless_the_user_wants_none(environment, wanted, tmp_path):
    outside = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "launcher", "plan", "quickstart"]
    with os.fdopen(theirs, "w") as terminal:
        everything = {**outside, "TERM": "xterm", **environment}
        process = subprocess.Popen(words, cwd=tmp_path, env=everything, stdout=terminal, stderr=terminal)
    text = ""
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as EIO
        while piece := os.read(ours, 4096):
            text += piece.decode()
    os.close(ours)
    assert process.wait() == 2 and "no such folder" in text
    assert ("\x1b[31merrors\x1b[0m" in text) == wanted and ("\x1b[" in text) == wanted


@pytest.mark.parametrize(
    "words", [["run", "job.yaml", "--json"], ["plan", "job.yaml", "--max-cost", "5"], ["watch", "python", "x.py"]]
)
def test_a_mistake_in_a_commands_words_shows_that_commands_usage(words, capsys):
    code, text = said(words, capsys)
    assert code == 2 and text.startswith(f"usage: launcher {words[0]} ")


def test_a_pipe_gets_no_colour(tmp_path):
    words = [sys.executable, "-m", "launcher", "plan", "quickstart"]
    done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "TERM": "xterm"}, capture_output=True, text=True)
    assert "errors" in done.stdout and "\x1b" not in done.stdout + done.stderr

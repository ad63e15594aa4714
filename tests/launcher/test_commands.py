"""The commands as they are typed: exit codes, messages without tracebacks, Ctrl-C with and without a terminal."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import launcher
from launcher.commands import live, main
from launcher.commands.exit_codes import INTERRUPTED, RUN_FAILED
from tests.conftest import ROOT, SLEEPER, as_in_a_terminal, assert_nothing_left, exit_code, wait_for_ready, wait_until
from tests.launcher.test_store import recorded

LAUNCHER = [sys.executable, "-m", "launcher"]


def typed(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*LAUNCHER, *arguments], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def config(tmp_path, script_job):
    """Writes a config for a script's text, and gives its path."""

    def write(text: str, **values) -> str:
        job = script_job(text, **values)
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(job.model_dump(exclude_none=True)))
        return str(file)

    return write


METRICS = """
import sys
sys.stdout.write("hello from the script\\n")
for step in range(1, 4):
    sys.stdout.write(f"epoch 1/1 step {step}/3 loss 0.{step}000 images/s 100.0\\n")
sys.stdout.write("epoch 1/1 step 3/3 validation_accuracy 0.9712 validation_loss 0.1\\n")
"""


def test_a_run_is_started_shown_listed_and_compared(config):
    done = typed("run", config(METRICS))
    assert done.returncode == 0, done.stderr
    name = re.search(r"^run (\S+) on process: ", done.stdout).group(1)
    assert "epoch 1/1 step 3/3 validation_accuracy 0.9712" in done.stdout and "hello" not in done.stdout
    assert f"{name}: Completed after" in done.stdout
    head, _, listed, following = typed("runs").stdout.splitlines()
    assert re.split(" {2,}", head) == ["run", "state", "started", "took", "on", "hosts", "on disk"], (
        "nothing has an accuracy or a cost"
    )
    assert re.fullmatch(
        rf"{name} +Completed +[\d.]+ (s|min( \d+ s)?) ago +[\d.]+ (s|min( \d+ s)?) +process +1 +[\d.]+ [kM]B", listed
    ), listed
    assert following == f"next: launcher show {name}"
    assert json.loads(typed("runs", "--json").stdout)[0]["state"] == "Completed"
    shown = typed("show", "test").stdout
    assert f"run {name}" in shown and "commit" in shown and "log algo-1" in shown
    assert "hello from the script" in typed("logs", name).stdout
    compared = typed("compare", name)
    assert compared.returncode == 0 and "images/s" in compared.stdout and "MFU" not in compared.stdout
    assert typed("stop", name).stdout.strip() == f"{name} is over: Completed"
    again = typed("attach", name)
    assert again.returncode == 0 and "step 3/3" in again.stdout


def test_runs_whose_utilisation_is_known_are_compared_by_it_too(config):
    script = """
import json, os, pathlib
place = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"])
place.mkdir(parents=True, exist_ok=True)
(place / "result.json").write_text(json.dumps({"model": "resnet18", "steps": 9, "mfu": 0.3312}))
"""
    assert typed("run", config(script)).returncode == 0
    head, _, row, *_ = typed("compare", "test").stdout.splitlines()
    assert dict(zip(re.split(" {2,}", head), re.split(" {2,}", row)))["MFU"] == "33.12 %"


def test_every_log_line_is_shown_when_asked_for(config):
    assert "hello from the script" in typed("run", config(METRICS), "--logs").stdout


def test_a_failed_run_ends_with_1_and_the_reason(config):
    done = typed("run", config("raise ValueError('no such shard')"))
    assert done.returncode == 1
    assert "Failed after" in done.stdout and "no such shard" in done.stdout and "next: launcher logs" in done.stdout
    assert "Traceback" not in done.stderr


def test_two_hosts_by_a_flag(config):
    done = typed(
        "run", config("import os; print('rank', os.environ['RANK'])", distribution="torchrun"), "--hosts", "2", "--logs"
    )
    assert done.returncode == 0
    assert "algo-1 | " in done.stdout and "algo-2 | " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "nowhere.yaml"], "no such file"),
        (["run", "configs"], "a folder, not a file"),
        (["plan", "configs/quickstart.yaml", "epochs=3"], "epochs: unknown key"),
        (["plan", "configs/quickstart.yaml", "hyperparameters.epochs"], "write key=value"),
        (["plan", "configs/quickstart.yaml", "--hosts", "0"], "compute.instance_count: 0"),
        (["run", "configs/quickstart.yaml", "--on", "mars"], "--on: no backend mars"),
        (["show", "nothing"], "no such run"),
        (["logs", "nothing"], "no such run"),
        (["stop", "nothing"], "no such run"),
        (["compare", "nothing"], "no such run"),
        (["prepare", "digts", "x"], "did you mean digits?"),
    ],
)
def test_a_users_mistake_ends_with_2_a_cure_and_no_traceback(arguments, expected, typed_here, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = typed_here(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr and "fix:" in done.stderr and "Traceback" not in done.stderr


def test_a_process_ends_with_the_code_of_its_command_and_no_traceback():
    done = typed("run", "nowhere.yaml")
    assert done.returncode == 2 and done.stdout == ""
    assert "no such file" in done.stderr and "fix:" in done.stderr and "Traceback" not in done.stderr


def test_debug_shows_the_traceback():
    assert "Traceback" in typed("--debug", "show", "nothing").stderr
    assert "Traceback" in typed("show", "nothing", "--debug").stderr


def test_a_plan_with_errors_is_printed_and_ends_with_2(config):
    done = typed("plan", config("x = 1"), "inputs.train={folder: /nowhere}")
    assert done.returncode == 2 and "/nowhere: no such folder" in done.stdout


def test_a_reader_that_goes_away_is_no_error(config):
    config_path = config("for number in range(20000): print('line', number)")
    assert typed("run", config_path).returncode == 0
    done = subprocess.run(
        f"{sys.executable} -m launcher logs test | head -1", shell=True, capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_run_that_nobody_reads_any_more_is_stopped_and_that_is_no_success(config):
    lines = "import time\nfor number in range(200): print('line', number, flush=True); time.sleep(0.1)"
    words = f"set -o pipefail; {sys.executable} -m launcher run {config(lines)} --logs | head -1"
    assert subprocess.run(["bash", "-c", words], capture_output=True, text=True).returncode == 1
    assert launcher.attach("test").wait(60) == "Stopped"


def test_an_attached_terminal_that_closes_leaves_the_run_alone(config):
    script = "print('trains', flush=True)\n" + textwrap.dedent(SLEEPER)
    assert typed("run", config(script), "--detach").returncode == 0
    run = launcher.attach("test")
    wait_for_ready(run, 1)
    command = [*LAUNCHER, "attach", "test", "--logs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal)
    assert any(line == "trains\n" for line in process.stdout), "it follows the run"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    time.sleep(0.5)  # some rounds of the supervisor
    assert run.state == "InProgress"
    run.stop()
    assert run.wait(60) == "Stopped"


def test_overrides_may_stand_after_options(config):
    done = typed("plan", config("x = 1"), "--hosts", "2", "distribution=torchrun", "compute.max_hours=3")
    assert done.returncode == 0 and "2 hosts, at most 3 h" in done.stdout
    reported = typed("plan", config("x = 1"), "--hots", "2").stderr
    assert "unrecognized arguments: --hots; did you mean --hosts?" in reported


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("diagnose before --json after", "unrecognized arguments: after; put after before the options"),
        (
            "prepare digits --size 8 'my digits'",
            "unrecognized arguments: my digits; put 'my digits' before the options",
        ),
        ("rm one --yes two three", "put two three before the options"),
        ("diagnose before --json after later", "launcher diagnose --help lists what it takes"),
        ("show --json one two", "launcher show --help lists what it takes"),
    ],
)
def test_a_word_behind_an_option_that_could_stand_before_it_is_told_so(words, fix, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.read(shlex.split(words))
    assert capsys.readouterr().err.rstrip().endswith(fix)


def test_a_store_that_cannot_be_used_is_an_error_without_traceback(config, tmp_path):
    (tmp_path / "file").touch()
    done = typed("run", config("x = 1"), env={**os.environ, "LAUNCHER_RUNS": str(tmp_path / "file/runs")})
    assert done.returncode == 2 and "fix:" in done.stderr and "Traceback" not in done.stderr


def test_detached_then_stopped(config):
    done = typed("run", config(SLEEPER), "--detach")
    assert done.returncode == 0 and "launcher stop" in done.stdout
    wait_for_ready(launcher.attach("test"), 1)
    stopped = typed("stop", "test")
    assert stopped.returncode == 0 and "Stopped" in stopped.stdout


def test_a_jobs_name_stops_its_run_that_is_under_way_and_not_a_later_one_that_is_over(config, capsys):
    """As where the job was started again, and that start was refused."""
    assert typed("run", config(SLEEPER), "--detach").returncode == 0
    run = launcher.attach("test")
    wait_for_ready(run, 1)
    refused = recorded("test-29990101-000000-aaaa", state="Failed")
    assert launcher.attach("test").name == refused.name, "the latest"
    assert main.main(["stop", "test"]) == 0
    assert f"asked {run.name} to stop" in capsys.readouterr().out and run.state == "Stopped"
    assert main.main(["stop", "test"]) == 0
    assert capsys.readouterr().out == f"{refused.name} is over: Failed\n"


def test_a_jobs_name_stops_none_of_several_runs_that_are_under_way(capsys):
    runs = [recorded(f"some-job-2026112{day}-100000-aaaa", state="") for day in (1, 2)]
    with contextlib.ExitStack() as stack:
        for run in runs:
            fcntl.flock(stack.enter_context(open(run.lock, "wb")), fcntl.LOCK_EX)
        assert main.main(["stop", "some-job"]) == 2
    reported = capsys.readouterr().err
    assert "some-job: 2 runs are under way" in reported
    assert all(f"launcher stop {run.name}" in reported and not run.stop_request.exists() for run in runs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_without_a_terminal_stops_the_run(config, number):
    process = subprocess.Popen(
        [*LAUNCHER, "run", config(SLEEPER)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )
    wait_until(launcher.runs, what="a run")
    run = launcher.attach("test")
    wait_for_ready(run, 1)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, run.state) == (130 if number == signal.SIGINT else 1, "Stopped"), err
    assert "Stopped" in out and "Traceback" not in err
    assert_nothing_left(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_run_is_started_stops_it(script_job, as_typed, monkeypatch, number):
    begin = subprocess.Popen

    def begun(command, **options) -> subprocess.Popen:
        process = begin(command, **options)
        if "launcher.backends.supervisor" in command:
            assert signal.getsignal(number) is not signal.SIG_DFL, f"{number.name} would end the launcher here"
            signal.raise_signal(number)
        return process

    monkeypatch.setattr(subprocess, "Popen", begun)
    plan = launcher.plan(script_job(SLEEPER))
    assert exit_code(plan) == (INTERRUPTED if number == signal.SIGINT else RUN_FAILED)
    run = launcher.attach(plan.name)
    reason = "Ctrl-C" if number == signal.SIGINT else f"launcher run received {number.name}"
    assert (run.state, run.outcome()["stop_reason"]) == ("Stopped", reason)
    assert_nothing_left(run)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str):
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            as_in_a_terminal()
            os.execv(sys.executable, [*LAUNCHER, *arguments])
        self.text = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()  # a character may come in two parts

    def until(self, expected: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while expected not in self.text:
            assert time.monotonic() < end, f"{expected!r} did not come: {self.text}"
            try:
                self.text += self.decoder.decode(os.read(self.screen, 4096))
            except OSError:  # the command has ended
                raise AssertionError(f"{expected!r} did not come: {self.text}") from None

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


CTRL_C = "\x03"
TALKING_SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for step in range(1, 3000):
    sys.stdout.write(f"epoch 1/2 step {step}/3000 loss 0.5000 validation_accuracy 0.9 images/s 100.0\\n")
    sys.stdout.flush()
    time.sleep(0.1)
"""


def test_ctrl_c_in_a_terminal_can_leave_the_run_running(config):
    terminal = Terminal("run", config(TALKING_SLEEPER))
    terminal.until("loss 0.5000  accuracy 90.0 %  100 images/s")
    terminal.until(" left")
    terminal.type(CTRL_C)
    terminal.until("stop the run, or leave it running? [S/l]")
    terminal.type("l\n")
    terminal.until("goes on; launcher attach")
    assert terminal.exit_code() == 130
    run = launcher.attach("test")
    assert run.state == "InProgress"
    terminal = Terminal("attach", "test")
    terminal.until("loss 0.5000")
    terminal.type(CTRL_C)
    terminal.until("[S/l]")
    terminal.type("\n")
    terminal.until("Stopped")
    assert terminal.exit_code() == 130
    assert_nothing_left(run)


SLOW_METRICS = """
import sys, time
for step in range(1, 11):
    sys.stdout.write(f"epoch 1/1 step {step}/10 loss 0.5000 images/s 100.0\\n")
    sys.stdout.flush()
    time.sleep(0.5)
sys.stdout.write("epoch 1/1 step 10/10 validation_accuracy 0.9712 validation_loss 0.1\\n")
"""


def test_the_live_line_is_rewritten_not_repeated(config):
    terminal = Terminal("run", config(SLOW_METRICS))
    terminal.until("Completed")
    assert terminal.text.count("\r\x1b[K") >= 3 and "accuracy 97.1 %" in terminal.text
    assert terminal.exit_code() == 0


def test_no_new_option_by_accident(capsys):
    """The options are a promise: a change here is a change of the reference too."""
    for command in (
        *("plan", "run", "replay", "attach", "runs", "show", "logs", "stop", "compare", "diff", "profile"),
        *("emulate", "prepare", "weights", "resume", "drill", "diagnose", "rm", "prune"),
        *("study preprocessing", "study scaling", "init", "import", "defaults", "explain", "schema", "completion"),
        *("label", "labels show", "labels verify", "labels merge", "labels export"),
    ):
        with pytest.raises(SystemExit):
            main.read([*command.split(), "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert options == {
        "--help", "--debug", "--on", "--hosts", "--smoke", "--json", "--detach", "--logs", "--follow", "--size", "--validation-fraction",
        "--script", "--images", "--force", "--last", "--all", "--yes", "--older-than", "--state",
        "--label", "--project", "--line", "--strict", "--digest", "--into", "--as", "--files", "--env", "--differences",
        "--check", "--max-cost", "--region", "--interval", "--off", "--port", "--price", "--file-system", "--folder",
        "--kills", "--hosts-after", "--servers", "--seed", "--shards", "--unlabelled", "--wheel", "--jobs", "--jpeg-quality", "--verify",
        "--models", "--loads", "--pipelines", "--repeats", "--table", "--html", "--batches", "--mode", "--with", "--probe", "--resume",
    }  # fmt: skip
    reference = (Path(ROOT) / "docs/reference/commands.md").read_text()
    assert all(option in reference for option in options - {"--help"})


def test_ctrl_c_as_following_begins_is_asked_about_and_not_swallowed(monkeypatch):
    recorded("early-20261122-100000-aaaa", state="")
    run, detached = launcher.attach("early"), []
    monkeypatch.setattr(live.shapes, "prepare", lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(live, "_ask", lambda: "leave")
    monkeypatch.setattr(launcher.Run, "detach", lambda run: detached.append(run.name))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup makes this process ignore it
    try:
        assert live.follow(run) and detached == [run.name]
    finally:
        signal.signal(signal.SIGINT, before)

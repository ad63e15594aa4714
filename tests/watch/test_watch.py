"""`launcher watch`: a command behaves as without it, and leaves a run."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import launcher
from launcher.commands import watch
from launcher.runner import watch as runner
from tests.conftest import as_in_a_terminal, has_ended, wait_until
from tests.watch.commands import LAUNCHER, OURS, Terminal, environment, the_run, typed, watched

TALKS = r"""
import os, sys
sys.stdout.buffer.write(b"a \xff\x00 \x1b[31mred\x1b[0m\r 10%\r 20%\n" + sys.stdin.buffer.read())
sys.stdout.flush()
os.write(2, b"an error line\nand no end")
sys.exit(7)
"""

COUNTS = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.write(1, b"got %d\\n" % number))
signal.signal(signal.SIGUSR2, lambda *_: os._exit(9))
print("ready", os.getpid(), flush=True)
while True:
    signal.pause()
"""
"""Says each signal that it gets, and ends at SIGUSR2."""


def test_output_input_and_exit_code_are_those_of_the_command(tmp_path):
    command = [sys.executable, "-c", TALKS]
    alone = subprocess.run(command, input=b"typed \xfe\n", capture_output=True)
    found = watched(*command, input=b"typed \xfe\n")
    assert (found.returncode, found.stdout) == (alone.returncode, alone.stdout)
    assert alone.stderr in found.stderr and b"an error line" not in found.stdout
    log = the_run().folder.log("algo-1").read_bytes()
    assert alone.stdout in log and alone.stderr in log


def test_both_streams_in_one_file_keep_their_order(tmp_path):
    code = "import os\nfor n in range(200): os.write(1 + n % 2, b'%d ' % n)"
    with open(tmp_path / "both", "wb") as both:
        subprocess.run(
            [*LAUNCHER, "watch", "--", sys.executable, "-c", code],
            stdout=both,
            stderr=both,
            check=True,
            env=environment(),
        )
    assert b"".join(b"%d " % n for n in range(200)) in (tmp_path / "both").read_bytes()


@pytest.mark.parametrize(
    ("command", "code", "state", "says"),
    [
        ("exit 3", 3, "Failed", "exit code 3"),
        ("kill -SEGV $$", 128 + signal.SIGSEGV, "Failed", "killed by SIGSEGV"),
        ("exit 0", 0, "Completed", ""),
    ],
)
def test_a_command_ends_as_a_shell_says_it(command, code, state, says):
    found = watched("sh", "-c", command)
    assert found.returncode == code
    assert (b"no optimizer of PyTorch stepped" in found.stderr) == (code == 0), "a failure is why nothing was measured"
    run = the_run()
    assert run.state == state and says in run.outcome().get("failure", "")


def test_a_reader_that_goes_away_ends_the_command_as_it_would_alone():
    words = [*LAUNCHER, "watch", "--", "sh", "-c", "yes; echo $? >&2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout.read(4) == b"y\ny\n"
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(60) == 0 and b"\n141\n" in said, "yes died of SIGPIPE"


@pytest.mark.parametrize("to", ["launcher", "group", "both"])
def test_each_signal_reaches_the_command_once(to):
    words = [*LAUNCHER, "watch", "--", sys.executable, "-c", COUNTS]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, env=environment(), preexec_fn=as_in_a_terminal, start_new_session=True
    )
    assert process.stdout.readline().startswith(b"ready")
    got = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if to == "both":  # as `timeout` does: at once, however busy the machine is
            os.kill(process.pid, signal.SIGSTOP)
        if to != "group":
            os.kill(process.pid, number)
        if to != "launcher":
            os.killpg(process.pid, number)
        if to == "both":
            os.kill(process.pid, signal.SIGCONT)
        got.append(process.stdout.readline())
    os.kill(process.pid, signal.SIGUSR2)  # is passed on behind whatever is still to come
    got += process.stdout.readlines()
    assert got == [b"got 2\n", b"got 15\n", b"got 10\n"] and process.wait(60) == 9
    assert the_run().outcome()["stop_reason"] == "Ctrl-C"


def test_a_relay_that_had_no_core_is_waited_for(tmp_path, monkeypatch):
    """Else the command would get a second time what its group got, from the launcher."""
    with runner._Output(tmp_path / "log") as output:
        relay, ask = output._relay, output._relay.send_signal
        relay.send_signal(signal.SIGSTOP)

        def asked(number: int) -> None:
            ask(number)
            ask(signal.SIGCONT)

        monkeypatch.setattr(relay, "send_signal", asked)
        ask(signal.SIGTERM)
        try:
            assert output.heard_by_group() >= {signal.SIGTERM}
        finally:
            ask(signal.SIGCONT)
            output.given()  # by which it ends
            output.drain()


def test_a_signal_that_comes_before_the_command_is_there_ends_it():
    """In the fork, whose handlers are the launcher's until then."""
    code = """
import os, signal
from launcher.runner import watch
signal.signal(signal.SIGTERM, lambda *_: None)
mask = signal.pthread_sigmask(signal.SIG_BLOCK, watch.PASSED_ON)
os.kill(os.getpid(), signal.SIGTERM)
watch._become_the_command(mask)
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == -signal.SIGTERM


def test_a_signal_that_is_ignored_stays_ignored():
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    words = ["nohup", *LAUNCHER, "watch", "--", sys.executable, "-c", code]
    found = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment(), check=True)
    assert found.stdout == b"True\n"


def test_a_launcher_whose_parent_ignores_ended_children_still_knows_how_the_command_ended():
    found = watched("sh", "-c", "exit 3", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert found.returncode == 3 and the_run().state == "Failed"


def test_a_killed_launcher_takes_the_command_along():
    words = [*LAUNCHER, "watch", "--", sys.executable, "-c", COUNTS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment())
    command = psutil.Process(int(process.stdout.readline().split()[1]))
    process.kill()
    wait_until(lambda: has_ended(command), what="the command's end")
    process.wait()
    process.stdout.close()
    assert the_run().state == "Failed"


def test_what_a_command_leaves_goes_on_and_writes_where_it_would(tmp_path):
    """The pipe that it holds stays open until it ends; the launcher does not wait for it."""
    waits = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo later"
    process = subprocess.Popen(
        [*LAUNCHER, "watch", "--", "sh", "-c", f"({waits}) & echo now"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.wait(60) == 0 and the_run().state == "Completed"
    (tmp_path / "go").touch()
    assert process.stdout.read() == b"now\nlater\n" and b"go on" in process.stderr.read()
    assert the_run().folder.log("algo-1").read_bytes() == b"now\nlater\n"


ASKS = """
import os, sys
print([os.isatty(number) for number in range(3)], tuple(os.get_terminal_size(1)))
print("to stderr", file=sys.stderr)
print("Hello " + input("who? "))
"""


def test_in_a_terminal_prompts_size_and_interrupts_are_those_of_the_terminal(tmp_path):
    (tmp_path / "asks.py").write_text(ASKS)
    screens = []
    for words in ([sys.executable, "asks.py"], [*LAUNCHER, "watch", "--", sys.executable, "asks.py"]):
        terminal = Terminal(words, tmp_path)
        terminal.shows("who? ")
        terminal.type("you\n")
        assert terminal.end() == 0
        screens.append(OURS.sub(b"", terminal.shown))
    assert screens[0] == screens[1] and b"[True, True, True] (123, 40)" in screens[0] and b"Hello you\r\n" in screens[0]


def test_ctrl_c_in_a_terminal_reaches_the_command_once(tmp_path):
    terminal = Terminal([*LAUNCHER, "watch", "--", sys.executable, "-c", COUNTS], tmp_path)
    terminal.shows("ready")
    terminal.type("\x03")
    terminal.shows("got 2")
    os.kill(terminal.process.pid, signal.SIGUSR2)
    assert terminal.end() == 9 and terminal.shown.count(b"got") == 1 and the_run().state == "Stopped"


def test_a_shell_stops_and_continues_it(tmp_path):
    terminal = Terminal(["bash", "--norc", "-i"], tmp_path, PS1="$ ", PROMPT_COMMAND="")
    code = "import time; print('up' + 'dated', flush=True); input(); print('do' + 'ne', flush=True)"
    terminal.type(f'{" ".join(LAUNCHER)} watch -- {sys.executable} -c "{code}"\n')
    terminal.shows("updated")
    terminal.type("\x1a")
    terminal.shows("Stopped")
    below = psutil.Process(terminal.process.pid).children(recursive=True)
    assert any(process.status() == psutil.STATUS_STOPPED for process in below if code in process.cmdline())
    terminal.type("fg\n")
    terminal.shows("fg")
    terminal.type("\n")
    terminal.shows("done")
    terminal.type("exit\n")
    assert terminal.end() == 0


def test_its_record_is_that_of_a_run_without_a_secret(tmp_path, monkeypatch, typed_here):
    words = [sys.executable, "-c", "print('epoch 1/1 step 2/2 loss 0.5000')", "--token", "hush1", "API_KEY=hush2"]
    with monkeypatch.context() as patch:
        patch.setenv("LAUNCHER_SETTINGS", '{"num_workers": 1}')
        patch.setenv("OMP_NUM_THREADS", "2")
        assert watched(*words, options=["--name", "my try"], cwd=tmp_path).returncode == 0
    run = the_run()
    assert run.name.startswith("my-try-") and run.backend == "watch"
    [host] = run.folder.read(run.folder.plan)["hosts"]
    assert host["environment"] == {"LAUNCHER_SETTINGS": '{"num_workers": 1}', "OMP_NUM_THREADS": "2"}
    everything = b"".join(file.read_bytes() for file in run.folder.path.rglob("*") if file.is_file())
    assert b"hush" not in everything
    shown = typed_here("show", "my-try").stdout
    assert f"in          {tmp_path}" in shown and "--token '***' 'API_KEY=***'" in shown
    assert "Completed" in typed_here("runs").stdout and "epoch 1/1" in typed_here("logs", "my-try").stdout
    assert "my-try" in typed_here("compare", "my-try").stdout
    assert "do not differ" in typed_here("diff", "my-try", "my-try").stdout
    assert "is over" in typed_here("stop", "my-try").stdout and typed_here("attach", "my-try").returncode == 0
    for words in (["replay", "my-try"], ["resume", "my-try"]):
        refused = typed_here(*words)
        assert refused.returncode == 2 and "a command without a config" in refused.stderr
        assert "launcher watch --name my-try" in refused.stderr
    assert typed("rm", run.name, "--yes").returncode == 0 and not run.folder.path.exists()


def test_versions_are_recorded_of_a_program_that_the_path_finds_beside_the_launcher(tmp_path, monkeypatch, typed_here):
    """As `python` in an environment that is activated."""
    (tmp_path / "python").symlink_to(sys.executable)
    for folder, recorded in ((Path(sys.executable).parent, True), (tmp_path, False)):
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.defpath}")
        assert watched("python", "-c", "print(1)").returncode == 0
        assert the_run().folder.versions.exists() == recorded
        assert typed_here("rm", the_run().name, "--yes").returncode == 0


def test_launcher_stop_sends_sigterm():
    words = [*LAUNCHER, "watch", "--name", "stopped", "--", sys.executable, "-c", COUNTS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment())
    assert process.stdout.readline().startswith(b"ready")
    run = the_run()
    assert run.state == "InProgress"
    run.stop("tested")
    assert process.stdout.readline() == b"got 15\n" and run.state == "Stopping"
    os.kill(process.pid, signal.SIGUSR2)
    assert process.stdout.read() == b"" and process.wait(60) == 9
    assert run.state == "Stopped" and run.outcome()["stop_reason"] == "tested"


def test_launcher_stop_reaches_what_a_shell_runs(tmp_path):
    """The shell would end at once, and leave the training with its GPU."""
    (tmp_path / "train.sh").write_text(
        f"bash -c {shlex.quote(f'{shlex.join([sys.executable, *TRAINS])}; true')}; true\n"
    )
    words = [*LAUNCHER, "watch", "--name", "stopped", "--", "bash", str(tmp_path / "train.sh")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    training = psutil.Process(int(process.stdout.readline()))
    run = the_run()
    run.stop("tested")
    assert process.stdout.read() == b"saved\n", "in order"
    assert process.wait(60)
    wait_until(lambda: has_ended(training), what="its end")
    assert (run.state, run.outcome()["stop_reason"]) == ("Stopped", "tested")


@pytest.mark.parametrize("kind", ["a script with a name of its own", "a program that waits"])
def test_launcher_stop_reaches_what_any_program_runs_that_dies_of_it(tmp_path, kind):
    """As `accelerate launch` of one process. Linux names a shell's process after its script. What is left behind may take its time."""
    slow = (
        "import os, pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(2.5)\n"
        f"    pathlib.Path({str(tmp_path / 'saved')!r}).write_text(str(time.time()))\n"
        "    sys.exit(print('saved'))\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()"
    )
    command = [sys.executable, "-c", slow]
    if kind == "a program that waits":
        words = [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r}).wait()"]
    else:
        script = tmp_path / "run.sh"
        script.write_text(f"#!/bin/bash\n{shlex.join(command)}\ntrue\n")
        script.chmod(0o755)
        words = [str(script)]
    watched = [*LAUNCHER, "watch", "--name", "stopped", "--", *words]
    process = subprocess.Popen(watched, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    training = psutil.Process(int(process.stdout.readline()))
    run = the_run()
    run.stop("tested")
    assert process.stdout.read() == b"saved\n" and process.wait(60)
    assert has_ended(training) and run.state == "Stopped"
    saved = float((tmp_path / "saved").read_text())
    assert datetime.fromisoformat(run.outcome()["ended"]).timestamp() >= saved - 1, "the record is closed after it"


WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.mark.parametrize(
    ("prepare", "session", "left"),
    [
        ("", False, True),
        ("subprocess.Popen(['true']); time.sleep(0.5)", False, True),
        ("signal.signal(signal.SIGTERM, lambda *_: None)", False, False),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", False, False),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])", False, False),
        ("", True, False),
    ],
    ids=[
        "dies of it",
        "with a zombie beside it",
        "handles it",
        "ignores it",
        "waits for it",
        "in a session of its own",
    ],
)
def test_what_a_program_leaves_behind_at_a_stop(prepare, session, left):
    """torchrun handles SIGTERM and ends its ranks; tini waits for it; a server in a session of its own is to go on."""
    text = (
        "import signal, subprocess, sys, time\n"
        f"{prepare}\n"
        f"child = subprocess.Popen({WAITS!r}, start_new_session={session})\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    child = psutil.Process(int(process.stdout.readline()))
    try:
        found = [one.pid for one in runner._left_behind(psutil.Process(process.pid))]
        assert (child.pid in found) == left
    finally:
        child.kill()
        process.kill()
        process.communicate()


def test_a_shell_is_asked_to_end_before_what_it_runs(monkeypatch):
    """Else it begins its next line."""
    asked: list[str] = []
    below = SimpleNamespace(send_signal=lambda number: asked.append("training"))
    monkeypatch.setattr(runner, "_left_behind", lambda shell: [below])
    runner._terminate(SimpleNamespace(pid=os.getpid(), terminate=lambda: asked.append("shell")))
    assert asked == ["shell", "training"]


TRAINS = [
    "-c",
    "import os, signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved')))\n"
    "print(os.getpid(), flush=True)\n"
    "signal.pause()",
]


@pytest.mark.parametrize(
    ("line", "name"), [("HF_TOKEN=hf_abcdefgh python train.py", "train"), ("python -m it.train", "sh")]
)
def test_a_line_for_a_shell_brings_no_secret_into_the_runs_name(line, name):
    assert watch._script(["sh", "-c", line]) == name


def test_a_closed_output_is_one_that_nobody_reads(tmp_path):
    command = shlex.join([*LAUNCHER, "watch", "--", sys.executable, "-c", "print('heard')"])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], env=environment(), capture_output=True, cwd=tmp_path)
    assert done.returncode == 0 and b"Completed" in done.stderr and b"Traceback" not in done.stderr
    assert the_run().folder.log("algo-1").read_text() == "heard\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "launcher watch -- python train.py"),
        (["--"], "launcher watch -- python train.py"),
        (["python", "train.py", "--lr", "1"], "launcher watch -- COMMAND"),
        (["--", "no-such-program"], "no-such-program: no such program"),
        (["--", "./script.py"], "launcher watch -- python ./script.py"),
        (["--html", "no/where.html", "--", "true"], "there is no folder"),
    ],
)
def test_a_wrong_command_line_says_what_to_write_and_leaves_no_run(
    words, said, tmp_path, monkeypatch, store, typed_here
):
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    found = typed_here("watch", *words)
    assert found.returncode == 2 and said in found.stderr and not store.exists()


def test_a_store_that_no_search_path_can_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "a:b"))
    found = watched("true")
    assert found.returncode == 2 and b"LAUNCHER_RUNS" in found.stderr and not (tmp_path / "a:b").exists()


def test_a_terminal_that_is_closed_hangs_the_command_up(tmp_path):
    terminal = Terminal([*LAUNCHER, "watch", "--", "sleep", "100"], tmp_path)
    wait_until(lambda: psutil.Process(terminal.process.pid).children(recursive=True)[1:], 60, "its start")
    os.close(terminal.master)
    assert terminal.process.wait(60) == 128 + signal.SIGHUP
    assert the_run().state == "Stopped" and the_run().outcome()["stop_reason"] == "SIGHUP"


def test_a_program_that_cannot_be_executed_leaves_a_record_that_says_so(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no program")
    program.chmod(0o755)
    found = watched(program)
    assert found.returncode == 2 and b"Exec format error" in found.stderr
    assert "Exec format error" in the_run().outcome()["failure"]


def test_an_observer_that_the_environment_switches_off_is_named(monkeypatch):
    monkeypatch.setenv("LAUNCHER_OBSERVE", "0")
    found = watched("true")
    assert b"LAUNCHER_OBSERVE=0 in the environment switches the observer off: unset it" in found.stderr


def test_a_page_that_cannot_be_written_costs_no_exit_code(tmp_path):
    (tmp_path / "page").mkdir()
    refused = typed("watch", "--html", str(tmp_path / "page"), "--", "true")
    assert refused.returncode == 2 and "is a folder" in refused.stderr and not launcher.runs()
    code = f"""
import os, pathlib, sys, time
os.mkdir('{tmp_path}/later')
while not any(file.stat().st_size for file in pathlib.Path(os.environ['LAUNCHER_OBSERVER_FOLDER']).rglob('*.algo-1.json')):
    time.sleep(0.05)
sys.exit(3)"""
    found = watched(sys.executable, "-c", code, options=["--html", str(tmp_path / "later")])
    assert found.returncode == 3 and f"Is a directory: '{tmp_path}/later'".encode() in found.stderr
    assert f"launcher diagnose {the_run().name}".encode() in found.stderr


def test_a_terminal_of_another_size_tells_the_command_once_it_is_its_own_too(tmp_path):
    code = "import os, signal\nsignal.signal(signal.SIGWINCH, lambda *_: print('has', *os.get_terminal_size(1), flush=True))\n"
    terminal = Terminal(
        [*LAUNCHER, "watch", "--", sys.executable, "-c", f"{code}print('rea' + 'dy')\ninput()"], tmp_path
    )
    terminal.shows("ready")
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 77, 0, 0))
    os.killpg(terminal.process.pid, signal.SIGWINCH)  # not every kernel does so by itself
    terminal.shows("has 77 20")
    terminal.type("\n")
    assert terminal.end() == 0


def test_without_a_umask_the_record_is_closed_and_the_command_has_none(monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = "import os; print(oct(os.umask(0)))"
    found = watched(sys.executable, "-c", code, umask=0)
    assert found.stdout == b"0o0\n"
    written = [file for file in the_run().folder.path.rglob("*") if "output" not in file.parts]
    assert any(file.name == "outcome.json" for file in written)
    assert any(file.suffix == ".pyc" for file in written), "the observer's, which the command's Python compiles"
    assert not [file for file in written if file.stat().st_mode & 0o002]


def test_an_output_that_cannot_be_read_costs_neither_exit_code_nor_record():
    code = "import os; os.mkfifo(os.environ['LAUNCHER_OBSERVER_FOLDER'] + '/timeline-0.jsonl'); os._exit(5)"
    found = watched(sys.executable, "-c", code)
    assert found.returncode == 5 and the_run().state == "Failed" and b"Traceback" not in found.stderr
    assert not the_run().folder.reserve.exists()

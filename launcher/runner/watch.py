"""Watch a local command: it runs as it would alone, while its steps are measured and recorded."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.backends import toolkit
from launcher.config.issues import UserError, mistake
from launcher.config.redaction import redact, redact_command
from launcher.insight.outside import SETTINGS, VARIABLES
from launcher.planner.plan import run_name
from launcher.planner.python_start import with_python_start
from launcher.planner.source_package import copy_files, uncommitted
from launcher.record import disk, failures, records, trust
from launcher.record.metrics_file import POLL_SECONDS, ObservedMetrics
from launcher.record.records import RunFolder
from launcher.record.shapes import iso
from launcher.runner import start_record
from launcher.runner.run import Run

if TYPE_CHECKING:
    import psutil

RELAY = Path(__file__).with_name("relay.py")

HOST = "algo-1"
"""The name of this machine in the record: the first host's, as in other runs."""

PACKAGES = "install the package that provides {module} in the environment of the command's Python"
"""How to provide a module that a command lacks."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a command to end."""

PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
"""Signals that the launcher passes on to the command."""

SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
"""Names of programs that SIGTERM ends without their children."""

LEFT_SECONDS = 45.0
"""Seconds for what a stopped command leaves behind to end: torchrun gives its processes 30."""

GROUP_SECONDS = 0.05
"""Seconds for a signal to reach the relay too, if it goes to the whole process group, one process after another."""

ASKS = signal.SIGRTMAX if sys.platform == "linux" else signal.SIGSYS
"""Asks the relay for all signals that it got before: Linux delivers those first. https://man7.org/linux/man-pages/man7/signal.7.html"""

ANSWER_SECONDS = 10.0
"""Seconds to wait for the relay, which may be stopped; without its answer a signal may reach the command twice."""


@dataclass(frozen=True)
class Ended:
    """How a watched command ended."""

    run: Run
    exit_code: int
    """As a shell reports it: 128 plus the signal's number if a signal ended the command."""
    left: bool
    """Whether processes that it started still hold its output."""
    hung_up: bool
    """Whether the terminal is gone."""


def watch(command: Sequence[str], job: str, started: Callable[[Run], None] = lambda run: None) -> Ended:
    """Run a command to its end, with the observer in each of its Python processes.

    It keeps our process group, terminal, standard input, current folder and open files. Its output goes through a relay, by a
    terminal if ours is one, else by a pipe. The main thread of a process can watch one command at a time.

    Args:
        command: program and arguments; the program exists (`shutil.which`).
        job: the run's name begins with it.
        started: called with the run before the command starts.

    Raises:
        UserError: the command cannot be executed, or there is no place for a record.
    """
    if os.pathsep in str(records.store()):
        fix = f"set LAUNCHER_RUNS to a folder without {os.pathsep} in its path: the command's Python finds the observer on PYTHONPATH"
        raise mistake("LAUNCHER_RUNS", str(records.store()), fix)
    planned = datetime.now(timezone.utc)
    name = run_name(job, planned)
    given = {variable: os.environ[variable] for variable in (SETTINGS, *VARIABLES) if variable in os.environ}
    plan = {
        "name": name,
        "planned": planned.isoformat(timespec="microseconds"),
        "backend": "watch",
        "job": {"name": job},
        "source": os.getcwd(),
        "hosts": [{"name": HOST, "command": redact_command(command), "environment": redact(given)}],
    }
    with trust.closed_umask() as umask, start_record.new_folder(name, lambda made: _write(plan, made)) as (folder, _):
        records.write_json(folder.supervisor, {"pid": os.getpid()})
        disk.hold_reserve(folder.reserve)
        started(Run(folder))
        began, clock = time.time(), time.monotonic()
        try:
            code, left, received = _carry_out(command, folder, umask)
        except UserError as error:
            failure = {"state": records.FAILED, "failure": f"not started: {error.issues[0].found}"}
            records.write_json(folder.outcome, failure)
            raise
        finally:
            folder.reserve.unlink(missing_ok=True)
        seconds = time.monotonic() - clock
        outcome = {
            **_state(folder, code, received),
            "started": iso(began),
            "ended": iso(began + seconds),
            "seconds": round(seconds, 3),
            "host_seconds": round(seconds, 3),
        }
        records.write_json(folder.outcome, outcome)
    return Ended(Run(folder), code if code >= 0 else 128 - code, left, signal.SIGHUP in received)


def _write(plan: dict[str, Any], folder: RunFolder) -> None:
    """Write the record of a command, before it starts."""
    state, patch = uncommitted(Path(plan["source"]))
    records.write_json(folder.git, state)
    if patch:
        records.write_atomically(folder.git_patch, patch)
    program = plan["hosts"][0]["command"][0]
    runs_in_ours = Path(shutil.which(program) or program).absolute().parent == Path(sys.executable).parent
    if runs_in_ours:
        records.write_json(folder.versions, start_record.installed_versions())
    _copy_observer(folder)
    _measurements(folder).mkdir(parents=True)
    folder.log(HOST).parent.mkdir()
    records.write_json(folder.plan, plan)  # last: the run can be found once this exists


def _copy_observer(folder: RunFolder) -> None:
    """Copy the observer into a run's folder and create its __pycache__ folders: if the command made them, they would be as open as its
    umask allows, and the code in them runs as its user."""
    files = with_python_start([], observe=True, secrets={})
    copy_files(files, _observer(folder))
    for code in {(_observer(folder) / file.path).parent for file in files}:
        (code / "__pycache__").mkdir()


def _observer(folder: RunFolder) -> Path:
    """The folder on the PYTHONPATH of a command's processes."""
    return folder.path / "observer"


def _measurements(folder: RunFolder) -> Path:
    return folder.host(HOST) / "output/data" / HOST


def _environment(folder: RunFolder) -> dict[str, str]:
    """The command's environment: ours plus the observer's variables."""
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_observer(folder)), *([path] if path else [])]),
        "LAUNCHER_OBSERVER_FOLDER": str(_measurements(folder)),
    }


def _carry_out(command: Sequence[str], folder: RunFolder, umask: int) -> tuple[int, bool, list[int]]:
    """Run a command to its end.

    Args:
        umask: the command's.

    Returns:
        Its subprocess return code, whether processes that it started still hold its output, and the signals received.
    """
    observed = ObservedMetrics(folder, HOST)
    with _Output(folder.log(HOST)) as output, _signals() as heard:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # our handlers would swallow them in the fork
        try:
            process = subprocess.Popen(
                command,
                stdout=output.stdout,
                stderr=output.stderr,
                close_fds=False,  # what it would inherit from the shell
                env=_environment(folder),
                umask=umask,
                preexec_fn=functools.partial(_become_the_command, mask),
            )
        except OSError as error:
            fix = "name the interpreter too: launcher watch -- python train.py"
            raise mistake("command", f"{command[0]}: {error.strerror}", fix) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            output.given()
        received: list[int] = []
        left_behind: list[psutil.Process] = []
        until: float | None = None
        while process.poll() is None or (until is not None and time.monotonic() < until and _any_runs(left_behind)):
            select.select([heard], [], [], POLL_SECONDS)
            if until is None and os.path.exists(folder.stop_request):  # False, no error, if a file server hiccups
                left_behind, until = _terminate(process), time.monotonic() + LEFT_SECONDS
            came = _read(heard) & {*PASSED_ON}
            if came:
                time.sleep(GROUP_SECONDS)
                came |= _read(heard) & {*PASSED_ON}
                if signal.SIGWINCH in came:
                    output.resize()
                # SIGWINCH came before the command's own terminal was resized
                heard_already = output.heard_by_group() - {signal.SIGWINCH}
                for number in sorted(came - heard_already):
                    process.send_signal(number)
                    if process.returncode is not None:
                        _send(left_behind, number)
                if process.returncode is not None and came & {*ENDING}:
                    until = time.monotonic()
                received += sorted(came)
            observed.poll()
        left = output.drain()
    with contextlib.suppress(OSError):  # a full disk, or a record that is no file: the command's end counts
        observed.update()
    return process.returncode, left, received


def _become_the_command(mask: set[int]) -> None:
    """In the fork, before the command: it dies with a killed launcher, and a signal to the group ends it, which our handlers would swallow.

    Args:
        mask: the signals that the command is to block; those in PASSED_ON are blocked until then.
    """
    toolkit.die_with_the_parent()
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _terminate(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """SIGTERM a command and what would go on without it: the command first, or a shell begins its next line.

    Returns:
        What would go on without it.
    """
    import psutil

    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        below += _left_behind(psutil.Process(process.pid))
    process.terminate()
    _send(below, signal.SIGTERM)
    return below


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    import psutil

    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.send_signal(number)


def _left_behind(process: psutil.Process) -> Iterator[psutil.Process]:
    """Processes that survive if SIGTERM ends a program: a shell's children, and those of a program that does not handle it, such as
    `accelerate launch` of one process. Those in a session of their own were meant to survive, and are left out."""
    import psutil

    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):  # it has just ended
        children = process.children() if _is_shell(process) or _dies_of_sigterm(process.pid) else []
    for child in children:
        with contextlib.suppress(OSError):
            if os.getsid(child.pid) == os.getsid(process.pid):
                yield child
                yield from _left_behind(child)


def _is_shell(process: psutil.Process) -> bool:
    """By its executable, since a script may have any name."""
    import psutil

    with contextlib.suppress(psutil.Error):  # one that has ended has none
        return Path(process.exe()).name in SHELLS
    return False


def _dies_of_sigterm(pid: int) -> bool:
    """Whether a process neither handles, ignores nor blocks SIGTERM: proc(5), SigCgt, SigIgn, SigBlk. A program in Go always handles it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    masks = re.findall(r"^Sig(?:Cgt|Ign|Blk):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return not any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


def _any_runs(processes: Sequence[psutil.Process]) -> bool:
    import psutil

    for one in processes:
        with contextlib.suppress(psutil.Error):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


class _Output:
    """The command's standard output and error, each like ours; a relay copies them there and to the log."""

    def __init__(self, log: Path):
        same = os.fstat(1).st_dev == os.fstat(2).st_dev and os.fstat(1).st_ino == os.fstat(2).st_ino
        channels = {ours: _channel(ours) for ours in ((1,) if same else (1, 2))}
        self.stdout, self.stderr = channels[1][1], channels[1 if same else 2][1]
        self._terminals = {ours: ends[0] for ours, ends in channels.items() if os.isatty(ours)}
        ended, self._ended = os.pipe()
        self._copied, copied = os.pipe()
        self._group, group = os.pipe()
        os.set_blocking(self._group, False)
        command = [sys.executable, "-IS", str(RELAY), "--log", str(log)]
        command += ["--ended", str(ended), "--copied", str(copied), "--signals", str(group)]
        command += [f"{ends[0]}:{ours}" for ours, ends in channels.items()]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            passed = [ended, copied, group, *(ends[0] for ends in channels.values())]
            self._relay = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for end in {*passed} - {*self._terminals.values()}:
            os.close(end)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._copied, self._group, *self._terminals.values()):
            os.close(end)

    def given(self) -> None:
        """Close the command's ends, which it has inherited by now."""
        for end in {self.stdout, self.stderr}:
            os.close(end)

    def resize(self) -> None:
        """Give the command's terminals the size of ours."""
        for ours, terminal in self._terminals.items():
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(ours, termios.TIOCGWINSZ, bytes(8)))

    def heard_by_group(self) -> set[int]:
        """The signals since the last call that went to the whole process group, and so to the command too."""
        self._relay.send_signal(ASKS)  # on a busy machine it may not have run since
        heard: set[int] = set()
        end = time.monotonic() + ANSWER_SECONDS
        while ASKS not in heard and select.select([self._group], [], [], max(0.0, end - time.monotonic()))[0]:
            new = _read(self._group)
            if not new:  # the relay has ended
                break
            heard |= new
        return heard - {ASKS}

    def drain(self) -> bool:
        """Wait until everything written by now is copied. Returns whether a process still holds the other end."""
        os.close(self._ended)
        if os.read(self._copied, 1):
            return True
        self._relay.wait()
        return False


def _read(pipe: int) -> set[int]:
    """The bytes that are in a pipe."""
    try:
        return {*os.read(pipe, 4096)}
    except BlockingIOError:
        return set()


def _channel(ours: int) -> tuple[int, int]:
    """The relay's and the command's end of a stream: a terminal like ours, which leaves line ends to ours, or a pipe."""
    if not os.isatty(ours):
        return os.pipe()
    relays, commands = os.openpty()
    settings = termios.tcgetattr(ours)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(commands, termios.TCSANOW, settings)
    fcntl.ioctl(relays, termios.TIOCSWINSZ, fcntl.ioctl(ours, termios.TIOCGWINSZ, bytes(8)))
    return relays, commands


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """The read end of a pipe that gets the number of each signal in PASSED_ON, and SIGCHLD. What we ignore, the command ignores too, except
    SIGCHLD: if it is ignored, the kernel keeps no exit code.
    """
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before = {number: signal.getsignal(number) for number in (*PASSED_ON, signal.SIGCHLD)}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN or number == signal.SIGCHLD]
    for number in heard:
        signal.signal(number, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup)
        for number in heard:
            signal.signal(number, before[number])
        os.close(reading)
        os.close(writing)


def _state(folder: RunFolder, code: int, received: Sequence[int]) -> dict[str, Any]:
    """The outcome's part on the end: the state, and why a command was stopped or failed."""
    stop = folder.read(folder.stop_request)
    ends = [number for number in received if number in ENDING]
    if stop or ends:
        reason = stop["reason"] if stop else "Ctrl-C" if ends[0] == signal.SIGINT else signal.Signals(ends[0]).name
        return {"state": records.STOPPED, "stop_reason": reason, "exit_code": code}
    if code == 0:
        return {"state": records.COMPLETED}
    found = failures.describe(folder, [HOST], "", exit_code=code, packages=PACKAGES, config=False)
    return {"state": records.FAILED, "failed_host": HOST, **found}

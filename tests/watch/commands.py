"""Commands run alone and by `launcher watch`, in pipes and in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import launcher
from tests.conftest import ROOT, as_in_a_terminal, wait_until

LAUNCHER = (sys.executable, "-m", "launcher")

OURS = re.compile(
    rb"^(launcher: .*|  (?:cause|fix|\d\.|   ).*|  (?:not diagnosed|steps not|all of it|page|processes).*)\r?\n",
    re.MULTILINE,
)
"""What `launcher watch` itself says."""


def environment(**more: str) -> dict[str, str]:
    """Of a test's commands, wherever they run."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def watched(*command: str | Path, options: Sequence[str] = (), **settings) -> subprocess.CompletedProcess[bytes]:
    """A command's end under `launcher watch`."""
    words = [*LAUNCHER, "watch", *options, "--", *map(str, command)]
    return subprocess.run(words, capture_output=True, timeout=120, env=environment(), **settings)


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    """Another command of the launcher."""
    return subprocess.run([*LAUNCHER, *words], capture_output=True, text=True, timeout=120, env=environment())


def the_run() -> launcher.Run:
    """The only run of the store."""
    [run] = launcher.runs()
    return run


class Terminal:
    """A terminal with a program in it that leads a session, as a shell's window."""

    def __init__(self, command: Sequence[str], folder: Path, **variables: str):
        self.master, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=folder,
            env=environment(**variables),
            preexec_fn=_lead_a_session,
        )
        os.close(child)
        os.set_blocking(self.master, False)
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def shows(self, text: str, seconds: float = 60) -> None:
        """Wait until something is on the screen."""
        wait_until(
            lambda: text.encode() in self._read(), seconds, f"{text!r} on the screen, which shows {self.shown!r}"
        )

    def end(self) -> int:
        """Wait for the program. Returns its exit status."""
        wait_until(lambda: bool(self._read()) and self.process.poll() is not None, 60, "the end")
        self._read()
        os.close(self.master)
        return self.process.wait()

    def _read(self) -> bytes:
        with contextlib.suppress(OSError):  # nothing new, or nobody holds the other end
            while part := os.read(self.master, 65536):  # a terminal gives some KB at once
                self.shown += part
        return self.shown


def _lead_a_session() -> None:
    as_in_a_terminal()
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

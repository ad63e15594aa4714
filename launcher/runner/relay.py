"""The relay of a watched command: copies what the command writes to where it would have gone, and to the run's log.

    python relay.py --log FILE --ended FD --copied FD --signals FD FROM:TO …

It runs until everyone who holds the command's output has closed it, so a process that the command leaves behind goes on writing where
it would have written. Two more things pass through its pipes:

- `ended` closes when the command is over. Once everything written until then is copied, the relay ends or, if others still hold the
  output, writes a byte to `copied`.
- Each signal that the relay gets goes to `signals`, one byte with its number. The relay is in the command's process group, so this
  tells a signal to the whole group (Ctrl-C) from one to the launcher alone. The launcher asks with a signal of its own, whose number
  comes after those of all earlier signals.

The launcher starts it with all signals blocked. The file runs by its path and imports nothing from this kit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import threading

PART = 2**16
"""Bytes copied at once: as many as a pipe holds. What is left to copy when a command ends is no more than that."""


class Copy:
    """One stream: read from, written to, and logged."""

    def __init__(self, source: int, target: int):
        self.source, self.target = source, target
        os.set_blocking(source, False)

    def pass_on(self, log: Log) -> int:
        """Copy what is there, at most PART bytes. Returns the count."""
        try:
            data = os.read(self.source, PART)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: nobody holds the terminal's other end
            data = b""
        try:
            _write(self.target, data)
        except OSError:  # its reader has gone; the command notices when it writes next
            data = b""
        if not data:
            os.close(self.source)
            self.source = -1
        log.write(data)
        return len(data)


class Log:
    """The run's log, until its disk is full."""

    def __init__(self, file: str):
        self._stream: int | None = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            _write(self._stream, data)
        except OSError as error:
            os.close(self._stream)
            self._stream = None
            with contextlib.suppress(OSError):
                print(f"launcher: the log ends here: {error.strerror}", file=sys.stderr, flush=True)


def relay(copies: list[Copy], log: Log, ended: int, copied: int) -> None:
    """Copy until all streams are closed."""
    waits = True
    while any(copy.source >= 0 for copy in copies):
        sources = {copy.source: copy for copy in copies if copy.source >= 0}
        ready, _, _ = select.select([*sources, *([ended] if waits else [])], [], [])
        for source in sources:
            if source in ready:
                sources[source].pass_on(log)
        if waits and ended in ready:
            for copy in sources.values():
                left = PART
                while copy.source >= 0 and left > 0 and (count := copy.pass_on(log)):
                    left -= count
            waits = False
            if any(copy.source >= 0 for copy in copies):
                with contextlib.suppress(BrokenPipeError):  # the launcher was killed; those that hold the output go on
                    os.write(copied, b"m")


def report_signals(pipe: int) -> None:
    """Write the number of each signal received, until nobody reads."""
    with contextlib.suppress(BrokenPipeError):
        while True:
            os.write(pipe, bytes([signal.sigwait(signal.valid_signals())]))


def _write(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # another program made it non-blocking
            select.select([], [target], [])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    for name in ("--ended", "--copied", "--signals"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("streams", nargs="+")
    options = parser.parse_args()
    threading.Thread(target=report_signals, args=(options.signals,), daemon=True).start()
    copies = [Copy(*map(int, stream.split(":"))) for stream in options.streams]
    relay(copies, Log(options.log), options.ended, options.copied)


if __name__ == "__main__":
    main()

"""Follow a run: a live line in a terminal, plain lines in a pipe, and the question that Ctrl-C asks."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterator

from launcher.backends.interrupts import deferred, interruptible
from launcher.commands import options as arguments
from launcher.config.issues import UserError, mistake
from launcher.record import shapes
from launcher.record.metric_lines import parse_line
from launcher.record.progress import RunProgress
from launcher.record.toolkit_lines import ToolkitLines
from launcher.runner.run import Run

PLAIN_SECONDS = 10.0
"""Least seconds between two lines of progress without a terminal, if the script prints no metric lines."""

DENIED_SECONDS = 300.0
"""Seconds after which a command without a terminal follows no longer where AWS refuses to describe the run for want of a permission."""


def follow(run: Run, *, every_line: bool = False, toolkits: bool = False) -> bool:
    """Show a run until it is over or the user leaves it.

    Ctrl-C asks whether to stop the run. SIGTERM and SIGHUP, if they interrupt this process, stop it without a question. A signal handler
    asks AWS nothing: the code that it interrupts may hold a lock that the request needs.

    Args:
        every_line: print all hosts' log lines instead of the progress line.
        toolkits: include the container toolkit's own lines.

    Returns:
        Whether Ctrl-C ended the run or the display, or a signal could not stop the run.

    Raises:
        UserError: nobody is there to get the permission that AWS misses, and the run goes on.
    """
    display = _LogLines(run, toolkits) if every_line else _LiveLine(run) if sys.stdout.isatty() else _PlainLines(run)
    news = _News(run)
    positions: dict[str, int] = {}
    interrupted = stopping = False
    with deferred() as came:
        shapes.prepare()

        def idle() -> None:
            if came:
                raise KeyboardInterrupt  # again: Python drops one that is raised in a callback
            display.idle()
            news.show(display)
            _end_if_denied(run)

        while True:
            try:
                with interruptible():
                    for host, line in run.logs(follow=True, positions=positions, idle=idle):
                        display.show(host, line, is_first=host == run.hosts[0])
                    idle()
                display.close()
                return interrupted
            except KeyboardInterrupt:
                numbers = [came.pop() for _ in range(len(came))]
                ending = [signal.Signals(number).name for number in numbers if number != signal.SIGINT]
                if ending and stopping:
                    continue
                if not ending:
                    display.close()
                    if stopping:
                        return True  # it stops by itself now
                    answer = _ask()
                    came.clear()  # a signal at the question has answered it
                    if answer == "leave":
                        run.detach()
                        return True
                if not _stop(run, f"launcher run received {ending[0]}" if ending else "Ctrl-C", display):
                    return True
                interrupted, stopping = not ending, True


def _stop(run: Run, reason: str, display: _LiveLine | _PlainLines | _LogLines) -> bool:
    """Stop a run, and print that it stops, or why it does not. Only Ctrl-C interrupts this.

    Returns:
        Whether the run was asked to stop.
    """
    try:
        with interruptible(signal.SIGINT):
            run.stop(reason)
    except UserError as error:  # AWS does not answer
        display.close()
        print(error, file=sys.stderr)
        if run.spent:
            print(f"{run.name} has cost {run.spent}", file=sys.stderr)
        return False
    display.close()  # after the request: a terminal that is closed takes no text
    print("stopping: the processes have up to two minutes to finish their step", file=sys.stderr)
    return True


def _end_if_denied(run: Run) -> None:
    """Raise a UserError if AWS has refused for DENIED_SECONDS to describe the run, and no terminal shows that to a user."""
    if run.denied_since is None or time.monotonic() - run.denied_since < DENIED_SECONDS or _has_terminal():
        return
    found = f"{run.name} goes on, and is not followed any longer after {DENIED_SECONDS / 60:.0f} min: {run.trouble}"
    raise mistake("run", found, f"then launcher attach {run.name} follows it; launcher stop {run.name} stops it")


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask() -> str:
    """Ask what Ctrl-C means. Without a terminal it stops the run."""
    if not _has_terminal():
        return "stop"
    try:
        with interruptible():
            answer = input("stop the run, or leave it running? [S/l] ").strip().lower()
    except (EOFError, KeyboardInterrupt):
        return "stop"
    return "leave" if answer.startswith("l") else "stop"


class Trouble:
    """Why no lines come: SageMaker does not answer, or its logs may not be read.

    Args:
        follows: whether SageMaker is asked again.
    """

    def __init__(self, run: Run, *, follows: bool = True) -> None:
        self.run, self.again = run, "; trying again" if follows else ""
        self.unreachable = self.unreadable = ""

    def news(self) -> Iterator[str]:
        """What has changed since the last call."""
        if self.run.trouble != self.unreachable:
            self.unreachable = self.run.trouble
            goes_on = f"{self.unreachable}. {self.run.name} goes on{self.again}"
            yield goes_on if self.unreachable else "AWS answers again"
        unreadable = self.run.folder.read(self.run.folder.remote).get("no_logs", "")
        if unreadable != self.unreadable:
            self.unreadable = unreadable
            yield unreadable or "the logs can be read again"


class _News:
    """Lines between log lines: the job's stages on SageMaker, spot interruptions, whether AWS answers and lets its logs be read."""

    def __init__(self, run: Run) -> None:
        self.run, self.trouble = run, Trouble(run)
        self.transitions = 0

    def show(self, display: _LiveLine | _PlainLines | _LogLines) -> None:
        remote = self.run.folder.read(self.run.folder.remote)
        found = remote.get("SecondaryStatusTransitions", [])
        for transition in found[self.transitions :]:
            display.close()
            at = transition["StartTime"][11:19]
            print(f"{at} {transition['Status']}: {transition.get('StatusMessage', '')}".rstrip(": "), flush=True)
        self.transitions = len(found)
        for line in self.trouble.news():
            display.close()
            arguments.note(line)


class _LiveLine:
    """One line that is rewritten in place."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.progress = RunProgress(run.folder)
        self.drawn = False
        self.is_history = True
        """Whether the lines are history, of which only the last is drawn."""

    def show(self, host: str, line: str, *, is_first: bool) -> None:
        if is_first and self.progress.read_line(line, time.monotonic()) and not self.is_history:
            self.draw()

    def idle(self) -> None:
        if self.progress.read_observed(time.monotonic()) or (self.is_history and self.progress.metrics):
            self.draw()
        self.is_history = False
        self.progress.caught_up()

    def draw(self) -> None:
        text = self.progress.line(self.progress.seconds_left(time.monotonic()), self.run.spend)
        sys.stdout.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
        sys.stdout.flush()
        self.drawn = True

    def close(self) -> None:
        if self.drawn:
            sys.stdout.write("\n")
            self.drawn = False


class _PlainLines:
    """Each metric line of the first host; if it prints none, now and then the steps that the observer counted."""

    def __init__(self, run: Run) -> None:
        self.progress = RunProgress(run.folder)
        self.again_at = 0.0

    def show(self, host: str, line: str, *, is_first: bool) -> None:
        if is_first and self.progress.read_line(line, time.monotonic()) and parse_line(line) is not None:
            print(line.strip(), flush=True)

    def idle(self) -> None:
        now = time.monotonic()
        if now >= self.again_at and self.tell(now):
            self.again_at = now + PLAIN_SECONDS

    def tell(self, now: float) -> bool:
        """Print the steps that the observer has counted since. Returns whether there were any."""
        new = self.progress.read_observed(now)
        if new:
            print(self.progress.line(self.progress.seconds_left(now)), flush=True)
        return new

    def close(self) -> None:
        self.tell(time.monotonic())


class _LogLines:
    """Every line of every host, the toolkit's on request."""

    def __init__(self, run: Run, toolkits: bool) -> None:
        self.several, self.toolkits = len(run.hosts) > 1, toolkits
        self.toolkit = {host: ToolkitLines() for host in run.hosts}

    def show(self, host: str, line: str, *, is_first: bool) -> None:
        if self.toolkit[host].has(line) and not self.toolkits:
            return
        print(f"{host} | {line}" if self.several else line, flush=True)

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass

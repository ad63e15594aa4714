"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from launcher import backends
from launcher.config.issues import mistake
from launcher.config.sections import MAX_HOSTS

CarryOut = Callable[[argparse.Namespace], int]
"""Options -> exit code."""

Add = Callable[[str, str, CarryOut | None], argparse.ArgumentParser]
"""Adds a command: (last word of its name, help, function) -> its parser."""


def adding_to(parser: argparse.ArgumentParser, metavar: str, prefix: str = "", help: str | None = None) -> Add:
    """A function that adds commands to a parser. Each has --debug; its options hold its name, such as `study scaling`, in `command`,
    and its parser in `parser`."""
    commands = parser.add_subparsers(required=True, metavar=metavar, help=help, prog=parser.prog)

    def add(name: str, help: str, carry_out: CarryOut | None) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help)
        made.set_defaults(command=prefix + name, carry_out=carry_out, parser=made)
        made.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        return made

    return add


def run(
    made: argparse.ArgumentParser, name: str = "run", help: str = "a run's name, or a job's name for its latest run"
) -> None:
    made.add_argument(name, metavar="RUN", help=help)


def json(made: argparse.ArgumentParser, shape: str) -> None:
    """--json, with the shape of its output."""
    made.add_argument("--json", action="store_true", help=f"print JSON: {shape}")


def yes(made: argparse.ArgumentParser) -> None:
    made.add_argument("--yes", action="store_true", help="do not ask")


def overrides(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],  # else argparse calls them required
        help="override a key, for example hyperparameters.epochs=1",
    )


def hosts(made: argparse.ArgumentParser) -> None:
    made.add_argument("--hosts", type=_hosts, metavar="N", help="short for compute.instance_count=N")


def config(made: argparse.ArgumentParser) -> None:
    made.add_argument("config", metavar="CONFIG", help="a YAML file, or a built-in config's name")
    overrides(made)
    smoke(made)


def smoke(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--smoke", action="store_true", help="apply the config's `smoke` section: a small version of the job"
    )


def job(made: argparse.ArgumentParser) -> None:
    """A config and its backend."""
    config(made)
    on(made)


def on(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--on",
        default=backends.DEFAULT,
        metavar="BACKEND",
        help=f"where it runs: {', '.join(backends.BACKENDS)} (default: {backends.DEFAULT})",
    )


def every_line(made: argparse.ArgumentParser) -> None:
    made.add_argument("--logs", action="store_true", help="print every log line instead of the progress line")
    made.add_argument("--all", action="store_true", help="with --logs: the container toolkit's own lines too")


def start(made: argparse.ArgumentParser) -> None:
    """How a run is started and followed."""
    made.add_argument("--detach", action="store_true", help="return at once and leave the run running")
    every_line(made)
    made.add_argument(
        "--max-cost", type=_dollars, metavar="USD", help="refuse a job that could cost more than this on SageMaker"
    )


def trials(made: argparse.ArgumentParser) -> None:
    """Where trials are kept, and what they may cost."""
    made.add_argument(
        "--table", metavar="FILE.csv", help="keep the trials in this file; trials that it holds are not run again"
    )
    made.add_argument(
        "--max-cost",
        type=_dollars,
        metavar="USD",
        help="refuse trials that together could cost more than this on SageMaker",
    )


def _hosts(text: str) -> int:
    """The number of --hosts, whose range is that of compute.instance_count."""
    try:
        return int(text)
    except ValueError:
        raise _wrong(text, f"a whole number from 1 to {MAX_HOSTS}", "write --hosts 2") from None


def _dollars(text: str) -> float:
    """The number of --max-cost."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:  # nan allows nothing
        raise _wrong(text, "US dollars, above 0", "write --max-cost 20")
    return value


def _wrong(text: str, valid: str, fix: str) -> argparse.ArgumentTypeError:
    """What argparse prints after the option's name."""
    return argparse.ArgumentTypeError(f"{text!r}\n  valid: {valid}\n  fix:   {fix}")


def end_like_ctrl_c(*, terminal: bool = True) -> None:
    """From now on, ending this process stops the current run, as Ctrl-C does.

    Args:
        terminal: so does closing its terminal.
    """
    for number in (signal.SIGTERM, signal.SIGHUP) if terminal else (signal.SIGTERM,):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def page(options: argparse.Namespace) -> Path | None:
    """The file of --html; None if not given. Raises UserError as `new_file`."""
    return None if options.html is None else new_file("--html", options.html, "why.html")


def new_file(option: str, given: str, example: str) -> Path:
    """A file that the command will write when it is done.

    Raises:
        UserError: it cannot be written there.
    """
    file = Path(given).absolute()
    if not file.parent.is_dir():
        raise mistake(option, f"{given}: there is no folder {file.parent}", "create it, or choose another")
    if file.is_dir():
        raise mistake(option, f"{given}: is a folder", f"name a file: {option} {Path(given, example)}")
    return file


def overrides_of(options: argparse.Namespace) -> list[str]:
    """A command's overrides, including the one that --hosts stands for."""
    given = [f"compute.instance_count={options.hosts}"] if options.hosts is not None else []
    return [*options.overrides, *given]


def progress_printer(options: argparse.Namespace) -> Callable[[str], None]:
    """How a command reports progress: with --json, beside the output for machines; else as part of the output."""
    return note if options.json else print_line


def print_line(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def note(text: str) -> None:
    """Print a line to standard error, beside output for machines."""
    print(text, file=sys.stderr, flush=True)

"""The command line: parse the arguments, call one command, and print the user's mistakes without a traceback."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import keyword
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from launcher.commands.exit_codes import DONE, INTERRUPTED, RUN_FAILED, USER_ERROR
from launcher.commands.options import adding_to
from launcher.commands.parser import Parser, ShowVersion, in_groups
from launcher.config.issues import Unreachable, UserError, mistake
from launcher.show.severity import coloured
from launcher.show.terminal import Terminal

GROUPS = {
    "Start here": ("init", "import", "defaults", "explain", "prepare", "weights"),
    "Plan and run": ("plan", "run", "watch", "attach", "stop", "resume", "replay"),
    "Look at runs": ("runs", "show", "logs", "compare", "diff", "rm", "prune"),
    "Keep a teacher's answers": ("label", "labels"),
    "Make it faster": ("diagnose", "tune", "study", "profile", "drill"),
    "The machine and its tools": ("doctor", "emulate", "schema", "completion"),
}
"""The commands as the help lists them: title -> names. Each has a module of its name."""


FOLLOWING = ("run", "label", "resume", "replay", "tune", "study", "drill")
"""Commands that stop what they follow, or leave it, if nobody reads their output."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _open_streams()
    sys.stdout, sys.stderr = _safe(sys.stdout), _safe(sys.stderr)
    options = read(sys.argv[1:] if words is None else words)
    try:
        return int(options.carry_out(options))
    except Unreachable as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `launcher logs RUN | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            follows = options.command.split()[0] in FOLLOWING and not getattr(options, "detach", False)
            return RUN_FAILED if follows else DONE
        if options.debug:
            raise
        mistakes = error if isinstance(error, UserError) else _about_the_disk(error)
        print(coloured(str(mistakes), sys.stderr), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def read(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. `command` of the result is its name, as in `study scaling`. Exits with 2 on a mistake."""
    words = list(words)
    ours, behind = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = command_line(ours)
    if not words:
        parser.print_help()
        parser.exit()
    options, more = parser.parse_known_args(ours)
    options.behind = behind
    if behind and options.command not in ("emulate", "tune", "watch"):
        options.parser.error("only `launcher watch`, `launcher tune` and `launcher emulate` take a command after --")
    if more and hasattr(options, "overrides") and not any(word.startswith("-") for word in more):
        options.overrides = [*options.overrides, *more]  # argparse accepts key=value words only before the first option
    elif more:
        names = [word.partition("=")[0] for word in more if word.startswith("-")]  # what follows may be a password
        fix = options.parser.unknown_options(names) if names else options.parser.surplus_words(more, options)
        if options.command == "watch":
            fix = "put the command after --: launcher watch -- COMMAND ..."
        options.parser.error(f"unrecognized arguments: {' '.join(names or more)}; {fix}")
    return options


def command_line(words: Sequence[str] = ()) -> Parser:
    """The parser of the command line.

    Args:
        words: if they begin with a command's name, or with --debug and it, the parser has only that command: the others' modules, a
            third of the time of a plan, are not loaded. Else it has all commands.
    """
    parser = Parser(
        prog="launcher",
        usage="launcher [--version] [--debug] COMMAND …",
        description="Start vision training jobs on SageMaker or without AWS, and find out why one is slow.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    to = adding_to(parser, "COMMAND", help=argparse.SUPPRESS)  # the epilog lists them
    names = [name for group in GROUPS.values() for name in group]
    named = next((word for word in words if word != "--debug"), "")
    for name in [named] if named in names else names:
        importlib.import_module(f"launcher.commands.{name}{'_' * keyword.iskeyword(name)}").add(to)
    if named not in names:
        parser.epilog = in_groups(parser, GROUPS) + "\n\nlauncher COMMAND --help says more of each."
    return parser


def _open_streams() -> None:
    """Open closed standard streams, so that no other file takes their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 – Python's own are never closed either
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _safe(stream: TextIO) -> TextIO:
    """The stream, made safe for any text: it can encode all of it, and a terminal obeys none of it."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, Terminal):
        return stream
    stream.reconfigure(errors="backslashreplace")
    return Terminal(stream.buffer, stream.encoding, stream.errors, line_buffering=True) if stream.isatty() else stream


def _about_the_disk(error: OSError) -> UserError:
    """An operating system error as a mistake with a fix."""
    fix = {
        errno.EACCES: "choose a place that you may write to, or change its permissions",
        errno.ENOSPC: "free some disk space",
    }
    return mistake(
        str(error.filename or "disk"),
        error.strerror or str(error),
        fix.get(error.errno or 0, "check the path; --debug shows the traceback"),
    )

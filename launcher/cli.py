"""The commands. Each is thin: it reads arguments, calls the Python API, and prints."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence

import launcher
from launcher import backends, records, tables
from launcher.findings import UserError, mistake
from launcher.following import follow
from launcher.planning import plan_config
from launcher.records import OVER

DONE, RUN_FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the user's mistakes are printed without a traceback."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    if more and hasattr(options, "overrides") and not any(word.startswith("-") for word in more):
        options.overrides += more  # argparse takes key=value words before the first option only
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    try:
        return options.command(options)
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `launcher logs RUN | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        if options.debug:
            raise
        print(error if isinstance(error, UserError) else _about_the_disk(error), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _about_the_disk(error: OSError) -> UserError:
    """What the operating system refused, as a mistake with a cure."""
    cure = {errno.EACCES: "choose a place that you may use, or change its permissions", errno.ENOSPC: "free some space"}
    return mistake(
        str(error.filename or "disk"),
        error.strerror or str(error),
        cure.get(error.errno, "check the path; --debug shows where it happened"),
    )


def _plan_from(options: argparse.Namespace) -> launcher.Plan:
    hosts = [f"compute.instance_count={options.hosts}"] if options.hosts is not None else []
    return plan_config(options.config, [*options.overrides, *hosts], on=options.on, smoke=options.smoke)


def plan(options: argparse.Namespace) -> int:
    planned = _plan_from(options)
    print(planned.to_json() if options.json else planned)
    return USER_ERROR if planned.errors else DONE


def run(options: argparse.Namespace) -> int:
    planned = _plan_from(options)
    for finding in planned.findings:
        if finding.level == "warning":
            print(f"warning: {finding}", file=sys.stderr)
    started = launcher.run(planned, detach=options.detach)
    print(f"run {started.name} on {planned.backend}: {started.folder.path}", flush=True)
    if options.detach:
        print(
            f"it goes on without this terminal; launcher attach {started.name} follows it, launcher stop {started.name} ends it"
        )
        return DONE
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop_without_asking(started))
    return _follow_to_the_end(started, options)


def attach(options: argparse.Namespace) -> int:
    return _follow_to_the_end(launcher.attach(options.run), options)


def _follow_to_the_end(started: launcher.Run, options: argparse.Namespace) -> int:
    """Follow a run, then say how it ended."""
    interrupted = follow(started, every_line=options.logs)
    state = started.state
    if state not in OVER:
        print(
            f"{started.name} goes on; launcher attach {started.name} follows it, launcher stop {started.name} ends it"
        )
        return INTERRUPTED
    tables.print_end(started)
    if interrupted:
        return INTERRUPTED
    return DONE if state == records.COMPLETED else RUN_FAILED


def _stop_without_asking(started: launcher.Run):
    """A signal handler for whoever started a run: the run ends in order, and is followed until it has."""

    def handler(number: int, _frame: object) -> None:
        started.stop(f"launcher run got {signal.Signals(number).name}")

    return handler


def runs(options: argparse.Namespace) -> int:
    found = launcher.runs()
    if options.json:
        print(json.dumps([{"name": item.name, "state": item.state, **item.outcome()} for item in found], indent=2))
    elif found:
        tables.print_runs(found)
    else:
        print(f"no runs in {records.store()}; launcher run configs/quickstart_teacher.yaml makes one")
    return DONE


def show(options: argparse.Namespace) -> int:
    tables.print_run(launcher.attach(options.run))
    return DONE


def logs(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    several = len(chosen.hosts) > 1
    for host, line in chosen.logs(follow=options.follow):
        print(f"{host} | {line}" if several else line, flush=options.follow)
    return DONE


def stop(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    if chosen.state in OVER:
        print(f"{chosen.name} is over: {chosen.state}")
        return DONE
    chosen.stop("launcher stop")
    print(f"asked {chosen.name} to stop after its current step; waiting", flush=True)
    chosen.wait()
    tables.print_end(chosen)
    return DONE


def compare(options: argparse.Namespace) -> int:
    tables.print_comparison([launcher.attach(name) for name in options.runs])
    return DONE


def prepare(options: argparse.Namespace) -> int:
    from launcher.prepare import prepare as make

    print(make(options.source, options.target, size=options.size, validation_fraction=options.validation_fraction))
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launcher", description="Start vision training jobs on SageMaker, or run the very same jobs without AWS."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help)
        made.set_defaults(command=function)
        made.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        return made

    def add_job(made: argparse.ArgumentParser) -> None:
        made.add_argument("config", metavar="CONFIG", help="a YAML file")
        made.add_argument(
            "overrides", metavar="KEY=VALUE", nargs="*", help="override a key, for example hyperparameters.epochs=1"
        )
        made.add_argument(
            "--on",
            default="process",
            metavar="BACKEND",
            help=f"where it runs: {', '.join(backends.BACKENDS)} (default: process)",
        )
        made.add_argument("--hosts", type=int, metavar="N", help="the same as compute.instance_count=N")
        made.add_argument(
            "--smoke", action="store_true", help="lay the config's smoke section over it: the same story, small"
        )

    made = command("plan", plan, "show what a run would do; nothing happens")
    add_job(made)
    made.add_argument("--json", action="store_true", help="for machines")
    made = command("run", run, "plan, then run, with a progress line")
    add_job(made)
    made.add_argument("--detach", action="store_true", help="return at once; the run goes on")
    made.add_argument("--logs", action="store_true", help="print every log line instead of the progress line")
    made = command("attach", attach, "follow a run that was started elsewhere")
    made.add_argument("run", metavar="RUN", help="a run's name, or its job's name for the latest")
    made.add_argument("--logs", action="store_true", help="print every log line instead of the progress line")
    made = command("runs", runs, "list all runs")
    made.add_argument("--json", action="store_true", help="for machines")
    made = command("show", show, "everything about one run")
    made.add_argument("run", metavar="RUN")
    made = command("logs", logs, "print a run's log lines")
    made.add_argument("run", metavar="RUN")
    made.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    made = command("stop", stop, "stop a run after its current step")
    made.add_argument("run", metavar="RUN")
    made = command("compare", compare, "what came out of several runs, side by side")
    made.add_argument("runs", metavar="RUN", nargs="+")
    made = command("prepare", prepare, "make a folder of labelled images, TARGET/train and TARGET/validation")
    made.add_argument(
        "source",
        metavar="SOURCE",
        help="digits, fashion-mnist, a folder with idx files, or a folder with one subfolder a class",
    )
    made.add_argument("target", metavar="TARGET", help="the folder to make; what is already in it is kept")
    made.add_argument("--size", type=int, metavar="PIXELS", help="scale images down to this shorter side")
    made.add_argument(
        "--validation-fraction",
        type=float,
        default=0.25,
        metavar="F",
        help="share of each class held out where the source has no split (default: 0.25)",
    )
    return parser

"""The commands. Each is thin: it reads arguments, calls the Python API, and prints."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import launcher
from launcher import backends, records, tables
from launcher.backends.base import Unreachable
from launcher.diagnosing import INTERRUPTED as INTERRUPTED_PROBE
from launcher.findings import UserError, mistake
from launcher.following import follow
from launcher.planning import plan_config
from launcher.records import OVER
from launcher.study import command as study_command

DONE, RUN_FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

INTERVALS = (100, 200, 500, 1000, 5000, 60000)
"""Milliseconds that SageMaker takes for ProfilingIntervalInMilliseconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the user's mistakes are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a value that no terminal can show is told all the same
    options = read(sys.argv[1:] if arguments is None else arguments)
    try:
        return options.command(options)
    except Unreachable as error:
        print(error, file=sys.stderr)
        return USER_ERROR
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


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """A command's words as its options, `command` the function that carries it out. Exits with 2 where they are none."""
    parser, words = _parser(), list(arguments)
    ours, behind = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options, more = parser.parse_known_args(ours)
    options.behind = behind
    if behind and options.command is not emulate:
        parser.error("only `launcher emulate` takes a command behind --")
    if more and hasattr(options, "overrides") and not any(word.startswith("-") for word in more):
        options.overrides += more  # argparse takes key=value words before the first option only
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    return options


def _about_the_disk(error: OSError) -> UserError:
    """What the operating system refused, as a mistake with a cure."""
    cure = {errno.EACCES: "choose a place that you may use, or change its permissions", errno.ENOSPC: "free some space"}
    return mistake(
        str(error.filename or "disk"),
        error.strerror or str(error),
        cure.get(error.errno, "check the path; --debug shows where it happened"),
    )


def _plan_from(options: argparse.Namespace) -> launcher.Plan:
    return plan_config(options.config, [*options.overrides, *_hosts(options)], on=options.on, smoke=options.smoke)


def _hosts(options: argparse.Namespace) -> list[str]:
    """--hosts as the override that it stands for."""
    return [f"compute.instance_count={options.hosts}"] if options.hosts is not None else []


def plan(options: argparse.Namespace) -> int:
    planned = _plan_from(options)
    if options.check:
        planned = launcher.check(planned)
    print(planned.to_json() if options.json else planned)
    return USER_ERROR if planned.errors else DONE


def run(options: argparse.Namespace) -> int:
    return _start(_plan_from(options), options)


def replay(options: argparse.Namespace) -> int:
    return _start(launcher.replay(options.run, options.overrides, on=options.on), options)


def resume(options: argparse.Namespace) -> int:
    return _start(launcher.resume(options.run, [*options.overrides, *_hosts(options)]), options)


def _start(planned: launcher.Plan, options: argparse.Namespace) -> int:
    """Carry a plan out, and follow it to its end."""
    planned = launcher.check(planned)
    for finding in planned.findings:
        if finding.level != "error":
            print(f"{finding.level}: {finding}", file=sys.stderr)
    if planned.price is not None:
        print(planned.price.told, flush=True)
    started = launcher.run(planned, detach=options.detach, max_cost=options.max_cost)
    print(f"run {started.name} on {planned.backend}: {started.folder.path}", flush=True)
    if options.detach:
        print(
            f"it goes on without this terminal; launcher attach {started.name} follows it, launcher stop {started.name} ends it"
        )
        return DONE
    signal.signal(signal.SIGTERM, _stop_without_asking(started))
    if started.backend != "aws":  # SageMaker's jobs outlive a terminal that is closed
        signal.signal(signal.SIGHUP, _stop_without_asking(started))
    return _follow_to_the_end(started, options)


def attach(options: argparse.Namespace) -> int:
    return _follow_to_the_end(launcher.attach(options.run, region=options.region), options)


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
    trouble = ""
    while chosen.wait(1) not in OVER:
        if chosen.trouble != trouble:
            trouble = chosen.trouble
            print(trouble or "AWS answers again", file=sys.stderr, flush=True)
    tables.print_end(chosen)
    return DONE


def compare(options: argparse.Namespace) -> int:
    tables.print_comparison([launcher.attach(name) for name in options.runs])
    return DONE


def diff(options: argparse.Namespace) -> int:
    tables.print_differences(*(launcher.attach(name) for name in (options.first, options.second)))
    return DONE


def diagnose(options: argparse.Namespace) -> int:
    if (options.changes or options.on != "process") and not options.probe:
        raise mistake("--with" if options.changes else "--on", "without --probe", "add --probe, whose run it is for")
    if options.probe:
        more = {"overrides": options.changes, "on": options.on, "say": _note}
        found = launcher.diagnose(options.source, options.other, probe=True, **more)
    else:
        found = launcher.diagnose(*(source for source in (options.source, options.other) if source is not None))
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    if options.html is not None:
        print(f"page: {found.save_html(options.html)}", file=sys.stderr)
    if not options.probe or not isinstance(found.probe, str):
        return DONE
    return INTERRUPTED if found.probe == INTERRUPTED_PROBE else RUN_FAILED


def profile(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    chosen.profile(None if options.off else options.interval)
    print(f"{chosen.name}: system metrics " + ("off" if options.off else f"every {options.interval} ms"))
    return DONE


def drill(options: argparse.Namespace) -> int:
    from launcher.drill import drill as train_and_kill

    job = launcher.load(options.config, [*options.overrides, *_hosts(options)], smoke=options.smoke)
    found = train_and_kill(job, kills=options.kills, hosts_after=options.hosts_after, seed=options.seed, say=_say)
    print(found)
    return RUN_FAILED if found.difference else DONE


def _say(text: str) -> None:
    print(text, flush=True)


def _note(text: str) -> None:
    """A line beside what is printed for machines."""
    print(text, file=sys.stderr, flush=True)


def doctor(options: argparse.Namespace) -> int:
    from launcher import doctor as machine

    needs = machine.look()
    print(json.dumps(machine.to_dict(needs), indent=2) if options.json else machine.text(needs))
    return DONE if any(machine.ready(needs).values()) else RUN_FAILED


def emulate(options: argparse.Namespace) -> int:
    try:
        from launcher.emulator.serving import serve
    except ModuleNotFoundError as error:
        cure = "make, or pip install -e '.[emulator]', in this kit's folder"
        raise mistake("emulate", f"not installed: {error.name}", cure) from None

    return serve(
        options.configs,
        options.behind,
        port=options.port,
        prices={name: _dollars(name, usd) for name, usd in _pairs("--price", options.price)},
        file_systems={name: Path(folder) for name, folder in _pairs("--file-system", options.file_system)},
        folder=Path(options.folder) if options.folder else None,
    )


def _pairs(option: str, words: Sequence[str]) -> list[tuple[str, str]]:
    """NAME=VALUE words, taken apart."""
    for word in words:
        if not all(word.partition("=")):
            raise mistake(option, f"{word!r}", "write NAME=VALUE")
    return [(word.partition("=")[0], word.partition("=")[2]) for word in words]


def _dollars(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise mistake("--price", f"{name}={text}", f"write {name}=1.23", valid="US dollars an hour") from None


def prepare(options: argparse.Namespace) -> int:
    from launcher.prepare import prepare as make
    from launcher.prepare import verify

    if options.verify:
        print(verify(options.source, jobs=options.jobs))
        return DONE
    if options.target is None:
        raise mistake("TARGET", "missing", "launcher prepare SOURCE TARGET, or launcher prepare --verify TARGET")
    print(
        make(
            options.source,
            options.target,
            size=options.size,
            validation_fraction=options.validation_fraction,
            shard_size=options.shards,
            jpeg_quality=options.jpeg_quality,
            jobs=options.jobs,
        )
    )
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

    def add_hosts(made: argparse.ArgumentParser) -> None:
        made.add_argument("--hosts", type=int, metavar="N", help="the same as compute.instance_count=N")

    def add_config(made: argparse.ArgumentParser, hosts: bool = True) -> None:
        made.add_argument("config", metavar="CONFIG", help="a YAML file")
        made.add_argument(
            "overrides", metavar="KEY=VALUE", nargs="*", help="override a key, for example hyperparameters.epochs=1"
        )
        if hosts:
            add_hosts(made)
        made.add_argument(
            "--smoke", action="store_true", help="lay the config's smoke section over it: the same story, small"
        )

    def add_job(made: argparse.ArgumentParser, hosts: bool = True) -> None:
        add_config(made, hosts)
        made.add_argument(
            "--on",
            default="process",
            metavar="BACKEND",
            help=f"where it runs: {', '.join(backends.BACKENDS)} (default: process)",
        )

    made = command("plan", plan, "show what a run would do; nothing happens")
    add_job(made)
    made.add_argument("--check", action="store_true", help="also look at AWS, by read-only requests")
    made.add_argument("--json", action="store_true", help="for machines")

    def add_start(made: argparse.ArgumentParser) -> None:
        made.add_argument("--detach", action="store_true", help="return at once; the run goes on")
        made.add_argument("--logs", action="store_true", help="print every log line instead of the progress line")
        made.add_argument("--max-cost", type=float, metavar="USD", help="refuse what could cost more on SageMaker")

    made = command("run", run, "plan, then run, with a progress line")
    add_job(made)
    add_start(made)
    made = command("replay", replay, "run a run's job again, with the code that it had")
    made.add_argument("run", metavar="RUN")
    made.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="override a key")
    made.add_argument("--on", metavar="BACKEND", help="another backend than the run's")
    add_start(made)
    made = command("resume", resume, "run a run's job again from its last checkpoint, with the code that it had")
    made.add_argument("run", metavar="RUN")
    made.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="override a key")
    add_hosts(made)
    add_start(made)
    made = command("attach", attach, "follow a run that was started elsewhere")
    made.add_argument("run", metavar="RUN", help="a run's name, or its job's name for the latest")
    made.add_argument("--region", metavar="REGION", help="where to find a training job that another machine started")
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
    made = command("diff", diff, "what two runs were not started with alike")
    made.add_argument("first", metavar="RUN")
    made.add_argument("second", metavar="RUN")
    made = command("diagnose", diagnose, "why a run is slow, and what to change; two runs side by side")
    made.add_argument(
        "source", metavar="RUN", help="a run, its folder, or system metrics: a folder or s3:// prefix profiler-output"
    )
    made.add_argument(
        "other", metavar="OTHER", nargs="?", help="the run after a change: before and after, side by side"
    )
    made.add_argument(
        "--probe",
        action="store_true",
        help="also measure what observation cannot tell apart: up to two minutes, on this machine",
    )
    made.add_argument(
        "--with",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what the probe is to take otherwise than the run, for example 'inputs.train={folder: data/train}'",
    )
    made.add_argument("--on", default="process", metavar="BACKEND", help="where the probe runs: process or docker")
    made.add_argument("--html", metavar="FILE", help="also write one page with charts")
    made.add_argument("--json", action="store_true", help="for machines")
    made = command("profile", profile, "switch the system metrics of a running SageMaker job")
    made.add_argument("run", metavar="RUN")
    switch = made.add_mutually_exclusive_group(required=True)
    switch.add_argument(
        "--interval", type=int, choices=INTERVALS, metavar="MS", help=f"a sample every so often: {INTERVALS}"
    )
    switch.add_argument("--off", action="store_true", help="no samples any more")
    made = command("emulate", emulate, "SageMaker's far side on this machine, for tests and trials")
    made.add_argument("configs", metavar="CONFIG", nargs="*", help="what these files name is there")
    made.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1 (default: a free one)")
    made.add_argument("--price", action="append", default=[], metavar="TYPE=USD", help="what an instance-hour costs")
    made.add_argument(
        "--file-system", action="append", default=[], metavar="ID=FOLDER", help="the folder that stands for its root"
    )
    made.add_argument("--folder", metavar="FOLDER", help="keep the hosts' /opt/ml there")
    made.usage = "launcher emulate [CONFIG ...] [options] [-- COMMAND ...]"
    made = command(
        "drill", drill, "kill a run of this machine at random moments, resume it, and compare it with one undisturbed"
    )
    add_config(made)
    made.add_argument("--kills", type=int, default=3, metavar="N", help="how many (default: 3)")
    made.add_argument("--hosts-after", type=int, metavar="N", help="every other run has N hosts")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments and hosts (default: 0)")
    study_command.add_arguments(command("study", None, "many runs, one question and its answer"), add_job)
    made = command("doctor", doctor, "what this machine is ready for, backend by backend")
    made.add_argument("--json", action="store_true", help="for machines")

    made = command("prepare", prepare, "make images ready for training, TARGET/train and TARGET/validation")
    made.usage = (
        "launcher prepare SOURCE TARGET [--size PIXELS] [--shards SIZE] [options]\n"
        "       launcher prepare --verify TARGET [--jobs N]"
    )
    made.add_argument(
        "source",
        metavar="SOURCE",
        help="digits, fashion-mnist, photos, shapes or cutouts (with masks), a folder with idx files, one with one subfolder a class, "
        "or one with images/ and masks/",
    )
    made.add_argument("target", nargs="?", metavar="TARGET", help="the folder to make; what is already in it is kept")
    made.add_argument("--size", type=int, metavar="PIXELS", help="scale images down to this shorter side")
    made.add_argument(
        "--validation-fraction",
        type=float,
        default=0.25,
        metavar="F",
        help="share of each class held out where the source has no split (default: 0.25)",
    )
    made.add_argument(
        "--shards", metavar="SIZE", help="write tar shards of about that size, as in 100MB (default: a file an image)"
    )
    made.add_argument(
        "--jpeg-quality", type=int, default=95, metavar="Q", help="of images that are scaled, 1 to 100 (default: 95)"
    )
    made.add_argument("--jobs", type=int, metavar="N", help="processes (default: the cores that it may use)")
    made.add_argument(
        "--verify", action="store_true", help="make nothing: read again what was made, and compare checksums"
    )
    return parser

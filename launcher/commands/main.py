"""The commands. Each is thin: it takes its options, calls the Python API, and prints."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import launcher
from launcher import backends
from launcher.backends.plans import plan_config
from launcher.commands import study as study_command
from launcher.commands import tables
from launcher.commands.arguments import read
from launcher.commands.live import follow
from launcher.config.issues import Unreachable, UserError, mistake
from launcher.record import records
from launcher.record.records import OVER
from launcher.runner.probe import INTERRUPTED as INTERRUPTED_PROBE

DONE, RUN_FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the user's mistakes are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a value that no terminal can show is told all the same
    options = read(sys.argv[1:] if words is None else words)
    try:
        return COMMANDS[options.command](options)
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


def _about_the_disk(error: OSError) -> UserError:
    """What the operating system refused, as a mistake with a fix."""
    fix = {errno.EACCES: "choose a place that you may use, or change its permissions", errno.ENOSPC: "free some space"}
    return mistake(
        str(error.filename or "disk"),
        error.strerror or str(error),
        fix.get(error.errno or 0, "check the path; --debug shows where it happened"),
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
    for issue in planned.issues:
        if issue.level != "error":
            print(f"{issue.level}: {issue}", file=sys.stderr)
    if planned.price is not None:
        print(planned.price.text, flush=True)
    started = launcher.run(planned, detach=options.detach, max_cost=options.max_cost)
    print(f"run {started.name} on {planned.backend}: {started.folder.path}", flush=True)
    if options.detach:
        print(
            f"it goes on without this terminal; launcher attach {started.name} follows it, launcher stop {started.name} ends it"
        )
        return DONE
    signal.signal(signal.SIGTERM, _stop_without_asking(started))
    if started.on_this_machine:  # SageMaker's jobs outlive a terminal that is closed
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


def _stop_without_asking(started: launcher.Run) -> Callable[[int, object], None]:
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
    if (options.changes or options.on != backends.DEFAULT) and not options.probe:
        raise mistake("--with" if options.changes else "--on", "without --probe", "add --probe, whose run it is for")
    found: launcher.Diagnosis | launcher.Comparison = launcher.diagnose(
        options.source, options.other, probe=options.probe, overrides=options.changes, on=options.on, say=_note
    )
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    if options.html is not None:
        print(f"page: {found.save_html(options.html)}", file=sys.stderr)
    if not options.probe or isinstance(found, launcher.Comparison) or not isinstance(found.probe, str):
        return DONE
    return INTERRUPTED if found.probe == INTERRUPTED_PROBE else RUN_FAILED


def profile(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    chosen.profile(None if options.off else options.interval)
    print(f"{chosen.name}: system metrics " + ("off" if options.off else f"every {options.interval} ms"))
    return DONE


def drill(options: argparse.Namespace) -> int:
    from launcher.runner.drill import drill as train_and_kill

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
    from launcher.commands import doctor as machine

    needs = machine.look()
    print(json.dumps(machine.to_dict(needs), indent=2) if options.json else machine.text(needs))
    return DONE if any(machine.ready(needs).values()) else RUN_FAILED


def emulate(options: argparse.Namespace) -> int:
    try:
        from launcher.emulator.serving import serve
    except ModuleNotFoundError as error:
        fix = "make, or pip install -e '.[emulator]', in this kit's folder"
        raise mistake("emulate", f"not installed: {error.name}", fix) from None

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


COMMANDS = {
    "plan": plan,
    "run": run,
    "replay": replay,
    "resume": resume,
    "attach": attach,
    "runs": runs,
    "show": show,
    "logs": logs,
    "stop": stop,
    "compare": compare,
    "diff": diff,
    "diagnose": diagnose,
    "profile": profile,
    "emulate": emulate,
    "study preprocessing": study_command.preprocessing,
    "study scaling": study_command.scaling,
    "study story": study_command.story,
    "drill": drill,
    "doctor": doctor,
    "prepare": prepare,
}
"""What carries each command out: options -> exit code."""

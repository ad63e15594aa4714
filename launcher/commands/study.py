"""`launcher study …`: options that stand for overrides, the study, and where it is kept."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from typing import Any


def overrides(options: argparse.Namespace) -> list[str]:
    """The command's words and options as overrides."""
    found = list(options.overrides)
    found += [f"compute.instance_count={options.hosts}"] if options.hosts is not None else []
    lists = {"models": options.models, "loads": options.loads, "ways": options.ways}
    found += [f"study.{name}=[{', '.join(given.split(','))}]" for name, given in lists.items() if given is not None]
    return found + ([f"study.repeats={options.repeats}"] if options.repeats is not None else [])


def preprocessing(options: argparse.Namespace) -> int:
    """Exit code 1 where a trial failed."""
    from launcher import study

    return _study(study.preprocessing, overrides(options), options)


def scaling(options: argparse.Namespace) -> int:
    """Exit code 1 where a trial failed."""
    from launcher import study

    given, found = {"hosts": options.hosts, "batches": options.batches}, list(options.overrides)
    found += [f"study.{name}=[{', '.join(text.split(','))}]" for name, text in given.items() if text is not None]
    given = {"mode": options.mode, "repeats": options.repeats}
    found += [f"study.{name}={text}" for name, text in given.items() if text is not None]
    return _study(study.scaling, found, options)


def story(options: argparse.Namespace) -> int:
    from launcher import study

    print(study.story(options.story))
    return 0


def _study(run: Callable[..., Any], given: list[str], options: argparse.Namespace) -> int:
    """Run a study and tell its answer. What ends this process, or closes its terminal, stops the trial that runs, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    found = run(
        options.config,
        given,
        on=options.on,
        smoke=options.smoke,
        table=options.table,
        max_cost=options.max_cost,
        say=_say,
    )
    print(f"\n{found}\n\ntable   {found.file}")
    if found.table:
        print(f"charts  {found.plot(found.file.with_suffix('.svg'))}")
    return 1 if found.failed else 0


def _say(line: str) -> None:
    print(line, flush=True)

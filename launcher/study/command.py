"""`launcher study …`: options that stand for overrides, the study, and where it is kept."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from typing import Any


def add_arguments(parser: argparse.ArgumentParser, add_job: Callable[..., None]) -> None:
    """The questions below `launcher study`."""
    questions = parser.add_subparsers(required=True, metavar="QUESTION")
    help = "which way of preprocessing feeds a model: models x ways x augmentation loads, trained and compared"
    made = questions.add_parser("preprocessing", help=help, description=help)
    made.set_defaults(command=preprocessing)
    made.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    add_job(made)
    for option, what in (
        ("--models", "timm models, for example resnet18,resnet50"),
        ("--loads", "augmentation load factors, for example 1,12"),
        ("--ways", "of cpu_reference, cpu, cpu_composed, dali; the first is what the others are compared with"),
    ):
        made.add_argument(option, metavar="A,B,…", help=f"the same as study.{option[2:]}=[…]: {what}")
    made.add_argument("--repeats", metavar="N", help="the same as study.repeats=N: how often each trial is run")
    made.add_argument(
        "--table", metavar="FILE.csv", help="where the trials are kept; those that it holds are not run again"
    )
    made.add_argument(
        "--max-cost", type=float, metavar="USD", help="refuse trials that could cost more on SageMaker, all together"
    )

    help = "how a job scales: weak and strong scaling on several numbers of hosts, a model of it, and the hosts to take"
    made = questions.add_parser("scaling", help=help, description=help)
    made.set_defaults(command=scaling)
    made.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    add_job(made, hosts=False)
    for option, metavar, what in (
        ("--hosts", "1,2,…", "the same as study.hosts=[…]: the numbers of hosts (default: 1,2,4,8)"),
        ("--batches", "B,C,…", "the same as study.batches=[…]: images a process, a line of weak scaling each"),
        ("--mode", "strong|weak|both", "the same as study.mode=…: one global batch, one batch a process, or both"),
        ("--repeats", "N", "the same as study.repeats=N: how often each trial is run"),
    ):
        made.add_argument(option, metavar=metavar, help=what)
    made.add_argument(
        "--table", metavar="FILE.csv", help="where the trials are kept; those that it holds are not run again"
    )
    made.add_argument(
        "--max-cost", type=float, metavar="USD", help="refuse trials that could cost more on SageMaker, all together"
    )
    help = "what a published speed-up says about scaling, from its published figures alone: kt or hyundai"
    made = questions.add_parser("story", help=help, description=help)
    made.set_defaults(command=story)
    made.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    made.add_argument("story", metavar="STORY", help="kt or hyundai")


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

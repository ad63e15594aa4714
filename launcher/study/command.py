"""`launcher study …`: options that stand for overrides, the study, and where it is kept."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable


def add_arguments(parser: argparse.ArgumentParser, add_job: Callable[[argparse.ArgumentParser], None]) -> None:
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


def overrides(options: argparse.Namespace) -> list[str]:
    """The command's words and options as overrides."""
    found = list(options.overrides)
    found += [f"compute.instance_count={options.hosts}"] if options.hosts is not None else []
    lists = {"models": options.models, "loads": options.loads, "ways": options.ways}
    found += [f"study.{name}=[{', '.join(given.split(','))}]" for name, given in lists.items() if given is not None]
    return found + ([f"study.repeats={options.repeats}"] if options.repeats is not None else [])


def preprocessing(options: argparse.Namespace) -> int:
    """Exit code 1 where a trial failed. What ends this process, or closes its terminal, stops the trial that runs, as Ctrl-C does."""
    from launcher import study

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    found = study.preprocessing(
        options.config,
        overrides(options),
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

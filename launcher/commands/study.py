"""`launcher study …`: answer a question with many runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, RUN_FAILED
from launcher.commands.json_text import as_json


def add(to: arguments.Add) -> None:
    """The questions are commands of their own: `study preprocessing` and `study scaling`."""
    question = arguments.adding_to(to("study", "answer a question with many runs", None), "QUESTION", "study ")
    made = question(
        "preprocessing",
        "which preprocessing pipeline is fastest: models x pipelines x augmentation loads",
        preprocessing,
    )
    arguments.job(made)
    arguments.hosts(made)
    for option, what in (
        ("--models", "timm models, for example resnet18,resnet50"),
        ("--loads", "augmentation load factors, for example 1,12"),
        ("--pipelines", "of cpu_reference, cpu, cpu_composed, dali, remote; the others are compared with the first"),
    ):
        made.add_argument(option, metavar="A,B,…", help=f"short for study.{option[2:]}=[…]: {what}")
    _trials(made)

    made = question(
        "scaling",
        "how a job scales over hosts, strongly and weakly, and how many to use",
        scaling,
    )
    arguments.job(made)
    for option, metavar, what in (
        ("--hosts", "1,2,…", "short for study.hosts=[…]: the numbers of hosts (default: 1,2,4,8)"),
        (
            "--batches",
            "B,C,…",
            "short for study.batches=[…]: images for each process, with a curve of weak scaling each",
        ),
        ("--mode", "strong|weak|both", "short for study.mode=…: one global batch, one batch for each process, or both"),
    ):
        made.add_argument(option, metavar=metavar, help=what)
    _trials(made)


def _trials(made: argparse.ArgumentParser) -> None:
    made.add_argument("--repeats", metavar="N", help="short for study.repeats=N: how often each trial is run")
    arguments.trials(made)
    made.add_argument("--html", metavar="FILE", help="also write the answer as a page with its charts and tables")
    arguments.json(made, "{kind, backend, table, verdict, trials, notes, failed}; `trials` as the table's rows")


def preprocessing(options: argparse.Namespace) -> int:
    """Exit code 1 if a trial failed."""
    from launcher import study

    return _study(study.preprocessing, ("models", "loads", "pipelines"), ("repeats",), options)


def scaling(options: argparse.Namespace) -> int:
    """Exit code 1 if a trial failed."""
    from launcher import study

    return _study(study.scaling, ("hosts", "batches"), ("mode", "repeats"), options)


def _study(
    run: Callable[..., Any], lists: tuple[str, ...], values: tuple[str, ...], options: argparse.Namespace
) -> int:
    """Run a study and print its answer.

    Args:
        lists: options for a list in the config's `study` section.
        values: options for a single value.
    """
    arguments.end_like_ctrl_c()
    given = options.overrides if "hosts" in lists else arguments.overrides_of(options)
    page = arguments.page(options)
    named = {name: getattr(options, name) for name in (*lists, *values)}
    short = [
        f"study.{name}=" + (f"[{', '.join(text.split(','))}]" if name in lists else text)
        for name, text in named.items()
        if text is not None
    ]
    found = run(
        options.config,
        [*given, *short],
        on=options.on,
        smoke=options.smoke,
        table=options.table,
        max_cost=options.max_cost,
        log=arguments.progress_printer(options),
    )
    tell = arguments.progress_printer(options)
    if options.json:
        print(as_json(found.to_dict()), flush=True)
    else:
        print(f"\n{found}\n\ntable   {found.file}")
    if found.tables():
        tell(f"charts  {found.plot(found.file.with_suffix('.svg'))}")
    if page is not None:
        tell(f"page    {found.save_html(page)}")
    return RUN_FAILED if found.failed else DONE

"""The words of the command line: every command with its arguments, and what they are read into."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from launcher import backends

INTERVALS = (100, 200, 500, 1000, 5000, 60000)
"""Milliseconds that SageMaker takes for ProfilingIntervalInMilliseconds."""

Add = Callable[..., argparse.ArgumentParser]
"""Adds a command: (its last word, what it does) -> its parser."""


def read(words: Sequence[str]) -> argparse.Namespace:
    """A command's words as its options; `command` is its name, as in `study scaling`. Exits with 2 where they are none."""
    parser, words = _parser(), list(words)
    ours, behind = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options, more = parser.parse_known_args(ours)
    options.behind = behind
    if behind and options.command != "emulate":
        parser.error("only `launcher emulate` takes a command behind --")
    if more and hasattr(options, "overrides") and not any(word.startswith("-") for word in more):
        options.overrides += more  # argparse takes key=value words before the first option only
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launcher", description="Start vision training jobs on SageMaker, or run the very same jobs without AWS."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add = _adding_to(parser, "COMMAND")
    for group in (_starting, _following, _comparing, _explaining, _far_side, _studying, _this_machine):
        group(add)
    return parser


def _adding_to(parser: argparse.ArgumentParser, metavar: str, prefix: str = "") -> Add:
    commands = parser.add_subparsers(required=True, metavar=metavar)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help)
        made.set_defaults(command=prefix + name)
        _debug(made)
        return made

    return add


# Arguments that several commands have


def _debug(made: argparse.ArgumentParser) -> None:
    made.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")


def _run(
    made: argparse.ArgumentParser, name: str = "run", help: str = "a run's name, or its job's name for the latest"
) -> None:
    made.add_argument(name, metavar="RUN", help=help)


def _json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="for machines")


def _overrides(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="override a key, for example hyperparameters.epochs=1"
    )


def _hosts(made: argparse.ArgumentParser) -> None:
    made.add_argument("--hosts", type=int, metavar="N", help="the same as compute.instance_count=N")


def _config(made: argparse.ArgumentParser) -> None:
    made.add_argument("config", metavar="CONFIG", help="a YAML file")
    _overrides(made)
    made.add_argument(
        "--smoke", action="store_true", help="lay the config's smoke section over it: the same story, small"
    )


def _job(made: argparse.ArgumentParser) -> None:
    _config(made)
    made.add_argument(
        "--on",
        default=backends.DEFAULT,
        metavar="BACKEND",
        help=f"where it runs: {', '.join(backends.BACKENDS)} (default: {backends.DEFAULT})",
    )


def _every_line(made: argparse.ArgumentParser) -> None:
    made.add_argument("--logs", action="store_true", help="print every log line instead of the progress line")


def _start(made: argparse.ArgumentParser) -> None:
    made.add_argument("--detach", action="store_true", help="return at once; the run goes on")
    _every_line(made)
    made.add_argument("--max-cost", type=float, metavar="USD", help="refuse what could cost more on SageMaker")


# The commands


def _starting(add: Add) -> None:
    made = add("plan", "show what a run would do; nothing happens")
    _job(made)
    _hosts(made)
    made.add_argument("--check", action="store_true", help="also look at AWS, by read-only requests")
    _json(made)
    made = add("run", "plan, then run, with a progress line")
    _job(made)
    _hosts(made)
    _start(made)
    made = add("replay", "run a run's job again, with the code that it had")
    _run(made)
    _overrides(made)
    made.add_argument("--on", metavar="BACKEND", help="another backend than the run's")
    _start(made)
    made = add("resume", "run a run's job again from its last checkpoint, with the code that it had")
    _run(made)
    _overrides(made)
    _hosts(made)
    _start(made)


def _following(add: Add) -> None:
    made = add("attach", "follow a run that was started elsewhere")
    _run(made)
    made.add_argument("--region", metavar="REGION", help="where to find a training job that another machine started")
    _every_line(made)
    _json(add("runs", "list all runs"))
    _run(add("show", "everything about one run"))
    made = add("logs", "print a run's log lines")
    _run(made)
    made.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    _run(add("stop", "stop a run after its current step"))


def _comparing(add: Add) -> None:
    add("compare", "what came out of several runs, side by side").add_argument("runs", metavar="RUN", nargs="+")
    made = add("diff", "what two runs were not started with alike")
    _run(made, "first")
    _run(made, "second")


def _explaining(add: Add) -> None:
    made = add("diagnose", "why a run is slow, and what to change; two runs side by side")
    _run(made, "source", "a run, its folder, or system metrics: a folder or s3:// prefix profiler-output")
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
    made.add_argument(
        "--on", default=backends.DEFAULT, metavar="BACKEND", help="where the probe runs: process or docker"
    )
    made.add_argument("--html", metavar="FILE", help="also write one page with charts")
    _json(made)
    made = add("profile", "switch the system metrics of a running SageMaker job")
    _run(made)
    switch = made.add_mutually_exclusive_group(required=True)
    switch.add_argument(
        "--interval", type=int, choices=INTERVALS, metavar="MS", help=f"a sample every so often: {INTERVALS}"
    )
    switch.add_argument("--off", action="store_true", help="no samples any more")


def _far_side(add: Add) -> None:
    made = add("emulate", "SageMaker's far side on this machine, for tests and trials")
    made.add_argument("configs", metavar="CONFIG", nargs="*", help="what these files name is there")
    made.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1 (default: a free one)")
    made.add_argument("--price", action="append", default=[], metavar="TYPE=USD", help="what an instance-hour costs")
    made.add_argument(
        "--file-system", action="append", default=[], metavar="ID=FOLDER", help="the folder that stands for its root"
    )
    made.add_argument("--folder", metavar="FOLDER", help="keep the hosts' /opt/ml there")
    made.usage = "launcher emulate [CONFIG ...] [options] [-- COMMAND ...]"


def _studying(add: Add) -> None:
    study = add("study", "many runs, one question and its answer")
    add_question = _adding_to(study, "QUESTION", "study ")

    made = add_question(
        "preprocessing",
        "which way of preprocessing feeds a model: models x ways x augmentation loads, trained and compared",
    )
    _job(made)
    _hosts(made)
    for option, what in (
        ("--models", "timm models, for example resnet18,resnet50"),
        ("--loads", "augmentation load factors, for example 1,12"),
        ("--ways", "of cpu_reference, cpu, cpu_composed, dali; the first is what the others are compared with"),
    ):
        made.add_argument(option, metavar="A,B,…", help=f"the same as study.{option[2:]}=[…]: {what}")
    _trials(made)

    made = add_question(
        "scaling",
        "how a job scales: weak and strong scaling on several numbers of hosts, a model of it, and the hosts to take",
    )
    _job(made)
    for option, metavar, what in (
        ("--hosts", "1,2,…", "the same as study.hosts=[…]: the numbers of hosts (default: 1,2,4,8)"),
        ("--batches", "B,C,…", "the same as study.batches=[…]: images a process, a line of weak scaling each"),
        ("--mode", "strong|weak|both", "the same as study.mode=…: one global batch, one batch a process, or both"),
    ):
        made.add_argument(option, metavar=metavar, help=what)
    _trials(made)

    made = add_question(
        "story", "what a published speed-up says about scaling, from its published figures alone: kt or hyundai"
    )
    made.add_argument("story", metavar="STORY", help="kt or hyundai")


def _trials(made: argparse.ArgumentParser) -> None:
    made.add_argument("--repeats", metavar="N", help="the same as study.repeats=N: how often each trial is run")
    made.add_argument(
        "--table", metavar="FILE.csv", help="where the trials are kept; those that it holds are not run again"
    )
    made.add_argument(
        "--max-cost", type=float, metavar="USD", help="refuse trials that could cost more on SageMaker, all together"
    )


def _this_machine(add: Add) -> None:
    made = add("drill", "kill a run of this machine at random moments, resume it, and compare it with one undisturbed")
    _config(made)
    _hosts(made)
    made.add_argument("--kills", type=int, default=3, metavar="N", help="how many (default: 3)")
    made.add_argument("--hosts-after", type=int, metavar="N", help="every other run has N hosts")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments and hosts (default: 0)")
    _json(add("doctor", "what this machine is ready for, backend by backend"))
    made = add("prepare", "make images ready for training, TARGET/train and TARGET/validation")
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

"""`launcher import`: write the config of a job that a script or notebook starts with SageMaker's SDK."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from launcher.commands import init, schema
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, USER_ERROR
from launcher.config import yaml_edit, yaml_file
from launcher.config.issues import UserError, mistake
from launcher.planner.source_package import SCHEMA_FILE
from launcher.record import records
from launcher.sdk_import import config_of
from launcher.sdk_import.calls import estimators
from launcher.sdk_import.importer import lines
from launcher.sdk_import.objects import Estimator
from launcher.sdk_import.source import Source, read


def add(to: arguments.Add) -> None:
    made = to("import", "write the config of a job that a script or notebook starts with SageMaker's SDK", carry_out)
    made.add_argument(
        "script", metavar="FILE", help="a .py script or .ipynb notebook, of SDK v2 or v3; nothing of it runs"
    )
    made.add_argument("file", nargs="?", default="job.yaml", metavar="FILE.yaml", help="the config (default: job.yaml)")
    made.add_argument(
        "--line", metavar="N", help="of several estimators, the one that is made there, as the message about them says"
    )
    made.add_argument("--force", action="store_true", help="overwrite files that are there")


def carry_out(options: argparse.Namespace) -> int:
    """Exit code 2 if the config is written but has something to fill in first."""
    file = Path(options.file)
    schema_file = file.parent / SCHEMA_FILE
    issues = [*init.refused(file), *(() if options.force else init.in_the_way(file, schema_file))]
    try:
        source = read(Path(options.script))
        estimator = _chosen(estimators(source), source, options.line)
        made = config_of(estimator, source)
    except UserError as error:
        raise UserError([*issues, *error.issues]) from None
    if issues:
        raise UserError(issues)
    head = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# {estimator.made.short} of {source.name}, {source.where(estimator.made.line)}. Written by `launcher import`;",
        f"# `launcher explain {shlex.quote(str(file))}` says what each key means.",
    ]
    text = "\n".join([*head, *lines(made, yaml_edit.written)]) + "\n"
    if yaml_file.parse(text, str(file)).values != made.values:
        raise mistake("FILE", f"{source.name}: a value that YAML does not hold as it is", "write the config by hand")
    records.write_atomically(file, text)
    schema_file.write_text(schema.text(), encoding="utf-8")
    print(f"wrote {file} from {estimator.made.short}, {source.where(estimator.made.line)}")
    if made.unread:
        print("not read; fill in what the job needs:")
        print("\n".join(f"  {key}: {text}" for key, text in made.unread.items()))
    for note in made.notes:
        print(f"different: {note}")
    return DONE if _say_what_is_next(file) and not made.unread else USER_ERROR


def _say_what_is_next(file: Path) -> bool:
    """Print what the job lacks for SageMaker, which it comes from. Returns whether it lacks nothing."""
    issues = list(init.errors(file, "aws"))
    init.say_what_sagemaker_needs(issues, file)
    print(f"next: {shlex.join(['launcher', 'plan', str(file), '--on', 'aws'])}")
    return not issues


def _chosen(found: list[Estimator], source: Source, line: str | None) -> Estimator:
    """The only estimator, or the one of a line."""
    if not found:
        raise mistake(
            "FILE",
            f"{source.name}: no PyTorch, HuggingFace, Estimator or ModelTrainer of SageMaker's SDK is made in it",
            "name the script that makes one; launcher init starts a config without",
        )
    places = [source.where(one.made.line) for one in found]
    wanted = [one for one, place in zip(found, places) if line is None or line == place or f"line {line}" == place]
    if len(wanted) == 1:
        return wanted[0]
    listed = "; ".join(f"{one.made.short} at {place}" for one, place in zip(found, places))
    raise mistake(
        "--line",
        f"{source.name} makes {len(found)} estimators" if line is None else f"{line}: no estimator is made there",
        f"choose one: --line {shlex.quote(places[0].removeprefix('line '))}",
        valid=listed,
    )

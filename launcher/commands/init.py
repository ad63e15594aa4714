"""`launcher init`: write a first config for the script and the images that are there."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import launcher
from launcher.aws.validation import newest_image
from launcher.backends.plans import plan_config
from launcher.commands import options as arguments
from launcher.commands import schema
from launcher.commands.exit_codes import DONE, USER_ERROR
from launcher.config import defaults
from launcher.config.defaults import KEYS, PROJECT_FILE
from launcher.config.issues import Issue, UserError
from launcher.planner.source_package import SCHEMA_FILE
from launcher.show.text import indent, listed

ENDINGS = (".yaml", ".yml")
"""How the name of a config ends."""


def add(to: arguments.Add) -> None:
    made = to("init", "write a first config for the script and the images that are here", carry_out)
    made.add_argument("file", nargs="?", default="job.yaml", metavar="FILE.yaml", help="the config (default: job.yaml)")
    made.add_argument(
        "--script",
        metavar="FILE",
        help="your training script (default: the one here; without one, train_classifier.py)",
    )
    made.add_argument(
        "--images",
        metavar="FOLDER",
        help="a folder with train/ and validation/; for a script of your own, any folder (default: the one here or in data/)",
    )
    made.add_argument("--force", action="store_true", help="overwrite files that are there")


def carry_out(options: argparse.Namespace) -> int:
    """Exit code 2 if the config is written but has something to fill in first."""
    from launcher.planner import starter

    file = Path(options.file)
    script = Path(options.script) if options.script else starter.find_script(Path("."))
    folder = Path(options.images) if options.images else starter.find_images(Path("."))
    schema_file = file.parent / SCHEMA_FILE
    issues = [*refused(file), *(() if options.force else in_the_way(file, schema_file))]
    if script is None and folder is None:
        issues.append(starter.nothing_found(Path(".")))
    seen_script, seen_images = None, None
    try:
        seen_script = starter.look_at_script(script) if script else None
    except UserError as error:
        issues += error.issues
    try:
        seen_images = starter.look_at_images(folder) if folder else None
    except UserError as error:
        issues += error.issues
    try:
        given = {default.key for default in defaults.read()}
    except UserError as error:
        issues += error.issues
    if issues:
        raise UserError(issues)
    text = starter.config_text(file, seen_script, seen_images, newest_image(), given)
    file.write_text(text, encoding="utf-8")
    schema_file.write_text(schema.text(), encoding="utf-8")
    print(f"wrote {file}, and {schema_file}, by which editors complete and check it")
    return _say_what_is_next(file)


def _say_what_is_next(file: Path) -> int:
    """Plan the config here and for SageMaker, and print what each still needs."""
    here = list(errors(file, "process"))
    if here:
        print("before it runs on this machine:\n" + "\n".join(indent(str(issue)) for issue in here))
    else:
        print("it plans without mistakes on this machine")
    say_what_sagemaker_needs((issue for issue in errors(file, "aws") if issue not in here), file)
    print(f"next: {shlex.join(['launcher', 'plan' if here else 'run', str(file)])}")
    return USER_ERROR if here else DONE


def say_what_sagemaker_needs(issues: Iterable[Issue], file: Path) -> None:
    """Print the keys that a job on SageMaker needs and this one lacks, and what else is wrong with it there."""
    from launcher.planner.starter import AWS_KEYS

    issues = list(issues)
    lacking = [issue for issue in issues if issue.key in AWS_KEYS and "missing" in issue.found]
    needed = list(dict.fromkeys(issue.key for issue in lacking))
    if needed:
        print(f"SageMaker still needs {listed(needed)}: to be written into {file}")
        if common := [key for key in needed if key in KEYS]:
            print(f"launcher defaults sets {listed(common)} once, for every job")
    if others := [issue for issue in issues if issue not in lacking]:
        print("before it runs on SageMaker:\n" + "\n".join(indent(str(issue)) for issue in others))


def errors(file: Path, on: str) -> Iterator[Issue]:
    """The mistakes of a config's job."""
    try:
        yield from plan_config(file, on=on).errors
    except launcher.UserError as error:
        yield from error.issues


def refused(file: Path) -> Iterator[Issue]:
    """What is wrong with the name of a config to write."""
    if file.suffix not in ENDINGS:
        script = file.suffix == ".py" and file.is_file()
        option = "--script" if script else "--images" if file.is_dir() else ""
        fix = shlex.join(["launcher", "init", option, str(file)]) if option else f"write {file}.yaml"
        yield Issue(key="FILE.yaml", found=str(file), valid="a file that ends with .yaml", fix=fix)
    if file.name == PROJECT_FILE:
        yield Issue(key="FILE.yaml", found=f"{file}: for defaults of every job", fix="choose another name")
    if not file.parent.is_dir():
        yield Issue(
            key="FILE.yaml", found=f"{file.parent}: no such folder", fix=shlex.join(["mkdir", "-p", str(file.parent)])
        )


def in_the_way(file: Path, schema_file: Path) -> Iterator[Issue]:
    """Files that would be overwritten, except a schema that is the same, and a file that no config may replace."""
    if file.suffix in ENDINGS and (file.exists() or file.is_symlink()):
        yield Issue(key=str(file), found="it exists", fix="name another file, or overwrite it with --force")
    if schema_file.exists() and schema_file.read_text(encoding="utf-8", errors="replace") != schema.text():
        found = "it exists, and is not the schema of this version"
        yield Issue(key=str(schema_file), found=found, fix="move it away, or overwrite it with --force")

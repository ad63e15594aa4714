"""What is wrong with a job before it starts, whatever the backend. Reads the disk, changes nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from launcher.config import builtin_configs, hyperparameters, students, yaml_file
from launcher.config.entrypoints import PACKAGES
from launcher.config.file_trees import walk
from launcher.config.issues import Issue, UserError, did_you_mean, near
from launcher.config.job import Job
from launcher.config.redaction import REDACTED, is_secret
from launcher.config.sections import Input
from launcher.config.yaml_edit import written
from launcher.planner import groups, image_classes, made_folders, python_start
from launcher.planner.source_package import IGNORE_FILE, SourceFile
from launcher.record import records
from launcher.show.text import counted

SUFFIX = "-labels"
"""What `launcher label` adds to a job's name."""

BATCH = "global_batch_size"

TOOLKITS_OWN = ("PATH", "HOME", "TRAINING_JOB_NAME", "PYTHONUNBUFFERED")
"""Variables that a job may not set, besides those that begin with SM_, SAGEMAKER_ or PET_."""


def places(job: Job) -> tuple[dict[str, str], list[Issue]]:
    """Where the inputs on this machine are: folders, files, and models of earlier runs.

    Returns:
        Channel -> absolute path of a folder or file, for the inputs that exist; and issues about the others and about
        channel names.
    """
    found: dict[str, str] = {}
    issues: list[Issue] = []
    first_of = {name.upper(): name for name in reversed(job.inputs)}
    for name, given in job.inputs.items():
        key = f"inputs.{name}"
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_Channel.html
            issues.append(
                Issue(
                    key=key,
                    found="not a valid channel name",
                    valid="1 to 64 letters, digits, dots, hyphens and underscores",
                    fix="rename it",
                )
            )
        elif (twin := first_of[name.upper()]) != name:
            both = f"{twin} and {name} are the same variable in the script, SM_CHANNEL_{name.upper()}"
            issues.append(Issue(key=key, found=both, fix="rename one"))
        elif given.source in ("folder", "file", "run"):
            try:
                found[name] = _place(key, given)
            except UserError as error:
                issues += error.issues
            except OSError as error:
                issues.append(Issue(key=key, found=str(error), fix="check the path and its permissions"))
    return found, issues


NO_ENTRY_SCRIPTS = (python_start.FILE, students.LABELS, students.LABELS_PIXELS)
"""Python files of the source package that no config names: what starts every process, and what `launcher label` starts."""

ASKED_FOR: Mapping[str, tuple[str, Callable[[Any], bool], str]] = {
    "unlabelled": ("unlabelled", lambda value: value is not None, "hyperparameters.unlabelled={}"),
    "weights": ("pretrained", lambda value: value == "channel", "hyperparameters.pretrained=channel"),
}
"""Channels that this kit's scripts read if a hyperparameter asks for it: its name, a test of its value, and a setting that passes."""


def check(job: Job, source: Path, files: list[SourceFile], world_size: int) -> list[Issue]:
    """Issues with the script, its hyperparameters, its environment and its distribution.

    Args:
        source: the folder that holds the script.
        files: its source package.
        world_size: training processes that the backend will start on all hosts.
    """
    issues = list(_check_script(job, source, files))
    if not issues:
        issues += hyperparameters.check(source, job.script, job.hyperparameters, job.inputs)
    issues += _check_unread(job)
    issues += _check_checkpoints(job)
    issues += _check_environment(job)
    issues += _check_texts(job)
    issues += groups.check(job)
    alone = len(job.compute.instance_groups) == 1  # which trains, whether that is said or not
    hosts = groups.training_host_count(job) if job.compute.training_groups or alone else job.compute.instance_count
    if job.distribution == "none" and (hosts > 1 or (job.compute.processes_per_host or 1) > 1):
        asked = f"{hosts} hosts" if hosts > 1 else f"{job.compute.processes_per_host} processes a host"
        wraps = (
            "" if job.source is None else " and wrap the model in DistributedDataParallel"
        )  # as this kit's scripts do
        issues.append(
            Issue(
                key="distribution",
                level="error" if job.source is None else "warning",  # a user's script may form its group itself
                found=f"none, with {asked}: each process would train its own model",
                valid="torchrun or smddp",
                fix=f"write distribution: torchrun{wraps}, unless the script itself connects SM_HOSTS",
            )
        )
    issues += _check_batch(job, source, world_size)
    return issues


def _place(key: str, source: Input) -> str:
    """The absolute path that an input names. Raises UserError if it does not exist, or was not finished."""

    def problem(found: str, fix: str) -> UserError:
        return UserError([Issue(key=key, found=found, fix=fix)])

    if source.run is not None:
        try:
            earlier = records.find(source.run, completed=True)
        except UserError as error:
            first = error.issues[0]
            missing = "no such run" in first.found
            raise problem(first.found, _how_to_get(source.run, first.fix) if missing else first.fix) from None
        several = [*students.results(earlier.result())]
        if source.student is not None or (several and _trains_students(earlier)):
            return _student(earlier, source, several, problem)
        if not earlier.model.is_file() and not earlier.read(earlier.outcome).get("model_uri"):
            raise problem(f"{earlier.name} left no model.tar.gz", "name a run whose script wrote to SM_MODEL_DIR")
        return str(earlier.model)
    path = source.place
    assert path is not None
    try:
        path.exists()
    except (OSError, ValueError) as error:
        raise problem(f"{source.folder or source.file}: {error}", "check the path") from None
    kind = "folder" if source.folder else "file"
    if not path.exists():
        fix = "check the path, which is relative to the current folder"
        if source.folder and (command := made_folders.command_that_makes(Path(os.path.expanduser(source.folder)))):
            fix += f", or create it: {command}"
        beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise problem(f"{path}: no such {kind}", did_you_mean(path.name, beside, fix))
    if source.folder and not path.is_dir():
        raise problem(f"{path} is a file", f"write {{file: {source.folder}}}")
    if source.file and path.is_dir():
        raise problem(f"{path} is a folder", f"write {{folder: {source.file}}}")
    if source.folder and not any(path.iterdir()):
        raise problem(f"{path} is empty", "put images there, for example with launcher prepare")
    if source.folder and (unfinished := made_folders.unfinished(key, path)):
        raise UserError([unfinished])
    return str(path)


def _how_to_get(name: str, otherwise: str) -> str:
    """The fix for an input whose run does not exist: the command that starts it, or the nearest name.

    Args:
        name: a run's or a job's.
        otherwise: the fix for a run about which nothing is known.
    """
    commands = _commands_by_job()
    if name in commands:
        return f"run it first: {commands[name]}"
    runs = records.all_runs()[-records.SUGGESTED :]
    known = {run.name for run in runs} | {run.job_name for run in runs}
    of_labels = name.endswith(SUFFIX)  # whose nearest name is often the job's own
    meant = near(name, [one for one in sorted(known | commands.keys()) if SUFFIX in one or not of_labels])
    if meant in known:
        return f"did you mean {meant}?"
    command, job = ("label", name.removesuffix(SUFFIX)) if of_labels else ("run", name)
    own = f"launcher {command} CONFIG, the config whose name is {job}"
    if meant is not None:
        return f"did you mean {meant}? Run it first: {commands[meant]}; or for a run of your own: {own}"
    return otherwise if records.NAME.fullmatch(name) else f"run it first: {own}; {otherwise}"


@cache
def _commands_by_job() -> Mapping[str, str]:
    """The names of the built-in configs' jobs, and of those that fill their label banks -> the command that starts each."""
    found: dict[str, str] = {}
    for config in builtin_configs.names():
        try:
            values = yaml_file.read(builtin_configs.folder() / f"{config}.yaml").values
        except UserError:
            continue  # of a user who edits the kit's own configs
        name, settings = values.get("name"), values.get("hyperparameters")
        found[str(name)] = f"launcher run {config}"
        if isinstance(settings, dict) and settings.get("teacher_cache") is not None:
            found[f"{name}{SUFFIX}"] = f"launcher label {config}"
    return found


def _trains_students(earlier: records.RunFolder) -> bool:
    """Whether a run's script is this kit's for several students, or a replay's copy: another's result may mean anything by them."""
    job = earlier.read(earlier.plan)["job"]
    return job.get("script") == students.TRAINS and students.SETTING in job.get("hyperparameters", {})


def _student(
    earlier: records.RunFolder, source: Input, known: Sequence[str], problem: Callable[[str, str], UserError]
) -> str:
    """The model folder of a run's student.

    Args:
        known: the students in its result; none if it has no result on this machine.
        problem: makes an error about the input from what was found and the fix.
    """
    name = source.student
    if name is None:
        fix = f"name one: {{run: {source.run}, student: {known[0]}}}; they are {', '.join(known)}"
        raise problem(f"{earlier.name} trained several students", fix)
    if known and name not in known:
        raise problem(
            f"{earlier.name} trained no student {name}", did_you_mean(name, known, f"name one of {', '.join(known)}")
        )
    folder = earlier.unpacked_model / name
    if not folder.is_dir():
        fix = (
            "unpack its model.tar.gz, and write {folder: …}"
            if known
            else f"write {{run: {source.run}}} for a run of one student"
        )
        raise problem(f"{folder}: no such folder", fix)
    return str(folder)


def _check_texts(job: Job) -> Iterator[Issue]:
    """Secrets under other keys than `environment` and `hyperparameters`, which have rules of their own."""
    given, kept = job.model_dump(exclude_none=True), job.redacted()
    for name in kept.keys() - {"environment", "hyperparameters"}:
        below = kept[name] if isinstance(kept[name], dict) else {}
        if kept[name] != given[name]:
            yield Issue(
                key=next((f"{name}.{key}" for key in below if below[key] != given[name][key]), name),
                found="looks like a secret; whoever may describe the job can read it",
                fix="declare it under secrets, and name only its variable here",
            )


def _check_batch(job: Job, source: Path, world_size: int) -> Iterator[Issue]:
    """A global batch, given or the default of this kit's settings, that the processes cannot share evenly."""
    batch, shown = _batch(job, source)
    if batch % world_size:
        lower = batch // world_size * world_size
        yield Issue(
            key=f"hyperparameters.{BATCH}",
            found=f"{shown} do not divide evenly among {world_size} processes",
            fix=f"write {BATCH}: " + (f"{lower} or {lower + world_size}" if lower else str(world_size)),
        )


def _batch(job: Job, source: Path) -> tuple[int, str]:
    """The global batch, given or the default of this kit's settings, and how messages call it; (0, "") if none is known."""
    is_default = BATCH not in job.hyperparameters
    batch = hyperparameters.kit_default(source, job.script, BATCH) if is_default else job.hyperparameters[BATCH]
    if isinstance(batch, str) and re.fullmatch(r"\d{1,19}", batch.strip(), re.ASCII):
        batch = int(batch)
    if type(batch) is not int or not 0 < batch <= sys.maxsize:
        return 0, ""
    return batch, f"{batch} images" + ", the default," * is_default


def check_images(job: Job, source: Path, places: Mapping[str, str], world_size: int) -> list[Issue]:
    """Folders of images on this machine that this kit's scripts refuse: too few to train on, or different classes held out.

    Args:
        places: channel -> path, of the inputs on this machine.
    """
    return [*_check_count(job, source, places, world_size), *image_classes.check(job, places)]


def _check_count(job: Job, source: Path, places: Mapping[str, str], world_size: int) -> Iterator[Issue]:
    """A folder of training images that does not hold one global batch.

    All its files count, so that what is refused here would also fail in training; shards hold any number of images.
    """
    folder = Path(places.get("train", ""))
    if job.source is not None or "train" not in places or "unlabelled" in job.inputs or not folder.is_dir():
        return
    batch, shown = _batch(job, source)
    try:
        count = _files_below(folder, batch)
    except OSError:
        return
    if count is None or count >= batch:
        return
    most = count // world_size * world_size
    fix = f"write {BATCH}: {most}, or less; or add images"
    fix = fix if most else f"give at least {counted(world_size, 'image')}, one a process"
    found = f"{shown} make no batch of the {counted(count, 'file')} in {folder}"
    yield Issue(key=f"hyperparameters.{BATCH}", found=found, fix=fix)


def _files_below(folder: Path, enough: int) -> int | None:
    """Files below a folder, without hidden ones, counted up to `enough`; None: some of them are shards. Raises OSError."""

    def fails(error: OSError) -> None:
        raise error

    count = 0
    for _, folders, files in walk(folder, fails):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(name.endswith(".tar") for name in files):
            return None
        count += sum(not name.startswith(".") for name in files)
        if count >= enough:
            break
    return count


def _check_unread(job: Job) -> Iterator[Issue]:
    """Channels of this kit's scripts that are given but not read."""
    for channel, (name, asks, fix) in ASKED_FOR.items():
        if job.source is None and channel in job.inputs and not asks(job.hyperparameters.get(name)):
            found = f"given, and {job.script} does not read it without {name}"
            yield Issue(key=f"inputs.{channel}", level="warning", found=found, fix=f"write {fix}, or remove it")


def _check_checkpoints(job: Job) -> Iterator[Issue]:
    """A folder of checkpoints that this kit's scripts do not write to: no environment variable names it to them."""
    path = job.checkpoints.path if job.checkpoints is not None and job.source is None else None
    if path is not None and path.rstrip("/") != str(records.CHECKPOINTS):
        yield Issue(
            key="checkpoints.path",
            found=f"{path} would hold no checkpoint: this kit's scripts write to {records.CHECKPOINTS}",
            fix=f"remove path; the default is {records.CHECKPOINTS}",
        )


def _check_environment(job: Job) -> Iterator[Issue]:
    """Variables and secrets that the toolkit sets, that SageMaker's request cannot hold, or that are given twice."""
    for name, key in [(name, f"environment.{name}") for name in job.environment] + [
        (name, f"secrets.{name}") for name in job.secrets
    ]:
        if name in TOOLKITS_OWN or name.startswith(("SM_", "SAGEMAKER_", "PET_")):
            yield Issue(key=key, found="set by the container toolkit", fix="remove or rename it")
        # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html#API_CreateTrainingJob_RequestSyntax
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}", name):
            valid = "letters, digits and underscores, no digit first, 512 characters at most"
            yield Issue(key=key, found="not a valid variable name", valid=valid, fix="rename it")
    for name in sorted(job.secrets.keys() & job.environment.keys()):
        yield Issue(key=f"secrets.{name}", found="also under environment", fix="remove it there")
    for name, value in job.environment.items():
        key = f"environment.{name}"
        if len(value) > 512 or "\0" in value:
            found = "a NUL character" if "\0" in value else f"{len(value)} characters"
            yield Issue(key=key, found=found, valid="at most 512 characters, none of them NUL", fix="shorten it")
        if value == REDACTED:
            found = f"{REDACTED}: a run's record does not hold its secrets"
            yield Issue(key=key, found=found, fix=f"pass it again, or declare it: secrets: {{{name}: env}}")
        elif is_secret(name, value):
            found = "seems to be a secret, which a config and SageMaker's job description show"
            yield Issue(key=key, level="warning", found=found, fix=f"declare it instead: secrets: {{{name}: env}}")


def _check_script(job: Job, source: Path, files: list[SourceFile]) -> Iterator[Issue]:
    """Whether the source folder and its script exist and are in the source package."""
    if not source.is_dir():
        found = f"{source}: {'a file' if source.exists() else 'no such folder'}"
        yield Issue(
            key="source", found=found, fix="name the folder that holds the script, relative to the current folder"
        )
    elif any(part in (".", "..") for part in job.script.split("/")):
        yield Issue(
            key="script",
            found=f"{job.script}: the container toolkit refuses . and ..",
            fix="set source to the script's folder",
        )
    elif not (source / job.script).is_file():
        own = [file.path for file in files if file.path.endswith(".py") and file.path.split("/")[0] not in PACKAGES]
        scripts = sorted({*own} - {*NO_ENTRY_SCRIPTS}, key=lambda path: (path.count("/"), path))
        fix = did_you_mean(job.script, scripts, "name a script in that folder, or set source to your own folder")
        valid, found, here = ", ".join(scripts[:8]), f"{job.script}: no such file in {source}", Path(job.script)
        if job.source is None and here.is_file():  # a kit's script is looked for where no source is given
            found += f", where this kit's scripts are; {here} is in the current folder"
            valid, fix = "", f"write source: {written(str(here.parent))} and script: {here.name}"
        yield Issue(key="script", found=found, valid=valid, fix=fix)
    elif files and job.script not in {file.path for file in files}:
        yield Issue(
            key="script",
            found=f"{job.script} is excluded from the source package: git or {IGNORE_FILE} ignores it",
            fix=f"remove it from .gitignore or {IGNORE_FILE}",
        )

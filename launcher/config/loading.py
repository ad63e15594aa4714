"""A config file, overrides or a mapping -> Job, with every mistake reported at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config import defaults, yaml_file
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.config.job_issues import as_written, problems, without_mistakes


def load(path: str | Path, overrides: Sequence[str] = (), *, smoke: bool = False, with_defaults: bool = True) -> Job:
    """Read a config file into a Job, with your defaults (launcher.config.defaults) for what it leaves out.

    >>> job = launcher.load("configs/quickstart.yaml", ["hyperparameters.temperature=2"], smoke=True)
    >>> job.name, job.hyperparameters["temperature"], job.hyperparameters["max_steps"]
    ('quickstart', 2, 3)

    Args:
        path: a YAML file.
        overrides: `dotted.key=value` texts, applied last; values are YAML.
        smoke: apply the file's `smoke` section first.
        with_defaults: fill in your defaults.

    Raises:
        UserError: every mistake in the file, the overrides and the defaults, at once.
    """
    config = yaml_file.read(path)
    if Path(path).name == defaults.PROJECT_FILE:
        raise mistake(
            str(path),
            "defaults for every job, no job itself",
            "name a job's config; launcher defaults shows what it gives",
        )
    base = dict(config.values)
    changes = base.pop("smoke", None)
    if changes is not None and not isinstance(changes, dict):
        raise mistake(
            config.where("smoke"),
            as_written(changes),
            "list the keys that --smoke changes under smoke",
            valid="a mapping",
        )
    if smoke and changes is None:
        raise mistake(
            f"{path}: smoke",
            "--smoke was given, but the config has no smoke section",
            "add `smoke:` with the keys to change, for example `smoke: {hyperparameters: {max_steps: 3}}`",
        )
    smoked = yaml_file.merge(base, changes or {})
    for name, given in _inputs(changes).items():  # a channel has one source: the smoke section replaces it
        smoked["inputs"][name] = given
    chosen, found = yaml_file.override(replace(config, values=smoked if smoke else base, smoke=smoke), overrides)
    found += problems(chosen)
    if not smoke:  # mistakes in the smoke section are reported before anyone asks for it
        usual = list(problems(replace(config, values=base, lines={})))
        found += [
            replace(issue, key=config.where(f"smoke.{issue.key}"))
            for issue in problems(replace(config, values=smoked, lines={}))
            if issue not in usual
        ]
    overridden = {text.partition("=")[0].strip() for text in overrides}
    examples = defaults.examples_in(smoked if smoke else base) - overridden
    return _made(chosen.values, found, str(path), examples if with_defaults else None)


def _made(values: Mapping[str, Any], found: list[Issue], source: str, examples: Collection[str] | None = ()) -> Job:
    """The job of a config's values and the defaults. Raises UserError with the issues found so far and those of the defaults.

    Args:
        examples: as for `defaults.complete`; None: without defaults.
    """
    filled, origins, more = defaults.complete(values, examples) if examples is not None else (dict(values), {}, [])
    if found or more:
        raise UserError([*found, *more], source, rest=without_mistakes(filled))
    return Job.model_validate(filled).with_defaults(origins)


def _inputs(values: Mapping[str, Any] | None) -> dict[str, Any]:
    found = (values or {}).get("inputs")
    return found if isinstance(found, dict) else {}


def from_values(values: Mapping[str, Any], source: str = "the job") -> Job:
    """A Job from a plain mapping, for Python and notebooks, with your defaults for what it leaves out. Raises UserError with every
    mistake.

    >>> channels = {part: {"folder": f"data/digits/{part}"} for part in ("train", "validation")}
    >>> settings = {"model": "resnet18", "model_options": {"in_chans": 1}, "image_size": 32, "epochs": 2}
    >>> values = {"name": "mine", "script": "train_classifier.py", "inputs": channels, "hyperparameters": settings}
    >>> launcher.plan(launcher.from_values(values)).errors
    ()
    """
    return _made(values, list(problems(yaml_file.Config(source, dict(values)))), source)


def from_record(values: Mapping[str, Any], source: str) -> Job:
    """A Job from the complete values of an earlier one, which today's defaults do not change. Raises UserError with every mistake."""
    return _made(values, list(problems(yaml_file.Config(source, dict(values)))), source, None)

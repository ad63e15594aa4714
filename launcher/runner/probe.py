"""A probe of a run: the same job again, measuring instead of training, in under two minutes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import backends
from launcher.config.expressions import NotPlain
from launcher.config.issues import Issue, UserError, mistake
from launcher.planner.plan import Plan
from launcher.record import records
from launcher.runner.recorded_plan import plan_again

if TYPE_CHECKING:
    from launcher.insight.probe import Probe

SETTING = "probe_seconds"

SECONDS = 90.0
"""It begins no measurement later than this many seconds after its processes start; the last one and the end come on top."""

LONGEST = 118.0
"""Seconds after which it is stopped."""

INTERRUPTED = "it was interrupted"
"""Why a probe that Ctrl-C ended measured nothing."""


def planned(source: str, overrides: Sequence[str] = (), *, on: str = "process") -> Plan:
    """Plan the probe of a run: its job and code, set to measure instead of training.

    Args:
        source: a run's name, a job's name for the latest, or a run's folder.
        overrides: `key=value` texts, for example inputs.train={folder: data/train} if the run's data were elsewhere.
        on: process or docker.

    Raises:
        UserError: no such run, it is still running, its data are not here, or its script cannot be probed.
    """
    here = [name for name in backends.BACKENDS if backends.get(name).on_this_machine]
    if on not in here:
        raise mistake("--on", on, "a probe runs on this machine", valid=" or ".join(here))
    folder = records.RunFolder(Path(source).absolute())
    if not folder.plan.is_file():
        if source.startswith("s3://") or folder.path.is_dir():
            fix = "name a run (launcher runs lists them): only its record says what to start"
            raise mistake("--probe", f"{source} holds measurements, but not the job that they come from", fix)
        folder = records.find(source)
    recorded = folder.read(folder.plan)
    if backends.starter(recorded["backend"]).on_this_machine and (state := folder.state()) not in records.OVER:
        fix = f"wait until it ends, or launcher stop {folder.name}"
        raise mistake(
            "--probe", f"{folder.name} is {state} on this machine, and the two would slow each other down", fix
        )
    name = recorded["job"]["name"][: 42 - len("-probe")].rstrip("-")
    own = [f"name={name}-probe", f"hyperparameters.{SETTING}={SECONDS:g}"]
    made = plan_again(folder, [*own, *overrides], on)
    _refuse(folder.name, made)
    return made


def read(folder: records.RunFolder, outcome: Mapping[str, Any]) -> Probe | str:
    """What a probe measured; or, if it failed, why it measured nothing.

    Args:
        outcome: how the probe's run ended.
    """
    from launcher.insight import shapes
    from launcher.insight.probe import Probe

    values: dict[str, Any] = {}
    trouble, state = "", folder.state()
    for file in sorted(folder.path.glob("hosts/*/opt/ml/output/data/*/probe.json")):
        values, trouble = shapes.read(shapes.PROBE, file)
    if trouble or state != records.COMPLETED or not values.get("finished"):
        why = " ".join(outcome.get("failure", "").split())[:300]
        why = "; ".join(filter(None, (trouble, why)))
        trouble = f"{folder.name} {state}{': ' if why else ''}{why}; launcher logs {folder.name}"
    return Probe.from_file(folder.name, values, trouble) or trouble


def _refuse(run: str, made: Plan) -> None:
    """Raise a UserError if the probe cannot start."""
    script = made.job.script
    unknown = [one for one in made.issues if one.key in (f"hyperparameters.{SETTING}", "hyperparameters")]
    lacks = any(one.level == "not checked" or re.search("has no (such|argument)", one.found) for one in unknown)
    if lacks or _ignores_the_setting(made):
        raise mistake(
            "--probe",
            f"{script} of {run} has no setting {SETTING}: it is your own script, or from an older version of this kit",
            f"add {SETTING}: float = 0.0 to its settings class and, where it is above 0, let main call training.engine.probe.measure "
            "instead of the loop's train, as this kit's train_classifier.py does; then run it again and probe that run. "
            "See docs/your-own-script.md#probes",
        )
    if not made.errors:
        return
    found = [_for_a_probe(one) for one in made.errors]
    hosts = made.job.compute.instance_count or 1
    if hosts > 1 and any(one.key.startswith("inputs.") for one in found):
        found.append(
            Issue(
                key="compute.instance_count",
                found=f"{hosts} hosts, which would share this machine",
                fix="--with compute.instance_count=1 --with compute.processes_per_host=P --with hyperparameters.global_batch_size=N, "
                "with as many images a process as in the run",
            )
        )
    raise UserError(found, f"the probe of {run}")


def _ignores_the_setting(made: Plan) -> bool:
    """Whether the script takes unknown arguments, and this one is unknown to it: it would train instead of measuring."""
    from launcher.config.descriptions import script_settings

    try:
        return SETTING not in {one.name for one in script_settings(made.source, made.job.script)}
    except (NotPlain, SyntaxError, ValueError):  # which the plan reports
        return False


def _for_a_probe(error: Issue) -> Issue:
    """A plan's error, with its fix as an option of `launcher diagnose`."""
    if not error.key.startswith("inputs."):
        return error
    return replace(error, fix=f"name the same data on this machine: --with '{error.key}={{folder: FOLDER}}'")

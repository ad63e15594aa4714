"""What `launcher tune` tunes: a config's job on any backend, or a command on this machine. Each is run with changes to its settings."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import backends
from launcher.backends import toolkit
from launcher.backends.interrupts import remembered
from launcher.backends.local_hosts import hardware
from launcher.backends.plans import check, plan
from launcher.config.issues import mistake
from launcher.config.job import Job
from launcher.config.redaction import REDACTED, mentions_a_secret, redact_command
from launcher.insight import outside
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, Fix
from launcher.insight.outside import SETTINGS, VARIABLES
from launcher.planner.own_checkpoints import with_own_checkpoints
from launcher.planner.python_start import SWITCH, switched_off
from launcher.planner.source_package import SourceFile, source_files
from launcher.record import records
from launcher.runner.run import Run, start
from launcher.runner.run_to_completion import run_to_completion
from launcher.study.conditions import Code, commit_of, machine_of, settings_of, software
from launcher.study.tune_settings import RULES

Changes = Mapping[str, Any]
"""Setting -> value, overriding the subject's own; named as in RULES."""

Until = Callable[[Run], str]
"""Called about every second: why to stop the run now; "" to let it go on."""

LOG_EVERY = "log_every"
LOGGED = 5
"""Maximum steps between two metric lines of a trial: what is compared ends with one."""

SCRIPTS = (".py", ".sh")

CONFIGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".gin")
"""Suffixes of files that a script may be told to read its settings from; trials write logs and tables."""

MAX_CONFIG_BYTES = 2**20
"""A larger file of such a name is data."""

TO_END = 60.0
"""Seconds that a command may take to end after it was asked to."""

WATCH = (
    "import sys; sys.path[0] = sys.argv.pop(1); from launcher.runner.watch import watch; "
    "sys.exit(watch(sys.argv[2:], sys.argv[1]).exit_code)"
)
"""Runs a command as `launcher watch` does, in its own process: its output is not for this terminal. The folder is the user's, and
its modules must not replace ours: people name theirs launcher.py."""


class Subject(ABC):
    """What is tuned."""

    name: str
    """The name of its runs."""
    on: str
    """Where it runs."""
    code: Code
    commit: str
    """Of its code, for people."""
    shows_steps: bool = True
    """Whether its steps are visible while it runs."""

    @abstractmethod
    def conditions(self) -> dict[str, str]:
        """The current value of each of CONDITIONS."""

    @abstractmethod
    def run(self, changes: Changes, until: Until, log: Callable[[str], None], started: Callable[[Run], None]) -> Run:
        """Run it with some changes, to its end or until it is stopped. An interrupt stops the run first.

        Args:
            started: called with the run as soon as it has started.
        """

    @abstractmethod
    def changes_of(self, fix: Fix) -> Changes:
        """What a finding's fix sets here, the setting that it is about first; {} if it is no setting, or one that can only be changed
        in the script."""

    @abstractmethod
    def also(self, finding: Finding, evidence: Evidence) -> Changes:
        """Another setting that may help against a finding; {}: there is none."""

    def possible(self, changes: Changes) -> bool:
        """Whether it can be planned with these changes."""
        return True


@dataclass
class JobSubject(Subject):
    """A config's job.

    Args:
        seconds: that a trial may take, including its start.
    """

    job: Job
    on: str
    seconds: float

    def __post_init__(self) -> None:
        self.name = self.job.name
        self.is_kit_script = self.job.source is None
        self.shows_steps = self.is_kit_script or backends.get(self.on).on_this_machine
        if not self.is_kit_script and not self.job.observe:
            raise mistake("observe", "false: nothing of this script is measured", "remove it, or write observe: true")
        self.outside = _given_settings(self.job.environment.get(SETTINGS, ""), f"environment.{SETTINGS}")
        self.keys: dict[str, str] = {}
        """Setting -> the hyperparameter from which a line of a script that is not the kit's takes it."""
        self.base = self.changed({})
        source = plan(self.base, on=self.on).source
        self.code = Code(source_files(source, self.base)[0])
        self.commit = commit_of(source)

    def conditions(self) -> dict[str, str]:
        return {
            "code": self.code.checksum,
            "settings": settings_of(self.job, ()),
            "machine": machine_of(self.job, self.on),
        }

    def changed(self, changes: Changes) -> Job:
        """The job of a trial."""
        job, values = self.job, self.values(changes)
        hyperparameters = {**job.hyperparameters, **values.get("hyperparameters", {})}
        if self.is_kit_script:
            every = hyperparameters.get(LOG_EVERY, LOGGED)
            if isinstance(every, int) and LOG_EVERY not in changes:
                hyperparameters[LOG_EVERY] = min(every, LOGGED)
        compute = job.compute.model_copy(update={"max_hours": min(job.compute.max_hours, self.seconds / 3600)})
        update = {
            "name": f"{job.name[: 42 - len('-tune')].rstrip('-')}-tune",
            "hyperparameters": hyperparameters,
            "environment": {**job.environment, **values.get("environment", {})},
            "compute": compute,
            "study": None,
        }
        return job.model_copy(update=update)

    def values(self, changes: Changes) -> dict[str, dict[str, Any]]:
        """The changes, grouped by the config's sections."""
        keys = {name: name for name in changes if name not in VARIABLES} if self.is_kit_script else self.keys
        own = {keys[name]: value for name, value in changes.items() if name in keys}
        others = {name: value for name, value in changes.items() if name not in keys}
        environment = outside.variables(others, self.outside)
        return {name: part for name, part in (("hyperparameters", own), ("environment", environment)) if part}

    def run(self, changes: Changes, until: Until, log: Callable[[str], None], started: Callable[[Run], None]) -> Run:
        def interrupted() -> None:
            log("stopping the running trial; the same command goes on from here")

        job = with_own_checkpoints(self.changed(changes), "tune")
        planned = check(plan(job, on=self.on))  # its issues were reported for all trials at once
        run = run_to_completion(lambda: start(planned), log=log, interrupted=interrupted, started=started, until=until)
        run.wait(progress=False)  # on SageMaker a stopped job still uploads its output
        return run

    def changes_of(self, fix: Fix) -> Changes:
        if not self.is_kit_script:
            section, _, key = (fix.key or "").partition(".")
            if section != "hyperparameters" or fix.setting not in RULES:
                return outside.changes_of(fix.setting, fix.value)
            self.keys[fix.setting] = key
            return {fix.setting: fix.value}
        wanted = {} if fix.setting is None else {fix.setting: fix.value, **fix.also}
        sections = ("hyperparameters", "environment")
        if fix.first or any(
            key.partition(".")[0] not in sections or key.partition(".")[2] not in RULES for key in wanted
        ):
            return {}
        found = {key.partition(".")[2]: value for key, value in wanted.items()}
        if found.get(LOG_EVERY, math.inf) <= self.job.hyperparameters.get(LOG_EVERY, 0):
            return {}  # the job does so already: only its trials log more often
        return found

    def also(self, finding: Finding, evidence: Evidence) -> Changes:
        if not self.is_kit_script:
            return _also_from_outside(finding, evidence)
        if finding.kind not in OF_THE_INPUT or evidence.workers is None or evidence.remote:
            return {}
        if evidence.workers == 0:
            return _first_workers(evidence)
        kind = evidence.settings.get("worker_type")
        if kind not in ("threads", "processes", "loader"):  # auto
            kind = "processes" if evidence.on_gpu else "threads"
        # with a GPU, none that takes the lock that launching kernels needs
        beside_a_gpu = {"processes": "loader", "loader": "processes", "threads": "processes"}
        beside_the_cpu = {"processes": "threads", "loader": "threads", "threads": "processes"}
        return {"worker_type": (beside_a_gpu if evidence.on_gpu else beside_the_cpu)[kind]}

    def possible(self, changes: Changes) -> bool:
        return not plan(self.changed(changes), on=self.on).errors


@dataclass
class CommandSubject(Subject):
    """A command on this machine, run as `launcher watch` does.

    Args:
        command: program and arguments; the program exists.
    """

    command: Sequence[str]
    name: str
    on: str = backends.DEFAULT

    def __post_init__(self) -> None:
        if value := switched_off(os.environ):
            raise mistake(SWITCH, f"{value}: nothing of this command is measured", "unset it in the environment")
        self.outside = _given_settings(os.environ.get(SETTINGS, ""), SETTINGS)
        self.code = Code(self._code())
        self.commit = commit_of(Path.cwd())

    def conditions(self) -> dict[str, str]:
        return {
            "code": self.code.checksum,
            "settings": json.dumps(
                {"command": self._without_secrets, "folder": str(Path.cwd()), SETTINGS: self.outside},
            ),
            "machine": f"{self.on}: {hardware()}; {software(self.command[0])}",
        }

    @property
    def _without_secrets(self) -> list[str]:
        """The command without its secrets; each redacted word has the command's checksum, since it may hold more than a secret."""
        pairs = zip(redact_command(self.command), self.command)
        checksum = hashlib.sha256(json.dumps([*self.command]).encode()).hexdigest()[:8]
        return [shown if shown == word else f"{shown} ({checksum})" for shown, word in pairs]

    def _code(self) -> list[SourceFile]:
        """The files that the command names, such as its script and a config, and the Python files below its scripts' folders, and below
        the current one for `-m`: modules they may import. For a folder with too many files, only those that are named."""
        named = [Path(text) for word in self.command for text in (word, word.partition("=")[2]) if _is_code(text)]
        folders = [file.parent for file in named if file.suffix in SCRIPTS]
        folders += [Path()] if {"-m", "--module"} & {*self._before_the_script} else []
        found = {file.resolve(): file for file in named}
        for folder in dict.fromkeys(folders):
            for file in source_files(folder)[0]:
                if file.source is not None and file.source.is_relative_to(folder) and file.path.endswith(".py"):
                    found.setdefault(file.source.resolve(), file.source)
        store = records.store().resolve()  # runs hold code of their own
        return [
            SourceFile(str(file), file, file.stat().st_size)
            for path, file in found.items()
            if store not in path.parents
        ]

    @property
    def _before_the_script(self) -> list[str]:
        """The words before the first script that the command names; the others are the script's own."""
        return [*itertools.takewhile(lambda word: Path(word).suffix not in SCRIPTS, self.command)]

    def variables(self, changes: Changes) -> dict[str, str]:
        """The environment variables that apply the changes; the user's own settings stay."""
        return outside.variables(changes, self.outside)

    def run(self, changes: Changes, until: Until, log: Callable[[str], None], started: Callable[[Run], None]) -> Run:
        before = {run.name for run in records.all_runs(self.name)}

        def recorded() -> Run | None:
            """The trial's run; None until its record is there. Another tuning may have started one of the same name."""
            new = (one for one in records.all_runs(self.name) if one.name not in before)
            return next((Run(one) for one in new if one.read(one.supervisor).get("pid") == process.pid), None)

        process = subprocess.Popen(
            [sys.executable, "-c", WATCH, str(Path(__file__).parents[2]), self.name, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.variables(changes)},
            start_new_session=True,  # Ctrl-C reaches us alone, and we stop it
            preexec_fn=toolkit.die_with_the_parent,
        )
        run: Run | None = None
        why = ""
        try:
            with remembered() as came:
                while not came and process.poll() is None:
                    time.sleep(0.2)
                    if run is None:
                        run = recorded()
                        if run is not None:
                            started(run)
                    if run is not None and (why := until(run)):
                        run.stop(why)
                        break
            if came:
                raise KeyboardInterrupt
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                log("stopping the running trial; the same command goes on from here")
            if run is not None:
                run.stop("Ctrl-C" if isinstance(error, KeyboardInterrupt) else "the tuning failed")
            else:
                process.terminate()
            raise
        finally:
            _end(process)
        run = run or recorded()
        if run is not None and why and not run.folder.outcome.exists():
            reason = f"it did not end within {TO_END:.0f} s of SIGTERM, and was killed"
            records.write_json(run.folder.outcome, {"state": records.STOPPED, "stop_reason": reason})
        if run is None:
            again = outside.watch_command(self.variables(changes), redact_command(self.command))
            found = f"ended with {process.returncode} before it was recorded"
            raise mistake("command", found, f"{again} shows what is wrong")
        return run

    def changes_of(self, fix: Fix) -> Changes:
        return outside.changes_of(fix.setting, fix.value)

    def also(self, finding: Finding, evidence: Evidence) -> Changes:
        return _also_from_outside(finding, evidence)


def _is_code(text: str) -> bool:
    """Whether a part of a command names a script or a config."""
    file = Path(text)
    with contextlib.suppress(OSError, ValueError):  # such as a text that is too long for a name
        if file.suffix in SCRIPTS:
            return file.is_file() and os.access(file, os.R_OK)
        small = file.suffix in CONFIGS and file.is_file() and file.stat().st_size <= MAX_CONFIG_BYTES
        return small and os.access(file, os.R_OK)
    return False


def _given_settings(text: str, key: str) -> dict[str, Any]:
    """What the user's own LAUNCHER_SETTINGS sets."""
    found = outside.given_settings(text)
    if found is None:
        shown = REDACTED if mentions_a_secret(text) else text
        raise mistake(
            key, f"{shown}: not a JSON object", "write JSON, or leave it out", valid='for example {"num_workers": 2}'
        )
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a stopped trial is over, then kill what is left of its process group, such as a wrapper's child."""
    try:
        process.wait(TO_END)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


OF_THE_INPUT = ("too_few_workers", "too_many_workers", "data_bound", "storage_bound", "slow_epoch_starts")
"""Findings against which another kind of worker may help."""


def _first_workers(evidence: Evidence) -> Changes:
    """For a loader without workers, which reads and prepares images between the steps: one worker per core."""
    return {"num_workers": max(1, int(evidence.cores_each or 1))}


def _also_from_outside(finding: Finding, evidence: Evidence) -> Changes:
    if finding.kind in OF_THE_INPUT and evidence.workers == 0:
        return _first_workers(evidence)
    script = evidence.script
    if finding.kind == "fp32_compute" and script and script.convolves and evidence.facts.get("device") == "cuda":
        return {"cudnn_benchmark": True}
    loader = script.loader("training") if script else None
    if loader is None:
        return {}
    made = loader.values
    if finding.kind == "slow_epoch_starts" and evidence.workers and not made.get("persistent_workers"):
        return {"persistent_workers": True}
    if finding.kind == "host_to_device_bound" and not made.get("pin_memory"):
        return {"pin_memory": True}
    if finding.kind in ("too_few_workers", "storage_bound") and evidence.workers:  # busy cores cannot prefetch more
        return {"prefetch_factor": 2 * int(made.get("prefetch_factor") or 2)}
    return {}

"""Job -> Plan: everything that a run will do, worked out in full and without effect."""

from __future__ import annotations

import json
import secrets
import shlex
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher import backends, hyperparameters, preflight
from launcher.backends.base import HostPlan
from launcher.findings import Finding, UserError, did_you_mean, indent, mistake
from launcher.job import Job, load
from launcher.package import TravelFile, entrypoints_folder, travelling_files
from launcher.redaction import redact


@dataclass(frozen=True)
class Plan:
    """A job worked out in full. `print(plan)` is for people; `plan.to_dict()` for machines."""

    name: str
    """The run's name, fixed here: job name, UTC time, four letters."""
    planned: str
    """When, ISO 8601 in UTC."""
    backend: str
    job: Job
    source: Path
    """The folder that holds the script."""
    hosts: tuple[HostPlan, ...]
    hyperparameters: dict[str, str]
    """As they travel: JSON texts, with the toolkit's own."""
    channels: dict[str, str]
    """Channel -> the folder or file on this machine that it shows."""
    files: tuple[TravelFile, ...]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")

    def kept_job(self) -> dict[str, Any]:
        """The job as it is kept and shown: without its secrets."""
        return {**self.job.model_dump(exclude_none=True), "environment": redact(self.job.environment)}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, complete."""
        return {
            "name": self.name,
            "planned": self.planned,
            "backend": self.backend,
            "job": self.kept_job(),
            "source": str(self.source),
            "hosts": [{**asdict(host), "environment": redact(host.environment)} for host in self.hosts],
            "hyperparameters": self.hyperparameters,
            "channels": self.channels,
            "files": [{"path": file.path, "size": file.size} for file in self.files],
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        total = sum(file.size for file in self.files)
        widest = max((len(file.path) for file in self.files), default=0)
        hosts = f"{len(self.hosts)} host{'s' if len(self.hosts) > 1 else ''}"
        lines = [
            f"plan {self.name}",
            f"  runs on     {self.backend}, {hosts}, at most {self.job.compute.max_hours:g} h",
        ]
        lines += [f"  {host.name:<11} {host.address}: {shlex.join(host.command)}" for host in self.hosts]
        if self.hosts:
            lines += [
                "  environment "
                + " ".join(
                    f"{name}={shlex.quote(value)}" for name, value in sorted(redact(self.hosts[0].environment).items())
                )
            ]
        lines += [f"  channel     {name}: {place}" for name, place in self.channels.items()]
        lines += [f"  code        {len(self.files)} files, {total / 1024:.1f} KiB, from {self.source}"]
        lines += [f"              {file.path:<{widest}} {file.size:>8} B" for file in self.files]
        for level in ("error", "warning", "not checked"):
            of_level = [finding for finding in self.findings if finding.level == level]
            if of_level:
                lines += [
                    f"  {level}{'s' if level != 'not checked' and len(of_level) > 1 else ''}",
                    *(indent(str(finding), "    ") for finding in of_level),
                ]
        if not self.errors:
            lines += ["  nothing was started; `launcher run` with the same arguments does it"]
        return "\n".join(lines)


def plan(job: Job, *, on: str = "process") -> Plan:
    """Work a job out in full. Nothing is written, started, imported or asked over a network.

    Args:
        job: what to run.
        on: the backend's name.

    Returns:
        A Plan; its `findings` hold everything that preflight found, errors too.

    Raises:
        UserError: no such backend.
    """
    if on not in backends.BACKENDS:
        cure = did_you_mean(on, backends.BACKENDS, f"write --on {next(iter(backends.BACKENDS))}")
        raise mistake("--on", f"no backend {on}", cure, valid=", ".join(backends.BACKENDS))
    now = datetime.now(timezone.utc)
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))  # random's seed is the user's
    name = f"{job.name}-{now:%Y%m%d-%H%M%S}-{letters}"
    source = Path(job.source).expanduser().absolute() if job.source else entrypoints_folder()
    backend = backends.get(on)
    channels, findings = preflight.channels(job)
    files, file_findings = travelling_files(source) if source.is_dir() else ([], [])
    findings += file_findings
    findings += preflight.check(job, source, files, backend.processes_per_host(job))
    findings += backend.check(job, source)
    possible = not any(finding.level == "error" for finding in findings)
    encoded = {**job.hyperparameters, **backend.toolkit_hyperparameters(job, name)} if possible else {}
    return Plan(
        name=name,
        planned=now.isoformat(timespec="microseconds"),
        backend=on,
        job=job,
        source=source,
        hosts=backend.hosts(job) if possible else (),
        hyperparameters=hyperparameters.encode(encoded),
        channels=channels,
        files=tuple(file for file in files if file.path not in backend.LEFT_BEHIND),
        findings=tuple(findings),
    )


def plan_config(path: str | Path, overrides: Sequence[str] = (), *, on: str = "process", smoke: bool = False) -> Plan:
    """`load` and `plan` in one, so that the mistakes of both come at once.

    Raises:
        UserError: the file is no job; what is wrong with the rest of it is told too.
    """
    try:
        return plan(load(path, overrides, smoke=smoke), on=on)
    except UserError as error:
        if error.rest is None:
            raise
        known = [finding.key.split(" (line")[0] for finding in error.findings]
        rest = [
            finding
            for finding in plan(error.rest, on=on).errors
            if not any(finding.key == key or key.startswith(f"{finding.key}.") for key in known)
        ]
        raise UserError([*error.findings, *rest], error.title) from None


def refuse_errors(planned: Plan) -> None:
    """Raise a UserError with all of a plan's errors, if there are any."""
    if planned.errors:
        raise UserError(planned.errors, f"the plan for {planned.job.name}")

"""Everything wrong with a job that can be known before it starts, each with its cure. Reads the disk, changes nothing."""

from __future__ import annotations

from pathlib import Path

from launcher import hyperparameters, records
from launcher.findings import Finding, UserError, did_you_mean
from launcher.job import Input, Job


def channels(job: Job) -> tuple[dict[str, str], list[Finding]]:
    """Where each input lies on this machine, and what is wrong with those that do not.

    Returns:
        Channel -> absolute path of a folder or file, for the inputs that are there; and the findings.
    """
    places: dict[str, str] = {}
    findings: list[Finding] = []
    for name, source in job.inputs.items():
        key = f"inputs.{name}"
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or len(name) > 64:
            # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_Channel.html
            findings.append(
                Finding(
                    key=key,
                    found="not a channel name",
                    valid="1 to 64 letters, digits, dots, hyphens and underscores",
                    cure="rename it",
                )
            )
            continue
        try:
            places[name] = _place(key, source)
        except UserError as error:
            findings += error.findings
    return places, findings


def check(job: Job, source: Path) -> list[Finding]:
    """Findings about the script, its hyperparameters and how it is spread, whatever the backend."""
    findings = list(_check_script(job, source))
    if not findings:
        findings += hyperparameters.check(source, job.script, job.hyperparameters, job.inputs)
    hosts = job.compute.instance_count
    if job.distribution == "none" and (hosts > 1 or (job.compute.processes_per_host or 1) > 1):
        asked = f"{hosts} hosts" if hosts > 1 else f"{job.compute.processes_per_host} processes a host"
        findings.append(
            Finding(
                key="distribution",
                found=f"none, with {asked}: each process would train a model of its own",
                valid="torchrun or smddp",
                cure="write distribution: torchrun",
            )
        )
    world_size = hosts * (job.compute.processes_per_host or 1)
    batch = job.hyperparameters.get("global_batch_size")
    if isinstance(batch, int) and batch % world_size:
        lower = batch // world_size * world_size
        findings.append(
            Finding(
                key="hyperparameters.global_batch_size",
                found=f"{batch} images do not divide by {world_size} processes",
                cure=f"write global_batch_size: {lower or world_size} or {lower + world_size}",
            )
        )
    return findings


def _place(key: str, source: Input) -> str:
    """The absolute path that an input names; a UserError where it is not there."""

    def problem(found: str, cure: str) -> UserError:
        return UserError([Finding(key=key, found=found, cure=cure)])

    if source.run is not None:
        try:
            earlier = records.find(source.run, completed=True)
        except UserError as error:
            first = error.findings[0]
            raise problem(
                first.found,
                f"run it first, for example: launcher run configs/{source.run.replace('-', '_')}.yaml"
                if "no such run" in first.found
                else first.cure,
            ) from None
        if not earlier.model.is_file():
            raise problem(f"{earlier.name} left no model.tar.gz", "name a run whose script wrote to SM_MODEL_DIR")
        return str(earlier.model)
    path = Path(source.folder or source.file or "").expanduser().absolute()
    kind = "folder" if source.folder else "file"
    if not path.exists():
        near = did_you_mean(path.name, [item.name for item in path.parent.iterdir()]) if path.parent.is_dir() else ""
        made = "launcher prepare makes one; paths are relative to the folder you are in"
        raise problem(
            f"{path}: no such {kind}", near if near.startswith("did") else (made if source.folder else "check the path")
        )
    if source.folder and not path.is_dir():
        raise problem(f"{path} is a file", f"write {{file: {source.folder}}}")
    if source.file and path.is_dir():
        raise problem(f"{path} is a folder", f"write {{folder: {source.file}}}")
    if source.folder and not any(path.iterdir()):
        raise problem(f"{path} is empty", "fill it, for example with launcher prepare")
    return str(path)


def _check_script(job: Job, source: Path):
    """Findings where the source folder or the script in it is not there."""
    if not source.is_dir():
        yield Finding(
            key="source",
            found=f"{source}: no such folder",
            cure="name the folder that holds the script, relative to the folder you are in",
        )
        return
    if not (source / job.script).is_file():
        scripts = sorted(
            file.relative_to(source).as_posix()
            for file in source.rglob("*.py")
            if "def main" in file.read_text(encoding="utf-8", errors="replace")
        )
        guess = did_you_mean(job.script, scripts)
        yield Finding(
            key="script",
            found=f"{job.script}: no such file in {source}",
            valid=", ".join(scripts[:8]),
            cure=guess if guess.startswith("did") else "name a script of that folder, or set `source` to yours",
        )

"""`launcher emulate`: a SageMaker emulator that holds what given configs name, for one command or until Ctrl-C."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.aws import catalog
from launcher.aws.prices import instances
from launcher.aws.upload import split
from launcher.config import yaml_file
from launcher.config.issues import Issue, UserError, did_you_mean, mistake
from launcher.config.job import Job
from launcher.config.loading import load
from launcher.emulator.account import ACCOUNT
from launcher.emulator.emulator import Emulator
from launcher.record import trust

REGION = "us-east-1"
"""The region of a config without one."""


def serve(
    configs: Sequence[str],
    command: Sequence[str] = (),
    *,
    port: int = 0,
    prices: Mapping[str, float] | None = None,
    file_systems: Mapping[str, Path] | None = None,
    folder: Path | None = None,
) -> int:
    """Run an emulator and a command against it.

    Args:
        configs: files whose buckets, role, subnets, security groups, file systems and quotas the emulator holds.
        command: runs with the emulator's environment; empty: print that environment, with its key, and wait for Ctrl-C.
        port: on 127.0.0.1; 0 takes a free one.
        prices: US dollars an instance-hour by instance type, in the regions of the configs; us-east-1 where they name none.
        file_systems: file system's id -> the folder that stands for its root; others are empty.
        folder: keeps the hosts' /opt/ml trees; None: a temporary folder.

    Returns:
        The command's exit status; 0 without one.

    Raises:
        UserError: as `start`; or no such command.
    """
    with tempfile.TemporaryDirectory(prefix="launcher-emulator-") as temporary:
        place = folder.absolute() if folder is not None else Path(temporary)
        with start(configs, place, port=port, prices=prices, file_systems=file_systems) as emulator:
            print(f"emulator: {emulator.url} answers its own new key only", file=sys.stderr, flush=True)
            if command:
                return _run(command, emulator.environment)
            settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in emulator.environment.items())
            print(f"export {settings}\n# in another terminal. Keep the key secret: it runs code as you", flush=True)
            print("# Ctrl-C ends the emulator and its jobs", flush=True)
            threading.Event().wait()
    return 0


def start(
    configs: Sequence[str | Path],
    folder: Path | str,
    *,
    port: int = 0,
    prices: Mapping[str, float] | None = None,
    file_systems: Mapping[str, Path] | None = None,
) -> Emulator:
    """An emulator in this process that holds what given configs name. `close` ends it.

    It answers only requests signed with the key in its `environment`, which is new at each start.

    >>> import os, tempfile
    >>> from launcher import emulator
    >>> emulated = emulator.start(["configs/quickstart.yaml"], tempfile.mkdtemp(), prices={"ml.m5.xlarge": 0.23})
    >>> os.environ.update(emulated.environment)        # boto3, the SageMaker SDK and this kit now talk to it
    >>> launcher.check(launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True), on="aws")).price.per_hour
    0.23
    >>> emulated.close()

    Args:
        configs: files whose buckets, role, subnets, security groups, file systems and quotas the emulator holds.
        folder: keeps the hosts' /opt/ml trees.
        port: on 127.0.0.1; 0 takes a free one.
        prices: US dollars an instance-hour by instance type, in the regions of the configs; us-east-1 where they name none.
        file_systems: file system's id -> the folder that stands for its root; others are empty.

    Raises:
        UserError: a config is not valid; a price is not valid, or its instance type is unknown; no config names a file system, or
            its folder does not exist; or `folder` is another user's or open to others' changes.
        RuntimeError: this process has an emulator already.
    """
    jobs = [job for config in configs for job in _both(config)]
    prices, file_systems = prices or {}, file_systems or {}
    issues = [*_wrong_prices(prices), *_wrong_file_systems(file_systems, jobs)]
    if issues:
        raise UserError(issues, "the emulator's options")
    place = Path(folder)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    fix = f"take a new folder, or one of yours after chmod go-w {shlex.quote(str(place))}"
    trust.require_trusted_owner([place.resolve()], "--folder", fix, shared=False)
    emulator = Emulator(place, port)
    try:
        prepare(emulator, jobs, prices, file_systems, place)
    except BaseException:
        emulator.close()
        raise
    return emulator


def _wrong_prices(prices: Mapping[str, float]) -> Iterator[Issue]:
    types = catalog.instance_types()
    for name, dollars in prices.items():
        if name not in types:
            fix = did_you_mean(name, types)
            yield Issue(key="--price", found=name, valid="an instance type for training", fix=fix)
        if not (math.isfinite(dollars) and dollars > 0):
            fix = f"write {name}=1.23"
            yield Issue(key="--price", found=f"{name}={dollars}", valid="US dollars an hour, above 0", fix=fix)


def _wrong_file_systems(file_systems: Mapping[str, Path], jobs: Sequence[Job]) -> Iterator[Issue]:
    systems = (given.fsx or given.efs for job in jobs for given in job.inputs.values())
    named = {name for name in systems if name is not None}
    for name, folder in file_systems.items():
        if name not in named:
            valid = f"a file system of the configs: {', '.join(sorted(named)) or 'none'}"
            yield Issue(key="--file-system", found=name, valid=valid, fix=did_you_mean(name, named))
        if not folder.is_dir():
            fix = "check its path"
            yield Issue(key="--file-system", found=f"{name}={folder}", valid="an existing folder", fix=fix)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end. Ctrl-C goes to the command, which may still use the emulator."""
    ours = signal.getsignal(signal.SIGINT)
    try:
        child = subprocess.Popen(command, env={**os.environ, **environment})
    except FileNotFoundError:
        raise mistake("--", f"{command[0]}: no such command", "check its path") from None
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which a later child would inherit
    try:
        status = child.wait()
    finally:
        signal.signal(signal.SIGINT, ours)
    return status if status >= 0 else 128 - status


def prepare(
    emulator: Emulator, jobs: Sequence[Job], prices: Mapping[str, float], file_systems: Mapping[str, Path], folder: Path
) -> None:
    """Add what jobs name to the emulator's account, each once."""
    wanted: dict[tuple[str, str, str], int] = {}
    """(kind, name, region) -> number of hosts of an instance type; else 0."""
    there: set[tuple[str, str]] = set()
    for job in jobs:
        region = job.region or REGION
        checkpoints = job.checkpoints.s3 if job.checkpoints else None
        uris = [job.output, job.code, checkpoints, *(given.s3 for given in job.inputs.values())]
        named = [("bucket", split(uri)[0]) for uri in uris if uri is not None]
        if job.role is not None:
            if job.role.split(":")[4] != ACCOUNT:
                fix = f"write role={job.role.replace(job.role.split(':')[4], ACCOUNT)} on the command line and in the config"
                raise mistake("role", f"{job.role}: the emulator's account is {ACCOUNT}", fix)
            named.append(("role", job.role))
        named += [("subnet", name) for name in job.network.subnets]
        named += [("security group", name) for name in job.network.security_groups]
        named += [("FSxLustre", given.fsx) for given in job.inputs.values() if given.fsx]
        named += [("EFS", given.efs) for given in job.inputs.values() if given.efs]
        wanted |= {(what, name, region): 0 for what, name in named if (what, name) not in there}
        there |= {(what, name) for what, name in named if what in ("bucket", "role")}  # of all regions
        for kind, count in instances(job).items():
            wanted["instance", kind, region] = max(count, wanted.get(("instance", kind, region), 0))
    for region in {job.region or REGION for job in jobs} or {REGION}:
        for name, dollars in prices.items():  # also of types that only a command names
            emulator.set_price(name, dollars, region)
    for (what, name, region), count in wanted.items():
        if what == "bucket":
            emulator.add_bucket(name, region)
        elif what == "role":
            emulator.add_role(name)
        elif what == "subnet":
            emulator.add_subnet(name, region)
        elif what == "security group":
            emulator.add_security_group(name, region, open_to_itself=True)  # as hosts that train together need it
        elif what == "instance":
            for use in ("training job", "spot training job", "training warm pool"):
                emulator.set_quota(f"{name} for {use} usage", float(count), region)
        else:
            root = file_systems.get(name, folder / "file-systems" / name)
            root.mkdir(parents=True, exist_ok=True)
            emulator.add_file_system(name, kind=what, region=region, folder=root)


def _both(config: str | Path) -> list[Job]:
    """A config's job and its smoke version, without anybody's defaults: the emulator's account is nobody's."""
    versions = [False, *([True] if "smoke" in yaml_file.read(config).values else [])]
    return [load(config, smoke=smoke, with_defaults=False) for smoke in versions]

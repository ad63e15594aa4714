"""The supervisor of a local run: starts, watches and stops its hosts, and writes the outcome.

python -m launcher.backends.supervisor RUN_FOLDER [--lifeline FD]
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import signal
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

from launcher import backends
from launcher.backends import host_folders, leftovers, local_hosts, supervision, toolkit
from launcher.config.job import Job
from launcher.planner.plan import HostPlan, Plan
from launcher.record import disk, failure_causes, failures, metrics_file, records
from launcher.record.shapes import iso

GRACE_SECONDS = 120
"""Seconds from SIGTERM to SIGKILL, as with SageMaker's StopTrainingJob.
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StopTrainingJob.html"""

AFTER_FAILURE_SECONDS = 10
"""Time for the other hosts to log their own failure before they are killed."""

NO_SPACE = os.strerror(errno.ENOSPC)
"""The text by which a script's failure shows a full disk."""

DETACHED = b"d"
"""The byte that allows the run to outlive the lifeline."""


class HostProcess(Protocol):
    """A host's process: the part of subprocess.Popen that a supervisor uses."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


class Supervisor:
    """Runs a plan on this machine, from start to outcome."""

    def __init__(self, folder: records.RunFolder, lifeline: int | None):
        self.folder = folder
        self.lifeline = lifeline
        self.plan = _read_plan(folder)
        self.observed = metrics_file.ObservedMetrics(folder, self.plan.hosts[0].name)
        self.started = time.time()
        self.clock = time.monotonic()
        self.terminated = False
        self.failed_first = False
        """Whether a host failed before a stop was requested."""
        self.shims: dict[str, HostProcess] = {}
        self.lifelines: list[int] = []
        self.watcher: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the hosts, wait for them, and write the outcome, whatever happens."""
        trouble = ""
        try:
            self.start_hosts()
            self.wait()
        except Exception as error:  # the record holds any error
            trouble = f"the supervisor failed: {error!r}"
            _log_traceback()
        finally:
            self.end_hosts()
            self.write_outcome(trouble)

    def start_hosts(self) -> None:
        self.watcher = leftovers.watcher(self.folder.path)
        port, self.reservation = local_hosts.reserve_port()
        servers, self.servers_reservation = local_hosts.servers_port(len(self.plan.job.compute.instance_groups))
        code = ((file.relative_to(self.folder.code).as_posix(), file) for file in self.folder.code.rglob("*"))
        named = host_folders.names_opt_ml(self.plan.job, code)
        for host in self.plan.hosts:
            with open(self.folder.log(host.name), "wb") as log:
                environment = supervision.shim_environment(self.plan, host, self.folder, os.environ) | servers
                shim, lifeline = local_hosts.start_shim(
                    port, log, self.folder.host(host.name), environment, own_opt_ml=bool(named)
                )
            self.shims[host.name] = shim
            self.lifelines.append(lifeline)  # closes with this process, however it dies

    def wait(self) -> None:
        """Wait for every host. Forward stop requests, enforce the time limit, and end all hosts after a failure."""
        deadline = self.clock + self.plan.job.compute.max_hours * 3600
        kill_at, stopping = float("inf"), False
        while any(shim.poll() is None for shim in self.shims.values()):
            self.watch_lifeline(0.1)
            self.observed.poll()
            if self.terminated:
                self.folder.request_stop("the supervisor got SIGTERM")
            if time.monotonic() > deadline:
                self.folder.request_stop(f"compute.max_hours ({self.plan.job.compute.max_hours:g} h) was reached")
            asked = self.folder.stop_request.exists()  # read first, so that an earlier failure counts as one
            if not stopping and any(shim.poll() for shim in self.shims.values()):
                self.failed_first = True
                kill_at = min(kill_at, time.monotonic() + AFTER_FAILURE_SECONDS)
            if not stopping and asked:
                stopping, kill_at = True, min(kill_at, time.monotonic() + GRACE_SECONDS)
                for shim in self.shims.values():
                    if shim.poll() is None:
                        shim.send_signal(signal.SIGTERM)
            if time.monotonic() > kill_at:
                return
        self.failed_first |= not stopping and any(shim.poll() for shim in self.shims.values())

    def end_hosts(self) -> None:
        """Kill what still runs."""
        for shim in self.shims.values():
            if shim.poll() is None:
                shim.kill()
                shim.wait()
        if self.watcher is not None:
            self.watcher.communicate()  # closes its standard input, and waits for it
        toolkit.kill_everything_below()

    def remember_sigterm(self, *_: object) -> None:
        """On SIGTERM, stop the run in the next round of `wait`."""
        self.terminated = True

    def watch_lifeline(self, seconds: float) -> None:
        """Wait, and request a stop if the process that started the run has died."""
        if self.lifeline is None:
            time.sleep(seconds)
        elif select.select([self.lifeline], [], [], seconds)[0]:
            if os.read(self.lifeline, 1) != DETACHED:
                self.folder.request_stop("the process that started the run has ended")
            os.close(self.lifeline)
            self.lifeline = None

    def write_outcome(self, trouble: str) -> None:
        """Write model.tar.gz and metrics.jsonl, then outcome.json, which lists what could not be saved and, on a full disk, what was.

        Args:
            trouble: the supervisor's own error; empty without one.
        """
        seconds = time.monotonic() - self.clock
        full = disk.full(self.folder.path)  # before anything else is written or removed
        exit_codes = {name: shim.returncode for name, shim in self.shims.items()}
        succeeded = not trouble and bool(exit_codes) and not any(exit_codes.values())
        stop = self.folder.read(self.folder.stop_request)
        stopped = bool(stop) and not self.failed_first and not trouble
        outcome: dict[str, Any] = {
            "state": records.STOPPED if stopped else records.COMPLETED if succeeded else records.FAILED,
            "started": iso(self.started),
            "ended": iso(self.started + seconds),
            "seconds": round(seconds, 3),
            "host_seconds": round(seconds * len(self.plan.hosts), 3),
            "toolkit_exit_codes": exit_codes,
        }
        if stopped:
            outcome["stop_reason"] = stop["reason"]
        hosts = [host.name for host in self.plan.hosts]
        if not succeeded:
            host, reason = first_failure(self.folder, exit_codes)
            first_to_last = sorted(hosts, key=lambda name: name != host)
            outcome |= failures.describe(
                self.folder,
                first_to_last,
                trouble or reason,
                exit_code=exit_codes.get(host),
                packages=backends.get(self.plan.backend).PACKAGES,
            )
            outcome["failed_host"] = host
        not_saved = []
        for save, file in ((pack_model, self.folder.model), (metrics_file.merge, self.folder.metrics)):
            try:
                save(self.folder, hosts)
            except Exception as error:  # a failed save must not cost the record
                _log_traceback()
                not_saved.append(f"{file.name}: {disk.full(self.folder.path, error) or repr(error)}")
        if outcome["state"] == records.FAILED and (full or NO_SPACE in outcome["failure"]):
            outcome |= on_a_full_disk(full, self.folder, outcome["failure"])
        elif full:
            not_saved.append(f"possibly the hosts' last lines and files: {full}")
        if not_saved:
            outcome["not_saved"] = not_saved
        self.folder.reserve.unlink(missing_ok=True)
        records.write_json(self.folder.outcome, outcome)


def first_failure(folder: records.RunFolder, exit_codes: dict[str, int | None]) -> tuple[str, str]:
    """The host that failed first, and the text of its failure file. The others mostly fail because of it."""
    failed = [name for name, code in exit_codes.items() if code]
    written = [(folder.host(name) / "output/failure") for name in failed]
    files = sorted((file for file in written if file.exists()), key=lambda file: file.stat().st_mtime)
    if files:
        return files[0].parents[3].name, files[0].read_text(encoding="utf-8", errors="replace")
    if failed:
        ended = failures.how_it_ended(exit_codes[failed[0]] or 0)
        return failed[0], f"the toolkit on {failed[0]} left no failure file ({ended})"
    return "", "no host was started"


def on_a_full_disk(full: str, folder: records.RunFolder, failure: str) -> dict[str, Any]:
    """The part of a failed run's outcome about a full disk: its cause and fix, and what was saved.

    Args:
        full: which disk, from `disk.full`; "" if it has room again but the failure says that it had none.
        failure: what else is known of the failure.
    """
    found: dict[str, Any] = {"failure": f"{full}\n{failure}".strip(), "saved": []}
    known = failure_causes.explain(full or failure)
    if known is not None:
        found |= {"cause": known.cause, "fix": known.fix}
    for host in sorted(folder.path.glob("hosts/*")):
        if whole := folder.complete_checkpoints(host.name):
            # by name if two have the same timestamp
            latest = max(whole, key=lambda place: (place.stat().st_mtime_ns, len(place.name), place.name))
            found["saved"].append(f"the latest checkpoint, {latest.relative_to(folder.path)}")
    for log in sorted(folder.path.glob("logs/algo-*.log")):
        found["saved"].append(f"the log up to then, {log.relative_to(folder.path)} ({log.stat().st_size:,} bytes)")
    return found


def pack_model(folder: records.RunFolder, hosts: list[str]) -> None:
    """Pack the hosts' SM_MODEL_DIR as model.tar.gz, unless it is empty."""
    files = local_hosts.merged_files(folder.host(host) / "model" for host in hosts)
    if files:
        temporary = folder.model.with_name(".model.tar.gz")
        try:
            local_hosts.pack(files, temporary)
            os.replace(temporary, folder.model)
        finally:
            temporary.unlink(missing_ok=True)


def _read_plan(folder: records.RunFolder) -> Plan:
    """The run's plan."""
    saved = folder.read(folder.plan)
    return Plan(
        name=saved["name"],
        planned=saved["planned"],
        backend=saved["backend"],
        job=Job.model_validate(saved["job"]),
        source=Path(saved["source"]),
        hosts=tuple(
            HostPlan(host["name"], host["address"], tuple(host["command"]), host["environment"], host["group"])
            for host in saved["hosts"]
        ),
        hyperparameters=saved["hyperparameters"],
        channels=saved["channels"],
        files=(),
        issues=(),
    )


def _log_traceback() -> None:
    """Write the current exception to the supervisor's log, if its disk has room."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def main(kind: type[Supervisor] = Supervisor) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lifeline", type=int)
    options = parser.parse_args()
    folder = records.RunFolder(options.folder)
    toolkit.adopt_orphans()
    supervisor = kind(folder, options.lifeline)
    signal.signal(signal.SIGTERM, supervisor.remember_sigterm)
    signal.signal(signal.SIGINT, lambda *_: None)  # the script would inherit SIG_IGN
    records.write_json(folder.supervisor, {"pid": os.getpid()})
    supervisor.run()


if __name__ == "__main__":
    main()

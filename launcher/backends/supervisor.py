"""The process that stays with a local run: starts its hosts, watches them, stops them, and writes down how it ended.

python -m launcher.backends.supervisor RUN_FOLDER [--lifeline FD]
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from launcher.backends import local_hosts, supervision, toolkit
from launcher.config.job import Job
from launcher.planner.plan import HostPlan, Plan
from launcher.record import records

GRACE_SECONDS = 120
"""Between SIGTERM and SIGKILL, as SageMaker's StopTrainingJob gives.
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StopTrainingJob.html"""

AFTER_FAILURE_SECONDS = 10
"""How long the other hosts of a failed run may still say why they failed before they are killed."""

DETACHED = b"d"
"""The byte that tells the supervisor that nobody at the other end of the lifeline is no reason to stop."""


class HostProcess(Protocol):
    """What runs a host, in the part of subprocess.Popen that a supervisor needs."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


class Supervisor:
    """One local run from start to outcome."""

    def __init__(self, folder: records.RunFolder, lifeline: int | None):
        self.folder = folder
        self.lifeline = lifeline
        self.plan = _read_plan(folder)
        self.started = time.time()
        self.clock = time.monotonic()
        self.terminated = False
        self.failed_first = False
        """Whether a host failed before anybody asked the run to stop."""
        self.shims: dict[str, HostProcess] = {}
        self.lifelines: list[int] = []

    def run(self) -> None:
        """Start every host, wait for all, and write the outcome whatever happens."""
        trouble = ""
        try:
            self.start_hosts()
            self.wait()
        except Exception as error:  # whatever it is, the record shall tell it
            trouble = f"the run could not be carried out: {error!r}"
            traceback.print_exc()
        finally:
            self.end_hosts()
            self.write_outcome(trouble)

    def start_hosts(self) -> None:
        port, self.port_lock = local_hosts.reserve_port()
        for host in self.plan.hosts:
            with open(self.folder.log(host.name), "wb") as log:
                environment = supervision.shim_environment(self.plan, host, self.folder, os.environ)
                shim, lifeline = local_hosts.start_shim(port, log, self.folder.host(host.name), environment)
            self.shims[host.name] = shim
            self.lifelines.append(lifeline)  # never closed: it closes when this process dies, however it dies

    def wait(self) -> None:
        """Until every host has ended: pass on stop requests, enforce the time limit, end all where one failed."""
        deadline = self.clock + self.plan.job.compute.max_hours * 3600
        kill_at, told = float("inf"), False
        while any(shim.poll() is None for shim in self.shims.values()):
            self.watch_lifeline(0.1)
            if self.terminated:
                self.folder.request_stop("the supervisor got SIGTERM")
            if time.monotonic() > deadline:
                self.folder.request_stop(f"compute.max_hours ({self.plan.job.compute.max_hours:g} h) is over")
            asked = self.folder.stop_request.exists()  # looked at first: a host that failed before it is seen as such
            if not told and any(shim.poll() for shim in self.shims.values()):
                self.failed_first = True
                kill_at = min(kill_at, time.monotonic() + AFTER_FAILURE_SECONDS)
            if not told and asked:
                told, kill_at = True, min(kill_at, time.monotonic() + GRACE_SECONDS)
                for shim in self.shims.values():
                    if shim.poll() is None:
                        shim.send_signal(signal.SIGTERM)
            if time.monotonic() > kill_at:
                return
        self.failed_first |= not told and any(shim.poll() for shim in self.shims.values())

    def end_hosts(self) -> None:
        """Leave nothing of the hosts that runs."""
        for shim in self.shims.values():
            if shim.poll() is None:
                shim.kill()
                shim.wait()
        toolkit.kill_everything_below()

    def remember_sigterm(self, *_: object) -> None:
        """Somebody wants this process gone: the run stops at the next look."""
        self.terminated = True

    def watch_lifeline(self, seconds: float) -> None:
        """Wait a moment; where whoever started the run has died without a word, ask the run to stop."""
        if self.lifeline is None:
            time.sleep(seconds)
        elif select.select([self.lifeline], [], [], seconds)[0]:
            if os.read(self.lifeline, 1) != DETACHED:
                self.folder.request_stop("the process that started the run has ended")
            os.close(self.lifeline)
            self.lifeline = None

    def write_outcome(self, trouble: str) -> None:
        """model.tar.gz, metrics.jsonl and outcome.json, in this order: an outcome means that all is there, or says what is not.

        Args:
            trouble: why the run could not be carried out; empty where its hosts ended by themselves.
        """
        seconds = time.monotonic() - self.clock
        exit_codes = {name: shim.returncode for name, shim in self.shims.items()}
        succeeded = not trouble and bool(exit_codes) and not any(exit_codes.values())
        stop = self.folder.read(self.folder.stop_request)
        stopped = bool(stop) and not self.failed_first and not trouble
        outcome: dict[str, Any] = {
            "state": records.STOPPED if stopped else records.COMPLETED if succeeded else records.FAILED,
            "started": _iso(self.started),
            "ended": _iso(self.started + seconds),
            "seconds": round(seconds, 3),
            "host_seconds": round(seconds * len(self.plan.hosts), 3),
            "toolkit_exit_codes": exit_codes,
        }
        if stopped:
            outcome["stop_reason"] = stop["reason"]
        if not succeeded:
            host, failure = first_failure(self.folder, exit_codes)
            log = self.folder.log(host).read_text(encoding="utf-8", errors="replace") if host else ""
            exit_code = script_exit_code(log, exit_codes.get(host))
            outcome |= {"failed_host": host, "exit_code": exit_code, "failure": trouble or failure}
        hosts = [host.name for host in self.plan.hosts]
        for save in (pack_model, records.merge_metrics):
            try:
                save(self.folder, hosts)
            except Exception as error:  # what cannot be saved must not cost the record
                traceback.print_exc()
                outcome.setdefault("not_saved", []).append(f"{save.__name__}: {error!r}")
        records.write_json(self.folder.outcome, outcome)


def first_failure(folder: records.RunFolder, exit_codes: dict[str, int | None]) -> tuple[str, str]:
    """The host that failed first, and what its failure file says; the others mostly fail because of it."""
    failed = [name for name, code in exit_codes.items() if code]
    written = [(folder.host(name) / "output/failure") for name in failed]
    files = sorted((file for file in written if file.exists()), key=lambda file: file.stat().st_mtime)
    if files:
        return files[0].parents[3].name, files[0].read_text(encoding="utf-8", errors="replace")
    if failed:
        code = exit_codes[failed[0]] or 0
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return failed[0], f"the toolkit on {failed[0]} {why} and left no failure file"
    return "", "no host was started"


def script_exit_code(log: str, toolkit_code: int | None) -> int | None:
    """The script's own exit code, which the toolkit replaces by 1: as torchrun's agent or the toolkit reports it in the log."""
    found = re.search(r"failed \(exitcode: (-?\d+)\)", log) or re.search(r"^ExitCode (-?\d+)$", log, re.MULTILINE)
    return int(found[1]) if found else toolkit_code


def pack_model(folder: records.RunFolder, hosts: list[str]) -> None:
    """What the hosts left in SM_MODEL_DIR as model.tar.gz; nothing where they left nothing."""
    files = local_hosts.merged_files(folder.host(host) / "model" for host in hosts)
    if files:
        temporary = folder.model.with_name(".model.tar.gz")
        local_hosts.pack(files, temporary)
        os.replace(temporary, folder.model)


def _read_plan(folder: records.RunFolder) -> Plan:
    """The plan that the run was started with."""
    saved = folder.read(folder.plan)
    return Plan(
        name=saved["name"],
        planned=saved["planned"],
        backend=saved["backend"],
        job=Job.model_validate(saved["job"]),
        source=Path(saved["source"]),
        hosts=tuple(
            HostPlan(host["name"], host["address"], tuple(host["command"]), host["environment"])
            for host in saved["hosts"]
        ),
        hyperparameters=saved["hyperparameters"],
        channels=saved["channels"],
        files=(),
        issues=(),
    )


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def main(kind: type[Supervisor] = Supervisor) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lifeline", type=int)
    options = parser.parse_args()
    folder = records.RunFolder(options.folder)
    toolkit.adopt_orphans()
    supervisor = kind(folder, options.lifeline)
    signal.signal(signal.SIGTERM, supervisor.remember_sigterm)
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the script would inherit
    records.write_json(folder.supervisor, {"pid": os.getpid()})
    supervisor.run()


if __name__ == "__main__":
    main()

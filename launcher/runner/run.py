"""Run: a started plan, in progress or over; the same on every backend, found by name from any process."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import backends
from launcher.backends.plans import check
from launcher.config.issues import Unreachable, UserError
from launcher.insight import diagnose
from launcher.planner.plan import Plan, refuse_cost, refuse_errors
from launcher.record import disk, records, trust
from launcher.record.log_lines import complete_lines, json_lines
from launcher.record.metric_lines import Metric, parse_line
from launcher.record.records import OVER, RunFolder
from launcher.runner import notebook, start_record
from launcher.runner import probe as probes
from launcher.runner.run_to_completion import run_to_completion
from launcher.show.text import dollars

if TYPE_CHECKING:
    from launcher.insight.diagnosis import Diagnosis

FIRST_PAUSE, LONGEST_PAUSE, PAUSE_GROWTH = 1.0, 15.0, 1.3
"""Seconds between requests about a run on SageMaker; the pause grows while nothing is new."""

HOSTS_PER_SECOND = 8
"""Average log requests per second of one follower; CloudWatch Logs allows an account 25 in most regions.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/cloudwatch_limits_cwl.html"""

PAUSE_IN_TROUBLE = 20.0
"""Seconds before the next request after SageMaker did not answer."""


@dataclass
class Run:
    """One run. A notebook shows its state, cost and key numbers.

    >>> run = launcher.attach("quickstart-teacher")
    >>> run.state, run.result()["steps"], run.metrics()[-1]["step"]
    ('Completed', 3, 3)
    >>> [line for host, line in run.logs() if line.startswith("epoch 1/")][0]
    'epoch 1/... step 1/3 ...'
    >>> run.artifacts()["model"].name
    'model.tar.gz'

    A run on this machine stops when the process that started it dies, unless it was detached. A run on SageMaker goes on.
    """

    folder: RunFolder
    _lifeline: list[int] = field(default_factory=list, repr=False)
    """The pipe whose EOF tells the supervisor that this process is gone; empty once closed. `pop` lets only one thread close it."""
    trouble: str = field(default="", repr=False)
    """Why SageMaker does not answer, or that the disk has no room for its answer; "" if neither. The folder holds its last answer."""
    denied_since: float | None = field(default=None, repr=False)
    """time.monotonic() of the first refusal since when AWS says only that a permission is missing; None if it says something else."""
    _pause: float = field(default=FIRST_PAUSE, repr=False)
    _ask_at: float = field(default=0.0, repr=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def state(self) -> str:
        """InProgress, Stopping, Completed, Failed or Stopped: SageMaker's words."""
        self.refresh()
        state = self.folder.state()
        if state in OVER:
            self._close_lifeline(b"")
        return state

    @functools.cached_property
    def backend(self) -> str:
        return str(self.folder.read(self.folder.plan)["backend"])

    @property
    def on_this_machine(self) -> bool:
        """Whether its hosts are on this machine; if so, it ends with the terminal that started it, unless detached."""
        return backends.starter(self.backend).on_this_machine

    def refresh(self) -> None:
        """Update the folder of a run on SageMaker, unless that was done a moment ago.

        If SageMaker does not answer, `trouble` says why and a later call asks again. The run itself goes on.
        """
        now = time.monotonic()
        if now < self._ask_at or self.folder.outcome.exists():
            return
        try:
            new = backends.starter(self.backend).refresh(self.folder)
            self.trouble, self.denied_since = "", None
            least = len(self.hosts) / HOSTS_PER_SECOND  # each host's log takes a request of its own
            self._pause = max(least, FIRST_PAUSE if new else min(self._pause * PAUSE_GROWTH, LONGEST_PAUSE))
        except Unreachable as error:
            self.trouble = str(error)
            self.denied_since = (self.denied_since or now) if error.is_denied else None
            self._pause = PAUSE_IN_TROUBLE
        except OSError as error:
            if error.errno not in disk.NO_SPACE:
                raise
            self.trouble = disk.full(self.folder.path, error)  # no room for SageMaker's answer
            self._pause = PAUSE_IN_TROUBLE
        self._ask_at = time.monotonic() + self._pause

    @property
    def spend(self) -> float | None:
        """Cost so far, in US dollars; None if the run is free or its price is unknown."""
        return backends.starter(self.backend).spend(self.folder)

    @property
    def spent(self) -> str:
        """The same in words; "" for None. For spot hosts it is an upper bound: only the on-demand price is known before the bill."""
        if self.spend is None:
            return ""
        spot = self.folder.read(self.folder.plan).get("request", {}).get("EnableManagedSpotTraining")
        return (
            f"{'at most ' if spot else ''}{dollars(self.spend)} so far{', on demand: spot costs less' if spot else ''}"
        )

    @property
    def remaining_costs(self) -> str:
        """What a finished run still costs, and how to end that: the hosts of a warm pool on SageMaker; "" if nothing."""
        return backends.starter(self.backend).remaining_costs(self.folder)

    @functools.cached_property
    def hosts(self) -> list[str]:
        return [host["name"] for host in self.folder.read(self.folder.plan)["hosts"]]

    def __repr__(self) -> str:
        return f"<run {self.name}: {self.folder.state()}>"

    def _repr_html_(self) -> str:
        return notebook.fragment(self)

    def wait(self, timeout: float | None = None, *, progress: bool = True) -> str:
        """Wait until the run is over, at most `timeout` seconds. A notebook shows its progress meanwhile.

        After an interrupt, or in another kernel, `launcher.attach(name).wait()` continues, if the run is on SageMaker or was
        started with `detach=True`.

        Args:
            progress: False: show nothing in a notebook.

        Returns:
            The state; InProgress or Stopping if the timeout came first.
        """
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        shown = notebook.watch(self) if progress else None
        try:
            while (state := self.state) not in OVER and time.monotonic() < end:
                if shown is not None:
                    shown.update()
                time.sleep(0.1)
        finally:
            if shown is not None:
                shown.update(last=True)
        return state

    def logs(
        self,
        *,
        follow: bool = False,
        positions: dict[str, int] | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, str]]:
        """The hosts' log lines as (host, line), each host's in order. Invalid UTF-8 becomes U+FFFD.

        Args:
            follow: continue until the run is over; else end with the lines that exist now.
            positions: host -> bytes of its log to skip. Updated, so that a later call continues there.
            idle: called whenever all lines so far have been yielded.
        """
        for host, line in self.raw_logs(follow=follow, positions=positions, idle=idle):
            yield host, line.decode("utf-8", "replace").rstrip("\r\n")

    def raw_logs(
        self,
        *,
        follow: bool = False,
        positions: dict[str, int] | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, bytes]]:
        """The same lines as bytes, as the script wrote them, with their line endings."""
        positions = {} if positions is None else positions
        while True:
            over = self.state in OVER  # read before the logs, so that no last line is missed
            for host in self.hosts:
                for line, after in complete_lines(
                    self.folder.log(host), positions.get(host, 0), last=over or not follow
                ):
                    positions[host] = after
                    yield host, line
            if over or not follow:
                return
            idle()
            time.sleep(0.2)

    def metrics(self) -> list[dict[str, Any]]:
        """The measurements, one dict per logged step and rank, without unreadable lines; while the run goes on, those in its
        log lines."""
        if self.folder.metrics.is_file():
            return [values for _, values in json_lines(self.folder.metrics)]
        return [metric.values for metric in self.progress()]

    def progress(self, *, follow: bool = False) -> Iterator[Metric]:
        """The metric lines of the first host's log."""
        for host, line in self.logs(follow=follow):
            metric = parse_line(line) if host == self.hosts[0] else None
            if metric is not None:
                yield metric

    def stop(self, reason: str = "asked to") -> None:
        """Ask the run to stop: its training processes get SIGTERM and may finish their step. Returns once the
        request is accepted."""
        if self.state not in OVER:
            backends.starter(self.backend).stop(self.folder, reason)

    @property
    def cost(self) -> float | None:
        """US dollars: so far, or for a finished run its bill plus its warm pool's, once `settle` knows that; None as in `spend`."""
        outcome = self.folder.read(self.folder.outcome)
        return billed(outcome) if outcome else self.spend

    @property
    def usd_after_end(self) -> float:
        """US dollars that it cost after its end, or at most, while that is not known yet: the hosts of a warm pool on SageMaker."""
        return backends.starter(self.backend).usd_after_end(self.folder)

    def settle(self) -> None:
        """Ask SageMaker what a warm pool cost, once its hosts are gone. If it does not answer, `trouble` says why."""
        try:
            backends.starter(self.backend).settle(self.folder)
        except Unreachable as error:
            self.trouble = str(error)

    def release(self) -> str:
        """Stop what a finished run still costs: the hosts of a warm pool on SageMaker.

        Returns:
            What was ended, in words; "" if nothing.

        Raises:
            UserError: SageMaker does not answer, or refuses.
        """
        return backends.starter(self.backend).release(self.folder)

    def profile(self, interval_ms: int | None) -> None:
        """Set the interval of a running SageMaker job's system metrics, or turn them off.

        Args:
            interval_ms: milliseconds between two samples: 100, 200, 500, 1000, 5000 or 60000; None: off.

        Raises:
            UserError: the run is over or not on SageMaker, or AWS refuses.
        """
        self.refresh()
        backends.starter(self.backend).profile(self.folder, interval_ms)

    def diagnose(self, *, probe: bool = False, overrides: Sequence[str] = ()) -> Diagnosis:
        """Explain where the run's time goes. A notebook shows the result.

        Args:
            probe: also run its job again on this machine for up to two minutes, to measure what observation cannot separate.
            overrides: for the probe, `key=value` texts, for example inputs.train={folder: data/train} if its data were elsewhere.

        Raises:
            UserError: nothing was measured, numpy is not installed, or the probe cannot start.
        """
        source = str(self.folder.path)
        return probed(source, overrides) if probe else diagnose.diagnose(source)

    def detach(self) -> None:
        """Let the run outlive this process."""
        self._close_lifeline(b"d")

    def _close_lifeline(self, last: bytes) -> None:
        """Write the last byte for the supervisor, if any, and close the pipe. No `__del__` does it: a run outlives its variable."""
        with contextlib.suppress(IndexError):  # it is closed
            lifeline = self._lifeline.pop()
            with contextlib.suppress(BrokenPipeError):  # the run is over
                os.write(lifeline, last)
            os.close(lifeline)

    def artifacts(self) -> dict[str, Path]:
        """The files and folders that exist, by name: model, metrics; and for each host output, checkpoints, log."""
        return self.folder.artifacts(self.hosts)

    def result(self) -> dict[str, Any]:
        """The script's result.json; {} if it wrote none."""
        return self.folder.result()

    def outcome(self) -> dict[str, Any]:
        """How the run ended; {} while it goes on. A run whose supervisor was killed is Failed."""
        outcome = self.folder.read(self.folder.outcome)
        if outcome or self.state not in OVER:
            return outcome
        killed = {"state": records.FAILED, "failure": start_record.why_no_outcome(self.folder)}
        return self.folder.read(self.folder.outcome) or killed  # it may have ended meanwhile


def billed(outcome: Mapping[str, Any]) -> float | None:
    """Bill of a finished run in US dollars, with its warm pool's once known; None if free or without a price."""
    usd = outcome.get("cost_usd")
    return None if usd is None else float(usd) + outcome.get("warm_pool_usd", 0.0)


@trust.closed_umask()
def start(plan: Plan, *, detach: bool = False, max_cost: float | None = None) -> Run:
    """Start a planned run.

    >>> run = launcher.run(launcher.plan(launcher.load("configs/quickstart.yaml", smoke=True)))
    >>> run.wait(), run.result()["steps"]
    ('Completed', 3)

    Args:
        plan: from `plan()`. One for SageMaker is checked online first, unless `check()` did that; what it finds or cannot check, and is not
            an error, becomes a Python warning.
        detach: let a run on this machine outlive this process from the start.
        max_cost: US dollars. Refuse a plan that could cost more, or whose price is unknown.

    Returns:
        The started Run.

    Raises:
        UserError: the plan has errors, costs too much or could not start, so nothing runs; or a stop requested meanwhile
            failed, so the run goes on.
    """
    refuse_errors(plan)
    if not plan.checked:
        said, plan = plan.issues, check(plan)
        refuse_errors(plan)
        for issue in plan.issues:
            if issue not in said:
                warnings.warn(f"{issue.level}: {issue}", stacklevel=3)  # past `closed_umask`
    if max_cost is not None:
        refuse_cost(plan, max_cost)
    not_seen = [issue for issue in plan.issues if issue.key == "online"]
    if not_seen:  # AWS cannot be reached, so nothing can start
        raise UserError([replace(issue, level="error") for issue in not_seen], f"the plan for {plan.job.name}")
    with start_record.recorded(plan) as (
        folder,
        lock,
    ):  # the supervisor inherits the lock, and holds it after this process
        backend = backends.get(plan.backend)
        reading, writing = (None, None) if detach or not backend.on_this_machine else os.pipe()
        run = Run(folder, [] if writing is None else [writing])
        try:
            backend.start(plan, folder, lock.fileno(), reading)
        except Exception as error:
            run._close_lifeline(b"")
            start_record.not_started(folder, error)
            raise
        finally:
            if reading is not None:
                os.close(reading)
    return run


def probed(
    source: str,
    overrides: Sequence[str] = (),
    *,
    on: str = backends.DEFAULT,
    log: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Diagnose a run with a probe: run its job again on this machine, for two minutes at most. Arguments and errors are those of
    `launcher.diagnose`."""
    planned, observed = probes.planned(source, overrides, on=on), diagnose.diagnose(source).measurements

    def started(run: Run) -> None:
        log(f"probing for at most two minutes: run {run.name}")

    def until(run: Run) -> str:
        return f"not over after {probes.LONGEST:g} s" if time.monotonic() - began > probes.LONGEST else ""

    began = time.monotonic()
    try:
        interrupted = functools.partial(log, "stopping the probe")
        run = run_to_completion(lambda: start(planned), log=log, interrupted=interrupted, started=started, until=until)
    except KeyboardInterrupt:
        return diagnose.with_probe(observed, probes.INTERRUPTED)
    log(f"probed in {time.monotonic() - began:.0f} s")
    return diagnose.with_probe(observed, probes.read(run.folder, run.outcome()))


def attach(name: str, *, region: str | None = None) -> Run:
    """Find a run by its name, or the latest run of a job by the job's name.

    >>> launcher.attach("quickstart-teacher").wait()
    'Completed'

    Args:
        region: the AWS region of a training job that another machine started. Its record comes from its output in S3.

    Raises:
        UserError: no such run.
    """
    try:
        return Run(records.find(name))
    except UserError:
        if region is None:
            raise
    from launcher.aws.adopt import adopt  # here: a run in the store needs no AWS

    return Run(adopt(name, region))


def runs() -> list[Run]:
    """Every run in the store, oldest first. Reading one with a damaged record raises a UserError, as does a store that is a file.

    >>> [run.state for run in launcher.runs()][0]
    'Completed'
    """
    return [Run(folder) for folder in records.all_runs()]

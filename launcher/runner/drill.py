"""Drill: a job that is killed at random moments and resumed, or loses its servers, must follow the curve of the same job undisturbed.

On the same number of hosts, every value of every step and the final weights must be bitwise equal. On another number of hosts,
sums over processes run in another order, so values differ by rounding and its consequences.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from launcher.backends.plans import plan
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.job import Job
from launcher.insight.diagnose import speed
from launcher.planner import groups
from launcher.planner.plan import Plan, refuse_errors
from launcher.record import records
from launcher.record.metric_lines import GOES_ON
from launcher.runner import kills as killing
from launcher.runner.curves import Curve, compare, curve, missing, other_file, weights
from launcher.runner.goodput import Goodput
from launcher.runner.kills import ORDER, SERVER, STOP, Kill
from launcher.runner.run import Run, start
from launcher.show.table import Table

PAUSE_SECONDS = 2.0
"""Longest time from a step to the next server kill: some hit a working server, others a starting one."""

TOLERANCE = 0.01
"""Largest difference allowed on another number of hosts, as a share of the metric's largest value on the curve."""

TRIES = 5
"""Consecutive trainings that may end before their first kill."""

LONGER = "train longer, for example with hyperparameters.epochs and, where it is set, max_steps"


@dataclass
class Drill:
    """The result of a drill."""

    undisturbed: Run
    exact: bool
    """Whether everything had to be equal bit for bit."""
    steps: int = 0
    runs: list[Run] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    """File of the final weights -> SHA-256."""
    furthest: float = 0.0
    """The largest difference, as a share of the metric's largest value."""
    difference: str = ""
    """The first difference from the undisturbed run; empty if there is none."""
    step_seconds: float | None = None
    """Of a usual step of the undisturbed run; None if its steps were not timed."""
    undisturbed_seconds: float = 0.0
    """The undisturbed run, start to end."""
    seconds: float = 0.0
    """The other runs, start to end, in total."""
    trainings: int = 0
    """How many trainings in those runs finished."""

    @property
    def why_no_goodput(self) -> str:
        """Why goodput was not measured; "" if it was."""
        if self.difference:
            return "a run differs from the undisturbed one"
        if not self.trainings:
            return "no training came to its end"
        if any(kill.resumed_from is None for kill in self.kills):
            return "the script does not print from which step it resumes"
        if not self.exact:
            return "on another number of hosts a step takes another time"
        return "" if self.step_seconds is not None else "the script's steps were not timed"

    @property
    def goodput(self) -> Goodput | None:
        """The share of the killed runs' time spent on steps that count; None: see `why_no_goodput`."""
        if self.why_no_goodput or self.step_seconds is None:
            return None
        again = sum(kill.steps_lost or 0 for kill in self.kills)
        return Goodput(
            seconds=self.seconds,
            useful=self.trainings * self.steps * self.step_seconds,
            redone=again * self.step_seconds,
            undisturbed=self.steps * self.step_seconds / self.undisturbed_seconds,
        )

    def __str__(self) -> str:
        head = ["kill", "how", "at step", "resumed from", "steps lost", "seconds"]
        rows = [
            [str(number), kill.how, str(kill.at_step), _or_dash(kill.resumed_from)]
            + [_or_dash(kill.steps_lost), f"{kill.seconds:.1f}"]
            for number, kill in enumerate(self.kills, 1)
        ]
        goodput = [] if self.difference else [str(self.goodput or f"goodput: not measured ({self.why_no_goodput})")]
        return "\n".join([*([str(Table(head, rows))] if rows else []), *goodput, self.verdict()])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; runs by name."""
        return {
            "undisturbed": self.undisturbed.name,
            "runs": [run.name for run in self.runs],
            "exact": self.exact,
            "steps": self.steps,
            "weights": self.weights,
            "furthest": self.furthest if math.isfinite(self.furthest) else None,
            "difference": self.difference or None,
            "kills": [asdict(kill) for kill in self.kills],
            "goodput": None if self.goodput is None else self.goodput.to_dict(),
        }

    def verdict(self) -> str:
        """The result in one line."""
        if self.difference:
            return f"DIFFERENT: {self.difference}"
        curve = f"the metrics of all {self.steps} steps"
        if not self.exact:
            return f"{curve} equal the undisturbed run's, to within {self.furthest:.2g} of each metric's largest value"
        weights = ", ".join(f"{name} {checksum[:12]}" for name, checksum in self.weights.items())
        return f"{curve} and the weights ({weights or 'the script left none'}) equal the undisturbed run's, bit for bit"


def drill(
    job: Job,
    *,
    kills: int = 3,
    hosts_after: int | None = None,
    servers: bool = False,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> Drill:
    """Run a job undisturbed, then again, killed and resumed, all on the process backend.

    Args:
        kills: how many. If the job ends before the last one, it starts over.
        hosts_after: every other run has this many training hosts instead of the job's own; hosts of other groups do not change.
        servers: instead kill servers of a job with worker_type remote, one at a time; its runs go on without them until they restart.
        seed: for the times and hosts of the kills.
        log: called with a line for people at each stage.

    Raises:
        UserError: the plan has errors, or the job gives nothing to kill or to compare.
    """
    _refuse_options(job, kills, hosts_after, servers)
    name = f"{job.name[:36].rstrip('-')}-drill"  # so that none is the latest run of the job's own name
    job = job.model_copy(update={"name": name})
    if job.source is None:  # compare every step of this kit's scripts
        job = job.model_copy(update={"hyperparameters": {**job.hyperparameters, "log_every": 1}})
    jobs = [job, job if hosts_after is None else _with_hosts(job, hosts_after)]
    for one in jobs:
        refuse_errors(plan(one))  # before anything starts
    began, undisturbed = time.monotonic(), start(plan(job))
    log(f"undisturbed: {undisturbed.name}")
    result = Drill(undisturbed, exact=len({groups.training_host_count(one) for one in jobs}) == 1)
    if undisturbed.wait() != records.COMPLETED:
        result.difference = f"{_end(undisturbed)} without a kill"
        return result
    result.undisturbed_seconds = time.monotonic() - began
    timed = speed(undisturbed.folder)
    reference = curve(undisturbed)
    result.steps, result.weights = max(reference, default=0), weights(undisturbed)
    if timed is not None and timed.steps == result.steps:  # else it counts in other steps
        result.step_seconds = timed.step_seconds
    if result.steps < 2:
        found = f"{undisturbed.name} reported {'one step' if result.steps else 'no metric'}"
        raise mistake("script", found, "let it train several steps, and report each as training.runtime.reporting does")
    jobs = [one.model_copy(update={"source": str(undisturbed.folder.code)}) for one in jobs]
    series = (_ServerSeries if servers else _Series)(jobs, result, reference, seed, log)
    in_vain = 0
    while len(result.kills) < kills and not result.difference:
        before = len(result.kills)
        series.train(kills - before)
        in_vain = in_vain + 1 if len(result.kills) == before else 0
        if in_vain == TRIES and not result.difference:
            raise mistake("script", *series.in_vain())
    return result


def _refuse_options(job: Job, kills: int, hosts_after: int | None, servers: bool) -> None:
    """
    Raises:
        UserError: every option that cannot be carried out.
    """
    found = [
        Issue(key=option, found=str(count), fix=f"write {option} 1 or more")
        for option, count in (("--kills", kills), ("--hosts-after", hosts_after))
        if count is not None and count < 1
    ]
    if servers and not groups.is_remote(job):
        kind = job.hyperparameters.get("worker_type", "auto")
        fix = "set hyperparameters.worker_type=remote, with a group that does not train"
        found.append(Issue(key="--servers", found=f"worker_type is {kind}", fix=fix))
    if servers and hosts_after is not None:
        fix = "give one of the two: no run is resumed"
        found.append(Issue(key="--hosts-after", found=f"{hosts_after}, beside --servers", fix=fix))
    if found:
        raise UserError(found)


class _Series:
    """Trainings from the first step to the last. Each takes several runs, all but the last killed; runs alternate between the jobs."""

    def __init__(self, jobs: Sequence[Job], result: Drill, reference: Curve, seed: int, log: Callable[[str], None]):
        self.jobs, self.result, self.reference, self.log = jobs, result, reference, log
        self.rng = random.Random(seed)

    def train(self, kills: int) -> None:
        """One training with N kills, or fewer if it ends first; adds to the result."""
        steps = self.result.steps
        reported: Curve = {}
        targets = sorted(self.rng.sample(range(1, steps), min(kills, steps - 1)))
        earlier, kill, struck = None, None, 0.0
        while not self.result.difference:
            began, planned = time.monotonic(), self.plan(earlier)
            run = start(planned)
            self.result.runs.append(run)
            next(run.progress(follow=True), None)
            if kill is not None:
                seconds = time.monotonic() - struck
                self.result.kills.append(replace(kill, resumed_from=self.resumed_from(run, planned), seconds=seconds))
            how, struck = self.strike(run, targets.pop(0)) if targets else ("", 0.0)
            state = run.wait()
            self.result.seconds += time.monotonic() - began
            found = curve(run)
            kill = Kill(how, max(found, default=0)) if how and state != records.COMPLETED else None
            self.judge(run, found, kill)
            for step, values in found.items():
                reported.setdefault(step, {}).update(values)
            if kill is None:
                break
            self.log(f"kill {len(self.result.kills) + 1}: {how} at step {kill.at_step} of {run.name}")
            earlier = run
        if not self.result.difference:
            self.log(f"to the end: {run.name}")
            self.result.trainings += 1
            self.result.difference = self.final_difference(run, reported)

    def resumed_from(self, run: Run, planned: Plan) -> int | None:
        """The step from which a run went on: as it prints, or before its first step if it prints a line for each; None: not known."""
        if planned.resumes is None:
            return 0
        matches = [GOES_ON.match(line) for host, line in run.logs() if host == run.hosts[0]]
        reported = next((int(match[1]) for match in matches if match), None)
        first = next(run.progress(), None)
        if reported is None and first is not None and self.prints_each_step:
            return first.step - 1
        return reported

    @functools.cached_property
    def prints_each_step(self) -> bool:
        """Whether the script prints a metric line for each step, counted from 0 or 1."""
        printed = {metric.step for metric in self.result.undisturbed.progress()}
        return printed in ({*range(self.result.steps + 1)}, {*range(1, self.result.steps + 1)})

    def in_vain(self) -> tuple[str, str]:
        """Why no training could be killed, and what helps."""
        return f"its {self.result.steps} steps ended before it could be killed", LONGER

    def plan(self, earlier: Run | None) -> Plan:
        """The next run's plan: from the previous run's checkpoints, or from the start if it left none."""
        made = plan(self.jobs[len(self.result.runs) % len(self.jobs)])
        return (
            replace(made, resumes=earlier.name) if earlier is not None and earlier.folder.left_checkpoints() else made
        )

    def strike(self, run: Run, step: int) -> tuple[str, float]:
        """End a run at a random moment after a step; half of the time while a checkpoint is being written.

        Returns:
            How, and when by the monotonic clock; ("", 0) if the run ended first.
        """
        how = ORDER[len(self.result.kills) % len(ORDER)]
        seconds_per_step = self.result.undisturbed.outcome()["seconds"] / self.result.steps
        if not any(metric.step >= step for metric in run.progress(follow=True)):
            return "", 0.0
        if how != STOP and self.rng.random() < 0.5:
            killing.wait_for_a_checkpoint_under_way(run)
            time.sleep(self.rng.uniform(0, 0.01))
        else:
            time.sleep(self.rng.uniform(0, 2 * seconds_per_step))
        if run.state in records.OVER:
            return "", 0.0
        if how == STOP:
            run.stop("launcher drill")
        else:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                killing.kill(run, how, self.rng)
        return how, time.monotonic()

    def judge(self, run: Run, found: Curve, kill: Kill | None) -> None:
        """Check that a run ended as expected and reported the undisturbed run's values."""
        wanted = records.COMPLETED if kill is None else records.STOPPED if kill.how == STOP else records.FAILED
        if run.state != wanted:
            self.result.difference = f"{_end(run)}, not {wanted}"
            return
        furthest, difference = compare(self.reference, found, 0.0 if self.result.exact else TOLERANCE)
        self.result.furthest = max(self.result.furthest, furthest)
        self.result.difference = difference and f"{difference} in {run.name}"

    def final_difference(self, run: Run, reported: Curve) -> str:
        """What a training lacks, or which weights file of its last run differs; "" if it matches the undisturbed run."""
        if lacks := missing(self.reference, reported):
            return lacks
        other = other_file(self.result.weights, weights(run)) if self.result.exact else ""
        return other and f"{other} of {run.name} differs from the undisturbed run's"


class _Newest:
    """The last step that a run reported, 0 before the first; its own thread updates it until the run is over."""

    def __init__(self, run: Run):
        self.step = 0
        self._run = run
        threading.Thread(target=self._follow, name="newest step", daemon=True).start()

    def _follow(self) -> None:
        for metric in self._run.progress(follow=True):
            self.step = max(self.step, metric.step)


class _ServerSeries(_Series):
    """Trainings whose servers are killed. No run ends because of it."""

    def in_vain(self) -> tuple[str, str]:
        seen = "no server of its runs was there when a kill was due"
        return seen, f"{LONGER}; where servers never come, ray.log among the outputs says why"

    def train(self, kills: int) -> None:
        """One training with up to N kills at random moments from its first step on, at least one step apart; adds to the result."""
        began, run = time.monotonic(), start(self.plan(None))
        self.result.runs.append(run)
        newest = _Newest(run)
        for _ in range(kills):
            if not self.killed(run, newest):
                break
        run.wait()
        self.result.seconds += time.monotonic() - began
        found = curve(run)
        self.judge(run, found, None)
        if not self.result.difference:
            self.log(f"to the end: {run.name}")
            self.result.trainings += 1
            self.result.difference = self.final_difference(run, found)

    def killed(self, run: Run, newest: _Newest) -> bool:
        """Kill one server, wait for the next step and add the kill to the result; False if the training ended first."""
        last = self.result.steps
        while newest.step < last and run.state not in records.OVER:
            time.sleep(self.rng.uniform(0, PAUSE_SECONDS))
            at_step, struck = newest.step, time.monotonic()
            if not 0 < at_step < last or not self.kill_one(run):
                continue
            while newest.step == at_step and run.state not in records.OVER:
                time.sleep(0.01)
            seconds = time.monotonic() - struck
            self.result.kills.append(Kill(SERVER, at_step, resumed_from=at_step, seconds=seconds))
            self.log(f"kill {len(self.result.kills)}: {SERVER} at step {at_step} of {run.name}")
            return True
        return False

    def kill_one(self, run: Run) -> bool:
        """SIGKILL one server of a run, whatever it is doing. Returns whether there was one."""
        with contextlib.suppress(psutil.NoSuchProcess):  # the run, or the server, has just ended by itself
            supervisor = psutil.Process(run.folder.read(run.folder.supervisor)["pid"])
            servers = [child for child in supervisor.children(recursive=True) if killing.is_server(child)]
            if servers:
                self.rng.choice(servers).kill()
                return True
        return False


def _with_hosts(job: Job, count: int) -> Job:
    """The job with another number of training hosts."""
    compute = job.compute
    training = groups.training_groups(job)
    if len(training) > 1:
        names = ", ".join(group.name for group in training)
        raise mistake(
            "--hosts-after",
            f"{count}, but the groups {names} all train",
            "name one in compute.training_groups, or leave --hosts-after out",
        )
    counted: dict[str, Any] = {"instance_count": count}
    if training:
        places = [group.model_copy(update=counted) if group in training else group for group in compute.instance_groups]
        counted = {"instance_groups": places}
    return job.model_copy(update={"compute": compute.model_copy(update=counted)})


def _or_dash(steps: int | None) -> str:
    return "-" if steps is None else str(steps)


def _end(run: Run) -> str:
    """How a run ended, in words."""
    why = " ".join(run.outcome().get("failure", "").split())[:300]
    return f"{run.name} is {run.state}" + (f" ({why})" if why else "")

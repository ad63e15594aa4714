"""A job's warm pool: the hosts that stay after the job, and are billed, until a similar job takes them or their time is up.

A job with `compute.keep_alive_minutes` leaves one however it ends: completed, stopped, or failed by an error of its script.
https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html, Warm pool creation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from launcher.aws import accounts, session
from launcher.record import records, trust
from launcher.record.records import RunFolder
from launcher.record.shapes import utc
from launcher.show.text import counted, dollars, duration

GONE = ("Reused", "Terminated")
"""WarmPoolStatus.Status of hosts that belong to another job or to nobody. InUse is not among them, as a job that just ended may still
have it: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_WarmPoolStatus.html"""


ENDED = {"WarmPoolStatus": {"Status": "Terminated"}}
"""Assumed of a warm pool that nobody can be asked about: its job was deleted, or its emulator was closed."""


@dataclass(frozen=True)
class WarmPool:
    """The hosts that a job left."""

    hosts: int
    since: datetime
    """UTC; the end of the job."""
    until: datetime
    """UTC; the hosts stay no longer."""
    usd_per_hour: float | None
    """For all hosts, on demand; None: unknown."""

    def cost(self, start: datetime, end: datetime) -> float | None:
        """US dollars from one time to another; None: no price."""
        return None if self.usd_per_hour is None else (end - start).total_seconds() / 3600 * self.usd_per_hour

    def text(self, run: str) -> str:
        """How long the hosts stay, what that costs at most from now on, and the command that ends it."""
        more = self.cost(_now(), self.until)
        costs = ", billed" if more is None else f", at most {dollars(more)} more"
        stay = f"{counted(self.hosts, 'host')} {'stays' if self.hosts == 1 else 'stay'}"
        return f"{stay} until {self.until:%H:%M} UTC{costs}; to end that: launcher stop {run}"


def stays(described: Mapping[str, Any]) -> bool:
    """Whether DescribeTrainingJob's answer about a job that is over shows a warm pool that this job still pays for."""
    return "WarmPoolStatus" in described and described["WarmPoolStatus"]["Status"] not in GONE


def of(folder: RunFolder) -> WarmPool | None:
    """The warm pool of a run that is over, by SageMaker's last answer; None if there is none or its time is up. Offline."""
    known = folder.read(folder.remote)
    ended, kept = known.get("TrainingEndTime"), known.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds")
    if known.get("TrainingJobStatus") not in records.OVER or not stays(known) or ended is None or not kept:
        return None
    plan = folder.read(folder.plan)
    until = utc(ended) + timedelta(seconds=kept)
    per_hour = (plan.get("price") or {}).get("usd_per_hour")
    return WarmPool(len(plan["hosts"]), utc(ended), until, per_hour) if until > _now() else None


def bill(described: Mapping[str, Any], usd_per_hour: float | None) -> dict[str, float]:
    """The cost of the warm pool of a job that is over, once its hosts are gone: until then it grows.

    Args:
        described: DescribeTrainingJob's answer.
        usd_per_hour: for all hosts, on demand; None: unknown.

    Returns:
        warm_pool_seconds (each host) and warm_pool_usd, if known.
    """
    pool = {} if stays(described) else described.get("WarmPoolStatus", {})
    seconds = pool.get("ResourceRetainedBillableTimeInSeconds")
    if seconds is None:
        return {}
    usd = {} if usd_per_hour is None else {"warm_pool_usd": round(seconds / 3600 * usd_per_hour, 4)}
    return {"warm_pool_seconds": seconds, **usd}


def settle(folder: RunFolder) -> None:
    """Ask SageMaker if a warm pool whose hosts were not gone at its last answer is gone, and if so, add its bill to the run's outcome.

    Raises:
        botocore's errors: SageMaker did not answer.
        UserError: the environment's credentials are of another account than the job.
    """
    known = folder.read(folder.remote)
    if not folder.outcome.exists() or not stays(known):
        return
    if accounts.was_emulated(known):
        _write_bill(folder, ENDED)
        return
    region = folder.read(folder.plan)["job"]["region"]
    try:
        answer = session.client("sagemaker", region).describe_training_job(TrainingJobName=folder.name)
    except session.errors() as error:
        if not session.is_unknown_job(error):
            raise
        accounts.refuse_other(region, known)
        answer = ENDED  # the job was deleted
    if not stays(answer):
        _write_bill(folder, answer)


@trust.closed_umask()
def _write_bill(folder: RunFolder, answer: Mapping[str, Any]) -> None:
    """Record the cost of hosts that are gone."""
    known, per_hour = folder.read(folder.remote), (folder.read(folder.plan).get("price") or {}).get("usd_per_hour")
    _add(folder, bill(answer, per_hour))
    records.write_json(folder.remote, {**known, "WarmPoolStatus": answer["WarmPoolStatus"]})  # last: this settles it


def _add(folder: RunFolder, values: Mapping[str, float]) -> None:
    """Add to a run's outcome, if it has one. Without one, the run's results are still to be fetched, and so is its bill."""
    outcome = folder.read(folder.outcome)
    if outcome:
        records.write_json(folder.outcome, {**outcome, **values})


def usd_at_most(folder: RunFolder) -> float:
    """US dollars for the hosts that stayed after a run: their bill or, until it is known, the most they can cost; 0: no price. Offline."""
    outcome, known = folder.read(folder.outcome), folder.read(folder.remote)
    if "warm_pool_usd" in outcome or not stays(known):
        return float(outcome.get("warm_pool_usd", 0.0))
    per_hour = (folder.read(folder.plan).get("price") or {}).get("usd_per_hour") or 0.0
    return float(per_hour * known.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds", 0) / 3600)


def text_of(folder: RunFolder) -> str:
    """What a run that is over still costs, and how to end it; "": nothing. Offline."""
    pool = of(folder)
    return pool.text(folder.name) if pool is not None else ""


@trust.closed_umask()
def end(folder: RunFolder) -> str:
    """End the warm pool of a run that is over: UpdateTrainingJob with a KeepAlivePeriodInSeconds of 0.

    https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools-how-to-use.html, Terminate a warm pool

    Returns:
        What was ended, and what it cost; or what had ended the pool before; "": the run left no warm pool.

    Raises:
        botocore's errors: SageMaker did not answer, or refused; the hosts stay.
    """
    pool = of(folder)
    if pool is None:
        return ""
    region, known = folder.read(folder.plan)["job"]["region"], folder.read(folder.remote)
    client = session.client("sagemaker", region)
    answer = client.describe_training_job(TrainingJobName=folder.name)
    status = answer["WarmPoolStatus"]
    if not stays(answer):
        _write_bill(folder, answer)
        by = f" by {status['ReusedByJob']}" if "ReusedByJob" in status else ""
        return f"the warm pool of {folder.name} is gone already: {status['Status']}{by}"
    client.update_training_job(TrainingJobName=folder.name, ResourceConfig={"KeepAlivePeriodInSeconds": 0})
    resources = {**known["ResourceConfig"], "KeepAlivePeriodInSeconds": 0}
    records.write_json(folder.remote, {**known, "WarmPoolStatus": status, "ResourceConfig": resources})
    now = _now()
    usd, seconds = pool.cost(pool.since, now), (now - pool.since).total_seconds()
    if usd is not None:  # until SageMaker says how long they stayed
        _add(folder, {"warm_pool_usd": round(usd, 4)})
    stayed = f"{counted(pool.hosts, 'host')} stayed for {duration(seconds)}"
    return f"ended the warm pool of {folder.name}: {stayed}" + (f", about {dollars(usd)}" if usd is not None else "")


def _now() -> datetime:
    return datetime.now(timezone.utc)

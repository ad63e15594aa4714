"""A job's warm pool: the hosts that stay after it, and are billed, until a similar job takes them or their time is over.

A job with `compute.keep_alive_minutes` leaves one however it ended: completed, stopped, or failed by an error of its script.
https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html, Warm pool creation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from launcher.aws import session
from launcher.record import records, trust
from launcher.record.records import RunFolder
from launcher.record.shapes import utc
from launcher.show.text import counted, dollars, duration

GONE = ("Reused", "Terminated")
"""WarmPoolStatus.Status of hosts that are another job's, or nobody's. InUse, which a job that just ended may still have, is none of
them: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_WarmPoolStatus.html"""


@dataclass(frozen=True)
class WarmPool:
    """The hosts that a job left."""

    hosts: int
    since: datetime
    """UTC; the end of the job."""
    until: datetime
    """UTC; they stay no longer."""
    usd_per_hour: float | None
    """Of all hosts, on demand; None: unknown."""

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
    """Whether DescribeTrainingJob's answer about a job that is over has a warm pool that is still this job's cost."""
    return "WarmPoolStatus" in described and described["WarmPoolStatus"]["Status"] not in GONE


def of(folder: RunFolder) -> WarmPool | None:
    """The warm pool of a run that is over, by SageMaker's last answer; None: none, or its time is over. Offline."""
    known = folder.read(folder.remote)
    ended, kept = known.get("TrainingEndTime"), known.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds")
    if known.get("TrainingJobStatus") not in records.OVER or not stays(known) or ended is None or not kept:
        return None
    plan = folder.read(folder.plan)
    until = utc(ended) + timedelta(seconds=kept)
    per_hour = (plan.get("price") or {}).get("usd_per_hour")
    return WarmPool(len(plan["hosts"]), utc(ended), until, per_hour) if until > _now() else None


def text_of(folder: RunFolder) -> str:
    """What a run that is over still costs, and how to end it; "": nothing. Offline."""
    pool = of(folder)
    return pool.text(folder.name) if pool is not None else ""


@trust.closed_umask()
def end(folder: RunFolder) -> str:
    """End the warm pool of a run that is over: UpdateTrainingJob with a KeepAlivePeriodInSeconds of 0.

    https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools-how-to-use.html, Terminate a warm pool

    Returns:
        What was ended, and what it cost; or what had ended it before; "": the run left no warm pool.

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
        records.write_json(folder.remote, {**known, "WarmPoolStatus": status})
        by = f" by {status['ReusedByJob']}" if "ReusedByJob" in status else ""
        return f"the warm pool of {folder.name} is gone already: {status['Status']}{by}"
    client.update_training_job(TrainingJobName=folder.name, ResourceConfig={"KeepAlivePeriodInSeconds": 0})
    resources = {**known["ResourceConfig"], "KeepAlivePeriodInSeconds": 0}
    records.write_json(folder.remote, {**known, "WarmPoolStatus": status, "ResourceConfig": resources})
    now = _now()
    usd = pool.cost(pool.since, now)
    stayed = f"{counted(pool.hosts, 'host')} stayed for {duration((now - pool.since).total_seconds())}"
    return f"ended the warm pool of {folder.name}: {stayed}" + (f", about {dollars(usd)}" if usd is not None else "")


def _now() -> datetime:
    return datetime.now(timezone.utc)

"""A job's cost in US dollars: the ceiling before it starts, the spend while it runs, the bill when it is over.

The price of an instance-hour is `compute.price_per_hour`, else the last one read from AWS's Price List: by this machine, which keeps it,
or by the public sources that prices.yaml beside this file names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher.aws import request as requests
from launcher.aws import warm_pool
from launcher.config.job import Job
from launcher.planner.plan import STOP_SECONDS, Price, longest_hours
from launcher.record.records import write_json
from launcher.show.text import dollars, listed

OLD_DAYS = 90
"""A price is called old when it is more days old than this."""

PRICE_LIST_REGION = "us-east-1"
"""The region of the Price List Query API, which covers all regions.
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html"""


def price(job: Job) -> Price:
    """A job's price from the config or the cached price list. Offline."""
    machines = instances(job)
    if not machines:
        return Price(None, None, "price not known: no instance type")
    if job.compute.price_per_hour is not None:
        per_hour = job.compute.price_per_hour * sum(machines.values())
        return _price(job, per_hour, "compute.price_per_hour")
    if not job.region:
        return Price(None, None, "price not known: no region")
    known = _known(job.region)
    missing = sorted(name for name in machines if name not in known)
    if missing:
        fix = "launcher plan --check reads AWS's price list; or set compute.price_per_hour"
        return Price(None, None, f"price not known for {', '.join(missing)}: {fix}")
    oldest = min((known[name] for name in machines), key=lambda one: one.as_of)
    per_hour = sum(known[name].usd * count for name, count in machines.items())
    days = (datetime.now(timezone.utc).date() - oldest.as_of).days
    old = f"; WARNING: {days} days old, launcher plan --check fetches the current one" if days > OLD_DAYS else ""
    return _price(job, per_hour, f"{_endpoint() or 'AWS'}'s price list of {oldest.as_of}{oldest.by}{old}")


def of_groups(job: Job) -> dict[str, float]:
    """US dollars an hour of each instance group with a known price, by the group's name. Offline."""
    own, known = job.compute.price_per_hour, _known(job.region or "")
    found = {}
    for group in job.compute.instance_groups:
        listed = known.get(group.instance_type)
        each = own if own is not None or listed is None else listed.usd
        if each is not None:
            found[group.name] = each * group.instance_count
    return found


def instances(job: Job) -> dict[str, int]:
    """Instance type -> number of hosts."""
    found: dict[str, int] = {}
    for group in job.compute.instance_groups:
        found[group.instance_type] = found.get(group.instance_type, 0) + group.instance_count
    if not found and job.compute.instance_type is not None:
        found[job.compute.instance_type] = job.compute.instance_count
    return found


def read_price_list(client: Any, region: str, names: Iterable[str]) -> dict[str, float]:
    """Read on-demand training prices from AWS's Price List, and cache them with today's date.

    Args:
        client: a boto3 client of `pricing` in PRICE_LIST_REGION.

    Returns:
        US dollars an hour by instance type, for the types that the list holds.

    Raises:
        botocore's errors.
    """
    found = {}
    for name in names:
        wanted = {"instanceName": name, "regionCode": region, "component": "Training"}
        answer = client.get_products(
            ServiceCode="AmazonSageMaker",
            Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()],
        )
        for text in answer["PriceList"]:
            usd = _on_demand(json.loads(text))
            if usd is not None:
                found[name] = usd
    if found:
        prices = _cached()
        today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        prices[region] = {
            **prices.get(region, {}),
            **{name: {"usd": usd, "read": today} for name, usd in found.items()},
        }
        with contextlib.suppress(OSError, RuntimeError):  # no home, or an unwritable folder, costs the cache alone
            file = cache_file()
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, prices)
    return found


def bill(request: Mapping[str, Any], per_hour: float | None, described: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of a job that is over.

    Args:
        request: its CreateTrainingJob request.
        per_hour: US dollars an hour for the whole cluster, on demand, as planned.
        described: DescribeTrainingJob's answer. BillableTimeInSeconds is for one host, after spot's discount:
            https://docs.aws.amazon.com/sagemaker/latest/dg/model-managed-spot-training.html

    Returns:
        billable_seconds (one host) and training_seconds. If known, cost_usd and the values of `warm_pool.bill`. With spot, saving (a
        fraction).
    """
    billable, training = described.get("BillableTimeInSeconds"), described.get("TrainingTimeInSeconds")
    found: dict[str, Any] = {"billable_seconds": billable, "training_seconds": training}
    if billable is not None and per_hour is not None:
        found["cost_usd"] = round(billable / 3600 * per_hour, 4)
    found |= warm_pool.bill(described, per_hour)
    if request.get("EnableManagedSpotTraining") and training and billable is not None:
        found["saving"] = round(1 - billable / training, 4)
    return {name: value for name, value in found.items() if value is not None}


def so_far(per_hour: float | None, described: Mapping[str, Any]) -> float | None:
    """On-demand cost of a running job, in US dollars; None: no price, or not started.

    Args:
        per_hour: US dollars an hour for the whole cluster.
        described: DescribeTrainingJob's answer with times as ISO 8601. AWS bills from TrainingStartTime to TrainingEndTime:
            https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.html
    """
    started = described.get("TrainingStartTime")
    if per_hour is None or started is None:
        return None
    end = described.get("TrainingEndTime")
    until = datetime.fromisoformat(end) if end else datetime.now(timezone.utc)
    return max(0.0, (until - datetime.fromisoformat(started)).total_seconds() / 3600 * per_hour)


def cache_file() -> Path:
    """The price cache: vision-launcher/prices.json in $XDG_CACHE_HOME or ~/.cache; one file per endpoint.

    Raises:
        RuntimeError: there is no home directory: HOME is not set, and the user has no entry in /etc/passwd.
    """
    endpoint = _endpoint()
    name = f"prices-{urlsplit(endpoint).netloc.replace(':', '-')}.json" if endpoint else "prices.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vision-launcher" / name


def _endpoint() -> str | None:
    """The endpoint that replaces AWS's price list; None: AWS itself."""
    return os.environ.get("AWS_ENDPOINT_URL_PRICING") or os.environ.get("AWS_ENDPOINT_URL")


def _price(job: Job, per_hour: float, source: str) -> Price:
    """The ceiling and its text. How long the upload of the results takes is unknown: the text names it and the ceiling leaves it out."""
    compute = job.compute
    kept = compute.keep_alive_minutes or 0
    ceiling = per_hour * (longest_hours(compute.max_hours) + kept / 60)
    times = [f"{compute.max_hours:g} h", f"{STOP_SECONDS / 60:g} min to stop"]
    times += [f"{kept:g} min of warm pool"] if kept else []
    spot = "; spot costs less" if compute.spot else ""
    spot += "; what compute.training_plan covers was paid for with the plan" if compute.training_plan else ""
    return Price(
        per_hour,
        ceiling,
        f"at most {dollars(ceiling)}: {listed(times)} at {dollars(per_hour)} an hour ({source}), and the upload of its results"
        f" after that{_beside(job)}{spot}",
    )


def _beside(job: Job) -> str:
    """What is billed besides a job's hosts. Profiling rules are not: "no additional cost for using the built-in rules",
    https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-profiler-rules.html"""
    if job.profiling is None or job.profiling.profiler is None:
        return ""
    return f", and SageMaker Profiler's processing job ({requests.PROFILER_INSTANCE_TYPE})"


@dataclass(frozen=True)
class _Known:
    """One host's on-demand price."""

    usd: float
    """US dollars an hour."""
    as_of: date
    """Date of the price list."""
    by: str = ""
    """How the text names a source other than this machine's own reading."""


def _known(region: str) -> dict[str, _Known]:
    """Instance type -> its price in a region: the newer of this machine's reading and the one packaged with the kit. Offline."""
    found = {} if _endpoint() else {**_packaged().get(region, {})}
    for name, item in _cached().get(region, {}).items():
        read = _Known(item["usd"], date.fromisoformat(item["read"]))
        if name not in found or found[name].as_of <= read.as_of:
            found[name] = read
    return found


@functools.cache
def _packaged() -> dict[str, dict[str, _Known]]:
    """Region -> instance type -> its price in prices.yaml."""
    found: dict[str, dict[str, _Known]] = {}
    import yaml  # a plan for this machine needs no prices

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml, PyYAML has only the slow one
    for part in yaml.load(Path(__file__).with_name("prices.yaml").read_text(encoding="utf-8"), loader):
        for name, usd in part["usd"].items():
            found.setdefault(part["region"], {})[name] = _Known(usd, part["as_of"], ", as public sources have it")
    return found


def _cached() -> dict[str, Any]:
    """Region -> instance type -> {usd, read}; {} for a broken cache, or without a home."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        found = json.loads(cache_file().read_text(encoding="utf-8"))
        return {
            region: {
                name: {"usd": float(item["usd"]), "read": f"{date.fromisoformat(item['read'])}"}
                for name, item in prices.items()
            }
            for region, prices in found.items()
        }
    return {}


def _on_demand(product: Mapping[str, Any]) -> float | None:
    """US dollars an hour in one entry of the price list."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term.get("priceDimensions", {}).values():
            usd = float(dimension.get("pricePerUnit", {}).get("USD", 0))
            if usd > 0:
                return usd
    return None

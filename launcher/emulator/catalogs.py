"""The price list and the service quotas that were set: GetProducts of pricing, ListServiceQuotas of service-quotas."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import botocore.session

from launcher.emulator.account import ACCOUNT
from launcher.emulator.router import AwsError, Call

SERVICE = "AmazonSageMaker"

USAGE_REGIONS = {"eu-west-1": "EU", "ap-south-1": "APS3", "ca-central-1": "CAN1"}
"""Irregular short region names in usage types.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/aws-usage-report-understand.html"""

ON_DEMAND, HOURLY = "JRTCKXETXF", "6YS6EN2CT7"
"""AWS's codes for the term OnDemand and for its rate, in every price list."""


class PriceList:
    """Training prices by region and instance type."""

    def __init__(self) -> None:
        self.products: dict[tuple[str, str], dict[str, Any]] = {}

    def set(self, instance_type: str, dollars: float, region: str) -> None:
        """Add or replace a price, in US dollars per instance-hour."""
        self.products[region, instance_type] = product(instance_type, dollars, region)

    def answer(self, call: Call) -> dict[str, Any]:
        """GetProducts: a list of JSON texts. Filters are of the type TERM_MATCH."""
        wanted = call.parameters
        if wanted.get("ServiceCode") != SERVICE:
            found = []
        else:
            filters = wanted.get("Filters", [])
            found = [json.dumps(entry) for entry in self.products.values() if all(_fits(entry, one) for one in filters)]
        return {"FormatVersion": "aws_v1", **_page("PriceList", found, wanted)}


class Quotas:
    """SageMaker's quotas by region and name."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def set(self, name: str, value: float, region: str) -> None:
        self.values[region, name] = value

    def value(self, name: str, region: str) -> float | None:
        """A quota; None if it was not set."""
        return self.values.get((region, name))

    def answer(self, call: Call) -> dict[str, Any]:
        """ListServiceQuotas."""
        if call.parameters.get("ServiceCode") != "sagemaker":
            raise AwsError(
                "NoSuchResourceException", "The request failed because the specified service does not exist."
            )
        found = [
            {
                "ServiceCode": "sagemaker",
                "ServiceName": "Amazon SageMaker",
                "QuotaArn": f"arn:aws:servicequotas:{region}:{ACCOUNT}:sagemaker/{_code('L-', name, 8)}",
                "QuotaCode": _code("L-", name, 8),
                "QuotaName": name,
                "Value": value,
                "Unit": "None",
                "Adjustable": True,
                "GlobalQuota": False,
            }
            for (region, name), value in sorted(self.values.items())
            if region == call.region
        ]
        return _page("Quotas", found, call.parameters)


def _page(name: str, entries: list[Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """One page of a list, and the next page's token, which is the index of its first entry."""
    first = int(wanted.get("NextToken") or 0)
    last = first + int(wanted.get("MaxResults") or 100)
    answer: dict[str, Any] = {name: entries[first:last]}
    if last < len(entries):
        answer["NextToken"] = str(last)
    return answer


def product(instance_type: str, dollars: float, region: str) -> dict[str, Any]:
    """An entry of SageMaker's price list, with the attributes of a training instance."""
    name = _region_name(region)
    sku = _code("", f"{region} {instance_type}", 16)
    price = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${dollars:g} per Training {instance_type} hour in {name}",
        "rateCode": f"{sku}.{ON_DEMAND}.{HOURLY}",
        "appliesTo": [],
        "pricePerUnit": {"USD": f"{dollars:.10f}"},
    }
    term = {
        "sku": sku,
        "offerTermCode": ON_DEMAND,
        "effectiveDate": "2026-01-01T00:00:00Z",
        "termAttributes": {},
        "priceDimensions": {f"{sku}.{ON_DEMAND}.{HOURLY}": price},
    }
    return {
        "serviceCode": SERVICE,
        "product": {
            "sku": sku,
            "productFamily": "ML Instance",
            "attributes": {
                "servicecode": SERVICE,
                "servicename": "Amazon SageMaker",
                "regionCode": region,
                "location": name,
                "locationType": "AWS Region",
                "instanceName": instance_type,
                "instanceType": f"{instance_type}-Training",
                "platoinstancename": instance_type,
                "platoinstancetype": "Training",
                "component": "Training",
                "operation": "RunInstance",
                "usagetype": f"{_usage_region(region)}-Train:{instance_type}",
            },
        },
        "terms": {"OnDemand": {f"{sku}.{ON_DEMAND}": term}},
        "version": "20260101000000",
        "publicationDate": "2026-01-01T00:00:00Z",
    }


def _fits(entry: dict[str, Any], wanted: dict[str, str]) -> bool:
    described = entry["product"]
    values = {**described["attributes"], "productFamily": described["productFamily"], "ServiceCode": SERVICE}
    return bool(values.get(wanted["Field"]) == wanted["Value"])


def _region_name(region: str) -> str:
    """The region's name, such as US East (N. Virginia). The price list says EU where other lists say Europe."""
    partitions = botocore.session.get_session().get_component("data_loader").load_data("endpoints")["partitions"]
    names: dict[str, str] = {
        code: entry["description"] for part in partitions for code, entry in part["regions"].items()
    }
    return names.get(region, region).replace("Europe", "EU")


def _usage_region(region: str) -> str:
    """The region's short name in usage types: us-east-1 -> USE1."""
    place, *directions, number = region.split("-")
    letters = "".join({"southeast": "S", "northeast": "N"}.get(word, word[0].upper()) for word in directions)
    return USAGE_REGIONS.get(region, f"{place.upper()}{letters}{number}")


def _code(prefix: str, text: str, length: int) -> str:
    """A code in AWS's format, always the same for a text."""
    return prefix + hashlib.sha256(text.encode()).hexdigest()[:length].upper()

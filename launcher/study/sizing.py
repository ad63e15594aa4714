"""Which SageMaker instance types have the CPUs to feed their GPUs with each preprocessing pipeline, and at which price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launcher.aws import catalog, prices
from launcher.config.job import Job

TOO_OLD = ("ml.p2.",)
"""Families that, by the catalog, run no image with PyTorch 1.13 or later; this kit's scripts need 2.0."""

RESERVED = 1
"""vCPUs per GPU for the training process itself, which launches the GPU's kernels."""


@dataclass(frozen=True)
class Demand:
    """A model's demand on one GPU."""

    images_per_second: float
    source: str
    """`measured`, or `the post's`."""


@dataclass(frozen=True)
class Fit:
    """An instance type with a preprocessing pipeline."""

    instance_type: str
    gpu: str
    vcpus_per_gpu: float
    fed: float
    """Images a second that its CPUs prepare for each GPU."""
    demand: Demand | None
    usd_per_hour: float | None
    gpus: int

    @property
    def share(self) -> float | None:
        """Share of the model's speed that the CPUs sustain; 1: the model is fed."""
        return None if self.demand is None else min(1.0, self.fed / self.demand.images_per_second)

    @property
    def usd_per_million(self) -> float | None:
        """US dollars to train on a million images; None if the price or the demand is unknown."""
        if self.demand is None or self.usd_per_hour is None:
            return None
        return usd_per_million(self.usd_per_hour, self.gpus * min(self.fed, self.demand.images_per_second))


def fit(instance_type: str, core_rate: float, demands: Mapping[str, Demand], job: Job | None = None) -> Fit:
    """One instance type with GPUs.

    Args:
        core_rate: images a second that one core prepares. A core is the operating system's, like a vCPU.
        demands: by GPU, named as in the catalog.
        job: its region sets the prices; None: no price.
    """
    facts = catalog.instance(instance_type)
    assert facts is not None and facts.gpus and facts.gpu is not None
    each = facts.vcpus / facts.gpus
    fed = max(each - RESERVED, 0) * core_rate
    price = None if job is None else price_of_one(job, instance_type)
    return Fit(instance_type, facts.gpu, each, fed, demands.get(facts.gpu), price, facts.gpus)


def usd_per_million(usd_per_hour: float, images_per_second: float) -> float:
    """US dollars to train on a million images."""
    return usd_per_hour / 3600 / images_per_second * 1e6


def next_size(instance_type: str) -> str | None:
    """The family's next larger type with as many GPUs and more vCPUs; None if there is none, or no GPU."""
    facts = catalog.instance(instance_type)
    if facts is None or not facts.gpus:
        return None
    family = instance_type.rpartition(".")[0] + "."
    known = [catalog.instance(name) for name in catalog.instance_types() if name.startswith(family)]
    larger = [each for each in known if each is not None and each.gpus == facts.gpus and each.vcpus > facts.vcpus]
    return min(larger, key=lambda each: each.vcpus).name if larger else None


def instance_types() -> list[str]:
    """For each GPU, in the catalog's order, the instance types with the fewest and the most vCPUs per GPU; of equals, the smaller."""
    by_gpu: dict[str, list[catalog.InstanceType]] = {}
    for name in catalog.instance_types():
        facts = catalog.instance(name)
        if facts is not None and facts.gpu is not None and not name.startswith(TOO_OLD):
            by_gpu.setdefault(facts.gpu, []).append(facts)
    found = []
    for types in by_gpu.values():
        ordered = sorted(types, key=lambda facts: (facts.vcpus / facts.gpus, facts.gpus, facts.vcpus))
        few, most = ordered[0], ordered[-1].vcpus / ordered[-1].gpus
        many = next(facts for facts in ordered if facts.vcpus / facts.gpus == most)
        found += list(dict.fromkeys([few.name, many.name]))
    return found


def demands_of(model: str, image_size: int, measured: float | None, gpu: str | None) -> dict[str, Demand]:
    """The known speeds of a model, by GPU: the post's for images of its size, and the measured one.

    Args:
        measured: images a second of the model alone on one `gpu`, named as CUDA names it.
    """
    found: dict[str, Demand] = {}
    if model in post()["models"] and image_size == post()["image_size"]:
        found[post()["gpu"]] = Demand(post_rate(model), "the post's")
    name = catalog_gpu(gpu) if gpu else None
    if name is not None and measured is not None:
        found[name] = Demand(measured, "measured")
    return found


def catalog_gpu(name: str) -> str | None:
    """The catalog's name of a GPU, by CUDA's, for example Tesla V100-SXM2-16GB; None if no instance type has it."""
    words = name.replace("-", " ").split()
    known = {facts.gpu for each in catalog.instance_types() if (facts := catalog.instance(each)) and facts.gpu}
    fitting = [gpu for gpu in known if all(word in words for word in gpu.split())]
    return max(fitting, key=len, default=None)


def post_rate(model: str) -> float:
    """Training images a second of the post's fastest trial; the model takes at least as many, because its epochs include validation."""
    fastest: float = min(seconds for pair in post()["models"][model].values() for seconds in pair)
    return int(post()["training_images"]) / fastest


@cache
def post() -> Mapping[str, Any]:
    """dali_post.yaml."""
    import yaml  # here: only the post's facts need it

    facts: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "dali_post.yaml").read_text(encoding="utf-8"))
    return facts


def price_of_one(job: Job, instance_type: str) -> float | None:
    """US dollars an hour for a host: the job's own price for its own instance type, else AWS's price list as last read on this machine."""
    return prices.price(on_one(job, instance_type)).per_hour


def on_one(job: Job, instance_type: str) -> Job:
    """The job on one host of an instance type."""
    own = instance_type == job.compute.instance_type
    hosts = {"instance_type": instance_type, "instance_count": 1, "instance_groups": []}
    price = {"price_per_hour": job.compute.price_per_hour if own else None}
    return job.model_copy(update={"compute": job.compute.model_copy(update={**hosts, **price})})

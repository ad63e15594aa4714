"""AWS's instance types, GPUs, images and closed services, from catalog.yaml beside this file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

NUMBER_FORMATS = {"bf16": "8.0", "bfloat16": "8.0", "tf32": "8.0", "fp8": "8.9"}
"""Compute capability from which GPUs multiply in a number format (NVIDIA, CUDA programming guide, appendix "Compute Capabilities")."""

_IMAGE_URI = re.compile(
    r"^(?:(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.[a-z0-9.]+|public\.ecr\.aws/deep-learning-containers)"
    r"/(?P<repository>[a-z0-9-]+):(?P<version>\d+(?:\.\d+)+)-(?P<rest>[a-z0-9.-]+)$"
)

_REGISTRY = re.compile(r"^(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.[a-z0-9.]+/(?P<image>.+)$")


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """One kind of host for training jobs."""

    name: str
    """ml.p4d.24xlarge, for example."""
    gpus: int = 0
    """NVIDIA GPUs; also 0 on a Trainium host."""
    gpu: str | None = None
    """The GPU's name, an argument of `gpu`; None: no GPU."""
    gpu_memory_gib: float | None = None
    """Nominal memory of each GPU. CUDA can use a few percent less."""
    accelerator: str | None = None
    """Trainium or Trainium2, which need AWS's Neuron SDK; None: neither."""
    vcpus: int
    memory_gib: float
    local_storage_gb: int = 0
    """Total of the host's NVMe disks; 0: none."""
    efa: bool = False
    """Whether the hosts have AWS's Elastic Fabric Adapter."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU."""

    name: str
    compute_capability: str
    """8.0, for example."""

    def supports(self, number_format: str) -> bool:
        """Whether the hardware multiplies in a number format."""
        return numbers(self.compute_capability) >= numbers(NUMBER_FORMATS.get(number_format, "0"))


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """Facts in the address of one of AWS's PyTorch training images."""

    framework_version: str
    """PyTorch's version in the tag, two or three numbers."""
    python: str | None
    """py310, for example; None if the tag has none (amzn2023 images)."""
    device: str
    """cpu or gpu."""
    cuda: str | None
    """cu118, for example; None for CPU images and short tags."""
    region: str | None
    """The registry's region; None for the public gallery."""
    for_sagemaker: bool
    """Whether the image has SageMaker's container toolkit; images for EC2 do not."""


@dataclass(frozen=True, kw_only=True)
class Packages:
    """Python packages of the training images, and those that scripts need beyond them."""

    modules: frozenset[str]
    """Modules that every PyTorch training image from 2.0 on has."""
    until: Mapping[str, str]
    """Further module -> the last PyTorch version whose images have it."""
    pins: Mapping[str, str]
    """Package -> version that this kit's scripts need beyond the images."""
    imported_as: Mapping[str, str]
    """Package -> module, where the names differ."""
    on_request: Mapping[str, Mapping[str | bool, Mapping[str, str]]]
    """Hyperparameter -> value -> packages that this kit's scripts need for it."""


@dataclass(frozen=True, kw_only=True)
class ClosedService:
    """A service that ends or is closed to new customers."""

    name: str
    what: str
    """`closed to new customers`, `ends` or `end of support`."""
    date: date
    source: str


class UnknownImage(ValueError):
    """The catalog has no such image."""

    def __init__(self, found: str, valid: str, fix: str):
        super().__init__(f"{found} (valid: {valid}); {fix}")
        self.found, self.valid, self.fix = found, valid, fix


def instance(type_name: str) -> InstanceType | None:
    """An instance type by its name with `ml.`; None if the catalog lacks it."""
    return _instances().get(type_name)


def instance_types() -> tuple[str, ...]:
    """All instance types that CreateTrainingJob accepts."""
    return tuple(_instances())


def addresses(type_name: str) -> int:
    """Private addresses that a host takes from its subnet: at least 5 with EFA, else 2.

    https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html, Ensure That Subnets Have Enough IP Addresses
    """
    known = instance(type_name)
    return 5 if known is not None and known.efa else 2


def gpu(name: str) -> Gpu:
    """A GPU by its name in `InstanceType.gpu`.

    Raises:
        KeyError: no instance type has such a GPU.
    """
    return Gpu(name=name, **_catalog()["gpus"]["by_name"][name])


def training_image(region: str, instance_type: str, framework_version: str, python_version: str | None) -> str:
    """The address of AWS's PyTorch training image, the same as SDK v2's `image_uris.retrieve("pytorch", …)` for images that it knows.

    Args:
        region: us-west-2, for example.
        instance_type: selects the CPU or the GPU image; `local` and `local_gpu` do too.
        framework_version: a full PyTorch version or its first two numbers. The tag `2.0` moves to the latest 2.0.
        python_version: py310, for example; None: the image's only one.

    Raises:
        UnknownImage: the catalog has no image for these.
    """
    images = _catalog()["images"]["training"]
    device = _device(instance_type)
    version = images["aliases"].get(framework_version, framework_version)
    if version not in images["versions"]:
        raise UnknownImage(
            f"no PyTorch training image of version {framework_version}",
            ", ".join(images["versions"]),
            _fix_for_version(framework_version),
        )
    facts = images["versions"][version]
    family = instance_type.split(".")[1] if instance_type.startswith("ml.") else ""
    if family == "p2" and numbers(framework_version) >= numbers(images["p2_ends_before"]):
        raise UnknownImage(
            f"the PyTorch {framework_version} image does not run on {instance_type}",
            f"PyTorch before {images['p2_ends_before']} on P2",
            "set compute.instance_type to a newer one, for example ml.g4dn.xlarge",
        )
    if python_version is None and len(facts["python"]) == 1:
        python_version = facts["python"][0]
    if python_version not in facts["python"]:
        raise UnknownImage(
            f"the PyTorch {framework_version} image has no Python {python_version}",
            ", ".join(facts["python"]),
            f"set image.python to {facts['python'][-1]}",
        )
    accounts = _accounts(facts["accounts"])
    if region not in accounts:
        raise UnknownImage(
            f"no PyTorch {framework_version} image in the region {region}",
            ", ".join(sorted(accounts)),
            "choose one of these regions, or set image.uri to a copy in your own registry",
        )
    tag = (
        f"{framework_version}-{facts['tags'][device]}"
        if "tags" in facts
        else f"{framework_version}-{device}-{python_version}"
    )
    if family == "p4d" and tag in images["on_p4d"]:
        tag += f"-{images['on_p4d'][tag]}"
    return f"{_registry(accounts[region], region)}/{facts['repository']}:{tag}"


def newest_image() -> tuple[str, str]:
    """(PyTorch version, Python version) of the newest training image. It gets patches for the longest time, so messages recommend it."""
    version, facts = list(_catalog()["images"]["training"]["versions"].items())[-1]
    return version, facts["python"][-1]


def last_image_before_turing() -> tuple[str, str]:
    """(PyTorch version, Python version) of the last training image sure to run on GPUs older than NVIDIA's Turing, such as V100."""
    facts = _catalog()["images"]["training"]["before_turing"]
    return facts["last_version"], facts["python"]


def is_before_turing(name: str) -> bool:
    """Whether a GPU, by its name in `InstanceType.gpu`, is older than Turing. Only NVIDIA's can be: others have no compute capability."""
    facts = _catalog()["images"]["training"]["before_turing"]
    known = _catalog()["gpus"]["by_name"].get(name)
    return known is not None and float(known["compute_capability"]) < float(facts["compute_capability"])


def rules_image(region: str) -> str:
    """The image of the built-in rules of Debugger and ProfilerReport.

    Raises:
        UnknownImage: the region has none.
    """
    return _rule_image("rules", region)


def profiler_image(region: str) -> str:
    """The image of SageMaker Profiler's processing job.

    Raises:
        UnknownImage: the region has none.
    """
    return _rule_image("profiler", region)


def smddp_instance_types() -> tuple[str, ...]:
    """Instance types that SageMaker's data parallel library supports; ml.p3.16xlarge only before version 2.0."""
    return tuple(_catalog()["smddp"]["instance_types"])


def smddp_versions() -> dict[str, str]:
    """PyTorch version -> version of the data parallel library in the last patch of its training image."""
    return {version: facts["library"] for version, facts in _catalog()["smddp"]["versions"].items()}


def image_facts(uri: str) -> ImageFacts | None:
    """Facts in the address of one of AWS's PyTorch training images; None for any other image."""
    match = _IMAGE_URI.match(uri)
    images = _catalog()["images"]["training"]
    if match is None or match["repository"] not in {"pytorch"} | {
        facts["repository"] for facts in images["versions"].values()
    }:
        return None
    if match["account"] and match["account"] not in {
        account for group in images["accounts"].values() for account in group
    }:
        return None
    words = match["rest"].split("-")
    cuda = next((word for word in words if re.fullmatch(r"cu\d+", word)), None)
    if "cpu" not in words and "gpu" not in words and cuda is None:
        return None
    return ImageFacts(
        framework_version=match["version"],
        python=next((word for word in words if re.fullmatch(r"py\d+", word)), None),
        device="cpu" if "cpu" in words else "gpu",
        cuda=cuda,
        region=match["region"],
        for_sagemaker="ec2" not in words,
    )


def registry_region(uri: str) -> str | None:
    """The region of the ECR registry in an image's address; None: another registry."""
    match = _REGISTRY.match(uri)
    return match["region"] if match is not None else None


def uri_in_region(uri: str, region: str) -> str | None:
    """The address in a region of an image from the registries of AWS's PyTorch images, whose account and domain depend on the region.

    None: not from these registries, or the catalog has none in the region.
    """
    match = _REGISTRY.match(uri)
    if match is None:
        return None
    for facts in reversed(_catalog()["images"]["training"]["versions"].values()):
        accounts = _accounts(facts["accounts"])
        if match["account"] in accounts.values() and region in accounts:
            return f"{_registry(accounts[region], region)}/{match['image']}"
    return None


def end_of_patch(framework_version: str) -> date | None:
    """The last day of patches for the PyTorch training image of a version; None: no source."""
    ends: Mapping[str, date] = _catalog()["images"]["training"]["end_of_patch"]
    return ends.get(".".join(framework_version.split(".")[:2]))


def next_end_of_patch(framework_version: str) -> tuple[str, date] | None:
    """The next newer PyTorch version whose images' last day of patches is known, and that day; None if there is none."""
    ends: Mapping[str, date] = _catalog()["images"]["training"]["end_of_patch"]
    newer = [version for version in ends if numbers(version) > numbers(framework_version)[:2]]
    nearest = min(newer, key=numbers, default=None)
    return (nearest, ends[nearest]) if nearest is not None else None


def packages() -> Packages:
    """Python packages of the training images, and those that scripts need beyond them."""
    facts = _catalog()["packages"]
    return Packages(
        modules=frozenset(facts["modules"]),
        until=MappingProxyType(facts["until"]),
        pins=MappingProxyType(facts["pins"]),
        imported_as=MappingProxyType(facts["imported_as"]),
        on_request=MappingProxyType(facts["on_request"]),
    )


def has_module(module: str, framework_version: str | None) -> bool:
    """Whether the training image of a PyTorch version (None: unknown) has one of the modules that only some images have."""
    last = packages().until.get(module)
    return last is not None and framework_version is not None and numbers(framework_version)[:2] <= numbers(last)


def dali_packages(framework_version: str, cuda: str | None = None) -> Mapping[str, str] | None:
    """Package -> version that `preprocessing: dali` needs beyond an image; None: no DALI for its CUDA.

    Args:
        cuda: as `ImageFacts.cuda`.
    """
    by_cuda: Mapping[int, Mapping[str, str]] = _catalog()["packages"]["dali"]["by_cuda"]
    return by_cuda.get(cuda_version(framework_version, cuda))


def cuda_version(framework_version: str, cuda: str | None = None) -> int:
    """The CUDA major version in a training image for PyTorch 2.0 or newer; 11 for older ones. A CPU image counts as its GPU twin.

    Args:
        cuda: as `ImageFacts.cuda`; None: by the PyTorch version.
    """
    if cuda is not None:
        return int(cuda[2:4])
    begins: Mapping[str, int] = _catalog()["images"]["training"]["cuda"]
    return max(
        (number for version, number in begins.items() if numbers(version) <= numbers(framework_version)[:2]),
        default=min(begins.values()),
    )


def closed_service(key: str) -> ClosedService:
    """A closed service by its key: `debugger`, `profiler` or `sdk_v2`."""
    return ClosedService(**_catalog()["closed_services"][key])


@cache
def _catalog() -> Mapping[str, Any]:
    import yaml  # a plan for this machine needs no catalog

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml, PyYAML has only the slow one
    text = (Path(__file__).parent / "catalog.yaml").read_text(encoding="utf-8")
    facts: Mapping[str, Any] = yaml.load(text, loader)
    return facts


@cache
def _instances() -> Mapping[str, InstanceType]:
    table = _catalog()["instance_types"]
    rows = {**table["with_gpus"], **table["with_trainium"], **table["without_gpus"]}
    for family, facts in table["families"].items():
        for size in facts["sizes"]:
            vcpus = 2 if size == "large" else 4 * int(size.removesuffix("xlarge") or 1)
            rows[f"ml.{family}.{size}"] = {
                "vcpus": vcpus,
                "memory_gib": vcpus * facts["gib_per_vcpu"],
                "efa": size in facts.get("efa", ()),
            }
    return {name: InstanceType(name=name, **row) for name, row in rows.items()}


def _accounts(groups: Sequence[str]) -> dict[str, str]:
    """Region -> account, for some groups of accounts."""
    known = _catalog()["images"]["training"]["accounts"]
    return {region: account for group in groups for region, account in _by_region(known[group]).items()}


def _by_region(accounts: Mapping[str, list[str]]) -> dict[str, str]:
    return {region: account for account, regions in accounts.items() for region in regions}


def _registry(account: str, region: str) -> str:
    suffixes = _catalog()["images"]["dns_suffixes"]
    suffix = next((suffix for prefix, suffix in suffixes.items() if region.startswith(prefix)), "amazonaws.com")
    return f"{account}.dkr.ecr.{region}.{suffix}"


def _device(instance_type: str) -> str:
    """cpu or gpu by the family's first letter, as in the SDK, so that types newer than the catalog work too."""
    if instance_type in ("local", "local_gpu"):
        return "gpu" if instance_type == "local_gpu" else "cpu"
    family = re.match(r"^ml\.([a-z0-9-]+)\.\w+$", instance_type)
    if family is None:
        raise UnknownImage(
            f"no instance type {instance_type}",
            "ml.<family>.<size>",
            "set compute.instance_type, for example ml.g5.xlarge",
        )
    if family[1].startswith(("trn", "inf")):
        raise UnknownImage(
            f"{instance_type} needs an image with AWS's Neuron SDK",
            "instance types with GPUs or without accelerators",
            "set compute.instance_type to one with GPUs, for example ml.g5.xlarge, or set image.uri",
        )
    return "gpu" if family[1][0] in "gp" else "cpu"


def _fix_for_version(framework_version: str) -> str:
    """Name the nearest version."""
    alias = _catalog()["images"]["training"]["aliases"].get(".".join(framework_version.split(".")[:2]))
    return f"set image.framework_version to {alias or newest_image()[0]}, or image.uri to an image's address"


def numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, for comparing versions."""
    return tuple(int(number) for number in version.split("."))


def _rule_image(kind: str, region: str) -> str:
    facts = _catalog()["images"][kind]
    accounts = _by_region(facts["accounts"])
    if region not in accounts:
        raise UnknownImage(
            f"no image {facts['image']} in the region {region}",
            ", ".join(sorted(accounts)),
            "choose one of these regions, or do without its rules",
        )
    return f"{_registry(accounts[region], region)}/{facts['image']}"

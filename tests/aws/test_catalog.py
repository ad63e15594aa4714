"""The catalog against botocore's service model and the SDK's own tables."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml

from launcher.aws import catalog

ROOT = Path(__file__).parents[2]
GPU_AND_CPU = ["ml.g5.xlarge", "ml.m5.xlarge"]


@pytest.fixture(scope="module")
def image_uris():
    """The SDK's image lookup, which asks no network. It reads the same two files at every call: here once, for speed alone."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    module = pytest.importorskip("sagemaker.image_uris", exc_type=ImportError)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "config_for_framework", functools.cache(module.config_for_framework))
        patch.setattr(module.utils, "_botocore_resolver", functools.cache(module.utils._botocore_resolver))
        yield module


def service_model():
    session = pytest.importorskip("botocore.session")
    return session.get_session().get_service_model("sagemaker")


def known_to_sdk(image_uris, framework):
    config = image_uris.config_for_framework(framework)
    return config.get("training", config)


def test_every_training_instance_type_of_the_api_is_known_and_no_other():
    assert set(catalog.instance_types()) == set(service_model().shape_for("TrainingInstanceType").enum)
    for name in catalog.instance_types():
        facts = catalog.instance(name)
        assert facts.name == name
        assert facts.vcpus >= 2 and facts.memory_gib >= 4
        assert (facts.gpus > 0) == (facts.gpu is not None) == (facts.gpu_memory_gib is not None)


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "gpu_memory", "vcpus", "memory", "storage", "efa"),
    [
        ("ml.p3.2xlarge", 1, "V100", 16, 8, 61, 0, False),
        ("ml.p3.16xlarge", 8, "V100", 16, 64, 488, 0, False),
        ("ml.p3dn.24xlarge", 8, "V100", 32, 96, 768, 1800, True),
        ("ml.p4d.24xlarge", 8, "A100", 40, 96, 1152, 8000, True),
        ("ml.p4de.24xlarge", 8, "A100", 80, 96, 1152, 8000, True),
        ("ml.p5.48xlarge", 8, "H100", 80, 192, 2048, 30400, True),
        ("ml.p5en.48xlarge", 8, "H200", 141, 192, 2048, 30400, True),
        ("ml.g4dn.xlarge", 1, "T4", 16, 4, 16, 125, False),
        ("ml.g5.12xlarge", 4, "A10G", 24, 48, 192, 3800, True),
        ("ml.g6.xlarge", 1, "L4", 24, 4, 16, 250, False),
        ("ml.g6e.48xlarge", 8, "L40S", 48, 192, 1536, 7600, True),
        ("ml.m5.large", 0, None, None, 2, 8, 0, False),
        ("ml.m5.xlarge", 0, None, None, 4, 16, 0, False),
        ("ml.c5.18xlarge", 0, None, None, 72, 144, 0, False),
        ("ml.c5n.18xlarge", 0, None, None, 72, 192, 0, True),
        ("ml.r7i.48xlarge", 0, None, None, 192, 1536, 0, True),
        ("ml.trn1.32xlarge", 0, None, None, 128, 512, 7600, True),
    ],
)
def test_well_known_instance_types_have_their_well_known_numbers(
    name, gpus, gpu, gpu_memory, vcpus, memory, storage, efa
):
    facts = catalog.instance(name)
    assert (facts.gpus, facts.gpu, facts.gpu_memory_gib) == (gpus, gpu, gpu_memory)
    assert (facts.vcpus, facts.memory_gib, facts.local_storage_gb, facts.efa) == (vcpus, memory, storage, efa)


def test_gpu_counts_and_memory_agree_with_the_sdks_own_table(image_uris):
    folder = Path(image_uris.__file__).parent
    table = yaml.safe_load((folder / "image_uri_config" / "instance_gpu_info.json").read_text())["us-west-2"]
    compared = 0
    for name, facts in table.items():
        known = catalog.instance(name)
        if known is None:  # the table has ml.g5n.xlarge, which does not exist
            continue
        assert known.gpus == facts["Count"]
        # its ml.g5.48xlarge is 7 % short of eight A10G: what the driver leaves
        assert known.gpus * known.gpu_memory_gib * 1024 == pytest.approx(facts["TotalGpuMemoryInMiB"], rel=0.08)
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", ["", "ml.p9.xlarge", "p4d.24xlarge", "ml.m5.3xlarge", "ml.m5."])
def test_other_instance_types_are_unknown(name):
    assert catalog.instance(name) is None


def test_every_gpu_of_an_instance_type_is_known_with_its_number_formats():
    gpus = {catalog.instance(name).gpu for name in catalog.instance_types()} - {None}
    capable = {
        number_format: {gpu for gpu in gpus if catalog.gpu(gpu).supports(number_format)}
        for number_format in ("fp16", "bf16", "fp8")
    }
    assert capable["fp16"] == gpus > capable["bf16"] > capable["fp8"]
    assert not capable["bf16"] & {"K80", "V100", "T4"} and {"A100", "A10G", "L4", "H100"} < capable["bf16"]
    assert not capable["fp8"] & {"A100", "A10G"} and {"L4", "L40S", "H100", "H200", "B200"} < capable["fp8"]
    with pytest.raises(KeyError):
        catalog.gpu("Trainium")


def test_training_images_equal_the_sdks_for_every_version_region_python_and_device(image_uris):
    known = known_to_sdk(image_uris, "pytorch")
    compared = 0
    for version in [*known["versions"], *known["version_aliases"]]:
        facts = known["versions"][known["version_aliases"].get(version, version)]
        for instance_type, python, region in itertools.product(GPU_AND_CPU, facts["py_versions"], facts["registries"]):
            expected = image_uris.retrieve(
                "pytorch",
                region,
                version=version,
                py_version=python,
                instance_type=instance_type,
                image_scope="training",
            )
            assert catalog.training_image(region, instance_type, version, python) == expected
            compared += 1
    assert compared > 5000


@pytest.mark.parametrize(
    "instance_type", ["ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p2.xlarge", "ml.trn1.2xlarge", "local", "local_gpu"]
)
def test_training_images_equal_the_sdks_on_unusual_instance_types(image_uris, instance_type):
    known = known_to_sdk(image_uris, "pytorch")
    for version in [*known["versions"], *known["version_aliases"]]:
        facts = known["versions"][known["version_aliases"].get(version, version)]
        for python in facts["py_versions"]:
            try:
                expected = image_uris.retrieve(
                    "pytorch",
                    "us-east-1",
                    version=version,
                    py_version=python,
                    instance_type=instance_type,
                    image_scope="training",
                )
            except (ValueError, KeyError):
                expected = None
            if expected is None or "neuron" in expected:  # Neuron images: not this kit's
                with pytest.raises(catalog.UnknownImage):
                    catalog.training_image("us-east-1", instance_type, version, python)
            else:
                assert catalog.training_image("us-east-1", instance_type, version, python) == expected


def test_without_a_python_version_the_only_one_is_taken_as_by_the_sdk(image_uris):
    uri = catalog.training_image("us-west-2", "ml.p4d.24xlarge", "2.0.0", None)
    assert uri == "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-gpu-py310"
    assert uri == image_uris.retrieve(
        "pytorch", "us-west-2", version="2.0.0", instance_type="ml.p4d.24xlarge", image_scope="training"
    )
    with pytest.raises(catalog.UnknownImage):
        catalog.training_image("us-west-2", "ml.p4d.24xlarge", "1.4.0", None)


@pytest.mark.parametrize(
    ("region", "instance_type", "version", "python", "image"),
    [
        ("cn-north-1", "ml.m5.xlarge", "2.10.0", "py313", "amazonaws.com.cn/pytorch-training:2.10.0-cpu-py313"),
        ("us-west-2", "ml.g5.xlarge", "2.9", None, "us-west-2.amazonaws.com/pytorch-training:2.9-gpu-py312"),
        ("eu-west-1", "ml.g5.xlarge", "2.13", "py312", ".amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("eu-west-1", "ml.g5.xlarge", "2.14.0", "py312", ".amazonaws.com/pytorch:2.14.0-cu133-amzn2023-sagemaker"),
        ("eu-west-1", "ml.m5.xlarge", "2.12.1", "py312", ".amazonaws.com/pytorch:2.12.1-cpu-amzn2023-sagemaker"),
    ],
)
def test_images_that_the_sdk_does_not_know_have_the_tags_that_aws_publishes(
    region, instance_type, version, python, image
):
    """Tags: docs/src/data of AWS's deep-learning-containers, at the commit that the catalog names."""
    uri = catalog.training_image(region, instance_type, version, python)
    assert uri.endswith(image)
    facts = catalog.image_facts(uri)
    assert (facts.framework_version, facts.device) == (version, "gpu" if ".g5." in instance_type else "cpu")


def test_the_image_that_messages_recommend_gets_patches_for_at_least_half_a_year_from_the_catalogs_date():
    version, python = catalog.newest_image()
    assert (catalog.end_of_patch(version) - catalog._catalog()["images"]["checked"]).days > 182
    assert catalog.training_image("us-west-2", "ml.g5.xlarge", version, python)


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [("1.8.1", None, 11), ("2.0.1", None, 11), ("2.1", None, 12), ("2.8.0", None, 12), ("2.9.0", None, 13), ("2.13", None, 13), ("2.0", "cu128", 12)],
)  # fmt: skip
def test_the_cuda_version_of_an_image(version, cuda, expected):
    assert catalog.cuda_version(version, cuda) == expected


def test_an_alias_stays_in_the_tag_as_it_was_typed():
    assert catalog.training_image("us-west-2", "ml.g5.xlarge", "2.0", "py310").endswith(":2.0-gpu-py310")


@pytest.mark.parametrize(("ours", "framework"), [("rules_image", "debugger"), ("profiler_image", "detailed-profiler")])
def test_rule_images_equal_the_sdks_in_every_region(image_uris, ours, framework):
    for region in known_to_sdk(image_uris, framework)["versions"]["latest"]["registries"]:
        assert getattr(catalog, ours)(region) == image_uris.retrieve(framework, region)
    with pytest.raises(catalog.UnknownImage) as caught:
        getattr(catalog, ours)("mars-north-1")
    assert "us-west-2" in caught.value.valid


@pytest.mark.parametrize(
    ("arguments", "found", "valid", "fix"),
    [
        (("us-west-2", "ml.g5.xlarge", "2.0.9", "py310"), "2.0.9", "2.0.1", "image.framework_version to 2.0.1"),
        (("us-west-2", "ml.g5.xlarge", "9.0", "py310"), "9.0", "2.8.0", "image.framework_version to 2.14.0"),
        (("us-west-2", "ml.g5.xlarge", "2.0.0", "py311"), "py311", "py310", "image.python to py310"),
        (("mars-1", "ml.g5.xlarge", "2.0.0", "py310"), "mars-1", "us-west-2", "image.uri"),
        (("us-west-2", "ml.p2.xlarge", "2.0.0", "py310"), "ml.p2.xlarge", "1.13", "compute.instance_type"),
        (("us-west-2", "ml.trn1.2xlarge", "2.0.0", "py310"), "Neuron", "GPUs", "compute.instance_type"),
        (("us-west-2", "p4d", "2.0.0", "py310"), "p4d", "ml.", "compute.instance_type"),
        (("us-west-2", "ml.g5.xlarge", "2.13.0", "py313"), "py313", "py312", "image.python to py312"),
    ],
)
def test_an_unknown_image_names_what_was_found_what_is_valid_and_a_fix(arguments, found, valid, fix):
    with pytest.raises(catalog.UnknownImage) as caught:
        catalog.training_image(*arguments)
    assert found in caught.value.found and valid in caught.value.valid and fix in caught.value.fix
    assert isinstance(caught.value, ValueError) and fix in str(caught.value)


@pytest.mark.parametrize("text", ["x", "2..0", "", "2.0.0.0.0", "-", "1.13.x"])
def test_any_text_as_a_version_is_an_unknown_image(text):
    for instance_type in ("ml.g5.xlarge", "ml.p2.xlarge"):
        with pytest.raises(catalog.UnknownImage):
            catalog.training_image("us-west-2", instance_type, text, "py310")


@pytest.mark.parametrize(
    ("uri", "facts"),
    [
        (
            "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-gpu-py310-cu118-ubuntu20.04-sagemaker",
            ("2.0.0", "py310", "gpu", "cu118", "us-west-2", True),
        ),
        (
            "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-gpu-py310",
            ("2.0.0", "py310", "gpu", None, "us-west-2", True),
        ),
        (
            "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
            ("2.13", None, "gpu", "cu133", "us-west-2", True),
        ),
        (
            "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker",
            ("2.13", None, "cpu", None, "eu-west-1", True),
        ),
        (
            "public.ecr.aws/deep-learning-containers/pytorch-training:2.6.0-gpu-py312-cu126-ubuntu22.04-ec2",
            ("2.6.0", "py312", "gpu", "cu126", None, False),
        ),
        (
            "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch-training:1.13.1-cpu-py39",
            ("1.13.1", "py39", "cpu", None, "cn-north-1", True),
        ),
        (
            "520713654638.dkr.ecr.us-east-1.amazonaws.com/sagemaker-pytorch:1.1.0-gpu-py3",
            ("1.1.0", "py3", "gpu", None, "us-east-1", True),
        ),
    ],
)
def test_an_images_address_tells_its_facts(uri, facts):
    found = catalog.image_facts(uri)
    assert (
        found.framework_version,
        found.python,
        found.device,
        found.cuda,
        found.region,
        found.for_sagemaker,
    ) == facts


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "pytorch-training:2.0.0-gpu-py310",
        "123456789012.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-gpu-py310",
        "763104351884.dkr.ecr.us-west-2.amazonaws.com/tensorflow-training:2.0.0-gpu-py310",
        "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-inference:2.0.0-gpu-py310",
        "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:latest",
        "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-beta",
        "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training@sha256:0123",
        "docker.io/pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
    ],
)
def test_other_images_have_no_facts(uri):
    assert catalog.image_facts(uri) is None


def test_the_facts_of_every_image_that_we_make_are_what_it_was_made_of(image_uris):
    for version, facts in known_to_sdk(image_uris, "pytorch")["versions"].items():
        for region in facts["registries"]:
            uri = catalog.training_image(region, "ml.g5.xlarge", version, facts["py_versions"][-1])
            found = catalog.image_facts(uri)
            assert catalog.uri_in_region(uri, region) == uri
            assert (found.framework_version, found.region) == (version, region)
            assert (found.python, found.device) == (facts["py_versions"][-1], "gpu")


@pytest.mark.parametrize(
    ("uri", "region", "expected"),
    [
        ("763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.1-gpu-py310", "eu-west-1", "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.0.1-gpu-py310"),
        ("763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training@sha256:01", "eu-central-2", "380420809688.dkr.ecr.eu-central-2.amazonaws.com/pytorch-training@sha256:01"),
        ("763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cpu", "cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.13-cpu"),
        ("520713654638.dkr.ecr.us-east-1.amazonaws.com/sagemaker-pytorch:1.1.0-gpu-py3", "cn-north-1", "422961961927.dkr.ecr.cn-north-1.amazonaws.com.cn/sagemaker-pytorch:1.1.0-gpu-py3"),
        ("763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.1-gpu-py310", "mars-1", None),
        ("123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1", "eu-west-1", None),
        ("public.ecr.aws/deep-learning-containers/pytorch-training:2.0.1-gpu-py310", "eu-west-1", None),
    ],
)  # fmt: skip
def test_an_image_of_awss_has_an_address_in_each_of_its_regions(uri, region, expected):
    assert catalog.uri_in_region(uri, region) == expected


def test_smddp_versions_have_images_and_its_instance_types_are_those_of_the_sdk(image_uris):
    from sagemaker import fw_utils

    versions = catalog.smddp_versions()
    assert (versions["2.0.0"], versions["2.0.1"], versions["2.3.0"], versions["2.5.1"]) == (
        "1.8.0",
        "2.0.1",
        "2.3.0",
        "2.6.0",
    )
    assert set(versions) <= set(known_to_sdk(image_uris, "pytorch")["versions"])
    allowed = set(fw_utils.SM_DATAPARALLEL_SUPPORTED_FRAMEWORK_VERSIONS["pytorch"])
    assert set(versions) - allowed == {"2.3.0", "2.4.0", "2.5.1"}, "these need image.uri; catalog.yaml says so"
    assert set(catalog.smddp_instance_types()) == set(fw_utils.SM_DATAPARALLEL_SUPPORTED_INSTANCE_TYPES) - {"local_gpu"}


def test_pins_are_those_of_the_constraints_file():
    constraints = dict(
        line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if "==" in line
    )
    pins = catalog.packages().pins
    assert set(pins) == {"timm", "safetensors", "simplejpeg", "opencv-python-headless"}
    assert dict(pins) == {name: constraints[name] for name in pins}


def test_images_hold_the_modules_that_entry_scripts_import():
    assert {"torch", "torchvision", "numpy", "PIL", "yaml", "psutil", "boto3", "sklearn"} <= catalog.packages().modules
    assert not {"timm", "safetensors", "simplejpeg", "cv2"} & catalog.packages().modules


def test_ends_are_there():
    assert catalog.closed_service("debugger").date == date(2026, 7, 30)
    assert catalog.closed_service("profiler").date == date(2027, 6, 30)
    assert catalog.closed_service("sdk_v2").date == date(2027, 7, 6)
    assert catalog.end_of_patch("2.0.0") == catalog.end_of_patch("2.0") == date(2024, 3, 15)
    assert catalog.end_of_patch("2.13") == date(2027, 7, 20)
    assert catalog.end_of_patch("1.13.1") is None


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("1.13.1", ("2.0", date(2024, 3, 15))),
        ("2.1.0", ("2.6", date(2026, 1, 29))),
        ("2.5.1", ("2.6", date(2026, 1, 29))),
        ("2.9.0", ("2.10", date(2027, 1, 21))),
        ("99.0", None),
    ],
)
def test_of_versions_whose_end_of_patches_is_unknown_that_of_the_next_newer_one_is(version, newer):
    assert catalog.next_end_of_patch(version) == newer


def test_every_part_of_the_file_has_a_date_and_a_source():
    text = (ROOT / "launcher/aws/catalog.yaml").read_text()
    for name, part in yaml.safe_load(text).items():
        assert isinstance(part["checked"], date), name
        addresses = part.get("sources") or [part.get("source")] + [
            entry["source"] for entry in part.values() if isinstance(entry, dict)
        ]
        addresses = [address for address in addresses if address]
        assert addresses and all(re.match(r"https://\S+$", address) for address in addresses), name


def test_importing_the_catalog_imports_neither_the_sdk_nor_yaml_and_reads_no_file():
    code = (
        "import sys, launcher; before = set(sys.modules)\n"
        "import launcher.aws.catalog as catalog\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(sorted(new), catalog._catalog.cache_info().currsize)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["['launcher']", "0"] or done.stdout.split() == ["[]", "0"]


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="this PyYAML has no libyaml")
def test_the_file_is_read_by_libyaml_where_it_is(monkeypatch):
    given, load = [], yaml.load
    monkeypatch.setattr(yaml, "load", lambda text, loader: given.append(loader) or load(text, loader))
    assert catalog._catalog.__wrapped__() == catalog._catalog()
    assert given[0] is yaml.CSafeLoader

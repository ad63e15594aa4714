"""The kit's configs for SageMaker as they are, and broken: every mistake at once, with its key and its fix."""

from __future__ import annotations

import re

import pytest

import launcher
from launcher.backends.plans import plan_config
from launcher.config.issues import Issue
from tests.conftest import ROOT, write_batch

STORIES = ("kt_food_tag", "hyundai_segmentation", "dali_imagenette")


TEACHER = "inputs.teacher={s3: s3://amzn-s3-demo-bucket/teacher/}"


BROKEN = {
    "kt_food_tag": [
        (["compute.instance_type=ml.g5.48xlarge"], "distribution", "smddp on ml.g5.48xlarge", "torchrun"),
        (['image={framework_version: "2.6.0", python: py312}'], "distribution", "smddp with PyTorch 2.6.0", "torchrun"),
        (["compute.use_spot_instance=true"], "compute.use_spot_instance", "unknown key", "did you mean compute.spot"),
        (["compute.spot=true"], "compute.spot", "spot without checkpoints, for up to 60 h", "add checkpoints"),
        (["debugger={}"], "debugger", "frozen teacher", "remove debugger"),
        (["region=eu-west-1"], "image.uri", "an image in us-west-2 for a job in eu-west-1", "write 763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.0.0-gpu-py310"),
        (["hyperparameters.global_batch_size=1000"], "hyperparameters.global_batch_size", "1000 images do not divide evenly among 32 processes", "992 or 1024"),
        (["hyperparameters.temprature=4"], "hyperparameters.temprature", "has no such hyperparameter", "did you mean temperature?"),
        (["name=kt_food_tag"], "name", "kt_food_tag", "write name: kt-food-tag"),
        (["profiling.profiler.cpu_seconds=0"], "profiling.profiler.cpu_seconds", "0", "cpu_seconds: 3600"),
    ],
    "hyundai_segmentation": [
        (["network.subnets=[]", "network.security_groups=[]"], "inputs.train", "FSx for Lustre without network.subnets", "add network"),
        (["inputs.train={fsx: fs-0123456789abcdef0}"], "inputs.train", "fsx without path", "name a folder of the file system"),
        (["inputs.train.mode=FastFile"], "inputs.train", "mode with fsx", "remove mode"),
        (["compute.instance_type=ml.p4.24xlarge"], "compute.instance_type", "no such instance type", "did you mean ml.p4d.24xlarge?"),
        (["compute.spot=true", "compute.max_wait_hours=6", "checkpoints=s3://amzn-s3-demo-bucket/c"], "compute.max_wait_hours", "6 h, less than max_hours (12 h)", "max_wait_hours: 24"),
        (["compute.spot=true", "compute.keep_alive_minutes=30"], "compute.keep_alive_minutes", "a warm pool with spot", "remove keep_alive_minutes or spot"),
        (["profiling.system_interval_ms=250"], "profiling.system_interval_ms", "250", "system_interval_ms: 500"),
        (["network.isolation=true"], "network.isolation", "holds requirements.txt", "image"),
    ],
    "dali_imagenette": [
        (["distribution=smddp"], "distribution", "smddp on ml.p3.2xlarge", "torchrun"),
        (['image={framework_version: "1.8.1", python: py36}'], "image", "PyTorch 1.8.1 with py36", "2.0.1"),
        (["compute.instance_count=2"], "distribution", "none, with 2 hosts", "torchrun"),
        (["profiling.rules={ProfilerRaport: {}}"], "profiling.rules.ProfilerRaport", "no such rule", "did you mean ProfilerReport?"),
        (["region=ap-southeast-7"], "profiling.rules", "no image sagemaker-debugger-rules:latest", "do without its rules"),
        (["inputs.train.mode=Pipe"], "inputs.train.mode", "this kit's scripts read files", "FastFile"),
        (["output=s3://Bucket/runs"], "output", "s3://Bucket/runs", "s3://bucket/prefix"),
    ],
}  # fmt: skip


def issues_of(config: str, overrides: list[str]) -> list[Issue]:
    try:
        return list(plan_config(ROOT / "configs" / f"{config}.yaml", overrides, on="aws").issues)
    except launcher.UserError as error:
        return list(error.issues)


@pytest.mark.parametrize(
    ("config", "overrides", "key", "found", "fix"),
    [(config, *case) for config, cases in BROKEN.items() for case in cases],
    ids=str,
)
def test_a_broken_variant_of_a_story_is_refused(config, overrides, key, found, fix):
    errors = [issue for issue in issues_of(config, overrides) if issue.level == "error"]
    assert [
        issue for issue in errors if issue.key.split(" (line")[0] == key and found in issue.found and fix in issue.fix
    ], "\n".join(map(str, errors))


@pytest.mark.parametrize(("config", "overrides"), [*((story, []) for story in STORIES), ("quickstart", [TEACHER])])
def test_the_configs_as_they_stand_are_not_refused(config, overrides, tmp_path, monkeypatch):
    for split in ("train", "validation"):
        write_batch(tmp_path / "data/digits" / split)
    monkeypatch.chdir(tmp_path)
    assert [str(issue) for issue in issues_of(config, overrides) if issue.level == "error"] == []


def test_an_image_older_than_one_without_patches_is_warned_of_although_its_own_end_is_unknown():
    warned = [
        issue
        for issue in issues_of("remote_teacher", ['image={framework_version: "2.3.0", python: py311}'])
        if issue.key == "image"
    ]
    assert [(one.level, one.found) for one in warned] == [
        (
            "warning",
            "AWS's image of PyTorch 2.3.0 has no known end of security patches; those of the newer 2.6 ended on 2026-01-29",
        )
    ]
    assert warned[0].fix.startswith('write image: {framework_version: "2.')


def test_many_mistakes_in_one_config_come_all_at_once(tmp_path):
    config = tmp_path / "broken.yaml"
    config.write_text(
        """
name: my_job
script: train_classifier.py
role: SageMakerTraining
region: us-west-2
use_spot_instances: true
compute: {instance_type: ml.g5.12xlarge, instance_count: 2, max_wait_hours: 5, keep_alive_minutes: 10, spot: true}
distribution: smddp
image: {framework_version: "2.6.0", python: py312}
inputs:
  train: {fsx: fs-0123456789abcdef0, path: /fsx/train}
  validation: {s3: s3://amzn-s3-demo-bucket/v/, mode: Pipe}
output: s3://amzn-s3-demo-bucket/runs
tags: {"aws:team": vision}
metrics: {loss: "loss [0-9]+"}
environment: {SM_MODEL_DIR: /tmp}
profiling: {rules: {ProfilerRaport: {}}}
hyperparameters: {model: resnet18, epohcs: 3, global_batch_size: 30, note: "%s"}
"""
        % ("x" * 2500)
    )
    with pytest.raises(launcher.UserError) as refused:
        plan_config(config, on="aws")
    keys = [issue.key.partition(" (line")[0] for issue in refused.value.issues]
    assert sorted(keys) == sorted([
        "name", "role", "use_spot_instances",
        "compute.spot", "compute.max_wait_hours", "compute.keep_alive_minutes", "distribution", "distribution",
        "inputs.train", "inputs.validation.mode", "tags.aws:team", "metrics.loss", "environment.SM_MODEL_DIR",
        "profiling.rules.ProfilerRaport", "hyperparameters.epohcs", "hyperparameters.global_batch_size",
        "hyperparameters.note",
    ])  # fmt: skip
    assert str(refused.value).startswith(f"{len(keys)} mistakes in {config}:")


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ("ml.g5.2xlage", "ml.g5.2xlarge"),
        ("ml.g5.3xlarge", "ml.g5.2xlarge"),
        ("ml.p4.24xlarge", "ml.p4d.24xlarge"),
        ("ml.p3.24xlarge", "ml.p3.16xlarge"),
        ("ml.g55.2xlarge", "ml.g5.2xlarge"),
        ("ml.p4d.2xlarge", None),
        ("ml.gpu.big", None),
        ("g5.2xlarge", "ml.g5.2xlarge"),
        ("ML.G5.2xlarge", "ml.g5.2xlarge"),
        ("big", "ml.g5.xlarge"),
    ],
)
def test_a_suggested_instance_type_is_the_one_meant_and_none_is_larger(asked, suggested):
    [issue] = [
        issue
        for issue in issues_of("quickstart", [TEACHER, f"compute.instance_type={asked}"])
        if "instance_type" in issue.key
    ]
    offered = re.findall(r"ml\.[a-z0-9-]+\.\w+", issue.fix)
    assert offered == ([suggested] if suggested else []), issue


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("compute.instance_count=0", "write instance_count: 1"),
        ("compute.instance_count=5000", "write instance_count: 1000"),
        ("compute.volume_gb=0", "write volume_gb: 1"),
    ],
)
def test_a_suggested_number_is_the_nearest_valid_one(override, fix):
    assert fix in {issue.fix for issue in issues_of("quickstart", [TEACHER, override])}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("sagemaker", "aws"), ("SageMaker", "aws"), ("AWS", "aws"), ("local", "process"), ("container", "docker")],
)
def test_a_backend_by_another_name_suggests_the_one_meant(asked, meant):
    with pytest.raises(launcher.UserError) as refused:
        plan_config(ROOT / "configs/quickstart.yaml", on=asked)
    assert refused.value.issues[0].fix == f"write --on {meant}"


PLACEHOLDERS = {
    "kt_food_tag": "role, output, inputs.train, inputs.validation, inputs.teacher",
    "hyundai_segmentation": "role, output, inputs.validation, network.subnets, network.security_groups, inputs.train",
    "dali_imagenette": "role, output, inputs.train, inputs.validation",
}


@pytest.mark.parametrize(("config", "keys"), PLACEHOLDERS.items())
def test_the_configs_placeholders_are_named_in_their_plan(config, keys):
    [issue] = [issue for issue in issues_of(config, []) if "placeholder" in issue.found]
    assert issue.level == "warning" and f": {keys};" in issue.found and "replace them by yours" in issue.fix


def test_what_is_the_users_own_is_no_placeholder():
    own = [
        "role=arn:aws:iam::111122223333:role/R",
        "output=s3://bucket-of-vision/x",
        TEACHER.replace("amzn-s3-demo-", "team-"),
    ]
    assert [issue for issue in issues_of("quickstart", own) if "placeholder" in issue.found] == []

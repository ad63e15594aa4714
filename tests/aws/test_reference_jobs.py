"""The reference jobs: training jobs of AWS's public examples, which preflight accepts and which send what the SDK alone would send."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import launcher
from launcher.aws import request
from launcher.aws.submit import comparable
from launcher.config.metrics import metric_table
from tests.aws.conftest import complaints, sagemaker_session, sent_by

ENTRIES = yaml.safe_load(Path(__file__).with_name("reference_jobs.yaml").read_text(encoding="utf-8"))
REGION = "us-west-2"
ROLE = "arn:aws:iam::123456789012:role/SageMakerTraining"

COMPLETION = {
    "debugger_hook_config": False,  # Debugger is closed to new customers: on only where a job asks for it
    "disable_profiler": True,  # the same service samples the system metrics, and writes them to S3
    "metric_definitions": metric_table().sagemaker_metrics(),  # the numbers of this kit's metric line, for scripts that print it
    "output_path": "s3://amzn-s3-demo-bucket/",  # the SDK would ask AWS for the account's own bucket, which a plan may not
    "enable_sagemaker_metrics": None,  # with an image by its address: the SDK goes by a version that the image need not have
}
"""What this kit sets or asks for where an example says nothing about it, and the SDK would do otherwise."""


def named(entry: Mapping[str, Any]) -> str:
    return entry["job"]["name"]


@pytest.fixture(params=ENTRIES, ids=named)
def entry(request) -> dict[str, Any]:
    return request.param


@pytest.fixture
def planned(entry, tmp_path) -> launcher.Plan:
    """The example's job, planned for SageMaker with a script of the user's own."""
    script = tmp_path / "source" / entry["job"]["script"]
    script.parent.mkdir(parents=True)
    script.write_text('print("training")\n')
    common = {"role": ROLE, "region": REGION, "source": str(tmp_path / "source")}
    return launcher.plan(launcher.from_values({**common, **entry["job"]}), on="aws")


def test_preflight_refuses_no_reference_job(planned, entry):
    assert not planned.errors, "\n".join([entry["source"], *map(str, planned.errors)])
    assert planned.request is not None
    assert complaints(planned.request) == []


def test_a_reference_job_sends_what_the_sdk_alone_sends(planned, entry):
    made = estimator(entry["sdk"], request.code_uri(planned.job, planned.name))
    sent = sent_by(made, inputs(entry["sdk"].get("inputs", {})), planned.name)
    assert comparable(without_chance(planned.request)) == comparable(without_chance(sent))


def test_reference_jobs_are_many_and_name_their_public_source():
    assert len(ENTRIES) >= 12
    assert len({named(entry) for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert set(entry) == {"source", "says", "job", "sdk"}
        assert entry["source"].startswith(
            ("https://github.com/aws/", "https://github.com/aws-samples/", "https://docs.a")
        )


def estimator(arguments: Mapping[str, Any], code: str) -> Any:
    """The SDK's own estimator from an entry's plain data, without this kit's."""
    from sagemaker.huggingface import HuggingFace
    from sagemaker.instance_group import InstanceGroup
    from sagemaker.pytorch import PyTorch

    given = {name: value for name, value in arguments.items() if name not in ("estimator", "inputs")}
    completion = dict(COMPLETION)
    if "profiler_config" in given:
        del completion["disable_profiler"]
    if "image_uri" not in given:
        del completion["enable_sagemaker_metrics"]
    given = {**completion, **given}
    given["metric_definitions"] = [
        {"Name": name, "Regex": regex} for name, regex in given["metric_definitions"].items()
    ]
    if "tags" in given:
        given["tags"] = [{"Key": name, "Value": value} for name, value in given["tags"].items()]
    if "instance_groups" in given:
        groups = {group[0]: InstanceGroup(*group) for group in given["instance_groups"]}
        given["instance_groups"] = list(groups.values())
        if "instance_groups" in given.get("distribution", {}):
            chosen = [groups[name] for name in given["distribution"]["instance_groups"]]
            given["distribution"] = {**given["distribution"], "instance_groups": chosen}
    kind = {"HuggingFace": HuggingFace}.get(arguments.get("estimator", ""), PyTorch)
    return kind(**given | debugging(given), role=ROLE, source_dir=code, sagemaker_session=sagemaker_session(REGION))


def debugging(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments about Debugger and the profilers, as the SDK's objects."""
    from sagemaker.debugger import (
        CollectionConfig,
        DebuggerHookConfig,
        Profiler,
        ProfilerConfig,
        ProfilerRule,
        rule_configs,
    )

    made: dict[str, Any] = {}
    if given["debugger_hook_config"]:
        collections = [CollectionConfig(*item) for item in given["debugger_hook_config"].items()]
        made["debugger_hook_config"] = DebuggerHookConfig(collection_configs=collections)
    if "profiler_config" in given:
        config = dict(given["profiler_config"])
        if "profile_params" in config:
            config["profile_params"] = Profiler(**config["profile_params"])
        made["profiler_config"] = ProfilerConfig(**config)
    if "rules" in given:
        made["rules"] = [
            ProfilerRule.sagemaker(getattr(rule_configs, name)(**parameters))
            for name, parameters in given["rules"].items()
        ]
    return made


def inputs(channels: Mapping[str, Any]) -> dict[str, Any]:
    """What fit() takes: an S3 address as it is, else the SDK's object for data in S3 or on a file system."""
    from sagemaker.inputs import FileSystemInput, ShuffleConfig, TrainingInput

    made: dict[str, Any] = {}
    for name, given in channels.items():
        if isinstance(given, str):
            made[name] = given
        elif "file_system_id" in given:
            made[name] = FileSystemInput(**given)
        else:
            shuffled = {"shuffle_config": ShuffleConfig(given["shuffle_config"])} if "shuffle_config" in given else {}
            made[name] = TrainingInput(**{**given, **shuffled})
    return made


def without_chance(sent: Mapping[str, Any]) -> dict[str, Any]:
    """A request without the time and the random end that both sides put into the name of SageMaker Profiler's processing job."""
    rules = [
        {**rule, "RuleConfigurationName": rule["RuleConfigurationName"].split("-")[0]}
        for rule in sent.get("ProfilerRuleConfigurations", [])
    ]
    return {**sent, "ProfilerRuleConfigurations": rules} if rules else dict(sent)

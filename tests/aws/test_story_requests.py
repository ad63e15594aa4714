"""The three stories' configs send what the stories' own code sends, written here with the SDK directly.

Where a story leaves out what SageMaker needs, the config's value completes it; each such field is named below.
"""

from __future__ import annotations

import re

import pytest
from sagemaker import Profiler, ProfilerConfig
from sagemaker.debugger import ProfilerRule, rule_configs
from sagemaker.inputs import FileSystemInput, TrainingInput
from sagemaker.pytorch import PyTorch

import launcher
from launcher.aws import request
from tests.aws.conftest import sagemaker_session, sent_by
from tests.conftest import ROOT

ROLE = "arn:aws:iam::123456789012:role/SageMakerTraining"
REGION = "us-west-2"


def completed(job: launcher.Job, plan: launcher.Plan) -> dict:
    """What the stories' estimators leave out, and this kit's choice for it."""
    return {
        "role": ROLE,
        "sagemaker_session": sagemaker_session(REGION),
        "hyperparameters": dict(job.hyperparameters),
        "output_path": job.output,
        "max_run": request.seconds(job.compute.max_hours),
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in request.metrics(job).items()],
        "debugger_hook_config": False,  # the SDK adds Debugger's tensor hook unasked, which fails on a frozen teacher
        "source_dir": request.code_uri(job, plan.name),  # uploaded by this kit, the same bytes each time
    }


def without_times(sent: dict) -> dict:
    """A request in which the SDK's own time in the name of Profiler's processing job stands still."""
    text = re.sub(r"DetailedProfilerProcessingJobConfig-[\w-]+", "DetailedProfilerProcessingJobConfig", repr(sent))
    return eval(text)  # noqa: S307 - a literal of our own


@pytest.fixture
def story(tmp_path, monkeypatch):
    """A config's job and plan, with the story's own script in the place of this kit's."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print('the story does not show its whole script')\n")

    def load(name: str) -> tuple[launcher.Job, launcher.Plan]:
        overrides = [f"source={tmp_path / 'src'}", "script=train.py"]
        job = launcher.load(ROOT / "configs" / f"{name}.yaml", overrides)
        plan = launcher.plan(job, on="aws")
        assert plan.errors == ()
        return job, plan

    return load


def test_kts_config_sends_what_kts_estimator_sends(story):
    job, plan = story("kt_food_tag")
    # the story defines this list and never passes it: its request carries Profiler's own processing job alone
    rules = [ProfilerRule.sagemaker(rule_configs.ProfilerReport())]
    profiler_config = ProfilerConfig(profile_params=Profiler(cpu_profiling_duration=3600))
    image_uri = (
        f"763104351884.dkr.ecr.{REGION}.amazonaws.com/pytorch-training:2.0.0-gpu-py310-cu118-ubuntu20.04-sagemaker"
    )
    estimator = PyTorch(
        entry_point="train.py",
        image_uri=image_uri,
        instance_count=4,
        instance_type="ml.p4d.24xlarge",
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
        profiler_config=profiler_config,
        **completed(job, plan),
    )
    channels = {name: TrainingInput(given.s3, input_mode=given.mode) for name, given in job.inputs.items()}  # not shown
    sent = sent_by(estimator, channels, plan.name)
    assert without_times(plan.request) == without_times(sent)
    assert [rule["RuleParameters"]["rule_to_invoke"] for rule in sent["ProfilerRuleConfigurations"]] == [
        "DetailedProfilerProcessing"
    ]
    assert rules[0].name == "ProfilerReport"


@pytest.mark.parametrize("storage", ["fsx", "s3"])
def test_hyundais_config_sends_what_hyundais_estimator_sends(story, storage, tmp_path):
    job, plan = story("hyundai_segmentation")
    if storage == "s3":
        overrides = [f"source={job.source}", "script=train.py", "inputs.train={s3: s3://your-bucket-name/prefix/}"]
        job = launcher.load(ROOT / "configs" / "hyundai_segmentation.yaml", overrides)
        plan = launcher.plan(job, on="aws")
    profiler_config = ProfilerConfig(system_monitor_interval_millis=500)
    estimator = PyTorch(
        instance_count=4,
        instance_type="ml.p4d.24xlarge",
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
        profiler_config=profiler_config,
        entry_point="train.py",  # the rest is not shown
        framework_version="2.0.0",
        py_version="py310",
        subnets=["subnet-0123456789abcdef0"],
        security_group_ids=["sg-0123456789abcdef0"],
        **completed(job, plan),
    )
    train_fs = FileSystemInput(
        file_system_id="fs-0123456789abcdef0",
        file_system_type="FSxLustre",
        directory_path="/fsx/",
        file_system_access_mode="ro",
    )
    train = train_fs if storage == "fsx" else "s3://your-bucket-name/prefix/"
    validation = TrainingInput(job.inputs["validation"].s3, input_mode="FastFile")  # not shown
    sent = sent_by(estimator, {"train": train, "validation": validation}, plan.name)
    assert plan.request == sent


def test_the_dali_posts_config_sends_what_its_text_describes(story):
    job, plan = story("dali_imagenette")
    estimator = PyTorch(
        instance_count=1,
        instance_type="ml.p3.2xlarge",
        profiler_config=ProfilerConfig(
            system_monitor_interval_millis=500
        ),  # "we measure … system metrics with Debugger"
        rules=[ProfilerRule.sagemaker(rule_configs.ProfilerReport())],
        entry_point="train.py",
        framework_version="2.6.0",  # the post's 1.8.1 cannot run this kit's scripts, nor DALI of today
        py_version="py312",
        **completed(job, plan),
    )
    assert (job.hyperparameters["epochs"], job.hyperparameters["global_batch_size"], job.hyperparameters["model"]) == (
        2,
        32,
        "resnet18",
    )
    channels = {name: given.s3 for name, given in job.inputs.items()}
    assert plan.request == sent_by(estimator, channels, plan.name)

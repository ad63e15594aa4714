"""The request: equal to what SDK v2 sends, accepted by botocore's service model, for every config and for generated jobs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import launcher
from launcher.aws import catalog, estimator, request
from launcher.aws.submit import comparable
from launcher.backends.aws import Aws
from launcher.config.metrics import metric_table
from tests.aws.conftest import complaints, sagemaker_session, sent_by
from tests.aws.generated_jobs import BASE, CONFIGS, NAME, jobs, planned, uploaded


def by_the_sdk(job: launcher.Job) -> dict:
    made = estimator.estimator(job, NAME, sagemaker_session(job.region))
    return sent_by(made, estimator.inputs(job, uploaded(job)), NAME)


@pytest.mark.parametrize("smoke", [False, True], ids=["full", "smoke"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.stem)
def test_every_config_sends_what_sdk_v2_sends_and_botocore_accepts(config, smoke):
    job = launcher.load(config, smoke=smoke)
    assert comparable(planned(job)) == comparable(by_the_sdk(job))
    assert complaints(planned(job)) == []


@pytest.mark.parametrize("examples", [25, pytest.param(150, marks=pytest.mark.slow)])
def test_generated_jobs_send_what_sdk_v2_sends_and_botocore_accepts(examples):
    @settings(max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(jobs())
    def same(job):
        assert comparable(planned(job)) == comparable(by_the_sdk(job))
        assert complaints(planned(job)) == []

    same()


def test_the_estimator_takes_jobs_that_the_sdks_own_lists_refuse():
    """torchrun on a CPU host, and PyTorch 2.4.0: SDK v2 refuses both by their version, not by their image."""
    cpu = launcher.from_values({**BASE, "distribution": "torchrun", "compute": {"instance_type": "ml.m5.xlarge"}})
    older = launcher.from_values(
        {**BASE, "distribution": "torchrun", "image": {"framework_version": "2.4.0", "python": "py311"}}
    )
    for job in (cpu, older):
        assert by_the_sdk(job) == planned(job)


def test_profilers_processing_job_stays_beside_other_rules():
    """SDK v2 drops it as soon as any rule is given, and nothing is made of what was recorded."""
    rules = {"profiler": {}, "rules": {"ProfilerReport": {}}}
    job = launcher.from_values({**BASE, "profiling": rules})
    invoked = [rule["RuleParameters"]["rule_to_invoke"] for rule in planned(job)["ProfilerRuleConfigurations"]]
    assert invoked == ["DetailedProfilerProcessing", "ProfilerReport"]


def test_profiling_and_debugger_are_off_unless_asked_for():
    sent = planned(launcher.from_values(BASE))
    assert sent["ProfilerConfig"] == {"DisableProfiler": True}
    assert not {"DebugHookConfig", "ProfilerRuleConfigurations", "DebugRuleConfigurations"} & set(sent)


def test_hyperparameters_survive_quotes_and_types():
    tricky = {"name": 'it\'s "so" $HOME', "flag": False, "nothing": None, "sizes": [1, 2], "rate": 1e-3}
    sent = planned(launcher.from_values({**BASE, "hyperparameters": tricky}))["HyperParameters"]
    assert {name: sent[name] for name in tricky} == {"name": '"it\'s \\"so\\" $HOME"', "flag": "false", "nothing": "null", "sizes": "[1, 2]", "rate": "0.001"}  # fmt: skip


def test_rule_parameters_are_the_ones_of_smdebugs_package():
    from sagemaker.debugger import rule_configs

    for name, parameters in request.rule_defaults().items():
        own = dict(getattr(rule_configs, name)().rule_parameters)
        assert own.pop("rule_to_invoke") == name
        assert own == parameters


def test_metric_expressions_read_the_line_that_the_scripts_print():
    import re

    from training.runtime.reporting import metric_line

    values = {"loss": 0.1234, "label_loss": 0.5, "teacher_loss": 0.25, "feature_loss": 0.125, "labels_computed": 12, "learning_rate": 1e-3, "images/s": 512.3, "mfu": 0.33, "validation_loss": 0.7, "validation_accuracy": 0.9, "validation_miou": 0.5, "validation_pixel_accuracy": 0.6, "validation_top5_accuracy": 0.99, "teacher_top1_agreement": 0.8, "teacher_kl": 0.3, "teacher_share": 0.4, "data_wait_s": 0.002, "student_forward_s": 0.05, "backward_s": 0.1}  # fmt: skip
    line = metric_line(3, 60, 40, 1260, values)
    read = {name: float(re.search(regex, line)[1]) for name, regex in metric_table().sagemaker_metrics().items()}
    assert read.pop("images_per_second") == 512.3
    assert read == {name: value for name, value in values.items() if name != "images/s"}


@pytest.mark.parametrize("instance_type", ["ml.p4d.24xlarge", "ml.m5.large"])
def test_world_size_and_command_follow_the_instance_type(instance_type):
    job = launcher.from_values(
        {**BASE, "distribution": "torchrun", "compute": {"instance_type": instance_type, "instance_count": 3}}
    )
    gpus = max(1, catalog.instance(instance_type).gpus)
    assert Aws().world_size(job) == 3 * gpus
    assert " ".join(Aws().hosts(job)[1].command).startswith(f"torchrun --nnodes 3 --nproc_per_node {gpus} --master_addr algo-1 --master_port 7777 --node_rank 1 train.py")  # fmt: skip

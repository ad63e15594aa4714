"""Where SDK v3 is installed in place of v2: its ModelTrainer sends the planned request, and all else of the kit works. `make compat-v3`"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
from typing import Any

import boto3
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import launcher
from launcher.aws import model_trainer
from launcher.commands import doctor
from tests.aws.conftest import TRAINS, Sent, complaints, described, started
from tests.aws.generated_jobs import BASE, CONFIGS, NAME, jobs, planned
from tests.docs.documents import the_block
from tests.local_mode.conftest import no_network


def test_sdk_v3_is_here_in_place_of_v2():
    assert importlib.metadata.version("sagemaker-train").startswith("1.")
    assert importlib.util.find_spec("sagemaker.pytorch") is None


def sent_by_the_trainer(job: launcher.Job) -> dict[str, Any]:
    """What `train()` gives to botocore, which then sends nothing."""

    def stop(params: dict[str, Any], **_: Any) -> None:
        raise Sent(dict(params))

    boto_session = boto3.Session(region_name=job.region, aws_access_key_id="testing", aws_secret_access_key="testing")
    boto_session.events.register("before-parameter-build.sagemaker.CreateTrainingJob", stop)
    trainer = model_trainer.model_trainer(job, planned(job), boto_session)
    with pytest.raises(Sent) as sent:
        trainer.train(wait=False, logs=False)
    return sent.value.params


def supported(request: dict[str, Any]) -> dict[str, Any]:
    """A planned request without the three parts that a ModelTrainer cannot express, by the docstring of `Plan.model_trainer`."""
    made = copy.deepcopy(request)
    del made["TrainingJobName"]
    assert made.pop("ProfilerConfig") == {"DisableProfiler": True}
    made["AlgorithmSpecification"].pop("EnableSageMakerMetricsTimeSeries", None)
    return made


def same(job: launcher.Job) -> None:
    sent = sent_by_the_trainer(job)
    assert sent.pop("TrainingJobName").startswith(job.name)
    assert sent == supported(planned(job))
    assert complaints({**sent, "TrainingJobName": NAME}) == []


@pytest.mark.parametrize("smoke", [False, True], ids=["full", "smoke"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.stem)
def test_every_config_sends_its_planned_request(config, smoke):
    job = launcher.load(config, smoke=smoke)
    same(job.model_copy(update={"profiling": None, "debugger": None}))


def test_generated_jobs_send_their_planned_requests():
    @settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(jobs())
    def check(job):
        same(job.model_copy(update={"profiling": None, "debugger": None}))

    check()


def test_the_estimator_of_sdk_v2_is_refused_with_the_way_on(sagemaker_job):
    with pytest.raises(
        launcher.UserError, match=r"(?s)which has no estimator.*plan.model_trainer\(\), or an environment of its own"
    ):
        launcher.plan(sagemaker_job("print(1)"), on="aws").estimator()
    assert any(need.found.startswith("sagemaker-train 1.") for need in doctor.look() if need.subject == "SageMaker SDK")


@pytest.mark.parametrize("key", [None, "testing"])
def test_a_trainer_is_made_with_and_without_credentials_and_asks_nothing(monkeypatch, key):
    """SDK v3 would ask IAM what the role may do."""
    monkeypatch.setattr("socket.socket.connect", no_network)
    job = launcher.from_values(BASE)
    boto_session = boto3.Session(region_name=job.region, aws_access_key_id=key, aws_secret_access_key=key)
    trainer = model_trainer.model_trainer(job, planned(job), boto_session)
    assert trainer.role == job.role and model_trainer.ROLE_CHECK not in os.environ


def test_a_trainers_job_runs_on_the_emulator_and_is_followed(sagemaker_job, data):
    job = sagemaker_job(
        TRAINS, inputs={"train": {"folder": str(data)}}, hyperparameters={"name": "it's", "deep": True, "rate": 0.1}
    )
    plan = launcher.plan(job, on="aws")
    launcher.upload(plan)
    there: dict[str, Any] = {"launcher": launcher, "plan": plan}
    exec(the_block("python", "trainer = plan.model_trainer()"), there)  # docs/sagemaker.md
    run = there["run"]
    assert run.wait(120) == "Completed", run.outcome()
    assert run.result() == {"validation_accuracy": 0.9}
    parameters = described(run.name)["HyperParameters"]
    assert (parameters["name"], parameters["deep"], parameters["rate"]) == ('"it\'s"', "true", "0.1")
    assert "read ['a.txt', 'b ü.txt']" in [line for _, line in run.logs()]


def test_launcher_runs_a_job_by_boto3_and_follows_it(sagemaker_job, data):
    run = started(sagemaker_job(TRAINS, inputs={"train": {"folder": str(data)}}))
    assert run.wait(120) == "Completed", run.outcome()
    assert run.result() == {"validation_accuracy": 0.9} and run.metrics()

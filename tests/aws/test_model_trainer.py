"""`plan.model_trainer()` where SDK v3 is not installed, and what it refuses. tests/aws/sdk_v3 has the rest, for `make compat-v3`."""

from __future__ import annotations

import importlib.metadata

import pytest

import launcher
from launcher.aws import model_trainer, sdk
from launcher.commands import doctor
from tests.aws.generated_jobs import BASE, planned
from tests.aws.jobs import changed


def test_beside_sdk_v2_it_is_refused_with_both_ways_on(good):
    with pytest.raises(launcher.UserError) as refused:
        launcher.plan(launcher.from_values(good), on="aws").model_trainer()
    [issue] = refused.value.issues
    assert issue.found == f"sagemaker {importlib.metadata.version('sagemaker')} is installed, which has no ModelTrainer"
    assert issue.fix.startswith("plan.estimator(), or an environment of its own with pip install 'sagemaker>=3")


@pytest.mark.parametrize(
    ("installed", "estimator", "trainer", "doctor_says"),
    [
        ({}, "not installed: sagemaker", "not installed: sagemaker-train", "not installed; boto3"),
        ({"sagemaker": "2.257.7"}, None, "sagemaker 2.257.7 is installed", "2.257.7"),
        ({"sagemaker": "2.100.0"}, "sagemaker 2.100.0 is installed", "sagemaker 2.100.0", "2.100.0; boto3"),
        ({"sagemaker": "3.27.0", "sagemaker-train": "1.27.0"}, "sagemaker-train 1.27.0", None, "sagemaker-train 1.27.0; boto3"),
        ({"sagemaker-train": "1.28.1"}, "sagemaker-train 1.28.1", None, "sagemaker-train 1.28.1; boto3"),
        ({"sagemaker-train": "1.2.0"}, "sagemaker-train 1.2.0", "sagemaker-train 1.2.0 is installed", "sagemaker-train 1.2.0; boto3"),
        # pip lets one be installed over the other, and then v2's package hides what v3 needs
        ({"sagemaker": "2.257.7", "sagemaker-train": "1.27.0"}, None, "sagemaker 2.257.7 is installed", "2.257.7"),
    ],
)  # fmt: skip
def test_each_sdk_alone_beside_the_other_and_too_old(monkeypatch, installed, estimator, trainer, doctor_says):
    monkeypatch.setattr(sdk, "_version", installed.get)
    for require, refused in ((sdk.require_v2, estimator), (sdk.require_v3, trainer)):
        if refused is None:
            require()
            continue
        with pytest.raises(launcher.UserError) as raised:
            require()
        [issue] = raised.value.issues
        assert issue.found.startswith(refused) and "pip install" in issue.fix
        assert ("plan." in issue.fix) == (bool(sdk.v3()) if require is sdk.require_v2 else bool(sdk.v2()))
    [need] = [need for need in doctor.look() if need.subject == "SageMaker SDK"]
    assert need.found.startswith(doctor_says) and need.state == "ok"


def test_a_plan_with_errors_or_for_another_backend_has_none(good):
    with pytest.raises(launcher.UserError, match="instance_type"):
        launcher.plan(
            launcher.from_values(changed(good, {"compute.instance_type": "ml.p99.large"})), on="aws"
        ).model_trainer()
    for backend in ("process", "docker"):
        job = launcher.from_values({"name": "test", "script": "train.py", "source": good["source"]})
        with pytest.raises(launcher.UserError, match=f"a plan for {backend} has no ModelTrainer"):
            launcher.plan(job, on=backend).model_trainer()


def test_what_a_trainer_cannot_express_is_refused_all_at_once():
    job = launcher.from_values({**BASE, "profiling": {"system_interval_ms": 500}, "debugger": {"collections": {}}})
    with pytest.raises(launcher.UserError) as refused:
        model_trainer.model_trainer(job, planned(job), None)
    assert [issue.key for issue in refused.value.issues] == ["profiling", "debugger"]
    assert all(f"remove {issue.key}, or use launcher.run(plan)" == issue.fix for issue in refused.value.issues)

"""`plan.model_trainer()` where SDK v3 is not installed, and what it refuses. tests/aws/sdk_v3 has the rest, for `make compat-v3`."""

from __future__ import annotations

import pytest

import launcher
from launcher.aws import model_trainer
from tests.aws.generated_jobs import BASE, planned
from tests.aws.jobs import changed


def test_beside_sdk_v2_it_is_refused_with_both_ways_on(good):
    with pytest.raises(launcher.UserError) as refused:
        launcher.plan(launcher.from_values(good), on="aws").model_trainer()
    [issue] = refused.value.issues
    assert issue.found == "not installed: sagemaker-train"
    assert "pip install 'sagemaker>=3'" in issue.fix and "plan.estimator()" in issue.fix


def test_a_plan_with_errors_or_for_another_backend_has_none(good):
    with pytest.raises(launcher.UserError, match="instance_type"):
        launcher.plan(
            launcher.from_values(changed(good, {"compute.instance_type": "ml.p99.large"})), on="aws"
        ).model_trainer()
    for backend in ("process", "docker"):
        job = launcher.from_values({"name": "test", "script": "train.py", "source": good["source"]})
        with pytest.raises(launcher.UserError, match=f"a plan for {backend} has no ModelTrainer"):
            launcher.plan(job, on=backend).model_trainer()


def test_what_a_trainer_has_no_word_for_is_refused_all_at_once():
    job = launcher.from_values({**BASE, "profiling": {"system_interval_ms": 500}, "debugger": {"collections": {}}})
    with pytest.raises(launcher.UserError) as refused:
        model_trainer.model_trainer(job, planned(job), None)
    assert [issue.key for issue in refused.value.issues] == ["profiling", "debugger"]
    assert all(f"remove {issue.key}, or use launcher.run(plan)" == issue.fix for issue in refused.value.issues)

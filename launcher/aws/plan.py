"""A plan for SageMaker: a summary of its request, and the SDK's own objects for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.aws import estimator, model_trainer, sdk, session
from launcher.planner.plan import Plan, refuse_errors


@dataclass(frozen=True, repr=False)
class SageMakerPlan(Plan):
    """A Plan that SageMaker's SDK can run too."""

    def estimator(self, boto_session: Any = None) -> tuple[Any, dict[str, Any]]:
        refuse_errors(self)
        sdk.require_v2()
        boto_session = boto_session or session.boto_session(str(self.job.region))
        made = estimator.estimator(self.job, self.name, estimator.session(self.job, boto_session))
        return made, estimator.inputs(self.job, self.channels)

    def model_trainer(self, boto_session: Any = None) -> Any:
        refuse_errors(self)
        sdk.require_v3()
        assert self.request is not None
        boto_session = boto_session or session.boto_session(str(self.job.region))
        return model_trainer.model_trainer(self.job, self.request, boto_session)


def summary(request: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of what only the CreateTrainingJob request holds, for the printed plan."""
    about = {
        "image": request["AlgorithmSpecification"]["TrainingImage"],
        "role": request["RoleArn"],
        "output": request["OutputDataConfig"]["S3OutputPath"],
    }
    if "CheckpointConfig" in request:
        about["checkpoints"] = request["CheckpointConfig"]["S3Uri"]
    if "VpcConfig" in request:
        about["network"] = ", ".join([*request["VpcConfig"]["Subnets"], *request["VpcConfig"]["SecurityGroupIds"]])
    if request.get("EnableManagedSpotTraining"):
        about["spot"] = (
            f"waits and trains for at most {request['StoppingCondition']['MaxWaitTimeInSeconds'] / 3600:g} h"
        )
    profiler = request["ProfilerConfig"]
    interval = profiler.get("ProfilingIntervalInMilliseconds")
    rules = [rule["RuleConfigurationName"] for rule in request.get("ProfilerRuleConfigurations", [])]
    about["profiling"] = (
        "off (profiling: {system_interval_ms: 500} samples CPU, GPU, memory and I/O)"
        if profiler["DisableProfiler"]
        else ", ".join([f"system metrics every {interval or 500} ms", *rules])
    )
    about["request"] = "launcher plan … --json shows CreateTrainingJob in full"
    return about

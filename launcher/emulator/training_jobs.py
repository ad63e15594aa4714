"""The training-job operations of SageMaker's API, which moto has only in part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from werkzeug.wrappers import Response

from launcher.emulator import queries
from launcher.emulator.catalogs import Quotas
from launcher.emulator.constraints import check_combination, check_shapes
from launcher.emulator.execution import Execution, Services
from launcher.emulator.operations import AwsError, Call
from launcher.emulator.training_job import TrainingJob


class TrainingJobs:
    """All jobs of the account, and the threads that carry them out."""

    def __init__(
        self, folder: Path, services: Services, quotas: Quotas, tags: Callable[[TrainingJob], list[dict[str, str]]]
    ):
        """`tags` looks up a job's tags, which moto keeps."""
        self.folder, self.services, self.quotas, self.tags = folder, services, quotas, tags
        self.lock = threading.Lock()
        self.jobs: dict[tuple[str, str], TrainingJob] = {}
        self.executions: list[Execution] = []
        self.start_failures: list[str] = []
        """The FailureReasons of the jobs that are created next."""

    def answers(self) -> dict[tuple[str, str], Callable[[Call], Any]]:
        """What is answered here, by service and operation."""
        operations = {
            "CreateTrainingJob": self.create,
            "DescribeTrainingJob": lambda call: self.find(call).describe(),
            "ListTrainingJobs": self.list_jobs,
            "StopTrainingJob": self.stop,
            "UpdateTrainingJob": self.update,
            "Search": self.search,
        }
        return {("sagemaker", operation): answer for operation, answer in operations.items()}

    def create(self, call: Call) -> dict[str, Any] | Response:
        """Check the request, let moto take it too, which keeps its tags, and start the job."""
        request = call.parameters
        check_shapes("sagemaker", "CreateTrainingJob", request)
        check_combination(request)
        name = request["TrainingJobName"]
        with self.lock:
            known = self.jobs.get((call.region, name))
            if known:
                raise AwsError(
                    "ResourceInUse",
                    "Training job names must be unique within an AWS account and region, and a training job with this name "
                    f"already exists ({known.arn})",
                )
            self.check_quotas(request, call.region)
            response = call.forward()
            if response.status_code != 200:
                return response
            arn = response.get_json(force=True)["TrainingJobArn"]
            job = TrainingJob(request, arn, call.region, self.folder / call.region / name)
            self.jobs[call.region, name] = job
            reason = self.start_failures.pop(0) if self.start_failures else ""
            execution = Execution(job, self.services, reason)
            self.executions.append(execution)
        execution.start()
        return {"TrainingJobArn": arn}

    def find(self, call: Call) -> TrainingJob:
        """The job that a call names.

        Raises:
            AwsError: there is none of that name.
        """
        job = self.jobs.get((call.region, call.parameters.get("TrainingJobName", "")))
        if job is None:
            raise AwsError("ValidationException", "Requested resource not found.")
        return job

    def stop(self, call: Call) -> dict[str, Any]:
        job = self.find_running(call)
        job.stopping()
        job.stop_requested.set()
        return {}

    def update(self, call: Call) -> dict[str, Any]:
        job = self.find_running(call)
        check_shapes("sagemaker", "UpdateTrainingJob", call.parameters)
        job.update(call.parameters.get("ProfilerConfig"), call.parameters.get("ResourceConfig"))
        return {"TrainingJobArn": job.arn}

    def find_running(self, call: Call) -> TrainingJob:
        """The job that a call names, which must not be over.

        Raises:
            AwsError: it is, or there is none.
        """
        job = self.find(call)
        if job.over:
            raise AwsError(
                "ValidationException", f"The request was rejected because the training job is in status {job.status}."
            )
        return job

    def list_jobs(self, call: Call) -> dict[str, Any]:
        return queries.list_jobs(self.jobs_of(call.region), call.parameters)

    def search(self, call: Call) -> dict[str, Any] | Response:
        """Search among training jobs; among other resources moto does."""
        if call.parameters.get("Resource") != "TrainingJob":
            return call.forward()
        jobs = [{**job.describe(), "Tags": self.tags(job)} for job in self.jobs_of(call.region)]
        return queries.search(jobs, call.parameters)

    def jobs_of(self, region: str) -> list[TrainingJob]:
        """All jobs of a region, while others may be created."""
        return [job for job in list(self.jobs.values()) if job.region == region]

    def check_quotas(self, request: dict[str, Any], region: str) -> None:
        """Hold a request against the quotas that were set.

        Raises:
            AwsError: ResourceLimitExceeded, in AWS's words.
        """
        kind = "spot training job" if request.get("EnableManagedSpotTraining") else "training job"
        for instance_type, count in instances(request).items():
            name = f"{instance_type} for {kind} usage"
            quota = self.quotas.value(name, region)
            used = sum(
                instances(job.request).get(instance_type, 0)
                for job in self.jobs_of(region)
                if not job.over and bool(job.request.get("EnableManagedSpotTraining")) == kind.startswith("spot")
            )
            if quota is not None and used + count > quota:
                raise AwsError(
                    "ResourceLimitExceeded",
                    f"The account-level service limit '{name}' is {quota:g} Instances, with current utilization of {used} "
                    f"Instances and a request delta of {count} Instances. Please use AWS Service Quotas to request an "
                    "increase for this quota. If AWS Service Quotas is not available, contact AWS support to request an "
                    "increase for this quota.",
                )

    def fail_start(self, reason: str, times: int) -> None:
        """See `Emulator.fail_start`."""
        with self.lock:
            self.start_failures += [reason] * times

    def interrupt(self, name: str) -> None:
        """See `Emulator.interrupt`."""
        spot = [
            job
            for job in list(self.jobs.values())
            if job.name == name and job.secondary == "Training" and job.request.get("EnableManagedSpotTraining")
        ]
        if not spot:
            raise ValueError(f"no managed spot job {name} has the status Training; wait until it has")
        for job in spot:
            job.interrupted.set()

    def close(self) -> None:
        """End every job's processes at once."""
        for execution in self.executions:
            execution.job.closing.set()
            execution.job.stop_requested.set()
        for execution in self.executions:
            execution.join()


def instances(request: dict[str, Any]) -> dict[str, int]:
    """How many instances of each type a request asks for."""
    resources = request["ResourceConfig"]
    counted: dict[str, int] = {}
    for group in resources.get("InstanceGroups") or [resources]:
        kind = group.get("InstanceType", "")
        counted[kind] = counted.get(kind, 0) + group.get("InstanceCount", 1)
    return counted

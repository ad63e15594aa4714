"""The training-job operations of SageMaker's API. moto keeps the jobs' tags and carries nothing out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from werkzeug.wrappers import Response

from launcher.emulator.catalogs import Quotas
from launcher.emulator.constraints import check_combination, check_shapes
from launcher.emulator.execution import Execution, Services
from launcher.emulator.router import AwsError, Call, Handler
from launcher.emulator.training_job import TrainingJob

NOT_EMULATED = ("Search",)
"""moto would answer these from its own records, in which no job ever runs."""

LISTED_BY = ("NameContains", "StatusEquals", "SortBy", "SortOrder", "MaxResults", "NextToken")
"""The parameters of ListTrainingJobs that are emulated."""


class TrainingJobs:
    """The account's jobs, and the threads that run them."""

    def __init__(self, folder: Path, services: Services, quotas: Quotas):
        self.folder, self.services, self.quotas = folder, services, quotas
        self.lock = threading.Lock()
        self.jobs: dict[tuple[str, str], TrainingJob] = {}
        """(region, name) -> job."""
        self.executions: list[Execution] = []

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """By (service, operation), what answers it."""
        operations: dict[str, Handler] = {
            "CreateTrainingJob": self.create,
            "ListTrainingJobs": self.page,
            "DescribeTrainingJob": lambda call: self.find(call).describe(),
            "StopTrainingJob": self.stop,
            "UpdateTrainingJob": self.update,
            **dict.fromkeys(NOT_EMULATED, self.refuse),
        }
        return {("sagemaker", operation): handler for operation, handler in operations.items()}

    def create(self, call: Call) -> dict[str, Any] | Response:
        """Check the request, hand it to moto, which keeps its tags, and start the job."""
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
            execution = Execution(job, self.services)
            self.executions.append(execution)
        execution.start()
        return {"TrainingJobArn": arn}

    def find(self, call: Call) -> TrainingJob:
        """The job that a call names.

        Raises:
            AwsError: the region has no such job.
        """
        job = self.jobs.get((call.region, call.parameters.get("TrainingJobName", "")))
        if job is None:
            raise AwsError("ValidationException", "Requested resource not found.")
        return job

    def page(self, call: Call) -> dict[str, Any]:
        """A page of the region's jobs.

        https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ListTrainingJobs.html
        """
        given = call.parameters
        check_shapes("sagemaker", "ListTrainingJobs", given)
        other = sorted(given.keys() - {*LISTED_BY})
        if other:
            raise AwsError(
                "NotImplemented", f"the SageMaker emulator's ListTrainingJobs takes no {', '.join(other)}", 501
            )
        with self.lock:
            jobs = [(name, job) for (region, name), job in self.jobs.items() if region == call.region]
        keys = {
            "Name": lambda item: item[0],
            "CreationTime": lambda item: item[1].created,
            "Status": lambda item: item[1].status,
        }
        jobs.sort(key=keys[given.get("SortBy", "CreationTime")], reverse=given.get("SortOrder") == "Descending")
        kept = [job for name, job in jobs if given.get("NameContains", "") in name]
        status, first = given.get("StatusEquals"), int(given.get("NextToken", 0))
        if "MaxResults" not in given:  # with it, SageMaker pages before it filters
            kept = [job for job in kept if status in (None, job.status)]
        after = first + given.get("MaxResults", 10)
        more = {"NextToken": str(after)} if after < len(kept) else {}
        found = [job.summary() for job in kept[first:after] if status in (None, job.status)]
        return {"TrainingJobSummaries": found, **more}

    def stop(self, call: Call) -> dict[str, Any]:
        job = self.find_running(call)
        job.stopping()
        job.stop_requested.set()
        return {}

    def update(self, call: Call) -> dict[str, Any]:
        """Change the profiling of a running job, or how long one that is over keeps its hosts."""
        check_shapes("sagemaker", "UpdateTrainingJob", call.parameters)
        if "ResourceConfig" in call.parameters:
            job = self.find_warm(call)
            job.keep_alive(call.parameters["ResourceConfig"]["KeepAlivePeriodInSeconds"])
        else:
            job = self.find_running(call)
            job.update_profiler(call.parameters.get("ProfilerConfig", {}))
        return {"TrainingJobArn": job.arn}

    def find_running(self, call: Call) -> TrainingJob:
        """The job that a call names.

        Raises:
            AwsError: the job is over, or does not exist.
        """
        job = self.find(call)
        if job.over:
            raise AwsError(
                "ValidationException", f"The request was rejected because the training job is in status {job.status}."
            )
        return job

    def find_warm(self, call: Call) -> TrainingJob:
        """The job that a call names, if its warm pool is Available: only then can its time change, says train-warm-pools-how-to-use.

        Raises:
            AwsError: the warm pool is not Available (the message is our own), or the job does not exist.
        """
        job = self.find(call)
        status = job.describe().get("WarmPoolStatus", {}).get("Status")
        if status != "Available":
            raise AwsError("ValidationException", f"The warm pool of the training job is not Available: {status}.")
        return job

    def refuse(self, call: Call) -> dict[str, Any]:
        raise AwsError("NotImplemented", f"the SageMaker emulator has no {call.operation}", 501)

    def check_quotas(self, request: dict[str, Any], region: str) -> None:
        """Check a request against the quotas that were set. Messages are AWS's.

        Raises:
            AwsError: ResourceLimitExceeded.
        """
        kind = "spot training job" if request.get("EnableManagedSpotTraining") else "training job"
        for instance_type, count in instances(request).items():
            name = f"{instance_type} for {kind} usage"
            quota = self.quotas.value(name, region)
            used = sum(
                instances(job.request).get(instance_type, 0)
                for (of, _), job in self.jobs.items()
                if of == region
                and not job.over
                and bool(job.request.get("EnableManagedSpotTraining")) == kind.startswith("spot")
            )
            if quota is not None and used + count > quota:
                raise AwsError(
                    "ResourceLimitExceeded",
                    f"The account-level service limit '{name}' is {quota:g} Instances, with current utilization of {used} "
                    f"Instances and a request delta of {count} Instances. Please use AWS Service Quotas to request an "
                    "increase for this quota. If AWS Service Quotas is not available, contact AWS support to request an "
                    "increase for this quota.",
                )

    def close(self) -> None:
        """End the processes of all jobs."""
        for execution in self.executions:
            execution.job.closing.set()
            execution.job.stop_requested.set()
        for execution in self.executions:
            execution.join()


def instances(request: dict[str, Any]) -> dict[str, int]:
    """Instance type -> number of instances, of a request."""
    resources = request["ResourceConfig"]
    counted: dict[str, int] = {}
    for group in resources.get("InstanceGroups") or [resources]:
        kind = group.get("InstanceType", "")
        counted[kind] = counted.get(kind, 0) + group.get("InstanceCount", 1)
    return counted

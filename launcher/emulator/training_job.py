"""One training job: its request, its state, and what DescribeTrainingJob answers."""

from __future__ import annotations

import copy
import math
import re
import threading
import time
from pathlib import Path
from typing import Any

MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Interrupted": "Training job interrupted",
    "Stopping": "Stopping the training job",
    "Uploading": "Uploading generated training model",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job runtime exceeded MaxWaitTimeInSeconds provided",
}
"""The StatusMessage of each secondary status, from logs of real jobs; no source shows those of Interrupted and
MaxWaitTimeExceeded."""

IN_PROGRESS, STOPPING, COMPLETED, FAILED, STOPPED = "InProgress", "Stopping", "Completed", "Failed", "Stopped"
OVER = (COMPLETED, FAILED, STOPPED)

DEFAULTS = {
    "EnableNetworkIsolation": False,
    "EnableInterContainerTrafficEncryption": False,
    "EnableManagedSpotTraining": False,
}
"""DescribeTrainingJob's values for members that a request omits."""


class TrainingJob:
    """A job's request, its history, and the events that its executor watches.

    Times are seconds since the epoch, as in the JSON protocol.
    """

    def __init__(self, request: dict[str, Any], arn: str, region: str, folder: Path):
        self.request = copy.deepcopy(request)
        self.name: str = request["TrainingJobName"]
        self.arn, self.region = arn, region
        self.folder = folder
        """Holds the hosts' /opt/ml trees."""
        self.lock = threading.RLock()
        self.status, self.secondary = IN_PROGRESS, "Starting"
        self.created = self.modified = time.time()
        self.transitions: list[dict[str, Any]] = []
        self.failure_reason = ""
        self.started: float | None = None
        self.ended: float | None = None
        self.model_uri = ""
        self.metrics: dict[str, dict[str, Any]] = {}
        self.stop_requested = threading.Event()
        self.interrupted = threading.Event()
        """The spot instances were taken away."""
        self.closing = threading.Event()
        """The emulator closes: end the processes and record nothing."""
        self._billed_seconds = 0.0
        self._billed_since: float | None = None
        self._warm_pool_ended: float | None = None
        """When the warm pool was ended early."""
        self.enter("Starting")

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def hyperparameters(self) -> dict[str, str]:
        given: dict[str, str] = self.request.get("HyperParameters", {})
        return given

    def enter(self, secondary: str, message: str = "") -> None:
        """Enter a secondary status. Billed time runs from Downloading to the job's end or interruption."""
        with self.lock:
            now = self.modified = time.time()
            if self.transitions:
                self.transitions[-1]["EndTime"] = now
            self.transitions.append(
                {"Status": secondary, "StartTime": now, "StatusMessage": message or MESSAGES[secondary]}
            )
            self.secondary = secondary
            if secondary == "Downloading":
                self.started = self.started or now
                self._billed_since = now
            elif secondary == "Interrupted":
                self._stop_billing(now)

    def stopping(self) -> None:
        """Enter the status Stopping, on request or at a time limit."""
        with self.lock:
            if self.status == IN_PROGRESS:
                self.status = STOPPING
                self.enter("Stopping")

    def end(self, secondary: str, failure_reason: str = "") -> None:
        """Enter a final secondary status, and its status."""
        with self.lock:
            self.enter(secondary)
            self.transitions[-1]["EndTime"] = self.ended = self.modified
            self._stop_billing(self.modified)
            self.failure_reason = failure_reason
            self.status = secondary if secondary in (COMPLETED, FAILED) else STOPPED

    def billed_seconds(self) -> float:
        """Billed time so far, in seconds."""
        with self.lock:
            running = time.time() - self._billed_since if self._billed_since is not None else 0.0
            return self._billed_seconds + running

    def update_profiler(self, changes: dict[str, Any]) -> None:
        """Change members of ProfilerConfig, as UpdateTrainingJob does."""
        with self.lock:
            self.request.setdefault("ProfilerConfig", {}).update(changes)
            self.modified = time.time()

    def keep_alive(self, seconds: int) -> None:
        """Change how many seconds the hosts stay after the job, as UpdateTrainingJob does; 0 ends the warm pool now."""
        with self.lock:
            self._warm_pool_ended = time.time() if seconds == 0 else None
            self.request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = seconds
            self.modified = time.time()

    def read_metrics(self, line: str, seconds: float) -> None:
        """Keep the values that the MetricDefinitions match in a line of the log."""
        for definition in self.request.get("AlgorithmSpecification", {}).get("MetricDefinitions", []):
            found = re.search(definition["Regex"], line)
            if found and found.groups():
                try:
                    value = float(found[1])
                except ValueError:
                    continue
                name = definition["Name"]
                with self.lock:
                    self.metrics[name] = {"MetricName": name, "Value": value, "Timestamp": seconds}

    def describe(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer."""
        with self.lock:
            request = copy.deepcopy(self.request)
            request.pop("Tags", None)
            request.pop("SessionChainingConfig", None)
            profiler = request.get("ProfilerConfig")
            answer = {
                **DEFAULTS,
                **request,
                "OutputDataConfig": {"KmsKeyId": "", "CompressionType": "GZIP", **request["OutputDataConfig"]},
                "TrainingJobArn": self.arn,
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary,
                "SecondaryStatusTransitions": copy.deepcopy(self.transitions),
                "CreationTime": self.created,
                "LastModifiedTime": self.modified,
                "ProfilingStatus": "Disabled" if profiler is None or profiler.get("DisableProfiler") else "Enabled",
            }
            if self.started is not None:
                answer["TrainingStartTime"] = self.started
            if self.ended is not None:
                answer["TrainingEndTime"] = self.ended
                if self.started is not None:
                    answer["TrainingTimeInSeconds"] = math.ceil(self.ended - self.started)
                    answer["BillableTimeInSeconds"] = math.ceil(self._billed_seconds)
            if self.failure_reason:
                answer["FailureReason"] = self.failure_reason
            if self.model_uri:
                answer["ModelArtifacts"] = {"S3ModelArtifacts": self.model_uri}
            if self.metrics:
                answer["FinalMetricDataList"] = list(self.metrics.values())
            if "KeepAlivePeriodInSeconds" in request["ResourceConfig"]:
                answer["WarmPoolStatus"] = self._warm_pool()
            return answer

    def summary(self) -> dict[str, Any]:
        """Its part of ListTrainingJobs' answer."""
        answer = self.describe()
        shown = ("TrainingJobArn", "TrainingJobStatus", "SecondaryStatus", "CreationTime", "LastModifiedTime")
        return {
            "TrainingJobName": self.request["TrainingJobName"],
            **{name: answer[name] for name in (*shown, "TrainingEndTime", "WarmPoolStatus") if name in answer},
        }

    def _warm_pool(self) -> dict[str, Any]:
        """WarmPoolStatus of a job that asks for a warm pool. No other job takes its hosts here."""
        if not self.over:
            return {"Status": "InUse"}
        if self.ended is None or self.started is None:
            return {"Status": "Terminated"}
        now, kept = time.time(), self.request["ResourceConfig"]["KeepAlivePeriodInSeconds"]
        until = self._warm_pool_ended or self.ended + kept
        return {
            "Status": "Available" if now < until else "Terminated",
            "ResourceRetainedBillableTimeInSeconds": math.ceil(min(now, until) - self.ended),
        }

    def _stop_billing(self, now: float) -> None:
        if self._billed_since is not None:
            self._billed_seconds += now - self._billed_since
            self._billed_since = None

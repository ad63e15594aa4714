"""SageMaker's part of a training job, from its first instance to its last status, in one thread per job.

Channels of the modes File and FastFile are both downloaded before the script starts; to a script they look the same. A job
with Pipe mode, a manifest or a container entry point of its own fails. Images are ignored: scripts run with this machine's
Python, through AWS's container toolkit.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.aws.upload import split
from launcher.backends.local_hosts import MAX_HOSTS
from launcher.backends.supervisor import AFTER_FAILURE_SECONDS, GRACE_SECONDS
from launcher.emulator import hosts as machines
from launcher.emulator.hosts import RunningHosts
from launcher.emulator.logs import LogStream
from launcher.emulator.storage import Checkpoints, DownloadFailed, channel_files, download, save_results, share
from launcher.emulator.training_job import COMPLETED, FAILED, STOPPED, TrainingJob

INTERRUPTION_SECONDS = 2.0
"""Seconds that an interrupted spot job waits for new instances; AWS takes minutes to hours."""

LOG_SECONDS, CHECKPOINT_SECONDS = 0.3, 1.0
"""Seconds between two checks of the logs, and of the checkpoints."""

REASON_LENGTH = 1024
"""Characters of the failure file that FailureReason quotes.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-output.html"""


@dataclass(frozen=True)
class Services:
    """The parts of the emulator that an execution uses."""

    environment: Mapping[str, str]
    """The variables that point a job's AWS clients to the emulator, with SageMaker's key."""
    client: Callable[[str, str], Any]
    """(service, region) -> SageMaker's own boto3 client."""
    file_systems: dict[str, Any]
    """File system id -> `account.FileSystem`."""


class JobFailed(Exception):
    """Ends the job as Failed. The message is its FailureReason."""


class Closed(Exception):
    """The emulator closes."""


class Execution(threading.Thread):
    """Runs one job."""

    def __init__(self, job: TrainingJob, services: Services):
        super().__init__(name=f"training job {job.name}", daemon=True)
        self.job = job
        self.services = services
        self.s3 = services.client("s3", job.region)
        self.hosts = machines.hosts_of(job)
        training = machines.training_hosts(job, self.hosts)
        self.hyperparameters, self.note = machines.hyperparameters_here(job, len(training))
        self.checkpoints: Checkpoints | None = None
        self.running = RunningHosts()
        self.streams: list[LogStream] = []

    def run(self) -> None:
        """Repeat the attempt until one is not interrupted, then end the job, whatever happens."""
        try:
            outcome, reason = self.attempt()
            while not outcome:
                self.job.enter("Interrupted")
                self.job.interrupted.clear()
                if self.job.stop_requested.wait(INTERRUPTION_SECONDS):
                    outcome = STOPPED
                    break
                self.job.enter("Starting")
                outcome, reason = self.attempt()
            self.finish(outcome, reason)
        except Closed:
            return
        except JobFailed as failure:
            self.job.end(FAILED, str(failure))
        except Exception as error:  # the emulator's own mistake must not leave a job that never ends
            traceback.print_exc()
            self.job.end(
                FAILED, f"InternalServerError: We encountered an internal error. Please try again. ({error!r})"
            )

    def attempt(self) -> tuple[str, str]:
        """Start the hosts, fetch the data, train.

        Returns:
            The final secondary status, empty if the instances were taken away; and the FailureReason.

        Raises:
            JobFailed: the script did not start, so there is nothing to upload.
        """
        if len(self.hosts) > MAX_HOSTS:
            raise JobFailed(f"ClientError: the emulator has at most {MAX_HOSTS} hosts for a job, not {len(self.hosts)}")
        if self.job.request["AlgorithmSpecification"].get("ContainerEntrypoint"):
            raise JobFailed("ClientError: the emulator runs SageMaker's PyTorch toolkit and no ContainerEntrypoint")
        for host in self.hosts:
            machines.write_tree(self.job, host, self.hosts, self.hyperparameters)
        self.job.enter("Downloading")
        try:
            self.fetch_channels()
        except DownloadFailed as failure:
            raise JobFailed(f"ClientError: Data download failed:{failure}") from failure
        self.restore_checkpoints()
        if self.job.stop_requested.is_set():
            return STOPPED, ""
        self.job.enter("Training")
        try:
            self.running = RunningHosts()
            processes = int(json.loads(self.hyperparameters.get(machines.PROCESSES, "1")))
            self.running.start(self.job, self.hosts, self.note, processes, self.services.environment)
            self.open_streams()
            return self.watch()
        finally:
            self.running.close(self.job.folder)
            for stream in self.streams:
                stream.pump(last=True)
            self.streams.clear()

    def watch(self) -> tuple[str, str]:
        """Store what the hosts write until all have ended. Stop them on request or at a time limit."""
        limits = self.job.request.get("StoppingCondition", {})
        longest = limits.get("MaxRuntimeInSeconds", 86400)
        wait = limits.get("MaxWaitTimeInSeconds", float("inf"))
        logs_due = checkpoints_due = 0.0
        kill_at = float("inf")
        outcome, failed = "", ""
        while self.running.running():
            if self.job.closing.wait(0.1):
                raise Closed
            now = time.monotonic()
            if now > logs_due:
                logs_due = now + LOG_SECONDS
                for stream in self.streams:
                    stream.pump()
            if now > checkpoints_due and self.checkpoints:
                checkpoints_due = now + CHECKPOINT_SECONDS
                self.checkpoints.save()
            if self.job.interrupted.is_set():
                return "", ""
            if not outcome and not failed:
                failed = self.running.failed()
                if failed:
                    kill_at = now + AFTER_FAILURE_SECONDS
                elif self.job.stop_requested.is_set():
                    outcome = STOPPED
                elif self.job.billed_seconds() > longest:
                    outcome = "MaxRuntimeExceeded"
                elif time.time() - self.job.created > wait:
                    outcome = "MaxWaitTimeExceeded"
                if outcome:
                    self.job.stopping()
                    self.running.terminate()
                    kill_at = now + GRACE_SECONDS
            if now > kill_at:
                self.running.close(self.job.folder)
        failed = failed or ("" if outcome else self.running.failed())
        if failed:
            return FAILED, self.failure_reason(failed)
        return outcome or COMPLETED, ""

    def finish(self, outcome: str, reason: str) -> None:
        """Upload the results and end the job."""
        self.job.enter("Uploading")
        try:
            if self.checkpoints:
                self.checkpoints.save(last=True)
            self.upload()
        except Exception as error:  # a missing bucket, above all
            outcome, reason = FAILED, f"ClientError: Artifact upload failed:{error}"
        self.job.end(outcome, reason)

    def fetch_channels(self) -> None:
        """Fetch every channel of every host: S3 objects as files, file systems' folders as links."""
        done: dict[tuple[str, str], Path] = {}
        for host in self.hosts:
            for channel in machines.channels_of(self.job, host):
                place = host.base / "input/data" / channel["ChannelName"]
                if "FileSystemDataSource" in channel["DataSource"]:
                    place.symlink_to(self.shared_folder(channel["DataSource"]["FileSystemDataSource"]))
                    continue
                source = channel["DataSource"]["S3DataSource"]
                sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
                same = (channel["ChannelName"], source["S3Uri"])
                if not sharded and same in done:
                    shutil.copytree(done[same], place)
                    continue
                getting = [other for other in self.hosts if channel in machines.channels_of(self.job, other)]
                self.fetch(channel, place, (getting.index(host), len(getting)) if sharded else (0, 1))
                done[same] = place

    def fetch(self, channel: dict[str, Any], place: Path, part: tuple[int, int]) -> None:
        """Fetch a part of an S3 channel. `part`: its index, from 0, and the number of parts."""
        mode = machines.input_mode(self.job, channel)
        source = channel["DataSource"]["S3DataSource"]
        if mode == "Pipe":
            raise DownloadFailed(
                f"channel {channel['ChannelName']} is in Pipe mode, and the emulator has no pipes; use File or FastFile"
            )
        if source["S3DataType"] != "S3Prefix":
            raise DownloadFailed(
                f"channel {channel['ChannelName']} is of S3DataType {source['S3DataType']}; the emulator reads S3Prefix"
            )
        files = channel_files(self.s3, source, mode == "FastFile", self.job.region, self.job.request["RoleArn"])
        place.mkdir(exist_ok=True)
        for key in share(files, *part):
            if self.job.closing.is_set():
                raise Closed
            download(self.s3, split(source["S3Uri"])[0], key, place / files[key])

    def shared_folder(self, source: dict[str, Any]) -> Path:
        """The local folder that stands for a file system's directory.

        Raises:
            DownloadFailed: no such file system, or no such directory on it.
        """
        system = self.services.file_systems.get(source["FileSystemId"])
        if system is None or system.kind != source["FileSystemType"]:
            raise DownloadFailed(f"there is no {source['FileSystemType']} file system {source['FileSystemId']}")
        folder: Path | None = system.resolve(source["DirectoryPath"])
        if folder is None or not folder.is_dir():
            raise DownloadFailed(f"{source['FileSystemId']} has no directory {source['DirectoryPath']}")
        return folder.resolve()

    def restore_checkpoints(self) -> None:
        """Make the hosts' checkpoint folders with what lies below CheckpointConfig's prefix. A job without one has no such folder."""
        config = self.job.request.get("CheckpointConfig")
        if config:
            local = Path(config.get("LocalPath", "/opt/ml/checkpoints"))
            place = local.relative_to("/opt/ml") if local.is_relative_to("/opt/ml") else Path("checkpoints")
            folders = [host.base / place for host in self.hosts]
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            self.checkpoints = Checkpoints(self.s3, config["S3Uri"], folders)
            try:
                self.checkpoints.restore()
            except Exception as error:
                raise JobFailed(f"ClientError: Checkpoint download failed:{error}") from error

    def open_streams(self) -> None:
        """Open a log stream for each host; each attempt has its own."""
        logs = self.services.client("logs", self.job.region)
        second = int(time.time())
        self.streams = [
            LogStream(logs, machines.log_file(host), f"{self.job.name}/{host.name}-{second}", self.job.read_metrics)
            for host in self.hosts
        ]

    def upload(self) -> None:
        """Upload model.tar.gz and output.tar.gz, or single files if CompressionType is NONE."""
        output = self.job.request["OutputDataConfig"]
        compressed = output.get("CompressionType", "GZIP") != "NONE"
        prefix = f"{output['S3OutputPath'].rstrip('/')}/{self.job.name}/output"
        model = f"{prefix}/model.tar.gz" if compressed else f"{prefix}/model"
        data = f"{prefix}/output.tar.gz" if compressed else f"{prefix}/data"
        archive = self.job.folder / "results.tar.gz" if compressed else None
        save_results(self.s3, [host.base / "model" for host in self.hosts], model, archive)
        save_results(self.s3, [host.base / "output/data" for host in self.hosts], data, archive)
        self.job.model_uri = model if compressed else f"{model}/"

    def failure_reason(self, name: str) -> str:
        """FailureReason in AWS's form, from a host's failure file and exit code."""
        host = next(host for host in self.hosts if host.name == name)
        file = host.base / "output/failure"
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        return f"AlgorithmError: {text[:REASON_LENGTH]}, exit code: {machines.exit_code(self.running.shims[name])}"

"""The emulator as its users hold it: a server in a thread, what an account in it has, and the ways to disturb it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from moto.moto_api._internal.models import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from launcher.emulator import account
from launcher.emulator.catalogs import PriceList, Quotas
from launcher.emulator.execution import Services
from launcher.emulator.operations import FAR_SIDE_KEY, Call
from launcher.emulator.training_jobs import TrainingJobs
from launcher.emulator.wire import Wire

KEY = "testing"
"""Both credentials of the clients; any others do as well."""

_one = threading.Lock()
"""Held while there is an emulator: moto keeps the state of all accounts in the process."""


class QuietHandler(MotoRequestHandler):
    """Does not print a line for each request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        return


class Emulator:
    """AWS as far as a training job needs it: S3, STS, IAM, EC2, FSx, EFS, CloudWatch Logs, pricing, quotas, SageMaker.

    It runs until `close`, or until the process ends, which also ends the processes of its jobs.

    Args:
        folder: where the jobs' /opt/ml trees lie: below it, <region>/<job>/algo-1/opt/ml.
        port: on 127.0.0.1; 0 takes a free one.

    Raises:
        RuntimeError: there is one in this process already.
        OSError: the port is taken.
    """

    def __init__(self, folder: Path, port: int = 0):
        if not _one.acquire(blocking=False):
            raise RuntimeError("there is an emulator in this process already; close it first")
        try:
            moto_api_backend.reset()
            self.file_systems: dict[str, account.FileSystem] = {}
            self._clients: dict[tuple[str, str], Any] = {}
            self._clients_lock = threading.Lock()
            self._prices, self._quotas = PriceList(), Quotas()
            self._wire = Wire(
                DomainDispatcherApplication(create_backend_app),
                {
                    ("fsx", "DescribeFileSystems"): self._describe_file_systems,
                    ("pricing", "GetProducts"): self._prices.answer,
                    ("service-quotas", "ListServiceQuotas"): self._quotas.answer,
                },
                {
                    control.__name__: control
                    for control in (
                        self.add_bucket,
                        self.add_role,
                        self.add_subnet,
                        self.add_security_group,
                        self.add_file_system,
                        self.set_price,
                        self.set_quota,
                        self.inject,
                        self.fail_start,
                        self.interrupt,
                    )
                },
            )
            self._server = make_server("127.0.0.1", port, self._wire, threaded=True, request_handler=QuietHandler)
        except BaseException:
            _one.release()
            raise
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._jobs = TrainingJobs(
            Path(folder).resolve(),
            Services(self.url, self._client, self.file_systems),
            self._quotas,
            lambda job: account.tags_of(job.region, job.name),
        )
        self._wire.answers |= self._jobs.answers()
        self._thread = threading.Thread(target=self._server.serve_forever, name="emulator", daemon=True)
        self._thread.start()
        self._closed = False

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead AWS clients here; nothing sets them but you."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY}

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(service, operation) of every call of a client, in order, without those of SageMaker itself and of the jobs."""
        with self._wire.lock:
            return list(self._wire.calls)

    def close(self) -> None:
        """End every job's processes and the server, and forget all state."""
        if self._closed:
            return
        self._closed = True
        self._jobs.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        moto_api_backend.reset()
        _one.release()

    def add_bucket(self, name: str, region: str) -> None:
        account.add_bucket(self._client("s3", region), name, region)

    def add_role(self, arn: str) -> None:
        """A role of account 123456789012 that trusts sagemaker.amazonaws.com.

        Raises:
            ValueError: another account's, or not a role's ARN.
        """
        account.add_role(self._client("iam", "us-east-1"), arn)

    def add_subnet(self, identifier: str, region: str, availability_zone: str | None = None) -> None:
        account.add_subnet(self._client("ec2", region), identifier, region, availability_zone)

    def add_security_group(self, identifier: str, region: str) -> None:
        account.add_security_group(self._client("ec2", region), identifier, region)

    def add_file_system(
        self, identifier: str, kind: str, region: str, folder: Path | str, subnet: str | None = None
    ) -> None:
        """A file system and the folder here that is shared through it.

        Args:
            kind: FSxLustre or EFS.
            folder: stands for the file system's root. An FSx DirectoryPath begins with the mount name, which is `fsx` here:
                /fsx/food/train is folder/food/train. An EFS one does not: /food/train.
            subnet: where it has its network interface; None: the first subnet that was added to the region.

        Raises:
            ValueError: an unknown kind.
        """
        fsx, efs, ec2 = (self._client(service, region) for service in ("fsx", "efs", "ec2"))
        account.add_file_system(fsx, efs, ec2, identifier, kind, region, subnet)
        self.file_systems[identifier] = account.FileSystem(kind, Path(folder).resolve())

    def set_price(self, instance_type: str, dollars: float, region: str) -> None:
        """What an hour of a training instance costs on demand, in USD."""
        self._prices.set(instance_type, float(dollars), region)

    def set_quota(self, name: str, value: float, region: str) -> None:
        """A quota of SageMaker's by its whole name: `ml.p4d.24xlarge for training job usage`.

        CreateTrainingJob keeps to those for training jobs and spot training jobs that are set.
        """
        self._quotas.set(name, float(value), region)

    def inject(
        self, operation: str, code: str, times: int = 1, status: int = 400, message: str = "injected by the emulator"
    ) -> None:
        """Let a client's next calls of an operation, of whatever service, fail.

        Args:
            code: the error's code: ThrottlingException, ExpiredTokenException …
            times: calls. botocore repeats some failed calls by itself, and each attempt counts.
            status: the HTTP status.
        """
        self._wire.inject(operation, code, times, status, message)

    def fail_start(self, reason: str, times: int = 1) -> None:
        """Let the next training jobs fail while they are Starting, with this FailureReason.

        `CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type.`
        is what SageMaker says where it has no instances.
        """
        self._jobs.fail_start(reason, times)

    def interrupt(self, job_name: str) -> None:
        """Take away a spot job's instances, without a warning to its processes.

        After two seconds the job starts again with what its checkpoint prefix in S3 holds.

        Raises:
            ValueError: no managed spot job of this name is training.
        """
        self._jobs.interrupt(job_name)

    def _describe_file_systems(self, call: Call) -> dict[str, Any] | Response:
        return account.describe_file_systems(call, self._client("ec2", call.region))

    def _client(self, service: str, region: str) -> Any:
        """A client that speaks for SageMaker itself; those of one kind are shared, since botocore's are safe in threads."""
        with self._clients_lock:
            if (service, region) not in self._clients:
                session = boto3.Session(
                    aws_access_key_id=FAR_SIDE_KEY, aws_secret_access_key=FAR_SIDE_KEY, region_name=region
                )
                self._clients[service, region] = session.client(
                    service, endpoint_url=self.url, config=Config(proxies={}, s3={"addressing_style": "path"})
                )
            return self._clients[service, region]

"""The SageMaker emulator: a server in a thread, and what its account holds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.credentials import Credentials
from moto.moto_api._internal.models import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from launcher.config import defaults
from launcher.emulator import account
from launcher.emulator.access import Authenticator, new_credentials
from launcher.emulator.catalogs import PriceList, Quotas
from launcher.emulator.execution import Services
from launcher.emulator.router import Call, Router
from launcher.emulator.training_jobs import TrainingJobs

_one = threading.Lock()
"""Held while an emulator runs: moto's state is global to the process."""


class QuietHandler(MotoRequestHandler):
    """Logs no requests, and refuses an invalid address."""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        try:
            urlsplit(self.path)
        except ValueError as error:
            self.send_error(400, str(error))
            return False
        return True

    def log_error(self, format: str, *args: object) -> None:
        return

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        return


class Emulator:
    """The part of AWS that a training job needs: S3, STS, IAM, EC2, FSx, EFS, CloudWatch Logs, pricing, quotas, SageMaker.

    It runs until `close` or the end of the process. Its jobs' processes end with it. It answers only requests signed with its own
    keys: the one in `environment`, and SageMaker's, which its jobs have.

    Args:
        folder: holds each host's /opt/ml as <region>/<job>/algo-1/opt/ml.
        port: on 127.0.0.1; 0: a free one.

    Raises:
        RuntimeError: this process has one already.
        OSError: the port is in use.
    """

    def __init__(self, folder: Path, port: int = 0):
        if not _one.acquire(blocking=False):
            raise RuntimeError("this process has an emulator already; close it first")
        try:
            moto_api_backend.reset()
            self.file_systems: dict[str, account.FileSystem] = {}
            self._clients: dict[tuple[str, str], Any] = {}
            self._clients_lock = threading.Lock()
            self._prices, self._quotas = PriceList(), Quotas()
            self._router = Router(
                DomainDispatcherApplication(create_backend_app),
                {
                    ("fsx", "DescribeFileSystems"): self._describe_file_systems,
                    ("pricing", "GetProducts"): self._prices.answer,
                    ("service-quotas", "ListServiceQuotas"): self._quotas.answer,
                },
            )
            self._key, self._sagemaker_key = new_credentials(), new_credentials(account.SAGEMAKER)
            authenticator = Authenticator(self._router, [self._key, self._sagemaker_key])
            self._server = make_server("127.0.0.1", port, authenticator, threaded=True, request_handler=QuietHandler)
        except BaseException:
            _one.release()
            raise
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.jobs = TrainingJobs(
            Path(folder).resolve(),
            Services(self._environment(self._sagemaker_key), self._client, self.file_systems),
            self._quotas,
        )
        self._router.handlers |= self.jobs.handlers()
        self._thread = threading.Thread(target=self._server.serve_forever, name="emulator", daemon=True)
        self._thread.start()
        self._closed = False

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point AWS clients to the emulator, with the key made at its start. They turn off your own defaults, whose role
        and bucket are in another account.

        You set them yourself. Whoever has them can run code as you.
        """
        return {**self._environment(self._key), defaults.OFF: "off"}

    def close(self) -> None:
        """End the jobs' processes and the server, and drop all state."""
        if self._closed:
            return
        self._closed = True
        self.jobs.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        moto_api_backend.reset()
        _one.release()

    def add_bucket(self, name: str, region: str) -> None:
        account.add_bucket(self._client("s3", region), name, region)

    def add_role(self, arn: str) -> None:
        """A role that trusts sagemaker.amazonaws.com.

        Raises:
            ValueError: not the ARN of a role in account 123456789012.
        """
        account.add_role(self._client("iam", "us-east-1"), arn)

    def add_subnet(self, identifier: str, region: str) -> None:
        account.add_subnet(self._client("ec2", region), identifier, region)

    def add_security_group(self, identifier: str, region: str, *, open_to_itself: bool = False) -> None:
        """A security group with the outbound rule that every new one has.

        Args:
            open_to_itself: also allow all traffic from and to its own members.
        """
        account.add_security_group(self._client("ec2", region), identifier, region, open_to_itself)

    def add_file_system(self, identifier: str, kind: str, region: str, folder: Path | str) -> None:
        """A file system that shares a local folder.

        Args:
            kind: FSxLustre or EFS.
            folder: stands for the file system's root. An FSx DirectoryPath begins with the mount name `fsx`:
                /fsx/food/train is folder/food/train. An EFS path has no mount name: /food/train.

        Raises:
            ValueError: an unknown kind.
        """
        fsx, efs, ec2 = (self._client(service, region) for service in ("fsx", "efs", "ec2"))
        account.add_file_system(fsx, efs, ec2, identifier, kind, region)
        self.file_systems[identifier] = account.FileSystem(kind, Path(folder).resolve())

    def set_price(self, instance_type: str, dollars: float, region: str) -> None:
        """A training instance's price on demand, in US dollars an hour."""
        self._prices.set(instance_type, float(dollars), region)

    def set_quota(self, name: str, value: float, region: str) -> None:
        """A SageMaker quota by its full name: `ml.p4d.24xlarge for training job usage`.

        CreateTrainingJob enforces the quotas of training jobs and spot training jobs that were set.
        """
        self._quotas.set(name, float(value), region)

    def _environment(self, key: Credentials) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": key.access_key,
            "AWS_SECRET_ACCESS_KEY": key.secret_key,
        }

    def _describe_file_systems(self, call: Call) -> dict[str, Any] | Response:
        return account.describe_file_systems(call, self._client("ec2", call.region))

    def _client(self, service: str, region: str) -> Any:
        """SageMaker's own client of a service. botocore's clients are thread-safe, so each is shared."""
        with self._clients_lock:
            if (service, region) not in self._clients:
                key = self._sagemaker_key
                session = boto3.Session(key.access_key, key.secret_key, region_name=region)
                self._clients[service, region] = session.client(
                    service, endpoint_url=self.url, config=Config(proxies={}, s3={"addressing_style": "path"})
                )
            return self._clients[service, region]

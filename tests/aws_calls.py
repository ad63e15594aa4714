"""boto3's calls in this process: which were made, and failures on demand, of whatever service and protocol."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from botocore.awsrequest import AWSResponse
from botocore.endpoint import Endpoint

from launcher.emulator.account import SAGEMAKER


@dataclass
class AwsCalls:
    """The calls of this process's clients, without those of the emulator itself. Each attempt of a retried call counts."""

    made: list[tuple[str, str]] = field(default_factory=list)
    """(service, operation), in order."""
    failures: dict[str, list[tuple[str, int, str]]] = field(default_factory=lambda: defaultdict(list))
    """Operation -> code, HTTP status and message of the next failures."""
    during: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Operation -> what happens once its next request has been answered, before the caller gets the answer."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, operation: str, code: str, times: int = 1, status: int = 400, message: str = "a test") -> None:
        """Let the next calls of an operation fail."""
        self.failures[operation] += [(code, status, message)] * times


@pytest.fixture
def aws_calls(monkeypatch) -> AwsCalls:
    calls, send = AwsCalls(), Endpoint._get_response

    def get_response(endpoint, request, operation_model, context):
        if f"Credential={SAGEMAKER}" in str(request.headers.get("Authorization")):
            return send(endpoint, request, operation_model, context)
        with calls.lock:
            calls.made.append((operation_model.service_model.service_name, operation_model.name))
            failures = calls.failures[operation_model.name]
            failure = failures.pop(0) if failures else None
            happens = calls.during.pop(operation_model.name, None)
        if failure is None:
            answer = send(endpoint, request, operation_model, context)
            if happens is not None:
                happens()
            return answer
        code, status, message = failure
        metadata = {"HTTPStatusCode": status, "HTTPHeaders": {}}
        parsed = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}
        return (AWSResponse(request.url, status, {}, None), parsed), None

    monkeypatch.setattr(Endpoint, "_get_response", get_response)
    return calls

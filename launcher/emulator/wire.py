"""The WSGI application between the clients and moto: it answers what moto cannot, in AWS's JSON protocol."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from werkzeug.wrappers import Response

SERVICES = {"servicequotas": "service-quotas"}
"""Signing name -> boto3's name of the service, where the two differ."""


class AwsError(Exception):
    """An error that the client sees as its ClientError."""

    def __init__(self, code: str, message: str, status: int = 400):
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


@dataclass
class Call:
    """One request of a client."""

    service: str
    """boto3's name: sagemaker, service-quotas …"""
    operation: str
    """CreateTrainingJob …; empty for services of other protocols, which moto answers."""
    region: str
    environ: dict[str, Any]
    """The WSGI environment. Its body can be read again."""
    moto: Callable[..., Any]

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The JSON body."""
        members: dict[str, Any] = json.loads(_body(self.environ) or b"{}")
        return members

    def forward(self) -> Response:
        """moto's answer to the same request."""
        body = _body(self.environ)
        response = Response.from_app(self.moto, self.environ)
        self.environ["wsgi.input"] = io.BytesIO(body)
        return response


Answer = Callable[[Call], "dict[str, Any] | Response"]


class Wire:
    """A WSGI application around moto's."""

    def __init__(self, moto: Callable[..., Any], answers: dict[tuple[str, str], Answer]):
        self.moto = moto
        self.answers = answers
        """(service, operation) -> what answers in moto's place."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        return (self.answer(environ) or self.moto)(environ, start_response)

    def answer(self, environ: dict[str, Any]) -> Response | None:
        """Our own answer to a call; None where moto answers."""
        call = recognise(environ, self.moto)
        answer = self.answers.get((call.service, call.operation))
        if answer is None:
            return None
        try:
            result = answer(call)
        except AwsError as error:
            body, headers = {"__type": error.code, "message": error.message}, {"x-amzn-ErrorType": error.code}
            return Response(json.dumps(body), error.status, headers, content_type="application/x-amz-json-1.1")
        if isinstance(result, Response):
            return result
        return Response(json.dumps(result), content_type="application/x-amz-json-1.1")


def recognise(environ: dict[str, Any], moto: Callable[..., Any]) -> Call:
    """The call that a WSGI environment holds: its service and region by the signature, its operation by X-Amz-Target."""
    scope = re.search(r"Credential=[^/,\s]+/[^/]*/([^/]*)/([^/]*)/", environ.get("HTTP_AUTHORIZATION", ""))
    region, signing_name = scope.groups() if scope else ("", "")
    operation = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
    return Call(SERVICES.get(signing_name, signing_name), operation, region, environ, moto)


def _body(environ: dict[str, Any]) -> bytes:
    """The request's body, which is put back for the next reader."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body

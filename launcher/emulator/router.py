"""The WSGI application between the clients and moto: calls that moto cannot answer go to handlers of our own, in AWS's JSON protocol."""

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
"""Signing name -> boto3's name of the service, if the two differ."""


MAX_BODY = 1 << 30
"""Largest request body in bytes: it is held in memory. S3 itself takes 5 GiB at once; boto3 sends large files in parts of 8 MiB.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/upload-objects.html"""

PIECE = 1 << 20
"""Bytes read at once."""


class BodyTooLarge(Exception):
    """A request's body exceeds MAX_BODY."""


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
        members: dict[str, Any] = json.loads(body(self.environ) or b"{}")
        return members

    def forward(self) -> Response:
        """moto's answer to the same request."""
        sent = body(self.environ)
        response = Response.from_app(self.moto, self.environ)
        self.environ["wsgi.input"] = io.BytesIO(sent)
        return response


Handler = Callable[[Call], "dict[str, Any] | Response"]


class Router:
    """A WSGI application around moto's."""

    def __init__(self, moto: Callable[..., Any], handlers: dict[tuple[str, str], Handler]):
        self.moto = moto
        self.handlers = handlers
        """(service, operation) -> what answers in moto's place."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        return (self.answer(environ) or self.moto)(environ, start_response)

    def answer(self, environ: dict[str, Any]) -> Response | None:
        """Our own answer to a call; None if moto answers."""
        call = recognise(environ, self.moto)
        handler = self.handlers.get((call.service, call.operation))
        if handler is None:
            return None
        try:
            result = handler(call)
        except AwsError as refusal:
            return error(refusal.code, refusal.message, refusal.status)
        if isinstance(result, Response):
            return result
        return Response(json.dumps(result), content_type="application/x-amz-json-1.1")


def recognise(environ: dict[str, Any], moto: Callable[..., Any]) -> Call:
    """The call in a WSGI environment: service and region from the signature, operation from X-Amz-Target."""
    region, signing_name = scope(environ)
    operation = environ.get("HTTP_X_AMZ_TARGET", "").rpartition(".")[2]
    return Call(SERVICES.get(signing_name, signing_name), operation, region, environ, moto)


def scope(environ: dict[str, Any]) -> tuple[str, str]:
    """The region and the signing name of the service that a request's signature is for; both empty without one."""
    found = re.search(r"Credential=[^/,\s]+/[^/]*/([^/]*)/([^/]*)/", environ.get("HTTP_AUTHORIZATION", ""))
    return (found[1], found[2]) if found else ("", "")


def error(code: str, message: str, status: int) -> Response:
    """An error in AWS's JSON protocol."""
    text = json.dumps({"__type": code, "message": message})
    return Response(text, status, {"x-amzn-ErrorType": code}, content_type="application/x-amz-json-1.1")


def body(environ: dict[str, Any]) -> bytes:
    """The request's body, which is put back for the next reader.

    Raises:
        BodyTooLarge: the body is too large, or says that it is.
        OSError: its connection broke, or its chunks are malformed.
    """
    stream, length = environ["wsgi.input"], environ.get("CONTENT_LENGTH", "")
    left = int(length[:20]) if length.isdecimal() else 0
    if environ.get("wsgi.input_terminated"):  # chunked, of unknown length
        left = MAX_BODY + 1
    elif left > MAX_BODY:
        raise BodyTooLarge
    found = bytearray()
    while left and (piece := stream.read(min(left, PIECE))):
        found += piece
        left -= len(piece)
    if len(found) > MAX_BODY:
        raise BodyTooLarge
    body = bytes(found)
    environ["wsgi.input"] = io.BytesIO(body)
    return body

"""Which operation of which AWS service an HTTP request asks for, and how an error is written in that service's protocol."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote
from xml.sax.saxutils import escape

import botocore.session
from werkzeug.wrappers import Response

FAR_SIDE_KEY = "SAGEMAKER"
"""The access key of everything that SageMaker itself does: the executor's own calls, and those of the jobs' hosts."""

SERVICES = {"servicequotas": "service-quotas", "elasticfilesystem": "efs", "monitoring": "cloudwatch"}
"""Signing name -> the name that boto3 has for the service, where the two differ."""


class AwsError(Exception):
    """An error that the client shall see as its ClientError."""

    def __init__(self, code: str, message: str, status: int = 400):
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


@dataclass
class Call:
    """One request of a client."""

    service: str
    """As boto3 calls it: sagemaker, s3, service-quotas …"""
    operation: str
    """CreateTrainingJob …; empty where the request fits none of the service's operations."""
    region: str
    access_key: str
    environ: dict[str, Any]
    """The WSGI environment; its body can be read once more."""
    moto: Callable[..., Any]

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The body of a JSON request."""
        members: dict[str, Any] = json.loads(_body(self.environ) or b"{}")
        return members

    def forward(self) -> Response:
        """What moto answers to the same request, whose body can be read again after that."""
        body = _body(self.environ)
        response = Response.from_app(self.moto, self.environ)
        self.environ["wsgi.input"] = io.BytesIO(body)
        return response


def recognise(environ: dict[str, Any], moto: Callable[..., Any]) -> Call:
    """The call that a WSGI environment stands for; the body stays readable."""
    signed = environ.get("HTTP_AUTHORIZATION", "") or unquote(environ.get("QUERY_STRING", ""))  # a presigned URL
    scope = re.search(r"Credential=([^/,\s]+)/[^/]*/([^/]*)/([^/]*)/", signed)
    access_key, region, signing_name = scope.groups() if scope else ("", "", "")
    service = SERVICES.get(signing_name, signing_name)
    return Call(service, _operation(service, environ), region, access_key, environ, moto)


def error_response(service: str, error: AwsError) -> Response:
    """An error as the service writes it: JSON, or one of the three kinds of XML."""
    protocol = service_model(service).metadata["protocol"] if service_model(service) else "json"
    code, message = escape(error.code), escape(error.message)
    if protocol in ("json", "rest-json"):
        body = json.dumps({"__type": error.code, "message": error.message})
        headers = {"x-amzn-ErrorType": error.code}
        return Response(body, error.status, headers, content_type="application/x-amz-json-1.1")
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if protocol == "query":
        body = f"<ErrorResponse>{body}<RequestId>emulator</RequestId></ErrorResponse>"
    elif protocol == "ec2":
        body = f"<Response><Errors>{body}</Errors><RequestID>emulator</RequestID></Response>"
    return Response(body, error.status, content_type="text/xml")


def _operation(service: str, environ: dict[str, Any]) -> str:
    target: str = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return target.rpartition(".")[2]
    path: str = environ.get("PATH_INFO", "/")
    if "/operation/" in path:  # the path of Smithy's RPC protocol: /service/<name>/operation/<operation>
        return path.rpartition("/")[2]
    query: dict[str, str] = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    if "Action" in query:
        return query["Action"]
    if str(environ.get("CONTENT_TYPE", "")).startswith("application/x-www-form-urlencoded"):
        return parse_qs(_body(environ).decode(errors="replace")).get("Action", [""])[0]
    return _rest_operation(service, environ, path, query)


def _body(environ: dict[str, Any]) -> bytes:
    """The request's body, which is put back for the next reader."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _rest_operation(service: str, environ: dict[str, Any], path: str, query: dict[str, str]) -> str:
    """The operation whose method and path fit and of whose required parameters the request has the most."""
    best, name = -1, ""
    for operation, method, pattern, wanted, headers in _rest_operations(service):
        fits = (
            method == environ["REQUEST_METHOD"]
            and pattern.fullmatch(path)
            and all(key in query and value in (None, query[key]) for key, value in wanted.items())
            and all(f"HTTP_{header.upper().replace('-', '_')}" in environ for header in headers)
        )
        if fits and len(wanted) + len(headers) > best:
            best, name = len(wanted) + len(headers), operation
    return name


@functools.cache
def _rest_operations(service: str) -> list[tuple[str, str, re.Pattern[str], dict[str, str | None], list[str]]]:
    """Name, method, path, query parameters (None: any value) and headers of a service's operations."""
    found = []
    model = service_model(service)
    for name in model.operation_names if model else ():
        operation = model.operation_model(name)
        path, _, fixed = operation.http.get("requestUri", "/").partition("?")
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.sub(r"\\\{\w+\\\+\\\}", ".+", re.escape(path)))
        wanted: dict[str, str | None] = dict(parse_qsl(fixed, keep_blank_values=True))
        wanted.pop("x-id", None)  # only some SDKs send it
        headers = []
        shape = operation.input_shape
        for member in shape.required_members if shape else ():
            place = shape.members[member].serialization
            if place.get("location") == "querystring":
                wanted[place["name"]] = None
            elif place.get("location") == "header":
                headers.append(place["name"])
        found.append((name, operation.http["method"], re.compile(pattern + "/?"), wanted, headers))
    return found


@functools.cache
def service_model(service: str) -> Any:
    """botocore's description of a service; None where it knows none of that name."""
    session = botocore.session.get_session()
    return session.get_service_model(service) if service in session.get_available_services() else None

"""What stands between the clients and moto: it notes every call, fails those that shall fail, and answers what moto cannot."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError
from werkzeug.wrappers import Request, Response

from launcher.emulator.operations import FAR_SIDE_KEY, AwsError, Call, error_response, recognise

CONTROL = "/_emulator/"
"""The path below which the emulator itself is spoken to."""

Answer = Callable[[Call], "dict[str, Any] | Response"]


class Wire:
    """A WSGI application around moto's."""

    def __init__(
        self, moto: Callable[..., Any], answers: dict[tuple[str, str], Answer], controls: dict[str, Callable[..., Any]]
    ):
        self.moto = moto
        self.answers = answers
        """(service, operation) -> what answers in moto's place."""
        self.controls = controls
        """The last part of a path below CONTROL -> what it calls with the members of the JSON body."""
        self.calls: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.injected: dict[str, list[AwsError]] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "")
        response = (
            self.control(environ, path.removeprefix(CONTROL)) if path.startswith(CONTROL) else self.answer(environ)
        )
        return (response or self.moto)(environ, start_response)

    def inject(self, operation: str, code: str, times: int, status: int, message: str) -> None:
        """Let the next calls of an operation fail; see `Emulator.inject`."""
        with self.lock:
            self.injected.setdefault(operation, []).extend([AwsError(code, message, status)] * times)

    def answer(self, environ: dict[str, Any]) -> Response | None:
        """Our own answer to a client's call; None where moto shall give it."""
        call = recognise(environ, self.moto)
        try:
            if call.access_key != FAR_SIDE_KEY:
                self.note(call)
            answer = self.answers.get((call.service, call.operation))
            if answer is None:
                return None
            result = answer(call)
        except AwsError as error:
            return error_response(call.service, error)
        if isinstance(result, Response):
            return result
        return Response(json.dumps(result), content_type="application/x-amz-json-1.1")

    def note(self, call: Call) -> None:
        """Remember a client's call, and fail it where that was asked for.

        Raises:
            AwsError: the injected error.
        """
        with self.lock:
            self.calls.append((call.service, call.operation))
            waiting = self.injected.get(call.operation)
            if waiting:
                raise waiting.pop(0)

    def control(self, environ: dict[str, Any], name: str) -> Response:
        """One of the emulator's own controls, for clients in other processes."""
        if name == "calls":
            with self.lock:
                return Response(json.dumps(self.calls), content_type="application/json")
        control = self.controls.get(name)
        if control is None:
            return _refusal(f"no control {name}; there are: calls, {', '.join(self.controls)}", 404)
        try:
            arguments = json.loads(Request(environ).get_data() or b"{}")
            inspect.signature(control).bind(**arguments)
            control(**arguments)
        except (ValueError, TypeError, ClientError) as error:
            return _refusal(str(error), 400)
        return Response("{}", content_type="application/json")


def _refusal(message: str, status: int) -> Response:
    return Response(json.dumps({"error": message}), status, content_type="application/json")

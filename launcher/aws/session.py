"""Clients of AWS, and what went wrong with them in words."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config.issues import Unreachable, UserError, mistake
from launcher.record import failure_causes

EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
NOT_VALID = (
    *("UnrecognizedClientException", "InvalidClientTokenId", "InvalidSignatureException", "SignatureDoesNotMatch"),
    *("InvalidAccessKeyId", "InvalidToken", "AuthFailure"),
)
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403")
THROTTLED = (
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "TooManyRequestsException"),
    *("SlowDown", "InternalFailure", "InternalServerError", "ServiceUnavailable", "ServiceUnavailableException"),
    *("InternalError", "500", "502", "503", "504", "RequestTimeout"),
)
"""Errors that pass. https://docs.aws.amazon.com/sdkref/latest/guide/feature-retry-behavior.html"""
NETWORK = (
    *("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError", "SSLError"),
    *("ProxyConnectionError", "HTTPClientError", "ResponseStreamingError", "IncompleteReadError"),
)
SIGN_IN = ("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "LoginRefreshRequired")

WHOSE = ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_ACCESS_KEY_ID")
"""Variables that say which account is asked, and where: in a notebook they change while the process goes on."""

MAX_ATTEMPTS = 8
"""How often one call is tried."""


def boto_session(region: str) -> Any:
    """A new boto3 session, which reads the credentials anew. Raises UserError where boto3 is not installed."""
    try:
        import boto3
    except ModuleNotFoundError:
        raise mistake(
            "--on aws", "not installed: boto3", "make, or pip install -e '.[aws]', in this kit's folder"
        ) from None
    return boto3.Session(region_name=region)


def client(service: str, region: str) -> Any:
    """A client that asks again what is worth it, with growing pauses; another one where the environment names another account."""
    return _client(service, region, tuple(os.environ.get(name) for name in WHOSE))


@functools.lru_cache(maxsize=32)
def _client(service: str, region: str, whose: tuple[str | None, ...]) -> Any:
    made = boto_session(region)
    from botocore.config import Config

    retries = {"mode": "adaptive", "max_attempts": MAX_ATTEMPTS}
    return made.client(service, config=Config(retries=retries, connect_timeout=10, read_timeout=60))


def forget_clients() -> None:
    """New clients from now on: renewed credentials are read by a new session only."""
    _client.cache_clear()


def code(error: BaseException) -> str:
    """AWS's code of an error, such as AccessDeniedException; "" where it has none."""
    return str(_answer(error).get("Code", ""))


def text(error: BaseException) -> str:
    """AWS's message of an error."""
    return str(_answer(error).get("Message", "")) or str(error)


def _answer(error: BaseException) -> Mapping[str, Any]:
    """What botocore's ClientError holds of AWS's answer; {} for other errors."""
    answer: Mapping[str, Any] = getattr(error, "response", {}).get("Error", {})
    return answer


def is_unknown_job(error: Exception) -> bool:
    """Whether DescribeTrainingJob says that there is no such job."""
    return code(error) in ("ValidationException", "ResourceNotFound") and "not found" in text(error).lower()


def passes(error: Exception) -> bool:
    """Whether an error may be over when AWS is asked again: throttling, the network, or credentials that can be renewed."""
    named = type(error).__name__
    return code(error) in (*EXPIRED, *NOT_VALID, *THROTTLED) or named in (*NETWORK, *SIGN_IN, "NoCredentialsError")


def about(error: BaseException) -> tuple[str, str]:
    """What an error of boto3 or botocore means, and its fix."""
    cause = error.__context__  # an S3 transfer's error hides the one that says why
    if not code(error) and cause is not None and code(cause):
        error = cause
    name, said = type(error).__name__, text(error)
    if "Signature expired" in said or "Signature not yet current" in said or code(error) == "RequestTimeTooSkewed":
        return "this machine's clock is wrong by more than five minutes", "set it, for example with timedatectl"
    if code(error) in EXPIRED or name in SIGN_IN or name.startswith("Login"):
        return "the AWS credentials have expired", "renew them, for example with aws sso login"
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"):
        return f"no AWS credentials ({error})", "aws configure, aws sso login, or set AWS_PROFILE"
    if code(error) in NOT_VALID:
        return f"AWS does not know these credentials ({said})", "aws sts get-caller-identity shows whose they are"
    if code(error) in DENIED:
        return f"not allowed: {said}", "ask for this permission, or use another profile (AWS_PROFILE)"
    if code(error) in THROTTLED:
        return f"AWS asks for fewer requests ({code(error)})", "try again in a minute"
    if name in NETWORK:
        return f"AWS cannot be reached ({error})", "check the network and the region"
    explained = failure_causes.explain(f"{code(error)}: {said}")
    return f"{code(error) or name}: {said}", explained.fix if explained is not None else "see AWS's message"


@contextlib.contextmanager
def as_user_error(key: str) -> Iterator[None]:
    """AWS's errors as the user's mistakes: for calls that the user waits for."""
    try:
        yield
    except errors() as error:
        found, fix = about(error)
        raise mistake(key, found, fix) from error
    except Unreachable as error:
        raise mistake(key, str(error), "try again") from error


@contextlib.contextmanager
def unreachable() -> Iterator[None]:
    """AWS's errors as Unreachable: for calls about a run that goes on without us."""
    try:
        yield
    except errors() as error:
        forget_clients()
        raise Unreachable(*about(error)) from error
    except UserError as error:
        raise Unreachable(error.issues[0].found, error.issues[0].fix) from error


def errors() -> tuple[type[Exception], ...]:
    """What calls of AWS raise; nothing where boto3 is not installed, which `boto_session` tells."""
    try:
        import boto3.exceptions
        import botocore.exceptions
    except ModuleNotFoundError:
        return ()
    return (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, boto3.exceptions.Boto3Error)

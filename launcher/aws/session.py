"""boto3 clients, and their errors in words."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from launcher.config.issues import Unreachable, UserError, mistake
from launcher.record import failure_causes

EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
NOT_VALID = (
    *("UnrecognizedClientException", "InvalidClientTokenId", "InvalidSignatureException", "SignatureDoesNotMatch"),
    *("InvalidAccessKeyId", "InvalidToken", "AuthFailure"),
)
CLOCK = "RequestTimeTooSkewed"
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403")
THROTTLED = (
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "TooManyRequestsException"),
    *("SlowDown", "InternalFailure", "InternalServerError", "ServiceUnavailable", "ServiceUnavailableException"),
    *("InternalError", "500", "502", "503", "504", "RequestTimeout"),
)
"""Transient errors. https://docs.aws.amazon.com/sdkref/latest/guide/feature-retry-behavior.html"""
NETWORK = (
    *("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError", "SSLError"),
    *("ProxyConnectionError", "HTTPClientError", "ResponseStreamingError", "IncompleteReadError"),
    "RetriesExceededError",
)
NO_REASON = ("400", "403")
"""Codes of answers without a body, as S3 gives to a HEAD request: botocore puts the HTTP status in place of a reason.
https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html"""
SIGN_IN = ("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "LoginRefreshRequired")

NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")
"""Among them a `credential_process` that fails, and a role that cannot be assumed again."""

ACCOUNT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_ACCESS_KEY_ID")
"""Variables that select the account and the endpoint. In a notebook they change within one process."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

MAX_ATTEMPTS = 8
"""Attempts of one call."""

ONE_AT_A_TIME = threading.Lock()
"""Threads may share clients, but not sessions: https://boto3.amazonaws.com/v1/documentation/api/latest/guide/session.html"""


def boto_session(region: str) -> Any:
    """A new boto3 session, with credentials read again. Raises UserError if boto3 is not installed."""
    try:
        import boto3
    except ModuleNotFoundError:
        raise mistake(
            "--on aws", "not installed: boto3", "make, or pip install -e '.[aws]', in this kit's folder"
        ) from None
    return boto3.Session(region_name=region)


def client(service: str, region: str) -> Any:
    """A cached client with retries, for the account and endpoint of the environment."""
    return _client(service, region, _account_variables())


def _account_variables() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ACCOUNT_VARIABLES)


@functools.lru_cache(maxsize=32)
def _client(service: str, region: str, account: tuple[str | None, ...]) -> Any:
    with ONE_AT_A_TIME:
        made = _session(region, account)
        from botocore.config import Config

        retries = {"mode": "adaptive", "max_attempts": MAX_ATTEMPTS}
        return made.client(service, config=Config(retries=retries, connect_timeout=10, read_timeout=60))


@functools.lru_cache(maxsize=8)
def _session(region: str, account: tuple[str | None, ...]) -> Any:
    """One session for all services, as each session reads the list of AWS's endpoints. Call only within ONE_AT_A_TIME."""
    return boto_session(region)


def other_partition(region: str) -> str:
    """The suffix of a region's partition, such as -cn; "" for the partition `aws`. Each partition has credentials of its own."""
    with ONE_AT_A_TIME:
        made = _session(region, _account_variables())
        import botocore.exceptions

        try:
            return str(made.get_partition_for_region(region)).removeprefix("aws")
        except botocore.exceptions.UnknownRegionError:
            return ""


def emulator() -> str:
    """The address of the emulator on this machine that the environment names; "" if it names AWS."""
    address = os.environ.get("AWS_ENDPOINT_URL") or ""
    return address if urlsplit(address).hostname in LOOPBACK else ""


def is_closed(emulator: str) -> bool:
    """Whether nothing listens at an emulator's address any more."""
    address = urlsplit(emulator)
    try:
        socket.create_connection((address.hostname, address.port or 80), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def account(region: str) -> str:
    """The account of the environment's credentials: 12 digits. Needs no permission.

    https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html
    """
    return str(client("sts", region).get_caller_identity()["Account"])


def account_in(arn: str) -> str:
    """The account in an Amazon Resource Name, arn:PARTITION:SERVICE:REGION:ACCOUNT:RESOURCE; "" if it has none.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference-arns.html
    """
    return (*arn.split(":"), *[""] * 5)[4]


def forget_clients() -> None:
    """Drop cached clients, so that renewed credentials are read."""
    _client.cache_clear()
    _session.cache_clear()


def code(error: BaseException) -> str:
    """An error's AWS code, such as AccessDeniedException; "" without one."""
    return str(_answer(error).get("Code", ""))


def text(error: BaseException) -> str:
    """An error's AWS message."""
    return str(_answer(error).get("Message", "")) or str(error)


def _answer(error: BaseException) -> Mapping[str, Any]:
    """AWS's answer in botocore's ClientError; {} for other errors."""
    response = getattr(error, "response", None)  # None in botocore's HTTPClientError, too
    answer: Mapping[str, Any] = (response or {}).get("Error", {})
    return answer


def is_unknown_job(error: Exception) -> bool:
    """Whether SageMaker says that the credentials' account has no such job in the region. It also says so of another account's job."""
    return code(error) in ("ValidationException", "ResourceNotFound") and "not found" in text(error).lower()


def is_transient(error: Exception) -> bool:
    """Whether a later attempt may succeed: throttling, network errors, or credentials or a clock that can be corrected."""
    named = type(error).__name__
    return code(error) in (*EXPIRED, *NOT_VALID, *THROTTLED, CLOCK) or named in (*NETWORK, *SIGN_IN, *NO_CREDENTIALS)


def raise_if_transient(error: Exception, region: str) -> None:
    """Raise an error if a later attempt may succeed.

    A HEAD request that S3 refuses has no reason: a missing permission looks like credentials that have expired. STS, which answers without
    a permission, then says whether AWS accepts the credentials. https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html

    Raises:
        the error, or in its place what STS says of the credentials.
    """
    if is_transient(error):
        raise error
    if code(error) not in NO_REASON:
        return
    try:
        account(region)
    except errors() as refused:
        if is_transient(refused):
            raise refused from error


def about(error: BaseException) -> tuple[str, str]:
    """An error of boto3 or botocore in words, and its fix."""
    cause = error.__context__  # an S3 transfer's error hides its cause
    if not code(error) and cause is not None and code(cause):
        error = cause
    name, message = type(error).__name__, text(error)
    if "Signature expired" in message or "Signature not yet current" in message or code(error) == CLOCK:
        return "this machine's clock is wrong by more than five minutes", "set it, for example with timedatectl"
    if code(error) in EXPIRED or name in SIGN_IN or name.startswith("Login"):
        return "the AWS credentials have expired", "renew them, for example with aws sso login"
    if name in (*NO_CREDENTIALS, "ProfileNotFound"):
        return f"no AWS credentials ({error})", "aws configure, aws sso login, or set AWS_PROFILE"
    if code(error) == "400":
        return (
            f"AWS gives no reason ({message}), as with expired credentials",
            "renew them, for example with aws sso login",
        )
    if code(error) in NOT_VALID:
        return f"AWS rejects these credentials ({message})", "aws sts get-caller-identity shows whose they are"
    if code(error) in DENIED:
        return f"not allowed: {message}", "ask for this permission, or use another profile (AWS_PROFILE)"
    if code(error) in THROTTLED:
        return f"AWS throttles requests ({code(error)})", "try again in a minute"
    if name in NETWORK:
        return f"AWS cannot be reached ({error})", "check the network and the region"
    explained = failure_causes.explain(f"{code(error)}: {message}")
    return f"{code(error) or name}: {message}", explained.fix if explained is not None else "see AWS's message"


@contextlib.contextmanager
def as_user_error(key: str) -> Iterator[None]:
    """Turn AWS's errors into UserError, for calls that the user waits for."""
    try:
        yield
    except errors() as error:
        found, fix = about(error)
        raise mistake(key, found, fix) from error


@contextlib.contextmanager
def unreachable() -> Iterator[None]:
    """Turn AWS's errors into Unreachable, for calls about a run that continues without us."""
    try:
        yield
    except errors() as error:
        forget_clients()
        raise Unreachable(*about(error), is_denied=code(error) in DENIED) from error
    except UserError as error:
        raise Unreachable(error.issues[0].found, error.issues[0].fix) from error


def errors() -> tuple[type[Exception], ...]:
    """Errors of AWS calls; () if boto3 is not installed, which `boto_session` reports."""
    try:
        import boto3.exceptions
        import botocore.exceptions
    except ModuleNotFoundError:
        return ()
    return (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, boto3.exceptions.Boto3Error)

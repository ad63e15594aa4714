"""Clients of AWS, and what went wrong with them in words."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from launcher.backends.base import Unreachable
from launcher.findings import UserError, mistake

EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
NOT_VALID = (
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
)
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403")
THROTTLED = (
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "TooManyRequestsException"),
    *("SlowDown", "InternalFailure", "InternalServerError", "ServiceUnavailable", "ServiceUnavailableException"),
)
"""Errors that pass. https://docs.aws.amazon.com/sdkref/latest/guide/feature-retry-behavior.html"""

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


@functools.lru_cache(maxsize=32)
def client(service: str, region: str) -> Any:
    """A client that asks again what is worth it, with growing pauses."""
    from botocore.config import Config

    retries = {"mode": "adaptive", "max_attempts": MAX_ATTEMPTS}
    return boto_session(region).client(service, config=Config(retries=retries, connect_timeout=10, read_timeout=60))


def forget_clients() -> None:
    """New clients from now on: renewed credentials are read by a new session only."""
    client.cache_clear()


def code(error: Exception) -> str:
    """AWS's code of an error, such as AccessDeniedException; "" where it has none."""
    return getattr(error, "response", {}).get("Error", {}).get("Code", "")


def text(error: Exception) -> str:
    """AWS's message of an error."""
    return getattr(error, "response", {}).get("Error", {}).get("Message", "") or str(error)


def about(error: Exception) -> tuple[str, str]:
    """What a botocore error means, and its cure."""
    name = type(error).__name__
    if code(error) in EXPIRED or name in ("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"):
        return "the AWS credentials have expired", "renew them, for example with aws sso login"
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"):
        return f"no AWS credentials ({error})", "aws configure, aws sso login, or set AWS_PROFILE"
    if code(error) in NOT_VALID:
        return (
            f"AWS does not know these credentials ({text(error)})",
            "aws sts get-caller-identity shows whose they are",
        )
    if code(error) in DENIED:
        return f"not allowed: {text(error)}", "ask for this permission, or use another profile (AWS_PROFILE)"
    if code(error) in THROTTLED:
        return f"AWS asks for fewer requests ({code(error)})", "nothing to do: it is asked again"
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError"):
        return f"AWS cannot be reached ({error})", "check the network and the region"
    return f"{code(error) or name}: {text(error)}", "see AWS's message"


@contextlib.contextmanager
def told(key: str) -> Iterator[None]:
    """AWS's errors as the user's mistakes: for calls that the user waits for."""
    import botocore.exceptions

    try:
        yield
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        found, cure = about(error)
        raise mistake(key, found, cure) from error


@contextlib.contextmanager
def unreachable() -> Iterator[None]:
    """AWS's errors as Unreachable: for calls about a run that goes on without us."""
    import botocore.exceptions

    try:
        yield
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        forget_clients()
        raise Unreachable(*about(error)) from error
    except UserError as error:
        raise Unreachable(error.findings[0].found, error.findings[0].cure) from error

"""Secrets that a job declares, read from AWS Secrets Manager into the environment before any code of the script runs.

Standard library and boto3 only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

PERMISSION = "secretsmanager:GetSecretValue"

REASONS = {
    "AccessDeniedException": f"the role or user lacks the permission {PERMISSION}: allow it for this secret",
    "ResourceNotFoundException": "no such secret: check its name, region and account",
    "DecryptionFailure": "the role or user lacks kms:Decrypt for the secret's key",
    "EndpointConnectionError": "Secrets Manager cannot be reached: a VPC needs a NAT gateway or an endpoint for it",
    "ConnectTimeoutError": "Secrets Manager cannot be reached: a VPC needs a NAT gateway or an endpoint for it",
    "NoCredentialsError": f"no AWS credentials: sign in with an identity that has {PERMISSION}",
    "NoRegionError": "no region: give the secret's ARN, or set the job's region",
}
"""Error of Secrets Manager or botocore -> what it means.
https://docs.aws.amazon.com/secretsmanager/latest/apireference/API_GetSecretValue.html"""


class SecretError(Exception):
    """Secrets that cannot be read: `args` holds (config key, what is wrong, fix) of each. It holds no value."""


class _Unusable(Exception):
    """Why one secret cannot be read, and the fix."""


def fetch(secrets: Mapping[str, Mapping[str, str]], region: str | None) -> dict[str, str]:
    """The secrets' values by variable name.

    Args:
        secrets: variable name -> {"secretsmanager": name or ARN}, with the "key" of a field if the secret is a JSON object.
        region: of secrets given by name; None: the one that boto3 is set to.

    Raises:
        SecretError: one or more cannot be read.
    """
    values, wrong = {}, []
    answers: dict[str, str] = {}
    for name, given in secrets.items():
        secret = given["secretsmanager"]
        try:
            if secret not in answers:
                answers[secret] = _answer(secret, region)
            values[name] = _field(answers[secret], given.get("key"))
        except Exception as error:  # botocore's errors have no common class
            code = getattr(error, "response", {}).get("Error", {}).get("Code") or type(error).__name__
            said = str(error) if isinstance(error, _Unusable) else REASONS.get(code, code)
            wrong.append((f"secrets.{name}", f"{secret} of AWS Secrets Manager cannot be read", said))
    if wrong:
        raise SecretError(*wrong)
    return values


def _answer(secret: str, region: str | None) -> str:
    """A secret's text."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise _Unusable("boto3 is not installed: add it to the image or to requirements.txt") from None
    own = secret.split(":")[3] if secret.startswith("arn:") and secret.count(":") > 5 else region
    settings = Config(connect_timeout=10, read_timeout=10, retries={"mode": "standard", "max_attempts": 4})
    client = boto3.session.Session().client("secretsmanager", region_name=own, config=settings)
    answer = client.get_secret_value(SecretId=secret)
    if "SecretString" not in answer:
        raise _Unusable("it is binary: store it as text")
    return str(answer["SecretString"])


def _field(text: str, key: str | None) -> str:
    """A secret's text, or one field of the JSON object in it."""
    if key is not None:
        try:
            value: Any = json.loads(text)[key]
        except (ValueError, KeyError, TypeError):
            raise _Unusable(f"it is not a JSON object with the field {key}: correct `key`") from None
        text = value if isinstance(value, str) else json.dumps(value)
    if "\0" in text:
        raise _Unusable("it holds a NUL character, which an environment variable cannot")
    return text


def provide(secrets: Mapping[str, Mapping[str, str]]) -> None:
    """Set the variables that this process has not inherited; if one cannot be read, say why and end the process."""
    missing = {name: given for name, given in secrets.items() if not os.environ.get(name)}
    try:
        os.environ.update(fetch(missing, os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")))
    except SecretError as error:
        # the toolkit copies the lines from the first exception name onward into FailureReason: `watch` in its process.py
        lines = "".join(f"{': '.join(problem)}\n" for problem in error.args)
        sys.stderr.write(f"RuntimeError: the job needs these secrets\n{lines}")
        sys.stderr.flush()
        os._exit(1)  # Python would go on after an exception here

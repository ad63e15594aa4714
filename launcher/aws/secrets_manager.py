"""Secrets of AWS Secrets Manager: read with your credentials for a run on this machine, and by the job itself on SageMaker."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from launcher.config.entrypoints import kit_modules
from launcher.config.issues import Issue, UserError
from launcher.config.job import Job


def names(job: Job) -> dict[str, dict[str, str]]:
    """Variable -> {"secretsmanager": …}, of the secrets that are in Secrets Manager."""
    return {name: secret.model_dump() for name, secret in job.secrets.items() if secret.secretsmanager is not None}


def values(job: Job) -> dict[str, str]:
    """The values of a job's secrets for a run on this machine: from the environment, or read with your AWS credentials.

    Raises:
        UserError: one is not set or cannot be read.
    """
    issues = list(check_here(job))
    given = {name: os.environ[name] for name in from_environment(job) if name in os.environ}
    if not issues and names(job):
        with kit_modules("launcher_observer.declared_secrets") as (provider,):
            try:
                given |= provider.fetch(names(job), job.region)
            except provider.SecretError as error:
                issues += [Issue(key=key, found=found, fix=fix) for key, found, fix in error.args]
    if issues:
        raise UserError(issues)
    return given


def from_environment(job: Job) -> list[str]:
    """Secrets taken from the environment of whoever starts the run."""
    return [name for name, secret in job.secrets.items() if secret.secretsmanager is None]


def check_here(job: Job) -> Iterator[Issue]:
    """Issues of a job's secrets on this machine."""
    for name in from_environment(job):
        if not os.environ.get(name):
            found = "not set in this environment, from which a run takes it"
            yield Issue(key=f"secrets.{name}", found=found, fix=f"export {name}=…, or read -rs {name}; export {name}")
    if names(job) and importlib.util.find_spec("boto3") is None:
        fix = "make, or pip install -e '.[aws]', in this kit's folder"
        yield Issue(key="secrets", found="not installed: boto3, which reads AWS Secrets Manager", fix=fix)


def not_checked(job: Job, reader: str) -> list[Issue]:
    """What a plan does not know about secrets in Secrets Manager.

    Args:
        reader: who reads them.
    """
    found = f"whether {reader} may read it (secretsmanager:GetSecretValue)"
    return [
        Issue(key=f"secrets.{name}", level="not checked", found=found, fix="the run ends at once where it may not")
        for name in names(job)
    ]


def check_on_sagemaker(job: Job) -> Iterator[Issue]:
    """Issues of a job's secrets on SageMaker."""
    for name in from_environment(job):
        store = (
            f'printf %s "${name}" | aws secretsmanager create-secret --name {name} --secret-string file:///dev/stdin'
        )
        yield Issue(
            key=f"secrets.{name}",
            found="env, whose value anyone who may describe the training job could read",
            valid="{secretsmanager: NAME}",
            fix=f"{store} --region {job.region or 'REGION'}, and write {name}: {{secretsmanager: {name}}}",
        )
    if not names(job):
        return
    if job.network.isolation:
        found = "network.isolation cuts the job off from Secrets Manager"
        yield Issue(key="secrets", found=found, fix="write isolation: false, or remove secrets")
    yield from not_checked(job, "the job's role")

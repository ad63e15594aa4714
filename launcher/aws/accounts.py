"""The account or emulator of a recorded job, and whether the environment names another one."""

from __future__ import annotations

from typing import Any

from launcher.aws import session
from launcher.config import placeholders
from launcher.config.issues import mistake


def sent_to(known: dict[str, Any]) -> str:
    """The account in a job's ARN or, before SageMaker's first answer, the one it was sent to; "": not recorded.

    Args:
        known: the content of remote.json.
    """
    return session.account_in(known.get("TrainingJobArn", "")) or known.get("account", "")


def was_emulated(known: dict[str, Any]) -> bool:
    """Whether the job ran on an emulator that is closed. A tunnel to AWS may have had such an address too, but it has a real account."""
    address = known.get("emulator")
    return bool(address) and sent_to(known) == placeholders.ACCOUNT and session.is_closed(str(address))


def refuse_other(region: str, known: dict[str, Any]) -> None:
    """Raise UserError if the environment names another account or emulator than the job was sent to.

    SageMaker answers in both cases that it has no such job. All users' emulators have the same account, but each has its own address.
    """
    here = session.emulator()
    there = known.get("emulator", here)
    if here != there:
        found = f"the environment names {_place(here)}, and the job is on {_place(there)}"
        fix = "export the variables that launcher emulate printed" if there else "unset AWS_ENDPOINT_URL"
        raise mistake("AWS_ENDPOINT_URL", found, fix)
    ours = session.account(region)
    its = sent_to(known) or ours
    if ours != its:
        found = f"these credentials are of account {ours}, and the job is in {its}"
        raise mistake("credentials", found, f"set AWS_PROFILE to a profile of account {its}")


def _place(emulator: str) -> str:
    return f"the SageMaker emulator at {emulator}" if emulator else "AWS"

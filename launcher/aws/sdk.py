"""Which of SageMaker's Python SDKs is installed: version 2, version 3, or none. Both are the package `sagemaker`, so it is never both."""

from __future__ import annotations

import importlib.metadata
import re

from launcher.config.issues import mistake

TRAINS = "sagemaker-train"
"""The part of SDK v3 that starts training jobs; the package `sagemaker` of version 3 brings it."""

TO_V2, TO_V3 = "pip install 'sagemaker>=2.257.7,<3'", "pip install 'sagemaker>=3.27'"


def v2() -> str | None:
    """SDK v2's version; None: not installed."""
    found = _version("sagemaker")
    return found if found is not None and found.startswith("2.") else None


def v3() -> str | None:
    """The version of SDK v3's TRAINS; None: not installed, or broken by v2 in the same environment."""
    return None if v2() else _version(TRAINS)


def supports_estimators() -> bool:
    """Whether SDK v2 is there, in 2.257.7, the oldest that is tested, or newer."""
    return _numbers(v2()) >= (2, 257, 7)


def require_v2() -> None:
    """Raise UserError if `plan.estimator()` has no SDK."""
    if supports_estimators():
        return
    here = v3()
    raise mistake(
        "estimator",
        f"{TRAINS} {here} is installed, which has no estimator" if here else _found("sagemaker", v2()),
        f"plan.model_trainer(), or an environment of its own with {TO_V2}" if here else TO_V2,
        valid="SageMaker Python SDK v2, 2.257.7 or newer",
    )


def require_v3() -> None:
    """Raise UserError if `plan.model_trainer()` has no SDK. TRAINS 1.27 is the oldest that is tested."""
    here = v3()
    if _numbers(here) >= (1, 27):
        return
    old = v2()
    raise mistake(
        "model_trainer",
        f"sagemaker {old} is installed, which has no ModelTrainer" if old else _found(TRAINS, here),
        f"plan.estimator(), or an environment of its own with {TO_V3}" if old else TO_V3,
        valid=f"SageMaker Python SDK v3 ({TRAINS} 1.27 or newer), without v2",
    )


def _found(package: str, version: str | None) -> str:
    return f"{package} {version} is installed" if version else f"not installed: {package}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str | None) -> tuple[int, ...]:
    """A version's leading numbers; () for None."""
    return tuple(map(int, re.findall(r"\d+", (version or "").split("+")[0])[:3]))

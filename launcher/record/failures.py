"""How a failed run's record describes its failure, from the platform's reason and the hosts' logs."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher.record import failure_causes, trust
from launcher.record.records import RunFolder

PART_BYTES = 2**20
"""Bytes read from each host's log to explain a failure: this many from its start and from its end, however long its lines are."""

# What the toolkit writes of a script that failed, in SageMaker's FailureReason too, which cuts it:
# sagemaker_training/errors.py. It quotes standard error from the first known error on, and is empty if none is known.
_TOOLKITS = re.compile(
    r'\A(?:AlgorithmError: )?\w+:\n\s*ExitCode (?P<code>-?\d+)\n\s*ErrorMessage "(?:.*?\n\s*Command "[^\n]*"$|.*)',
    re.DOTALL | re.MULTILINE,
)
_EXIT_CODE = re.compile(r",? *exit code:? (?P<code>\d+)")
_AGENTS_CODE = re.compile(r"failed \(exitcode: (-?\d+)\)")
_TOOLKITS_CODE = re.compile(r"^ExitCode (-?\d+)$")
_MODULE = re.compile(r"No module named '([\w.]+)'")


def describe(
    folder: RunFolder,
    hosts: Sequence[str],
    reason: str,
    *,
    exit_code: int | None = None,
    packages: str = failure_causes.IN_AN_IMAGE,
    config: bool = True,
) -> dict[str, Any]:
    """A failed run's part of outcome.json: the failure, and its host, exit code, traceback, cause, fix and evidence if known.

    Args:
        hosts: those whose logs describe it, starting with the one that failed first.
        reason: SageMaker's FailureReason, or a host's failure file. The toolkit's own text in it, which often lacks the error,
            is replaced by what the log says, as is "".
        exit_code: the toolkit's.
        packages: how the host's Python gets a module.
        config: whether the run has a config. Both as for `failure_causes.explain`.
    """
    logs = {host: _lines(folder.log(host)) for host in hosts}
    everything = [line for lines in logs.values() for line in lines]
    found: dict[str, Any] = {"failure": reason, "exit_code": script_exit_code(reason, everything, exit_code)}
    for host, lines in logs.items():
        traceback = failure_causes.first_traceback(lines)
        if traceback:
            found |= {"failed_host": host, "traceback": traceback}
            break
    toolkits = _TOOLKITS.match(reason)
    if not reason or (toolkits is not None and everything):
        text = failure_causes.exception_of(found["traceback"]) if "traceback" in found else _last_words(logs, found)
        rest = _EXIT_CODE.sub("", reason[toolkits.end() :]).strip() if toolkits is not None else ""
        found["failure"] = "\n".join(filter(None, (text, rest)))
    explained = failure_causes.explain(reason, everything, packages=packages, config=config)
    if explained is not None:
        found |= {"cause": explained.cause, "fix": explained.fix, "evidence": explained.evidence}
        found |= _of_the_users_own(folder, explained.evidence)
    return {name: value for name, value in found.items() if value is not None}


def script_exit_code(reason: str, log: Iterable[str], toolkit: int | None) -> int | None:
    """The script's exit code, negative for a signal: from torchrun's agent, else from the toolkit, which itself exits with 1."""
    agents, toolkits = [], []
    for line in (*log, *reason.splitlines()):
        agents += [found[1]] if (found := _AGENTS_CODE.search(line)) else []
        toolkits += [found[1]] if (found := _TOOLKITS_CODE.match(line)) else []
    reported = _EXIT_CODE.search(reason)
    codes = [*agents, *toolkits, *([reported["code"]] if reported is not None else [])]
    return int(codes[0]) if codes else toolkit


def how_it_ended(code: int) -> str:
    """An exit code in words: `exit code 2`, or `killed by SIGSEGV`."""
    try:
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def _last_words(logs: dict[str, list[str]], found: dict[str, Any]) -> str:
    """The last lines of the first host that printed any."""
    for lines in logs.values():
        last = failure_causes.ending(lines)
        if last:
            return "\n".join(("the last lines of its output:", *last))
    code = found["exit_code"]
    return f"the script printed nothing{'' if code is None else f' ({how_it_ended(code)})'}"


def _of_the_users_own(folder: RunFolder, evidence: str) -> dict[str, str]:
    """Cause and fix for a module missing from a package of the source folder itself."""
    missing = _MODULE.search(evidence)
    top = missing[1].partition(".")[0] if missing is not None else ""
    if missing is None or not ((folder.code / top).is_dir() or (folder.code / f"{top}.py").is_file()):
        return {}
    return {
        "cause": f"the source folder has {top}, but no module {missing[1]}",
        "fix": "correct the name in the import, or that of the file; a file that git or .launcherignore ignores stays behind",
    }


def _lines(file: Path) -> list[str]:
    """A log's lines, and what a progress bar wrote over itself; for a long log, the first and the last."""
    if not file.is_file():
        return []
    with trust.opened(file) as log:
        start = log.read(PART_BYTES)
        left = log.seek(0, 2) - len(start)
        log.seek(-min(left, PART_BYTES), 2)
        end = log.read(PART_BYTES)
    if left > PART_BYTES:  # the gap cuts a line at both ends
        start = start[: max(start.rfind(b"\n"), start.rfind(b"\r")) + 1]
        end = re.split(rb"[\r\n]", end, maxsplit=1)[-1]
    return [line.rstrip("\n") for line in io.StringIO((start + end).decode("utf-8", "replace"), newline=None)]

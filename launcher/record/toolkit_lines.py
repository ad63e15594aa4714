"""Log lines that are not the script's: those of AWS's container toolkit around it, torchrun's agent and mpirun."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What precedes a process's own text: by torch's excepthook and docker compose, where a blank may follow; by mpirun
# as SageMaker's toolkit starts it, and by torchrun --tee.
_PREFIX = re.compile(
    r"(\[rank\d+\]:|algo-\d+[\w-]* +\|) ?|(\[default\d+\]:|\[1,(?:mpirank:)?\d+(?:,[\w.-]+)?\]<std\w+>:)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MPI_RANK = "[1,"

# The toolkit's logging, and that of its AWS clients: sagemaker_training/logging_config.py
_LOGGED = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?:sagemaker|botocore|boto3|s3transfer)\S* +(?P<level>[A-Z]+) +(?P<text>.*)"
)
_IMAGE = re.compile(r"bash: (?:cannot set terminal process group|no job control in this shell)")
"""Of AWS's images, whose start script is an interactive shell without a terminal."""
_REPORTED = re.compile(r"Reporting training FAILURE|Encountered exit_code|\w+Error:$")
"""The toolkit's errors about the script. Others are about the toolkit itself."""
_INVOKING, _LISTING, _COMMAND = "Invoking user script", "Training Env:", "Invoking script with the following command:"

_AGENT = re.compile(r"^.{0,60}\btorch[./]distributed[./](?:elastic|run|launcher)\b")
"""A log line of torchrun's agent, in any of torch's forms."""
_AGENTS_END = re.compile(r"^.{0,60}\btorch[./]distributed[./]elastic\b.*\bfailed \(exitcode: ")
"""The first of its last lines, which report that a rank failed."""


def split_prefix(raw: str, longest: int = 4000) -> tuple[str, str]:
    """A log line as (the prefixes that name its process, the rest without colours), the rest at most `longest` characters."""
    line, key = raw.rstrip("\r\n").rpartition("\r")[2][:longest], ""  # a progress bar writes over its line
    line = _COLOUR.sub("", line)
    while (match := _PREFIX.match(line)) is not None:
        key, line = key + match[0].rstrip(), line[match.end() :]
    return key, line


class ToolkitLines:
    """Tells the toolkit's lines in one host's log from all others. It must see every line, in order."""

    def __init__(self) -> None:
        self._inside = ""
        """invoking, listing (of the environment), command, blank (after it), error (about the script), or none."""

    def has(self, line: str) -> bool:
        """Whether the next line is the toolkit's."""
        logged = _LOGGED.match(line)
        if logged is not None:
            if logged["level"] in ("INFO", "DEBUG"):
                self._inside = "invoking" if logged["text"] == _INVOKING else ""
                return True
            reported = logged["level"] == "ERROR" and _REPORTED.match(logged["text"]) is not None
            self._inside = "error" if reported and logged["text"].endswith(":") else ""
            return reported
        if self._inside == "invoking" and line.strip():
            self._inside = "listing" if line.strip() == _LISTING else ""
        if self._inside == "listing":
            self._inside = "command" if line.strip() == _COMMAND else "listing"
            return True
        if self._inside == "command":
            self._inside = "blank" if line.strip() else "command"
            return True
        if self._inside == "blank" and line.strip():
            self._inside = ""
        return bool(self._inside) or _IMAGE.match(line) is not None


def last_lines(log: Iterable[str], count: int) -> list[str]:
    """The last lines that the script itself printed, each once, without prefixes and empty lines."""
    toolkit = ToolkitLines()
    lines = [line for line in log if not toolkit.has(line)]
    end = next((number for number, line in enumerate(lines) if _AGENTS_END.match(line)), len(lines))
    split = [split_prefix(line, 500) for line in lines[:end]]
    by_mpi = any(key.startswith(_MPI_RANK) for key, _ in split)  # mpirun's own lines have no prefix
    printed = [line.rstrip() for key, line in split if key.startswith(_MPI_RANK) or not by_mpi]
    printed = [line for line in printed if line and not _AGENT.match(line)]
    return [*dict.fromkeys(reversed(printed))][:count][::-1]

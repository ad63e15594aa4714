"""`launcher watch`: run any training command of this machine as it is, measure it, and say why it is slow."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.commands import options as arguments
from launcher.config.issues import UserError, mistake
from launcher.planner.python_start import SWITCH, switched_off
from launcher.record import records
from launcher.record.log_lines import last_lines
from launcher.runner.watch import HOST, Ended, watch

SHOWN = 3
"""Findings that are printed at the end."""

ERROR = "launcher observer: "
"""How a line of the command's output begins if the observer ended itself."""

NOTHING_STEPPED = (
    "no optimizer of PyTorch stepped in a Python process of this command. It may not have trained, or trained with another library, or "
    "started Python with -I, -E or -S or a PYTHONPATH of its own, which leaves the observer out"
)


def add(to: arguments.Add) -> None:
    made = to("watch", "run any training command of this machine, unchanged, and explain why it is slow", carry_out)
    made.add_argument("--name", metavar="NAME", help="what the run's name begins with (default: the script's name)")
    made.add_argument("--html", metavar="FILE", help="also write the diagnosis as a page with charts")
    made.usage = "launcher watch [options] -- COMMAND ..."


def carry_out(options: argparse.Namespace) -> int:
    command = options.behind
    if not command:
        raise mistake("command", "none", "put it after --: launcher watch -- python train.py")
    if shutil.which(command[0]) is None:
        script = Path(command[0]).is_file()
        fix = (
            f"launcher watch -- python {command[0]}, or make it executable"
            if script
            else "check its path, or activate its environment"
        )
        raise mistake("command", f"{command[0]}: {'not executable' if script else 'no such program'}", fix)
    page = arguments.page(options)
    name = re.sub(r"[^A-Za-z0-9]+", "-", options.name or _script(command)).strip("-")[:42].strip("-") or "watch"
    ended = watch(command, name, lambda run: arguments.note(f"launcher: run {run.name}"))
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the exit code stays the command's
        if not ended.hung_up:
            try:
                _report(ended, page)
            except OSError as error:
                arguments.note(f"  not reported: {error}; launcher diagnose {ended.run.name} tries again")
    return ended.exit_code


def _script(command: Sequence[str]) -> str:
    """What a command runs, in one word: its script or module, else its program."""
    for word, after in zip(command, [*command[1:], ""]):
        if word == "-m" and after:
            return after
        if word.endswith((".py", ".sh")):
            # a whole line for a shell may name secrets before its script
            return Path(word if Path(word).exists() else word.split()[-1]).stem
    return Path(command[0]).name


def _report(ended: Ended, page: Path | None) -> None:
    """Report how the command ended and what was found, beside its own output."""
    run, outcome, log = ended.run, ended.run.outcome(), arguments.note
    failed = outcome["state"] == records.FAILED  # which says why nothing was measured
    log(f"launcher: {run.name}: {outcome['state']} after {outcome['seconds']:.0f} s, {_how(ended, outcome)}")
    for name in ("cause", "fix"):
        if outcome.get(name):
            log(f"  {name + ':':<6} {outcome[name]}")
    if ended.left:
        log("  processes that it started go on; what they measure is added to the run")
    try:
        diagnosis = run.diagnose()
    except UserError as error:
        log(f"  not diagnosed: {error.issues[0].found}" + ("" if failed else f"; {_why_no_steps(ended)}"))
        return
    from launcher.insight.report_text import taken, titled  # here: with numpy, which only a diagnosis needs

    if not diagnosis.measurements.ranks and not failed:
        log(f"  steps not measured: {_why_no_steps(ended)}")
    elif diagnosis.measurements.ranks and (diagnosis.report.too_short or not diagnosis.findings):
        log(f"  {diagnosis.headline}")
    for number, finding in enumerate(diagnosis.findings[:SHOWN], 1):
        log(f"  {number}. {titled(finding)} ({taken(finding)})")
        for fix in finding.fixes[:1]:
            log(f"     {fix.label}: {fix}")
            if fix.command is not None:
                log(f"     {fix.command}")
    log(f"  all of it: launcher diagnose {run.name}")
    if page is not None:
        log(f"  page: {diagnosis.save_html(page)}")


def _why_no_steps(ended: Ended) -> str:
    if value := switched_off(os.environ):
        return f"{SWITCH}={value} in the environment switches the observer off: unset it"
    said = [line for line in last_lines(ended.run.folder.log(HOST)) if line.startswith(ERROR)]
    return said[-1].removeprefix(ERROR) if said else NOTHING_STEPPED


def _how(ended: Ended, outcome: dict[str, object]) -> str:
    reason = outcome.get("stop_reason")
    return f"exit code {ended.exit_code}" + (f" ({reason})" if reason else "")

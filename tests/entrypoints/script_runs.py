"""An entry script's whole run in a forked process, for tests of what the script does: its job as planned, without SageMaker's toolkit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launcher
from tests.conftest import ROOT
from tests.entrypoints.ranks import run_ranks


@dataclass(frozen=True)
class ScriptRun:
    """What a script left, and what it said."""

    output: Path
    returncode: int
    stdout: str
    stderr: str

    def result(self) -> dict[str, Any]:
        return json.loads((self.output / "data/algo-1/result.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "data/algo-1/metrics.jsonl").read_text().splitlines()]

    def failure(self) -> str:
        return (self.output / "failure").read_text()


def script_run(folder: Path, job: launcher.Job) -> ScriptRun:
    """Run a job's script to its end, in a folder of its own.

    Args:
        job: one process, and inputs that are folders. Its plan has no errors.
    """
    folder.mkdir(exist_ok=True)
    assert launcher.plan(job).errors == ()
    environment = {f"SM_CHANNEL_{name.upper()}": str(given.folder) for name, given in job.inputs.items()}
    environment["SM_HPS"] = json.dumps({"system_monitor": False, **job.hyperparameters})
    text = f"""
        import runpy
        os.chdir(out)
        runpy.run_path({str(ROOT / "entrypoints" / job.script)!r}, run_name="__main__")
    """
    [done] = run_ranks(folder, text, environments=[environment])
    return ScriptRun(folder / "output", done.returncode, done.stdout, done.stderr)

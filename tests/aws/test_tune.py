"""`launcher tune --on aws`, against the emulator: the price before the first trial, `--max-cost`, and settings from outside."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.commands import main
from tests.aws.conftest import BUCKET, REGION, ROLE
from tests.study.slow_reads import slow_reads

pytestmark = pytest.mark.usefixtures("connected")


@pytest.fixture
def config(tmp_path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(textwrap.dedent(slow_reads(samples=160, seconds=0.03)))
    job = {
        "name": "far",
        "script": "train.py",
        "source": str(source),
        "role": ROLE,
        "region": REGION,
        "output": f"s3://{BUCKET}/runs",
        "image": {"framework_version": "2.8.0", "python": "py312"},
        "compute": {"instance_type": "ml.m5.xlarge", "max_hours": 24},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    return file


def test_the_price_is_reported_first_and_one_that_pays_for_no_change_is_refused(config, capsys):
    """A trial takes its 45 s, 15 minutes at most for its start and two to stop: 1065 s at $0.23 an hour."""
    words = ["tune", str(config), "--on", "aws", "--minutes", "3", "--trials", "4"]
    assert main.main([*words, "--max-cost", "0.2"]) == 2
    reported = capsys.readouterr()
    assert "4 trials: at most $0.27 in all; each at most $0.0680" in reported.out, reported.out
    assert "one change takes 4 trials of at most $0.0680 each" in reported.err and "at least $0.28" in reported.err
    assert launcher.runs() == []


@pytest.mark.slow
@pytest.mark.alone  # the starts of 16 workers take as long as what else runs leaves them
def test_a_script_of_ones_own_is_tuned_from_outside_within_its_cost(config, tmp_path):
    said: list[str] = []
    table = tmp_path / "trials.csv"
    found = launcher.tune(config, on="aws", minutes=6, trials=8, max_cost=0.33, table=table, log=said.append)
    assert found.changes["num_workers"] >= 2 and found.speedup > 1.3, str(found)
    settings = yaml.safe_load(found.new_config() or "")["environment"]["LAUNCHER_SETTINGS"]
    assert json.loads(settings) == found.changes and "+environment: {LAUNCHER_SETTINGS: " in found.diff()
    assert all(run.backend == "aws" and run.name.startswith("far-tune-") for run in launcher.runs())
    spent = sum(run.outcome()["cost_usd"] for run in launcher.runs())
    assert 0 < spent <= 0.33 and len(launcher.runs()) <= 8

"""What `launcher emulate` is asked to have: prices and file systems."""

from __future__ import annotations

import pytest

from launcher import UserError, load
from launcher.aws import prices
from launcher.emulator import start
from tests.emulator.conftest import Aws

CONFIG = "configs/hyundai_segmentation.yaml"


def test_what_cannot_be_is_refused_all_at_once_before_the_emulator_starts(tmp_path):
    given = {"ml.p3.16xlarg": 28.0, "ml.p3.2xlarge": float("nan"), "ml.p4d.24xlarge": 0.0}
    folders = {"fs-0123456789abcdef9": tmp_path, "fs-0123456789abcdef0": tmp_path / "not there"}
    with pytest.raises(UserError) as refused:
        start([CONFIG], tmp_path / "emulator", prices=given, file_systems=folders)
    assert [(one.key, one.found) for one in refused.value.issues] == [
        ("--price", "ml.p3.16xlarg"),
        ("--price", "ml.p3.2xlarge=nan"),
        ("--price", "ml.p4d.24xlarge=0.0"),
        ("--file-system", "fs-0123456789abcdef9"),
        ("--file-system", f"fs-0123456789abcdef0={tmp_path / 'not there'}"),
    ]
    assert refused.value.issues[0].fix == "did you mean ml.p3.16xlarge?"
    assert not (tmp_path / "emulator").exists()


def test_a_price_holds_for_a_type_that_only_the_command_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where prices that were read are kept
    with start([CONFIG], tmp_path / "emulator", prices={"ml.g5.48xlarge": 20.36}) as emulator:
        pricing = Aws(emulator.environment).client("pricing", "us-east-1")
        assert prices.read_price_list(pricing, load(CONFIG).region, ["ml.g5.48xlarge"]) == {"ml.g5.48xlarge": 20.36}

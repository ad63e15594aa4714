"""What `launcher emulate` is asked to have: prices and file systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from launcher import UserError, load
from launcher.aws import prices
from launcher.emulator import start
from tests.emulator.conftest import NOBODY, ROLE, Aws

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


def test_hosts_of_a_config_may_train_together_by_efa_too(tmp_path):
    """As its plan asks of the security groups."""
    with start([CONFIG], tmp_path / "emulator") as emulator:
        names = load(CONFIG).network.security_groups
        found = Aws(emulator.environment).client("ec2", load(CONFIG).region).describe_security_groups(GroupIds=names)
    for group in found["SecurityGroups"]:
        for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
            assert any(
                pair["GroupId"] == group["GroupId"]
                for rule in rules
                if rule["IpProtocol"] == "-1"
                for pair in rule["UserIdGroupPairs"]
            )


def test_configs_of_two_regions_may_name_one_role(tmp_path):
    """IAM is global."""
    configs = []
    for region in ("eu-west-1", "us-west-2"):
        values = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
        config = tmp_path / f"{region}.yaml"
        config.write_text(
            yaml.safe_dump({**values, "region": region, "role": ROLE, "output": f"s3://of-{region}/runs"})
        )
        configs.append(config)
    with start(configs, tmp_path / "emulator") as emulator:
        aws = Aws(emulator.environment)
        assert [role["Arn"] for role in aws.client("iam").list_roles()["Roles"]] == [ROLE]
        assert {bucket["Name"] for bucket in aws.client("s3").list_buckets()["Buckets"]} == {
            "of-eu-west-1",
            "of-us-west-2",
        }


@pytest.mark.parametrize("mode, owner", [(0o777, 0), (0o1777, 0), (0o770, 0), (0o700, NOBODY)])
def test_no_job_runs_in_a_folder_that_others_can_change(tmp_path, mode, owner):
    folder = tmp_path / "hosts"
    folder.mkdir()
    folder.chmod(mode)
    if owner:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, owner, owner)
    with pytest.raises(UserError, match="other users can change the code in it"):
        start([], folder)
    with start([], tmp_path / "new" / "hosts"):
        assert (tmp_path / "new" / "hosts").stat().st_mode & 0o777 == 0o700

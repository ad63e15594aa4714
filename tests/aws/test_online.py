"""Validation of a plan against the AWS account, on the emulator: what is wrong is an error, what cannot be read is "not checked"."""

from __future__ import annotations

import json
import os

import boto3
import pytest
import yaml

import launcher
from launcher.aws import disks, security_groups, session
from launcher.aws.online import OnlineChecks
from launcher.commands import main
from launcher.config import placeholders
from launcher.emulator import Emulator, account
from tests.conftest import ROOT
from tests.emulator.conftest import Aws

REGION, BUCKET = "us-west-2", "amzn-s3-demo-bucket"
FOOD = f"s3://{BUCKET}/kt/food"
IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker"
WITHOUT_EFA = "compute.instance_type=ml.g5.xlarge"


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """An account that has all that the KT and Hyundai configs name."""
    folder = tmp_path_factory.mktemp("emulator")
    with Emulator(folder) as emulator:
        emulator.add_bucket(BUCKET, REGION)
        emulator.add_bucket("amzn-s3-demo-bucket-elsewhere", "eu-west-1")
        emulator.add_role("arn:aws:iam::123456789012:role/SageMakerTraining")
        emulator.add_subnet("subnet-0123456789abcdef0", REGION)
        emulator.add_security_group("sg-0123456789abcdef0", REGION)
        emulator.add_file_system("fs-0123456789abcdef0", kind="FSxLustre", region=REGION, folder=folder)
        emulator.add_file_system("fs-0123456789abcdef1", kind="EFS", region=REGION, folder=folder)
        emulator.set_price("ml.p4d.24xlarge", 32.77, REGION)
        emulator.set_quota("ml.p4d.24xlarge for training job usage", 4.0, REGION)
        emulator.set_quota("ml.p4d.24xlarge for training warm pool usage", 0.0, REGION)
        s3 = Aws(emulator.environment).client("s3", REGION)
        for key in (
            "food/train/apple/1.jpg",
            "food/train-old/1.jpg",
            "food/validation/apple/1.jpg",
            "teacher/model.tar.gz",
        ):
            s3.put_object(Bucket=BUCKET, Key=f"kt/{key}", Body=b"12345")
        s3.put_object(Bucket=BUCKET, Key="driving/validation/1.png", Body=b"12345")
        yield emulator


@pytest.fixture(autouse=True)
def connected(emulator, nobody, monkeypatch):
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "MAX_ATTEMPTS", 1)
    session.forget_clients()
    yield
    session.forget_clients()


def looked(config: str, *overrides: str) -> launcher.Plan:
    plan = launcher.plan(launcher.load(ROOT / "configs" / f"{config}.yaml", overrides), on="aws")
    assert plan.errors == ()
    return launcher.check(plan)


def found(plan: launcher.Plan, level: str) -> list[str]:
    return [str(issue) for issue in plan.issues if issue.level == level]


def test_what_is_all_there_passes_and_every_request_only_reads(aws_calls):
    assert looked("kt_food_tag").errors == ()
    looked("hyundai_segmentation")  # also reads network and file system; its security group is a case below
    operations = {operation for _, operation in aws_calls.made}
    assert {"GetRole", "ListObjectsV2", "DescribeSubnets", "DescribeFileSystems", "GetProducts"} <= operations
    assert all(name.startswith(("Get", "List", "Describe", "Head")) for name in operations), operations


def test_the_ceiling_comes_from_the_price_list_and_is_kept_with_its_date(emulator):
    plan = looked("kt_food_tag")
    assert plan.price.ceiling == pytest.approx(4 * 32.77 * (30 + 2 / 60))
    offline = launcher.plan(launcher.load(ROOT / "configs/kt_food_tag.yaml"), on="aws")
    assert offline.price == plan.price
    assert f"{os.environ['AWS_ENDPOINT_URL']}'s price list of 20" in plan.price.text


@pytest.mark.parametrize(
    ("config", "overrides", "level", "expected"),
    [
        ("kt_food_tag", [f"inputs.train.s3={FOOD}/trian/"], "error", ["inputs.train: no objects under s3://amzn-s3-demo-bucket/kt/food/trian/", "did you mean kt/food/train?"]),
        ("kt_food_tag", [f"inputs.train.s3={FOOD}/train"], "error", ["also matches 1 objects outside the folder, such as kt/food/train-old/1.jpg, and FastFile takes whole folders", f"write {FOOD}/train/"]),
        ("kt_food_tag", [f"inputs.train.s3={FOOD}/train", "inputs.train.mode=File"], "warning", ["also matches 1 objects outside the folder", f"write {FOOD}/train/"]),
        ("kt_food_tag", [f"inputs.train.s3={FOOD}/train/", "inputs.train.mode=File", "inputs.train.data_type=ManifestFile"], "not checked", ["inputs.train: whether what", "fits the disk"]),
        ("kt_food_tag", ["profiling={output: s3://no-such-bucket-here/profiles}"], "error", ["profiling.output: "]),
        ("kt_food_tag", ["inputs.train.s3=s3://amzn-s3-demo-bucket-elsewhere/x/"], "error", ["the bucket amzn-s3-demo-bucket-elsewhere is in eu-west-1, the job in us-west-2"]),
        ("kt_food_tag", ["output=s3://amzn-s3-demo-bucket-of-nobody/x"], "error", ["output: amzn-s3-demo-bucket-of-nobody: no such bucket", "aws s3 mb"]),
        ("kt_food_tag", ["checkpoints=s3://amzn-s3-demo-bucket/kt/teacher", "inputs.teacher={s3: s3://amzn-s3-demo-bucket/kt/food/}"], "warning", ["holds objects already, and the job resumes from them"]),
        ("kt_food_tag", ["role=arn:aws:iam::123456789012:role/Nobody"], "error", ["role/Nobody: no such role"]),
        ("kt_food_tag", ["role=arn:aws:iam::210987654321:role/Other"], "warning", ["is not in the account of your credentials"]),
        ("kt_food_tag", ["compute.instance_count=8"], "error", ["8 hosts; this account's quota is 4", "Service Quotas"]),
        ("kt_food_tag", ["compute.keep_alive_minutes=10"], "error", ["this account's quota is 0 (ml.p4d.24xlarge for training warm pool usage)"]),
        ("kt_food_tag", ["compute.instance_type=ml.p4de.24xlarge"], "not checked", ["price list has no training price for ml.p4de.24xlarge", "no quota named"]),
        ("hyundai_segmentation", ["inputs.train.path=/data/train"], "error", ["the file system's mount name is fsx", "write path: /fsx/data/train"]),
        ("hyundai_segmentation", ["inputs.train.fsx=fs-0000000000000000f"], "error", ["fs-0000000000000000f: no such file system"]),
        ("hyundai_segmentation", ["network.subnets=[subnet-00000000]"], "error", ["subnet-00000000: no such subnet in us-west-2"]),
        ("hyundai_segmentation", ["network.security_groups=[sg-00000000]"], "error", ["sg-00000000: no such security group in us-west-2"]),
        ("hyundai_segmentation", [], "error", ["no group lets inbound and outbound traffic of EFA through, by which hosts of ml.p4d.24xlarge"]),
        ("hyundai_segmentation", [WITHOUT_EFA, "distribution=torchrun"], "error", ["no group allows traffic from its own members, and 4 hosts have to reach each other"]),
    ],
)  # fmt: skip
def test_what_is_not_as_the_job_says_is_reported_with_its_fix(config, overrides, level, expected):
    text = "\n".join(found(looked(config, *overrides), level))
    for piece in expected:
        assert piece in text


def test_sagemaker_takes_no_role_of_another_account_which_an_emulator_does_not_mind(monkeypatch):
    role = "role=arn:aws:iam::210987654321:role/Other"
    monkeypatch.setattr(session, "emulator", lambda: "")
    [text] = found(looked("kt_food_tag", role), "error")
    assert "role/Other is not in the account of your credentials (123456789012)" in text


def test_outside_of_awss_own_partition_no_price_is_asked_for(aws_calls):
    """Whose credentials the price list would call wrong."""
    chinese = ["region=cn-north-1", "compute.instance_type=ml.p3.2xlarge"]
    job = launcher.load(ROOT / "configs/kt_food_tag.yaml", chinese)
    [reported] = OnlineChecks(launcher.plan(job, on="aws")).price()
    assert reported.level == "not checked" and "takes no credentials of cn-north-1" in reported.found
    assert "GetProducts" not in {operation for _, operation in aws_calls.made}


def the_group(emulator, name: str, *, inbound=(), outbound=()) -> str:
    """A new security group with rules; the change of a config that makes it the job's."""
    ec2 = boto3.client("ec2", region_name=REGION)
    emulator.add_security_group(name, REGION)
    for rules, add in ((inbound, "authorize_security_group_ingress"), (outbound, "authorize_security_group_egress")):
        if rules:
            getattr(ec2, add)(GroupId=name, IpPermissions=list(rules))
    return f"network.security_groups=[{name}]"


def from_itself(name: str, **ports) -> dict:
    """A rule for a group's own members: all traffic, or some ports."""
    return {"IpProtocol": "tcp" if ports else "-1", **ports, "UserIdGroupPairs": [{"GroupId": name}]}


ADDRESSES = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}


def test_security_groups_that_open_lustre_and_themselves_pass(emulator):
    name = "sg-0aaaaaaaaaaaaaaa0"
    own = the_group(emulator, name, inbound=[from_itself(name)], outbound=[from_itself(name)])
    plan = looked("hyundai_segmentation", own)
    assert plan.errors == ()
    assert not any("network.security_groups" in text for text in found(plan, "warning"))


def test_a_group_with_the_outbound_rule_of_every_new_group_does_not_let_efa_through(emulator):
    """To 0.0.0.0/0: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html#efa-start-security asks for the group itself."""
    name = "sg-0aaaaaaaaaaaaaaa2"
    own = the_group(emulator, name, inbound=[from_itself(name)])
    [text] = found(looked("hyundai_segmentation", own), "error")
    assert "no group lets outbound traffic of EFA through" in text
    command = f"--region {REGION} --group-id {name} --protocol -1 --source-group {name}"
    assert text.endswith(f"fix:   aws ec2 authorize-security-group-egress {command}")
    ec2 = boto3.client("ec2", region_name=REGION)
    ec2.authorize_security_group_egress(GroupId=name, IpPermissions=[from_itself(name)])
    assert looked("hyundai_segmentation", own).errors == ()


def test_a_rule_for_addresses_counts_for_tcp_and_not_for_efa(emulator):
    own = the_group(emulator, "sg-0aaaaaaaaaaaaaaa3", inbound=[ADDRESSES])
    [text] = found(looked("hyundai_segmentation", own), "error")
    assert "no group lets inbound and outbound traffic of EFA through" in text
    assert "authorize-security-group-ingress" in text and "authorize-security-group-egress" in text
    plan = looked("hyundai_segmentation", own, WITHOUT_EFA, "distribution=torchrun")
    assert not any("network.security_groups" in text for text in found(plan, "error") + found(plan, "warning"))


@pytest.mark.parametrize(
    ("name", "addresses"),
    [
        ("sg-0aaaaaaaaaaaaaaa6", {"PrefixListIds": [{"PrefixListId": "pl-0a1b2c3d"}]}),
        ("sg-0aaaaaaaaaaaaaaa7", {"Ipv6Ranges": [{"CidrIpv6": "2001:db8::/32"}]}),
    ],
)
def test_a_prefix_list_and_ipv6_addresses_count_as_addresses(emulator, name, addresses):
    own = the_group(emulator, name, inbound=[{"IpProtocol": "-1", **addresses}])
    plan = looked("hyundai_segmentation", own, WITHOUT_EFA, "distribution=torchrun")
    assert not any("network.security_groups" in text for text in found(plan, "error") + found(plan, "warning"))


@pytest.mark.parametrize(
    ("ranges", "low", "high", "is_open"),
    [
        ([(0, 1023), (1024, 65535)], 0, 65535, True),
        ([(1000, 65535), (0, 2000)], 0, 65535, True),
        ([(0, 65535), (100, 200)], 0, 65535, True),
        ([(0, 1022), (1024, 65535)], 0, 65535, False),
        ([(1, 65535)], 0, 65535, False),
        ([(0, 65534)], 0, 65535, False),
        ([(1018, 1020), (1021, 1023)], 1018, 1023, True),
        ([(0, 10), (7777, 7777)], 7777, 7777, True),
        ([(0, 10), (7778, 7778)], 7777, 7777, False),
        ([], 7777, 7777, False),
    ],
)
def test_port_ranges_of_several_rules_and_groups_are_joined(ranges, low, high, is_open):
    """A host is in all of the job's groups."""
    names = ["sg-1", "sg-2"]
    rules = [from_itself(names[at % 2], FromPort=first, ToPort=last) for at, (first, last) in enumerate(ranges)]
    one = [{"GroupId": names[0], "IpPermissions": rules}, {"GroupId": names[1]}]
    two = [{"GroupId": name, "IpPermissions": rules[at::2]} for at, name in enumerate(names)]
    assert security_groups.opens(one, low, high) is security_groups.opens(two, low, high) is is_open
    udp = [{**rule, "IpProtocol": "udp"} for rule in rules]
    assert not security_groups.opens([{"GroupId": names[0], "IpPermissions": udp}], low, high)


def test_where_nobody_says_that_a_job_uses_its_efa_a_closed_group_is_a_warning(emulator):
    own = the_group(emulator, "sg-0aaaaaaaaaaaaaaa5", inbound=[ADDRESSES])
    group = boto3.client("ec2", region_name=REGION).describe_security_groups(GroupIds=["sg-0aaaaaaaaaaaaaaa5"])
    for changes in (["distribution=torchrun", "compute.instance_type=ml.g5.12xlarge"], ["distribution=none"]):
        job = launcher.load(ROOT / "configs/hyundai_segmentation.yaml", [own, *changes])
        [issue] = security_groups.check(job, group["SecurityGroups"], REGION)
        assert (issue.level, "traffic of EFA through" in issue.found) == ("warning", True)


UDP_500 = {"FromPort": 500, "ToPort": 500, "IpProtocol": "udp"}
ESP = {"IpProtocol": "50", "FromPort": -1, "ToPort": -1}  # moto takes no rule without ports


@pytest.mark.parametrize("changes", [(), (WITHOUT_EFA, "distribution=torchrun")], ids=["EFA", "no EFA"])
def test_hosts_that_encrypt_their_traffic_need_udp_500_and_esp_in_both_directions_and_nothing_else(emulator, changes):
    """https://docs.aws.amazon.com/sagemaker/latest/dg/train-encrypt.html"""
    name = f"sg-0aaaaaaaaaaaaaab{len(changes)}"
    own = the_group(emulator, name, inbound=[from_itself(name, FromPort=0, ToPort=65535)])
    changes = [own, *changes, "network.encrypt_traffic=true"]
    [text] = found(looked("hyundai_segmentation", *changes), "error")
    assert "no group has a rule for inbound UDP 500, inbound protocol 50 (ESP), outbound UDP 500 and" in text
    command = f"aws ec2 authorize-security-group-ingress --region {REGION} --group-id {name}"
    assert f"{command} --protocol udp --port 500 --source-group {name}; {command} --protocol 50 --source-group" in text
    ec2 = boto3.client("ec2", region_name=REGION)
    documented = [{**from_itself(name), **rule} for rule in (UDP_500, ESP)]
    ec2.authorize_security_group_ingress(GroupId=name, IpPermissions=documented)
    plan = looked("hyundai_segmentation", *changes)
    assert plan.errors == ()
    [text] = [text for text in found(plan, "warning") if "network.security_groups" in text]
    assert "no group has a rule for outbound UDP 500 and outbound protocol 50 (ESP)" in text, "to addresses only"
    ec2.authorize_security_group_egress(GroupId=name, IpPermissions=documented)
    plan = looked("hyundai_segmentation", *changes)
    assert not any("network.security_groups" in text for text in found(plan, "error") + found(plan, "warning"))


def test_rules_for_all_traffic_let_encrypted_traffic_through_and_those_of_other_ports_do_not():
    job = launcher.load(ROOT / "configs/hyundai_segmentation.yaml", ["network.encrypt_traffic=true"])
    everything, esp = from_itself("sg-1"), {**from_itself("sg-1"), **ESP}
    other_port = {**from_itself("sg-1"), **UDP_500, "FromPort": 501, "ToPort": 600}
    for inbound, expected in (([everything], []), ([other_port, esp], ["error"]), ([ADDRESSES], ["warning"])):
        group = {"GroupId": "sg-1", "IpPermissions": inbound, "IpPermissionsEgress": [everything]}
        assert [issue.level for issue in security_groups.check(job, [group], REGION)] == expected


def test_one_host_needs_no_rule(emulator):
    own = the_group(emulator, "sg-0aaaaaaaaaaaaaaa4")
    assert looked("hyundai_segmentation", own, "compute.instance_count=1").errors == ()


def test_hosts_that_preprocess_need_more_than_the_rendezvous_port(emulator):
    name = "sg-0aaaaaaaaaaaaaaa1"
    own = the_group(emulator, name, inbound=[from_itself(name, FromPort=7777, ToPort=7777)])
    groups = "{name: gpus, instance_type: ml.p4d.24xlarge, instance_count: 1}, {name: cpus, instance_type: ml.c5.xlarge, instance_count: 1}"
    grouped = [
        own,
        "compute.instance_type=null",
        "compute.instance_count=1",
        f"compute.instance_groups=[{groups}]",
        "compute.training_groups=[gpus]",
        "hyperparameters.worker_type=remote",
    ]
    remote = "\n".join(found(looked("hyundai_segmentation", *grouped), "error"))
    assert "no group allows traffic from its own members" in remote
    assert "EFA" not in remote, "one host trains"
    torchrun = looked("hyundai_segmentation", own, WITHOUT_EFA, "compute.instance_count=2", "distribution=torchrun")
    [text] = [text for text in found(torchrun, "warning") if "network.security_groups" in text and "7777" in text]
    assert "no group allows all traffic from its own members, and 2 hosts meet at port 7777" in text


@pytest.mark.parametrize(
    ("changes", "free", "needed"),
    [((), 19, 20), ((WITHOUT_EFA, "distribution=torchrun"), 7, 8)],
)
def test_a_host_with_efa_takes_five_addresses_and_another_two(monkeypatch, changes, free, needed):
    """https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html, Ensure That Subnets Have Enough IP Addresses"""
    for available, refused in ((free, True), (needed, False)):
        monkeypatch.setattr("moto.ec2.models.subnets.Subnet.available_ip_address_count", available)
        text = "\n".join(found(looked("hyundai_segmentation", *changes), "error"))
        assert (f"{available} free addresses for 4 hosts\n  valid: at least {needed}" in text) == refused, text


@pytest.mark.parametrize(
    ("state", "level"), [("UPDATING", "warning"), ("CREATING", "error"), ("MISCONFIGURED", "error")]
)
def test_a_file_system_that_is_changed_by_its_owner_stays_usable(monkeypatch, state, level):
    describe = account.describe_file_systems

    def changed(*given):
        [system] = (answer := describe(*given))["FileSystems"]
        system["Lifecycle"] = state
        return answer

    monkeypatch.setattr(account, "describe_file_systems", changed)
    plan = looked("hyundai_segmentation")
    [said] = [issue for issue in plan.issues if issue.key == "inputs.train" and state in issue.found]
    assert said.level == level


def on_efs(*changes: str) -> launcher.Plan:
    """The plan of one host that reads an EFS file system."""
    efs = "inputs.train={efs: fs-0123456789abcdef1, path: /train}"
    return looked("hyundai_segmentation", efs, "compute.instance_count=1", *changes)


def test_an_efs_file_system_with_a_mount_target_and_an_open_port_passes(emulator):
    assert not any(issue.key == "inputs.train" for issue in on_efs().issues)
    [text] = [text for text in found(on_efs(), "warning") if text.startswith("network.security_groups")]
    assert "no group of the job opens TCP 2049 to its members, which EFS needs" in text
    name = "sg-0aaaaaaaaaaaaaac0"
    own = the_group(emulator, name, inbound=[from_itself(name, FromPort=2049, ToPort=2049)])
    assert [str(issue) for issue in on_efs(own).issues if issue.key in ("inputs.train", security_groups.KEY)] == []


def test_an_efs_file_system_of_another_vpc_and_one_without_a_mount_target_are_refused():
    efs, ec2 = boto3.client("efs", region_name=REGION), boto3.client("ec2", region_name=REGION)
    file_system = {"FileSystemId": "fs-0123456789abcdef1"}

    def without_target() -> str:
        [target] = efs.describe_mount_targets(**file_system)["MountTargets"]
        efs.delete_mount_target(MountTargetId=target["MountTargetId"])
        return target["SubnetId"]

    before = without_target()
    [text] = found(on_efs(), "error")
    assert "fs-0123456789abcdef1 has no mount target" in text
    assert f"create-mount-target --region {REGION} --file-system-id fs-0123456789abcdef1 --subnet-id {before}" in text
    default = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"][0]
    efs.create_mount_target(**file_system, SubnetId=default["SubnetId"])
    [text] = found(on_efs(), "error")
    assert f"fs-0123456789abcdef1 is in {default['VpcId']}, the job's subnets in vpc-" in text
    without_target()
    efs.create_mount_target(**file_system, SubnetId=before)
    assert on_efs().errors == ()


def test_mount_targets_that_may_not_be_read_are_not_checked(aws_calls):
    aws_calls.fail("DescribeMountTargets", code="AccessDeniedException", status=403, message="not authorized")
    [text] = [text for text in found(on_efs(), "not checked") if text.startswith("inputs.train")]
    assert "not authorized" in text


def test_data_that_does_not_fit_the_disk_is_refused(monkeypatch):
    monkeypatch.setattr("moto.s3.models.FakeKey.size", 600_000_000)
    s3 = boto3.client("s3", region_name=REGION)
    for index in range(2):
        s3.put_object(Bucket=BUCKET, Key=f"large/{index}.bin", Body=b"12345")
    changes = [
        "compute.instance_type=ml.p3.2xlarge",
        "distribution=none",
        "compute.instance_count=1",
        "compute.volume_gb=1",
    ]
    job = launcher.load(
        ROOT / "configs/dali_imagenette.yaml",
        [
            *changes,
            f"inputs={{train: {{s3: s3://{BUCKET}/large/}}, validation: {{s3: s3://{BUCKET}/large/, mode: FastFile}}}}",
        ],
    )
    text = "\n".join(found(launcher.check(launcher.plan(job, on="aws")), "error"))
    assert "compute.volume_gb: 1 GB of data for a disk of 1 GB" in text
    assert "FastFile" in text


def test_data_to_upload_counts_for_the_disk_where_every_host_copies_it(tmp_path):
    for name in ("train", "validation", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.bin").write_bytes(bytes(1000))
    same = str(tmp_path / "train")
    inputs = {"streamed": {"folder": str(tmp_path / "more"), "mode": "FastFile"}, "a": {"folder": same}}
    inputs |= {"b": {"folder": same}, "shard": {"folder": str(tmp_path / "validation"), "sharded": True}}
    job = launcher.load(ROOT / "configs/hyundai_segmentation.yaml", [f"inputs={json.dumps(inputs)}"])
    checks = OnlineChecks(launcher.plan(job, on="aws"))
    assert checks.sizes == {"streamed": 1000, "a": 1000, "b": 1000, "shard": 1000}
    each = {name: disks.copied(job, name, size, "") for name, size in checks.sizes.items()}
    assert each == {"streamed": 0, "a": 1000, "b": 1000, "shard": 250}


GROUPS = [
    {"name": "gpus", "instance_type": "ml.g5.xlarge", "instance_count": 1},
    {"name": "cpus", "instance_type": "ml.c5.xlarge", "instance_count": 4},
]


@pytest.mark.parametrize(
    ("train", "sizes", "volume_gb", "expected"),
    [
        ({}, {"train": 240e9}, 300, []),  # 250 GB of ml.g5.xlarge's own
        ({}, {"train": 260e9}, 300, ["compute.instance_groups.0.instance_type"]),
        ({}, {"train": 240e9}, 200, ["compute.volume_gb"]),
        ({}, {"train": 260e9}, 200, ["compute.instance_groups.0.instance_type", "compute.volume_gb"]),
        ({"instance_groups": ["gpus"]}, {"train": 240e9}, 200, []),
        ({"instance_groups": ["cpus"]}, {"train": 260e9}, 300, []),
        ({"instance_groups": ["cpus"], "sharded": True}, {"train": 960e9}, 300, []),
        ({"instance_groups": ["cpus"], "sharded": True}, {"train": 1300e9}, 300, ["compute.volume_gb"]),
        ({"sharded": True}, {"train": 1300e9}, 300, ["compute.instance_groups.0.instance_type"]),
        ({"sharded": True}, {"train": 1200e9}, 300, []),
    ],
)
def test_each_groups_own_disk_has_to_hold_what_its_hosts_copy(train, sizes, volume_gb, expected):
    compute = {"instance_groups": GROUPS, "training_groups": ["gpus"], "volume_gb": volume_gb}
    job = launcher.load(
        ROOT / "configs/dali_imagenette.yaml",
        [
            f"compute={json.dumps(compute)}",
            f"inputs={json.dumps({'train': {'s3': FOOD, **train}})}",
            "distribution=none",
        ],
    )
    issues = list(disks.check(job, {name: int(size) for name, size in sizes.items()}))
    assert [issue.key for issue in issues] == expected
    groups = ["gpus" if "groups" in issue.key else "cpus" for issue in issues]
    assert [issue.found.rpartition(" ")[2] for issue in issues] == groups


def test_without_credentials_nothing_is_called_ok(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    session.forget_clients()
    plan = looked("kt_food_tag")
    assert plan.errors == ()
    [teacher, text] = found(plan, "not checked")
    assert "it is not on this machine" in teacher
    assert "AWS was not checked: no AWS credentials" in text
    assert "aws configure" in text


def test_a_strict_check_that_could_ask_aws_for_nothing_fails(good, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    session.forget_clients()
    config = tmp_path / "job.yaml"
    own = {"role": "arn:aws:iam::210987654321:role/Trains", "output": "s3://team-a/runs", "image": {"uri": IMAGE}}
    config.write_text(yaml.safe_dump({**good, **own, "distribution": "torchrun", "inputs": {}}))
    words = ["plan", str(config), "--on", "aws", "--check"]
    assert main.main(words) == 0
    assert "not checked" in capsys.readouterr().out.splitlines()[0]
    assert main.main([*words, "--strict"]) == 2
    printed = capsys.readouterr().out
    assert "1 error" in printed.splitlines()[0] and "online: AWS was not checked: no AWS credentials" in printed


@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ("GetRole", "role"),
        ("ListServiceQuotas", "compute.instance_type: quota"),
        ("GetProducts", "compute.price_per_hour"),
        ("ListObjectsV2", "inputs.train"),
    ],
)
def test_what_is_not_allowed_is_not_checked_and_named(aws_calls, operation, key):
    aws_calls.fail(
        operation, code="AccessDeniedException", times=1, status=403, message=f"not authorized to perform {operation}"
    )
    text = "\n".join(found(looked("kt_food_tag"), "not checked"))
    assert key in text
    assert f"not authorized to perform {operation}" in text


def test_a_run_is_looked_at_before_anything_is_uploaded(aws_calls):
    plan = launcher.plan(launcher.load(ROOT / "configs/kt_food_tag.yaml", [f"inputs.train.s3={FOOD}/trian/"]), on="aws")
    with pytest.raises(launcher.UserError, match="no objects under"):
        launcher.run(plan)
    assert not any(operation.startswith(("Put", "Create")) for _, operation in aws_calls.made)
    assert launcher.runs() == []


@pytest.mark.parametrize(("config", "keys"), [
    ("kt_food_tag", ["role", "output", "inputs.train", "inputs.validation", "inputs.teacher"]),
    ("hyundai_segmentation", ["role", "output", "inputs.validation", "network.subnets", "network.security_groups", "inputs.train"]),
])  # fmt: skip
def test_in_an_account_of_the_users_every_placeholder_is_refused(config, keys, monkeypatch):
    assert "a placeholder" not in str(looked(config).issues)  # in the emulator's account they work
    monkeypatch.setattr(placeholders, "ACCOUNT", "111122223333")  # so that the emulator's is a user's
    plan = looked(config, "role=arn:aws:iam::111122223333:role/SageMakerTraining")
    assert [issue.key for issue in plan.errors] == keys
    assert {issue.fix for issue in plan.errors} == {"replace it by yours"}
    with pytest.raises(launcher.UserError, match="replace it by yours"):
        launcher.run(plan)

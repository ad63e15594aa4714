"""What the emulator's account holds before a job: prices, quotas, roles, networks and file systems."""

from __future__ import annotations

import json

import pytest
from botocore.exceptions import ClientError

from tests.emulator.conftest import REGION, ROLE

P4D = "ml.p4d.24xlarge"


def prices(aws, **wanted) -> list[dict]:
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    found = aws.client("pricing", "us-east-1").get_products(ServiceCode="AmazonSageMaker", Filters=filters)
    return [json.loads(text) for text in found["PriceList"]]


def test_a_price_is_found_as_in_the_real_price_list(aws, emulator):
    assert prices(aws) == []
    emulator.set_price(P4D, 32.77, "us-east-1")
    emulator.set_price(P4D, 40.1, REGION)
    emulator.set_price("ml.g5.xlarge", 1.408, "us-east-1")
    (found,) = prices(aws, instanceName=P4D, regionCode="us-east-1", component="Training", productFamily="ML Instance")
    (term,) = found["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    assert (float(dimension["pricePerUnit"]["USD"]), dimension["unit"]) == (32.77, "Hrs")
    assert found["product"]["attributes"]["usagetype"] == "USE1-Train:ml.p4d.24xlarge"
    assert found["product"]["attributes"]["location"] == "US East (N. Virginia)"
    assert prices(aws, usagetype="EU-Train:ml.p4d.24xlarge")[0]["product"]["attributes"]["regionCode"] == REGION
    assert len(prices(aws, regionCode="us-east-1")) == 2
    assert prices(aws, instanceName=P4D, component="Hosting") == []


def test_quotas_are_listed_in_pages_for_their_region(aws, emulator):
    for kind in ("training job", "spot training job", "training warm pool"):
        emulator.set_quota(f"{P4D} for {kind} usage", 4.0, REGION)
    emulator.set_quota(f"{P4D} for training job usage", 1.0, "us-west-2")
    paginator = aws.client("service-quotas").get_paginator("list_service_quotas")
    pages = list(paginator.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 2}))
    found = {quota["QuotaName"]: quota["Value"] for page in pages for quota in page["Quotas"]}
    assert len(pages) == 2
    assert found == {
        f"{P4D} for {kind} usage": 4.0 for kind in ("training job", "spot training job", "training warm pool")
    }
    with pytest.raises(aws.client("service-quotas").exceptions.NoSuchResourceException):
        aws.client("service-quotas").list_service_quotas(ServiceCode="ec2")


def test_the_network_has_the_very_ids_that_a_configuration_names(aws, emulator, tmp_path):
    emulator.add_subnet("subnet-0123456789abcdef0", REGION)
    emulator.add_subnet("subnet-0123456789abcdef1", REGION)
    emulator.add_security_group("sg-0123456789abcdef0", REGION)
    emulator.add_file_system("fs-0123456789abcdef0", kind="FSxLustre", region=REGION, folder=tmp_path)
    emulator.add_file_system("fs-0123456789abcdef1", kind="EFS", region=REGION, folder=tmp_path)
    ec2 = aws.client("ec2")
    found = ec2.describe_subnets(SubnetIds=["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"])["Subnets"]
    first, second = sorted(found, key=lambda subnet: subnet["SubnetId"])
    (group,) = ec2.describe_security_groups(GroupIds=["sg-0123456789abcdef0"])["SecurityGroups"]
    assert first["VpcId"] == second["VpcId"] == group["VpcId"]
    (lustre,) = aws.client("fsx").describe_file_systems(FileSystemIds=["fs-0123456789abcdef0"])["FileSystems"]
    assert (lustre["Lifecycle"], lustre["FileSystemType"], lustre["VpcId"]) == ("AVAILABLE", "LUSTRE", first["VpcId"])
    assert lustre["SubnetIds"] == ["subnet-0123456789abcdef0"]
    assert lustre["LustreConfiguration"]["MountName"] == "fsx"
    (efs,) = aws.client("efs").describe_file_systems(FileSystemId="fs-0123456789abcdef1")["FileSystems"]
    assert efs["LifeCycleState"] == "available"
    (target,) = aws.client("efs").describe_mount_targets(FileSystemId="fs-0123456789abcdef1")["MountTargets"]
    assert (target["SubnetId"], target["VpcId"]) == ("subnet-0123456789abcdef0", first["VpcId"])
    with pytest.raises(ClientError, match="subnet-0123456789abcdef9"):
        ec2.describe_subnets(SubnetIds=["subnet-0123456789abcdef9"])
    with pytest.raises(ClientError, match="FileSystemNotFound"):
        aws.client("fsx").describe_file_systems(FileSystemIds=["fs-0123456789abcdef9"])
    with pytest.raises(ValueError, match="FSxLustre or EFS"):
        emulator.add_file_system("fs-0123456789abcdef2", kind="FSx", region=REGION, folder=tmp_path)


def test_the_role_is_of_the_emulators_account_and_trusts_sagemaker(aws, emulator):
    role = aws.client("iam").get_role(RoleName="SageMakerTraining")["Role"]
    assert role["Arn"] == ROLE
    assert role["AssumeRolePolicyDocument"]["Statement"][0]["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    emulator.add_role("arn:aws:iam::123456789012:role/service-role/Other")
    assert aws.client("iam").get_role(RoleName="Other")["Role"]["Path"] == "/service-role/"
    with pytest.raises(ValueError, match="the emulator's account is 123456789012"):
        emulator.add_role("arn:aws:iam::999999999999:role/Other")

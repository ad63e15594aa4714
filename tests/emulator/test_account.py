"""What stands ready before a job: prices, quotas, networks, file systems, and the emulator's controls over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from botocore.exceptions import ClientError

from tests.emulator.conftest import BUCKET, REGION, ROLE

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
    emulator.add_subnet("subnet-0123456789abcdef0", REGION, "eu-west-1b")
    emulator.add_subnet("subnet-0123456789abcdef1", REGION)
    emulator.add_security_group("sg-0123456789abcdef0", REGION)
    emulator.add_file_system("fs-0123456789abcdef0", kind="FSxLustre", region=REGION, folder=tmp_path)
    emulator.add_file_system("fs-0123456789abcdef1", kind="EFS", region=REGION, folder=tmp_path)
    ec2 = aws.client("ec2")
    found = ec2.describe_subnets(SubnetIds=["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"])["Subnets"]
    first, second = sorted(found, key=lambda subnet: subnet["SubnetId"])
    (group,) = ec2.describe_security_groups(GroupIds=["sg-0123456789abcdef0"])["SecurityGroups"]
    assert first["AvailabilityZone"] == "eu-west-1b"
    assert first["VpcId"] == second["VpcId"] == group["VpcId"]
    (lustre,) = aws.client("fsx").describe_file_systems(FileSystemIds=["fs-0123456789abcdef0"])["FileSystems"]
    assert (lustre["Lifecycle"], lustre["FileSystemType"], lustre["VpcId"]) == ("AVAILABLE", "LUSTRE", first["VpcId"])
    assert lustre["SubnetIds"] == ["subnet-0123456789abcdef0"]
    assert lustre["LustreConfiguration"]["MountName"] == "fsx"
    (efs,) = aws.client("efs").describe_file_systems(FileSystemId="fs-0123456789abcdef1")["FileSystems"]
    assert efs["LifeCycleState"] == "available"
    (target,) = aws.client("efs").describe_mount_targets(FileSystemId="fs-0123456789abcdef1")["MountTargets"]
    assert target["SubnetId"] == "subnet-0123456789abcdef0"
    emulator.add_file_system("fs-0123456789abcdef3", "FSxLustre", REGION, tmp_path, subnet="subnet-0123456789abcdef1")
    (other,) = aws.client("fsx").describe_file_systems(FileSystemIds=["fs-0123456789abcdef3"])["FileSystems"]
    assert other["SubnetIds"] == ["subnet-0123456789abcdef1"]
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


def test_calls_tell_every_operation_of_a_client_in_order(aws, emulator):
    before = len(emulator.calls)
    s3 = aws.client("s3")
    aws.client("sts").get_caller_identity()
    s3.head_bucket(Bucket=BUCKET)
    s3.get_bucket_location(Bucket=BUCKET)
    s3.put_object(Bucket=BUCKET, Key="a key/with ünï", Body=b"x")
    s3.head_object(Bucket=BUCKET, Key="a key/with ünï")
    s3.copy_object(Bucket=BUCKET, Key="copy", CopySource=f"{BUCKET}/a key/with ünï")
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key="parts")["UploadId"]
    s3.upload_part(Bucket=BUCKET, Key="parts", UploadId=upload, PartNumber=1, Body=b"x")
    s3.list_objects_v2(Bucket=BUCKET)
    s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "copy"}]})
    aws.client("logs").describe_log_groups()
    aws.client("ec2").describe_vpcs()
    aws.client("efs").describe_file_systems()
    aws.client("service-quotas").list_service_quotas(ServiceCode="sagemaker")
    assert emulator.calls[before:] == [
        ("sts", "GetCallerIdentity"),
        ("s3", "HeadBucket"),
        ("s3", "GetBucketLocation"),
        ("s3", "PutObject"),
        ("s3", "HeadObject"),
        ("s3", "CopyObject"),
        ("s3", "CreateMultipartUpload"),
        ("s3", "UploadPart"),
        ("s3", "ListObjectsV2"),
        ("s3", "DeleteObjects"),
        ("logs", "DescribeLogGroups"),
        ("ec2", "DescribeVpcs"),
        ("efs", "DescribeFileSystems"),
        ("service-quotas", "ListServiceQuotas"),
    ]


def control(emulator, path: str, **arguments) -> object:
    """One of the emulator's controls, as another process uses it."""
    data = None if path == "calls" else json.dumps(arguments).encode()
    with urllib.request.urlopen(f"{emulator.url}/_emulator/{path}", data) as answer:
        return json.load(answer)


def test_the_controls_are_there_over_http_too(aws, emulator, tmp_path):
    control(emulator, "add_bucket", name="amzn-s3-demo-bucket2", region=REGION)
    control(emulator, "set_price", instance_type="ml.trn1.2xlarge", dollars=1.5, region=REGION)
    control(emulator, "inject", operation="HeadBucket", code="403", times=1, status=403)
    control(emulator, "add_file_system", identifier="fs-00000000", kind="EFS", region=REGION, folder=str(tmp_path))
    assert len(prices(aws, instanceName="ml.trn1.2xlarge")) == 1
    with pytest.raises(ClientError, match="403"):
        aws.client("s3").head_bucket(Bucket="amzn-s3-demo-bucket2")
    aws.client("s3").head_bucket(Bucket="amzn-s3-demo-bucket2")
    assert control(emulator, "calls")[-1] == ["s3", "HeadBucket"]


@pytest.mark.parametrize(
    ("name", "arguments", "status", "text"),
    [
        ("explode", {}, 404, "no control explode; there are: calls, add_bucket"),
        ("interrupt", {"job_name": "never-was"}, 400, "no managed spot job never-was has the status Training"),
        ("set_price", {"instance": "ml.g5.xlarge"}, 400, "missing a required argument"),
    ],
)
def test_a_control_that_makes_no_sense_is_refused_with_the_reason(emulator, name, arguments, status, text):
    with pytest.raises(urllib.error.HTTPError) as refused:
        control(emulator, name, **arguments)
    assert refused.value.code == status
    assert text in json.load(refused.value)["error"]
    refused.value.close()

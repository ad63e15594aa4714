"""What an AWS account holds before a job runs: buckets, roles, networks and file systems, in moto under the config's own names."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from moto.backends import get_backend
from werkzeug.wrappers import Response

from launcher.emulator.router import AwsError, Call

ACCOUNT = "123456789012"
"""moto's account, which AWS's documentation uses too."""

SAGEMAKER = "SAGEMAKER"
"""Prefix of SageMaker's own access key, which the executor and the jobs' hosts use."""

MOUNT_NAME = "fsx"
"""The mount name of every FSx file system here."""

TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}


@dataclass(frozen=True)
class FileSystem:
    """A file system and the local folder that stands for its root."""

    kind: str
    """FSxLustre or EFS."""
    folder: Path

    def resolve(self, directory: str) -> Path | None:
        """The local folder of a DirectoryPath; None if an FSx path lacks the mount name, or if `..` leaves the root."""
        parts = [part for part in directory.split("/") if part]
        if self.kind == "FSxLustre":
            if parts[:1] != [MOUNT_NAME]:
                return None
            parts = parts[1:]
        return None if ".." in parts else self.folder.joinpath(*parts)


def add_bucket(s3: Any, name: str, region: str) -> None:
    place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket=name, **place)


def add_role(iam: Any, arn: str) -> None:
    """A role that SageMaker may assume.

    Raises:
        ValueError: not the ARN of a role in this account.
    """
    found = re.fullmatch(rf"arn:aws[a-z-]*:iam::{ACCOUNT}:role(/.*/|/)([^/]+)", arn)
    if not found:
        raise ValueError(f"{arn}: the emulator's account is {ACCOUNT}; give arn:aws:iam::{ACCOUNT}:role/NAME")
    iam.create_role(Path=found[1], RoleName=found[2], AssumeRolePolicyDocument=json.dumps(TRUST))


def add_subnet(ec2: Any, identifier: str, region: str) -> None:
    """A subnet of the account's VPC. moto chooses an id, which is replaced."""
    vpc = _vpc(ec2)
    count = len(_subnets(ec2, vpc))
    made = ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{count}.0/24")["Subnet"]
    of_zone = get_backend("ec2")[ACCOUNT][region].subnets[made["AvailabilityZone"]]
    subnet = of_zone.pop(made["SubnetId"])
    subnet.id = identifier
    of_zone[identifier] = subnet


def add_security_group(ec2: Any, identifier: str, region: str, open_to_itself: bool) -> None:
    """A security group of the same VPC that allows all outbound traffic to addresses and none inbound.

    Args:
        open_to_itself: also allow all traffic from and to its own members.
    """
    vpc = _vpc(ec2)
    made = ec2.create_security_group(GroupName=identifier, Description=identifier, VpcId=vpc)["GroupId"]
    groups = get_backend("ec2")[ACCOUNT][region].groups[vpc]
    group = groups.pop(made)
    group.group_id = group.id = identifier
    group.arn = f"arn:aws:ec2:{region}:{ACCOUNT}:security-group/{identifier}"
    groups[identifier] = group
    if open_to_itself:
        rules = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": identifier}]}]
        ec2.authorize_security_group_ingress(GroupId=identifier, IpPermissions=rules)
        ec2.authorize_security_group_egress(GroupId=identifier, IpPermissions=rules)


def add_file_system(fsx: Any, efs: Any, ec2: Any, identifier: str, kind: str, region: str) -> None:
    """A file system, with EFS's mount target, in the first subnet that was added, else in one of the default VPC.

    Raises:
        ValueError: an unknown kind.
    """
    added = sorted(_subnets(ec2, _vpc(ec2)), key=lambda entry: ip_network(entry["CidrBlock"]))
    subnet = (added or ec2.describe_subnets()["Subnets"])[0]["SubnetId"]
    if kind == "FSxLustre":
        made = fsx.create_file_system(
            FileSystemType="LUSTRE",
            StorageCapacity=1200,
            SubnetIds=[subnet],
            LustreConfiguration={"DeploymentType": "SCRATCH_2"},
        )["FileSystem"]["FileSystemId"]
        lustre = get_backend("fsx")[ACCOUNT][region].file_systems
        lustre[identifier] = system = lustre.pop(made)
        system.file_system_id = identifier
        system.dns_name = f"{identifier}.fsx.{region}.amazonaws.com"
        system.resource_arn = f"arn:aws:fsx:{region}:{ACCOUNT}:file-system/{identifier}"
    elif kind == "EFS":
        made = efs.create_file_system(CreationToken=identifier)["FileSystemId"]
        elastic = get_backend("efs")[ACCOUNT][region].file_systems_by_id
        elastic[identifier] = drive = elastic.pop(made)
        drive.file_system_id = identifier
        drive.file_system_arn = f"arn:aws:elasticfilesystem:{region}:{ACCOUNT}:file-system/{identifier}"
        efs.create_mount_target(FileSystemId=identifier, SubnetId=subnet)
    else:
        raise ValueError(f"{kind}: a file system is FSxLustre or EFS")


def describe_file_systems(call: Call, ec2: Any) -> dict[str, Any] | Response:
    """FSx's DescribeFileSystems, with the members that moto omits.

    Raises:
        AwsError: an id is unknown, which moto would omit from the list.
    """
    response = call.forward()
    if response.status_code != 200:
        return response
    answer: dict[str, Any] = json.loads(response.get_data())
    found = {system["FileSystemId"] for system in answer["FileSystems"]}
    for identifier in call.parameters.get("FileSystemIds", []):
        if identifier not in found:
            raise AwsError("FileSystemNotFound", f"File system '{identifier}' does not exist.")
    for system in answer["FileSystems"]:
        subnets = ec2.describe_subnets(SubnetIds=system.get("SubnetIds", []))["Subnets"]
        system |= {"Lifecycle": "AVAILABLE", "OwnerId": ACCOUNT}
        if subnets:
            system["VpcId"] = subnets[0]["VpcId"]
        if system["FileSystemType"] == "LUSTRE":
            system["LustreConfiguration"] = {"MountName": MOUNT_NAME} | (system.get("LustreConfiguration") or {})
    return answer


def _vpc(ec2: Any) -> str:
    """The account's VPC, made on first use."""
    own = [{"Name": "tag:Name", "Values": ["emulator"]}]
    found = ec2.describe_vpcs(Filters=own)["Vpcs"]
    if found:
        return str(found[0]["VpcId"])
    made = str(ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"])
    ec2.create_tags(Resources=[made], Tags=[{"Key": "Name", "Value": "emulator"}])
    return made


def _subnets(ec2: Any, vpc: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"]
    return found

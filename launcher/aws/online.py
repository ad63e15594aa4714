"""Validation of a plan against the AWS account, by read-only requests. What could not be read is "not checked"."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from launcher.aws import catalog, checkpoint_prefix, disks, prices, security_groups, session
from launcher.aws.upload import split
from launcher.config import placeholders
from launcher.config.issues import Issue, Level, UserError, did_you_mean
from launcher.config.job import Job
from launcher.planner.plan import Plan
from launcher.show.text import counted

warning = partial(Issue, level="warning")
not_checked = partial(Issue, level="not checked")

MAX_OBJECTS = 100_000
"""The most objects of a channel that are listed, in 100 requests."""

LUSTRE_PORTS = ((988, 988), (1018, 1023))
"""https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html"""

EFS_PORTS = ((2049, 2049),)
"""NFS's port: https://docs.aws.amazon.com/efs/latest/ug/network-access.html"""


def check(plan: Plan) -> list[Issue]:
    """Issues of role, network, quota, price, buckets, data and file systems.

    All requests are read-only. What is denied or does not answer is reported as not checked.
    """
    return OnlineChecks(plan).issues()


def check_users_of_checkpoints(job: Job) -> list[Issue]:
    """Issues of running jobs that keep their checkpoints where the job does; as in `check`, if they cannot be listed."""
    return _guarded("checkpoints", partial(_users_of_checkpoints, job)) if job.checkpoints is not None else []


def _users_of_checkpoints(job: Job) -> Iterator[Issue]:
    assert job.checkpoints is not None
    region = str(job.region)
    return checkpoint_prefix.check_users(job.checkpoints.s3, region, session.client("sagemaker", region))


class OnlineChecks:
    """Checks of everything that a plan names."""

    def __init__(self, plan: Plan):
        self.plan, self.job = plan, plan.job
        self.region = str(plan.job.region)
        uploaded = {upload.target: upload.size for upload in plan.uploads}
        self.sizes = {name: uploaded[address] for name, address in plan.channels.items() if address in uploaded}
        """Channel -> bytes, if known."""

    def client(self, service: str) -> Any:
        return session.client(service, self.region)

    def issues(self) -> list[Issue]:
        try:
            with session.as_user_error("online"):
                account = self.client("sts").get_caller_identity()["Account"]
        except UserError as error:
            about = error.issues[0]
            return [not_checked(key="online", found=f"AWS was not checked: {about.found}", fix=about.fix)]
        found = placeholders.errors(self.job, account)
        refused = {issue.key for issue in found}
        for key, check_key in self.checks(account):
            if key not in refused:
                found += _guarded(key, check_key)
        return found + list(disks.check(self.job, self.sizes))

    def checks(self, account: str) -> Iterator[tuple[str, Callable[[], Iterator[Issue]]]]:
        """Every check, with its config key."""
        job = self.job
        yield "role", partial(self.role, account)
        if job.network.subnets:
            yield "network.subnets", self.subnets
            yield "network.security_groups", self.security_groups
        yield "compute.instance_type: quota", self.quota
        yield "compute.price_per_hour", self.price
        for key, uri in job.written_to.items():
            yield key, partial(self.bucket, key, uri)
        if job.checkpoints is not None:
            uri = job.checkpoints.s3
            yield "checkpoints", partial(self.checkpoints, uri)
            yield "checkpoints", partial(_users_of_checkpoints, self.job)
        uploaded = {upload.target for upload in self.plan.uploads}
        for name, given in job.inputs.items():
            address = self.plan.channels.get(name, "")
            if given.s3 is not None or (given.run is not None and address not in uploaded):
                yield f"inputs.{name}", partial(self.channel, name, address)
            elif given.fsx is not None:
                yield f"inputs.{name}", partial(self.lustre, name, given.fsx)
            elif given.efs is not None:
                yield f"inputs.{name}", partial(self.efs, name, given.efs)

    def role(self, account: str) -> Iterator[Issue]:
        role = str(self.job.role)
        if session.account_in(role) != account:
            # "to pass an IAM role to a service that shares the same AWS account":
            # https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html
            yield Issue(
                key="role",
                level="warning" if session.emulator() else "error",
                found=f"{role} is not in the account of your credentials ({account})",
                valid="a role of the account in which the job runs",
                fix="use a role of that account, or other credentials (AWS_PROFILE)",
            )
            return
        client = self.client("iam")
        try:
            found = client.get_role(RoleName=role.rpartition("/")[2])["Role"]
        except client.exceptions.NoSuchEntityException:
            fix = "check its name, or create it with a trust policy for sagemaker.amazonaws.com"
            yield Issue(key="role", found=f"{role}: no such role", fix=fix)
            return
        document = found.get("AssumeRolePolicyDocument", {})
        if isinstance(document, str):
            document = json.loads(urllib.parse.unquote(document))
        if "sagemaker.amazonaws.com" not in json.dumps(document):
            yield Issue(
                key="role",
                found=f"SageMaker cannot assume {role}: its trust policy does not name sagemaker.amazonaws.com",
                fix="add it as a principal of sts:AssumeRole in the role's trust policy",
            )

    def bucket(self, key: str, uri: str) -> Iterator[Issue]:
        """Whether a bucket exists in the job's region."""
        bucket = split(uri)[0]
        client = self.client("s3")
        try:
            answer = client.head_bucket(Bucket=bucket)
        except client.exceptions.ClientError as error:
            if session.code(error) not in ("404", "NoSuchBucket", "301", "400"):
                raise
            answer = error.response
            if not _bucket_region(answer):
                fix = f"create it (aws s3 mb s3://{bucket} --region {self.region}), or correct the name"
                yield Issue(key=key, found=f"{bucket}: no such bucket", fix=fix)
                return
        region = _bucket_region(answer)
        if region not in ("", self.region):
            yield Issue(
                key=key,
                found=f"the bucket {bucket} is in {region}, the job in {self.region}",
                valid="one region for both",
                fix=f"use a bucket in {self.region}, or write region: {region}",
            )

    def channel(self, name: str, uri: str) -> Iterator[Issue]:
        """Whether a prefix matches objects, and only those of one folder."""
        key = f"inputs.{name}"
        wrong = list(self.bucket(key, uri))
        yield from wrong
        if wrong:
            return
        bucket, prefix = split(uri)
        client, given = self.client("s3"), self.job.inputs[name]
        listed = given.data_type not in (None, "S3Prefix")  # the one object is a list of others
        count = size = outside = 0
        example = ""
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                count, size = count + 1, size + item["Size"]
                if not listed and not _in_folder(item["Key"], prefix):
                    outside, example = outside + 1, item["Key"]
            if count >= MAX_OBJECTS:
                found = f"whether {uri} fits the disk: it holds more than {MAX_OBJECTS:,} objects"
                yield not_checked(key=key, found=found, fix="aws s3 ls --summarize --recursive shows its size")
                break
        if not count:
            parent = prefix.rstrip("/").rpartition("/")[0]
            page = client.list_objects_v2(Bucket=bucket, Prefix=f"{parent}/" if parent else "", Delimiter="/")
            near = [item["Prefix"].rstrip("/") for item in page.get("CommonPrefixes", ())]
            shows = f"aws s3 ls s3://{bucket}/{parent} shows what is there"
            fix = did_you_mean(prefix.rstrip("/"), near, shows)
            yield Issue(key=key, found=f"no objects under {uri}", fix=fix)
        if outside:
            found = f"{uri} is a prefix that also matches {outside} objects outside the folder, such as {example}"
            # "For FastFile mode, partial S3 prefix is not supported", reported once the hosts have started
            fails = given.mode == "FastFile"
            level: Level = "error" if fails else "warning"
            yield Issue(
                key=key,
                level=level,
                found=found + (", and FastFile takes whole folders" if fails else ""),
                fix=f"write {uri}/",
            )
        if listed:
            yield not_checked(
                key=key,
                found=f"whether what {uri} lists fits the disk",
                fix="set compute.volume_gb to the size of its objects, and some more",
            )
        else:
            self.sizes[name] = size

    def checkpoints(self, uri: str) -> Iterator[Issue]:
        wrong = list(self.bucket("checkpoints", uri))
        yield from wrong or checkpoint_prefix.check_content(self.plan, uri, self.client("s3"))

    def subnets(self) -> Iterator[Issue]:
        """Whether the subnets exist in one VPC, with enough addresses for the hosts."""
        key, client = "network.subnets", self.client("ec2")
        found, missing = _described(
            lambda name: client.describe_subnets(SubnetIds=[name])["Subnets"], self.job.network.subnets
        )
        for name in missing:
            fix = f"aws ec2 describe-subnets --region {self.region} lists them"
            yield Issue(key=key, found=f"{name}: no such subnet in {self.region}", fix=fix)
        if len({subnet["VpcId"] for subnet in found}) > 1:
            yield Issue(key=key, found="subnets of several VPCs", valid="one VPC", fix="use subnets of one VPC")
        free = sum(subnet.get("AvailableIpAddressCount", 0) for subnet in found)
        hosts = prices.instances(self.job)
        needed = sum(catalog.addresses(name) * count for name, count in hosts.items())
        if found and free < needed:
            yield Issue(
                key=key,
                found=f"{free} free addresses for {counted(sum(hosts.values()), 'host')}",
                valid=f"at least {needed}: 5 a host with EFA, 2 a host without",
                fix="use larger subnets, or add one",
            )

    def security_groups(self) -> Iterator[Issue]:
        """Whether the security groups exist and allow traffic between hosts."""
        key, client = security_groups.KEY, self.client("ec2")
        found, missing = _described(
            lambda name: client.describe_security_groups(GroupIds=[name])["SecurityGroups"],
            self.job.network.security_groups,
        )
        for name in missing:
            fix = f"aws ec2 describe-security-groups --region {self.region} lists them"
            yield Issue(key=key, found=f"{name}: no such security group in {self.region}", fix=fix)
        yield from security_groups.check(self.job, found, self.region)

    def lustre(self, name: str, file_system: str) -> Iterator[Issue]:
        """Whether an FSx file system exists, is ready and reachable, and the path starts with its mount name."""
        key, client = f"inputs.{name}", self.client("fsx")
        try:
            facts = client.describe_file_systems(FileSystemIds=[file_system])["FileSystems"][0]
        except client.exceptions.FileSystemNotFound:
            fix = f"aws fsx describe-file-systems --region {self.region} lists them"
            yield Issue(key=key, found=f"{file_system}: no such file system in {self.region}", fix=fix)
            return
        if facts["FileSystemType"] != "LUSTRE":
            fix = "use a file system of type LUSTRE"
            yield Issue(key=key, found=f"{file_system} is of type {facts['FileSystemType']}", valid="LUSTRE", fix=fix)
            return
        state = facts.get("Lifecycle", "AVAILABLE")
        if state == "UPDATING":
            # "undergoing a customer-initiated update", and not unavailable (FileSystem.Lifecycle in botocore's model of FSx)
            fix = "no change; wait for the update's end if it slows the file system down"
            yield warning(key=key, found=f"{file_system} is UPDATING: a change of its settings is under way", fix=fix)
        elif state != "AVAILABLE":
            yield Issue(key=key, found=f"{file_system} is {state}", valid="AVAILABLE", fix="wait for it")
        mount = facts.get("LustreConfiguration", {}).get("MountName")
        path = str(self.job.inputs[name].path)
        if mount and path.split("/")[1] != mount:
            yield Issue(
                key=f"{key}.path",
                found=f"{path}: the file system's mount name is {mount}",
                valid=f"/{mount}/…",
                fix=f"write path: /{mount}{path}",
            )
        yield from self.same_network(key, file_system, facts.get("VpcId"), "Lustre", LUSTRE_PORTS)

    def efs(self, name: str, file_system: str) -> Iterator[Issue]:
        """Whether an EFS file system exists, is ready, and has a mount target that the hosts reach."""
        key, client = f"inputs.{name}", self.client("efs")
        try:
            facts = client.describe_file_systems(FileSystemId=file_system)["FileSystems"][0]
        except client.exceptions.FileSystemNotFound:
            fix = f"aws efs describe-file-systems --region {self.region} lists them"
            yield Issue(key=key, found=f"{file_system}: no such file system in {self.region}", fix=fix)
            return
        if facts["LifeCycleState"] != "available":
            found = f"{file_system} is {facts['LifeCycleState']}"
            yield Issue(key=key, found=found, valid="available", fix="wait for it")
        targets = client.describe_mount_targets(FileSystemId=file_system)["MountTargets"]
        if not targets:
            create = f"aws efs create-mount-target --region {self.region} --file-system-id {file_system}"
            yield Issue(
                key=key,
                found=f"{file_system} has no mount target, through which hosts reach it",
                valid="a mount target in the VPC of the job's subnets",
                fix=f"{create} --subnet-id {self.job.network.subnets[0]}",
            )
        # all mount targets of a file system are in one VPC: https://docs.aws.amazon.com/efs/latest/ug/API_CreateMountTarget.html
        vpc = targets[0].get("VpcId") if targets else None
        yield from self.same_network(key, file_system, vpc, "EFS", EFS_PORTS)

    def same_network(
        self, key: str, file_system: str, vpc: str | None, kind: str, ports: Sequence[tuple[int, int]]
    ) -> Iterator[Issue]:
        """Whether the job's subnets are in a file system's VPC, and a security group opens the ports of its kind."""
        client = self.client("ec2")
        subnets = client.describe_subnets(SubnetIds=list(self.job.network.subnets))["Subnets"]
        own = {subnet["VpcId"] for subnet in subnets}
        if vpc is not None and own and vpc not in own:
            elsewhere = f"{file_system} is in {vpc}, the job's subnets in {', '.join(sorted(own))}"
            yield Issue(key=key, found=elsewhere, valid="one VPC", fix="use subnets of the file system's VPC")
        found = client.describe_security_groups(GroupIds=list(self.job.network.security_groups))["SecurityGroups"]
        closed = [
            f"{low}-{high}" if low != high else str(low)
            for low, high in ports
            if not security_groups.opens(found, low, high)
        ]
        if closed:
            yield warning(
                key=security_groups.KEY,
                found=f"no group of the job opens TCP {', '.join(closed)} to its members, which {kind} needs",
                fix="no change if the file system's own group opens them; otherwise add inbound TCP rules",
            )

    def quota(self) -> Iterator[Issue]:
        """Whether the account's quota covers the hosts."""
        kind = "spot training job" if self.job.compute.spot else "training job"
        wanted = {f"{name} for {kind} usage": count for name, count in prices.instances(self.job).items()}
        if self.job.compute.keep_alive_minutes is not None:
            wanted |= {
                f"{name} for training warm pool usage": count for name, count in prices.instances(self.job).items()
            }
        pages = self.client("service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
        quotas = {item["QuotaName"]: item["Value"] for page in pages for item in page["Quotas"]}
        for name, count in wanted.items():
            if name not in quotas:
                fix = "look it up under Service Quotas in AWS's console"
                yield not_checked(key="compute.instance_type: quota", found=f"no quota named {name!r}", fix=fix)
            elif quotas[name] < count:
                yield Issue(
                    key="compute.instance_count" if not self.job.compute.instance_groups else "compute.instance_groups",
                    found=f"{count} hosts; this account's quota is {quotas[name]:g} ({name})",
                    valid=f"at most {quotas[name]:g}",
                    fix="request more under Service Quotas, or use fewer hosts or another instance type",
                )

    def price(self) -> Iterator[Issue]:
        """Read AWS's price list and cache it, for the plan's ceiling."""
        if self.job.compute.price_per_hour is not None:
            return
        names = list(prices.instances(self.job))
        if session.other_partition(self.region):  # the price list does not take its credentials
            unknown = f"the price of {', '.join(names)}: AWS's price list takes no credentials of {self.region}"
            yield not_checked(key="compute.price_per_hour", found=unknown, fix="set compute.price_per_hour")
            return
        client = session.client("pricing", prices.PRICE_LIST_REGION)
        found = prices.read_price_list(client, self.region, names)
        missing = [name for name in names if name not in found]
        if missing:
            yield not_checked(
                key="compute.price_per_hour",
                found=f"AWS's price list has no training price for {', '.join(missing)} in {self.region}",
                fix="set compute.price_per_hour, and check that the region has this instance type",
            )


def _guarded(key: str, run: Callable[[], Iterator[Issue]]) -> list[Issue]:
    """A check's issues; if AWS refuses or does not answer, an issue of level "not checked"."""
    import botocore.exceptions

    found: list[Issue] = []
    try:
        found.extend(run())
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        what, fix = session.about(error)
        found.append(not_checked(key=key, found=what, fix=fix))
    return found


def _described(
    describe: Callable[[str], list[dict[str, Any]]], names: list[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """EC2's descriptions of the names, and the names that it does not know. Raises botocore's other errors."""
    found, missing = [], []
    for name in names:
        try:
            found += describe(name)
        except session.errors() as error:
            if "NotFound" not in session.code(error):
                raise
            missing.append(name)
    return found, missing


def _bucket_region(answer: dict[str, Any]) -> str:
    """The region in an answer or error of S3; "" without one."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return answer.get("BucketRegion") or headers.get("x-amz-bucket-region") or ""


def _in_folder(key: str, prefix: str) -> bool:
    """Whether an object is in the folder that a prefix seems to name."""
    return not prefix or prefix.endswith("/") or key == prefix or key.startswith(f"{prefix}/")

"""Whether a job's security groups let its hosts reach each other, by EC2's descriptions of the groups.

https://docs.aws.amazon.com/sagemaker/latest/dg/train-vpc.html, Configure the VPC Security Group. Each host is in all groups of the
job, so a rule that names one of them applies to all hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.aws import catalog
from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.planner import groups
from launcher.show.text import listed

Group = Mapping[str, Any]
"""A security group as DescribeSecurityGroups returns it."""

KEY = "network.security_groups"

RENDEZVOUS = 7777
"""The rendezvous port of the container toolkit's torchrun."""

DIRECTIONS = {"inbound": ("IpPermissions", "ingress"), "outbound": ("IpPermissionsEgress", "egress")}
"""Direction -> its rules in a group, and its name in the AWS CLI."""

IPSEC = {"UDP 500": ("udp", 500), "protocol 50 (ESP)": ("50", None)}
"""What encrypted traffic between hosts needs -> its protocol in a rule, and its port:
https://docs.aws.amazon.com/sagemaker/latest/dg/train-encrypt.html"""

ADDRESSES = ("IpRanges", "Ipv6Ranges", "PrefixListIds")
"""What a rule names addresses by: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_IpPermission.html"""


def check(job: Job, found: Sequence[Group], region: str) -> Iterator[Issue]:
    """Issues of the traffic between several hosts.

    Args:
        found: those of the job's groups that exist.
    """
    if not found or groups.host_count(job) == 1:
        return
    if job.network.encrypt_traffic:  # all that hosts send each other is then inside IPsec
        yield from _closed_to_encryption(found, region)
        return
    efa = _closed_to_efa(job, found, region)
    if efa is not None:
        yield efa
    if efa is None or efa.level == "warning":  # an error's fix lets all traffic in
        yield from _closed_inbound(job, found)


def opens(found: Sequence[Group], low: int, high: int) -> bool:
    """Whether a job's groups together let its hosts in on TCP ports. A rule for addresses counts, as it may cover theirs."""
    ranges = sorted(
        (0, 65535) if _is_all_traffic(rule) else (rule["FromPort"], rule["ToPort"])
        for group in found
        for rule in group.get("IpPermissions", ())
        if (_is_all_traffic(rule) or rule["IpProtocol"] == "tcp")
        and (_names(rule, found) or any(rule.get(kind) for kind in ADDRESSES))
    )
    for first, last in ranges:
        if first <= low:
            low = max(low, last + 1)  # the lowest port that none of them has opened yet
    return low > high


def _closed_to_encryption(found: Sequence[Group], region: str) -> Iterator[Issue]:
    """Issues of IPsec, by which SageMaker encrypts the traffic between hosts.

    AWS asks for rules from and to the group itself. IPsec is IP traffic, so a rule for addresses, such as every new group's outbound
    one, may let it through too: it makes the issue a warning.
    """
    missing, fixes, is_closed = [], [], False
    for direction, (key, _) in DIRECTIONS.items():
        rules = [rule for group in found for rule in group.get(key, ())]
        for name, (protocol, port) in IPSEC.items():
            letting = [rule for rule in rules if _lets_through(rule, protocol, port)]
            if any(_names(rule, found) for rule in letting):
                continue
            missing.append(f"{direction} {name}")
            fixes.append(_command(direction, found[0]["GroupId"], region, protocol, port))
            is_closed = is_closed or not any(rule.get(kind) for rule in letting for kind in ADDRESSES)
    if missing:
        yield Issue(
            key=KEY,
            level="error" if is_closed else "warning",
            found=f"no group has a rule for {listed(missing)} of its own members, which network.encrypt_traffic needs",
            valid="inbound and outbound rules from and to the group itself: UDP 500 and protocol 50 (ESP), or all traffic",
            fix="; ".join(fixes),
        )


def _closed_inbound(job: Job, found: Sequence[Group]) -> Iterator[Issue]:
    """Issues of closed ports: hosts that have met exchange gradients, images and Ray's messages on ports that the system picks."""
    if opens(found, 0, 65535):
        return
    meet = not groups.is_remote(job) and opens(found, RENDEZVOUS, RENDEZVOUS)
    then = f"meet at port {RENDEZVOUS} and then take others" if meet else "have to reach each other"
    yield Issue(
        key=KEY,
        level="warning" if meet else "error",
        found=f"no group allows {'all ' if meet else ''}traffic from its own members, and {groups.host_count(job)} hosts {then}",
        fix="add an inbound rule to one of them: all traffic, with the group itself as its source",
    )


def _closed_to_efa(job: Job, found: Sequence[Group], region: str) -> Issue | None:
    """What blocks EFA's traffic between the hosts that train; None: nothing, or they have no EFA.

    "An EFA requires a security group that allows all inbound and outbound traffic to and from the security group itself":
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html#efa-start-security, and the same of training hosts in
    train-vpc. Traffic that bypasses the operating system is not IP traffic, so a rule for addresses, such as every new group's outbound
    one to 0.0.0.0/0, does not let it through: the hosts meet over TCP, and hang in their first all-reduce.

    It is an error only if EFA is sure to be used: by the library in torchrun's or smddp's processes on P hosts. Others may use TCP:
    G and CPU hosts, for which no page says that SageMaker gives them EFA, and a script without a launcher.
    """
    kinds = {place.instance_type for place in groups.places(job) if place.rank is not None}
    machines = [machine for kind in sorted(kinds) if (machine := catalog.instance(kind)) is not None and machine.efa]
    if groups.training_host_count(job) == 1 or not machines:
        return None
    group, missing = min(((group, _missing(group, found)) for group in found), key=lambda one: len(one[1]))
    if not missing:
        return None
    is_sure = job.distribution != "none" and all(machine.name.startswith("ml.p") for machine in machines)
    return Issue(
        key=KEY,
        level="error" if is_sure else "warning",
        found=f"no group lets {listed(missing)} traffic of EFA through, by which hosts of {machines[0].name} reach each other",
        valid="one group with an inbound and an outbound rule: all traffic, from and to the group itself (not addresses)",
        fix="; ".join(_command(direction, group["GroupId"], region) for direction in missing),
    )


def _missing(group: Group, found: Sequence[Group]) -> list[str]:
    """The directions in which a group has no rule for all traffic of the job's groups."""
    return [
        direction
        for direction, (rules, _) in DIRECTIONS.items()
        if not any(_is_all_traffic(rule) and _names(rule, found) for rule in group.get(rules, ()))
    ]


def _command(direction: str, group: str, region: str, protocol: str = "-1", port: int | None = None) -> str:
    """The AWS CLI command that adds a rule for a group's own members to it, by default for all traffic, from AWS's guide:
    https://docs.aws.amazon.com/pcs/latest/userguide/working-with_networking_efa_create-sg.html"""
    command = f"aws ec2 authorize-security-group-{DIRECTIONS[direction][1]} --region {region} --group-id {group}"
    ports = f" --port {port}" if port is not None else ""
    return f"{command} --protocol {protocol}{ports} --source-group {group}"


def _lets_through(rule: Mapping[str, Any], protocol: str, port: int | None) -> bool:
    """Whether a rule is for a protocol's traffic, of a port if it has ports."""
    if _is_all_traffic(rule):
        return True
    return bool(rule["IpProtocol"] == protocol and (port is None or rule["FromPort"] <= port <= rule["ToPort"]))


def _is_all_traffic(rule: Mapping[str, Any]) -> bool:
    return bool(rule["IpProtocol"] == "-1")


def _names(rule: Mapping[str, Any], found: Sequence[Group]) -> bool:
    """Whether a rule names one of the job's groups."""
    named = {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())}
    return not named.isdisjoint(group["GroupId"] for group in found)

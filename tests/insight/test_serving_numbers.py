"""The numbers in what is said of hosts that make images, and how many processes or cores a fix asks for."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.insight.findings import Finding
from launcher.insight.measurements import Measurements, Series
from tests.insight.planted import plant
from tests.insight.test_rules import CPU, SERVERS, gpu_step
from tests.insight.test_serving_rule import found, planted, with_facts, without_groups

# Servers


def test_what_servers_did_is_said_in_threads_images_and_bytes():
    finding = found("too_few_servers", planted(1.0, hosts=2, milliseconds=38.0, alone=0.1))
    # 256 images of 150 kB in 1.246 s, of which servers make nine tenths
    assert finding.evidence[2:5] == (
        "servers: 8 threads of 2 serving hosts, busy 88 % of the time",
        "184.9 images/s received, each takes 38 ms of a server's thread; 27.7 MB/s",
        "the receiving thread of a training process is busy 10 % of the time",
    )


@pytest.mark.parametrize("failures", [0, 3])
def test_failures_are_reported_where_there_were_some(failures):
    finding = found("too_few_servers", planted(1.0, milliseconds=48.0, alone=0.25, failures=failures))
    said = [one for one in finding.evidence if "servers failed" in one]
    assert said == (["servers failed: 3; images made by the training processes: 12,800"] if failures else [])


@pytest.mark.parametrize("alone", [0.0, 0.1])
@pytest.mark.parametrize(
    ("known", "hosts", "each", "cores"),
    [
        ({}, "serving hosts with 40 cores in all", "", 40),
        ({"serving_hosts": ["algo-2", "algo-3"]}, "10 serving hosts instead of 2", ", and a host has 4", 20),
        (None, 10, ", and a host has 4", 20),
    ],
    ids=["nothing", "names", "groups"],
)
def test_exactly_the_threads_that_are_needed_are_asked_for(known, hosts, each, cores, alone):
    """Of 1,041 images/s, which steps take that wait for none, each takes 38.4375 ms of a thread: 40 threads, on hosts that have 4."""
    measured = planted(1.0, hosts=2, milliseconds=38.4375, alone=alone)
    more, larger, *_ = found("too_few_servers", measured if known is None else without_groups(measured, **known)).fixes
    need = "steps that never wait take 1041 images/s; at 38.4 ms of a thread each, these need 40.0 threads"
    assert (more.value, more.why) == (hosts, need + each)
    assert larger.value == f"an instance type with {cores} cores, for the same number of serving hosts"


def test_servers_that_would_do_and_that_steps_wait_for_get_one_core_more():
    few = without_groups(planted(0.0285, hosts=4, threads=64, milliseconds=60.0))  # 62.4 threads
    finding = found("too_few_servers", few)
    assert finding.fixes[0].value == "serving hosts with 65 cores in all"
    assert "servers: 64 threads, busy 87 % of the time" in finding.evidence


# The network


def network_bound(**more: object) -> Measurements:
    """Two training hosts of four ranks, four that serve; 512 images in 1.246 s, a fifth of them made by the ranks, and 80 % waited for."""
    servers = {**SERVERS, "hosts": 4, "threads": 16, "milliseconds": 2.0, "in_flight": 0.6, "alone": 0.2}
    settings = {"global_batch_size": 512}
    return plant(
        phases=gpu_step(data_wait=1.0),
        gpu=20,
        ranks=8,
        ranks_per_host=4,
        noise=0.0,
        settings=settings,
        servers=servers,
        **more,
    )


def test_what_travels_is_shared_by_the_hosts_at_both_ends():
    finding = found("servers_network_bound", network_bound())
    assert finding.fixes[0].value == (
        "instance types with more network bandwidth: 0.999 Gbit/s for each training host, 0.5 Gbit/s for each serving host, sustained"
    )
    assert finding.fixes[0].why == "steps that never wait take 125 MB/s a training host"
    assert finding.fixes[1].value == "fewer pixels an image: each takes 150 kB on the network"
    # parts take the time of 0.66 threads, and 4.8 of them travel
    assert finding.evidence[-2] == "making the images takes 12 % of the time from request to receipt"
    assert finding.evidence[-1].startswith("a training host receives 24.7 MB/s of images, 2")


@pytest.mark.parametrize(
    ("first", "second", "in_all"), [(None, 7e6, ", 7 MB/s in all"), (5e6, 7e6, ", 6 MB/s in all"), (None, None, "")]
)
def test_a_host_whose_network_was_not_watched_is_left_out(first, second, in_all):
    measured = network_bound()
    times = measured.hosts["algo-1"].memory.times
    hosts = dict(measured.hosts)
    for name, rate in (("algo-1", first), ("algo-2", second)):
        receive = {} if rate is None else {"receive": Series(times, times * 0 + rate)}
        hosts[name] = dataclasses.replace(hosts[name], network=receive)
    for nothing in ({}, {"receive": Series(times[:0], times[:0])}):
        if first is None:
            hosts["algo-1"] = dataclasses.replace(hosts["algo-1"], network=nothing)
        finding = found("servers_network_bound", dataclasses.replace(measured, hosts=hosts))
        assert finding.evidence[-1] == f"a training host receives 24.7 MB/s of images{in_all}"


@pytest.mark.parametrize(("system", "used"), [(True, ", 25 % of whose cores are in use"), (False, "")])
def test_whether_the_training_hosts_have_cores_to_spare_is_said_where_it_was_measured(system, used):
    finding = found("servers_network_bound", network_bound(system=system))
    assert finding.fixes[-1].value == (
        f"worker_type auto without the serving group: images made by the training hosts{used}"
    )


# Receiving


def receiving_bound(wait: float, receiving: float = 0.95, batch: int = 256, **more: object) -> Measurements:
    values = {"phases": gpu_step(data_wait=wait), "gpu": 50, "noise": 0.0, **more}
    servers = {**SERVERS, "milliseconds": 1.0, "receiving": receiving}
    return plant(settings={"global_batch_size": batch}, servers=servers, **values)


def receiving(measured: Measurements) -> Finding:
    return found("receiving_bound", measured)


def test_exactly_the_processes_that_receive_what_steps_take_are_asked_for():
    finding = receiving(receiving_bound(0.574, 0.9, batch=258))  # 70 % of a step waits: 0.9 / 0.3 processes
    assert finding.fixes[0].value == 3 and "receiving 0.30" in finding.gain.formula
    assert "the training process 0.30, the servers 0.04" in finding.gain.formula


def test_a_thread_that_nearly_keeps_up_gets_one_beside_it():
    assert receiving(receiving_bound(0.0285, 0.86)).fixes[0].value == 2


@pytest.mark.parametrize(
    ("ranks", "distribution", "also"),
    [(1, None, {"distribution": "torchrun"}), (1, "torchrun", {}), (1, "smddp", {}), (2, None, {})],
)
def test_processes_that_would_each_train_a_model_of_their_own_are_joined(ranks, distribution, also):
    facts = {} if distribution is None else {"distribution": distribution}
    assert receiving(receiving_bound(0.246, ranks=ranks, facts=facts)).fixes[0].also == also


def test_a_group_of_hosts_grows_by_whole_hosts_that_share_the_batch():
    # 67 % of a step waits: 23.05 processes, six hosts of four
    measured = receiving_bound(0.5, ranks=8, ranks_per_host=4)
    finding = receiving(measured)
    [hosts, _] = finding.fixes
    assert (hosts.setting, hosts.now, hosts.value) == ("compute.instance_groups.0.instance_count", 2, 8)
    assert hosts.why == "24 processes receive what 8 compute; the global batch stays the same"
    assert "receiving 0.24" in finding.gain.formula, "four times as many hosts"
    other = receiving(receiving_bound(0.5, batch=272, ranks=8, ranks_per_host=4))
    assert other.fixes[0].value == 17, "4 processes each, of which only 68 share a batch of 272"
    words = receiving(with_facts(measured, training_group=None))
    assert (words.fixes[0].setting, words.fixes[0].value) == (None, "24 training processes instead of 8")
    assert "receiving 0.32" in words.gain.formula


def test_ranks_whose_record_is_elsewhere_receive_too():
    measured = receiving_bound(0.5, ranks=8, ranks_per_host=4)
    half = dataclasses.replace(measured, ranks=measured.ranks[:4])
    assert receiving(half).fixes[0].why.startswith("24 processes receive what 8 compute")
    unknown = dataclasses.replace(half, facts={name: one for name, one in half.facts.items() if name != "world_size"})
    assert receiving(unknown).fixes[0].why.startswith("12 processes receive what 4 compute")


def test_hosts_of_one_machine_get_processes_each_and_its_gpus_are_what_they_are():
    phases = {**CPU, "data_wait": sum(CPU.values())}  # half of a step waits: 7.2 processes
    on_cpus = receiving_bound(0.0, 0.9, phases=phases, gpu=None, ranks=4, ranks_per_host=2, facts={"one_machine": True})
    finding = receiving(on_cpus)
    [processes, _] = finding.fixes
    assert (processes.setting, processes.now, processes.value) == ("compute.processes_per_host", 2, 4)
    assert "receiving 0.45" in finding.gain.formula
    on_gpus = receiving(receiving_bound(0.246, facts={"one_machine": True})).fixes[0]
    assert (on_gpus.setting, on_gpus.value) == (None, "2 training processes instead of 1")


def test_a_batch_that_no_number_of_processes_shares_but_its_own_is_left_to_that():
    assert receiving(receiving_bound(0.246, batch=7)).fixes[0].value == 7

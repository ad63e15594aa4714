"""Waiting for images that other hosts make: which of servers, storage, network and receiving it is, how many to take, and what is not said."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from launcher.config.loading import from_values
from launcher.config.yaml_file import Config, override
from launcher.insight.answers import NotMeasured
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.measurements import Measurements, read
from launcher.insight.report import Report
from launcher.insight.rules.table import judge
from launcher.insight.servers import happened, served
from launcher.insight.touches import touch_of
from launcher.study.tune_subject import JobSubject
from tests.insight.planted import plant, write
from tests.insight.test_data_rule import beside_the_device
from tests.insight.test_rules import CPU, GPU, SERVERS, gpu_step

OF_WORKERS = {"too_few_workers", "too_many_workers", "data_bound"}


def planted(wait: float, batch: int = 256, **servers) -> Measurements:
    """Steps of 0.246 s and a wait, on a GPU that idles meanwhile; without noise."""
    phases = gpu_step(data_wait=wait)
    idle = wait / sum(phases.values())
    settings = {"global_batch_size": batch}
    return plant(phases=phases, gpu=100 * (1 - idle), noise=0.0, settings=settings, servers={**SERVERS, **servers})


def judged(measured: Measurements) -> Report:
    return judge(Evidence(measured))


def found(kind: str, measured: Measurements) -> Finding:
    [one] = [one for one in judged(measured).findings if one.kind == kind]
    return one


def with_facts(measured: Measurements, **facts: object) -> Measurements:
    return dataclasses.replace(measured, facts={**measured.facts, **facts})


def without_groups(measured: Measurements, **facts: object) -> Measurements:
    """As of a run whose record does not say which hosts serve, but for these facts."""
    known = {name: value for name, value in measured.facts.items() if "serving" not in name}
    return dataclasses.replace(measured, facts={**known, **facts})


# How many to take


@pytest.mark.parametrize(
    ("hosts", "threads", "milliseconds", "wait", "wanted"),
    [
        (1, 8, 9.1, 0.06, 2),  # 256 images in 0.246 s, at 9.1 ms: 9.5 threads, a host has 8
        (2, 8, 37.0, 1.0, 10),  # 38.5 threads, a host has 4
        (4, 64, 76.0, 0.08, 5),  # 79.1 threads, a host has 16
        (4, 64, 60.0, 0.0285, 5),  # 62.4 threads fit on the four hosts, but steps wait: one more
    ],
)
def test_the_number_of_serving_hosts_is_what_the_steps_take_when_they_wait_for_nothing(
    hosts, threads, milliseconds, wait, wanted
):
    measured = planted(wait, hosts=hosts, threads=threads, milliseconds=milliseconds)
    fix = found("too_few_servers", measured).fixes[0]
    assert (fix.setting, fix.now, fix.value) == ("compute.instance_groups.1.instance_count", hosts, wanted)
    assert f"a host has {threads // hosts}" in fix.why


def test_training_hosts_that_were_not_measured_count_too():
    """32 ranks on four hosts, of which one's record is there."""
    servers = {**SERVERS, "threads": 96, "milliseconds": 4.0, "receiving": 0.99, "in_flight": 130.0}
    whole = plant(phases=gpu_step(data_wait=0.7), gpu=26, ranks=32, cores=96, servers=servers, facts={"hosts": 5})
    one = dataclasses.replace(whole, ranks=tuple(steps for steps in whole.ranks if steps.host == "algo-1"))
    fixes = [found("receiving_bound", measured).fixes[0] for measured in (whole, one)]
    assert (fixes[0].setting, fixes[0].now, fixes[0].value) == (fixes[1].setting, fixes[1].now, fixes[1].value)


def test_what_the_device_needs_of_a_step_is_not_lost_to_a_wait_for_servers():
    """80 % of a step of 1 s waits, and the device works for 60 % of it: 256 images in 0.6 s at 37 ms need 15.8 of 4 threads."""
    servers = {**SERVERS, "hosts": 1, "threads": 4, "milliseconds": 37.0}
    measured = beside_the_device(0.8, 0.6, gpu=60, settings={"global_batch_size": 256}, servers=servers)
    one = found("too_few_servers", measured)
    assert one.share == pytest.approx(0.4, abs=0.01) and one.fixes[0].value == 4
    assert one.gain.expected.value == pytest.approx(1 / 0.6, rel=0.03)
    assert (
        "waiting for data: 80 % of a step" in one.evidence[0]
        and "without the wait a step is 40 % shorter" in one.evidence[1]
    )
    served_in_time = beside_the_device(0.8, 0.95, gpu=60, settings={"global_batch_size": 256}, servers=servers)
    assert not judged(served_in_time).findings


def test_more_servers_gain_no_more_than_the_next_limit_leaves():
    alone = found("too_few_servers", planted(1.0, milliseconds=37.0)).gain
    receiving = found("too_few_servers", planted(1.0, milliseconds=37.0, receiving=0.6)).gain
    assert alone.expected.value == pytest.approx(1.246 / 0.246, rel=0.03)
    assert receiving.expected.value == pytest.approx(1 / 0.6, rel=0.03)
    assert "receiving 0.60" in receiving.formula and alone.expected.low < alone.expected.value < alone.expected.high


def test_the_largest_serving_group_grows_and_the_others_stay():
    groups = [
        {"index": 0, "instance_type": "ml.c5.large", "instance_count": 1},
        {"index": 2, "instance_type": "ml.c5.large", "instance_count": 3},
    ]
    measured = with_facts(planted(1.0, hosts=4, threads=8, milliseconds=37.0), serving_groups=groups)
    fix = found("too_few_servers", measured).fixes[0]  # 38.5 threads, a host has 2: 20 hosts
    assert (fix.setting, fix.now, fix.value) == ("compute.instance_groups.2.instance_count", 3, 19)


def test_where_the_groups_are_not_known_the_number_is_said_in_words():
    measured = planted(1.0, hosts=2, milliseconds=37.0)
    for facts, said in (
        ({"serving_hosts": ["algo-2", "algo-3"]}, "10 serving hosts instead of 2"),
        ({}, "serving hosts with 39 cores in all"),
    ):
        fix = found("too_few_servers", without_groups(measured, **facts)).fixes[0]
        assert fix.setting is None and fix.value == said


def test_threads_that_were_lost_count_for_what_a_host_has():
    measured = planted(1.0, hosts=2, milliseconds=37.0)
    [steps] = measured.ranks
    threads = np.where(np.arange(len(steps.step)) < 3, 16.0, 8.0)  # one of two hosts is gone soon
    servers = {**steps.servers, "threads": threads}
    lost = dataclasses.replace(measured, ranks=(dataclasses.replace(steps, servers=servers),))
    assert found("too_few_servers", lost).fixes[0].value == 5, "38.5 threads, a host has 8"


def test_the_bandwidth_to_take_is_what_the_steps_take_when_they_wait_for_nothing():
    finding = found("servers_network_bound", planted(1.0, hosts=2, milliseconds=2.0, in_flight=20.0))
    # 256 images of 150 kB in 0.246 s are 156 MB/s, or 1.25 Gbit/s, from two hosts
    assert "1.25 Gbit/s for each training host, 0.624 Gbit/s for each serving host" in finding.fixes[0].value
    assert "156 MB/s" in finding.fixes[0].why and "a training host receives 30.8 MB/s of images" in str(
        finding.evidence
    )
    assert "making the images takes 2 %" in str(finding.evidence)
    assert finding.gain.expected.value == pytest.approx(1.246 / 0.246, rel=0.03)


def test_receiving_wants_processes_that_together_keep_up():
    measured = planted(0.246, milliseconds=1.0, receiving=0.95)  # half of a step waits: 1.9 processes
    fix = found("receiving_bound", measured).fixes[0]
    assert (fix.setting, fix.now, fix.value) == ("compute.instance_groups.0.instance_count", 1, 2)
    third = planted(0.6, milliseconds=1.0, receiving=0.95)  # 3.3 processes; 256 images have no fifth, nor sixth …
    assert found("receiving_bound", third).fixes[0].value == 4
    odd = planted(0.6, batch=258, milliseconds=1.0, receiving=0.95)
    assert found("receiving_bound", odd).fixes[0].value == 6, "258 images are shared by 6 processes, not by 4 or 5"


def test_receiving_on_this_machine_wants_more_processes_on_its_host():
    measured = plant(
        phases={**CPU, "data_wait": 0.2}, noise=0.0, servers={**SERVERS, "milliseconds": 1.0, "receiving": 0.95}
    )
    fix = found("receiving_bound", with_facts(measured, one_machine=True)).fixes[0]
    assert (fix.setting, fix.now, fix.value) == ("compute.processes_per_host", 1, 2)


# What the rule distinguishes


@pytest.mark.parametrize(
    ("busy", "receiving", "kind"),
    [(0.84, 0.1, None), (0.86, 0.1, "too_few_servers"), (0.5, 0.84, None), (0.5, 0.86, "receiving_bound"),
     (0.9, 0.95, "receiving_bound"), (0.95, 0.9, "too_few_servers")],
)  # fmt: skip
def test_the_busier_of_servers_and_receiving_is_the_limit_from_85_percent_on(busy, receiving, kind):
    milliseconds = 1000 * busy * 8 * 0.346 / 256
    report = judged(planted(0.104, milliseconds=milliseconds, receiving=receiving, in_flight=2.0))
    assert [finding.kind for finding in report.findings] == ([kind] if kind else [])
    if kind is None:
        [unknown] = [one for one in report.not_measured if "servers" in one.what]
        assert "nothing is at its limit" in unknown.reason


@pytest.mark.parametrize(("in_flight", "network"), [(3.9, False), (4.1, True)])
def test_the_network_is_the_limit_where_as_many_parts_travel_as_are_made(in_flight, network):
    milliseconds = 1000 * 0.5 * 8 * 0.346 / 256  # 4 threads of 8
    kinds = [one.kind for one in judged(planted(0.104, milliseconds=milliseconds, in_flight=in_flight)).findings]
    assert kinds == (["servers_network_bound"] if network else [])


def test_servers_whose_cores_idle_wait_for_reads():
    busy, idle = (planted(1.0, milliseconds=37.0, cores_in_use=share) for share in (0.6, 0.4))
    assert [one.kind for one in judged(busy).findings] == ["too_few_servers"]
    [finding] = judged(idle).findings
    assert finding.kind == "storage_bound" and "servers wait for reads" in finding.title
    assert (
        "--shards" in str(finding.fixes[0]) and finding.fixes[-1].setting == "compute.instance_groups.1.instance_count"
    )


@pytest.mark.parametrize(("share", "kind"), [(0.45, "storage_bound"), (0.55, "too_few_servers")])
def test_cores_that_idle_while_a_gpu_runs_the_teacher_do_not_wait_for_reads(share, kind):
    assert found(kind, planted(0.06, cores_in_use=0.2, teacher=share))


def test_a_teacher_that_fills_the_servers_wants_gpus_and_not_cheaper_images():
    measured = planted(0.06, teacher=0.8)
    served_teacher = {**measured.settings, "teacher_servers": {"top_k": 10}}
    one = found("too_few_servers", dataclasses.replace(measured, settings=served_teacher))
    assert one.cause.startswith("the teacher occupies") and len(one.fixes) == 2
    assert "serving hosts with GPUs" in one.fixes[1].value
    assert "the teacher takes 80 % of the time that servers' threads are busy" in one.evidence


def test_no_server_at_all_is_said_and_needs_no_number():
    for servers in ({"alone": 0.6}, {"threads": 0, "alone": 1.0}):
        finding = found("too_few_servers", planted(0.3, **servers))
        assert "make 60 % of" in finding.title or "make 100 % of" in finding.title
        assert "ray.log" in finding.fixes[0].value and finding.gain.expected is None


def test_ranks_share_the_servers_and_their_numbers_add_up():
    measured = plant(phases=GPU, ranks=4, gpu=95, noise=0.0, servers={**SERVERS, "milliseconds": 7.0})
    now = served(Evidence(measured))
    assert now.threads == 8 and now.images == pytest.approx(256 / 0.25, rel=0.001)
    assert now.busy == pytest.approx(256 * 0.007 / 8 / 0.25, rel=0.001)
    parts = plant(phases=GPU, ranks=4, gpu=95, noise=0.0, servers={**SERVERS, "milliseconds": 7.0, "part": 0.25})
    assert served(Evidence(parts)).threads == 8, "each of the ranks asks a quarter of them"
    half = dataclasses.replace(measured, ranks=measured.ranks[:2])
    assert served(Evidence(half)).images == pytest.approx(now.images), "ranks whose record is elsewhere count too"


def test_where_epochs_begin_and_in_a_quota_others_findings_explain_the_wait():
    at_starts = plant(phases=GPU, gpu=85, epoch_start=2.0, servers=SERVERS)
    kinds = [finding.kind for finding in judged(at_starts).findings]
    assert kinds == ["slow_epoch_starts"] and "num_workers" not in str(judged(at_starts).findings)
    quota = plant(phases={**CPU, "data_wait": 0.2}, usable=2, busy=1.9, throttled=60, servers=SERVERS)
    [throttled] = judged(quota).findings
    assert throttled.kind == "cpu_throttled" and "num_workers" not in str(throttled.fixes)


# What is not said


@pytest.mark.parametrize("workers", [0, 1, 16, "auto"])
@pytest.mark.parametrize("case", [
    dict(phases=gpu_step(data_wait=0.5), gpu=33, busy=1.0, io_wait=3.0),
    dict(phases=gpu_step(data_wait=0.5), gpu=33, busy=7.9),
    dict(phases={**CPU, "data_wait": 0.5}, cores=2, busy=1.99, pressure=90),
    dict(phases=gpu_step(data_wait=0.5), gpu=33, system=False),
    dict(phases=None, gpu=33, busy=7.9),
    dict(phases=GPU, gpu=95, memory_growth=55),
    dict(phases=GPU, gpu=70, epoch_start=8.0),
], ids=["disks", "full cores", "pressure", "no hosts", "no steps", "memory", "epochs"])  # fmt: skip
def test_workers_are_no_advice_where_other_hosts_make_the_images(case, workers):
    settings = {"num_workers": workers, "worker_type": "remote"}
    facts = {"num_workers": 16}
    report = judged(plant(**case, settings=settings, facts=facts, servers=SERVERS))
    assert not OF_WORKERS & {finding.kind for finding in report.findings}
    assert not any("worker" in (fix.setting or "") for finding in report.findings for fix in finding.fixes)
    assert ("waiting for data: workers, cores, storage", "other hosts make the images") in report.not_applicable


def test_a_run_that_makes_its_own_images_is_not_asked_for_servers():
    report = judged(plant(phases=GPU, gpu=95))
    assert (SERVING, "images are made by the training hosts") in report.not_applicable
    assert SERVING in judged(plant(phases=GPU, gpu=95, servers=SERVERS)).not_found


SERVING = "waiting for images from other hosts: their number, the network, receiving"


def test_a_timeline_without_numbers_of_servers_is_not_judged():
    report = judged(plant(phases=gpu_step(data_wait=0.5), gpu=33, settings={"worker_type": "remote"}))
    [unknown] = [one for one in report.not_measured if one.reason == "the timeline has no numbers of servers"]
    assert isinstance(unknown, NotMeasured) and not report.findings


# What is reported beside findings


def test_a_run_whose_servers_failed_says_so_in_every_form(tmp_path):
    measured = planted(0.004, alone=0.25, failures=3, late=2)
    folder = write(measured, tmp_path / "run")
    for one in (measured, read(str(folder))):
        shown = Diagnosis(one)
        for text in (str(shown), shown._repr_html_()):
            flat = " ".join(text.split())
            assert "38,400 images came from other hosts (8 threads)" in flat
            assert "the training processes made 12,800 themselves" in flat and "servers failed 3 times" in flat
            assert "2 parts of batches were late" in flat
        reported = json.loads(json.dumps(shown.to_dict()))["servers"]
        assert (reported["images"], reported["alone"], reported["failures"], reported["late"]) == (38400, 12800, 3, 2)
        assert reported["usual"]["threads"] == 8
    quiet = Diagnosis(planted(0.004))
    assert "failed" not in str(quiet) and "processes made" not in str(quiet)
    assert (
        happened(Evidence(plant(phases=GPU))) is None
        and "servers" not in str(Diagnosis(plant(phases=GPU, gpu=95)))[:200]
    )


def test_the_timelines_numbers_of_servers_come_back_as_they_were_written(tmp_path):
    measured = planted(0.5, milliseconds=20.0, alone=0.1)
    [before], [after] = measured.ranks, read(str(write(measured, tmp_path / "run"))).ranks
    assert {*before.servers} == {*after.servers}
    for name, values in before.servers.items():
        np.testing.assert_allclose(after.servers[name], values, err_msg=name)
    assert "servers" not in after.extra


def test_windows_with_a_servers_number_that_is_none_are_left_out(tmp_path):
    folder = write(planted(0.5), tmp_path / "run")
    [file] = folder.rglob("timeline-0.jsonl")
    lines = file.read_text().splitlines()
    for place, wrong in (
        (3, {"servers": 4}),
        (4, {"servers": {"threads": "8"}}),
        (5, {"servers": {}, "steps": {"a": 1}}),
    ):
        event = json.loads(lines[place])
        lines[place] = json.dumps({**event, "extra": {**event["extra"], **wrong}})
    file.write_text("\n".join(lines))
    found = read(str(folder))
    assert found.unreadable == (f"timeline-0.jsonl: 3 of {len(lines)} lines",)
    assert len(found.ranks[0].step) == len(lines) - 2 - 3


# What follows a fix


def test_the_fix_is_an_override_that_a_config_takes():
    groups = [{"name": name, "instance_type": "ml.c5.large", "instance_count": 1} for name in ("gpus", "cpus")]
    config = Config("job", {"name": "test", "script": "train.py", "compute": {"instance_groups": groups}})
    changed, problems = override(config, ["compute.instance_groups.1.instance_count=3"])
    assert not problems and [one.instance_count for one in from_values(changed.values).compute.instance_groups] == [
        1,
        3,
    ]
    for key, why in (("2.instance_count", "no item 2"), ("one.instance_count", "no item one"), ("-1", "no item -1")):
        _, [issue] = override(config, [f"compute.instance_groups.{key}=3"])
        assert why in issue.found and "compute.instance_groups.0, compute.instance_groups.1" in issue.valid


def test_more_servers_are_compared_with_fewer_and_the_fix_is_judged():
    few, many = planted(1.0, milliseconds=37.0), planted(0.02, hosts=6, threads=48, milliseconds=37.0)
    few, many = with_facts(few, hosts=2), with_facts(many, hosts=7)
    comparison = Comparison(Diagnosis(few), Diagnosis(many))
    assert comparison.comparability.possible, comparison.sentences()
    [kept] = [one for one in comparison.kept() if "instance_count" in one.setting]
    assert (kept.before, kept.after, kept.advised, kept.beside) == (1, 6, 5, ())
    assert kept.is_inside and comparison.comparability.control is not None
    other = Comparison(Diagnosis(few), Diagnosis(with_facts(many, hosts=8)))
    assert "training hosts 1 before, 2 after" in other.comparability.sentence


def test_servers_on_one_machine_touch_what_shares_its_cores():
    few, many = planted(1.0, milliseconds=37.0), planted(0.02, hosts=6, threads=48, milliseconds=37.0)
    pair = [Diagnosis(with_facts(one, one_machine=True)) for one in (few, many)]
    assert Comparison(*pair).comparability.control is None
    assert touch_of("serving_groups").by_workers and touch_of("without_servers").by_workers
    assert "one machine" in str(found("too_few_servers", pair[0].measurements).evidence)


def test_tune_keeps_the_servers(tmp_path):
    groups = [{"name": name, "instance_type": "ml.c5.large", "instance_count": 1} for name in ("gpus", "cpus")]
    job = from_values(
        {
            "name": "test",
            "script": "train_classifier.py",
            "compute": {"instance_groups": groups, "training_groups": ["gpus"]},
            "inputs": {part: {"folder": str(tmp_path)} for part in ("train", "validation")},
            "hyperparameters": {"model": "resnet18", "worker_type": "remote"},
        }
    )
    subject = JobSubject(job, "process", 60)
    for measured in (
        plant(phases=GPU, gpu=85, epoch_start=2.0, servers=SERVERS),
        planted(1.0, milliseconds=37.0, cores_in_use=0.2),
        planted(1.0, milliseconds=37.0),
    ):
        evidence = Evidence(measured)
        for finding in judged(measured).findings:
            changes = [subject.also(finding, evidence), *map(subject.changes_of, finding.fixes)]
            assert not any({"worker_type", "num_workers"} & {*change} for change in changes), finding
    own = Evidence(plant(phases=GPU, gpu=85, epoch_start=2.0))
    assert subject.also(judge(own).findings[0], own) == {"worker_type": "loader"}

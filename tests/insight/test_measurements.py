"""Measurements read from real runs, from files in SageMaker's format, and from S3."""

from __future__ import annotations

import json
import random
from pathlib import Path

import boto3
import numpy as np
import pytest
from launcher_observer.system.monitor import Writer

import launcher
from launcher.backends import host_folders
from launcher.backends.process import Process
from launcher.config.issues import UserError
from launcher.emulator import Emulator
from launcher.insight import measurements, system_files
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import read
from launcher.insight.rules import pauses
from launcher.record.records import RunFolder

BEGIN = 1_795_000_020
"""A full minute."""

OF_SAGEMAKER = [
    # (Type, Name, Dimension, value): the rows of a sample of an ml.m5.large, each group with a time of its own
    [("memory", "MemoryUsedPercent", "", 6.18)],
    [("i/o", "IOPS", "", 5357.94), ("i/o", "ReadThroughputInBytesPerSecond", "", 8970700.56), ("i/o", "WriteThroughputInBytesPerSecond", "", 0.0)],
    [
        ("cpu", "cpu0", "CPUUtilization", 98.04), ("cpu", "cpu0", "I/OWaitPercentage", 3.92),
        ("cpu", "cpu1", "CPUUtilization", 100.0), ("cpu", "cpu1", "I/OWaitPercentage", 6.0),
    ],
    [
        ("network", "ReceiveBytesPerSecond", "Algorithm", 5.0), ("network", "TransmitBytesPerSecond", "Algorithm", 7.0),
        ("network", "ReceiveBytesPerSecond", "Platform", 66775126.66), ("network", "TransmitBytesPerSecond", "Platform", 70864.81),
    ],
    [("gpu", "gpu0", "GPUUtilization", 50), ("gpu", "gpu0", "GPUMemoryUtilization", 14.76)],
]  # fmt: skip


def sagemaker_files(folder: Path, minutes: int = 2, nodes: int = 1) -> Path:
    """A profiler-output folder with a sample every ten seconds, its lines in the agent's loose order."""
    shuffled = random.Random(0)
    for node in range(1, nodes + 1):
        for minute in range(BEGIN, BEGIN + 60 * minutes, 60):
            lines = []
            for second in range(0, 60, 10):
                groups = [(index, group) for index, group in enumerate(OF_SAGEMAKER)]
                shuffled.shuffle(groups)
                for index, group in groups:
                    for kind, name, dimension, value in group:
                        event = {"Type": kind, "Name": name, "Dimension": dimension, "Value": value}
                        event |= {"NodeId": f"algo-{node}", "Timestamp": minute + second + index / 1000}
                        lines.append(json.dumps(event, separators=((",", ":") if second else (", ", ":"))))
            place = folder / "profiler-output/system/incremental/2026111811" / f"{minute}.algo-{node}.json"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("\n".join(lines) + "\n")
    return folder / "profiler-output"


def same(first: measurements.Measurements, second: measurements.Measurements) -> bool:
    def flat(found):
        for name, host in sorted(found.hosts.items()):
            for part in ("cores", "io_wait", "gpus", "gpu_memory", "disk", "network", "other"):
                for key, series in sorted(getattr(host, part).items()):
                    yield name, part, key, series.times.tolist(), series.values.tolist()
            yield name, host.memory and (host.memory.times.tolist(), host.memory.values.tolist())

    return [*flat(first)] == [*flat(second)]


def test_sagemakers_own_files_are_read_whole(tmp_path):
    found = read(str(sagemaker_files(tmp_path)))
    (host,) = found.hosts.values()
    assert host.name == "algo-1" and [*host.cores] == [*host.io_wait] == ["cpu0", "cpu1"]
    assert host.cores["cpu1"].values.tolist() == [100.0] * 12
    assert host.cores["cpu0"].times.tolist() == [BEGIN + 10 * index + 0.002 for index in range(12)]
    assert {*host.memory.values} == {6.18} and {*host.gpus["gpu0"].values} == {50.0}
    assert {*host.gpu_memory["gpu0"].values} == {14.76}
    assert {name: series.values[0] for name, series in host.disk.items()} == {"read": 8970700.56, "write": 0.0}
    assert {name: series.values[0] for name, series in host.network.items()} == {"receive": 5.0, "transmit": 7.0}
    assert host.other["network", "ReceiveBytesPerSecond", "Platform"].values[0] == 66775126.66
    assert (host.throttled, host.usable_cores, host.memory_limit_bytes, found.sampled) == (None, None, None, None)
    assert {"throttled", "usable_cores", "steps"} <= set(found.not_measured) and found.ranks == () == found.stalls


def test_our_monitors_files_give_the_same_host(tmp_path):
    sagemaker_files(tmp_path / "theirs")
    writer = Writer(tmp_path / "ours/profiler-output", "algo-1")
    for second in range(0, 120, 10):
        for index, group in enumerate(OF_SAGEMAKER):
            values = {(kind, name, dimension): float(value) for kind, name, dimension, value in group}
            writer.write(BEGIN + second + index / 1000, values)
    assert same(read(str(tmp_path / "theirs")), read(str(tmp_path / "ours")))


def test_what_is_no_sample_costs_its_own_line_alone(tmp_path):
    place = sagemaker_files(tmp_path / "cut")
    sagemaker_files(tmp_path / "whole")
    first, last = sorted(place.rglob("*.json"))
    lines = first.read_text().splitlines()
    broken = ['{"Type":"cpu","Name":"cpu0","Dimensi', "", "null", '{"Type": "cpu"}', lines[0].replace("Value", "Valu")]
    first.write_text("\n".join([*lines[:5], *broken, *lines[5:]]))
    number = '"Value":null,"NodeId":"algo-1","Timestamp":"now"}'
    with open(last, "a") as file:
        file.write('{"Type":"cpu","Name":"cpu0","Dimension":"CPUUtilization",' + number + '\n{"Type":"cpu","Na')
    found = read(str(place))
    assert found.unreadable == ("system metrics of algo-1: 6 lines",) and same(found, read(str(tmp_path / "whole")))


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_long_record_is_thinned_to_the_same_minutes_of_every_host(tmp_path, hosts):
    place = sagemaker_files(tmp_path, minutes=30, nodes=hosts)
    total = sum(file.stat().st_size for file in place.rglob("*.json"))
    found = read(str(place), max_bytes=total // 7)
    assert found.sampled.startswith("system metrics: 5 of 30 minutes were read, one in 8, the same for every host")
    minutes = [{int(when) // 60 * 60 for when in host.memory.times} for host in found.hosts.values()]
    assert minutes == [{BEGIN + 60 * number for number in (0, 8, 16, 24, 29)}] * hosts
    assert read(str(place), max_bytes=total).sampled is None


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    with Emulator(tmp_path_factory.mktemp("emulator")) as emulator:
        emulator.add_bucket("amzn-s3-demo-bucket", "us-west-2")
        yield emulator


@pytest.fixture
def in_s3(emulator, monkeypatch, tmp_path) -> Path:
    """Two hosts' files, also below s3://amzn-s3-demo-bucket/runs/job-1/profiler-output; the folder."""
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    place = sagemaker_files(tmp_path, minutes=3, nodes=2)
    client = boto3.Session().client("s3")
    for file in place.rglob("*.json"):
        client.upload_file(str(file), "amzn-s3-demo-bucket", f"runs/job-1/profiler-output/{file.relative_to(place)}")
    client.put_object(Bucket="amzn-s3-demo-bucket", Key="runs/job-1/profiler-output/framework/other.json", Body="{")
    return place


def test_s3_is_read_as_a_folder_is(in_s3):
    found = read("s3://amzn-s3-demo-bucket/runs/job-1/profiler-output")
    assert [*found.hosts] == ["algo-1", "algo-2"] and same(found, read(str(in_s3)))


def test_s3_without_credentials_is_fixed_by_configuring_them(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(launcher.UserError) as raised:
        read("s3://amzn-s3-demo-bucket/profiler-output")
    [issue] = raised.value.issues
    assert "Unable to locate credentials" in issue.found and issue.fix.startswith("aws configure, or set AWS_PROFILE")


BUCKETS = {"OutputDataConfig": {"S3OutputPath": "s3://amzn-s3-demo-bucket/runs"}}
SWITCHED_ON = {"ProfilerConfig": {"S3OutputPath": "s3://amzn-s3-demo-bucket/runs/", "DisableProfiler": False}}
SWITCHED_OFF = {"ProfilerConfig": {"DisableProfiler": True}}


@pytest.mark.parametrize(
    ("request_json", "planned", "remote"),
    [
        (SWITCHED_ON, None, {}),
        (None, {**SWITCHED_ON, **BUCKETS}, {}),
        (BUCKETS | SWITCHED_OFF, None, SWITCHED_ON),
        (BUCKETS, None, {"ProfilerConfig": {"DisableProfiler": False}}),
        (SWITCHED_ON, None, SWITCHED_OFF),
    ],
    ids=[
        "the job's",
        "of another program's job",
        "switched on later",
        "without a place of its own",
        "switched off later",
    ],
)
def test_a_run_on_sagemaker_is_read_where_its_agent_wrote(in_s3, store, request_json, planned, remote):
    folder = store / "job-1"
    folder.mkdir(parents=True)
    job = {
        "name": "job",
        "script": "train_kd.py",
        "region": "us-east-1",
        "compute": {"instance_type": "ml.p4d.24xlarge"},
    }
    job["hyperparameters"] = {"epochs": 3}
    plan = {
        "name": "job-1",
        "planned": "2026-11-22T10:00:00+00:00",
        "backend": "aws",
        "job": job,
        "hosts": [{"name": "algo-1"}, {"name": "algo-2"}],
    }
    (folder / "plan.json").write_text(json.dumps(plan | ({"request": planned} if planned else {})))
    (folder / "remote.json").write_text(json.dumps(remote))
    if request_json is not None:
        (folder / "request.json").write_text(json.dumps(request_json))
    found = read("job-1")
    assert same(found, read(str(in_s3))) and found.settings == {"epochs": 3}
    assert found.facts == {
        "started_by": "aws",
        "hosts": 2,
        "instance_type": "ml.p4d.24xlarge",
        "environment": {},
        "one_machine": False,
    }


def test_s3_that_does_not_answer_is_the_users_to_fix(in_s3):
    with pytest.raises(UserError, match="NoSuchBucket"):
        read("s3://nobody-has-this-bucket/profiler-output")
    with pytest.raises(UserError, match="holds no measurements"):
        read("s3://amzn-s3-demo-bucket/runs/job-2")


def test_a_source_without_measurements_says_what_would_be_one(tmp_path, store):
    with pytest.raises(UserError, match="holds no measurements(.|\n)*system_monitor"):
        read(str(tmp_path))
    with pytest.raises(UserError, match="no such run"):
        read("quickstart")


@pytest.mark.slow
def test_a_run_on_two_hosts_is_read_with_all_its_hosts_and_ranks(prepared, store):
    """Through the toolkit; the hosts have addresses there, and are algo-1 and algo-2 here."""
    tiny = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "in_chans": 1}
    job = launcher.from_values(
        {
            "name": "measured",
            "script": "train_classifier.py",
            "distribution": "torchrun",
            "compute": {"instance_count": 2, "processes_per_host": 1},
            "profiling": {"system_interval_ms": 100},
            "inputs": {name: {"folder": str(prepared("digits") / name)} for name in ("train", "validation")},
            "hyperparameters": {
                "model": "vit_tiny_patch16_224", "model_options": tiny, "image_size": 16, "global_batch_size": 32,
                "max_steps": 30, "log_every": 5,
            },
        }
    )  # fmt: skip
    run = launcher.run(launcher.plan(job))
    assert run.wait(120) == "Completed", "\n".join(line for _, line in run.logs())
    found = read("measured")
    assert found.source == run.name and same(found, read(str(run.folder.path))) and found.sampled is None
    assert [*found.hosts] == ["algo-1", "algo-2"] and [(ranks.rank, ranks.host) for ranks in found.ranks] == [
        (0, "algo-1"),
        (1, "algo-2"),
    ]
    for host in found.hosts.values():
        assert len(host.memory.times) > 3 and (np.diff(host.memory.times) > 0).all()
        assert host.usable_cores >= 1 and {"read", "write"} == set(host.disk) and len(host.cores) == len(host.io_wait)
    for ranks in found.ranks:
        assert ranks.step.tolist() == [5, 10, 15, 20, 25, 30] and ranks.epoch.tolist() == [1] * 6
        assert {"step", "data_wait", "student_forward", "backward", "grad_sync", "optimizer"} <= set(ranks.seconds)
        assert {"images_per_second", "slowest_step", "steps", "memory_gib"} <= set(ranks.extra)
        assert (ranks.seconds["backward"] <= ranks.seconds["step"]).all()
    assert {(stall.rank, stall.kind) for stall in found.stalls} == {
        (rank, kind) for rank in (0, 1) for kind in ("checkpoint", "evaluate")
    }
    assert found.settings["max_steps"] == 30 and found.settings["seed"] == 0 and "grad_sync" not in found.not_measured
    facts = {
        name: found.facts[name] for name in ("world_size", "steps", "state", "started_by", "hosts", "backend", "device")
    }
    assert facts == {"world_size": 2, "steps": 30, "state": "Completed", "started_by": "process", "hosts": 2, "backend": "gloo", "device": "cpu"}  # fmt: skip
    assert found.facts["seconds_to_first_step"] > 0
    assert any("system metrics every 100 ms (as profilerconfig.json says)" in line for _, line in run.logs())


def test_a_phase_that_a_window_lacks_is_no_number_and_a_cut_line_is_counted(tmp_path):
    start = {"kind": "start", "rank": 3, "node": "algo-2", "settings": {}, "not_measured": {}}
    start |= dict.fromkeys(("world_size", "backend", "device", "device_name", "instance_type", "torch", "threads"))
    start["device_uuid"] = "stand-in-0"
    window = {
        "kind": "steps",
        "epoch": 1,
        "step": 1,
        "ended": 2.0,
        "seconds": {"step": 1.0},
        "extra": {"steps": 1, "cpu_seconds": 1.5},
    }
    other = {**window, "step": 2, "ended": 3.0, "seconds": {"step": 1.0, "loss": 0.5}}
    texts = [json.dumps(event) for event in (start, window, other)]
    (tmp_path / "timeline-3.jsonl").write_text("\n".join([*texts, texts[2][:30]]))
    found = read(str(tmp_path))
    (ranks,) = found.ranks
    assert (ranks.rank, ranks.host, [*ranks.seconds]) == (3, "algo-2", ["step", "loss"])
    assert ranks.device_uuid == "stand-in-0"
    assert ranks.extra["cpu_seconds"].tolist() == [1.5, 1.5] and np.isnan(ranks.seconds["loss"]).tolist() == [
        True,
        False,
    ]
    assert found.unreadable == ("timeline-3.jsonl: 1 of 4 lines",)
    assert "could not be read: timeline-3.jsonl: 1 of 4 lines" in str(Diagnosis(found)) + Diagnosis(found)._repr_html_()
    assert "no files of system metrics" in found.not_measured["system"]


def test_of_several_trainings_the_longest_is_read_of_all_ranks_and_a_line_says_so(tmp_path):
    """The second of three, after a crash; the third has begun on one rank only."""
    for attempt, steps in ((0, 5), (1, 40), (2, 11)):
        for rank in range(2 if attempt < 2 else 1):
            start = {
                "kind": "start",
                "rank": rank,
                "node": "algo-1",
                "settings": {},
                "not_measured": {},
                "world_size": 2,
            }
            start |= dict.fromkeys(("backend", "device", "device_name", "instance_type", "torch", "threads"))
            window = {"kind": "steps", "epoch": 1, "ended": 60.0 * attempt + 9, "extra": {"steps": 5}}
            window["seconds"] = {"step": 0.1 * (attempt + 1)}
            lines = [start, *({**window, "step": step} for step in range(5, steps + 1, 5))]
            lines.append({"kind": "evaluate", "step": steps, "began": 60.0 * attempt, "seconds": 1.0})
            name = f"timeline-{rank}.{attempt}.jsonl" if attempt else f"timeline-{rank}.jsonl"
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "ste')
    found = read(str(tmp_path))
    assert [ranks.step.tolist() for ranks in found.ranks] == 2 * [[*range(5, 41, 5)]]
    assert {float(seconds) for ranks in found.ranks for seconds in ranks.seconds["step"]} == {0.2}
    assert {stall.began for stall in found.stalls} == {60.0}
    said = "3 trainings were recorded: this is number 2, the longest (40 steps)"
    assert found.sampled == said and f"\n  {said}\n" in str(Diagnosis(found))
    assert said in Diagnosis(found).save_html(tmp_path / "why.html").read_text()
    for file in tmp_path.glob("timeline-*.[12].jsonl"):
        file.unlink()
    assert read(str(tmp_path)).sampled is None


def test_of_a_long_record_neighbours_are_read_and_the_same_of_every_rank(tmp_path):
    """Each second window of this run is an epoch's first: one in two or four would be these alone, or none of them."""
    for rank in range(2):
        start = {"kind": "start", "rank": rank, "node": "algo-1", "settings": {}, "not_measured": {}, "world_size": 2}
        start |= dict.fromkeys(("backend", "device", "device_name", "instance_type", "torch", "threads"))
        lines = [json.dumps(start)]
        for number in range(1000):
            first = number % 2 == 0
            seconds = {"step": 5.0 if first else 0.1, "data_wait": 4.9 if first else 0.0}
            extra = {"steps": 1 if first else 9}
            step = number // 2 * 10 + (1 if first else 10)
            ended = 60.0 * (number // 2) + (5.0 if first else 6.0)
            values = {"epoch": 1 + number // 2, "step": step, "ended": ended, "seconds": seconds, "extra": extra}
            lines.append(json.dumps({"kind": "steps", **values}))
        (tmp_path / f"timeline-{rank}.jsonl").write_text("\n".join(lines))
    whole = sum(file.stat().st_size for file in tmp_path.iterdir())
    for each in (2, 4):
        found = read(str(tmp_path), max_bytes=4 * (whole // each + 100))
        assert found.sampled == f"steps: one in {each} logged windows of every rank was read, 16 in a row"
        one, other = (ranks.step.tolist() for ranks in found.ranks)
        assert one == other and one[:16] == [1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61, 70, 71, 80]
        assert 0.6 * 1000 / each < len(one) < 1.5 * 1000 / each
        others, later = pauses.after_epoch_firsts(Evidence(found), found.ranks[0])
        assert later == 0 and others.sum() == pytest.approx(len(one) / 2, abs=len(one) / 16)


def test_a_job_hands_its_interval_to_the_script_as_sagemaker_does():
    job = launcher.from_values({"name": "test", "script": "train_kd.py", "profiling": {"system_interval_ms": 1000}})
    plan = launcher.plan(job)
    config = json.loads(host_folders.config_files(plan, Process().hosts(job)[0])["profilerconfig.json"])
    assert config["ProfilingIntervalInMilliseconds"] == 1000 and not config["DisableProfiler"]
    plain = launcher.plan(launcher.from_values({"name": "test", "script": "train_kd.py"}))
    assert "profilerconfig.json" not in host_folders.config_files(plain, Process().hosts(job)[0])


def test_lines_in_one_document_and_line_by_line_say_the_same():
    lines = [b'{"a":1}', b' {"b": "\\n,"} ', b"3"]
    for ending in (b"\n", b"\r\n", b""):
        content = b"\n".join(lines) + ending
        assert system_files._events(content) == [json.loads(line) for line in lines]
    assert system_files._events(b"\n".join([*lines, b"{"])) == [*(json.loads(line) for line in lines), None]
    assert system_files._events(b"") == []


def test_the_code_of_a_watched_command_is_its_repositorys_commit_and_what_was_changed_since(store):
    """It has no source package: a change of its code between two runs is a change all the same."""
    codes = []
    for number, (commit, patch) in enumerate([("a1", b""), ("a1", b"+ x"), ("b2", b""), ("a1", b""), (None, b"")]):
        folder = store / f"watched-{number}"
        folder.mkdir(parents=True)
        (folder / "git.json").write_text(json.dumps({"commit": commit}))
        if patch:
            (folder / "git.patch").write_bytes(patch)
        codes.append(measurements._code(RunFolder(folder)))
    assert codes[0] == codes[3] and len({*codes}) == 4 and codes[4] is None

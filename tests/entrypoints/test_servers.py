"""Hosts that prepare images for those that train, by Ray: the same weights, bit for bit, whatever dies; and no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import torch
from PIL import Image
from training.distributed.stop_flag import StopSignal
from training.models import timm_models
from training.servers import ray_node, serving
from training.servers.cluster import share
from training.servers.groups import Groups, address_of, read_groups
from training.servers.ray_node import RayNode, connected, is_reachable, node
from training.servers.remote import image_servers
from training.settings.scripts import ClassifierSettings

from . import teachers
from .photographs import draw_noise, jpeg
from .ranks import free_port
from .server_runs import kill_servers, served_run
from .shard_channels import indexed, write_shard
from .test_masks import write_pair
from .test_threads import world

SETTINGS = {
    "model": "mobilenetv3_small_050",
    "image_size": 32,
    "global_batch_size": 16,
    "epochs": 2,
    "min_crop_area": 0.4,
    "mixup": 0.2,
    "cutmix": 1.0,
    "worker_type": "remote",
    "log_every": 1,
    "system_monitor": False,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    draw_noise(root, (60, 50), train=64, validation=8)
    return root


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """Weights by settings, of runs that make their images themselves."""
    known = {}

    def weights(**values) -> bytes:
        key = f"{values}"
        if key not in known:
            known[key] = local_weights(tmp_path_factory.mktemp("local"), data, {**SETTINGS, **values})
        return known[key]

    return weights


def local_weights(folder: Path, data: Path, settings: dict, **options) -> bytes:
    """The weights of a run whose training hosts make their images themselves."""
    with served_run(folder, data, {**settings, "worker_type": "threads"}, servers=0, **options) as run:
        assert not any(run.wait(120)), run.log()
        return run.weights()


def contract(monkeypatch, **values):
    for name in [name for name in os.environ if name.startswith("SM_")]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


GROUPED = {
    "SM_HOSTS": '["algo-1", "algo-2", "algo-3"]',
    "SM_INSTANCE_GROUPS_DICT": '{"cpus": {"hosts": ["algo-1"]}, "gpus": {"hosts": ["algo-2", "algo-3"]}}',
    "SM_FRAMEWORK_PARAMS": '{"sagemaker_distribution_instance_groups": ["gpus"]}',
}


@pytest.mark.parametrize(
    ("host", "serves", "is_head"), [("algo-1", True, False), ("algo-2", False, True), ("algo-3", False, False)]
)
def test_a_host_finds_its_part_in_the_contract(monkeypatch, host, serves, is_head):
    contract(monkeypatch, SM_CURRENT_HOST=host, TRAINING_SERVERS_PORT="7001", **GROUPED)
    groups = read_groups()
    assert groups == Groups(host, ("algo-2", "algo-3"), ("algo-1",), 7001)
    assert (groups.serves, groups.is_head) == (serves, is_head)


@pytest.mark.parametrize(
    "params",
    ["{}", '{"sagemaker_distribution_instance_groups": []}', '{"sagemaker_distribution_instance_groups": ["other"]}'],
)
def test_without_a_training_group_every_host_trains(monkeypatch, params):
    contract(monkeypatch, SM_CURRENT_HOST="algo-1", **{**GROUPED, "SM_FRAMEWORK_PARAMS": params})
    assert read_groups() == Groups("algo-1", ("algo-1", "algo-2", "algo-3"), ())


def test_a_plain_shell_is_a_host_that_trains(monkeypatch):
    contract(monkeypatch)
    assert read_groups() == Groups("algo-1", ("algo-1",), ())


def test_ray_gets_an_address_that_it_leaves_alone():
    assert address_of("127.0.0.1") == "127.1.0.1" and address_of("127.0.0.2") == "127.0.0.2"


@pytest.mark.parametrize(
    "ports", [(8265,), pytest.param((8265, 52365, 17000), marks=pytest.mark.slow)], ids=["one", "three at once"]
)
def test_hosts_can_meet_at_any_port(tmp_path, ports):
    """Of Ray's own choices too: its dashboard's, its agent's, and those of its workers."""
    meeting = [Groups("127.0.0.1", ("127.0.0.1",), (), port) for port in ports]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(node(groups, tmp_path / f"{groups.port}.log")) for groups in meeting]
        until = time.monotonic() + 120
        while not all(is_reachable(groups) for groups in meeting):
            for one in nodes:
                one.keep()  # on a loaded host Ray's processes may need longer than Ray allows
            assert time.monotonic() < until, [log.read_text() for log in tmp_path.iterdir()]
            time.sleep(0.1)


def test_a_node_that_does_not_start_is_seen_at_once(tmp_path, capsys, monkeypatch):
    """Ray alone would wait 40 s for it, each of the four times. The first is Ray's own; the others end as it did, and sooner."""
    groups = Groups("127.0.0.1", ("127.0.0.1",), (), free_port())
    own = RayNode(["--no-such-option"], groups, tmp_path / "log")
    own._command = [sys.executable, "-c", "raise SystemExit(2)"]
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray waits"))
    failed = pytest.raises(ConnectionError, match="ended with code 2, started 4 times in a row: see")
    with failed, connected(groups, own, 600, talks=True):
        pass
    assert capsys.readouterr().out.count("ended with code 2: restarting it") == 3


def test_only_ends_of_a_node_in_a_row_are_too_many(tmp_path, monkeypatch):
    """A long job outlives any number of them, if the node lives long between them."""
    groups = Groups("127.0.0.2", ("127.0.0.1",), ("127.0.0.2",), free_port())
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(ray_node, "time", SimpleNamespace(monotonic=lambda: clock.now))
    own = RayNode([], groups, tmp_path / "log")
    own._command = [sys.executable, "-c", "import time; time.sleep(600)"]  # any program that lives

    def end_after(seconds: float) -> None:
        clock.now += seconds
        own.keep()
        os.kill(own.pid, signal.SIGKILL)
        own._process.wait()
        own.keep()

    try:
        for _ in range(6):
            end_after(ray_node.LIVED_SECONDS + 1)
        for _ in range(3):
            end_after(10)
        with pytest.raises(ConnectionError, match="ended with code -9, started 4 times in a row"):
            end_after(10)
    finally:
        own.end()


def test_the_handler_of_sigterm_is_never_rays_and_a_later_one_outlives_the_cluster(monkeypatch):
    """Ranks that wait for rank 0's export have left the cluster: a stop must not kill them."""
    groups = Groups("127.0.0.1", ("127.0.0.1",), (), free_port())
    tries = []

    def fake_init(**_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tries.append(None)
        if len(tries) == 1:
            raise ConnectionError("no node yet")

    monkeypatch.setattr(ray_node, "is_reachable", lambda _: True)
    monkeypatch.setattr(ray_node, "LOOK_SECONDS", 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: len(tries) == 2)
    monkeypatch.setattr(ray, "init", fake_init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with connected(groups, None, 60, talks=True):
            assert signal.getsignal(signal.SIGTERM) is before and len(tries) == 2
            StopSignal(world())
            installed = signal.getsignal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == installed
    finally:
        signal.signal(signal.SIGTERM, before)
    tries.clear()
    with pytest.raises(TimeoutError, match="no node yet"), connected(groups, None, -1, talks=True):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("servers", "size"), [(3, 8), (32, 1), (200, 2), (512, 128), (2048, 1024), (33, 1), (0, 4)])
def test_many_servers_are_shared_out_so_that_each_has_its_processes(servers, size):
    names = [f"images/10.0.0.{number}/0/4/x" for number in range(servers)]
    shares = [share(names, rank, size) for rank in range(size)]
    assert {name for one in shares for name in one} == {*names}
    assert all(len({*one}) == len(one) == min(servers, max(32, -(-servers // size))) for one in shares)
    load = Counter(name for one in shares for name in one)
    assert not load or max(load.values()) <= 2 * -(-size * len(shares[0]) // servers)


def test_without_a_host_that_serves_the_run_says_what_to_write(monkeypatch):
    contract(monkeypatch)
    settings = ClassifierSettings(model="resnet18", worker_type="remote")
    with (
        pytest.raises(ValueError, match="a second group in compute.instance_groups"),
        image_servers(settings, None, world()),
    ):
        pass


@pytest.mark.slow
@pytest.mark.alone  # on full cores the host that serves does not join within the 30 s after which this one makes the images
def test_a_run_whose_images_another_host_prepares_ends_with_the_same_weights(data, undisturbed, tmp_path):
    with served_run(tmp_path, data, SETTINGS, servers=1) as run:
        assert run.wait(180) == [0, 0], run.log() + run.log(1)
        assert run.weights() == undisturbed()
        assert "training images come from other hosts" in run.log() and "rank 0:" not in run.log()
        assert run.log(1).endswith(
            "127.0.0.2 prepares images for 127.0.0.1\nthe training hosts have ended; their servers stop too\n"
        )
        for _ in range(300):  # Ray's own processes end by themselves, later where cores are full
            if not run.left():
                break
            time.sleep(0.2)
        assert run.left() == []


def test_who_reads_that_a_serving_host_is_there_may_stop_it(tmp_path, monkeypatch):
    groups = Groups("127.0.0.2", ("127.0.0.1",), ("127.0.0.2",), 1)
    environment = SimpleNamespace(failure_file=tmp_path / "failure", output_data_dir=tmp_path)
    lines: list[tuple[str, bool]] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def stopped(*_) -> None:
        raise serving._Stopped

    monkeypatch.setattr(serving, "read_environment", lambda: environment)
    monkeypatch.setattr(serving, "read_groups", lambda: groups)
    monkeypatch.setattr(serving, "wait_for_head", stopped)
    monkeypatch.setattr(
        serving, "write_line", lambda line: lines.append((line, signal.getsignal(signal.SIGTERM) is serving._stop))
    )
    try:
        serving.serve(ClassifierSettings(**SETTINGS))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert lines[0] == ("127.0.0.2 prepares images for 127.0.0.1", True) and len(lines) == 2


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ([(10, True), (12, False), (9, True), (100, False)], 52),
        ([(10, True), (18, False), (50, True), (2, False), (5, True), (100, False)], 89),
    ],
    ids=["started again, and ended soon", "started again, and ended later"],
)
def test_a_serving_host_stays_while_the_heads_node_is_started_again(tmp_path, monkeypatch, answers, seconds):
    """Its port refuses while Ray is imported; once it has started for good, a refusal means that it has ended."""
    clock = SimpleNamespace(now=0.0)
    reachable = [answer for count, answer in answers for _ in range(count)]

    def sleep(passed: float) -> None:
        clock.now += passed

    @contextlib.contextmanager
    def own_node(*_):
        yield SimpleNamespace(has_ended=lambda: False, keep=lambda: None)

    groups = Groups("127.0.0.2", ("127.0.0.1",), ("127.0.0.2",), 1)
    environment = SimpleNamespace(failure_file=tmp_path / "failure", output_data_dir=tmp_path)
    monkeypatch.setattr(serving, "read_environment", lambda: environment)
    monkeypatch.setattr(serving, "read_groups", lambda: groups)
    monkeypatch.setattr(serving, "wait_for_head", lambda *_: None)
    monkeypatch.setattr(serving, "is_reachable", lambda _: reachable[int(clock.now)])
    monkeypatch.setattr(serving, "node", own_node)
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    before = signal.getsignal(signal.SIGTERM)
    try:
        serving.serve(ClassifierSettings(**SETTINGS))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert clock.now == pytest.approx(seconds, abs=2)


def test_a_serving_host_that_is_stopped_before_training_hosts_are_there_ends_at_once(data, tmp_path):
    with served_run(tmp_path, data, SETTINGS, servers=1) as run:
        run.processes[0].kill()  # as it imports torch
        while "prepares images for" not in run.log(1):
            time.sleep(0.05)
            assert run.processes[1].poll() is None, run.log(1)
        run.processes[1].send_signal(signal.SIGTERM)
        assert run.processes[1].wait(60) == 0, run.log(1)
        assert run.log(1).endswith("stopped on SIGTERM before the training hosts were up\n")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_whatever_happens_to_servers_the_weights_are_the_same(data, undisturbed, tmp_path):
    """They are killed at random moments; the run is stopped, and resumed with another number of servers; then their only host is lost."""
    longer = {"epochs": 20}
    waiting = {"without_servers": "fail"}  # for the first server: on a busy machine Ray's nodes may have to start again
    with served_run(tmp_path, data, {**SETTINGS, **longer, **waiting}, servers=2) as run:
        assert kill_servers(run, 4, (0.3, 1.0)) == 4 and "; retrying in" in run.log(), run.log()
        assert "Address already in use" not in run.log(), "hosts that start at once take each other's sockets"
        for process in run.processes:  # as SageMaker stops a job: every host at once
            process.send_signal(signal.SIGTERM)
        assert run.wait(120) == [0, 0, 0], run.log() + run.log(1) + run.log(2)
        assert "on SIGTERM" in run.log()
    with served_run(tmp_path, data, {**SETTINGS, **longer}, servers=1) as run:
        while " step " not in run.log().partition("resuming from the checkpoint")[2]:
            time.sleep(0.05)
            assert run.processes[0].poll() is None, run.log()
        for process in run.left():
            with contextlib.suppress(psutil.Error):  # it ended with another
                if process.environ().get("SM_CURRENT_HOST") == "127.0.0.2":
                    process.kill()
        assert run.processes[0].wait(240) == 0, run.log()
        assert "this process makes images itself until a server is back" in run.log()
        assert run.weights() == undisturbed(**longer)


def shards_and_a_teacher(root: Path) -> None:
    """Channels of three classes in shards, and a teacher of these."""
    classes = [f"class {label}" for label in range(3)]
    for part, count in (("train", 4), ("validation", 1)):
        for shard in range(count):
            members = {}
            for number in range(24):
                image = Image.effect_noise((24, 20), 30 + 40 * (number % 3))
                members |= {f"{shard}-{number:02}.jpg": jpeg(image), f"{shard}-{number:02}.cls": b"%d" % (number % 3)}
            write_shard(root / part / f"part-{shard}.tar", members)
        (root / part / "classes.txt").write_text("\n".join(classes))
        indexed(root / part)
    torch.manual_seed(1)
    teachers.save(timm_models.build(teachers.NAME, teachers.OPTIONS, 3), root / "teacher", classes=classes)


def images_and_masks(root: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 48), ("validation", 8)):
        for number in range(count):
            write_pair(root / part, f"{number}", rng.integers(0, 3, (5, 6), np.uint8).repeat(9, 0).repeat(8, 1), ".jpg")


WHOLE = {
    "train_kd.py": (
        shards_and_a_teacher,
        2,
        {
            "student": teachers.NAME,
            "student_options": teachers.OPTIONS,
            "image_size": 16,
            "epochs": 3,
            "teacher_cache": {"views": 2, "top_k": 2},
            "min_crop_area": 0.4,
            "mixup": 0.2,
            "cutmix": 1.0,
            "shuffle_window_shards": 2,
        },
    ),
    "train_segmentation.py": (
        images_and_masks,
        1,
        {"model": "resnet10t", "classes": 3, "image_size": [32, 32], "epochs": 2, "min_scale": 0.5, "overlays": 0},
    ),
}
"""Script -> its channels, how many hosts train, and its settings."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("script", WHOLE)
def test_every_script_ends_with_the_weights_of_a_run_without_servers(script, tmp_path):
    """Distillation from shards with a teacher cache, on two hosts that share a server; segmentation from folders."""
    channels, trainers, values = WHOLE[script]
    channels(tmp_path / "channels")
    common = {"global_batch_size": 16, "horizontal_flip": True, "log_every": 1, "system_monitor": False}
    settings, options = {**common, **values, "worker_type": "remote"}, {"trainers": trainers, "script": script}
    with served_run(tmp_path / "remote", tmp_path / "channels", settings, servers=1, **options) as run:
        assert not any(run.wait(240)), "".join(map(run.log, range(trainers + 1)))
        assert not any(f"rank {rank}:" in run.log(rank) for rank in range(trainers)), "no server failed"
        weights = run.weights()
    assert weights == local_weights(tmp_path / "local", tmp_path / "channels", settings, **options)

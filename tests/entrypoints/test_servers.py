"""Hosts that prepare images for those that train, by Ray: the same weights, bit for bit, whatever dies; and no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
from PIL import Image
from training.servers.cluster import share
from training.servers.groups import Groups, address_of, read_groups
from training.servers.remote import image_servers
from training.settings.scripts import ClassifierSettings

from .photographs import jpeg
from .server_runs import kill_servers, served_run
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
    for part, images in (("train", 64), ("validation", 8)):
        for label in range(2):
            (root / part / f"class-{label}").mkdir(parents=True)
            for number in range(images):
                image = Image.effect_noise((60, 50), 30 + 40 * label).convert("RGB")
                (root / part / f"class-{label}" / f"{number}.jpg").write_bytes(jpeg(image))
    return root


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """Weights by settings, of runs that make their images themselves."""
    known = {}

    def weights(trainers: int = 1, **values) -> bytes:
        key = f"{trainers} {values}"
        if key not in known:
            settings = {**SETTINGS, "worker_type": "threads", **values}
            with served_run(tmp_path_factory.mktemp("local"), data, settings, servers=0, trainers=trainers) as run:
                assert run.wait(120) == [0] * trainers, run.log()
                known[key] = run.weights()
        return known[key]

    return weights


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


def test_a_run_whose_images_another_host_prepares_ends_with_the_same_weights(data, undisturbed, tmp_path):
    with served_run(tmp_path, data, SETTINGS, servers=1) as run:
        assert run.wait(180) == [0, 0], run.log() + run.log(1)
        assert run.weights() == undisturbed()
        assert "training images come from other hosts" in run.log() and "rank 0:" not in run.log()
        assert run.log(1).endswith(
            "127.0.0.2 prepares images for 127.0.0.1\nthe training hosts have ended, and so do their servers\n"
        )
        for _ in range(50):
            if not run.left():
                break
            time.sleep(0.2)
        assert [process.cmdline() for process in run.left()] == []


@pytest.mark.slow
def test_servers_killed_at_random_moments_change_nothing(data, undisturbed, tmp_path):
    longer = {"epochs": 20}
    with served_run(tmp_path, data, {**SETTINGS, **longer}, servers=2) as run:
        killed = kill_servers(run, 10, (0.3, 1.0))
        assert run.wait(240) == [0, 0, 0], run.log()
        assert killed >= 3 and run.weights() == undisturbed(**longer)
        assert "it is asked again in" in run.log()


@pytest.mark.slow
def test_two_hosts_that_train_share_a_server_and_end_with_the_weights_of_two_without(data, undisturbed, tmp_path):
    with served_run(tmp_path, data, SETTINGS, servers=1, trainers=2) as run:
        assert run.wait(240) == [0, 0, 0], run.log() + run.log(1) + run.log(2)
        assert run.weights() == undisturbed(2)
        assert "rank 0:" not in run.log() and "rank 1:" not in run.log(1)


@pytest.mark.slow
def test_a_run_goes_on_alone_where_every_serving_host_is_gone(data, undisturbed, tmp_path):
    longer = {"epochs": 20}
    with served_run(tmp_path, data, {**SETTINGS, **longer}, servers=1) as run:
        while not run.trained():
            time.sleep(0.2)
            assert run.processes[0].poll() is None, run.log()
        for process in [one for one in run.left() if one.environ().get("SM_CURRENT_HOST") == "127.0.0.2"]:
            process.kill()
        assert run.processes[0].wait(240) == 0, run.log()
        assert run.weights() == undisturbed(**longer)
        assert "this process makes them itself until one is back" in run.log()


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_other_numbers_of_servers(data, undisturbed, tmp_path):
    longer = {"epochs": 20}
    with served_run(tmp_path, data, {**SETTINGS, **longer}, servers=1) as run:
        while " step 24/" not in run.log():
            time.sleep(0.05)
            assert run.processes[0].poll() is None, run.log()
        for process in run.processes:  # as SageMaker stops a job: every host at once
            process.send_signal(signal.SIGTERM)
        assert run.wait(120) == [0, 0], run.log() + run.log(1)
        assert "on SIGTERM" in run.log()
    with served_run(tmp_path, data, {**SETTINGS, **longer}, servers=2) as run:
        assert run.wait(240) == [0, 0, 0], run.log()
        assert "resuming from the checkpoint" in run.log() and run.weights() == undisturbed(**longer)

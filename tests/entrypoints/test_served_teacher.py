"""A teacher on the hosts that make the images: the logits that the training process would compute itself, whatever servers do."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
import torch
from training.data.batches import TaughtBatch
from training.models import export, timm_models
from training.servers import back_off
from training.servers import pool as pool_module
from training.servers.pool import NoServers
from training.servers.stream import Stream
from training.teacher import frozen, served
from training.teacher.cache import TeacherCache
from training.teacher.logit_records import record_layout
from training.teacher.served import RemoteTeacher, ServerTeacher

from .photographs import draw_noise
from .ranks import run_ranks
from .server_runs import kill_servers, served_run
from .teacher_caches import ALONE, PARTS, no_teacher
from .test_server_pool import BATCH, CPU, IMAGES, Threads, channels, data, draws, local, other_images, pool, quick

__all__ = ["channels", "quick"]

LAYOUT = record_layout(3, 2, "fp16")


class Tiny(frozen.Teacher):
    """Logits of three classes from the means of the colours; each seed has its own."""

    def __init__(self, seed: int = 1, scale: float = 1.0):
        super().__init__([])
        self.seed = seed
        self.weights = scale * torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)) / 32
        self.name = "tiny"

    def __call__(self, images):
        return images.float().mean((2, 3)) @ self.weights

    def digest(self):
        return f"weights {self.seed}"


def opener(teacher: Tiny):
    return lambda index: ServerTeacher(teacher, CPU, LAYOUT)


def taught_servers(channels, count: int = 2, teacher: Tiny | None = None) -> Threads:
    found = data(channels)
    return Threads(found.training, found.collate_training, count, opener(teacher or Tiny()))


def meet(servers: Threads, said: list[str], wait_seconds: float = 20.0, hosts: int = 1) -> RemoteTeacher:
    return served.meet(servers, LAYOUT, ALONE, wait_seconds, said.append, hosts=hosts)


def taught(batches: list, teacher: Tiny) -> list[TaughtBatch]:
    """What servers are to make of a training process's own batches, in parts of theirs."""
    made = []
    for batch in batches:
        logits = torch.cat([teacher(part) for part in batch.images.split(16)])
        made.append(TaughtBatch(*batch, torch.from_numpy(LAYOUT.encode(LAYOUT.pack(logits).numpy()))))
    return made


def assert_same(one: list, other: list) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other):
        assert type(left) is type(right)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(served, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(back_off, "BACK_OFF", 0.1)
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 1.0)


def test_what_travels_is_what_the_teacher_cache_would_keep(channels, tmp_path):
    found, teacher = data(channels), Tiny()
    servers = taught_servers(channels, teacher=teacher)
    [*batches] = Stream(pool(servers, found, [], teacher=meet(servers, [])), draws())
    cache = TeacherCache.open(tmp_path, parts=PARTS, images=IMAGES, layout=LAYOUT, views=1, world=ALONE)
    cache.begin_epoch([1], np.arange(IMAGES))
    kept = [cache.answers(batch, teacher) for batch in batches]
    cache.close()
    assert cache.begin_epoch([1], np.arange(IMAGES))
    for batch, computed in zip(batches, kept):
        sent = LAYOUT.decode(batch.records.numpy(), CPU)
        assert torch.equal(sent, cache.answers(batch, no_teacher)) and torch.allclose(sent, computed)
        assert batch.records.shape == (BATCH, 16)


def test_batches_come_with_the_logits_also_where_servers_die(channels, quick):
    found, said, teacher = data(channels), [], Tiny()
    servers = taught_servers(channels, 3, teacher)
    asked = pool(servers, found, said, teacher=meet(servers, said))
    servers.slow = dict.fromkeys(servers.names(), 0.05)
    made = []
    for number, batch in enumerate(Stream(asked, draws(epochs=3))):
        made.append(batch)
        if number == 2:
            servers.dead = {*[*servers.names()][:2]}
    assert_same(made, taught(local(found, draws(epochs=3)), teacher))
    assert asked.counts.failures >= 2 and 0 < asked.counts.teacher_seconds <= asked.counts.server_seconds


def test_an_image_that_only_a_server_cannot_read_gets_its_logits_from_servers_too(
    channels, tmp_path, monkeypatch, quick
):
    other = other_images(channels, tmp_path)
    (other / "train/class-1/05.jpg").write_bytes(b"no image")
    monkeypatch.setenv("SM_CHANNEL_TRAIN", str(other / "train"))
    found, said, teacher = data(channels), [], Tiny()
    servers = Threads(*found.elsewhere(), teacher=opener(teacher))
    asked = pool(servers, found, said, teacher=meet(servers, said))
    assert_same([*Stream(asked, draws(epochs=3))], taught(local(found, draws(epochs=3)), teacher))
    assert asked.counts.alone > 0 and asked.counts.images > 0


def test_a_server_with_another_teacher_is_refused_and_not_asked_for_logits(channels, quick):
    found, said, teacher = data(channels), [], Tiny()
    servers, others = taught_servers(channels, 2, teacher), taught_servers(channels, 2, Tiny(seed=2))
    first, second = servers.names()
    remote = meet(servers, said)
    servers.servers[second] = others.servers[second]
    servers.slow = {first: 0.05}  # so that the other one is asked before all is made
    images = next(iter(local(found, draws()))).images.repeat(4, 1, 1, 1)
    assert torch.equal(remote(images), torch.cat([teacher(part) for part in images.split(16)]))
    made = [*Stream(pool(servers, found, said, teacher=remote), draws(epochs=2))]
    assert_same(made, taught(local(found, draws(epochs=2)), teacher))
    why = "its teacher differs from that of the first server found"
    assert f"server 0 on host-1 is not used: {why}" in said
    assert f"no teacher logits from a server on host-1: {why}" in said


RANKS = """
    from tests.entrypoints.test_served_teacher import LAYOUT, Threads, Tiny, opener, served
    class Images:
        def __len__(self): return 4
        def listing(self): return "four images"
    with process_group() as world:
        servers = Threads(Images(), None, 1, opener(Tiny(seed=1 + world.rank)))
        print(served.meet(servers, LAYOUT, world, 30.0, print, hosts=1).about().digest)
"""


def test_all_training_processes_take_the_teacher_of_the_server_that_the_first_one_met(tmp_path):
    assert [rank.stdout.strip() for rank in run_ranks(tmp_path, RANKS)] == ["weights 1", "weights 1"]


def test_logits_for_the_training_processs_own_images_come_from_servers_that_are_there(channels):
    said, teacher = [], Tiny()
    servers = taught_servers(channels, 3, teacher)
    remote = meet(servers, said)
    first, second, _ = servers.names()
    servers.dead, servers.silent = {first}, {second}
    images = torch.randint(0, 256, (200, 3, 24, 24), dtype=torch.uint8)
    expected = torch.cat([teacher(part) for part in images.split(16)])
    assert torch.equal(remote(images), expected) and remote(images[:5]).shape == (5, 3)
    assert (remote.name, remote.parameters) == ("tiny", 0)
    assert {line.split(": ")[1] for line in said} == {"it is dead", "no answer for 1 s"}


def test_a_server_that_answers_slowly_is_not_taken_for_a_silent_one(channels, monkeypatch):
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 3.0)
    said = []
    servers = taught_servers(channels, 1)
    remote = meet(servers, said)
    servers.slow = dict.fromkeys(servers.names(), 1.5)
    assert len(remote(torch.zeros(96, 3, 8, 8, dtype=torch.uint8))) == 96 and not said  # the third waits for 4.5 s


def test_without_any_server_logits_are_waited_for_and_then_the_run_fails(channels):
    servers = taught_servers(channels, 1)
    remote = meet(servers, [], 4.0)
    servers.dead = {*servers.names()}
    started = time.monotonic()
    with pytest.raises(NoServers, match="has given the teacher's logits for 2 s: host-0: it is dead"):
        remote(torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    assert time.monotonic() - started >= 2
    with pytest.raises(NoServers, match="no server has opened the teacher for 0 s: host-0: it is dead"):
        meet(servers, [], 0.5)


def test_logits_that_are_late_are_asked_of_another_server(channels, monkeypatch):
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 60.0)
    monkeypatch.setattr(served, "MIN_LATE", 0.2)
    said, teacher = [], Tiny()
    servers = taught_servers(channels, 2, teacher)
    remote = meet(servers, said)
    images = torch.randint(0, 256, (64, 3, 24, 24), dtype=torch.uint8)
    expected = torch.cat([teacher(part) for part in images.split(16)])
    assert torch.equal(remote(images), expected)
    servers.silent = {[*servers.names()][1]}
    started = time.monotonic()
    assert torch.equal(remote(images), expected) and time.monotonic() - started < 30 and not said


def test_who_gets_the_first_part_changes(channels, monkeypatch):
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 60.0)
    servers = taught_servers(channels, 3)
    remote = meet(servers, [])
    asked, teach = [], servers.teach
    servers.teach = lambda server, images: asked.append(server) or teach(server, images)
    for _ in range(30):
        remote(torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    assert {*asked} == {*servers.names()} and len(asked) == 30


def test_one_host_with_a_damaged_teacher_is_left_out(channels):
    def damaged(index):
        raise ValueError("damaged weights")

    found, said = data(channels), []
    servers = taught_servers(channels, 2)
    first, _ = servers.names()
    servers.servers[first] = Threads(found.training, found.collate_training, 1, damaged).servers[first]
    remote = meet(servers, said, hosts=2)
    assert remote(torch.zeros(40, 3, 8, 8, dtype=torch.uint8)).shape == (40, 3)
    assert all("damaged weights" in line for line in said)
    servers.servers = dict.fromkeys(servers.names(), servers.servers[first])
    with pytest.raises(ValueError, match="the teacher on host-[01]: .*damaged weights"):
        meet(servers, said, 60.0, hosts=2)


def test_a_teacher_that_cannot_be_one_ends_the_run_at_once_with_its_reason(channels):
    def wrong(index):
        raise ValueError("the teacher knows the classes a, b, the training images have c, d")

    found = data(channels)
    servers = Threads(found.training, found.collate_training, 1, wrong)
    with pytest.raises(ValueError, match="the teacher on host-0: .*the teacher knows the classes a, b"):
        meet(servers, [], 60.0)


def test_logits_beyond_what_can_be_sent_are_found_before_the_first_step(channels):
    remote = meet(taught_servers(channels, 2, Tiny(scale=1e6)), [])
    with pytest.raises(ValueError, match="the precision of teacher_cache or teacher_servers to fp32"):
        remote(torch.full((4, 3, 8, 8), 200, dtype=torch.uint8))  # held-out images


# --- whole runs, by Ray

STUDENT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
SETTINGS = {
    "student": "vit_tiny_patch16_224",
    "student_options": STUDENT,
    "image_size": 32,
    "global_batch_size": 16,
    "epochs": 12,
    "min_crop_area": 0.4,
    "mixup": 0.2,
    "log_every": 1,
    "evaluate_every": 6,
    "min_teacher_accuracy": 0.4,
    "system_monitor": False,
}
SERVED = {"worker_type": "remote", "without_servers": "fail", "teacher_servers": {"top_k": None, "precision": "fp32"}}


@pytest.fixture(scope="module")
def with_teacher(tmp_path_factory):
    """Two classes of images, and a teacher of theirs."""
    root = tmp_path_factory.mktemp("taught")
    draw_noise(root, (40, 36), train=64, validation=8)
    torch.manual_seed(5)
    options = {**STUDENT, "embed_dim": 48, "depth": 2}
    model = timm_models.build("vit_tiny_patch16_224", options, 2)
    described = {"options": options, "classes": ["class-0", "class-1"], "image_size": 32}
    export.save(model, root / "teacher", name="vit_tiny_patch16_224", **described)
    return root


@pytest.fixture(scope="module")
def in_place(with_teacher, tmp_path_factory):
    """Weights of the student whose training process runs the teacher."""
    settings = {**SETTINGS, "worker_type": "threads"}
    with served_run(tmp_path_factory.mktemp("local"), with_teacher, settings, servers=0, script="train_kd.py") as run:
        assert run.wait(120) == [0], run.log()
        return run.weights()


@pytest.mark.slow
def test_a_student_of_servers_that_are_killed_has_the_weights_of_one_beside_its_teacher(
    with_teacher, in_place, tmp_path
):
    """All logits travel, in fp32; a batch is one part, so that the teacher sees the same sixteen images."""
    with served_run(tmp_path, with_teacher, {**SETTINGS, **SERVED}, servers=1, script="train_kd.py") as run:
        killed = kill_servers(run, 1, (0.1, 0.3))
        assert run.wait(240) == [0, 0], run.log() + run.log(1)
        assert killed == 1 and run.weights() == in_place
        assert "teacher vit_tiny_patch16_224: " in run.log() and "; retrying in" in run.log()


@pytest.mark.slow
def test_a_teacher_that_does_not_fit_ends_the_run_on_every_host(with_teacher, tmp_path):
    other = tmp_path / "other"
    for part in ("train", "validation"):
        shutil.copytree(with_teacher / part, other / part)
        (other / part / "class-1").rename(other / part / "class-2")
    (other / "teacher").symlink_to(with_teacher / "teacher")
    with served_run(tmp_path / "run", other, {**SETTINGS, **SERVED}, servers=1, script="train_kd.py") as run:
        assert run.wait(240) == [1, 0], run.log() + run.log(1)
        assert "the teacher knows the classes class-0, class-1, the training images have class-0, class-2" in run.log()


@pytest.mark.slow
def test_a_probe_measures_the_servers_and_their_teacher_as_they_are(with_teacher, tmp_path):
    settings = {**SETTINGS, **SERVED, "probe_seconds": 150}  # Ray takes its time on a busy machine
    with served_run(tmp_path, with_teacher, settings, servers=1, script="train_kd.py") as run:
        assert run.wait(240) == [0, 0], run.log() + run.log(1)
        found = json.loads((tmp_path / "127.0.0.1/output/data/127.0.0.1/probe.json").read_text())
        assert found["finished"] and (found["worker_kind"], found["with_workers"]) == ("remote", None)
        [alone] = found["input_alone"]
        assert alone["workers"] == 0 and min(*found["as_it_is"], found["one_batch"], alone["images_per_second"]) > 0
        assert found["phases"]["teacher_forward"] > 0, "the student learns from the teacher"


@pytest.mark.parametrize(
    ("processes", "wait", "seconds"), [(1, 300.0, 60.0), (64, 300.0, 75.0), (64, 6000.0, 480.0), (64, 60.0, 60.0)]
)
def test_a_silent_server_leaves_time_to_ask_others(monkeypatch, processes, wait, seconds):
    """Before the process gives up, however many ask."""
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 60.0)
    teacher = RemoteTeacher(None, None, None, wait, processes, print)
    assert teacher._lost_seconds == seconds

"""Servers that die, fall silent, come back, or have other images: the training process still gets the batches it would make itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from training.data.decode.decoding import BrokenImage
from training.servers import pool as pool_module
from training.servers.actor import Opened, ServerFailed
from training.servers.pool import NoServers
from training.servers.proof import PROOF, Proof
from training.servers.stream import Stream

from tests.conftest import wait_until

from .test_server_pool import IMAGES, Threads, assert_same, channels, data, draws, local, other_images, pool, quick

__all__ = ["channels", "quick"]


def test_a_server_that_dies_costs_no_image(channels, quick):
    found, said = data(channels), []
    servers = Threads(data(channels).training, found.collate_training, 3)
    servers.slow = dict.fromkeys(servers.names(), 0.05)
    asked = pool(servers, found, said)
    made = []
    for number, batch in enumerate(Stream(asked, draws(epochs=3))):
        made.append(batch)
        if number == 2:
            servers.dead = {*[*servers.names()][:2]}  # all but one
    assert_same(made, local(found, draws(epochs=3)))
    assert asked.counts.failures >= 2 and asked.counts.alone == 0
    assert any("failed: it d" in line for line in said)


@pytest.mark.parametrize("when", ["proving", "serving"])
def test_a_server_may_fail_at_all_that_it_was_asked_at_once(channels, quick, monkeypatch, when):
    found, said = data(channels), []
    servers = Threads(data(channels).training, found.collate_training, 2)
    monkeypatch.setattr(pool_module, "LOST_SECONDS", 30.0)
    first, second = servers.names()
    servers.slow = {second: 0.1}
    servers.silent, lost = {first} if when == "proving" else set(), []
    ticket = servers._ticket

    def remembering(server, work):
        made = ticket(server, work)
        lost.extend([made] * (server in servers.silent))
        return made

    monkeypatch.setattr(servers, "_ticket", remembering)
    made = []
    for number, batch in enumerate(Stream(pool(servers, found, said), draws(epochs=3))):
        made.append(batch)
        if number == 1:
            servers.silent = {first}
        if number == 3:
            wait_until(lambda: len(lost) >= (1 if when == "proving" else 2), 30)  # another thread asks
            for one in lost:
                one.set_exception(ServerFailed("it died"))
            servers.silent = set()
    assert_same(made, local(found, draws(epochs=3)))
    assert [line for line in said if "host-0 failed: it died" in line]


def test_a_server_that_is_back_is_asked_again(channels, quick):
    found, said = data(channels), []
    servers = Threads(data(channels).training, found.collate_training, 1)
    servers.slow = dict.fromkeys(servers.names(), 0.02)
    made = []
    for number, batch in enumerate(Stream(pool(servers, found, said), draws(epochs=3))):
        made.append(batch)
        if number == 1:
            servers.dead = {*servers.names()}
            threading.Timer(0.5, servers.dead.clear).start()
    assert_same(made, local(found, draws(epochs=3)))
    assert said[-1] == "server 0 on host-0 is back"


def test_what_a_silent_server_was_asked_for_another_one_makes(channels, quick):
    found, said = data(channels), []
    servers = Threads(data(channels).training, found.collate_training)
    asked = pool(servers, found, said)
    made = []
    for number, batch in enumerate(Stream(asked, draws(epochs=3))):
        made.append(batch)
        if number == 1:
            servers.silent = {next(iter(servers.names()))}
    assert_same(made, local(found, draws(epochs=3)))
    assert asked.counts.late > 0


def test_with_no_server_left_the_process_goes_on_alone_until_one_is_back(channels, quick):
    found, said = data(channels), []
    servers = Threads(data(channels).training, found.collate_training)
    servers.dead = {*servers.names()}
    asked = pool(servers, found, said, patience=0.3)
    made = []
    for number, batch in enumerate(Stream(asked, draws(epochs=30))):
        made.append(batch)
        time.sleep(0 if asked.counts.images else 0.05)
        if number == 4:
            servers.dead.clear()
    assert_same(made, local(found, draws(epochs=30)))
    assert asked.counts.alone > 0 and asked.counts.images > 0
    assert any("this process makes images itself until a server is back" in line for line in said)


def test_with_no_server_left_the_run_fails_where_it_is_to_fail(channels, quick):
    found = data(channels)
    servers = Threads(data(channels).training, found.collate_training)
    servers.dead = {*servers.names()}
    with pytest.raises(
        NoServers, match=r"no server has made an image for 0 s \(host-0, host-1\), and without_servers is fail"
    ):
        next(iter(Stream(pool(servers, found, [], go_on=False, patience=0.3, first_patience=0.3), draws())))


def test_a_server_that_failed_proves_itself_anew_between_the_rare_looks_of_many_processes(channels, quick, monkeypatch):
    found, looks = data(channels), []
    servers = Threads(data(channels).training, found.collate_training)
    names = servers.names
    monkeypatch.setattr(servers, "names", lambda: looks.append(True) or names())
    asking = pool(servers, found, said := [], processes=180_000)  # each looks once in an hour
    servers.dead = {"images/host-0/0/1/x"}
    asking.look()
    servers.dead.clear()
    deadline = time.monotonic() + 30
    while len(asking.live) < 2 and time.monotonic() < deadline:
        asking.look()
        asking.receive(0.05)
    assert said == ["server 0 on host-0 failed: it is dead; retrying in 0 s", "server 0 on host-0 is back"]
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda root: (root / "train/class-0/00.jpg").unlink(), "it has 95 training images, this process 96"),
        (lambda root: (root / "train/class-0/00.jpg").rename(root / "train/class-0/zz.jpg"), "other training images, or the same ones in another order"),
    ],
)  # fmt: skip
def test_a_server_with_other_images_is_refused(channels, tmp_path, quick, change, why):
    other = other_images(channels, tmp_path)
    change(other)
    found, said = data(channels), []
    servers = Threads(data(other).training, found.collate_training)
    made = [*Stream(pool(servers, found, said, patience=2), draws())]
    assert_same(made, local(found, draws()))
    assert len([line for line in said if "is not used: it has" in line and why in line]) == 2
    assert not servers.asked, "a server was asked for images before it was known to have the same"


def test_a_server_that_makes_other_pixels_is_refused(channels, quick):
    found, said = data(channels), []
    servers = Threads(data(channels, seed=4).training, found.collate_training, 1)
    right = Threads(data(channels).training, found.collate_training, 2)
    first, name = right.names()
    right.slow = {first: 0.05}  # so that the other one is asked before all is made
    right.servers[name] = servers.servers[next(iter(servers.names()))]
    made = [*Stream(pool(right, found, said), draws(epochs=2))]
    assert_same(made, local(found, draws(epochs=2)))
    assert said == [
        "server 0 on host-1 is not used: it makes different pixels from the same images: its libraries or processor round differently"
    ]
    assert {count for server, count in right.asked if server == name} == {PROOF}


def test_a_broken_image_ends_the_run_with_its_own_error_where_it_is_to(channels, tmp_path, quick):
    other = other_images(channels, tmp_path)
    (other / "train/class-1/05.jpg").write_bytes(b"no image")
    found = data(other, on_broken_image="fail")
    servers = Threads(data(other, on_broken_image="fail").training, found.collate_training)
    with pytest.raises(BrokenImage, match=r"05\.jpg"):
        [*Stream(pool(servers, found, []), draws(epochs=2))]


def test_a_server_that_cannot_read_its_images_stops_nothing(channels, quick):
    found, said = data(channels), []

    class Unreadable:
        def __len__(self):
            return IMAGES

        def listing(self):
            return found.training.listing()

        def __getitem__(self, draw):
            if draw[1] % 7 == 0:
                raise OSError(f"image {draw[1]}: Input/output error")
            return found.training[draw]

    servers = Threads(Unreadable(), found.collate_training, 1)
    asked = pool(servers, found, said)
    made = [*Stream(asked, draws(epochs=2))]
    assert_same(made, local(found, draws(epochs=2)))
    assert asked.counts.alone > 0 and "Input/output error" in said[0]


def test_an_image_that_only_a_server_cannot_read_is_the_one_that_is_trained_on(channels, tmp_path, monkeypatch, quick):
    other = other_images(channels, tmp_path)
    (other / "train/class-1/05.jpg").write_bytes(b"no image")
    monkeypatch.setenv("SM_CHANNEL_TRAIN", str(other / "train"))
    found, said = data(channels), []
    opened, collate = found.elsewhere()
    asked = pool(Threads(opened, collate), found, said)
    assert_same([*Stream(asked, draws(epochs=3))], local(found, draws(epochs=3)))
    assert asked.counts.alone > 0 and asked.counts.images > 0


def test_a_server_is_not_at_fault_for_images_that_are_broken_everywhere(channels, tmp_path, monkeypatch, quick):
    other = other_images(channels, tmp_path)
    monkeypatch.setenv("SM_CHANNEL_TRAIN", str(other / "train"))
    unmixed = {"mixup": 0.0, "cutmix": 0.0}
    found, said = data(other, **unmixed), []
    proven = {index for _, index in Proof(Opened(found.training, found.collate_training), None).draws()}
    for index in {*range(0, IMAGES, 2)} - proven:
        Path(found.training.source.name(index)).write_bytes(b"no image")
    asked = pool(Threads(*found.elsewhere(), 1), found, said, go_on=False, patience=0.3)
    assert_same([*Stream(asked, draws(epochs=3))], local(data(other, **unmixed), draws(epochs=3)))
    assert asked.counts.images == 0 and asked.counts.alone == 3 * IMAGES, "every part holds a broken image"
    assert asked.counts.failures == 0 and said == []


def test_a_server_that_was_put_aside_may_fail_as_often_as_before(channels, quick, monkeypatch):
    monkeypatch.setattr(pool_module, "QUEUED", 0)  # one part at a time
    found = data(channels)

    class Unreadable:
        def __len__(self):
            return IMAGES

        def listing(self):
            return found.training.listing()

        def begin_batch(self, keys):
            if len(keys) > PROOF:
                raise OSError("Input/output error")
            return found.training.begin_batch(keys)

    servers = Threads(Unreadable(), found.collate_training, 1)
    asked = pool(servers, found, [], patience=0.2)
    made = []
    for batch in Stream(asked, draws(epochs=8)):
        made.append(batch)
        time.sleep(0.05)  # it is asked again meanwhile
    assert_same(made, local(found, draws(epochs=8)))
    parts_asked = sum(count > PROOF for _, count in servers.asked)
    assert 2 <= asked.counts.failures <= parts_asked // pool_module.IN_A_ROW

"""`numa_binding`: a process and what it starts stay on the cores next to its GPU, and count those that share them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from training.data import workers
from training.distributed.world import World
from training.runtime import numa

from tests.device.runs import Runs

USABLE = sorted(os.sched_getaffinity(0))

several_cores = pytest.mark.skipif(len(USABLE) < 2, reason="a process with one core cannot be bound to fewer")


@pytest.fixture(autouse=True)
def _unbound_again() -> Iterator[None]:
    yield
    for thread in numa.TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), USABLE)


@pytest.fixture
def next_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which cores are next to the GPUs, one text for each."""

    def say(*lists: str) -> None:
        for number, text in enumerate(lists):
            folder = tmp_path / f"pci/0000:10:{28 + number:02x}.0"
            folder.mkdir(parents=True)
            (folder / "local_cpulist").write_text(f"{text}\n")

    monkeypatch.setattr(numa, "PCI", tmp_path / "pci")
    return say


@several_cores
def test_all_threads_and_what_is_started_later_stay_next_to_the_gpu(gpu, next_to):
    first, *others = USABLE
    next_to(f"{first},1000-1003")
    ended, found = threading.Event(), []
    thread = threading.Thread(target=lambda: (ended.wait(), found.append(os.sched_getaffinity(0))))
    thread.start()
    sharing, said = numa.bind(gpu, 1)
    ended.set()
    thread.join()
    ask = "import os; print(os.sched_getaffinity(0))"
    started = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert os.sched_getaffinity(0) == {first} == found[0] and started == f"{{{first}}}\n" and sharing == 1
    assert said == (
        f"numa_binding: bound to 1 of {1 + len(others)} cores, those next to its GPU; training processes on them: 1"
    )


@several_cores
def test_processes_whose_gpus_are_on_one_node_share_its_cores(gpu, next_to):
    one, other = USABLE[:2]
    next_to(*[str(one)] * 3, *[str(other)] * 5)
    assert numa.bind(gpu, 8)[0] == 3
    os.sched_setaffinity(0, USABLE)
    assert numa.bind(torch.device("gpu", 7), 8)[0] == 5


@pytest.mark.parametrize(
    ("lists", "why"),
    [
        ([], " ([Errno 2] No such file or directory"),
        (["what"], " (invalid literal"),
        (["1000-1003"], f", none of the {len(USABLE)} usable cores are next to the GPU"),
        (["0-4095"], f", all of the {len(USABLE)} usable cores are next to the GPU"),
    ],
)
def test_where_there_is_nothing_to_bind_to_nothing_changes(gpu, next_to, lists, why):
    next_to(*lists)
    sharing, said = numa.bind(gpu, 1)
    assert sharing is None and said.startswith(f"numa_binding: not bound{why}")
    assert os.sched_getaffinity(0) == {*USABLE}


def test_a_torch_that_does_not_tell_where_a_gpu_is_binds_nothing(gpu, next_to, monkeypatch):
    next_to("0")
    monkeypatch.setattr(torch.gpu, "get_device_properties", lambda device: object())
    assert numa.bind(gpu, 1) == (
        None,
        "numa_binding: not bound ('object' object has no attribute 'pci_domain_id')",
    )


@several_cores
def test_a_process_that_may_not_be_bound_goes_on(gpu, next_to, monkeypatch):
    next_to(str(USABLE[0]))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse)
        assert numa.bind(gpu, 1) == (None, "numa_binding: not bound ([Errno 1] Operation not permitted)")


def test_without_a_gpu_there_is_nothing_to_be_next_to():
    assert numa.bind(torch.device("cpu"), 1) == (None, "numa_binding: not bound, there is no GPU")


@pytest.mark.parametrize(
    ("sharing", "quota", "share", "where"),
    [
        (1, None, 2.0, "2 cores for 1 process"),
        (4, None, 0.5, "2 cores for 4 processes"),
        (1, 4.0, 0.5, "4 cores for 8 processes"),
        (1, 16.0, 2.0, "2 cores for 1 process"),
    ],
)
def test_bound_processes_share_their_cores_and_all_a_containers_quota(monkeypatch, sharing, quota, share, where):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(workers, "cgroup_quotas", lambda: [] if quota is None else [quota])
    world = World(0, 8, 0, torch.device("cpu"), "gloo", "a test", sharing_cores=sharing)
    assert workers.cores_per_process(world, {"LOCAL_WORLD_SIZE": "8"}) == (share, where)


@several_cores
def test_a_run_counts_its_workers_by_the_cores_it_is_bound_to(runs: Runs, next_to, capfd, monkeypatch):
    """Two processes on two nodes: this one has its node alone. What begins later is bound too."""
    begun = []
    monkeypatch.setattr("training.data.workers.milliseconds_per_image", lambda *_: 5.0)
    monkeypatch.setattr("training.engine.run.begin_server", lambda *_: begun.append(os.sched_getaffinity(0)))
    monkeypatch.setattr("training.engine.run.processes_on_host", lambda: 2)
    monkeypatch.setattr("training.data.workers.processes_on_host", lambda _: 2)
    next_to(*map(str, USABLE[:2]))
    runs("train_classifier", numa_binding=True, num_workers="auto")
    said = capfd.readouterr().out
    assert f"numa_binding: bound to 1 of {len(USABLE)} cores" in said and "1 core for 1 process" in said
    assert begun == [{USABLE[0]}]

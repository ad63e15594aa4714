"""The observer of a loop on a GPU: its phases by the GPU's events, and no wait for the device that the loop does not have itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launcher_observer import step_clock, torch_hooks
from launcher_observer.created_objects import CreatedObjects
from launcher_observer.setups import Setups
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.device import stand_in

HOOKED = (
    *((torch.utils.data.DataLoader, name) for name in ("__init__", "__iter__")),
    *((torch.Tensor, name) for name in ("to", "cuda")),
    *((torch.optim.Optimizer, "__init__"), (torch.nn.parallel.DistributedDataParallel, "__init__")),
    *((torch, name) for name in ("save", "compile")),
    *((torch.autograd, "backward"), (torch.serialization, "save"), (torch.amp.GradScaler, "step")),
    *((torch.amp.autocast_mode.autocast, "__enter__"), (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__")),
)
"""What the hooks replace."""


@pytest.fixture
def observed(gpu, tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder in which this process is observed, until the test is over."""
    for owner, name in HOOKED:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    torch_hooks.when_imported(tmp_path)
    yield tmp_path
    torch_hooks.end("the test is over")


def trained(device: torch.device, then: int = 0, loads: bool = True) -> tuple[list[stand_in.Synchronisation], float]:
    """Two epochs of a plain loop; what waited for the device in it, and the seconds of what came after it.

    Args:
        then: batches on which the model is used after that; loads: by a loader.
    """
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8)
    model = nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in.observed() as waits:
        for _ in range(2):
            for inputs, targets in loader:
                inputs, targets = inputs.to(device), targets.to(device)
                optimizer.zero_grad()
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
    ended = time.perf_counter()
    model.eval()
    with torch.no_grad():
        for inputs, *_ in loader_of(then) if loads else ((torch.randn(8, 8),) for _ in range(then)):
            model(inputs.to(device))
    return waits, time.perf_counter() - ended


def loader_of(batches: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(8 * batches, 8)), batch_size=8)


def test_a_loop_on_a_gpu_is_timed_by_events_without_a_wait_of_ours(gpu, observed):
    waits, _ = trained(gpu)
    observer = torch_hooks.current()
    with stand_in.no_synchronisation():
        observer.close()
    assert {wait.what for wait in waits} == {"a copy to the device that is not pinned here"}  # the loop's own
    lines = [json.loads(line) for line in (observed / "timeline-0.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["kind"] == "steps"]
    assert sum(window["extra"]["steps"] for window in windows) == windows[-1]["step"] == 16
    for window in windows:
        phases = {name: seconds for name, seconds in window["seconds"].items() if name != "step"}
        # the first step shows that there is a GPU; where it took long, it has a window of its own
        copies = {"host_to_device"} if window["step"] > 1 else set()
        assert {*phases} == {"data_wait", "forward", "backward", "optimizer"} | copies
        assert min(phases.values()) > 0 and sum(phases.values()) <= window["seconds"]["step"] + 1e-6
    assert (lines[0]["device"], lines[0]["device_name"]) == ("gpu", "Stand-in GPU")
    assert lines[0]["device_uuid"] == "stand-in-0"
    [copy] = [line for line in lines if line["kind"] == "setup" and line["of"] == "copy"]
    assert copy["values"] == {"pinned": False} and "inputs.to(device)" in copy["text"]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "beside a thread that trains"])
def test_optimizers_that_step_within_backward_are_seen_on_autograds_thread(gpu, observed, monkeypatch, elsewhere):
    """Those of a thread of the script's own are not the training's, also while it waits for its backward pass."""
    model = nn.Linear(8, 1).to(gpu)
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    observer, threads, seen = torch_hooks.current(), set(), set()
    begins = observer.optimizer_begins
    monkeypatch.setattr(observer, "optimizer_begins", lambda optimizer: (seen.add(optimizer), begins(optimizer)))

    def step(parameter: torch.Tensor) -> None:
        threads.add(threading.get_ident())
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        if elsewhere:
            beside = threading.Thread(target=other.step)
            beside.start()
            beside.join()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for inputs, targets in DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8):
        (model(inputs.to(gpu)) - targets.to(gpu)).square().mean().backward()
    assert threads and threading.get_ident() not in threads
    observer.close()
    lines = [json.loads(line) for line in (observed / "timeline-0.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["kind"] == "steps"]
    assert sum(window["extra"]["steps"] for window in windows) == windows[-1]["step"] == 8
    assert all({"forward", "backward", "optimizer"} <= {*window["seconds"]} for window in windows)
    assert seen == {*optimizers.values()}


def test_events_are_used_again(gpu, observed):
    trained(gpu)
    observer = torch_hooks.current()
    observer.close()
    timer = observer._timer
    assert len(timer._free) + len(timer._in_use) < 90  # 15 steps had some 10 each, those of 6 wait together


def test_the_same_weights_with_and_without(gpu, tmp_path, request):
    def weights() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 1).to(gpu)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8):
            (model(inputs.to(gpu)) - targets.to(gpu)).square().mean().backward()
            optimizer.step()
        return model.weight.detach().cpu()

    without = weights()
    request.getfixturevalue("observed")
    assert torch.equal(weights(), without) and torch_hooks.current() is not None


@pytest.mark.parametrize("loads", [True, False], ids=["a loader", "none"])
def test_what_follows_the_training_takes_no_more_events_the_longer_it_lasts(gpu, observed, monkeypatch, loads):
    """On a device that is behind, where no event has passed as soon as it is recorded."""
    monkeypatch.setattr(stand_in.module.Event, "query", lambda event: time.perf_counter() - event._at > 0.002)
    monkeypatch.setattr(step_clock, "MAX_PARTS", 1000)
    _, later = trained(gpu, then=1500, loads=loads)
    observer = torch_hooks.current()
    timer = observer._timer
    assert len(timer._free) + len(timer._in_use) < (200 if loads else 2500), (
        "2 for each of the first copies, and none for later ones"
    )
    observer.close()
    lines = [json.loads(line) for line in (observed / "timeline-0.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line["kind"] == "steps"]
    assert sum(window["extra"]["steps"] for window in windows) == windows[-1]["step"] == 16
    # the last step ends with its optimizer's: else it would have MAX_PARTS of the 1,500 later batches
    assert max(window["extra"]["slowest_step"] for window in windows[1:]) < later / 2


def test_a_model_whose_first_weights_are_offloaded_trains_on_the_gpu_all_the_same(gpu):
    made = CreatedObjects(torch, Setups())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(gpu))
    made.describe(torch.optim.SGD(model.parameters(), lr=0.1))
    assert made.device is not None and made.device.type == gpu.type


def test_one_whose_weights_all_are_trains_where_memory_was_used(monkeypatch):
    for name, value in (("is_initialized", True), ("max_memory_allocated", 1), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    made = CreatedObjects(torch, Setups())
    made.describe(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert str(made.device) == "cuda:1"

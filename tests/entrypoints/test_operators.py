"""torch.profiler over a window of steps, and names for parts of a step in every profiler that is there."""

from __future__ import annotations

import gzip
import json
import sys
import types
from contextlib import contextmanager

import pytest
import torch
from torch.autograd import DeviceType
from training.distributed.world import World
from training.measure import annotate
from training.measure.operators import OperatorWindow, summarise
from training.measure.timeline import Timeline
from training.settings.scripts import TrainingSettings

LARGE = torch.ones(1000, 1000)
"""Its product takes longer than all else here, on a busy machine too."""


def world(rank: int = 0) -> World:
    return World(rank, 2, rank, torch.device("cpu"), "none", "test")


def steps(window: OperatorWindow, count: int, work) -> list[bool]:
    """So many steps of some work, each followed by whether it was slowed."""
    slowed = []
    for _ in range(count):
        window.step()
        work()
        slowed.append(window.slowed())
    return slowed


def multiply() -> None:
    timeline = Timeline(torch.device("cpu"))
    with timeline.phase("forward"):
        product = LARGE @ LARGE
    with timeline.phase("loss"):
        product.sum()


def test_the_steps_asked_for_are_recorded_and_their_operators_ranked(tmp_path):
    said = []
    settings = TrainingSettings(profile_steps=3, profile_after=2)
    window = OperatorWindow(settings, world(), tmp_path, said.append)
    assert steps(window, 8, multiply) == [False, False, True, True, True, True, False, False]
    found = json.loads((tmp_path / "operators.json").read_text())
    assert found["device"] == "CPU" and found["steps"] == 3
    names = [one["name"] for one in found["operators"]]
    assert names[0] == "aten::mm" and "aten::sum" in names
    assert not {"forward", "loss"} & set(names), "a phase is no operator"
    times = [one["seconds"] for one in found["operators"]]
    assert times == sorted(times, reverse=True) and found["operators"][0]["calls"] == 1
    assert sum(one["share"] for one in found["operators"]) + found["others"]["share"] == pytest.approx(1)
    assert sum(times) == pytest.approx(found["seconds"], rel=1e-6)
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "forward" for event in trace["traceEvents"]) >= 3
    assert any("records steps 3 to 5" in line for line in said) and any("aten::mm" in line for line in said)


def test_a_run_that_ends_within_the_window_leaves_what_was_recorded(tmp_path):
    window = OperatorWindow(TrainingSettings(profile_steps=50, profile_after=0), world(), tmp_path, lambda _: None)
    steps(window, 4, multiply)
    window.close()
    assert json.loads((tmp_path / "operators.json").read_text())["steps"] == 4


def test_files_that_cannot_be_written_end_no_training(tmp_path):
    (tmp_path / "operators.json").mkdir()
    said: list[str] = []
    window = OperatorWindow(TrainingSettings(profile_steps=2, profile_after=0), world(), tmp_path, said.append)
    assert len(steps(window, 5, multiply)) == 5
    assert any(line.startswith("torch.profiler's files are incomplete: ") for line in said)


@pytest.mark.parametrize(("rank", "wanted"), [(1, 3), (0, 0)])
def test_other_ranks_and_runs_that_do_not_ask_record_nothing(tmp_path, rank, wanted):
    window = OperatorWindow(TrainingSettings(profile_steps=wanted, profile_after=0), world(rank), tmp_path, print)
    assert steps(window, 5, multiply) == [False] * 5
    window.close()
    assert not [*tmp_path.iterdir()]


def test_a_phase_is_named_to_sagemaker_profiler_and_not_to_its_namesake(monkeypatch):
    named = []

    @contextmanager
    def note(name):
        named.append(name)
        yield

    for module, is_sagemakers in (("smprof", True), ("smppy", True), ("smppy", False)):
        found = types.ModuleType(module)
        found.annotate = note
        if is_sagemakers:
            found.SMProfiler = object
        monkeypatch.setitem(sys.modules, "smprof", None)
        monkeypatch.setitem(sys.modules, "smppy", None)
        monkeypatch.setitem(sys.modules, module, found)
        annotate.sagemaker_profiler.cache_clear()
        multiply()
        assert named == (["forward", "loss"] if is_sagemakers else []), module
        named.clear()
    annotate.sagemaker_profiler.cache_clear()


def test_pytorchs_own_ranges_are_no_operators(tmp_path):
    weight = torch.nn.Parameter(torch.ones(200, 200))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train() -> None:
        (weight @ weight).sum().backward()
        optimizer.step()

    window = OperatorWindow(TrainingSettings(profile_steps=2, profile_after=0), world(), tmp_path, lambda _: None)
    steps(window, 3, train)
    found = json.loads((tmp_path / "operators.json").read_text())
    names = {one["name"] for one in found["operators"]}
    assert "aten::mm" in names and not any(name.startswith("Optimizer.") for name in names)


def test_a_range_on_a_gpu_does_not_count_its_kernels_again():
    """DDP's and NCCL's ranges come as events of the GPU, each as long as all of its kernels."""
    kernel, ranged = (
        types.SimpleNamespace(
            key=key,
            is_user_annotation=annotation,
            device_type=DeviceType.CUDA,
            count=2,
            self_device_time_total=microseconds,
        )
        for key, annotation, microseconds in (
            ("ampere_bf16_gemm", False, 3000),
            ("DistributedDataParallel.forward", True, 3000),
        )
    )
    nccl = types.SimpleNamespace(**{**vars(ranged), "key": "nccl:all_reduce", "is_user_annotation": False})
    exchange = types.SimpleNamespace(
        **{**vars(kernel), "key": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "self_device_time_total": 1000}
    )
    recorded = types.SimpleNamespace(key_averages=lambda: [kernel, ranged, nccl, exchange])
    found = summarise(recorded, 2)
    assert [one["name"] for one in found["operators"]] == [kernel.key, exchange.key]
    assert found["seconds"] == pytest.approx(0.002) and found["operators"][0]["share"] == pytest.approx(0.75)

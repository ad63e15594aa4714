"""Beside a GPU a checkpoint is written while training goes on: what it holds is the state at its step."""

from __future__ import annotations

import threading

import pytest
import torch
from training.distributed.world import World
from training.engine import checkpoint_folder, snapshot
from training.engine.checkpoints import Checkpoints


@pytest.fixture
def world(gpu: torch.device) -> World:
    return World(0, 1, 0, gpu, "none", "test")


def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing begins when the event is set."""
    may_go, write = threading.Event(), checkpoint_folder.write

    def later(*arguments) -> None:
        assert may_go.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpoint_folder, "write", later)
    return may_go


def test_training_goes_on_while_the_step_as_it_was_is_written(world, tmp_path, monkeypatch):
    may_go, kept = slow(monkeypatch), Checkpoints(tmp_path / "kept", world)
    weights, seen = torch.arange(6.0, device=world.device), torch.ones(2, device=world.device)
    kept.save(1, {"weights": weights, "steps": [torch.tensor(1.0)]}, {"seen": seen})
    weights.zero_()
    seen.zero_()
    assert not list((tmp_path / "kept").glob("step-*"))
    may_go.set()
    kept.finish()
    loaded = Checkpoints(tmp_path / "kept", world).load()
    assert loaded is not None and loaded.step == 1
    assert loaded.shared["weights"].tolist() == [0, 1, 2, 3, 4, 5] and loaded.shared["steps"] == [torch.tensor(1.0)]
    assert loaded.own is not None and loaded.own["seen"].tolist() == [1, 1]


def test_a_required_one_is_on_the_disk_when_it_returns(world, tmp_path):
    kept = Checkpoints(tmp_path / "kept", world)
    kept.save(3, {"weights": torch.ones(2, device=world.device)}, {}, required=True)
    assert [place.name for place in (tmp_path / "kept").iterdir()] == ["step-00000003"]


def test_a_disk_that_fails_is_reported_with_the_next_one_and_with_a_required_one_at_once(world, tmp_path, monkeypatch):
    said: list[str] = []
    kept = Checkpoints(tmp_path / "kept", world, log=said.append)

    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, "write", full)
    kept.save(1, {"weights": torch.ones(2, device=world.device)}, {})
    kept.finish()
    [line] = said
    assert line.startswith("WARNING: no checkpoint of step 1 in") and "make room for 3 checkpoints" in line
    with pytest.raises(OSError, match="no checkpoint of step 2"):
        kept.save(2, {"weights": torch.ones(2, device=world.device)}, {}, required=True)


def test_where_the_host_refuses_to_pin_more_memory_the_checkpoint_is_written_all_the_same(
    world, tmp_path, monkeypatch, capsys
):
    made = torch.empty_like

    def refused(like: torch.Tensor, **given) -> torch.Tensor:
        if given.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return made(like, **given)

    monkeypatch.setattr(snapshot.torch, "empty_like", refused)
    snapshot._say_unpinned.cache_clear()
    kept = Checkpoints(tmp_path / "kept", world)
    weights = torch.arange(3.0, device=world.device)
    kept.save(2, {"weights": weights, "more": weights + 1}, {}, required=True)
    loaded = Checkpoints(tmp_path / "kept", world).load()
    assert loaded is not None and [loaded.shared[name].tolist() for name in ("weights", "more")] == [
        [0, 1, 2],
        [1, 2, 3],
    ]
    said = capsys.readouterr().out
    assert said.count("cannot be pinned for a checkpoint (CUDA error: out of memory)") == 1

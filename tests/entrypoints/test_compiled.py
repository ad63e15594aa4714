"""A compiled model keeps its static shapes when a last batch is ragged."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from training.models.compiled import StaticBatch, allow_models


@pytest.fixture
def counter(monkeypatch) -> CompileCounter:
    """Counts what torch.compile compiles, and runs it as it is."""
    torch._dynamo.reset()
    found = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=found))
    return found


def test_a_ragged_batch_compiles_nothing_anew_and_gets_its_own_numbers(counter):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    static = StaticBatch(model)
    with torch.no_grad():
        for count in (4, 4, 3, 4, 1, 2):
            images = torch.rand(count, 3)
            torch.testing.assert_close(static(images), model(images))
    assert counter.frame_count == 1


def test_a_batch_that_failed_is_not_what_later_ones_are_filled_up_to(counter):
    class Small(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if images.shape[0] > 4:
                raise RuntimeError("CUDA out of memory")
            return images + 1

    static = StaticBatch(Small())
    with pytest.raises(RuntimeError, match="out of memory"):
        static(torch.zeros(8, 3))
    assert static(torch.zeros(2, 3)).tolist() == torch.ones(2, 3).tolist()


def test_it_keeps_the_models_mode(counter):
    assert not StaticBatch(nn.Linear(2, 2).eval()).training and StaticBatch(nn.Linear(2, 2)).training


def test_more_models_of_one_class_than_torch_compiles_by_itself_are_compiled_all(counter):
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch(
        {name: 8}
    ):  # not by monkeypatch, which deletes what is in no __dict__: torch hides a deleted setting for good
        allow_models(10)
        models = [torch.compile(nn.Sequential(*[nn.Linear(3, 3)] * depth)) for depth in range(1, 11)]
        for model in models:
            model(torch.rand(2, 3))
    assert counter.frame_count == len(models)

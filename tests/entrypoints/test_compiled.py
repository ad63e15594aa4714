"""A compiled model keeps its static shapes when a last batch is ragged."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch
from training.distributed.world import World
from training.engine.state import prepare
from training.models import timm_models
from training.models.compiled import Compiled, StaticBatch
from training.settings.scripts import ClassifierSettings
from training.teacher.frozen import FrozenModel, Teacher

FAIL_AT_LIMIT = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
"""torch's switch, and its name before torch 2.6."""


@pytest.fixture
def counter(monkeypatch) -> CompileCounter:
    """Counts what torch.compile compiles, and runs it as it is."""
    torch._dynamo.reset()
    found = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=found))
    return found


def test_a_ragged_batch_compiles_nothing_anew_and_gets_its_own_numbers(counter):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    static = StaticBatch(model, "the model", "compile")
    with torch.no_grad():
        for count in (4, 4, 3, 4, 1, 2):
            images = torch.rand(count, 3)
            torch.testing.assert_close(static(images), model(images))
    assert counter.frame_count == 1


def test_larger_images_come_in_batches_of_their_own_size(monkeypatch):
    """A teacher's acceptance takes a few whole images at once, and then training many crops; batches of either may be ragged."""
    model, seen = nn.Conv2d(3, 2, 1).eval(), set[tuple[int, ...]]()
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda images: seen.add((*images.shape,)) or model(images))
    static = StaticBatch(model, "the model", "compile")
    with torch.no_grad():
        for count, side in ((2, 8), (1, 8), (6, 4), (6, 4), (2, 8), (5, 4), (1, 8)):
            images = torch.rand(count, 3, side, side)
            torch.testing.assert_close(static(images), model(images))
    assert seen == {(2, 3, 8, 8), (6, 3, 4, 4)}


def test_a_batch_that_failed_is_not_what_later_ones_are_filled_up_to(counter):
    class Small(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if images.shape[0] > 4:
                raise RuntimeError("CUDA out of memory")
            return images + 1

    static = StaticBatch(Small(), "the model", "compile")
    with pytest.raises(RuntimeError, match="out of memory"):
        static(torch.zeros(8, 3))
    assert static(torch.zeros(2, 3)).tolist() == torch.ones(2, 3).tolist()


def test_it_keeps_the_models_mode(counter):
    assert not StaticBatch(nn.Linear(2, 2).eval(), "the model", "compile").training


@pytest.fixture
def eight_at_most() -> Iterator[None]:
    """torch's own limit, beyond which it must not run anything eagerly."""
    from torch._dynamo import config

    limit = next(name for name in ("recompile_limit", "cache_size_limit") if hasattr(config, name))
    # not by monkeypatch, which deletes what is in no __dict__: torch hides a deleted setting for good
    with config.patch({limit: 8, **{name: True for name in FAIL_AT_LIMIT if hasattr(config, name)}}):
        yield


def test_more_models_of_one_class_than_torch_compiles_by_itself_are_compiled_all(counter, eight_at_most):
    models = [Compiled(nn.Sequential(*[nn.Linear(3, 3)] * depth), "the model", "compile") for depth in range(1, 11)]
    for model in models:
        model(torch.rand(2, 3))
    assert counter.frame_count == len(models)


def test_an_ensemble_of_more_teachers_is_compiled_beside_an_uncompiled_student(counter, eight_at_most):
    sizes = {"img_size": 16, "embed_dim": 8, "num_heads": 1}
    depths = range(1, 11)
    models = [timm_models.build("vit_tiny_patch16_224", {**sizes, "depth": depth}, 3) for depth in depths]
    teacher = Teacher([FrozenModel(model, f"depth {depth}", {}, compile=True) for model, depth in zip(models, depths)])
    for count in (4, 2):  # the second is filled up
        assert teacher(torch.zeros(count, 3, 16, 16, dtype=torch.uint8)).shape == (count, 3)
    assert counter.frame_count >= len(teacher.members), "older torch may compile a model in pieces"


def test_a_model_that_cannot_be_compiled_learns_as_it_is_and_says_so_once(monkeypatch, recwarn):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    model = nn.Linear(3, 2)
    trained, images = Compiled(model, "the model", "compile"), torch.rand(4, 3)
    with pytest.warns(UserWarning, match="the model cannot be compiled and runs eagerly; compile: false saves .* no C"):
        trained(images).sum().backward()
    assert model.weight.grad is not None and not trained.runs_compiled
    recwarn.clear()
    assert torch.equal(trained(images), model(images)) and not recwarn.list


@pytest.mark.skipif(not hasattr(functorch, "force_non_lazy_backward_lowering"), reason="older torch compiles it later")
def test_a_backward_pass_that_cannot_be_compiled_is_found_in_time(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no kernel for it")

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=broken)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="cannot be compiled and runs eagerly"):
        Compiled(model, "the model", "compile")(torch.rand(4, 3)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize("graphs", [False, True])
def test_a_state_and_a_teacher_are_compiled_as_the_settings_say(monkeypatch, graphs):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda model, *, mode=None, **_: modes.append(mode) or model)
    settings = ClassifierSettings(model="x", compile=True, cuda_graphs=graphs)
    model = timm_models.build("vit_tiny_patch16_224", {"img_size": 16, "depth": 1}, 3)
    state = prepare(model, settings, 10, World(0, 1, 0, torch.device("cpu"), "none", "a test"))
    FrozenModel(copy.deepcopy(model), "vit", {}, compile=True, cuda_graphs=graphs)
    assert modes == [("reduce-overhead" if graphs else None)] * 2
    assert not state.evaluator.graphs, "evaluation has shapes of its own"


def test_what_a_graph_gives_in_evaluation_outlives_its_next_run(monkeypatch):
    """A stand-in for CUDA graphs: each run writes into the memory of the first."""
    memory: list[torch.Tensor] = []

    def recorded(model: nn.Module, *, mode: str | None, **_: object):
        assert mode == "reduce-overhead"

        def replay(images: torch.Tensor) -> torch.Tensor:
            output = model(images)
            memory[:] = memory or [torch.empty_like(output)]
            return memory[0].copy_(output)

        return replay

    monkeypatch.setattr(torch, "compile", recorded)
    model = nn.Linear(3, 2).eval()
    static = StaticBatch(model, "the model", "compile", graphs=True)
    images = torch.rand(2, 4, 3)
    with torch.no_grad():
        kept = [static(one) for one in images]
        assert all(torch.equal(one, model(given)) for one, given in zip(kept, images))

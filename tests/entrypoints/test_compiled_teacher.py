"""Teachers through torch.compile: the same logits, or a warning and eager mode."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch._dynamo  # torch 2.0 does not bring it by itself

from tests.entrypoints.teachers import IMAGES, Noisy, freeze
from tests.entrypoints.torch_versions import compiling


def with_backend(monkeypatch, backend):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


@compiling
def test_a_trial_of_batch_sizes_leaves_a_compiled_teacher_no_shapes(monkeypatch):
    graphs = []
    with_backend(monkeypatch, lambda graph, _: graphs.append(graph) or graph.forward)
    teaching = freeze(Noisy(), compile=True)
    tried = teaching.eager()(IMAGES)
    assert not graphs and torch.equal(teaching(IMAGES), tried) and graphs


@compiling
def test_a_compiled_teacher_gives_the_same_logits_in_eval_mode(monkeypatch):
    graphs = []
    with_backend(monkeypatch, lambda graph, _: graphs.append(graph) or graph.forward)
    model = Noisy()
    expected, teaching = freeze(copy.deepcopy(model))(IMAGES), freeze(model, compile=True)
    assert not graphs, "nothing is compiled before the first batch"
    assert torch.equal(teaching(IMAGES), expected) and graphs
    model.train()
    assert torch.equal(teaching(IMAGES), expected)


@compiling
def test_a_teacher_that_cannot_be_compiled_says_so_once_and_runs_as_it_is(monkeypatch, recwarn):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    with_backend(monkeypatch, broken)
    model = Noisy()
    expected, teaching = freeze(copy.deepcopy(model))(IMAGES), freeze(model, compile=True)
    with pytest.warns(UserWarning, match="noisy cannot be compiled and runs eagerly; compile_teacher: false .*no C"):
        assert torch.equal(teaching(IMAGES), expected)
    recwarn.clear()
    assert torch.equal(teaching(IMAGES), expected) and not recwarn.list


@compiling
def test_an_error_of_the_model_is_no_error_of_the_compiler(monkeypatch, recwarn):
    with_backend(monkeypatch, "eager")
    with pytest.raises(ValueError, match="a model for 1 channels got images with 3"):
        freeze(Noisy(), compile=True)(IMAGES.expand(-1, 3, -1, -1))
    assert not any("cannot be compiled" in str(warning.message) for warning in recwarn)

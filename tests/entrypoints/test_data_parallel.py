"""The model that several ranks train together, against one process that sees all their images."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from torch import nn
from training.distributed.data_parallel import distribute, synchronise
from training.distributed.world import World

from tests.entrypoints.ranks import run_ranks

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a single process")

TRAIN = """
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def train(model, wrapped, shares, parts, synchronise, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        for part in range(parts):
            with synchronise(wrapped, part == parts - 1):
                (wrapped(shares[step][part]) ** 2).mean().div(parts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model[0].weight.flatten().tolist()

def images(rank, parts, steps=4):
    generator = torch.Generator().manual_seed(10 * parts + rank)
    return torch.randn(steps, parts, 3, 4, generator=generator)
"""


@pytest.fixture
def trained_together(tmp_path):
    """Weights of rank 0 and 1 after some steps by every way of exchanging gradients."""
    done = run_ranks(
        tmp_path,
        TRAIN.replace("\n", "\n        ")
        + """
        from training.distributed.data_parallel import distribute, synchronise
        with process_group() as world:
            found = {}
            for parts in (1, 2, 3):
                for name, options in {
                    "plain": {},
                    "static": {"static_graph": True},
                    "bf16": {"gradient_compression": "bf16"},
                }.items():
                    model = make()
                    try:
                        wrapped = distribute(model, world, **options)
                    except ValueError as error:
                        found[f"{name} {parts}"] = str(error)
                        continue
                    found[f"{name} {parts}"] = train(model, wrapped, images(world.rank, parts), parts, synchronise)
            (out / f"{world.rank}.json").write_text(json.dumps(found))
        """,
    )
    assert [item.returncode for item in done] == [0, 0], done
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_train_as_one_process_that_sees_their_images(trained_together):
    """Whatever the number of micro-batches, and also where the first step of a static graph accumulates."""
    names: dict = {"torch": torch, "nn": nn}
    exec(TRAIN, names)
    first, second = trained_together
    assert first == second
    for parts in (1, 2, 3):
        model = names["make"]()
        together = torch.cat([names["images"](rank, parts) for rank in range(2)], 2)
        alone = names["train"](model, model, together, parts, synchronise)
        assert first[f"plain {parts}"] == pytest.approx(alone, abs=1e-6)
        assert first[f"static {parts}"] == pytest.approx(alone, abs=1e-6)
        compressed = first[f"bf16 {parts}"]
        if isinstance(compressed, str):  # gloo of older versions of torch
            assert compressed.startswith("gradient_compression: gloo of torch ") and compressed.endswith(
                "set it to none"
            )
        else:
            assert compressed == pytest.approx(alone, abs=1e-2) and compressed != pytest.approx(alone, abs=1e-6)


def test_gradients_travel_once_a_step_and_buffers_only_at_the_start(tmp_path):
    """Counted by torch's own profiler, in a step of three micro-batches."""
    done = run_ranks(
        tmp_path,
        """
        from training.distributed.data_parallel import distribute, synchronise
        with process_group() as world:
            model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            model.register_buffer("table", torch.arange(4).view(2, 2).t() + world.rank)
            model.register_buffer("nothing", torch.zeros(0))
            model[1].running_mean.fill_(float(world.rank))
            wrapped = distribute(model, world)
            started = [model.table.tolist(), model[1].running_mean.tolist()]
            torch.manual_seed(world.rank)
            counts = []
            for step in range(3):  # DDP makes its buckets anew in the second one
                with torch.profiler.profile() as profile:
                    for part in range(3):
                        with synchronise(wrapped, part == 2):
                            wrapped(torch.randn(5, 2)).pow(2).sum().backward()
                counts.append({item.key: item.count for item in profile.key_averages() if item.key.startswith("gloo")})
            own = world.gather_rows(model[1].running_mean[None])
            gradients = world.gather_rows(model[0].weight.grad[None])
            different = not torch.equal(own[0], own[1]), torch.equal(gradients[0], gradients[1])
            (out / f"{world.rank}.json").write_text(json.dumps([started, counts[-1], different]))
        """,
    )
    assert [item.returncode for item in done] == [0, 0], done
    for rank in range(2):
        started, counts, (buffers_differ, gradients_agree) = json.loads((tmp_path / f"{rank}.json").read_text())
        assert started == [[[0, 2], [1, 3]], [0, 0, 0]]
        assert counts == {"gloo:all_reduce": 1}
        assert buffers_differ and gradients_agree


def test_one_process_trains_the_model_as_it_is():
    model = nn.Linear(2, 1)
    assert distribute(model, ALONE, static_graph=True, gradient_compression="bf16") is model
    for last in (False, True):
        assert isinstance(synchronise(model, last), contextlib.nullcontext)


def test_a_trial_of_the_memory_leaves_no_trace_in_what_ranks_exchange(tmp_path):
    """DDP counts the backward passes that its hooks see: with static_graph one before the first step would end the exchange."""
    done = run_ranks(
        tmp_path,
        TRAIN.replace("\n", "\n        ")
        + """
        from types import SimpleNamespace
        from typing import NamedTuple
        from training.distributed.data_parallel import distribute, synchronise
        from training.engine.memory_trial import StepTrial
        from training.models.precision import Precision
        from training.settings.scripts import TrainingSettings

        class Batch(NamedTuple):
            images: torch.Tensor

        with process_group() as world:
            model = make()
            wrapped = distribute(model, world, static_graph=True)
            precision, settings = Precision("fp32", world.device), TrainingSettings()
            state = SimpleNamespace(trainable=model, precision=precision, world=world, settings=settings)
            data = SimpleNamespace(collate_training=lambda items: Batch(torch.ones(1, 4)), training={(1, 0): None})
            trial = StepTrial(lambda batch: iter([{"loss": (model(batch.images) ** 2).mean()}]), [state], data, 0)
            for images_at_once in (4, 4, 16, 16):
                trial._step(images_at_once, world.device)
            assert all(parameter.grad is None for parameter in model.parameters())
            found = train(model, wrapped, images(world.rank, 1), 1, synchronise)
            (out / f"{world.rank}.json").write_text(json.dumps(found))
        """,
    )
    assert [one.returncode for one in done] == [0, 0], [one.stderr[-2000:] for one in done]
    first, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == other


def test_gradients_that_accumulate_lie_beside_ddps_buckets(tmp_path):
    """`Footprint.accumulated` counts them: in `no_sync` each gradient has a storage of its own, later they share a bucket's."""
    done = run_ranks(
        tmp_path,
        TRAIN.replace("\n", "\n        ")
        + """
        from training.distributed.data_parallel import distribute, synchronise

        with process_group() as world:
            model, found = make(), []
            wrapped = distribute(model, world)
            for step in range(3):
                for last in (False, True):
                    with synchronise(wrapped, last):
                        wrapped(torch.ones(3, 4)).mean().backward()
                    found.append(len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}))
                for parameter in model.parameters():
                    parameter.grad = None
            (out / f"{world.rank}.json").write_text(json.dumps(found))
        """,
    )
    assert [one.returncode for one in done] == [0, 0], [one.stderr[-2000:] for one in done]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[4, 1] * 3] * 2

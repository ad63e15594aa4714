"""Item 2: a run that is saved, loaded and continued for one step, beside one that was not interrupted."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from training.distributed.world import World
from training.engine.checkpoints import Checkpoints
from training.engine.state import TrainingState, prepare
from training.settings.distillation import DistillationSettings

from tests.gpu.bench import MANY, Bench
from tests.gpu.groups import one_rank as group_of_one
from tests.gpu.groups import two_ranks as group_of_two
from tests.gpu.outcomes import Result

OPTIMIZERS, PRECISIONS = ("adamw", "sgd", "nadam", "radam"), ("bf16", "fp16")

STEPS = 4
"""Before the checkpoint: in fp16 the first few may be skipped, until the loss scale fits."""

TOLERANCE = 1e-3
"""Maximum difference between two weights, as a share of the step's largest change."""


def one_rank(bench: Bench, result: Result) -> None:
    """Every optimizer, with ZeRO and without, in bf16 and fp16: DDP over a group of one."""
    _make_deterministic()
    with group_of_one(bench) as world:
        for optimizer, zero, precision in itertools.product(OPTIMIZERS, (False, True), PRECISIONS):
            result.rows.append(_resumed(bench, world, bench.world(), optimizer, zero, precision))
    _judge(result)


def two_ranks(bench: Bench, result: Result) -> None:
    """The same on two ranks, between which ZeRO shards the state; both read the checkpoint."""

    def work(world: World) -> None:
        _make_deterministic()
        rows = []
        for optimizer, zero, precision in itertools.product(OPTIMIZERS, (False, True), PRECISIONS):
            rows.append(_resumed(bench, world, world, optimizer, zero, precision))
            if world.is_first:  # after each: what comes next may hang
                _rows(bench).write_text(json.dumps(rows), encoding="utf-8")

    try:
        group_of_two(bench, work, seconds=100)
    finally:
        if _rows(bench).is_file():
            result.rows += json.loads(_rows(bench).read_text(encoding="utf-8"))
    _judge(result)


def _rows(bench: Bench) -> Path:
    return bench.folder / "rows.json"


def _make_deterministic() -> None:
    """Make the same step give the same bits twice: attention's backward pass uses atomic adds by default."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    torch.use_deterministic_algorithms(True, warn_only=True)


def _resumed(bench: Bench, world: World, saving: World, optimizer: str, zero: bool, precision: str) -> dict[str, Any]:
    """One combination's row; an error is its `problem`.

    Args:
        world: in which the model is trained.
        saving: by which the checkpoint is written and read.
    """
    row: dict[str, Any] = {"optimizer": optimizer, "ZeRO": zero, "precision": precision}
    try:
        difference, same = _compare(bench, world, saving, optimizer, zero, precision)
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        return {**row, "difference": None, "bit for bit": None, "problem": problem}
    problem = "" if difference <= TOLERANCE else f"the difference is {difference:.2g} of the step's change"
    return {**row, "difference": difference, "bit for bit": same, "problem": problem}


def _compare(
    bench: Bench, world: World, saving: World, optimizer: str, zero: bool, precision: str
) -> tuple[float, bool]:
    settings = bench.settings(
        optimizer=optimizer,
        zero=zero,
        precision=precision,
        global_batch_size=2 * bench.sizes.batch,
        warmup_fraction=0.0,
    )
    folder = bench.folder / f"{optimizer}-{zero}-{precision}"
    generator = torch.Generator().manual_seed(world.rank)
    shape = (STEPS + 1, bench.sizes.batch, 3, bench.sizes.image_size, bench.sizes.image_size)
    batches = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    undisturbed = _fresh(bench, settings, world)
    for images in batches[:STEPS]:
        _step(bench, undisturbed, settings, images)
    checkpoints = Checkpoints(folder, saving, log=print)
    assert checkpoints.load() is None
    checkpoints.save(STEPS, undisturbed.capture(), {}, required=True)
    before = _weights(undisturbed)
    _step(bench, undisturbed, settings, batches[STEPS])

    resumed = _fresh(bench, replace(settings, seed=1), world)
    loaded = Checkpoints(folder, saving, log=print).load()
    assert loaded is not None, "the checkpoint is there"
    resumed.restore(loaded.shared)
    assert torch.equal(_weights(resumed), before), "the checkpoint holds the weights"
    _step(bench, resumed, settings, batches[STEPS])

    after = _weights(undisturbed)
    change, difference = (after - before).abs().max().item(), (_weights(resumed) - after).abs().max().item()
    if change == 0:
        raise AssertionError("the step changed nothing")
    return difference / change, difference == 0


def _fresh(bench: Bench, settings: DistillationSettings, world: World) -> TrainingState:
    return prepare(bench.model(bench.sizes.shallow_student, settings.seed), settings, MANY, world)


def _step(bench: Bench, state: TrainingState, settings: DistillationSettings, images: torch.Tensor) -> None:
    """One optimizer step as in the loop, with labels by position in the batch."""
    labels = torch.arange(len(images), device=bench.device) % bench.sizes.classes
    with state.precision.autocast():
        loss = torch.nn.functional.cross_entropy(state.trained(images.to(bench.device)).float(), labels)
    (loss if state.scaler is None else state.scaler.scale(loss)).backward()
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizer)
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), settings.max_grad_norm)
    if state.scaler is None:
        state.optimizer.step()
    else:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    state.schedule.step()
    state.step += 1


def _weights(state: TrainingState) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()]).cpu()


def _judge(result: Result) -> None:
    for row in result.rows:
        name = f"{row['optimizer']}{' with ZeRO' if row['ZeRO'] else ''}, {row['precision']}"
        result.expect(not row["problem"], f"{name}, goes on to the same weights ({row['problem']})")
    result.figures["combinations"] = len(result.rows)
    result.figures["bit for bit"] = sum(bool(row["bit for bit"]) for row in result.rows)

"""What the training loops of tests/observer/loops.py and loader_loops.py share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LOOPS: dict[str, Callable[[], nn.Module]] = {}


TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


def loop(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if NEEDS.get(function.__name__, (2, 0)) <= TORCH:
        LOOPS[function.__name__] = function
    return function


NEEDS = {"skipping_scaler": (2, 3), "compiled": (2, 3), "compiled_whole": (2, 5)}
"""Loops by what only this version of torch and later ones have: a scaler for CPUs; hooks of optimizers after the first torch.compile; a
mode that is set in what is compiled."""


def loader(batches: int = 6) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(4 * batches, 8), torch.randn(4 * batches, 1)), batch_size=4)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def lower(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss

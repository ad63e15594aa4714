"""Fails in the middle of its eighth step: with an exception, or at once and without a farewell (`exit`)."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=8)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, (inputs, targets) in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    if number == 8 and sys.argv[1] == "exit":
        os._exit(7)
    if number == 8:
        raise RuntimeError("the eighth batch is bad")
    loss.backward()
    optimizer.step()

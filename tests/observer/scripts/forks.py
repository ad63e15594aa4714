"""Forks while it trains: children that train too, one forked and one started anew, and one that only leaves."""

import multiprocessing
import os
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import tell


def train(steps):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(8 * steps, 8), torch.randn(8 * steps, 1)), batch_size=8)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if steps == 20 and number == 10:
            other_processes()
    return model


def other_processes():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    forked = multiprocessing.get_context("fork").Process(target=train, args=(5,))
    forked.start()
    forked.join()
    assert forked.exitcode == 0
    subprocess.run([sys.executable, __file__, "5"], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tell(train(int(sys.argv[1])))

"""Batches from a thread: one that reads a DataLoader ahead, and one that is no DataLoader at all (`own`)."""

import queue
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import tell


class ReadAhead:
    """Iterates over something in a thread of its own."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        ready = queue.Queue(maxsize=2)

        def fill():
            for batch in self.batches:
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=fill, daemon=True).start()
        while (batch := ready.get()) is not None:
            yield batch


def own_batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(24):
        yield torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)


torch.manual_seed(0)
if sys.argv[1] == "loader":
    loader = DataLoader(TensorDataset(torch.randn(96, 8), torch.randn(96, 1)), batch_size=4)
batches = own_batches() if sys.argv[1] == "own" else loader
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for inputs, targets in ReadAhead(batches):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
tell(model)

"""Two or more ranks by torchrun: DistributedDataParallel over gloo, a distributed sampler, the first rank saves."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from weights import tell

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
    tell(model)
# Gloo's threads may let go of the last tensor late, when Python has ended, and torch then aborts.
time.sleep(0.3)
dist.destroy_process_group()

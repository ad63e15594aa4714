"""An iterable dataset without a length, in a worker; gradients of two batches are accumulated."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from weights import tell


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(96):
            yield torch.randn(8, generator=generator), torch.randn(1, generator=generator)


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Stream(), batch_size=4, num_workers=1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, (inputs, targets) in enumerate(loader, start=1):
        (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    tell(model)

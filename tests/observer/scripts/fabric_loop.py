"""A plain loop by lightning's Fabric, which is imported before torch."""

import time

import lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import tell


class SlowDisk(TorchCheckpointIO):
    """Lightning saves to memory first."""

    def save_checkpoint(self, *args, **kwargs):
        super().save_checkpoint(*args, **kwargs)
        time.sleep(0.2)


def main():
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[SlowDisk()])
    fabric.seed_everything(0)
    samples = TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,)))
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=8, shuffle=True))
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), lr=0.05))
    for epoch in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
        fabric.save(f"{epoch}.ckpt", {"model": model})
    tell(layers)


if __name__ == "__main__":
    main()

"""A LightningModule, trained and validated by lightning's Trainer."""

import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import tell


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        inputs, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SlowDisk(TorchCheckpointIO):
    """Lightning saves to memory first."""

    def save_checkpoint(self, *args, **kwargs):
        super().save_checkpoint(*args, **kwargs)
        time.sleep(0.2)


def main(callbacks=None):
    pl.seed_everything(0)
    images, labels = torch.randn(96, 16), torch.randint(0, 4, (96,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True, num_workers=1)
    held_out = DataLoader(TensorDataset(images[:32], labels[:32]), batch_size=16)
    model = Classifier()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        default_root_dir=".",
        callbacks=callbacks,
        plugins=[SlowDisk()],
    )
    trainer.fit(model, loader, held_out)
    tell(model)


if __name__ == "__main__":
    main()

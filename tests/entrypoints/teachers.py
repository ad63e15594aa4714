"""Small teachers, and the files and channels that hold them."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import torch
import torch._dynamo  # torch 2.0 does not bring it by itself
from torch import nn
from training.models import export, timm_models
from training.teacher import frozen

OPTIONS = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 1,
    "num_heads": 2,
    "in_chans": 1,
    "drop_rate": 0.5,
}
NAME, CLASSES = "vit_tiny_patch16_224", ["a", "b", "c"]
IMAGES = torch.randint(0, 256, (4, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def exported(folder: Path, seed: int = 1, name: str = NAME, image_size: int = 16, **options) -> timm_models.Normalized:
    """A trained model, and its files in a folder."""
    options = {**(OPTIONS if name == NAME else {"in_chans": 1}), **options}
    torch.manual_seed(seed)
    model = timm_models.build(name, options, 3)
    save(model, folder, name=name, options=options, image_size=image_size)
    return model.eval()


def save(model: timm_models.Normalized, folder: Path, **described) -> None:
    values = {"name": NAME, "options": OPTIONS, "classes": CLASSES, "image_size": 16}
    export.save(model, folder, **{**values, **described})


def load(folder, classes=CLASSES, **options):
    return frozen.load(folder, classes, **{"channels": 1, "image_size": 16, **options})


def archive(folder: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with tarfile.open(target, "w:gz") as opened:
        for file in folder.iterdir():
            opened.add(file, file.name)


def channel(tmp_path, kind: str, model):
    """A channel's folder that holds the teacher as a folder's content, an archive, or a bare weights file."""
    folder = tmp_path / kind
    if kind == "folder":
        return tmp_path / "model"
    folder.mkdir()
    if kind == "archive":
        archive(tmp_path / "model", folder / "model.tar.gz")
    elif kind == "ddp checkpoint":
        torch.save(
            {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in model.model.state_dict().items()}},
            folder / "last.pth",
        )
    elif kind == "ema checkpoint":
        other = {name: torch.zeros_like(value) for name, value in model.model.state_dict().items()}
        torch.save({"state_dict": other, "state_dict_ema": model.model.state_dict()}, folder / "last.pth.tar.pt")
    elif kind == "hub's older file":
        torch.save(model.model.state_dict(), folder / "pytorch_model.bin")
    else:
        shutil.copy(tmp_path / "model/model.safetensors", folder / "weights.safetensors")
    return folder


class Noisy(nn.Module):
    """A model that training mode would change: by dropout at once, and by BatchNorm for good."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 3)
        )

    def forward(self, images):
        return self.layers(images)


def freeze(model: nn.Module, **options) -> frozen.Teacher:
    return frozen.Teacher([frozen.FrozenModel(timm_models.Normalized(model, [0.5], [0.5]), "noisy", {}, **options)])

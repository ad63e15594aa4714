"""What the training scripts beside this file share: arguments, a dataset of photographs, a model. Each argument can make a run slow."""

import argparse
import os
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision import transforms


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--images", type=int, help="N, for training; all unless given")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument("--rounds", type=int, default=1, help="of augmentation")
    parser.add_argument("--read-seconds", type=float, default=0, help="that an image takes to arrive")
    parser.add_argument("--open-seconds", type=float, default=0, help="that a worker takes to open the data")
    parser.add_argument("--metric-seconds", type=float, default=0, help="of Python after each step")
    parser.add_argument("--pause-every", type=int, default=0, help="steps")
    parser.add_argument("--pause-seconds", type=float, default=0)
    parser.add_argument("--keep-megabytes", type=float, default=0, help="that stay after each step")
    parser.add_argument("--save-every", type=int, default=0, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps")
    parser.add_argument("--slow-rank-seconds", type=float, default=0, help="of Python for each batch of rank 1")
    return parser.parse_args()


class Photographs(torch.utils.data.Dataset):
    """A folder of a folder per class."""

    def __init__(self, folder, options):
        self.options, self.opened = options, False
        self.files = sorted(folder.rglob("*.jpg"))[: options.images]
        self.classes = sorted({file.parent.name for file in self.files})
        rounds = [transforms.RandomAffine(10, (0.1, 0.1), (0.9, 1.1)) for _ in range(options.rounds - 1)]
        crop = transforms.RandomResizedCrop(options.size)
        self.transform = transforms.Compose([*rounds, crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        if not self.opened:
            self.opened = True
            time.sleep(self.options.open_seconds)
        time.sleep(self.options.read_seconds)
        image = Image.open(self.files[index]).convert("RGB")
        return self.transform(image), self.classes.index(self.files[index].parent.name)


def built(options):
    return getattr(torchvision.models, options.model)(num_classes=10)


def optimizer_of(model, options):
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.SGD
    return kind(model.parameters(), lr=1e-4)


class Extras:
    """What a step does beside training."""

    def __init__(self, options):
        self.options, self.kept, self.steps = options, [], 0

    def before_forward(self):
        if os.environ.get("RANK") == "1":
            python_for(self.options.slow_rank_seconds)

    def after_step(self):
        self.steps += 1
        python_for(self.options.metric_seconds)
        if self.options.pause_every and self.steps % self.options.pause_every == 0:
            time.sleep(self.options.pause_seconds)
        if self.options.keep_megabytes:
            threading.Thread(target=self.keep).start()

    def keep(self):
        self.kept.append(np.ones(int(self.options.keep_megabytes * 1e6), np.uint8))


def python_for(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(1000))


def loss_of(model, images, labels):
    return nn.functional.cross_entropy(model(images), labels)

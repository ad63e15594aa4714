"""What the tests of tuning share: a training script whose reads take their time, whatever else the machine does, and a table's rows."""

from __future__ import annotations

import csv
from pathlib import Path

SLOW_READS = """
    import time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return {samples}

        def __getitem__(self, index):
            time.sleep({seconds})
            return torch.full((8,), float(index)) + {noise}, index % 2

    def main():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1)
        for epoch in range(2):
            for images, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.02)
                print(f"loss: {{loss.item():.8f}}", flush=True)

    main()
"""
"""Reads that take their time, whatever else the machine does."""


def slow_reads(samples: int, seconds: float, noise: str = "0") -> str:
    """The text of SLOW_READS.

    Args:
        noise: an expression that is added to each sample.
    """
    return SLOW_READS.format(samples=samples, seconds=seconds, noise=noise)


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open())) if file.exists() else []

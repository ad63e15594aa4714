"""What a large model's file costs a run: packed by gzip's fastest level and by the kit, unpacked, and made into the model.

The model gets the file's weights with and without random ones before them.

    .venv/bin/python tests/benchmarks/model_files.py --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from engine import machine, progress, table
from safetensors.torch import save_file
from training.models import files, timm_models

from launcher.backends import local_hosts

MODEL, CLASSES = "vit_large_patch16_224", 4


def compressed(weights: Path, archive: Path) -> None:
    """Like gzip's fastest level."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(weights, weights.name)


def stored(weights: Path, archive: Path) -> None:
    """Like the kit."""
    local_hosts.pack({weights.name: weights}, archive)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    took: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        weights = place / "model.safetensors"
        save_file(timm_models.create(MODEL, {}, num_classes=CLASSES).state_dict(), weights)
        sizes = {}
        for number in range(options.rounds):
            for pack in (compressed, stored):
                name = pack.__name__
                archive, target = place / f"{name}.tar.gz", place / f"{name}-{number}"
                took.setdefault(("pack", name), []).append(seconds(lambda p=pack, a=archive: p(weights, a)))
                took.setdefault(("unpack", name), []).append(seconds(lambda a=archive, t=target: files.unpack(a, t)))
                sizes[name] = archive.stat().st_size / weights.stat().st_size
            values = files.read_weights(weights)

            def usual(values: dict[str, torch.Tensor] = values) -> None:
                timm_models.create(MODEL, {}, num_classes=CLASSES).load_state_dict(values)

            def given(values: dict[str, torch.Tensor] = values) -> None:
                timm_models.create_for(values, MODEL, {}, num_classes=CLASSES)

            took.setdefault(("make", "random weights first"), []).append(seconds(usual))
            took.setdefault(("make", "with its weights alone"), []).append(seconds(given))
            progress(f"round {number + 1} of {options.rounds}")
    print(f"{machine(1)}\n{MODEL}, {options.rounds} rounds in turns")
    rows = [("", "", "seconds, median", "lowest to highest", "of the weights' bytes")]
    for (what, how), each in took.items():
        size = f"{sizes[how]:.2f}" if what == "pack" else ""
        rows.append((what, how, f"{statistics.median(each):.1f}", f"{min(each):.1f} to {max(each):.1f}", size))
    print(table(rows))


if __name__ == "__main__":
    main()

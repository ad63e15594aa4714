"""Whether the memory of loading stays flat: over ten epochs of a folder, and over a million samples of shards. `make bench-input`.

Each case is its own process that does nothing but load, with two workers or none. Memory is the resident, not file-backed
memory of the process and its workers (pages shared since the fork count for each); growth is from the second of ten parts,
when everything has been used once, to the last. The shards are a thousand names of one file with a thousand small JPEGs,
so they need two megabytes instead of two gigabytes.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from engine import ALONE, machine, table

PARTS, WARM_UP, SAMPLES_PER_SHARD = 10, 2, 1000

NONE = "no workers"

CASES = {
    "folder-threads": ("folder", "threads"),
    "folder-processes": ("folder", "processes"),
    "shards": ("shards", NONE),
    "shards-processes": ("shards", "processes"),
}
"""What is loaded, and with which workers: none for images this small, as auto has it."""


def write_shards(root: Path, shards: int) -> None:
    """A channel of N shards."""
    from PIL import Image

    root.mkdir()
    with tarfile.open(root / "00000.tar", "w") as tar:
        for number in range(SAMPLES_PER_SHARD):
            Image.new("RGB", (16, 16), (number % 256, number // 4, 99)).save(file := io.BytesIO(), "JPEG")
            for ending, content in (("jpg", file.getvalue()), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    for shard in range(1, shards):
        os.link(root / "00000.tar", root / f"{shard:05}.tar")


def load(root: Path, kind: str, parts: int, passes: float, **values) -> None:
    """Load `passes` epochs in `parts` parts, and print the memory in use after each, in MB."""
    import psutil
    import torch
    from training.data.loaders import open_loaders
    from training.data.views import open_data
    from training.settings.scripts import LabelledImageSettings

    torch.set_num_threads(1)
    workers = {"num_workers": 0} if kind == NONE else {"num_workers": 2, "worker_type": kind}
    chosen = LabelledImageSettings(horizontal_flip=True, min_crop_area=0.3, epochs=99, **workers, **values)
    loaders = open_loaders(
        open_data(root, root, chosen, 3), chosen, ALONE, batch_size_per_device=chosen.global_batch_size
    )
    process, made, batches_per_part = psutil.Process(), 0, max(1, int(len(loaders.train_batches) * passes / parts))
    epoch = 0
    while made < parts * batches_per_part:
        epoch += 1
        loaders.train_batches.start(epoch)
        for _ in loaders.train:
            made += 1
            if made % batches_per_part == 0 and made <= parts * batches_per_part:
                own = sum(own_memory(each.pid) for each in (process, *process.children(recursive=True)))
                print(f"{own / 1e6:.1f}", flush=True)


def own_memory(process: int) -> int:
    """Bytes in use that are not file-backed."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=1024, help="of the folder")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the shards")
    parser.add_argument("--only", nargs="*", choices=(*CASES,), default=(*CASES,))
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        root, kind, source = asked.case
        if source == "folder":
            load(Path(root), kind, PARTS, PARTS, image_size=224, global_batch_size=64)
        else:
            load(Path(root), kind, PARTS, 1, image_size=8, global_batch_size=500)
        return
    print(f"{machine(1)}\n")
    rows = [("MB of the process and its workers", *(f"{part + 1}/{PARTS}" for part in range(PARTS)), "growth")]
    with tempfile.TemporaryDirectory() as folder:
        from photographs import SMALL, write_images

        write_images(Path(folder) / "folder", SMALL, 64, asked.images)
        write_shards(Path(folder) / "shards", asked.samples // SAMPLES_PER_SHARD)
        what = {"folder": f"{asked.images:,} images, {PARTS} epochs", "shards": f"{asked.samples:,} samples"}
        for source, kind in (CASES[name] for name in asked.only):
            command = [sys.executable, __file__, "--case", str(Path(folder) / source), kind, source]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            own = [float(line) for line in done.stdout.split()]
            growth = f"{own[-1] - own[WARM_UP - 1]:+.1f} MB"
            workers = kind if kind == NONE else f"2 {kind}"
            rows.append((f"{source}, {what[source]}, {workers}", *(f"{each:.0f}" for each in own), growth))
    print(table(rows))


if __name__ == "__main__":
    main()

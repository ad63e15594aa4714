"""Trains a classifier on the simulated accelerator, as a script of one's own would on a GPU. Each option can make it slow.

    launcher watch -- python notebooks/simulated_training.py --workers 16        KT's fault
    launcher watch -- python notebooks/simulated_training.py --workers 2         and its fix

It prints what KT printed: the seconds of each iteration in the data loader, forward and backward.
"""

import argparse
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import simulated_accelerator
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES, SIZE = 10, 16
LAYERS = 12


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=64, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prefetch-factor", type=int, default=4, help="batches that each worker makes ahead")
    parser.add_argument("--threads-a-worker", type=int, default=2)
    parser.add_argument("--cpu-ms-an-image", type=float, default=6, help="of all threads together")
    parser.add_argument("--launches", type=int, default=600, help="kernels of a step, two thirds in its backward pass")
    parser.add_argument("--launch-us", type=float, default=60, help="of a core, for each kernel")
    parser.add_argument("--kernel-us", type=float, default=300, help="of the device, for 32 images")
    parser.add_argument("--copy-ms", type=float, default=0, help="of a batch to the device")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--synchronise", action="store_true", help="read the loss after each step")
    parser.add_argument("--metric-ms", type=float, default=0, help="of Python after each step")
    parser.add_argument("--keep-mb", type=float, default=0, help="of the device's memory, after each step")
    parser.add_argument("--print-every", type=int, default=1, help="steps")
    parser.add_argument("--loss-every", type=int, default=16, help="steps; the device is waited for then")
    return parser.parse_args()


class Images(Dataset):
    """Made-up images, each of which costs the time of decoding and augmentation."""

    def __init__(self, args):
        self.images = args.steps * args.batch_size
        self.threads, self.seconds = args.threads_a_worker, args.cpu_ms_an_image / 1000
        self.pool = None

    def __len__(self):
        return self.images

    def __getitem__(self, index):
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads)
        list(self.pool.map(compute, [self.seconds / self.threads] * self.threads))
        label = index % CLASSES
        pixels = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(index))
        return pixels + torch.linspace(-1, 1, CLASSES)[label], label


def compute(seconds):
    """Compute for so long on a core, as a thread of OpenCV's or PyTorch's does: without Python's lock."""
    block, until = bytes(1 << 17), time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(block).digest()


def built(args):
    """A small classifier among layers that cost the device time."""
    forward, backward = args.launches // 3 // LAYERS, (args.launches - args.launches // 3) // LAYERS
    layers = [
        simulated_accelerator.Kernels(
            forward,
            backward,
            launch_seconds=args.launch_us / 1e6,
            seconds_a_sample=args.kernel_us / 1e6 / 32,
            bytes_a_sample=20 * 2**20,
        )
        for _ in range(LAYERS)
    ]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 32), *layers, nn.ReLU(), nn.Linear(32, CLASSES))


def measure(logits, labels, seconds):
    """A metric in Python."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(1000))


def main():
    args = parsed()
    torch.manual_seed(0)
    device = simulated_accelerator.install()
    if args.copy_ms:
        batch = args.batch_size * 3 * SIZE * SIZE * 4
        torch.sim.copied_bytes_a_second = batch / (args.copy_ms / 1000)
    data = Images(args)
    ahead = args.prefetch_factor if args.workers else None
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, prefetch_factor=ahead)
    model = built(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began, step, average = time.perf_counter(), 0, 2.3
    for epoch in range(args.epochs):
        asked = time.perf_counter()
        for inputs, labels in loader:
            came = time.perf_counter()
            inputs, labels = inputs.to(device), labels.to(device)
            with torch.autocast("sim", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(inputs)
                loss = nn.functional.cross_entropy(logits, labels)
            forwarded = time.perf_counter()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if args.synchronise:
                average += 0.1 * (loss.item() - average)
            if args.metric_ms:
                measure(logits, labels, args.metric_ms / 1000)
            if args.keep_mb:
                torch.sim.allocate(int(args.keep_mb * 1e6))
            if step % args.print_every == 0:
                ended = time.perf_counter()
                print(
                    f"{step} iter time - dataloader: {came - asked:.5f} sec, forward: {forwarded - came:.5f} sec, "
                    f"backward: {ended - forwarded:.5f} sec",
                    flush=True,
                )
            if step % args.loss_every == 0:
                print(f"epoch {epoch + 1} loss: {average if args.synchronise else loss.item():.7f}", flush=True)
            asked = time.perf_counter()
    seconds = time.perf_counter() - began
    busy = torch.sim.busy_seconds() / seconds
    print(f"{step} steps in {seconds:.2f} s, device busy {100 * busy:.0f} %", flush=True)


if __name__ == "__main__":
    main()

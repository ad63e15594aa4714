"""A plain PyTorch loop over photographs; under torchrun with DistributedDataParallel."""

import itertools
import os

import torch
import torch.distributed as dist
from pictures import Extras, Photographs, built, loss_of, optimizer_of, parsed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    options = parsed()
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    training = Photographs(options.data / "train", options)
    model, sampler = built(options), None
    if ranks > 1:
        dist.init_process_group("gloo")
        model, sampler = DistributedDataParallel(model), DistributedSampler(training)
    loader = DataLoader(
        training, batch_size=options.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=options.workers
    )
    held_out = DataLoader(Photographs(options.data / "validation", options), batch_size=options.batch_size)
    optimizer = optimizer_of(model, options)
    extras, step = Extras(options), 0
    for epoch in itertools.count():
        for images, labels in loader:
            extras.before_forward()
            optimizer.zero_grad()
            loss = loss_of(model, images, labels)
            loss.backward()
            optimizer.step()
            step += 1
            extras.after_step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss: {loss.item():.4f}", flush=True)
            if options.save_every and step % options.save_every == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
            if options.evaluate_every and step % options.evaluate_every == 0:
                print(f"accuracy {evaluate(model, held_out):.3f}", flush=True)
            if step == options.steps:
                return


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()

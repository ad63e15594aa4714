"""After torchvision's reference scripts: arguments, a metric logger around the loader, autocast, a scaler, an average of the weights."""

import argparse
import time

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from weights import tell


class MetricLogger:
    def __init__(self):
        self.meters = {}

    def update(self, **values):
        for name, value in values.items():
            self.meters.setdefault(name, []).append(value)

    def log_every(self, iterable, print_freq, header):
        began = time.time()
        for index, item in enumerate(iterable):
            yield item
            if index % print_freq == 0:
                means = "  ".join(f"{name}: {values[-1]:.4f}" for name, values in self.meters.items())
                print(f"{header}  [{index:2d}/{len(iterable)}]  {means}  time: {time.time() - began:.4f}")


class Pictures(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.pictures = torch.randn(count, 3, 16, 16, generator=generator)
        self.labels = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, averaged, scaler):
    model.train()
    metric_logger = MetricLogger()
    for image, target in metric_logger.log_every(data_loader, args.print_freq, f"Epoch: [{epoch}]"):
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast(device.type, dtype=torch.bfloat16):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        averaged.update_parameters(model)
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])


def evaluate(model, criterion, data_loader, device):
    model.eval()
    metric_logger = MetricLogger()
    with torch.inference_mode():
        for image, target in metric_logger.log_every(data_loader, 100, "Test:"):
            image, target = image.to(device), target.to(device)
            metric_logger.update(loss=criterion(model(image), target).item())


def main(args):
    torch.manual_seed(0)
    device = torch.device(args.device)
    dataset, dataset_test = Pictures(64), Pictures(32)
    train_sampler = torch.utils.data.RandomSampler(dataset)
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, sampler=train_sampler, num_workers=args.workers, pin_memory=False
    )
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=args.batch_size, num_workers=0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4)
    ).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    averaged = AveragedModel(model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, averaged, scaler)
        scheduler.step()
        evaluate(averaged, criterion, data_loader_test, device)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, f"model_{epoch}.pth")
    tell(model, averaged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", default=16, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--workers", default=1, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--clip-grad-norm", default=1.0, type=float)
    parser.add_argument("--print-freq", default=2, type=int)
    main(parser.parse_args())

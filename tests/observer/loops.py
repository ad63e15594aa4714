"""Training loops of unusual shape, each run without the observer and with it, in one process: python -m tests.observer.loops FOLDER

Leaves FOLDER/<loop>/timeline-0.jsonl, and prints {loop: [digest of the weights without, with]}.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch._dynamo
from launcher_observer import torch_hooks
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.observer import loader_loops
from tests.observer.loop_parts import LOOPS, loader, loop, lower, parts


@loop
def line_search() -> nn.Module:
    """Several backward passes in one optimizer step."""
    model, _ = parts()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for batch in loader():

        def closure(batch=batch):
            optimizer.zero_grad()
            return lower(model, batch)

        optimizer.step(closure)
    return model


@loop
def closure() -> nn.Module:
    """The backward pass lies in the optimizer's step, as Lightning has it."""
    model, optimizer = parts()
    for batch in loader():
        optimizer.zero_grad()
        optimizer.step(lambda batch=batch: lower(model, batch))
    return model


@loop
def skipping_scaler() -> nn.Module:
    """Every second step has gradients that are not finite, and the scaler leaves the optimizer alone."""
    model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number, batch in enumerate(loader()):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        scaler.scale(loss * (float("inf") if number % 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@loop
def recomputing() -> nn.Module:
    """Activation checkpointing: a backward pass within a backward pass."""
    model, optimizer = parts()
    for inputs, targets in loader():
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], inputs.requires_grad_(), use_reentrant=True)
        nn.functional.mse_loss(model[2](hidden), targets).backward()
        optimizer.step()
    return model


@loop
def accumulating() -> nn.Module:
    """Three batches a step, an evaluation between two batches of one step."""
    model, optimizer = parts()
    held_out = loader(2)
    for number, batch in enumerate(loader(), start=1):
        lower(model, batch)
        if number == 4:
            with torch.no_grad():
                for inputs, _ in held_out:
                    model(inputs)
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop
def evaluating_with_gradients() -> nn.Module:
    """Evaluations that forgot torch.no_grad()."""
    model, optimizer = parts()
    training, held_out = loader(), loader(3)
    for _ in range(3):
        for batch in training:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        for inputs, _ in held_out:
            model(inputs)
    return model


@loop
def by_gradients() -> nn.Module:
    """Gradients by torch.autograd.grad, so that no backward pass is seen; and a new optimizer every epoch."""
    model, _ = parts()
    training = loader()
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for inputs, wanted in training:
            loss = nn.functional.mse_loss(model(inputs), wanted)
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()])):
                parameter.grad = gradient
            optimizer.step()
    return model


class Cached(TensorDataset):
    """Saves each sample at its first use."""

    def __getitem__(self, index):
        torch.save(self.tensors[0][index], io.BytesIO())
        return super().__getitem__(index)


@loop
def caching_samples() -> nn.Module:
    model, optimizer = parts()
    for batch in DataLoader(Cached(torch.randn(24, 8), torch.randn(24, 1)), batch_size=4):
        optimizer.zero_grad()
        lower(model, batch)
        optimizer.step()
    return model


@loop
def lists_of_samples() -> nn.Module:
    """Images of several sizes, as detection has them: one list of images, one of targets."""
    model = nn.Conv2d(3, 1, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    samples = [(torch.randn(3, 8 + index % 3, 8), {"boxes": torch.randn(2, 4)}) for index in range(30)]
    for images, _ in DataLoader(samples, batch_size=5, collate_fn=lambda batch: tuple(zip(*batch))):
        optimizer.zero_grad()
        sum(model(image).square().mean() for image in images).backward()
        optimizer.step()
    return model


@loop
def read_once() -> nn.Module:
    """Each batch is an iterator, which can be read only once."""
    model = nn.Linear(192, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    samples = [(torch.randn(3, 8, 8), float(index % 2)) for index in range(24)]
    for images, targets in DataLoader(samples, batch_size=4, collate_fn=lambda batch: zip(*batch)):
        optimizer.zero_grad()
        lower(model, (torch.stack(images).flatten(1), torch.tensor(targets)[:, None]))
        optimizer.step()
    return model


@loop
def micro_batches() -> nn.Module:
    """Each batch is a generator of its parts, of which the first must not be lost."""
    model, optimizer = parts()
    samples, seen = TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), 0
    for micro in DataLoader(samples, batch_size=4, collate_fn=lambda batch: (sample for sample in batch)):
        optimizer.zero_grad()
        for sample in micro:
            lower(model, sample)
            seen += 1
        optimizer.step()
    assert seen == 24, seen
    return model


class AttributeDict(dict):
    """Raises KeyError for an attribute that it has not."""

    __getattr__ = dict.__getitem__


@loop
def attribute_dictionary() -> nn.Module:
    model, optimizer = parts()
    samples = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))

    def collate(batch):
        return AttributeDict(
            inputs=torch.stack([one for one, _ in batch]), wanted=torch.stack([one for _, one in batch])
        )

    for batch in DataLoader(samples, batch_size=4, collate_fn=collate):
        optimizer.zero_grad()
        lower(model, (batch.inputs, batch.wanted))
        optimizer.step()
    return model


class Shaped:
    """A batch whose shape is a method."""

    def __init__(self, batch):
        self.inputs, self.wanted = (torch.stack(one) for one in zip(*batch))

    def shape(self):
        return self.inputs.shape


@loop
def a_shape_that_is_a_method() -> nn.Module:
    model, optimizer = parts()
    samples = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    for batch in DataLoader(samples, batch_size=4, collate_fn=Shaped):
        optimizer.zero_grad()
        lower(model, (batch.inputs, batch.wanted))
        optimizer.step()
    return model


class Lazy(torch.utils.data.Dataset):
    """Opens its file where the first sample is read: a handle can neither be sent to a worker nor shared with it."""

    handle = None

    @property
    def dataset(self):
        if self.handle is None:
            self.handle = torch.randn(24, 8), torch.randn(24, 1)
        return self.handle

    def __len__(self):
        return 24

    def __getitem__(self, index):
        inputs, targets = self.dataset
        return inputs[index], targets[index]


@loop
def opening_late() -> nn.Module:
    model, optimizer = parts()
    batches = DataLoader(Lazy(), batch_size=4)
    assert batches.dataset.handle is None
    for batch in batches:
        optimizer.zero_grad()
        lower(model, batch)
        optimizer.step()
    return model


class Buckets(torch.utils.data.Sampler):
    """Draws its batches to count them."""

    def __init__(self):
        pass

    def __iter__(self):
        return iter(torch.randperm(24).split(4))

    def __len__(self):
        return len(list(iter(self)))


@loop
def drawing_to_count() -> nn.Module:
    model, optimizer = parts()
    batches = DataLoader(TensorDataset(torch.randn(24, 8), torch.randn(24, 1)), batch_sampler=Buckets())
    for _ in range(2):
        for inputs, targets in batches:
            optimizer.zero_grad()
            lower(model, (nn.functional.dropout(inputs), targets))
            optimizer.step()
    return model


@loop
def evaluating_a_part() -> nn.Module:
    """The same, which leave their loader before its end."""
    model, optimizer = parts()
    training, held_out = loader(), loader(3)
    for _ in range(3):
        for batch in training:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        for number, (inputs, _) in enumerate(held_out):
            model(inputs)
            if number == 1:
                break
    return model


def _attacking(training: DataLoader, held_out: Iterable) -> nn.Module:
    """Each of three evaluations moves its images along their gradients."""
    model, optimizer = parts()
    for _ in range(3):
        for batch in training:
            optimizer.zero_grad()
            lower(model, batch)
            optimizer.step()
        for inputs, wanted in held_out:
            with torch.enable_grad():
                moved = inputs.clone().requires_grad_()
                lower(model, (moved, wanted))
            model((inputs + moved.grad).detach())
    return model


@loop
def attacking_in_evaluation() -> nn.Module:
    return _attacking(loader(), loader(3))


class WithoutGradients:
    """Reads a loader under torch.no_grad()."""

    def __init__(self, batches: DataLoader):
        self.batches = batches

    def __iter__(self):
        return loader_loops.without_gradients(self.batches)


@loop
def attacking_without_gradients() -> nn.Module:
    return _attacking(loader(), WithoutGradients(loader(3)))


@loop
def evaluating_on_its_own() -> nn.Module:
    """Without a loader: evaluations between `eval()` and `train()`, after two steps of three."""
    model, optimizer = parts()
    for number in range(1, 13):
        optimizer.zero_grad()
        lower(model, (torch.randn(4, 8), torch.randn(4, 1)))
        optimizer.step()
        if number % 4 == 0:
            model.eval()
            with torch.no_grad():
                model(torch.randn(4, 8))
            time.sleep(3)
            if number == 8:  # the best so far
                torch.save({}, io.BytesIO())
            model.train()
    return model


@loop
def asking_itself() -> nn.Module:
    """A forward pass in the mode of evaluation is a part of every step, whose result is trained on."""
    model, optimizer = parts()
    for inputs, _ in loader():
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            targets = model(inputs)
        model.train()
        lower(model, (inputs, targets.round()))
        optimizer.step()
    return model


@loop
def one_batch() -> nn.Module:
    """A batch that is kept and trained on again and again."""
    model, optimizer = parts()
    batch = next(iter(loader()))
    for _ in range(100):
        optimizer.zero_grad()
        lower(model, batch)
        optimizer.step()
    return model


@loop
def without_a_loader() -> nn.Module:
    """Batches of its own, two of them a step."""
    model, optimizer = parts()
    for number in range(12):
        lower(model, (torch.randn(4, 8), torch.randn(4, 1)))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop
def two_loaders() -> nn.Module:
    """Labelled and unlabelled batches side by side; one loader is a copy."""
    model, optimizer = parts()
    labelled = loader()
    for batch, (others, _) in zip(labelled, copy.deepcopy(labelled)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1]) + 0.1 * model(others).square().mean()
        loss.backward()
        optimizer.step()
    return model


@loop
def retrying() -> nn.Module:
    """A step that fails, as where a GPU's memory is full, is left out."""
    model, optimizer = parts()
    for number, batch in enumerate(loader()):
        optimizer.zero_grad()
        try:
            if number == 2:
                optimizer.step(lambda: 1 / 0)
            lower(model, batch if number != 4 else (batch[0][:, :3], batch[1]))
            optimizer.step()
        except (RuntimeError, ZeroDivisionError):
            continue
    return model


@loop
def beginning_anew() -> nn.Module:
    """A step that fails, then another optimizer, as where a cell of a notebook runs again; and after it one that fails at once."""
    model, optimizer = parts()
    for number, batch in enumerate(itertools.chain(loader(), loader())):
        optimizer.zero_grad()
        try:
            if number in (2, 7, 8):
                optimizer.step(lambda: 1 / 0)
            lower(model, batch)
            optimizer.step()
        except ZeroDivisionError:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model


@loop
def mixed_precision() -> nn.Module:
    model, optimizer = parts()
    for batch in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(batch[0]).float(), batch[1])
        loss.backward()
        optimizer.step()
    return model


class Frozen(nn.Module):
    """A part of it is set to evaluate in each forward pass."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        return self.last(self.norm(inputs))


@loop
def compiled_whole() -> nn.Module:
    """What torch.compile may not leave uncompiled."""
    model = Frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    for batch in loader():
        optimizer.zero_grad()
        lower(fast, batch)
        optimizer.step()
    return model


@loop
def compiled() -> nn.Module:
    """The model, and the optimizer's step."""
    model, optimizer = parts()
    fast = torch.compile(model, backend="eager")
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for batch in loader():
        optimizer.zero_grad()
        lower(fast, batch)
        step()
    return model


def digest(run: Callable[[], nn.Module]) -> str:
    torch.manual_seed(0)
    torch._dynamo.reset()
    values = [value.detach().numpy().tobytes() for value in run().state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    without = {name: digest(run) for name, run in LOOPS.items()}
    digests = {}
    # each loop adds a layer of hooks, and torch.compile has a limit to how many it inlines
    for name, run in sorted(LOOPS.items(), key=lambda named: not named[0].startswith("compiled")):
        (folder / name).mkdir()
        torch_hooks.when_imported(folder / name)
        digests[name] = without[name], digest(run)
        observer = torch_hooks.current()
        assert observer is not None, name
        observer.close()
        torch_hooks.end("the next loop has an observer of its own")
    print(json.dumps(digests))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

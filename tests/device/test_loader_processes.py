"""Loader processes beside a GPU: their ring is pinned in place, and a slot is written to again only when the device has fetched from it."""

from __future__ import annotations

import gc
import time
from typing import ClassVar

import pytest
import torch
from training.data.loader_processes import OF_A_GPU, LoaderProcesses
from training.data.loaders import collate_items
from training.data.threads import AHEAD
from training.runtime import accelerator

from tests.device.stand_in import no_synchronisation
from tests.device.stand_in.pinned import Runtime
from tests.entrypoints.numbered_images import Numbers, batches_of

COUNT = 40


def loader(gpu: torch.device, *, zero_copy: bool = True) -> LoaderProcesses:
    return LoaderProcesses(Numbers(), batches_of(*[4] * COUNT), collate_items, 1, pin_for=gpu, zero_copy=zero_copy)


def test_every_batch_is_pinned_and_the_ring_as_long_as_it_is_there(gpu):
    before = {*Runtime.registered}
    made = loader(gpu)
    for images, labels in made:
        assert images.is_pinned() and labels.is_pinned()
    [begin] = {*Runtime.registered} - before
    assert images.untyped_storage().data_ptr() == begin
    del images, labels, made
    gc.collect()
    assert {*Runtime.registered} == before


def test_a_batch_that_is_larger_than_a_slot_is_pinned_too(gpu):
    made = LoaderProcesses(Numbers(), batches_of(2, 2, 2, 2, 40, 2), collate_items, 1, pin_for=gpu, zero_copy=True)
    found = [(len(images), images.is_pinned() and labels.is_pinned()) for images, labels in made]
    assert found == [(2, True)] * 4 + [(40, True), (2, True)]


def test_batches_that_are_kept_are_pinned_copies(gpu):
    before = {*Runtime.registered}
    made = [*loader(gpu, zero_copy=False)]
    assert all(values.is_pinned() for batch in made for values in batch)
    assert len({images.untyped_storage().data_ptr() for images, _ in made}) == COUNT and {*Runtime.registered} == before


def test_a_driver_that_refuses_is_quoted(gpu):
    memory = torch.zeros(64, dtype=torch.uint8)
    undo = accelerator.pin_in_place(memory, gpu)
    assert memory.is_pinned()
    with pytest.raises(RuntimeError, match="error 712"):
        accelerator.pin_in_place(memory, gpu)
    undo()
    assert not memory.is_pinned()


class Behind:
    """Events of a device that comes to them only where the host waits, as torch.gpu.Event; `reached` lists them."""

    reached: ClassVar[list[Behind]] = []

    def __init__(self, blocking: bool = False):
        assert blocking, "a waiting thread takes no core from those that decode"

    def record(self) -> None: ...

    def query(self) -> bool:
        return self in self.reached

    def synchronize(self) -> None:
        self.reached.append(self)


def test_no_slot_is_written_to_that_a_late_device_has_yet_to_fetch(gpu, monkeypatch):
    monkeypatch.setattr(torch.gpu, "Event", Behind)
    monkeypatch.setattr(Behind, "reached", [])
    copied: list[tuple[torch.Tensor, int]] = []
    for number, (images, _) in enumerate(loader(gpu)):
        if number > AHEAD:  # those before came by themselves
            copied.append((images, 4 * number))
        time.sleep(0.002)
        yet_to_fetch = copied[len(Behind.reached) :]  # events are reached in their order
        assert [int(images[0, 0, 0, 0]) for images, _ in yet_to_fetch] == [value for _, value in yet_to_fetch]
    slots = AHEAD + 1 + OF_A_GPU
    assert len(copied) - slots <= len(Behind.reached) < len(copied)
    assert len({images.data_ptr() for images, _ in copied}) == slots


def test_a_device_that_keeps_up_is_never_waited_for(gpu):
    made = loader(gpu)
    with no_synchronisation():
        assert sum(1 for _ in made) == COUNT

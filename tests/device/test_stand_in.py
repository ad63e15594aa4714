"""The stand-in GPU is as strict as CUDA: devices do not mix, and every wait of the host is seen."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training.runtime import accelerator
from training.tasks import losses

from tests.device.stand_in import HiddenSynchronisation, no_synchronisation, observed, streams
from tests.device.stand_in.streams import StreamRace

MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def values(gpu: torch.device) -> torch.Tensor:
    return torch.arange(12.0, device=gpu).view(4, 3)


def test_a_tensor_holds_values_and_keeps_its_device_through_views_and_copies(gpu, values):
    view = values[1:3].T
    view += 100
    assert values.cpu().tolist() == [[0, 1, 2], [103, 104, 105], [106, 107, 108], [9, 10, 11]]
    for made in (
        view,
        values.clone(),
        copy.deepcopy(values),
        values.to(torch.bfloat16),
        torch.zeros_like(values),
        values.new_ones(2),
    ):
        assert made.device == gpu and type(made) is torch.Tensor
    saved = io.BytesIO()
    torch.save({"values": values}, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, map_location="cpu", weights_only=True)["values"], values.cpu())
    resized = torch.empty(0, device=gpu)
    torch.add(values, 1, out=resized)
    assert resized.cpu().equal(values.cpu() + 1)


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu: gpu + torch.ones(3),
        lambda gpu: gpu @ torch.ones(3, 2),
        lambda gpu: torch.cat([gpu, torch.ones(1, 3)]),
        lambda gpu: torch.stack([gpu[0, 0], torch.tensor(1.0)]),
        lambda gpu: gpu.add_(torch.ones(3)),
        lambda gpu: gpu.__setitem__(gpu.argmax(0), torch.ones(3, 3)),
        lambda gpu: F.cross_entropy(gpu, torch.zeros(4, dtype=torch.long)),
        lambda gpu: F.layer_norm(gpu, (3,), torch.ones(3)),
        lambda gpu: nn.Linear(3, 2)(gpu),
        lambda gpu: torch.where(torch.ones(3, dtype=torch.bool), gpu, gpu),
    ],
)  # fmt: skip
def test_a_tensor_of_the_cpu_does_not_mix_with_it(values, mix: Callable[[torch.Tensor], object]):
    with pytest.raises(RuntimeError, match=MIXED):
        mix(values)


def test_a_number_of_the_cpu_does(values):
    assert (values * torch.tensor(2.0)).cpu().sum() == 132


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_wants_its_step_on_the_device(gpu, fused: bool):
    layer = nn.Linear(3, 2).to(gpu)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    for _ in range(2):
        layer(torch.ones(1, 3, device=gpu)).sum().backward()
        optimizer.step()
    for state in optimizer.state.values():
        assert state["step"].device.type == ("gpu" if fused else "cpu")
        state["step"] = state["step"].cpu()
    if fused:
        with pytest.raises(RuntimeError, match=MIXED):
            optimizer.step()


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda gpu: gpu.sum().item(),
    "bool": lambda gpu: bool(gpu.sum() > 0),
    "tolist": lambda gpu: gpu.tolist(),
    "cpu": lambda gpu: gpu.cpu(),
    "copy to pageable memory": lambda gpu: torch.empty(4, 3).copy_(gpu, non_blocking=True),
    "copy from pageable memory": lambda gpu: torch.ones(3).to(gpu.device, non_blocking=True),
    "blocking copy from pinned memory": lambda gpu: torch.ones(3).pin_memory().to(gpu.device),
    "copy from pageable memory by to()": lambda gpu: torch.ones(3).to("gpu", non_blocking=True),
    "tensor": lambda gpu: torch.tensor([1, 2], device=gpu.device),
    "list as index": lambda gpu: gpu[[0, 2]],
    "tensor of the CPU as index": lambda gpu: gpu[torch.tensor([0, 2])],
    "mask as index": lambda gpu: gpu[gpu > 2],
    "nonzero": lambda gpu: gpu.nonzero(),
    "where": lambda gpu: torch.where(gpu > 2),
    "masked_select": lambda gpu: gpu.masked_select(gpu > 2),
    "unique": lambda gpu: gpu.unique(),
    "equal": lambda gpu: torch.equal(gpu, gpu),
    "bincount": lambda gpu: gpu[0].long().bincount(),
    "event": lambda gpu: torch.gpu.Event().synchronize(),
    "stream": lambda gpu: torch.gpu.Stream().synchronize(),
    "device": lambda gpu: torch.gpu.synchronize(),
}  # fmt: skip

FREE: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda gpu: (gpu * 2).softmax(1).sum(),
    "factories": lambda gpu: torch.full((3,), 2.0, device=gpu.device) + torch.zeros(3, device=gpu.device),
    "copy from pinned memory": lambda gpu: torch.ones(3).pin_memory().to(gpu.device, non_blocking=True),
    "copy of a part of pinned memory": lambda gpu: torch.empty(4, 3, pin_memory=True)[1:].to(gpu.device, non_blocking=True),
    "copy to pinned memory": lambda gpu: torch.empty(4, 3, pin_memory=True).copy_(gpu, non_blocking=True),
    "own tensor as index": lambda gpu: gpu[gpu.argmax(0)],
    "number as index": lambda gpu: gpu[1:, 2],
    "fill by a mask": lambda gpu: gpu.__setitem__(gpu > 2, 0.0),
    "number of the host": lambda gpu: gpu * 0.5,
}  # fmt: skip


@pytest.mark.parametrize("call", WAITING)
def test_what_waits_for_the_device_is_seen(values, call: str):
    with observed() as seen:
        WAITING[call](values)
    assert seen
    with pytest.raises(HiddenSynchronisation), no_synchronisation():
        WAITING[call](values)


@pytest.mark.parametrize("call", FREE)
def test_what_does_not_wait_is_free(values, call: str):
    with no_synchronisation():
        FREE[call](values)


@pytest.mark.parametrize("wait", [lambda: torch.gpu.synchronize(), lambda: torch.gpu.Event().synchronize()])
def test_a_copy_to_the_host_is_there_once_the_host_has_waited(values, wait: Callable[[], None]):
    copied = values.to("cpu", non_blocking=True)
    assert copied.is_pinned() and not torch.equal(copied, torch.arange(12.0).view(4, 3))
    wait()
    assert torch.equal(copied, torch.arange(12.0).view(4, 3))


def test_a_hidden_wait_is_named_by_the_products_line(gpu, monkeypatch):
    logits, labels = torch.randn(2, 3, device=gpu), torch.zeros(2, dtype=torch.long, device=gpu)
    monkeypatch.setattr(F, "cross_entropy", lambda logits, *_, **__: torch.tensor(logits.sum().item()))
    with (
        pytest.raises(HiddenSynchronisation, match=r"training/tasks/losses\.py:\d+: .*waits for the device"),
        no_synchronisation(),
    ):
        losses.label_cross_entropy(logits, labels)
    with no_synchronisation(outside=["label_cross_entropy"]):
        losses.label_cross_entropy(logits, labels)


def test_a_wait_of_the_backward_pass_is_seen_and_one_of_another_thread_is_not(values):
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(_, tensor):
            return tensor * 2

        @staticmethod
        def backward(_, gradient):
            return gradient * gradient.sum().item()

    made = Waits.apply(values.requires_grad_())
    with pytest.raises(HiddenSynchronisation, match="^backward"), no_synchronisation():
        made.sum().backward()

    failed = []

    def in_thread() -> None:
        try:
            accelerator.synchronize(values.device)
        except HiddenSynchronisation as error:
            failed.append(error)

    with no_synchronisation():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    assert not failed


def test_autocast_casts_as_on_cuda(gpu):
    layer, images = nn.Conv2d(3, 4, 3).to(gpu), torch.randn(2, 3, 5, 5, device=gpu)
    query = torch.randn(1, 2, 4, 8, device=gpu)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("gpu", dtype):
            logits = layer(images).mean((2, 3))
            assert logits.dtype == dtype and (logits @ logits.T).dtype == dtype
            assert F.scaled_dot_product_attention(query, query, query).dtype == dtype
            assert F.softmax(logits, 1).dtype == F.log_softmax(logits, 1).dtype == torch.float32
            assert F.layer_norm(logits, (4,)).dtype == torch.float32
            loss = F.cross_entropy(logits, torch.zeros(2, dtype=torch.long, device=gpu))
            assert loss.dtype == torch.float32
        loss.backward()
        assert layer.weight.grad.dtype == torch.float32
    assert layer(images).dtype == torch.float32


def test_its_random_numbers_are_its_own(gpu):
    torch.manual_seed(1)
    first, state = torch.rand(3, device=gpu).cpu(), torch.gpu.get_rng_state()
    of_host = torch.rand(3)
    second = torch.rand(3, device=gpu).cpu()
    torch.gpu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=gpu).cpu(), second)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), of_host) and torch.equal(torch.rand(3, device=gpu).cpu(), first)


def test_its_memory_is_counted(gpu):
    before = torch.gpu.memory_allocated()
    kept = torch.zeros(1000, device=gpu)
    view = kept[:10]
    assert torch.gpu.memory_allocated() == before + 4000
    del kept
    assert torch.gpu.memory_allocated() == before + 4000, "a view keeps it"
    del view
    assert torch.gpu.memory_allocated() == before
    assert torch.gpu.max_memory_allocated() >= before + 4000


def test_events_tell_the_time_between_them(gpu):
    begin, end, untimed = torch.gpu.Event(enable_timing=True), torch.gpu.Event(enable_timing=True), torch.gpu.Event()
    begin.record()
    with pytest.raises(RuntimeError, match="must be recorded"):
        begin.elapsed_time(end)
    end.record()
    assert 0 < begin.elapsed_time(end) < 1000
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        begin.elapsed_time(untimed)


def test_a_stream_is_current_in_its_thread_alone_and_lists_what_it_was_asked(gpu):
    stream, event, elsewhere = torch.gpu.Stream(), torch.gpu.Event(), []
    with torch.gpu.stream(stream):
        thread = threading.Thread(target=lambda: elsewhere.append(torch.gpu.current_stream()))
        thread.start()
        thread.join()
        assert torch.gpu.current_stream() is stream
        event.record()
    stream.wait_event(event)
    stream.wait_stream(torch.gpu.default_stream())
    torch.zeros(1, device=gpu).record_stream(stream)
    assert elsewhere == [torch.gpu.default_stream()] and torch.gpu.current_stream() is elsewhere[0]
    assert stream.calls == ["record_event", "wait_event", "wait_stream"]


# -- the order of streams ----------------------------------------------------------------------------------------------


def test_a_stream_that_does_not_wait_for_what_it_reads_is_found(values):
    side, own = torch.gpu.Stream(values.device), torch.gpu.current_stream()
    with torch.gpu.stream(side), pytest.raises(StreamRace, match="add.* reads what stream .* writes"):
        values + 1
    side.wait_stream(own)
    with torch.gpu.stream(side):
        made = values + 1
    with pytest.raises(StreamRace, match="sum.* reads what stream"):
        made.sum()
    with pytest.raises(StreamRace, match="writes what stream .* uses"):
        values.zero_()  # the side stream may still read it
    done = side.record_event()
    own.wait_event(done)
    assert made.sum().item() == 78 and values.zero_().sum().item() == 0


@pytest.mark.parametrize("wait", ["synchronize", "query", "device", "item"])
def test_what_the_host_has_waited_for_is_done_for_every_stream(values, wait):
    side = torch.gpu.Stream(values.device)
    if wait == "device":
        torch.gpu.synchronize()
    elif wait == "item":
        values.sum().item()
    else:
        getattr(torch.gpu.current_stream().record_event(), wait)()
    with torch.gpu.stream(side):
        assert (values + 1).sum().item() == 78


@pytest.mark.parametrize("kept", ["by record_stream", "by an order", "not"])
def test_memory_that_goes_before_a_stream_has_used_it_is_found(values, kept):
    side, own = torch.gpu.Stream(values.device), torch.gpu.current_stream()
    side.wait_stream(own)
    with torch.gpu.stream(side):
        made = values + 1
    own.wait_stream(side)
    made.sum()
    if kept == "by record_stream":
        made.record_stream(own)
    elif kept == "by an order":
        side.wait_stream(own)
    del made
    found, streams.unsafe[:] = [*streams.unsafe], []
    assert [text.split(" is freed")[0] for text in found] == (
        [f"memory of stream {side.queue.number}"] if kept == "not" else []
    )


def test_events_and_who_waits_are_as_late_as_the_work_before_them(gpu, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(
        streams,
        "time",
        SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)),
    )
    streams.forget_work()
    begin, end, side_end = (torch.gpu.Event(enable_timing=True) for _ in range(3))
    side = torch.gpu.Stream(gpu)
    begin.record()
    torch.gpu._sleep(2_000_000_000)
    end.record()
    side.wait_event(end)
    with torch.gpu.stream(side):
        torch.gpu._sleep(500_000_000)
        side_end.record()
    assert not end.query() and not side.query() and now == [0.0]
    end.synchronize()
    assert now == [2.0] and end.query() and not side_end.query()
    assert (begin.elapsed_time(end), begin.elapsed_time(side_end)) == (2000.0, 2500.0)
    torch.gpu.synchronize()
    assert now == [2.5]
    begin.record()
    torch.gpu._sleep(1_000_000_000)
    assert torch.ones(1, device=gpu).item() == 1 and now == [3.5]
    streams.forget_work()


def test_a_view_is_no_kernel(values):
    with torch.gpu.stream(torch.gpu.Stream(values.device)):
        assert values.view(-1).shape == (12,) and values.t().shape == (3, 4)

"""The GPU's clock, on a stand-in of torch.cuda: which GPU and which stream an event lies on, and what a step is made of by them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from launcher_observer.setups import Loader
from launcher_observer.step_clock import StepClock
from launcher_observer.timers import GpuTimer


class Event:
    """Of one GPU, as torch.cuda.Event: it takes the one of the first stream that it is recorded in."""

    def __init__(self, cuda: Cuda):
        self.cuda, self.stream = cuda, None

    def record(self, stream: tuple[int, str] | None = None) -> None:
        stream = self.cuda.current_stream() if stream is None else stream
        assert self.stream is None or self.stream[0] == stream[0], (
            "Event device does not match recording stream's device."
        )
        self.stream, self.time = stream, self.cuda.reached(stream)

    def query(self) -> bool:
        assert not self.cuda.is_current_stream_capturing(), "operation not permitted when stream is capturing"
        return True

    def elapsed_time(self, end: Event) -> float:
        assert self.stream is not None and end.stream is not None and self.stream[0] == end.stream[0]
        return (end.time - self.time) * 1000


class Cuda:
    """Two GPUs with their streams, whose work ends when it ends. The host runs ahead."""

    def __init__(self) -> None:
        self.now, self.ends = 0.0, {}
        self.current, self.streams, self.capturing = 0, {0: "main", 1: "main"}, set()

    def current_device(self) -> int:
        return self.current

    def current_stream(self, device: SimpleNamespace | None = None) -> tuple[int, str]:
        index = self.current if device is None else device.index
        return index, self.streams[index]

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream() in self.capturing

    def device(self, device: SimpleNamespace) -> Device:
        return Device(self, device.index)

    def Event(self, enable_timing: bool = False) -> Event:
        assert enable_timing
        return Event(self)

    def reached(self, stream: tuple[int, str]) -> float:
        """When a stream has done all that was launched in it, as of now."""
        return max(self.ends.get(stream, 0.0), self.now)

    def launch(self, seconds: float) -> None:
        self.now += 0.001
        self.ends[self.current_stream()] = self.reached(self.current_stream()) + seconds


class Device:
    """Makes another GPU the current one for a while."""

    def __init__(self, cuda: Cuda, index: int):
        self.cuda, self.index = cuda, index

    def __enter__(self) -> None:
        self.before, self.cuda.current = self.cuda.current, self.index

    def __exit__(self, *_: object) -> None:
        self.cuda.current = self.before


SECOND = SimpleNamespace(index=1)


def test_events_lie_on_the_gpu_that_trains_whichever_is_the_current_one():
    cuda = Cuda()
    timer = GpuTimer(cuda, SECOND)
    first = timer.now()
    cuda.current = 1  # set_device in the middle of a run
    cuda.launch(0.25)
    second = timer.now()
    cuda.current = 0
    third = timer.now()
    assert {moment.event.stream for moment in (first, second, third)} == {(1, "main")}
    assert timer.seconds(first, second) == pytest.approx(0.251) and timer.seconds(second, third) == 0
    assert timer.has_completed(third)
    timer.release(third)
    assert timer.now() in (first, second), "used again"


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("captured", [0, 1])
def test_no_event_becomes_part_of_a_graph(current, captured):
    cuda = Cuda()
    cuda.current, cuda.capturing = current, {(captured, "main")}
    timer = GpuTimer(cuda, SECOND)
    if current == 1 and captured == 0:  # neither this thread's work nor the training's
        assert timer.now() is not None
    else:
        assert timer.now() is None and not timer.has_completed(None)
    assert cuda.current == current


def test_a_device_without_streams_is_measured_too():
    cuda = Cuda()
    timer = GpuTimer(SimpleNamespace(Event=cuda.Event), SimpleNamespace(index=0))
    begin = timer.now()
    cuda.launch(0.5)
    assert timer.seconds(begin, timer.now()) == pytest.approx(0.501)
    assert timer.stream_of(begin) is None and timer.has_completed(begin)


FORWARD, BACKWARD, OPTIMIZER, COPY = 0.030, 0.060, 0.010, 0.005
"""Seconds that they take on the GPU."""


def test_a_copy_in_a_stream_of_its_own_leaves_the_forward_pass_as_long_as_it_is():
    """timm's PrefetchLoader and apex's: the next batch is copied beside the training, and the host runs up to 0.2 s ahead."""
    cuda = Cuda()
    timer = GpuTimer(cuda, SimpleNamespace(index=0))
    steps = []
    clock = StepClock(steps.append, lambda *_: None, lambda _: None)
    clock.use(timer)
    loading = Loader(1, ("train.py", 1, "", None), {"batch_size": 8}).next_pass()

    def happens(act, *arguments):
        clock.now, clock.moment = cuda.now, timer.now()
        act(*arguments)

    def next_batch():
        happens(clock.batch_asked, loading, True, 0.0)
        cuda.now += 0.001
        happens(clock.batch_came, loading, 8, 0.001)

    next_batch()
    for _ in range(12):
        main, side = (0, "main"), (0, "side")
        cuda.ends[main] = max(cuda.ends.get(main, 0.0), cuda.ends.get(side, 0.0))  # wait_stream
        cuda.now = max(cuda.now, cuda.ends[main] - 0.2)
        next_batch()
        cuda.streams[0] = "side"
        happens(clock.part_begins)
        cuda.launch(COPY)
        happens(clock.copy_ends, "forward")
        cuda.streams[0] = "main"
        cuda.launch(FORWARD)
        happens(clock.backward_begins)
        cuda.launch(BACKWARD)
        happens(clock.backward_ends)
        happens(clock.optimizer_begins, 1)
        cuda.launch(OPTIMIZER)
        happens(clock.optimizer_ends, 1, 0.0)
    last = steps[-1]
    phases = {name: timer.seconds(begin, end) for name, begin, end in last.phases}
    assert timer.seconds(last.begin, last.end) == pytest.approx(FORWARD + BACKWARD + OPTIMIZER, abs=0.002)
    assert phases == {
        "host_to_device": pytest.approx(COPY, abs=0.002),
        "forward": pytest.approx(FORWARD, abs=0.002),
        "backward": pytest.approx(BACKWARD, abs=0.002),
        "optimizer": pytest.approx(OPTIMIZER, abs=0.002),
    }

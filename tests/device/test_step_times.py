"""A step's seconds are the device's own: with a host that is far ahead of it, across checkpoints and evaluations, on clocks that only
work and waits move."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training.distributed.world import World
from training.engine import loop
from training.engine.checkpoints import Checkpoints
from training.engine.run import open_run
from training.engine.state import prepare
from training.measure import timeline
from training.measure.timeline import Timeline
from training.runtime import accelerator
from training.runtime.environment import Environment
from training.runtime.reporting import Reporter
from training.settings.scripts import TrainingSettings
from training.tasks.classification import Classification

from tests.device.stand_in import streams
from tests.entrypoints.test_loop import StopsAt, Trained, network, run

HOST, FORWARD, TEACHER = 0.005, 0.06, 0.04
"""Seconds of a step: the host's work, and what the device does in two phases."""

DEVICE = FORWARD + TEACHER
"""Seconds of a step, which the device limits."""

CHECKPOINT, EVALUATION = 0.2, 0.5
"""Seconds of the host's work in a pause."""

LINE = 0.02
"""Seconds that the host takes for a metric line."""


class Clock:
    """The host's clock, which moves when the host works or waits, and the device's with it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """In place of `time`."""
    clock = Clock()
    for module in (streams, timeline, loop):
        monkeypatch.setattr(module, "time", clock)
    streams.forget_work()
    yield clock
    streams.forget_work()


def work(seconds: float) -> None:
    """The device is busy."""
    torch.gpu._sleep(round(seconds * 1e9))


def ahead(clock: Clock) -> type[Classification]:
    """A task whose host is far ahead of the device."""

    class Ahead(Classification):
        def __call__(self, batch: Any) -> Iterator[Any]:
            clock.sleep(HOST)
            with self.timeline.phase("teacher_forward"):
                work(TEACHER)
            [losses] = super().__call__(batch)
            with self.timeline.phase("student_forward"):
                work(FORWARD)
            yield losses

    return Ahead


def run_on(gpu: torch.device, folder: Path, **values: Any) -> Trained:
    """As `run`, by one process on the stand-in GPU."""
    return run(folder, world=World(0, 1, 0, gpu, "none", "test"), precision="fp32", num_workers=0, **values)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data/timeline-0.jsonl").read_text().splitlines()]


def test_windows_with_checkpoints_and_ends_of_epochs_have_the_devices_step_and_the_pauses_are_no_longer(
    gpu: torch.device, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save = Checkpoints.save

    def slow_save(*given: Any, **named: Any) -> None:
        clock.sleep(CHECKPOINT)
        save(*given, **named)

    monkeypatch.setattr(Checkpoints, "save", slow_save)
    trained = run_on(
        gpu,
        tmp_path,
        plain=True,
        task=ahead(clock),
        begin_evaluation=lambda: clock.sleep(EVALUATION),
        epochs=9,  # of five steps
        evaluate_every=3,
        log_every=10,
        checkpoint_every=4,
    )
    found = lines(tmp_path)
    windows = [line for line in found if line["kind"] == "steps"]
    assert [(line["step"], line["extra"]["steps"]) for line in windows] == [
        (10, 10),
        (20, 10),
        (30, 10),
        (40, 10),
        (45, 5),
    ]
    for line in windows:
        seconds, extra = line["seconds"], line["extra"]
        assert DEVICE <= seconds["step"] <= DEVICE + HOST + 1e-6, "after a pause the device waits for the host"
        assert seconds["teacher_forward"] == pytest.approx(TEACHER) and seconds["student_forward"] == pytest.approx(
            FORWARD
        )
        assert sum(value for name, value in seconds.items() if name != "step") <= seconds["step"]
        assert extra["slowest_step"] == pytest.approx(DEVICE + HOST)
        assert extra["images_per_second"] == pytest.approx(8 / seconds["step"])
    assert [line["images/s"] for line in trained.metrics if "loss" in line] == pytest.approx(
        [8 / line["seconds"]["step"] for line in windows], rel=1e-5
    )
    pauses = [line for line in found if line["kind"] in ("checkpoint", "evaluate")]
    assert {line["step"] for line in pauses} == {*range(4, 45, 4), 15, 30, 45}
    for line in pauses:
        assert line["seconds"] == pytest.approx(CHECKPOINT if line["kind"] == "checkpoint" else EVALUATION)
    steps = sum(line["extra"]["steps"] * line["seconds"]["step"] for line in windows)
    assert steps + sum(line["seconds"] for line in pauses) == pytest.approx(clock.now, rel=1e-5), "nothing is lost"


@pytest.mark.parametrize("late", [False, True])
def test_the_device_goes_on_while_a_late_metric_line_is_read(
    gpu: torch.device, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
):
    printed, report = [], Reporter.metrics

    def slow_report(reporter: Reporter, epoch: int, epochs: int, step: int, *rest: Any) -> None:
        printed.append((step, clock.now))
        clock.sleep(LINE)
        report(reporter, epoch, epochs, step, *rest)

    monkeypatch.setattr(Reporter, "metrics", slow_report)
    trained = run_on(
        gpu,
        tmp_path,
        plain=True,
        task=ahead(clock),
        epochs=2,  # of five steps
        evaluate_every=2,
        log_every=2,
        checkpoint_every=4,
        late_metrics=late,
    )
    idle = {step: HOST for step in (2, 6, 10)}  # at the start, and after a checkpoint, which waits for the device
    idle |= {step: 0.0 if late else LINE + HOST for step in (4, 8)}
    found = [line for line in lines(tmp_path) if line["kind"] == "steps"]
    windows = {line["step"]: line["seconds"]["step"] for line in found}
    assert windows == pytest.approx({step: DEVICE + seconds / 2 for step, seconds in idle.items()})
    if not late:  # this clock moves a process's CPU time while it waits, as CUDA does by default
        assert [line["extra"]["cpu_seconds"] for line in found] == pytest.approx([*windows.values()])
    in_order = [(line["step"], "loss" not in line) for line in trained.metrics]
    assert in_order == sorted(in_order), "a step's losses come before its checkpoint and its evaluation"
    assert [step for step, _ in in_order] == [step for step, _ in printed]
    assert dict(reversed(printed))[2] == pytest.approx(2 * DEVICE + HOST), "as soon as the device has done it"


def test_late_lines_come_before_a_stop_and_at_an_epochs_end(
    gpu: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Five steps make an epoch, without a checkpoint or an evaluation after the first."""
    stopped = run_on(
        gpu,
        tmp_path,
        task=StopsAt,  # the seventh
        evaluate_every=3,
        checkpoint_every=100,
        log_every=5,
        late_metrics=True,
    )
    assert [line["step"] for line in stopped.metrics if "loss" in line] == [5, 7]
    windows = [line for line in lines(tmp_path) if line["kind"] == "steps"]
    assert [(line["step"], line["epoch"], line["extra"]["steps"]) for line in windows] == [(5, 1, 5), (7, 2, 2)]
    said = capsys.readouterr().out
    assert said.index("epoch 2/3 step 7/15 loss") < said.index("stopped after step 7 of 15")


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_that_is_not_finite_ends_a_run_with_late_lines_one_step_later(
    gpu: torch.device, tmp_path: Path, late: bool
):
    seen = []

    class Diverges(Classification):
        def __call__(self, batch: Any) -> Iterator[Any]:
            [losses] = super().__call__(batch)
            seen.append(None)
            yield {**losses, "loss": losses["loss"] * (float("nan") if len(seen) == 4 else 1.0)}

    with pytest.raises(FloatingPointError, match="the loss is nan at step 4"):
        run_on(
            gpu,
            tmp_path,
            task=Diverges,
            log_every=1,
            late_metrics=late,
        )
    assert len(seen) == 4 + late
    reported = [line["step"] for line in lines(tmp_path) if line["kind"] == "steps"]
    assert reported == [1, 2, 3], "the lines before it are there"


def test_work_that_an_evaluation_finds_on_the_device_is_no_part_of_it(gpu: torch.device, clock: Clock, tmp_path: Path):
    world, settings = World(0, 1, 0, gpu, "none", "test"), TrainingSettings(precision="fp32", num_workers=0)
    _, made = open_run(
        settings, Environment("algo-1", tmp_path, tmp_path / "data", tmp_path / "failure", {}, None), world
    )
    state = prepare(network(True), settings, 1, world)

    def evaluate(_: torch.nn.Module) -> dict[str, float]:
        clock.sleep(EVALUATION)
        accelerator.synchronize(gpu)
        return {"validation_loss": 0.0}

    work(10 * DEVICE)
    loop._evaluate(evaluate, [state], (1, 1, 1, 1), made)
    assert lines(tmp_path)[-1]["seconds"] == pytest.approx(EVALUATION)
    assert clock.now == pytest.approx(10 * DEVICE + EVALUATION)


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_window_has_the_work_of_its_own_steps_whether_the_host_waits_before_or_after_the_last(
    gpu: torch.device, clock: Clock, waits_first: bool
):
    """A probe waits after its last step, and labelling when it reads the window."""
    times = Timeline(gpu)
    times.start()
    for _ in range(3):
        for part in range(4):
            with times.phase("data_wait"):
                clock.sleep(HOST)
            with times.phase("teacher_forward"):
                work(DEVICE)
            if waits_first and part == 3:
                accelerator.synchronize(gpu)
            times.step()
        window = times.window()
        assert window.step == pytest.approx(DEVICE + HOST / 4)
        assert window.phases == pytest.approx({"data_wait": HOST, "teacher_forward": DEVICE})
        assert window.slowest_step == pytest.approx(DEVICE + HOST)


def test_a_step_includes_what_the_device_waits_for_the_host(gpu: torch.device, clock: Clock):
    times = Timeline(gpu)
    times.start()
    for _ in range(3):
        with times.phase("data_wait"):
            clock.sleep(3 * DEVICE)
        with times.phase("student_forward"):
            work(DEVICE)
        times.step()
    window = times.window()
    assert 3 * window.step == pytest.approx(3 * 3 * DEVICE + DEVICE), (
        "the device works while the next batch is waited for"
    )
    assert window.phases == pytest.approx({"data_wait": 3 * DEVICE, "student_forward": DEVICE})

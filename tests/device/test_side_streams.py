"""What `copy_stream` and `teacher_stream` run beside a step, and that the stand-in GPU would notice a missing order."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from training.engine.memory import Footprint
from training.runtime import accelerator
from training.runtime.accelerator import COPIES, TEACHER, SideStream
from training.settings.distillation import DistillationSettings
from training.tasks.distillation import with_teacher
from training.teacher import frozen

from tests.device.runs import CLASSES, CPU, SIDE, Runs
from tests.device.stand_in import streams
from tests.device.stand_in.streams import StreamRace

BOTH = {"copy_stream": True, "teacher_stream": True}
OWN = "the model's"

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("train_kd", {}),
    "copies": ("train_kd", {"copy_stream": True}),
    "both": ("train_kd", BOTH),
    "copies of a classifier": ("train_classifier", {"copy_stream": True}),
    "both of a segmenter": ("train_segmentation", {**BOTH, "teacher": "pixel_teacher", "hard_label_weight": 0.5}),
}


@pytest.fixture
def planted() -> Iterator[None]:
    """The test ends a run in the middle, so memory is freed in any order."""
    yield
    gc.collect()
    streams.unsafe.clear()


@contextmanager
def by_stream(gpu: torch.device) -> Iterator[dict[str, list[int]]]:
    """By stream, of each kernel and copy, how many of the model's own kernels it was given before are not known to be done."""
    lag: dict[str, list[int]] = defaultdict(list)
    submit = streams.submitted

    def noted(what: str, *used: Any) -> None:
        queue, model = streams.current(), torch.gpu.default_stream().queue
        known = {accelerator.side_stream(gpu, name).queue: name for name in (COPIES, TEACHER)}
        if queue is model or queue in known:
            given = model.now().get(model.number, 0)
            lag[known.get(queue, OWN)].append(given - queue.now().get(model.number, 0))
        submit(what, *used)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "submitted", noted)
        yield lag


@pytest.mark.parametrize("case", RUNS)
def test_what_the_settings_name_runs_beside_the_step_before_and_no_earlier_one(runs: Runs, gpu, case):
    script, values = RUNS[case]
    asked = {COPIES: "copy_stream" in values, TEACHER: "teacher_stream" in values}
    with by_stream(gpu) as lag:
        runs(script, log_every=100, evaluate_every=2, **values)  # nothing waits for the device within an epoch
    assert {*lag} == {OWN, *(name for name, wanted in asked.items() if wanted)}
    steps = 6
    for name in {*lag} - {OWN}:
        # all but two steps are still to be done: less than that of a whole run in any case
        assert 0 < max(lag[name]) < 3 * len(lag[OWN]) / steps, name


def test_a_probe_uses_them_too(runs: Runs, gpu):
    with by_stream(gpu) as lag, pytest.raises(KeyError, match="states"):  # it leaves none
        runs("train_kd", probe_seconds=3.0, waits_in=("measure",), **BOTH)
    assert {*lag} == {OWN, COPIES, TEACHER}


def test_a_model_that_does_not_wait_for_its_images_is_found(runs: Runs, planted, monkeypatch):
    monkeypatch.setattr(torch.gpu.Stream, "wait_stream", lambda *_: None)
    with pytest.raises(StreamRace, match=r"reads what stream \d+ writes"):
        runs("train_classifier", copy_stream=True)


def test_a_teacher_that_does_not_wait_for_its_images_is_found(runs: Runs, planted, monkeypatch):
    run = SideStream.run
    monkeypatch.setattr(SideStream, "run", lambda self, work, *, after=None: run(self, work))
    with pytest.raises(StreamRace, match=r"reads what stream \d+ writes"):
        runs("train_kd", **BOTH)


def test_memory_that_is_reused_too_early_is_found(runs: Runs, monkeypatch):
    monkeypatch.setattr(torch.gpu.Stream, "wait_event", lambda *_: None)
    runs("train_kd", log_every=100, **BOTH)
    found, streams.unsafe[:] = [*streams.unsafe], []
    assert found and all("may still use it" in text for text in found)


def test_what_was_there_before_a_side_stream_is_there_for_it(gpu):
    values = torch.zeros(3, device=gpu)
    for expected in (6, 9):  # the second one finds the stream of the first
        values += 1
        side = SideStream(gpu, "test")
        assert side.run(partial(torch.add, values, 1)).sum().item() == expected
        side.finish()


def test_results_are_kept_until_the_next_call_but_one(gpu):
    side, made = SideStream(gpu, "test"), []
    for _ in range(4):
        made.append(side.run(lambda: torch.ones(1, device=gpu)))
        made[-1].add_(1)
    assert [kept is one for (_, kept), one in zip(side._kept, made[2:])] == [True, True]
    side.finish()
    assert not side._kept


@pytest.mark.parametrize(("asked", "on"), [(True, "gpu"), (True, "cpu"), (False, "gpu")])
def test_a_teacher_with_a_stream_takes_memory_beside_the_students(gpu, channels, asked, on):
    device = gpu if on == "gpu" else CPU
    settings = DistillationSettings(student="x", copy_stream=asked, teacher_stream=asked)
    teacher = frozen.load(channels / "teacher", CLASSES, channels=3, image_size=SIDE).to(device)
    now = Footprint(weights=1, optimizer=2, average=0, activations=10)
    image = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8, device=device)
    taught, without = with_teacher(now, {"zero": now}, teacher, settings, image)
    assert [one.teacher_beside for one in (taught, *without.values())] == [asked and on == "gpu"] * (1 + len(without))

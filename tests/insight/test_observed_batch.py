"""An observed script's global batch size, and what follows from it, where epochs are short and end in a smaller batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from launcher_observer.setups import Loader
from launcher_observer.step import Step
from launcher_observer.timeline_file import TimelineFile
from launcher_observer.timers import HostTimer
from launcher_observer.windows import Windows

from launcher.insight import control, speed
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import read

BATCH, LAST, EPOCHS = 32, 8, 40


def recorded(folder: Path, seconds: float, batches: int, *, size: int = BATCH, seed: int = 0) -> Evidence:
    """A run that is recorded as the observer records one, with steps that last about as long as given."""
    folder.mkdir()
    file, rng = TimelineFile(folder, 0), random.Random(seed)
    start = {"rank": 0, "node": "algo-1", "world_size": 1, "backend": None, "device": "cpu"}
    start |= {"device_name": None, "instance_type": None}
    file.write("start", **start, torch="2", threads=1, not_measured={}, settings={}, observed=True)
    values = {"id": 1, "role": "training", "batch_size": size, "num_workers": 0, "batches": batches}
    file.write("setup", of="loader", file="train.py", line=3, text="DataLoader(…)", via=None, values=values)
    windows = Windows(lambda epoch, step, ended, seconds, extra: file.steps(epoch, step, seconds, extra, ended))
    loader, now, number = Loader(1, ("train.py", 3, "DataLoader(…)", None), {"batch_size": size}), windows.since, 0
    loader.batches = batches
    for _ in range(EPOCHS):
        passing = loader.next_pass()
        for batch in range(batches):
            number += 1
            step, took = Step(number, now, now), seconds * rng.uniform(0.97, 1.03)
            step.add_batch(passing, LAST if batch == batches - 1 else size, 0.001)
            step.phases = [("forward", now, now + took / 2), ("backward", now + took / 2, now + took)]
            now += took
            step.ended = step.end = now
            windows.add(HostTimer(), step)
    windows.close()
    return Evidence(read(str(folder)))


@pytest.mark.parametrize(("before", "after", "batches"), [(0.3, 0.15, 5), (0.2, 0.04, 10), (0.12, 0.06, 6)])
def test_faster_steps_are_no_other_batch_size_though_windows_mix_other_batches(tmp_path, before, after, batches):
    slow, fast = recorded(tmp_path / "slow", before, batches), recorded(tmp_path / "fast", after, batches, seed=1)
    assert slow.settings["global_batch_size"] == fast.settings["global_batch_size"] == BATCH
    assert speed.measured(slow, fast).value == pytest.approx(before / after, rel=0.02)
    assert "global_batch_size" not in control.changes(slow, fast)


def test_an_epoch_of_one_batch_may_have_fewer_images_than_the_batch_size(tmp_path):
    assert recorded(tmp_path / "run", 0.1, 1, size=64).settings["global_batch_size"] == LAST

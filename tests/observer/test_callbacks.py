"""The callbacks, in interpreters that were started without the launcher: the package lies on their path, no more."""

from __future__ import annotations

import pytest

from tests.observer.scripted import ENTRYPOINTS, SCRIPTS, both


@pytest.mark.parametrize("batches", ["own", pytest.param("loader", marks=pytest.mark.slow)])
def test_launcher_steps_shows_batches_of_any_kind(batches, tmp_path):
    """A list of them, and a generator over a DataLoader, whose settings are then known and whose wait is counted once."""
    without, done = both(tmp_path, "stepwise.py", batches, path=[ENTRYPOINTS])
    assert (without.code, done.code) == (0, 0), done.stderr
    assert done.weights == without.weights and done.weights
    timeline = done.timeline()
    assert timeline.steps == 24
    assert len(timeline.of("evaluate")) == 1
    windows = timeline.of("steps")
    assert windows[-1]["epoch"] == 2 and windows[-1]["extra"]["epoch_steps"] == 12
    for window in windows:
        seconds = window["seconds"]
        assert 0 < sum(seconds[name] for name in seconds if name != "step") <= seconds["step"] + 1e-4
    lines = (SCRIPTS / "stepwise.py").read_text().splitlines()
    loaders = {line["values"]["role"]: line for line in timeline.setup("loader")}
    assert set(loaders) == {"training", "evaluation"}
    assert "launcher_steps(own[:4])" in lines[loaders["evaluation"]["line"] - 1]
    text = "train(launcher_steps(" if batches == "own" else "yield from batches"
    assert text in lines[loaders["training"]["line"] - 1]
    assert loaders["training"]["values"]["batch_size"] == (None if batches == "own" else 8)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "steps"), [("transformers", 16), ("lightning", 24)])
def test_a_framework_s_callback_has_its_training_observed(framework, steps, tmp_path):
    without, done = both(tmp_path, "called_back.py", framework, path=[ENTRYPOINTS])
    assert (without.code, done.code) == (0, 0), done.stderr
    assert done.weights == without.weights and done.weights
    timeline = done.timeline()
    assert timeline.steps == steps
    [training] = [line for line in timeline.setup("loader") if line["values"]["role"] == "training"]
    assert training["values"]["batch_size"] == 8 and training["values"]["num_workers"] == 1
    assert len(timeline.of("evaluate")) == len(timeline.of("checkpoint")) == 2
    assert list((done.folder / "profiler-output/system").rglob("*.json"))

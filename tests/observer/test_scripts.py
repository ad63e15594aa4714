"""Real scripts, unchanged, under the observer: the same weights, every step counted, every line named. Each runs with it and without."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from launcher.planner import python_start
from tests.observer.scripted import ENTRYPOINTS, SCRIPTS, TORCHRUN, Timeline, both


@dataclass(frozen=True)
class Case:
    """One script and what its timeline must say."""

    name: str
    command: tuple[str, ...]
    steps: int
    """Of each rank."""
    lines: dict[str, str]
    """What was set up -> how the line begins that did it."""
    via: str | None = None
    """The framework that made the loader."""
    loader: dict[str, object] = field(default_factory=dict)
    """Values of the training loader."""
    epoch_steps: int | None = None
    """Of one pass over the loader; None: not known."""
    unmeasured: str | None = None
    """Why the wait for data is not measured."""
    says: str | None = None
    """What the observer reports, once; None: nothing."""
    evaluations: int = 0
    checkpoints: int = 0
    checkpoint_seconds: float = 0.0
    """That each takes at least."""
    ranks: int = 1
    trainings: int = 1
    """Processes that train one after the other."""
    slow: bool = True
    """Whether `make test` has no time for it."""


SCRIPTED = {"backward": "loss.backward()", "step": "optimizer.step()"}
"""The lines of a plain loop."""

CASES = [
    Case(
        "plain",
        ("plain.py", "1"),
        24,
        {
            "loader": "train_loader = ",
            "model": "loss = criterion(model(",
            "optimizer": "optimizer = ",
            "checkpoint": "torch.save(",
            **SCRIPTED,
        },
        loader={"batch_size": 8, "num_workers": 1, "batches": 12},
        evaluations=2,
        checkpoints=2,
        slow=False,
        epoch_steps=12,
    ),
    Case(
        "torchvision's style",
        ("torchvision_style.py",),
        8,
        {
            "loader": "data_loader = ",
            "optimizer": "optimizer = ",
            "scaler": "scaler.step(",
            "backward": "scaler.scale(loss).backward()",
            "step": "scaler.step(optimizer)",
            "checkpoint": "torch.save(",
        },
        loader={"batch_size": 16, "num_workers": 1, "batches": 4},
        evaluations=2,
        checkpoints=2,
        epoch_steps=4,
    ),
    Case(
        "a GAN",
        ("gan.py",),
        20,
        {"loader": "loader = ", "optimizer": "of_generator = "},
        loader={"batch_size": 8, "num_workers": 0, "batches": 10},
        epoch_steps=10,
    ),
    Case(
        "an iterable dataset, gradients accumulated",
        ("iterable.py",),
        12,
        {"loader": "loader = ", "optimizer": "optimizer = ", "step": "optimizer.step()"},
        loader={"batch_size": 4, "num_workers": 1, "batches": 24},  # by the pass that it ended
        epoch_steps=12,
    ),
    Case(
        "batches of its own, from a thread",
        ("threads.py", "own"),
        24,
        {"optimizer": "optimizer = "},
        unmeasured="no torch DataLoader was seen",
    ),
    Case(
        "a DataLoader that a thread reads",
        ("threads.py", "loader"),
        24,
        {"loader": "loader = ", "optimizer": "optimizer = "},
        loader={"batch_size": 4, "num_workers": 0},
        unmeasured="another thread reads the DataLoader",
    ),
    Case(
        "a script that forks",
        ("forks.py", "20"),
        20,
        {"loader": "loader = ", "step": "optimizer.step()"},
        loader={"batch_size": 8, "num_workers": 0, "batches": 20},
        epoch_steps=20,
        trainings=2,
    ),
    Case(
        "two ranks",
        ("ranks.py",),
        18,
        {"loader": "loader = ", "data_parallel": "model = DistributedDataParallel("},
        loader={"batch_size": 8, "num_workers": 0, "batches": 6},
        ranks=2,
        epoch_steps=6,
    ),
    Case(
        "Lightning",
        ("lightning_fit.py",),
        24,
        {"loader": "loader = ", "optimizer": "return torch.optim.AdamW(", "step": "trainer.fit("},
        loader={"batch_size": 8, "num_workers": 1, "batches": 12},
        evaluations=2,
        checkpoints=2,
        checkpoint_seconds=0.2,
        epoch_steps=12,
    ),
    Case(
        "lightning's Fabric",
        ("fabric_loop.py",),
        24,
        {"loader": "loader = ", "backward": "fabric.backward(", "step": "optimizer.step()"},
        loader={"batch_size": 8, "num_workers": 0, "batches": 12},
        checkpoints=2,
        checkpoint_seconds=0.2,
        epoch_steps=12,
    ),
    Case(
        "transformers.Trainer",
        ("trainer.py",),
        16,
        {"loader": "trainer.train()", "backward": "trainer.train()", "step": "trainer.train()"},
        via="transformers",
        loader={"batch_size": 8, "num_workers": 1, "batches": 8},
        evaluations=2,
        checkpoints=2,
        epoch_steps=8,
    ),
    Case(
        "accelerate",
        ("accelerated.py",),
        12,
        {
            "loader": "loader = ",
            "optimizer": "optimizer = ",
            "backward": "accelerator.backward(",
            "step": "optimizer.step()",
        },
        loader={"batch_size": 8, "num_workers": 0, "batches": 12},
        evaluations=2,
        checkpoints=2,
        epoch_steps=6,
    ),
    Case(
        "torchdistill's box",
        ("distilled.py",),
        16,
        {"loader": "box = ", "backward": "box.post_forward_process(", "step": "box.post_forward_process("},
        via="torchdistill",
        loader={"batch_size": 8, "num_workers": 1, "batches": 8},
        epoch_steps=8,
    ),
]


@pytest.fixture(scope="module")
def hook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hook")
    (folder / python_start.FILE).write_bytes(python_start.text(observe=True, secrets={}))
    return folder


def line_of(case: Case, of: str) -> int:
    """The number of the script's line that begins so."""
    lines = (SCRIPTS / case.command[0]).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if line.strip().startswith(case.lines[of])]
    return number


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in CASES]
)
def test_a_script_trains_as_without_the_observer_and_is_followed(case, hook, tmp_path):
    """One test for all of it: two runs of each script are what takes the time."""
    without, done = both(
        tmp_path, *case.command, start=TORCHRUN if case.ranks > 1 else (), observed_path=[hook, ENTRYPOINTS]
    )
    assert (without.code, done.code) == (0, 0), without.stderr + done.stderr
    assert re.findall("launcher observer: (.*); the script goes on without it", done.stderr) == (
        [case.says] if case.says else []
    )
    assert without.weights and done.weights == without.weights
    assert len(list(done.folder.glob("timeline-*"))) == case.ranks * case.trainings
    for rank in range(case.ranks):
        timeline = done.timeline(rank)
        assert timeline.steps == case.steps
        assert sum(line["extra"]["steps"] for line in timeline.of("steps")) == case.steps
        for line in timeline.of("steps"):
            phases = {name: seconds for name, seconds in line["seconds"].items() if name not in ("step", "grad_sync")}
            assert {"forward", "backward", "optimizer"} <= set(phases)
            assert min(phases.values()) >= 0 and sum(phases.values()) <= line["seconds"]["step"] + 1e-4
    check_addresses(case, done.timeline())
    check_progress(case, done.timeline())
    pauses = [len(done.timeline().of(kind)) for kind in ("evaluate", "checkpoint")]
    assert pauses == [case.evaluations, case.checkpoints if case.ranks == 1 else 1]
    assert all(line["seconds"] >= case.checkpoint_seconds for line in done.timeline().of("checkpoint"))


def check_addresses(case: Case, timeline: Timeline) -> None:
    for of in case.lines:
        found = {(line["file"], line["line"]) for line in timeline.setup(of)}
        assert (case.command[0], line_of(case, of)) in found, (of, timeline.setup(of))
    if not case.loader:
        assert not timeline.setup("loader")
        return
    role = "unknown" if case.unmeasured else "training"
    latest = {line["values"]["id"]: line for line in timeline.setup("loader")}
    [loader] = [line for line in latest.values() if line["values"]["role"] == role]
    assert {name: loader["values"][name] for name in case.loader} == case.loader
    assert loader["via"] == case.via and loader["line"] == line_of(case, "loader")


def check_progress(case: Case, timeline: Timeline) -> None:
    """How far an epoch is, and of how many steps, wherever the loader has a length."""
    last = timeline.of("steps")[-1]
    assert last["extra"].get("epoch_steps") == case.epoch_steps
    if case.epoch_steps:
        assert (last["epoch"], last["extra"]["epoch_step"]) == (case.steps // case.epoch_steps, case.epoch_steps)
    [start] = timeline.of("start")
    assert start["not_measured"].get("data_wait") == case.unmeasured
    assert ("data_wait" in last["seconds"]) == (case.unmeasured is None)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise", "exit"])
def test_what_was_measured_before_a_crash_is_kept(end, hook, tmp_path):
    without, done = both(tmp_path, "crashes.py", end, observed_path=[hook, ENTRYPOINTS])
    assert without.code == done.code == (1 if end == "raise" else 7)
    assert done.stderr == without.stderr  # no frame of the observer is in the traceback
    timeline = done.timeline()
    # an exit without farewell loses the window under way, of two steps where no stall has written another before it
    assert timeline.steps in ({7} if end == "raise" else {5, 6, 7})
    [at] = [line["line"] for line in timeline.setup("step")]
    assert at == (SCRIPTS / "crashes.py").read_text().splitlines().index("    optimizer.step()") + 1

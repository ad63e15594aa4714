"""What every rank leaves of its steps and pauses, and Debugger's hook, in real training."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from launcher_observer.exchange import ExchangeRecord
from launcher_observer.process import process_started
from torch import nn
from training.distributed.world import World
from training.measure import debugger
from training.measure.debugger import register_hook
from training.measure.timeline_record import TimelineRecord
from training.runtime import metrics
from training.settings.scripts import TrainingSettings

from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.test_loop import run, two_ranks

STAND_INS = Path(__file__).parent / "stand_ins"


def reported(folder: Path, rank: int = 0) -> list[dict]:
    return [json.loads(line) for line in (folder / f"data/timeline-{rank}.jsonl").read_text().splitlines()]


def test_a_rank_tells_its_windows_and_pauses_in_order(tmp_path):
    for _ in range(2):  # the second run's file holds nothing of the first
        run(tmp_path / "run", log_every=4, checkpoint_every=8, epochs=3, learning_rate=0.01)
        found = reported(tmp_path / "run")
        (tmp_path / "run/checkpoints").rename(tmp_path / f"kept-{len(list(tmp_path.iterdir()))}")
    kinds = [(event["kind"], event.get("step")) for event in found]
    # an epoch has five steps, and each is followed by a checkpoint and an evaluation
    assert kinds == [
        *(
            ("start", None),
            ("first_step", 1),
            ("steps", 4),
            ("checkpoint", 5),
            ("evaluate", 5),
            ("steps", 8),
            ("checkpoint", 8),
        ),
        *(("checkpoint", 10), ("evaluate", 10), ("steps", 12), ("steps", 15), ("checkpoint", 15), ("evaluate", 15)),
    ]
    start, first, *rest = found
    assert (start["rank"], start["node"], start["world_size"], start["device"]) == (0, "algo-1", 1, "cpu")
    assert start["settings"]["log_every"] == 4 and start["process_started"] < first["ended"]
    assert {*first["parts"]} <= {*metrics.START} and [*first["parts"]][-1] == "first_step"
    assert sum(first["parts"].values()) == pytest.approx(first["seconds"], abs=0.1), (
        "nothing is left out, nothing counts twice"
    )
    assert start["not_measured"] == {"grad_sync": "a single process exchanges nothing"}
    windows = [event for event in rest if event["kind"] == "steps"]
    assert [event["extra"]["steps"] for event in windows] == [4, 4, 4, 3] and windows[1]["epoch"] == 2
    for window in windows:
        phases = {name: value for name, value in window["seconds"].items() if name != "step"}
        assert {"data_wait", "student_forward", "backward", "optimizer"} <= set(phases) and "grad_sync" not in phases
        whole = window["seconds"]["step"]
        assert sum(phases.values()) <= whole + 1e-6 and whole <= window["extra"]["slowest_step"] + 1e-6
        assert window["extra"]["cpu_seconds"] > 0
        assert window["extra"]["images_per_second"] == pytest.approx(8 / whole, rel=1e-3)
    moments = [event.get("ended") or event["began"] + event["seconds"] for event in rest]
    assert moments == sorted(moments) and rest[0]["ended"] >= first["ended"]


def test_every_rank_leaves_its_own_windows_and_the_seconds_it_waited_for_others(tmp_path):
    two_ranks(tmp_path, tmp_path / "run", epochs=4, log_every=5)
    for rank in range(2):
        start, *rest = reported(tmp_path / "run", rank)
        assert (start["rank"], start["world_size"], start["backend"], start["not_measured"]) == (rank, 2, "gloo", {})
        windows = [event for event in rest if event["kind"] == "steps"]
        assert [window["step"] for window in windows] == [5, 10, 15, 20]
        assert all(window["seconds"]["grad_sync"] >= 0 for window in windows)
        assert {"evaluate", "checkpoint"} <= {event["kind"] for event in rest}


def test_a_fast_rank_waits_for_the_slow_ones_gradients_and_a_late_first_step_does_not_count(tmp_path):
    """Rank 0's first batch comes 2 s late, and rank 1 takes a quarter of a second longer in each step."""
    done = run_ranks(
        tmp_path,
        """
        from training.distributed.data_parallel import distribute
        from launcher_observer.exchange import ExchangeRecord
        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(_, value):
                return value.clone()
            @staticmethod
            def backward(_, gradient):
                time.sleep(0.25)
                return gradient
        with process_group() as world:
            model = nn.Linear(4, 1)
            wrapped = distribute(model, world)
            exchange = ExchangeRecord()
            assert exchange.seconds(wrapped) is None and exchange.seconds(model) is None
            for step in range(12):
                time.sleep(0 if step or world.rank else 2)
                out_of_it = wrapped(torch.ones(2, 4)).sum()
                (Slow.apply(out_of_it) if world.rank else out_of_it).backward()
                exchange.step_ended([wrapped, model])
            (out / f"waited-{world.rank}").write_text(str(exchange.seconds(wrapped)))
        """,
    )
    assert [item.returncode for item in done] == [0, 0], done[0].stderr + done[1].stderr
    waited = [float((tmp_path / f"waited-{rank}").read_text()) for rank in range(2)]
    assert waited[0] > 0.15 > waited[1]


def test_units_of_a_sharded_model_are_not_asked_for_a_record_in_every_step():
    """Each lookup walks through FullyShardedDataParallel's own __getattr__."""
    asked: list[str] = []

    class Unit:
        def __getattr__(self, name: str) -> None:
            asked.append(name)
            raise AttributeError(name)

    ExchangeRecord().step_ended([Unit()])
    assert asked == []


def test_a_process_knows_when_it_started(monkeypatch):
    """In a container of LXC too, where /proc/uptime is the container's and the start that of the machine's clock."""
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda file, **how: "10.00 5.00\n" if file == Path("/proc/uptime") else read(file, **how)
    )
    assert process_started() == pytest.approx(psutil.Process().create_time(), abs=1.5)


def test_other_process_groups_have_no_record_of_their_exchange(tmp_path):
    world = World(1, 2, 1, torch.device("cpu"), "smddp", "test", collectives=SimpleNamespace())
    TimelineRecord(tmp_path, world, TrainingSettings())
    (start,) = [json.loads(line) for line in (tmp_path / "timeline-1.jsonl").read_text().splitlines()]
    assert start["not_measured"] == {"grad_sync": "smddp keeps no record of it"}
    assert ExchangeRecord().seconds(nn.Linear(1, 1)) is None


@pytest.fixture
def asked_for(tmp_path, monkeypatch) -> Path:
    """A job with `debugger`."""
    file = tmp_path / "debughookconfig.json"
    file.write_text('{"S3OutputPath": "s3://bucket", "LocalPath": "/opt/ml/output/tensors"}')
    monkeypatch.setenv("SMDEBUG_CONFIG_FILE_PATH", str(file))
    return file


def test_debuggers_hook_is_used_where_the_image_has_it(asked_for, monkeypatch):
    monkeypatch.syspath_prepend(STAND_INS / "smdebug")
    monkeypatch.setattr(debugger, "np", SimpleNamespace(ndarray=SimpleNamespace(tostring=None)))
    said, model = [], nn.Linear(2, 2)
    try:
        register_hook(model, said.append)
        import smdebug.pytorch

        assert smdebug.pytorch.registered == [(str(asked_for), model)]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "smdebug"]:
            del sys.modules[name]
    assert said == ["Debugger's hook saves tensors, as debughookconfig.json says"]


def test_a_hook_that_cannot_be_had_is_named_and_one_nobody_wants_is_not(asked_for, tmp_path):
    said: list[str] = []
    register_hook(nn.Linear(2, 2), said.append)
    assert len(said) == 1 and "cannot be loaded: ModuleNotFoundError: No module named 'smdebug'" in said[0]
    register_hook(nn.Linear(2, 2), said.append, {**os.environ, "SMDEBUG_CONFIG_FILE_PATH": str(tmp_path / "none")})
    assert len(said) == 1


@pytest.mark.parametrize("kind", ["processes", "loader"])
def test_the_cpu_time_of_worker_processes_is_told_from_the_training_processs_own(tmp_path, kind):
    """The workers do next to nothing here; without the difference, none of it would be theirs, or all of it."""
    run(tmp_path / "alone", log_every=15)
    run(tmp_path / "workers", log_every=15, num_workers=1, worker_type=kind)
    alone, workers = (
        next(event["extra"] for event in reported(tmp_path / name) if event["kind"] == "steps")
        for name in ("alone", "workers")
    )
    assert alone["worker_cpu_seconds"] == 0 < workers["worker_cpu_seconds"]
    assert workers["cpu_seconds"] > 0


def test_a_disk_that_is_full_costs_lines_and_no_training(tmp_path, monkeypatch, capsys):
    record = TimelineRecord(tmp_path, World(0, 1, 0, torch.device("cpu"), "none", "test"), TrainingSettings())
    write = os.write

    def full(*_) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    record.stall("checkpoint", 1, 2.0)
    record.stall("checkpoint", 2, 2.0)
    monkeypatch.setattr(os, "write", write)
    record.stall("checkpoint", 3, 2.0)
    lines = [json.loads(line) for line in (tmp_path / "timeline-0.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 3]
    assert capsys.readouterr().out.count("timeline-0.jsonl lacks a line, and maybe later ones") == 1

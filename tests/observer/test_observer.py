"""What the observer does at the edges of a process's life, and where something in it goes wrong."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launcher_observer.process import process_started, rank_and_size, worker_cpu_seconds
from launcher_observer.repeating_loaders import repeats_after
from launcher_observer.setups import MAX_ENTRIES, Setups
from launcher_observer.timeline_file import TimelineFile
from timm.data.loader import MultiEpochsDataLoader
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from tests.observer.scripted import ENTRYPOINTS, TORCHRUN, Done

BEGINNING = """
from launcher_observer.start import start; start()
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)

class Slow(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        value = torch.zeros(8)
        began = time.perf_counter()
        while time.perf_counter() - began < pause:  # a costly decoder
            value = value + 1
        return value

pause = 0.0
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Slow(), batch_size=2)

def epoch():
    for inputs in loader:
        model(inputs).sum().backward()
        optimizer.step()
"""


def ran(folder: Path, text: str, *start: str, **environment: str) -> Done:
    """A script under the observer.

    Args:
        start: options of Python before the script, such as TORCHRUN.
        environment: further variables.
    """
    (folder / "observed").mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(BEGINNING + text)
    environ = {**os.environ, "PYTHONPATH": str(ENTRYPOINTS), "LAUNCHER_OBSERVER_FOLDER": str(folder / "observed")}
    command = [sys.executable, *start, str(script)]
    done = subprocess.run(
        command, env={**environ, **environment}, cwd=folder, capture_output=True, text=True, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr, folder / "observed")


def line_number(folder: Path, text: str) -> int:
    return next(
        number for number, line in enumerate((folder / "script.py").read_text().splitlines(), 1) if text in line
    )


def test_an_error_inside_is_reported_once_and_the_script_goes_on(tmp_path):
    """Three steps on, the disk is full: no line can be written any more."""
    done = ran(
        tmp_path,
        """
from launcher_observer.timeline_file import TimelineFile
def full(self, kind, **values):
    raise OSError(28, "No space left on device")
epoch()
TimelineFile.write = full
for _ in range(3):
    epoch()
torch.save(model.state_dict(), "last.pt")
print("trained")
""",
    )
    assert (done.code, done.stdout) == (0, "trained\n")
    assert (
        done.stderr == "launcher observer: OSError: [Errno 28] No space left on device; the script goes on without it\n"
    )
    assert [line["step"] for line in done.timeline().of("first_step")] == [1]


@pytest.mark.slow
def test_a_traceback_has_one_frame_of_ours(tmp_path):
    done = ran(tmp_path, "epoch(); model(torch.zeros(2, 8)).backward()")
    assert done.code == 1 and "grad can be implicitly created only for scalar outputs" in done.stderr
    assert done.stderr.count("launcher_observer") == 1
    assert done.timeline().steps == 4


def test_a_script_that_leaves_without_a_word_has_the_lines_so_far_and_a_second_one_a_record_of_its_own(tmp_path):
    """Such as folds, one after the other, or what torchrun starts anew after a crash."""
    under_way = "from launcher_observer import windows; windows.SHORTEST = 60\n"  # also where three steps take long
    first = ran(tmp_path, under_way + "epoch(); epoch(); os._exit(7)")
    assert first.code == 7 and first.timeline().steps == 5
    lines = first.timeline()
    second = ran(tmp_path, "for _ in range(5): epoch()")
    assert second.code == 0 and second.timeline() == lines and "launcher observer" not in second.stderr
    assert second.timeline(attempt=1).steps == 20
    third = ran(tmp_path, "epoch()", TORCHELASTIC_RESTART_COUNT="3")
    assert third.timeline(attempt=3).steps == 4


def first_step(rank: int, attempt: int, folder: Path, ended: float) -> None:
    file = TimelineFile(folder, rank, attempt)
    file.write("start", rank=rank)
    file.first_step(1, 0, ended)


def test_ranks_that_train_together_count_the_same_attempts(tmp_path):
    """Rank 1 of the first training crashed before its first step. Rank 0 of the second may have made it already."""
    first_step(0, 0, tmp_path, process_started() - 60)
    (tmp_path / "timeline-9.jsonl").write_text('{"kind": "first_step", "ended": "late"}\n[')
    os.mkfifo(tmp_path / "timeline-8.jsonl")
    first_step(0, 1, tmp_path, time.time())
    assert TimelineFile.begun(tmp_path, 1, {}).path.name == "timeline-1.1.jsonl"
    assert TimelineFile.begun(tmp_path, 1, {}).path.name == "timeline-1.2.jsonl", "another process trains beside it"
    assert TimelineFile.begun(tmp_path, 2, {"TORCHELASTIC_RESTART_COUNT": "1"}).path.name == "timeline-2.1.jsonl"
    assert TimelineFile.begun(tmp_path, 2, {"TORCHELASTIC_RESTART_COUNT": "4"}).path.name == "timeline-2.4.jsonl"
    (tmp_path / "next").mkdir()
    assert TimelineFile.begun(tmp_path / "next", 0, {}).path.name == "timeline-0.jsonl"


def test_an_endless_loader_is_known_by_the_sampler_that_it_repeats():
    dataset = TensorDataset(torch.zeros(42, 1))
    assert repeats_after(torch, MultiEpochsDataLoader(dataset, batch_size=4)) == 11
    assert repeats_after(torch, MultiEpochsDataLoader(dataset, batch_size=None)) is None
    assert repeats_after(torch, DataLoader(dataset, batch_size=4)) is None
    drawn = MultiEpochsDataLoader(dataset, batch_sampler=BatchSampler(Drawing(), 4, drop_last=False))
    assert repeats_after(torch, drawn) is None


class Drawing:
    """A sampler of the user's own."""

    def __len__(self):
        raise AssertionError("it is asked for nothing")

    def __iter__(self):
        return iter(range(4))


def test_a_script_that_makes_loader_after_loader_fills_no_record():
    setups, lines = Setups(), []
    datasets = [TensorDataset(torch.zeros(4, 1)) for _ in range(2 * MAX_ENTRIES)]
    for dataset in datasets:
        found = setups.first_iterated(setups.loader(torch, DataLoader(dataset, batch_size=2)), [])
        assert found.number <= MAX_ENTRIES and found.values["num_workers"] == 0
    setups.begin(lambda kind, **values: lines.append(values))
    assert len(lines) == MAX_ENTRIES and {line["of"] for line in lines} == {"loader"}


def test_ranks_without_torch_distributed_are_told_apart_by_their_launchers_variables():
    assert rank_and_size(torch, {"RANK": "3", "WORLD_SIZE": "4"}) == (3, 4, None)
    assert rank_and_size(torch, {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}) == (2, 4, None)
    assert rank_and_size(torch, {}) == (0, 1, None)


@pytest.mark.slow
def test_a_process_that_trains_nothing_leaves_no_file(tmp_path):
    done = ran(tmp_path, "[batch for batch in loader]; model(torch.zeros(2, 8)).sum().backward(); torch.save(1, 'one')")
    assert done.code == 0 and not [*done.folder.glob("timeline*")]


def test_a_script_that_measures_itself_ends_the_observer(tmp_path):
    """The kit's own timeline in a foreign script: nobody else writes the file."""
    done = ran(
        tmp_path,
        """
from pathlib import Path
from training.distributed.world import World
from training.measure.timeline_record import TimelineRecord
from training.settings.scripts import TrainingSettings
epoch()
world = World(0, 1, 0, torch.device("cpu"), "gloo", "test")
record = TimelineRecord(Path(os.environ["LAUNCHER_OBSERVER_FOLDER"]), world, TrainingSettings())
epoch()
record.first_step(1, 0)
""",
    )
    assert done.code == 0, done.stderr
    assert [line["kind"] for line in done.timeline().lines] == ["start", "first_step"]
    assert "observed" not in done.timeline().lines[0]


def test_the_line_that_takes_the_hosts_time_is_named(tmp_path):
    done = ran(tmp_path, "pause = 0.05\nepoch(); epoch()")
    lines = done.timeline().of("lines")[-1]
    first = lines["lines"][0]
    assert (first["file"], first["phase"], first["in_model"]) == ("script.py", "data_wait", False)
    assert first["line"] in (
        line_number(tmp_path, "while time.perf_counter"),
        line_number(tmp_path, "value = value + 1"),
    )
    assert first["samples"] <= lines["samples"]
    [loader] = done.timeline().setup("loader")
    assert loader["values"]["dataset"] == {
        "class": "Slow", "file": "script.py", "line": line_number(tmp_path, "def __getitem__")
    }  # fmt: skip


def test_models_are_found_wherever_they_are_kept_and_functions_keep_their_variables(tmp_path):
    done = ran(
        tmp_path,
        """
class Distillation:
    def __init__(self):
        self.student, self.teacher = nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 2)).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.01)
    def step(self, inputs):
        target = self.teacher(inputs)
        loss = (self.student(inputs) - target).square().mean()
        loss.backward()
        self.optimizer.step()

def main(steps=4):
    options = locals()
    task = Distillation()
    for inputs in loader:
        task.step(inputs)
    assert options == {"steps": 4}, options

main()
""",
    )
    assert done.code == 0, done.stderr
    found = {
        line["values"]["class"]: (line["line"], line["values"]["trainable"]) for line in done.timeline().setup("model")
    }
    assert found == {
        "Sequential": (line_number(tmp_path, "target = self.teacher(inputs)"), 0),
        "Linear": (line_number(tmp_path, "loss = (self.student(inputs)"), 18),
    }


@pytest.mark.slow
def test_what_was_taken_hold_of_keeps_its_name_and_signature(tmp_path):
    done = ran(
        tmp_path,
        """
import inspect, pickle
for function in (torch.save, torch.serialization.save, torch.compile, DataLoader.__init__, torch.autograd.backward):
    assert function.__wrapped__ is not function
    assert inspect.signature(function) == inspect.signature(function.__wrapped__)
    assert pickle.loads(pickle.dumps(function)) is function
""",
    )
    assert done.code == 0, done.stderr


SHARED = {
    "DistributedDataParallel": "nn.parallel.DistributedDataParallel(model)",
    "FullyShardedDataParallel": "fsdp.FullyShardedDataParallel(model, device_id=torch.device('cpu'))",
    "fully_shard": "fsdp.fully_shard(model, mesh=init_device_mesh('cpu', (2,)))",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
def test_what_shares_a_model_among_ranks_is_named(tmp_path, kind):
    done = ran(
        tmp_path,
        f"""
import gc
import torch.distributed
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 1), nn.BatchNorm1d(1))
model = {SHARED[kind]}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
epoch(); epoch()
# Gloo's threads may let go of the last tensor late, when Python has ended, and torch then aborts. A sharded model keeps more of them.
if "{kind}" != "DistributedDataParallel":
    model = optimizer = None
gc.collect()
time.sleep(0.3)
torch.distributed.destroy_process_group()
""",
        *TORCHRUN,
    )
    assert done.code == 0, done.stderr
    for rank in range(2):
        timeline = done.timeline(rank)
        [start], [line] = timeline.of("start"), timeline.setup("data_parallel")
        assert line["values"] == {"class": kind, "world_size": 2} and timeline.steps == 8
        measured = kind == "DistributedDataParallel"
        assert ("grad_sync" in start["not_measured"]) != measured
        assert all(("grad_sync" in window["seconds"]) == measured for window in timeline.of("steps"))
        assert all(("buffer_sync" in window["seconds"]) == measured for window in timeline.of("steps")[1:])


def test_a_process_that_multiprocessing_forked_keeps_its_last_steps(tmp_path):
    """It ends without Python's atexit."""
    done = ran(
        tmp_path,
        """
import multiprocessing

def train():
    epoch()
    epoch()

child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
assert child.exitcode == 0
""",
    )
    assert done.code == 0, done.stderr
    assert done.timeline().steps == 8


def test_batches_that_another_thread_takes_from_an_iterator_of_this_one_are_no_wait_of_the_step(tmp_path):
    done = ran(
        tmp_path,
        """
from concurrent.futures import ThreadPoolExecutor

batches, ahead = iter(loader), ThreadPoolExecutor(1)
for _ in range(4):
    model(ahead.submit(next, batches).result()).sum().backward()
    optimizer.step()
""",
    )
    assert done.code == 0, done.stderr
    [start] = done.timeline().of("start")
    assert start["not_measured"]["data_wait"] == "another thread reads the DataLoader"
    assert done.timeline().steps == 4 and all(
        "data_wait" not in line["seconds"] for line in done.timeline().of("steps")
    )


@pytest.mark.parametrize(("switch", "tf32"), [("tf32", True), ("ieee", False)])
def test_torchs_new_switches_of_precision_are_read_where_its_old_ones_refuse_to_answer(tmp_path, switch, tf32):
    done = ran(tmp_path, f"torch.backends.cuda.matmul.fp32_precision = '{switch}'\nepoch()\n")
    assert (done.code, done.stderr) == (0, "")
    [line] = done.timeline().setup("precision")
    assert line["values"]["allow_tf32"] is tf32


@pytest.mark.parametrize(
    ("switch", "tf32"),
    [
        ("", True),  # torch's default
        ("torch.backends.cudnn.allow_tf32 = False", False),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", False),
    ],
)
def test_cudnns_own_switch_and_the_convolutions_of_the_trained_model_are_recorded(tmp_path, switch, tf32):
    done = ran(
        tmp_path,
        f"""
{switch}
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
""",
    )
    assert (done.code, done.stderr) == (0, "")
    [precision], [trained] = done.timeline().setup("precision"), done.timeline().setup("model")
    assert precision["values"]["cudnn_allow_tf32"] is tf32 and precision["values"]["allow_tf32"] is False
    assert (trained["values"]["convolutions"], trained["values"]["matrices"]) == (2, 1)


def burn(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_the_cpu_time_of_workers_that_have_ended_with_their_epoch_counts():
    before, fork = worker_cpu_seconds(), multiprocessing.get_context("fork")
    for _ in range(2):
        worker = fork.Process(target=burn, args=(0.3,))
        worker.start()
        worker.join()
    assert worker_cpu_seconds() - before >= 0.55


def test_a_second_loader_of_a_dataset_has_a_line_of_its_own(tmp_path):
    done = ran(
        tmp_path,
        """
images = Slow()
statistics = DataLoader(images, batch_size=4)
next(iter(statistics))
loader = DataLoader(images, batch_size=2, shuffle=True)
for _ in range(3):
    epoch()
""",
    )
    [training] = [line for line in done.timeline().setup("loader") if line["values"]["role"] == "training"]
    assert training["text"] == "loader = DataLoader(images, batch_size=2, shuffle=True)", done.stderr


def test_unusual_modules_and_loaders_do_not_end_the_record(tmp_path):
    """A module without Module.__init__, a lazy layer that never runs, a loader that compares by value."""
    done = ran(
        tmp_path,
        """
from dataclasses import dataclass
class Meter(nn.Module):
    def __init__(self):
        self.total = 0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 1), nn.LazyLinear(3)
    def forward(self, inputs):
        return self.used(inputs)
class Own(DataLoader):
    def __eq__(self, other):
        return self.batch_size == other.batch_size
meter, model = Meter(), Net()
optimizer = torch.optim.SGD(model.used.parameters(), lr=0.01)
loader = Own(Slow(), batch_size=2)
for _ in range(3):
    epoch()
""",
    )
    found = done.timeline()
    assert found.steps == 12 and done.stderr == ""
    [model] = [line["values"] for line in found.setup("model") if line["values"]["class"] == "Net"]
    assert model["parameters"] == 9


WRAPPED = {
    "an object": "return Moved(super()._get_iterator())",
    "a generator": "yield from super()._get_iterator()",
}
"""How a loader's own iterator is made."""


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_loader_that_wraps_its_iterator_is_seen(tmp_path, kind):
    """PyTorch Geometric's NeighborLoader moves each batch on its way. Workers that persist make no new iterator."""
    persists = kind == "an object"
    done = ran(
        tmp_path,
        f"""
class Moved:
    def __init__(self, batches):
        self.batches = batches
    def __iter__(self):
        return self
    def __next__(self):
        return next(self.batches) + 1
    def _reset(self, loader, first_iter=False):
        self.batches._reset(loader, first_iter)
class Own(DataLoader):
    def _get_iterator(self):
        {WRAPPED[kind]}
loader = Own(Slow(), batch_size=2, num_workers={int(persists)}, persistent_workers={persists})
for _ in range(3):
    epoch()
""",
    )
    assert (done.code, done.stderr) == (0, "")
    timeline = done.timeline()
    [start], last = timeline.of("start"), timeline.of("steps")[-1]
    assert "data_wait" not in start["not_measured"]
    assert timeline.setup("loader")[-1]["values"]["role"] == "training"
    assert (last["step"], last["epoch"], last["extra"]["epoch_step"]) == (12, 3, 4)


def test_the_line_that_calls_the_model_is_the_loops(tmp_path):
    done = ran(
        tmp_path,
        """
out = model(torch.zeros(1, 8))
for _ in range(2):
    for inputs in loader:
        outputs = model(inputs)
        outputs.sum().backward()
        optimizer.step()
out = model(torch.ones(1, 8))
""",
    )
    [called] = done.timeline().setup("model")
    assert called["text"] == "outputs = model(inputs)"


def test_an_exception_of_the_scripts_own_signal_handler_reaches_the_script(tmp_path):
    """The signal comes while the observer processes its events."""
    done = ran(
        tmp_path,
        """
import signal
from launcher_observer.step_clock import StepClock
class Preempted(Exception):
    pass
def preempted(number, frame):
    raise Preempted
signal.signal(signal.SIGUSR1, preempted)
epoch()
begins = StepClock.backward_begins
StepClock.backward_begins = lambda clock: signal.raise_signal(signal.SIGUSR1)
try:
    for _ in range(100):
        epoch()
except Preempted:
    print("saved")
StepClock.backward_begins = begins
""",
    )
    assert (done.code, done.stdout, done.stderr) == (0, "saved\n", "")

"""How many workers decode: as many as this process has cores for, and the log says why."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from training.data import worker_processes, workers
from training.data.augmentation import Augmentation
from training.data.broken import BrokenImages
from training.data.decode.fast import FastPreprocessor
from training.data.loaders import open_loaders
from training.data.mixing import Mixing
from training.data.sources.folders import LabelledFolder
from training.data.views import TrainingViews, open_data
from training.data.worker_processes import in_own_group
from training.data.workers import Workers, choose
from training.distributed.world import World
from training.settings.scripts import LabelledImageSettings

from tests.conftest import ROOT

from .photographs import FOLDER
from .ranks import run_ranks

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
ON_A_GPU = World(0, 1, 0, torch.device("cuda"), "none", "test")


class Tiny:
    """Images that cost nothing."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, draw):
        return draw


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> TrainingViews:
    """Views that take milliseconds."""
    root = tmp_path_factory.mktemp("images")
    (root / "photographs").symlink_to(FOLDER)
    how = {"channels": 3, "preprocessor": FastPreprocessor(), "broken": BrokenImages(fail=True)}
    return TrainingViews(LabelledFolder(root), 224, Augmentation(load=2), Mixing(), 0, **how)


def chosen(world: World, images, environ: dict[str, str] | None = None, **values) -> Workers:
    return choose(LabelledImageSettings(**values), world, images, environ or {})


@pytest.mark.parametrize(
    ("cores", "quota", "environ", "world", "count", "where"),
    [
        (8, None, {}, ALONE, 7, "8 cores for 1 process, one of them for training itself; an image costs "),
        (8, None, {"LOCAL_WORLD_SIZE": "2"}, ON_A_GPU, 3, "8 cores for 2 processes"),
        (96, None, {"LOCAL_WORLD_SIZE": "8"}, ON_A_GPU, 11, "96 cores for 8 processes"),
        (8, None, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ON_A_GPU, 1, "8 cores for 4 processes"),
        (96, 3.5, {}, ON_A_GPU, 2, "3.5 cores for 1 process"),
        (96, None, {}, ON_A_GPU, 16, "96 cores for 1 process"),
        (2, None, {"LOCAL_WORLD_SIZE": "4"}, ON_A_GPU, 1, "2 cores for 4 processes"),
        (1, None, {}, ALONE, 0, "1 core for 1 process"),
    ],
)
def test_auto_takes_what_the_cores_of_this_host_leave_each_process_and_says_why(machine, photographs, cores, quota, environ, world, count, where):  # fmt: skip
    machine(cores, quota)
    found = chosen(world, photographs, environ)
    one, several = (
        ("thread", "threads") if world is ALONE else ("process", "processes")
    )  # none beside a GPU's launching thread
    assert (found.kind, found.count) == (several, count)
    words = "none, the training process itself" if count == 0 else f"{count} {several if count > 1 else one}"
    assert found.about.startswith(f"data workers: {words} (auto: {where}") and found.about.endswith(" ms)")


@pytest.mark.parametrize(
    ("milliseconds", "world", "count"),
    [(0.2, ALONE, 0), (0.2, ON_A_GPU, 2), (0.02, ON_A_GPU, 0), (0.4, ON_A_GPU, 7)],
)
def test_beside_a_gpu_small_images_get_a_few_workers_too(machine, photographs, monkeypatch, milliseconds, world, count):
    machine(8)
    monkeypatch.setattr(workers, "milliseconds_per_image", lambda *_: milliseconds)
    assert chosen(world, photographs).count == count


class Timed:
    """Images whose costs are known: a slow first read, thumbnails at the start, photographs after them."""

    def __init__(self, costs: list[float]):
        self.costs, self.now, self.seen = costs, 0.0, []

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, draw):
        self.now += self.costs[draw[1]] / 1000 + (10 if draw[1] not in self.seen else 0)
        self.seen.append(draw[1])

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("costs", "anywhere", "measured", "expected"),
    [
        ([0.1] + [6.0] * 5, True, [0, 1, 2, 3, 4, 5], 5.0167),
        ([0.1] * 10 + [6.0] * 50, True, [0, 10, 20, 30, 40, 50], 5.0167),
        ([0.1] * 10 + [6.0] * 50, False, [0, 1, 2, 3, 4, 5], 0.1),
        ([3.0], True, [0], 3.0),
    ],
)
def test_one_small_image_does_not_make_the_others_look_cheap(monkeypatch, costs, anywhere, measured, expected):
    images = Timed(costs)
    monkeypatch.setattr(workers, "time", images)
    assert workers.milliseconds_per_image(images, 1, anywhere) == pytest.approx(expected, rel=1e-3)
    assert [*dict.fromkeys(images.seen)] == measured


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "threads"),
        ({"preprocessing": "cpu_reference"}, "processes"),
        ({"worker_type": "processes"}, "processes"),
        ({"preprocessing": "cpu_reference", "worker_type": "threads"}, "threads"),
    ],
)
def test_the_fast_path_has_threads_and_others_have_processes_unless_the_settings_say(machine, photographs, values, kind):  # fmt: skip
    machine(3)
    found = chosen(ALONE, photographs, **values)
    assert (found.kind, found.count) == (kind, 2)
    machine(2)
    assert f"data workers: 1 {'thread' if kind == 'threads' else 'process'} (auto" in chosen(ALONE, photographs, **values).about  # fmt: skip


def test_auto_takes_none_for_images_that_cost_less_than_to_hand_them_over(machine):
    machine(16)
    found = chosen(ON_A_GPU, Tiny())
    assert found.count == 0 and "an image costs 0.00 ms, too little to hand over" in found.about


@pytest.mark.parametrize(
    ("cores", "processes", "asked", "most"), [(2, 1, 2, None), (2, 1, 3, 2), (8, 4, 4, 2), (1, 1, 1, None), (4, 8, 2, 1)]
)  # fmt: skip
def test_more_workers_than_cores_are_had_but_with_a_warning_that_names_the_symptom(machine, cores, processes, asked, most):  # fmt: skip
    machine(cores)
    found = chosen(ALONE, Tiny(), {"LOCAL_WORLD_SIZE": str(processes)}, num_workers=asked)
    assert found.count == asked and f"{asked} thread" in found.about and "as num_workers says" in found.about
    assert ("WARNING" in found.about) == (most is not None)
    if most is not None:
        assert "the CPU is at 100 % and the GPU waits for data" in found.about
        assert found.about.endswith(f"set num_workers to auto, or to {most} or less")


def test_the_choice_is_said_and_used_by_both_loaders(machine, tmp_path):
    machine(3)
    (tmp_path / "photographs").symlink_to(FOLDER)
    for kind in ("threads", "processes"):
        said, settings = [], LabelledImageSettings(image_size=224, global_batch_size=2, worker_type=kind)
        data = open_data(tmp_path, tmp_path, settings, 3)
        loaders = open_loaders(data, settings, ALONE, batch_size_per_device=2, log=said.append)
        assert said == [loaders.workers.about] and (loaders.workers.kind, loaders.workers.count) == (kind, 2)
        for loader in (loaders.train, loaders.validation.loader):
            assert (loader.threads if kind == "threads" else loader.num_workers) == 2


def test_beside_a_gpu_workers_are_no_forks_of_the_training_process(machine, tmp_path, monkeypatch):
    """tests/entrypoints has another default, so the loaders are made where fork is."""
    monkeypatch.setattr(multiprocessing.context, "_default_context", multiprocessing.get_context("fork"))
    machine(3)
    (tmp_path / "photographs").symlink_to(FOLDER)
    settings = LabelledImageSettings(image_size=224, global_batch_size=2, worker_type="processes")
    data = open_data(tmp_path, tmp_path, settings, 3)
    for world, method in ((ON_A_GPU, "forkserver"), (ALONE, None)):
        loaders = open_loaders(data, settings, world, batch_size_per_device=2)
        for loader in (loaders.train, loaders.validation.loader):
            context = loader.multiprocessing_context
            assert (context.get_start_method() if context is not None else None) == method
            assert loader.worker_init_fn is in_own_group


STOPPED = """
    import os, signal, sys, time
    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: print("reported", flush=True))
    sys.path.insert(0, {entrypoints!r})
    import torch
    from torch.utils.data import DataLoader
    from training.data import worker_processes
    from training.data.worker_processes import from_clean_server, in_own_group

    worker_processes.PRELOADED = ("torch",)

    class Slow:
        def __len__(self):
            return 6
        def __getitem__(self, number):
            time.sleep(0.2)
            return number

    if __name__ == "__main__":
        context = from_clean_server() if {clean} else "fork"
        loader = DataLoader(Slow(), num_workers=1, multiprocessing_context=context, worker_init_fn=in_own_group)
        for count, batch in enumerate(loader):
            if count == 1:
                os.killpg(0, signal.SIGTERM)
        print("batches", count + 1)
"""


@pytest.mark.parametrize(
    ("device", "values", "begun"),
    [
        ("cuda", {}, 1),
        ("cuda", {"worker_type": "loader"}, 1),
        ("cuda", {"worker_type": "threads"}, 0),
        ("cuda", {"num_workers": 0}, 0),
        ("cpu", {"worker_type": "processes"}, 0),
    ],
)
def test_beside_a_gpu_the_server_of_workers_begins_with_the_run(monkeypatch, device, values, begun):
    calls = []
    monkeypatch.setattr(worker_processes, "from_clean_server", lambda: calls.append(1))
    worker_processes.begin_server(LabelledImageSettings(**values), torch.device(device))
    assert len(calls) == begun


@pytest.mark.parametrize("clean", [True, False])
def test_a_stop_that_goes_to_the_whole_group_leaves_the_workers_of_the_last_steps(tmp_path, clean):
    """torchrun and Open MPI signal the process group; the ranks then agree, which takes steps and their batches."""
    script = tmp_path / "stopped.py"
    script.write_text(textwrap.dedent(STOPPED.format(entrypoints=str(ROOT / "entrypoints"), clean=clean)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["reported", "batches", "6"]


def test_all_processes_have_as_many_workers(tmp_path):
    """Each measures what an image costs; where it costs one nearly nothing, none has any."""
    ranks = """
        from training.data import workers
        from training.settings.scripts import LabelledImageSettings

        workers.usable_cores = lambda: 16
        workers.milliseconds_per_image = lambda *_: [5.0, 0.01][int(os.environ["RANK"])]
        with process_group() as world:
            print(*[f"{(found := workers.choose(LabelledImageSettings(), world, [])).count} {found.about}"])
        """
    first, second = run_ranks(tmp_path, ranks)
    assert first.stdout.startswith("0 ") and "an image costs 5.00 ms; another process can have 0)" in first.stdout, (
        first
    )
    assert second.stdout.startswith("0 ") and "too little to hand over)" in second.stdout, second


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("number", ["SIGABRT", "SIGKILL"])
def test_a_process_that_is_killed_leaves_nothing_that_keeps_its_output_open(tmp_path, clean, number):
    """NCCL's watchdog aborts it, and a host without memory kills it; AWS's toolkit then reads its output to the end."""
    text = textwrap.dedent(STOPPED.format(entrypoints=str(ROOT / "entrypoints"), clean=clean))
    text = text.replace("os.killpg(0, signal.SIGTERM)", f"os.kill(os.getpid(), signal.{number})")
    script = tmp_path / "killed.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, cwd="/"
    )
    assert done.returncode == -signal.Signals[number]


def test_the_server_of_workers_has_imported_what_they_need(tmp_path):
    """Wherever the script was started: a server that finds nothing to import says nothing."""
    script = tmp_path / "preloaded.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT / "entrypoints")!r})
        from training.data.worker_processes import from_clean_server

        def look(pipe):
            pipe.send("training.engine.loop" in sys.modules)

        if __name__ == "__main__":
            context = from_clean_server()
            here, there = context.Pipe()
            process = context.Process(target=look, args=(there,))
            process.start()
            print(here.recv())
            process.join()
        """)
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, cwd="/", env=environment
    )
    assert done.stdout.strip() == "True", done.stderr


def test_so_has_the_server_of_ranks_and_loader_processes_in_these_tests(tmp_path):
    """Else each of them imports it anew, which takes seconds and is noticed by nothing else. In a process of its own: in this one, tests of
    another folder may have started a server before."""
    text = f"print([name in sys.modules for name in {worker_processes.PRELOADED}])"
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from tests.entrypoints.ranks import run_ranks
        if __name__ == "__main__":
            [rank] = run_ranks(Path({str(tmp_path)!r}), {text!r}, size=1)
            print(rank.stdout)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "entrypoints")])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == str([True] * len(worker_processes.PRELOADED)), done.stderr

"""What all tests share: a run store of their own, scripts without torch, and ways to see which processes are left."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import launcher
from launcher.commands import foreground, main
from launcher.commands.exit_codes import INTERRUPTED
from launcher.prepare import prepare

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "entrypoints"))  # as the toolkit puts the code folder there

WITH_DOCKER = bool(os.environ.get("LAUNCHER_TEST_DOCKER"))
"""Whether the tests with a real Docker engine are wanted. They then run or fail: none is skipped."""

OF_DOCKER = [
    "docker",
    *(f"local_mode/test_{name}.py" for name in ("engine", "labelling", "sdk_containers", "tune", "your_ci")),
]
# `make compat-v3` runs these, where SDK v3 is installed in place of v2
OF_SDK_V3 = [] if os.environ.get("LAUNCHER_TEST_SDK_V3") else ["aws/sdk_v3"]
collect_ignore = OF_SDK_V3 if WITH_DOCKER else OF_DOCKER + OF_SDK_V3

WEIRD_NAMES = ["plain", "a blank", "it's", 'quo"te', "a'; echo foo", "ünï-码", "a#b?c%20d"]


def write_batch(folder: Path, images: int = 64) -> None:
    """Files with the names of images of one class, as many as a batch of the built-in configs has."""
    (folder / "0").mkdir(parents=True, exist_ok=True)
    for number in range(images):
        (folder / f"0/{number}.png").touch()


def thin_out(folder: Path, keep: int) -> None:
    """Leave the first so many files of every folder: the emulator moves each by a request of its own."""
    for place, _, files in os.walk(folder):
        for name in sorted(files)[keep:]:
            os.unlink(os.path.join(place, name))


def copy_few(source: Path, target: Path, keep: int) -> None:
    """Copy a folder, with the first `keep` files of each folder in it."""

    def others(place: str, names: list[str]) -> list[str]:
        return sorted(name for name in names if os.path.isfile(os.path.join(place, name)))[keep:]

    shutil.copytree(source, target, ignore=others)


def pytest_collection_finish() -> None:
    """Torch, the SDK and all else that is imported live as long as this process: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where the tests with Docker are wanted, one that is skipped has failed."""
    report = yield
    if WITH_DOCKER and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped, with LAUNCHER_TEST_DOCKER set: {report.longrepr[2]}"
    return report


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> Path:
    """A run store that only this test sees, and no defaults of the user's."""
    folder = tmp_path / "store"
    monkeypatch.setenv("LAUNCHER_RUNS", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


@contextlib.contextmanager
def shared_store(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """As `store`, for a run that several tests look at: in a fixture of their module, which runs before that of each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHER_RUNS", str(folder / "store"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        yield patch


def job_of(source: Path, text: str, **values) -> launcher.Job:
    """A job of a script's text, which is written into the source folder."""
    source.mkdir(parents=True, exist_ok=True)
    (source / "script.py").write_text(textwrap.dedent(text))
    return launcher.from_values({"name": "test", "script": "script.py", "source": str(source), **values})


@pytest.fixture(scope="session")
def made_once(request, tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Gives a folder that the first of pytest's workers that asks for it makes: `made_once("digits", make)`. It is one for all of them,
    so nothing is changed in it."""
    own = tmp_path_factory.getbasetemp()
    # pytest-xdist's workers have folders of their own, in one folder
    place = (own.parent if hasattr(request.config, "workerinput") else own) / "made-once"
    place.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = place / name, place / f"{name}.done"
        with open(place / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def prepared(made_once) -> Callable[[str], Path]:
    """Gives the folder that `launcher prepare` makes of `digits`, `photos` or `shapes`, once for all of pytest's workers."""
    return lambda source: made_once(source, lambda folder: prepare(source, folder, jobs=1))


@pytest.fixture
def script_job(tmp_path):
    """Makes a job of a script's text: `script_job(text, distribution="torchrun", …)`."""

    def make(text: str, folder: str = "source", **values) -> launcher.Job:
        return job_of(tmp_path / folder, text, **values)

    return make


@pytest.fixture
def typed_here(capsys):
    """Types a command in this process: `typed_here("show", "nothing").stderr`. One of its own would first import all anew."""

    def typed(*words: object) -> subprocess.CompletedProcess[str]:
        try:
            code = main.main([*map(str, words)])
        except SystemExit as ended:  # the parser's, of a wrong command line
            code = int(ended.code or 0)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return typed


def as_in_a_terminal() -> None:
    """For a child that a test interrupts, as its `preexec_fn`: what `nohup` and a shell's `&` make this process ignore, it does not."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def interrupt():
    """What Ctrl-C does in a terminal: `nohup` and a shell's `&` make this process ignore it, and its waits would go on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda *_: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def as_typed():
    """Signals as a command finds them in a terminal, until the test is over."""
    found = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in found.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def exit_code(plan: launcher.Plan, *, detach: bool = False) -> int:
    """What `launcher run` exits with, as it starts this plan."""
    try:
        return foreground.start(plan, Namespace(detach=detach, max_cost=None, logs=False, all=False))
    except KeyboardInterrupt:  # `main` does the same
        return INTERRUPTED


@pytest.fixture
def dropped_interrupt(interrupt, monkeypatch):
    """An `until` that is interrupted within a callback of Python's, as in that of an import's lock. The third time that it is asked, it fails."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    asked: list[launcher.Run] = []

    def until(run: launcher.Run) -> str:
        asked.append(run)
        assert len(asked) < 3, "the interrupt was lost"
        thing = {1, 2}
        watched = weakref.ref(thing, interrupt)
        del thing
        return "" if watched() is None else "not removed"

    return until


SLEEPER = """
    import json, os, pathlib, signal, sys, time
    output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"])
    rank = os.environ.get("RANK", "0")
    def leave(*_):
        (output / f"told-{rank}").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    (output / f"ready-{rank}").touch()
    time.sleep(120)
"""
"""Waits for SIGTERM, and leaves a file when it comes."""

TORCH_LOOP = """
    import time
    import torch
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=4):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
"""
"""Trains for a second, and knows nothing of this kit."""


def processes_of(run_or_folder) -> list[psutil.Process]:
    """Every living process that has to do with a run: its folder stands in the command line or the environment."""
    folder = str(getattr(getattr(run_or_folder, "folder", None), "path", run_or_folder))
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if any(folder in part for part in process.cmdline()) or process.environ().get(
                "SAGEMAKER_BASE_DIR", ""
            ).startswith(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds: float = 60, what: str = "") -> None:
    """Poll until a condition holds; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds} s still not: {what or condition}"
        time.sleep(0.05)


def wait_for_ready(run: launcher.Run, ranks: int) -> None:
    """Until so many SLEEPER ranks wait for their signal."""
    wait_until(
        lambda: len(list(run.folder.path.glob("hosts/*/opt/ml/output/data/ready-*"))) == ranks,
        90,
        f"{ranks} ready ranks",
    )


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, also where its parent has not noticed yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return True


def assert_nothing_left(run: launcher.Run) -> None:
    """Within some seconds of its end, a run has no process any more."""
    wait_until(lambda: not processes_of(run), 30, f"no process left of {run.name}, but {processes_of(run)}")

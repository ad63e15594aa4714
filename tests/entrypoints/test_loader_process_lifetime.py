"""Loader processes: how long one lives, what an abandoned iteration leaves behind, and how a failure in one is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from training.data import loader_processes
from training.data.decode.decoding import BrokenImage
from training.data.loader_serving import leave_the_cores
from training.data.threads import AHEAD
from training.runtime.failure import describe

from tests.conftest import ROOT, wait_until

from .numbered_images import Numbers, batches_of, loader, processes
from .test_loader_processes import SEVERAL, SLOTS, _nothing_is_left

__all__ = ["_nothing_is_left"]


class Unready(Numbers):
    def begin_batch(self, draws):
        raise FileNotFoundError("the shard is gone")


class Unspeakable(Exception):
    """It cannot be pickled."""

    def __init__(self, one: object, other: object):
        super().__init__(f"{one} and {other}")


class Failing(Numbers):
    def __getitem__(self, draw: tuple[int, int]):
        raise Unspeakable("this", "that")


# -- its life ----------------------------------------------------------------------------------------------------------


def test_one_process_makes_all_epochs_of_training_and_held_out_images_have_one_for_each_pass():
    made = loader(Numbers(), batches_of(4, 4))
    assert len([*made]) == 2
    [first] = processes()
    assert len([*made]) == 2 and processes() == [first]
    assert len([*loader(Numbers(), batches_of(4, 4), zero_copy=False)]) == 2 and processes() == [first]


def test_there_is_a_process_for_each_worker_and_they_stay():
    made = loader(Numbers(), batches_of(*[4] * 6), 3)
    assert len([*made]) == 6
    kept = processes()
    assert len(kept) == 3 and len([*made]) == 6 and sorted(kept, key=id) == sorted(processes(), key=id)


def test_it_leaves_the_cores_to_the_training_thread_and_its_stop_to_the_training_process():
    made = loader(Numbers(), batches_of(4, 4))
    assert len([*made]) == 2
    [process] = processes()
    tasks = [int(task) for task in os.listdir(f"/proc/{process.pid}/task")]
    idle = [task for task in tasks if os.sched_getscheduler(task) == os.SCHED_IDLE]
    assert len(idle) == 2 + 1, (
        "two that talk to the training process, and the data worker; libraries may have others, which wait"
    )
    assert os.getpgid(process.pid) == process.pid, "torchrun and mpirun send SIGTERM to the training process's group"


BROKEN = 4 * (AHEAD + 4)


class OneSlow(Numbers):
    """Of a batch whose first image is broken, the second one is still made when that is known."""

    def __getitem__(self, draw: tuple[int, int]):
        time.sleep(0.5 if draw == (1, BROKEN + 1) else 0)
        if draw == (1, BROKEN):
            raise BrokenImage("broken")
        return super().__getitem__(draw)


def test_what_a_thread_still_makes_of_a_batch_that_failed_does_not_get_into_another():
    batches = batches_of(*[4] * 12)
    made = loader(OneSlow(), batches)
    with pytest.raises(BrokenImage):
        for _ in made:
            pass
    made.batch_sampler = [[(2, 100 + number) for _, number in batch] for batch in batches]
    for number, (images, labels) in enumerate(made):
        time.sleep(0.25 if number < SLOTS else 0)
        assert images[:, 0, 0, 0].tolist() == labels.tolist() == [*range(100 + 4 * number, 104 + 4 * number)]


@pytest.mark.parametrize("count", SEVERAL)
@pytest.mark.parametrize("taken", [0, 1, AHEAD + 4])
def test_an_abandoned_iteration_is_none_of_the_next_ones(taken, count):
    batches = batches_of(*[4] * 12)
    made = loader(Numbers(slow=0.002), batches, count)
    begun = iter(made)
    for _ in range(taken):
        next(begun)
    begun.close()
    assert [labels.tolist() for _, labels in made] == [[number for _, number in batch] for batch in batches]


def test_a_second_iteration_ends_a_first_that_something_still_holds():
    made = loader(Numbers(), batches_of(4, 4, 4, 4))
    first = iter(made)
    next(first)
    assert [labels[0].item() for _, labels in made] == [0, 4, 8, 12]
    assert next(first, None) is None


@pytest.mark.parametrize("count", SEVERAL)
def test_an_iteration_that_was_interrupted_is_followed_by_a_whole_one(monkeypatch, count):
    made = loader(Numbers(), batches_of(*[4] * 12), count)
    begun = iter(made)
    for _ in range(5):
        next(begun)
    before = processes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Connection, "recv", interrupted)
        next(begun)
    assert not any(process.is_alive() for process in before)
    assert [labels[0].item() for _, labels in made] == [*range(0, 48, 4)] and len(processes()) == len(before)


def in_a_process(text: str) -> subprocess.Popen[str]:
    program = f"import sys\nsys.path[:0] = {[path for path in sys.path if path]!r}\n" + textwrap.dedent(text)
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


OPEN = """
    from training.data import worker_processes
    from tests.entrypoints.numbered_images import Numbers, batches_of, loader, processes
    worker_processes.PRELOADED = ("training.data.loaders",)
    made = loader(Numbers(slow=0.01), batches_of(*[4] * 500))
    begun = iter(made)
    for _ in range(8):
        next(begun)
    print(processes()[0].pid, flush=True)
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends as it is read
        return False


def test_it_ends_with_a_training_process_that_is_killed():
    with in_a_process(OPEN + "    import time; time.sleep(60)") as started:
        pid = int(started.stdout.readline())
        assert is_there(pid)
        started.kill()
    wait_until(lambda: not is_there(pid))


def test_a_program_that_fails_within_an_iteration_says_why_and_nothing_else():
    with in_a_process(OPEN + "    raise SystemExit('the reason')") as started:
        printed, errors = started.communicate(timeout=120)
    assert started.returncode == 1 and errors == "the reason\n"
    wait_until(lambda: not is_there(int(printed)))


def test_one_that_does_not_end_is_killed_and_waited_for():
    """A signal takes its time too."""
    asked: list[str] = []
    process = SimpleNamespace(
        join=lambda seconds: asked.append("join"), is_alive=lambda: True, kill=lambda: asked.append("kill")
    )
    loader_processes._end([SimpleNamespace(pipe=SimpleNamespace(close=lambda: asked.append("close")), process=process)])
    assert asked == ["close", "join", "kill", "join"]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_what_fails_in_it_is_raised_where_the_batch_is_awaited_and_the_process_goes_on():
    made = loader(Numbers(fails=(17,)), batches_of(*[4] * 12))
    begun = iter(made)
    for number in range(4):
        assert next(begun)[1].tolist() == [*range(4 * number, 4 * number + 4)]
    with pytest.raises(BrokenImage, match=r"^image 17 is broken$") as raised:
        next(begun)
    assert "in __getitem__" in str(raised.value.__cause__), "where it happened"
    assert next(iter(made))[1].tolist() == [0, 1, 2, 3] and len(processes()) == 1


@pytest.mark.parametrize(
    ("dataset", "error", "words"),
    [(Unready(), FileNotFoundError, "^the shard is gone$"), (Failing(), RuntimeError, "^Unspeakable: this and that$")],
)
def test_other_failures_of_a_dataset_come_too(dataset, error, words):
    with pytest.raises(error, match=words):
        next(iter(loader(dataset, batches_of(4, 4))))


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from training.data import worker_processes
from tests.entrypoints.numbered_images import Numbers, batches_of, loader

worker_processes.PRELOADED = ("training.data.loaders",)

class Odd(Exception):
    pass

class Images(Numbers):
    def __getitem__(self, draw):
        raise Odd("so it is")

if __name__ == "__main__":
    next(iter(loader(Images(), batches_of(4, 4))))
"""


def test_an_error_of_the_scripts_own_is_named_by_its_text(tmp_path):
    """Its class has another module's name in the process, and cannot be read from there."""
    (tmp_path / "script.py").write_text(SCRIPT.format(path=[path for path in sys.path if path]))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.endswith("RuntimeError: Odd: so it is\n"), done.stderr


def test_a_failing_sampler_is_no_end_of_the_epoch():
    def sampler():
        yield from batches_of(2, 2, 2)
        raise OSError("the index is gone")

    with pytest.raises(OSError, match="^the index is gone$"):
        list(loader(Numbers(), sampler()))


@pytest.mark.parametrize("count", SEVERAL)
def test_a_killed_process_is_named_with_what_it_probably_died_of(count):
    made = loader(Numbers(), batches_of(*[4] * 50), count)
    begun = iter(made)
    next(begun)
    os.kill(processes()[-1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"a loader process has ended \(killed by signal 9\)") as raised:
        for _ in begun:
            pass
    assert "Lower num_workers, or take an instance type with more memory" in describe(raised.value, "")
    with pytest.raises(RuntimeError, match="a loader process has ended"):
        next(iter(made))


def test_where_the_scheduler_may_not_be_asked_it_competes_and_says_so(monkeypatch, capfd):
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    leave_the_cores()
    assert (
        "competes with the training process for cores (SCHED_IDLE: Operation not permitted): allow"
        in capfd.readouterr().out
    )

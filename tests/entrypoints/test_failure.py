"""The failure file: what the first 1,024 characters tell of a rank's own fault, and of another's."""

from __future__ import annotations

import io
import re
import sys
import types
from pathlib import Path

import pytest
from training.runtime import failure
from training.runtime.failure import CAUSES, LIMIT, OTHER_RANK, Progress, describe, failure_file

from launcher.record.failure_causes import explain
from tests.conftest import wait_until
from tests.entrypoints.ranks import run_ranks, started_ranks, torchrun_environments


@pytest.fixture(autouse=True)
def progress(monkeypatch) -> Progress:
    """A process that has not begun, on a host of its own."""
    monkeypatch.setattr(failure, "progress", Progress())
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    return failure.progress


def raised(error: Exception) -> Exception:
    """The exception with a traceback."""
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_failure_tells_rank_message_place_memory_and_the_end_of_its_traceback(progress):
    progress.step = 120
    lines = describe(raised(ValueError("a broken image")), "3").splitlines()
    assert lines[0] == "rank 3: ValueError: a broken image"
    assert re.fullmatch(r"algo-2, after step 120, process memory at most \d+\.\d GiB", lines[1])
    assert lines[2].lstrip().startswith('File "') and lines[-1].strip() == "raise error"


def test_before_training_there_is_no_step():
    assert "algo-2, before training, " in describe(raised(ValueError("x")), "0")


def test_gpu_memory_is_reported_where_a_gpu_is_used(monkeypatch):
    gib = 2**30
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        memory_allocated=lambda: 3 * gib,
        max_memory_allocated=lambda: 7.5 * gib,
        memory_reserved=lambda: 8 * gib,
        mem_get_info=lambda: (1 * gib, 39.4 * gib),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert ", GPU memory 3.0 GiB, at most 7.5, reserved 8.0 of 39.4\n" in describe(raised(ValueError("x")), "0")


def test_a_device_that_answers_nothing_hides_no_failure(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda = types.SimpleNamespace(is_initialized=lambda: True, memory_allocated=broken)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    text = describe(raised(RuntimeError("CUDA error: device-side assert triggered")), "0")
    assert "cause: a label is outside the model's classes" in text and "process memory" in text


@pytest.mark.parametrize("message", ["x" * 5000, "x\n" * 2500, "CUDA out of memory. " * 100, "ü" * 2000])
def test_a_failure_fits_what_sagemaker_shows(message):
    text = describe(raised(RuntimeError(message)), "3")
    assert len(text) <= LIMIT and text.startswith("rank 3: RuntimeError: ") and "raise error" in text


@pytest.mark.parametrize(
    "error, cause",
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 39.59 GiB total capacity)"), "the GPU's memory is full"),
        (RuntimeError("NCCL error in: NCCLUtils.hpp:317, unhandled cuda error (CUDA out of memory)"), "the GPU's memory is full"),
        (RuntimeError("DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."), "/dev/shm is too small"),
        (RuntimeError("DataLoader worker (pid(s) 9) exited unexpectedly"), "the host's memory is full, or a data worker crashed"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"), "the host's memory is full"),
        (RuntimeError("a long story " * 100 + "CUDA out of memory"), "the GPU's memory is full"),
        (FloatingPointError("the loss is nan at step 12"), "training has diverged"),
        (OSError(28, "No space left on device"), "the disk is full"),
        (IndexError("Target 10 is out of bounds."), "a label is outside"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3456"), "another rank ended without a message"),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete"), "another rank ended without a message"),
        (RuntimeError("NCCL error in: ../ProcessGroupNCCL.cpp:1269, remote process exited or there was a network error"), "another rank ended without a message"),
    ],
)  # fmt: skip
def test_known_causes_come_with_their_fix(error, cause):
    line = describe(raised(error), "0").splitlines()[1]
    assert line.startswith(f"cause: {cause}") and ". " in line


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), ValueError("Gloo")])
def test_a_broken_connection_to_elsewhere_is_no_ranks_fault(error):
    assert "cause: " not in describe(raised(error), "0")


@pytest.mark.parametrize("cause", [*CAUSES, OTHER_RANK])
def test_a_cause_in_the_file_is_not_taken_for_a_symptom_by_the_launcher(cause):
    assert explain(f"cause: {cause.text}") is None


def test_a_data_worker_that_is_killed_is_explained(tmp_path):
    [done] = run_ranks(
        tmp_path,
        """
        class Fatal(torch.utils.data.Dataset):
            def __len__(self):
                return 1
            def __getitem__(self, index):
                os.kill(os.getpid(), signal.SIGKILL)
        with failure_file(out / "failure"):
            list(torch.utils.data.DataLoader(Fatal(), num_workers=1))
        """,
        environments=[{}],
    )
    assert done.returncode == 1 and "cause: the host's memory is full, or a data" in (tmp_path / "failure").read_text()


def test_the_first_failure_of_a_host_is_kept(tmp_path):
    for message in ("first", "second"):
        with pytest.raises(ValueError), failure_file(tmp_path / "output/failure"):
            raise ValueError(message)
    assert (tmp_path / "output/failure").read_text().startswith("rank 0: ValueError: first")


FAILING = """
        from training.runtime import failure
        with failure_file(out / f"failure-{os.environ['RANK']}"), process_group() as world:
            failure.progress.step = 5
            world.all_reduce_sum(torch.zeros(1))
            FAULT
            world.all_reduce_sum(torch.zeros(1))
"""


def on_two_hosts() -> list[dict[str, str]]:
    return [{**given, "SM_CURRENT_HOST": f"algo-{rank + 1}"} for rank, given in enumerate(torchrun_environments(2))]


def test_a_rank_that_only_feels_anothers_fault_names_it(tmp_path):
    done = run_ranks(
        tmp_path,
        FAILING.replace("FAULT", "if world.rank == 1: raise ValueError('a broken image')"),
        environments=on_two_hosts(),
    )
    assert [item.returncode for item in done] == [1, 1]
    culprit, witness = ((tmp_path / f"failure-{rank}").read_text() for rank in (1, 0))
    assert culprit.startswith("rank 1: ValueError: a broken image\nalgo-2, after step 5, ")
    assert "\ncause: the first to fail was rank 1: ValueError: a broken image (algo-2, after step 5)\n" in witness


def test_a_rank_that_is_killed_leaves_the_others_with_where_to_look(tmp_path):
    script = FAILING.replace(
        "FAULT", "if world.rank == 1: (out / 'ready').touch(); time.sleep(60)"
    )  # gloo of rank 0 waits
    with started_ranks(tmp_path, script, environments=on_two_hosts()) as processes:
        wait_until((tmp_path / "ready").exists)
        processes[1].kill()
        processes[0].join(60)
        assert processes[0].exitcode == 1
    assert f"\ncause: {OTHER_RANK.text}\n" in (tmp_path / "failure-0").read_text()


def test_a_fault_of_rank_0_is_no_riddle_although_it_keeps_the_store(tmp_path):
    run_ranks(
        tmp_path,
        FAILING.replace("FAULT", "if world.rank == 0: raise ValueError('a full disk')"),
        environments=on_two_hosts(),
    )
    witness = (tmp_path / "failure-1").read_text()
    assert (
        "cause: the first to fail was rank 0: ValueError: a full disk" in witness or "cause: rank 0, which" in witness
    )


def test_ranks_that_feel_a_fault_before_the_faulty_one_tells_do_not_take_its_place(tmp_path):
    """Rank 0's connection breaks first here; what it knows is nothing, and rank 1 still enters what it knows."""
    done = run_ranks(
        tmp_path,
        """
        from training.runtime import failure
        with process_group() as world:
            world.all_reduce_sum(torch.zeros(1))
            for rank, text in ((0, ""), (1, "the reason"), (0, "later")):
                if world.rank == rank:
                    print(failure.progress.report_first(text))
                world.all_reduce_sum(torch.zeros(1))
        print(failure.progress.report_first)
        """,
    )
    assert [item.stdout.splitlines() for item in done] == [["", "the reason", "None"], ["the reason", "None"]], done


def test_a_failure_on_a_full_disk_goes_on_as_it_is_and_leaves_no_empty_file(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    def opened(path: Path, mode: str, encoding: str) -> Full:
        open(path, mode, encoding=encoding).close()
        return Full()

    monkeypatch.setattr(failure, "progress", Progress())
    file = tmp_path / "output/failure"
    with monkeypatch.context() as patch:
        patch.setattr(failure, "open", opened, raising=False)
        with pytest.raises(ValueError, match="the cause"), failure_file(file):
            raise ValueError("the cause")
        failure.record_pending_failure("soon")  # by the thread that watches the other ranks, which goes on
    assert not file.exists()
    with pytest.raises(ValueError), failure_file(file):
        raise ValueError("another rank's")
    assert "another rank's" in file.read_text()


def test_where_no_file_can_be_made_the_failure_goes_on_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(failure, "progress", Progress())
    (tmp_path / "output").touch()
    with pytest.raises(ValueError, match="the cause"), failure_file(tmp_path / "output/failure"):
        raise ValueError("the cause")

"""Who has not come to a collective is written down before native code ends the process, and taken back where training goes on."""

from __future__ import annotations

import re
import signal

import pytest
from training.distributed.collective_watch import LEAVING, Beat, explain, oldest

from tests.entrypoints.ranks import run_ranks, torchrun_environments

MINE = Beat("algo-1", 42, "backward", 480.0, "all_reduce of 22,050,664 values", 1234)


def other(**values) -> Beat:
    return Beat(
        **{
            "host": "algo-2",
            "step": 42,
            "doing": "backward",
            "still": 480.0,
            "number": 1234,
            "collective": None,
            **values,
        }
    )


@pytest.mark.parametrize(
    ("others", "silent", "words"),
    [
        ({1: other(), 2: other(step=41, doing="data_wait", number=1190)}, set(), ["rank 2 (algo-2) is in data_wait after step 41 and has not arrived: it is waiting for input"]),
        ({1: other(step=42, doing="checkpoint", number=1233)}, set(), ["rank 1 (algo-2) is in checkpoint after step 42", "raise process_group_minutes, or checkpoint_every"]),
        ({1: other(step=41, doing="student_forward", number=None)}, set(), ["rank 1 (algo-2) is in student_forward after step 41", "took a different path through the script"]),
        ({1: other(step=40, doing="data_wait", number=1200)}, {1}, ["rank 1 (algo-2) gives no sign of life, last heard from in data_wait after step 40", "it was killed"]),
        ({1: other(), 2: other()}, set(), ["all ranks arrived: the connections between them are broken", "security group"]),
        ({1: other(step=42, doing=LEAVING, number=1233)}, set(), ["rank 1 (algo-2) is in waiting for the other ranks to end", "did not call the same collectives"]),
        ({}, {1}, ["rank 1 was never heard from"]),
        ({1: other(step=42, doing="optimizer", number=None), 2: other(step=42, doing="data_wait", number=None)}, set(), ["cause: rank 2 (algo-2) is in data_wait after step 42"]),
    ],
)  # fmt: skip
def test_the_message_names_the_collective_who_is_missing_and_why(others, silent, words):
    text = explain(0, MINE, others, silent, 600, "nccl")
    head, cause = text.split("\n")
    assert head.startswith(
        "rank 0: 8.0 min in all_reduce of 22,050,664 values (collective number 1234), in backward after step 42"
    )
    assert "after 10 min (process_group_minutes)" in head and cause.startswith("cause: ")
    for each in words:
        assert each in cause


def test_without_a_watchdog_nothing_is_said_of_one():
    assert "(process_group_minutes) it fails" in explain(0, MINE, {}, {1}, 600, "gloo")


def test_the_oldest_collective_that_is_not_done_is_read_from_nccls_flight_recorder():
    entries = [
        {"collective_seq_id": 9, "profiling_name": "nccl:all_gather", "state": "scheduled", "input_sizes": [[8]]},
        {"collective_seq_id": 7, "profiling_name": "nccl:broadcast", "state": "completed", "input_sizes": [[2]]},
        {"collective_seq_id": 8, "profiling_name": "nccl:all_reduce", "state": "started", "input_sizes": [[3, 4], [5]]},
    ]
    assert oldest(entries) == ("all_reduce of 17 values", 8)
    assert oldest(entries[1:2]) == (None, None)


ABORTED = """
    from training.distributed import collective_watch
    from training.runtime import failure
    ends = os.environ["ENDS"]  # long before the time is out rank 0 has written, also on a busy machine
    seconds, collective_watch.PATIENCE, collective_watch.SILENT_BEATS = {
        "abort": (14, 0.23, 8),  # many beats, so that a rank that gets no core for seconds is not taken for a dead one
        "raise": (20, 0.2, 3),
        "late": (40, 0.1, 3),
    }[ends]
    with failure_file(out / os.environ["RANK"] / "failure"):
        with process_group(seconds / 60) as world:
            failure.progress.step = 41
            failure.progress.enter("data_wait")
            if world.rank == 0:
                failure.progress.enter("backward")
                if ends == "abort":  # NCCL's watchdog is a thread that ends the process so
                    import threading
                    threading.Timer(15, os.abort).start()
                    time.sleep(60)
                world.all_reduce_sum(torch.ones(1))
            elif ends == "late":
                while not (out / "0/failure").exists():
                    time.sleep(0.05)
                failure.progress.enter("backward")
                world.all_reduce_sum(torch.ones(1))
                (out / "late").touch()
            else:
                time.sleep(seconds + 2)
"""


def ranks(tmp_path, ends: str) -> list:
    return run_ranks(tmp_path, ABORTED, environments=[{**env, "ENDS": ends} for env in torchrun_environments(2)])


def test_a_process_that_is_aborted_has_left_a_failure_file(tmp_path):
    first, second = ranks(tmp_path, "abort")
    assert "in the collective" not in second.stderr, "a rank that waits for its input is in no collective"
    assert re.search(
        r'rank 1 has been stuck in data_wait after step 41 for 0\.\d min; its main thread is at\n  File "<string>", line \d+',
        second.stderr,
    )
    assert first.returncode == -6 and "Fatal Python error: Aborted" in first.stderr
    text = (tmp_path / "0/failure").read_text()
    assert "in the collective of backward, in backward after step 41" in text
    assert (
        "cause: rank 1 (" in text
        and "is in data_wait after step 41 and has not arrived: it is waiting for input" in text
    )
    assert len(text) <= 1024 and not (tmp_path / "1/failure").exists()


@pytest.mark.slow
def test_an_exception_that_comes_after_all_takes_its_place_and_keeps_the_cause(tmp_path):
    first, _ = ranks(tmp_path, "raise")
    assert first.returncode == 1
    text = (tmp_path / "0/failure").read_text()
    assert text.startswith("rank 0: RuntimeError") and "is in data_wait after step 41 and has not arrived" in text


@pytest.mark.slow
def test_what_was_foretold_is_taken_back_where_training_goes_on(tmp_path):
    first, second = ranks(tmp_path, "late")
    assert first.returncode == second.returncode == 0 and (tmp_path / "late").exists(), first.stderr
    assert "in the collective of backward" in first.stderr and not (tmp_path / "0/failure").exists()


def test_ranks_wait_for_the_first_without_a_collective_longer_than_one_may_take(tmp_path):
    text = """
        def work():
            time.sleep(8)
            return b"listed"
        with failure_file(out / os.environ["RANK"] / "failure"):
            with process_group(6 / 60) as world:  # the others look once a second, and a busy machine takes its time
                found = world.on_rank_zero(work)
                assert (found == b"listed") == world.is_first
                assert world.broadcast_bytes(found) == b"listed"
    """
    for rank in run_ranks(tmp_path, text):
        assert rank.returncode == 0, rank.stderr
        assert not (tmp_path / rank.args[-1] / "failure").exists()


def test_the_first_process_of_each_host_works_while_all_others_wait(tmp_path):
    """Four ranks on two hosts, for longer than a collective may take."""
    hosts = [{**one, "LOCAL_RANK": str(rank % 2)} for rank, one in enumerate(torchrun_environments(4))]
    text = """
        def work():
            time.sleep(8)
            return os.environ["RANK"]
        with process_group(6 / 60) as world:
            print(world.hosts_alone(work))
            assert not world.any(False)
    """
    done = run_ranks(tmp_path, text, size=4, environments=hosts)
    assert [rank.stdout.strip() for rank in done] == ["0", "None", "2", "None"], [rank.stderr for rank in done]


def test_a_rank_that_still_waits_for_the_first_does_not_lose_it_when_that_one_ends(tmp_path):
    """The first holds the store that the others poll, in the end once a second: label_images.py's last work is the first's alone."""
    text = """
        with process_group() as world:
            world.on_rank_zero(lambda: time.sleep(1.5))  # the others look after 1.3 s, and then after 2.3 s
    """
    for rank in run_ranks(tmp_path, text):
        assert rank.returncode == 0, rank.stderr


def test_the_first_does_not_stay_for_a_rank_that_gives_no_sign_of_life(tmp_path):
    text = """
        import signal
        from training.distributed import collective_watch
        collective_watch.SILENCE = 2
        with process_group() as world:
            if not world.is_first:
                os.kill(os.getpid(), signal.SIGKILL)
            ended = time.monotonic()
        print(time.monotonic() - ended)
    """
    first, second = run_ranks(tmp_path, text)
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL), first.stderr
    assert float(first.stdout) > 2, "it could not know before"

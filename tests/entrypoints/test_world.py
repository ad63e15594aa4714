"""The group that processes form: its collectives, a stop that all agree on, and connections that fail: real gloo processes."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from training.distributed import rendezvous
from training.distributed.rendezvous import Wait, in_time
from training.distributed.stop_flag import LAG, StopSignal
from training.distributed.world import World
from training.engine.checkpoints import Checkpoints
from training.settings.distillation import DistillationSettings, TeacherCacheSettings
from training.tasks.distillation import open_cache

from tests.entrypoints.ranks import QUICK, TOGETHER, run_ranks, torchrun_environments

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a single process")


# --- collectives


def test_collectives_of_three_ranks(tmp_path):
    """Averages are over three, since a third is what float32 would round."""
    done = run_ranks(
        tmp_path,
        """
        from training.distributed import world as distributed
        distributed._PIECE_BYTES = 5
        with process_group() as world:
            own = torch.arange(4).reshape(2, 2) + 10 * world.rank
            types = {
                str(kind): world.gather_rows(own.to(kind))
                for kind in (torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.uint8)
            }
            data = bytes(range(13))
            model = nn.BatchNorm1d(1000)
            model.running_mean.fill_(float(world.rank))
            numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0))
            model.running_var.copy_(numbers)
            world.average_buffers(model)
            found = {
                "total": world.all_reduce_sum(torch.ones(2, 2)).tolist(),
                "any": [world.any(world.rank == 2), world.any(False)],
                "all": [world.all(True), world.all(world.rank != 2)],
                "rows": {name: rows.tolist() for name, rows in types.items()},
                "types": [str(rows.dtype) for rows in types.values()] == list(types),
                "bool": world.gather_rows(own % 2 == 0)[:, 1].tolist(),
                "turned": world.gather_rows(own.t()).tolist(),
                "none": list(world.gather_rows(torch.zeros(0, 3)).shape),
                "needs no gradient": world.gather_rows(torch.ones(1, requires_grad=True)).tolist(),
                "bytes": [
                    world.broadcast_bytes(data if world.is_first else None) == data,
                    world.broadcast_bytes(b"" if world.is_first else b"other") == b"",
                ],
                "mean": model.running_mean[:2].tolist(),
                "equal stays": torch.equal(model.running_var, numbers),
                "first": [world.is_first, world.is_first_on_host, world.is_torch_group],
            }
            (out / f"{world.rank}.json").write_text(json.dumps(found))
        """,
        size=3,
    )
    assert [item.returncode for item in done] == [0, 0, 0], done
    rows = [[0, 1], [2, 3], [10, 11], [12, 13], [20, 21], [22, 23]]
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {
            "total": [[3, 3], [3, 3]],
            "any": [True, False],
            "all": [True, False],
            "rows": {f"torch.{kind}": rows for kind in ("float32", "bfloat16", "int16", "int64", "uint8")},
            "types": True,
            "bool": [False] * 6,
            "turned": [[0, 2], [1, 3], [10, 12], [11, 13], [20, 22], [21, 23]],
            "none": [0, 3],
            "needs no gradient": [1, 1, 1],
            "bytes": [True, True],
            "mean": [1, 1],
            "equal stays": True,
            "first": [rank == 0, rank == 0, True],
        }


def test_a_single_process_needs_no_group():
    rows = torch.ones(2, 3)
    assert (
        ALONE.gather_rows(rows) is rows and ALONE.all_reduce_sum(rows) is rows and ALONE.broadcast_bytes(b"x") == b"x"
    )
    assert ALONE.any(True) and not ALONE.any(False) and ALONE.all(True) and not ALONE.all(False)
    assert ALONE.is_first and ALONE.is_first_on_host and not ALONE.is_torch_group
    assert str(ALONE) == "1 process on cpu, process group: none (a single process)"


# --- a stop that all agree on


def test_a_signal_to_one_rank_stops_both_after_the_same_step(tmp_path):
    done = run_ranks(
        tmp_path,
        """
        from training.distributed.data_parallel import distribute
        from training.distributed.stop_flag import StopSignal
        with process_group() as world:
            stop, step = StopSignal(world), 0
            model = distribute(nn.Linear(2, 1), world)
            while True:
                model(torch.ones(1, 2)).sum().backward()  # other collectives are between
                step += 1
                if world.rank == 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop.agreed():
                    break
            stop.finish()
            print(step, world.all_reduce_sum(torch.ones(1)).item())
        """,
    )
    assert [(item.returncode, item.stdout.strip()) for item in done] == [(0, f"{5 + LAG} 2.0")] * 2, done


def test_no_step_waits_for_the_answer_to_its_own_question_and_the_end_waits_for_all(tmp_path):
    """Rank 1 asks nothing before rank 0 has gone past two steps, and rank 0's wait would have an end by the timeout."""
    done = run_ranks(
        tmp_path,
        """
        from training.distributed.stop_flag import StopSignal
        with process_group(timeout_minutes=0.2) as world:
            stop, seen, asked = StopSignal(world), out / "seen", out / "asked"
            if world.rank == 1:
                while not seen.exists():
                    time.sleep(0.01)
                time.sleep(0.2)
                asked.touch()
            for _ in range(2):
                assert not stop.agreed()
            seen.touch()
            stop.finish()
            assert asked.exists()
        """,
    )
    assert [item.returncode for item in done] == [0, 0], done


def test_a_process_alone_stops_at_once(monkeypatch):
    handlers = {}
    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    stop = StopSignal(ALONE)
    assert not stop.agreed()
    [handler] = handlers.values()
    handler()
    assert stop.agreed()
    stop.finish()


# --- connections among ranks that are there


def test_a_wrong_network_interface_is_reported_with_the_cause(tmp_path):
    done = run_ranks(
        tmp_path,
        "with process_group(): pass",
        environments=[{**environment, "GLOO_SOCKET_IFNAME": "absent0"} for environment in torchrun_environments(2)],
    )
    for item in done:
        assert (
            item.returncode == 1 and " got no gloo connection to the other ranks, which have started: " in item.stderr
        ), done
        last = item.stderr.splitlines()[-1]
        assert last.startswith("ConnectionError: rank ") and "GLOO_SOCKET_IFNAME" in last


def test_ranks_that_are_there_and_do_not_connect_end_the_wait(tmp_path):
    """Rank 1 enters and goes no further. Gloo's own limit is the same as ours, and either may be the first."""
    script = """
if os.environ["RANK"] == "1":
    rendezvous.roll_call(rendezvous.read_place(), "gloo", rendezvous.Wait("rank 1", 60))
    while not (out / "over").exists():
        time.sleep(0.02)
else:
    try:
        with process_group(timeout_minutes=0.1): pass
    except (TimeoutError, ConnectionError) as error:
        print(error)
    (out / "over").touch()
"""
    done = run_ranks(tmp_path, QUICK + TOGETHER + script)
    said, _, raised = done[0].stdout.rpartition(
        " s for the gloo connections among 2 ranks, all of which have started\n"
    )
    assert said.startswith("rank 0 on ") and (
        "still waits for the gloo" in raised or "got no gloo connection" in raised
    )
    assert "the hosts' security group must pass all traffic among its own members" in raised
    assert [item.returncode for item in done] == [0, 0], done


def test_a_call_of_torchs_that_never_returns_ends_in_time(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "ANNOUNCE_EVERY", 0.0)
    never = threading.Event()
    with pytest.raises(TimeoutError, match="^after 0.5 s rank 0 still waits for a group: a wall$"):
        in_time(never.wait, Wait("rank 0", 0.5), "a group", "a wall")
    never.set()
    assert capsys.readouterr().out.splitlines()[0] == "rank 0: waiting 0 s for a group"


def test_what_a_call_of_torchs_gives_or_raises_is_passed_on():
    assert in_time(lambda: 3, Wait("rank 0", 60), "a group", "a wall") == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, Wait("rank 0", 60), "a group", "a wall")


def test_what_may_outlast_a_collective_is_done_by_the_first_rank_alone(tmp_path, monkeypatch):
    """A million files on a streamed channel, or checkpoints that are checked: NCCL's time-out would run meanwhile."""
    alone: list[str] = []
    on_rank_zero = World.on_rank_zero

    def recorded(world: World, work):
        alone.append(work.__name__)
        return on_rank_zero(world, work)

    class Images:
        stand_in = staticmethod(int)

        def digest(self) -> str:
            return "files"

        def __len__(self) -> int:
            return 4

        def view_description(self) -> dict:
            return {}

    monkeypatch.setattr(World, "on_rank_zero", recorded)
    Checkpoints(tmp_path / "checkpoints", ALONE).load()
    settings = DistillationSettings(
        student="x", teacher_cache=TeacherCacheSettings(views=1, where=str(tmp_path / "cache"))
    )
    data, teacher = (
        SimpleNamespace(training=Images(), classes=["a", "b"], epoch_images=2),
        SimpleNamespace(digest=lambda: "weights", name="any"),
    )
    open_cache(settings, teacher, data, SimpleNamespace(checkpoint_dir=None), ALONE)
    assert alone == ["_newest_good", "digest"]

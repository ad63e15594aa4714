"""Ranks that find each other or say why not, the group they form and its collectives: real gloo processes, and a stand-in for smddp."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from training.distributed import rendezvous, smddp
from training.distributed import world as distributed
from training.distributed.rendezvous import Place, Wait, in_time, read_place, roll_call
from training.distributed.stop_flag import LAG, StopSignal
from training.distributed.world import World
from training.engine.checkpoints import Checkpoints
from training.settings.scripts import DistillationSettings, TeacherCacheSettings
from training.tasks.distillation import open_cache

from tests.conftest import ROOT, wait_until
from tests.entrypoints.ranks import free_port, run_ranks, started_ranks, torchrun_environments

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "a single process")
ASKED = json.dumps({"sagemaker_distributed_dataparallel_enabled": True, "sagemaker_instance_type": "ml.p4d.24xlarge"})


def mpirun_environments(size: int, stand_in: str) -> list[dict[str, str]]:
    """What ranks find that SageMaker's smdistributed launcher started on one host."""
    path = str(ROOT / "tests/entrypoints/stand_ins" / stand_in)
    common = {"SM_FRAMEWORK_PARAMS": ASKED, "SM_HOSTS": '["127.0.0.1"]', "SMDDP": path, "MASTER_PORT": str(free_port())}
    return [
        {
            **common,
            "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        }
        for rank in range(size)
    ]


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
                "total": world.total(torch.ones(2, 2)).tolist(),
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
    assert ALONE.gather_rows(rows) is rows and ALONE.total(rows) is rows and ALONE.broadcast_bytes(b"x") == b"x"
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
            print(step, world.total(torch.ones(1)).item())
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


# --- smddp


def test_an_smddp_that_cannot_add_up_a_type_is_refused_before_training_with_the_fix(tmp_path):
    ranks = run_ranks(
        tmp_path,
        """
        sys.path.insert(0, os.environ["SMDDP"])
        import torch.distributed as dist
        add_up = dist.all_reduce
        def float32_only(tensor, **options):
            if tensor.dtype == torch.float64:
                raise RuntimeError("unsupported data type")
            return add_up(tensor, **options)
        dist.all_reduce = float32_only
        with process_group() as world:
            pass
        """,
        environments=mpirun_environments(2, "smddp"),
    )
    for rank in ranks:
        assert rank.returncode == 1
        assert (
            "smddp of this image cannot do what the scripts ask: sum of float64: unsupported data type. Set distribution"
            in rank.stderr
        )


@pytest.mark.parametrize("stand_in", ["smddp", "smddp_before_1_4"])
def test_smddp_trains_under_mpirun_alone_in_its_one_group(tmp_path, stand_in):
    done = run_ranks(
        tmp_path,
        """
        sys.path.insert(0, os.environ["SMDDP"])
        import torch.distributed as dist
        from training.distributed.data_parallel import distribute, synchronise
        from training.distributed.stop_flag import StopSignal
        with process_group() as world:
            stop = StopSignal(world)
            torch.manual_seed(world.rank)
            model = nn.Linear(2, 1)
            model.register_buffer("table", torch.tensor([world.rank, 7]))
            trained = distribute(model, world)
            for part in range(2):
                with synchronise(trained, last=part == 1):
                    trained(torch.full((1, 2), float(1 + world.rank + 10 * part))).sum().backward()
            found = {
                "world": str(world),
                "starts as rank 0": len(set(world.gather_rows(model.weight[:, :1]).flatten().tolist())) == 1,
                "table": model.table.tolist(),
                "gradient": model.weight.grad.tolist(),
                "rows": world.gather_rows(torch.tensor([world.rank])).tolist(),
                "bytes": world.broadcast_bytes(b"abc" if world.is_first else None).decode(),
                "flags": [world.any(world.rank == 1), world.all(world.rank == 1), stop.agreed()],
                "torch's own group": world.is_torch_group,
                "refused": [],
            }
            for wanted in ({"static_graph": True}, {"gradient_compression": "bf16"}):
                try:
                    distribute(nn.Linear(2, 1), world, **wanted)
                except ValueError as error:
                    found["refused"].append(str(error))
            stop.finish()
            (out / f"{world.rank}.json").write_text(json.dumps(found))
        print(dist.is_initialized())
        """,
        environments=mpirun_environments(2, stand_in),
    )
    assert [(item.returncode, item.stdout.strip()) for item in done] == [(0, "False")] * 2, done
    older = stand_in == "smddp_before_1_4"
    reason = "the job asks for it, and this is one before 1.4" if older else "the job asks for it"
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        refused = found.pop("refused")
        assert found == {
            "world": f"2 processes on cpu, process group: smddp ({reason})",
            "starts as rank 0": True,
            "table": [0, 7],
            "gradient": [[1.5 + 11.5] * 2],
            "rows": [0, 1],
            "bytes": "abc",
            "flags": [True, False, False],
            "torch's own group": not older,
        }
        assert refused[-1].startswith("gradient_compression: bf16 does not go with smddp") and "torchrun" in refused[-1]
        assert older == (len(refused) == 2) and (not older or refused[0].startswith("static_graph: smddp before 1.4"))


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "launcher, expected",
    [
        ("torchrun", "there is no GPU; smddp was requested but not used: under torchrun its AllReduce falls back to NCCL"),
        ("mpirun", "there is no GPU; smddp was requested but not used: ModuleNotFoundError: No module named 'smdistributed'"),
    ],
)  # fmt: skip
def test_why_smddp_was_not_taken_is_said(monkeypatch, launcher, expected):
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", ASKED)
    assert distributed._choose_backend(Place(0, 2, 0, launcher), CPU)[:2] == ("gloo", expected)


def test_an_smddp_that_refuses_the_instance_type_is_not_taken(monkeypatch, tmp_path):
    """From 2.3.0 on the import itself fails there."""
    package = tmp_path / "smdistributed/dataparallel/torch"
    package.mkdir(parents=True)
    (package / "torch_smddp.py").write_text("raise RuntimeError('ml.g5.xlarge is not supported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", ASKED)
    chosen = distributed._choose_backend(Place(0, 2, 0, "mpirun"), CPU)
    for name in [name for name in sys.modules if name.split(".")[0] == "smdistributed"]:
        monkeypatch.delitem(sys.modules, name)
    assert chosen[0] == "gloo" and chosen[1].endswith("not taken: RuntimeError: ml.g5.xlarge is not supported")


@pytest.mark.parametrize("value, asked", [(None, False), ("{}", False), ('{"sagemaker_distributed_dataparallel_enabled": "true"}', True)])  # fmt: skip
def test_smddp_is_taken_only_where_the_job_asks(value, asked):
    assert smddp.is_asked_for({} if value is None else {"SM_FRAMEWORK_PARAMS": value}) is asked


def test_gpus_take_nccl(monkeypatch):
    monkeypatch.delenv("SM_FRAMEWORK_PARAMS", raising=False)
    assert distributed._choose_backend(Place(0, 2, 0, "torchrun"), torch.device("cuda", 0)) == (
        "nccl",
        "there are GPUs",
        dist,
    )


# --- who a process is

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, (0, 1, 0, "none")),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0, "none")),
        (TORCHRUN, (3, 8, 1, "environment")),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, (3, 8, 1, "torchrun")),
        (MPIRUN, (3, 8, 1, "mpirun")),
        ({**MPIRUN, **TORCHRUN}, (3, 8, 1, "mpirun")),
        ({**MPIRUN, **TORCHRUN, "RANK": "7", "TORCHELASTIC_RUN_ID": "x"}, (7, 8, 1, "torchrun")),
    ],
)
def test_the_place_that_a_launcher_gives(environment, expected):
    assert read_place(dict(environment)) == expected


@pytest.mark.parametrize(
    "environment, text",
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "has RANK, WORLD_SIZE and no LOCAL_RANK"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE and no RANK, LOCAL_RANK"),
        ({"RANK": "3"}, "has RANK and no WORLD_SIZE, LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is 8 and WORLD_SIZE 8: ranks count from 0 to 7"),
    ],
)
def test_half_a_place_is_refused(environment, text):
    with pytest.raises(ValueError, match=text):
        read_place(environment)


def test_under_mpirun_torch_finds_what_torchrun_would_have_set():
    environment = {**MPIRUN, "SM_HOSTS": '["algo-1", "algo-2"]'}
    read_place(environment)
    assert {name: environment[name] for name in (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT")} == {
        **TORCHRUN,
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "7777",
    }


def test_several_hosts_without_a_launcher_are_told_apart(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    with distributed.process_group() as world:
        assert world.size == 1 and world.reason.startswith("a single process on each of 2 hosts")


def test_a_group_that_nobody_says_where_to_meet_is_refused(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="2 processes, but MASTER_ADDR is '' and MASTER_PORT ''.*torchrun"):
        roll_call(Place(1, 2, 1, "environment"), "gloo", Wait("rank 1", 1))


# --- the roll call

QUICK = """
from training.distributed import rendezvous
rendezvous.ANNOUNCE_EVERY = 0.2
"""

TOGETHER = """
(out / os.environ["RANK"]).touch()
while not all((out / rank).exists() for rank in "01"):
    time.sleep(0.01)
"""
"""Lets two ranks begin at the same time, however busy the machine is."""


def test_missing_ranks_and_hosts_are_named_while_waiting_and_in_the_end(tmp_path):
    """Two ranks of five, which are on one host of two; rank 1 is not heard while rank 0 is there."""
    environments = [
        {**environment, "SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1", "algo-2"]'}
        for environment in torchrun_environments(5)[:2]
    ]
    done = run_ranks(
        tmp_path, QUICK + TOGETHER + "with process_group(timeout_minutes=0.05): pass", environments=environments
    )
    missing = "ranks 2-4 (of 5), and anyone from algo-2"
    last = done[0].stdout.splitlines()[-1]
    assert re.fullmatch(rf"rank 0 on algo-1: waiting \d+ s for {re.escape(missing)}", last), done
    assert missing not in done[1].stdout and [item.returncode for item in done] == [1, 1]
    assert f"TimeoutError: after 3 s still missing: {missing}. Their own logs say why" in done[0].stderr
    assert (
        "still missing: ranks 2-4" in done[1].stderr or "ConnectionError: rank 0 ended while rank 1" in done[1].stderr
    )


def test_a_rank_that_is_there_too_late_joins(tmp_path):
    script = """
while os.environ["RANK"] == "1" and "waiting" not in (out / "stdout-0").read_text():
    time.sleep(0.02)
with process_group() as world:
    print(world.size)
"""
    done = run_ranks(tmp_path, QUICK + script)
    assert [item.returncode for item in done] == [0, 0], done
    assert done[0].stdout.splitlines()[0].endswith(" s for rank 1 (of 2)") and done[1].stdout == "2\n"


def test_a_rank_0_that_is_killed_while_others_wait_is_named(tmp_path):
    script, said = QUICK + "with process_group(): pass", tmp_path / "stdout-0"
    with started_ranks(tmp_path, script, environments=torchrun_environments(3)[:2]) as processes:
        wait_until(lambda: said.exists() and "for rank 2 (of 3)" in said.read_text())
        processes[0].kill()
        processes[1].join(60)
        assert processes[1].exitcode == 1
    assert "ConnectionError: rank 0 ended while rank 1 on " in (tmp_path / "stderr-1").read_text()


def test_two_processes_of_one_rank_are_told(tmp_path):
    environments = torchrun_environments(2)
    done = run_ranks(
        tmp_path,
        """
        try:
            with process_group():
                while not (out / "told").exists():
                    time.sleep(0.02)
        except ValueError as error:
            print(error)
            (out / "told").touch()
        """,
        environments=[*environments, {**environments[1], "SM_CURRENT_HOST": "algo-2"}],
    )
    [text] = [item.stdout for item in done if item.stdout]
    assert text.startswith("two processes have the rank 1, this one and process "), done
    assert text.endswith(": gloo of 2: give each host a --node_rank of its own\n") and not done[0].stdout


def test_ranks_that_want_different_backends_do_not_hang(tmp_path):
    done = run_ranks(
        tmp_path,
        """
        from training.distributed import rendezvous
        from training.distributed.rendezvous import Wait, read_place, roll_call
        place, kinds = read_place(), rendezvous._kinds
        if place.rank == 1:  # still reads when rank 0, which keeps the list, could be gone
            rendezvous._kinds = lambda *given: (time.sleep(0.5), kinds(*given))[1]
        roll_call(place, "nccl" if place.rank else "gloo", Wait(f"rank {place.rank}", 30))
        """,
    )
    for item in done:
        assert item.stderr.splitlines()[-1] == (
            "ValueError: the ranks do not fit together: rank 0 on gloo of 2; rank 1 on nccl of 2. "
            "Give every host the same image, devices and command"
        )


def unreached(monkeypatch, host: str, port: int, capsys) -> tuple[str, str]:
    """What rank 1 says while it does not reach rank 0, and in the end."""
    monkeypatch.setattr(rendezvous, "ANNOUNCE_EVERY", 0.05)
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(TimeoutError) as raised:
        roll_call(Place(1, 2, 1, "environment"), "gloo", Wait("rank 1 on algo-2", 0.5))
    return capsys.readouterr().out, str(raised.value)


def test_a_name_that_is_not_known_is_told(monkeypatch, capsys):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # a resolver may take its time to say so
    said, raised = unreached(monkeypatch, "algo-9", 7777, capsys)
    cause = "the name algo-9 cannot be resolved, because that host is not up, or MASTER_ADDR is wrong"
    assert said.splitlines()[0] == f"rank 1 on algo-2: waiting 0 s for rank 0 at algo-9:7777: {cause}"
    assert raised == f"after 0.5 s rank 1 on algo-2 has not reached rank 0 at algo-9:7777: {cause}"


def test_a_host_that_refuses_has_no_rank_0_yet(monkeypatch, capsys):
    said, raised = unreached(monkeypatch, "127.0.0.1", free_port(), capsys)
    for text in (said, raised):
        assert "the host answers but nothing listens yet, because rank 0 is still starting or has ended" in text


def test_silence_points_at_the_security_group(monkeypatch, capsys):
    """A listener whose queue is full drops packets, as a security group does."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for caller in (first, second):
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        _, raised = unreached(monkeypatch, *full.getsockname(), capsys)
    assert "no answer (timed out), because that host is down, or a firewall blocks it: let the security group" in raised


def test_a_port_that_is_taken_is_said(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(ConnectionError, match="rank 0 got no store at 127.0.0.1:.*Another run may hold the port"):
            roll_call(Place(0, 2, 0, "environment"), "gloo", Wait("rank 0", 5))


def test_restarted_workers_meet_anew_in_the_store_of_torchruns_agent(tmp_path):
    """The agent's store outlives the workers; this test keeps it in the agent's place."""
    environments = torchrun_environments(2)
    port = int(environments[0]["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), False)
    for restart in range(2):
        agent = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_RUN_ID": "x",
        }
        done = run_ranks(
            tmp_path,
            """
            from training.distributed.rendezvous import Wait, read_place, roll_call
            for _ in range(2):  # and twice in one process
                with process_group() as world:
                    print(world.total(torch.ones(1)).item())
            if world.is_first:  # who was there then is not there now
                try:
                    roll_call(read_place(), "gloo", Wait("rank 0", 0.2))
                except TimeoutError as error:
                    print(str(error).partition(". ")[0])
            """,
            environments=[{**environment, **agent} for environment in environments],
        )
        said = [item.stdout.splitlines() for item in done]
        assert said == [["2.0", "2.0", "after 0.2 s still missing: rank 1 (of 2)"], ["2.0", "2.0"]], done
    del store


# --- connections among ranks that are there


def test_a_wrong_network_interface_is_told_with_the_cause(tmp_path):
    done = run_ranks(
        tmp_path,
        "with process_group(): pass",
        environments=[{**environment, "GLOO_SOCKET_IFNAME": "absent0"} for environment in torchrun_environments(2)],
    )
    for item in done:
        assert item.returncode == 1 and " got no gloo connection to the others, which are there: " in item.stderr, done
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
        with process_group(timeout_minutes=0.05): pass
    except (TimeoutError, ConnectionError) as error:
        print(error)
    (out / "over").touch()
"""
    done = run_ranks(tmp_path, QUICK + TOGETHER + script)
    said, _, raised = done[0].stdout.rpartition(" s for the gloo connections among 2 ranks, which are all there\n")
    assert said.startswith("rank 0 on ") and (
        "still waits for the gloo" in raised or "got no gloo connection" in raised
    )
    assert "the hosts' security group must pass all traffic among its own members" in raised
    assert [item.returncode for item in done] == [0, 0], done


def test_a_call_of_torchs_that_never_returns_ends_in_time(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "ANNOUNCE_EVERY", 0.1)
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
    first_alone = World.first_alone

    def recorded(world: World, work):
        alone.append(work.__name__)
        return first_alone(world, work)

    class Files:
        def digest(self) -> str:
            return "files"

    class Images:
        source = Files()
        stand_in = staticmethod(int)

        def __len__(self) -> int:
            return 4

        def view_description(self) -> dict:
            return {}

    monkeypatch.setattr(World, "first_alone", recorded)
    Checkpoints(tmp_path / "checkpoints", ALONE).load()
    settings = DistillationSettings(
        student="x", teacher_cache=TeacherCacheSettings(views=1, where=str(tmp_path / "cache"))
    )
    data, teacher = SimpleNamespace(training=Images(), classes=["a", "b"]), SimpleNamespace(digest=lambda: "weights")
    open_cache(settings, teacher, data, None, ALONE)
    assert alone == ["_newest_good", "digest"]

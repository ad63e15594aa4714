"""Who a process is by its launcher, and the roll call: ranks find each other or report why not."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from training.distributed import rendezvous
from training.distributed import world as distributed
from training.distributed.rendezvous import Place, Wait, read_place, roll_call

from tests.conftest import wait_until
from tests.entrypoints.ranks import QUICK, TOGETHER, free_port, run_ranks, started_ranks, torchrun_environments

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
        ({"RANK": "1", "WORLD_SIZE": "2"}, "has RANK, WORLD_SIZE but no LOCAL_RANK"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE but no RANK, LOCAL_RANK"),
        ({"RANK": "3"}, "has RANK but no WORLD_SIZE, LOCAL_RANK"),
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


def test_missing_ranks_and_hosts_are_named_while_waiting_and_in_the_end(tmp_path):
    """Two ranks of five, which are on one host of two; rank 1 is not heard while rank 0 is there."""
    environments = [
        {**environment, "SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1", "algo-2"]'}
        for environment in torchrun_environments(5)[:2]
    ]
    done = run_ranks(
        tmp_path, QUICK + TOGETHER + "with process_group(timeout_minutes=0.1): pass", environments=environments
    )
    missing = "ranks 2-4 (of 5), and anyone from algo-2"
    last = done[0].stdout.splitlines()[-1]
    assert re.fullmatch(rf"rank 0 on algo-1: waiting \d+ s for {re.escape(missing)}", last), done
    assert missing not in done[1].stdout and [item.returncode for item in done] == [1, 1]
    assert f"TimeoutError: after 6 s still missing: {missing}. Their own logs say why" in done[0].stderr
    assert (
        "still missing: ranks 2-4" in done[1].stderr or "ConnectionError: rank 0 ended while rank 1" in done[1].stderr
    )


def test_a_rank_that_is_there_too_late_joins(tmp_path):
    script = """
said = out / "stdout-0"  # which rank 0 makes
while os.environ["RANK"] == "1" and not (said.exists() and "for rank 1 (of 2)" in said.read_text()):
    time.sleep(0.02)
with process_group() as world:
    print(world.size)
"""
    done = run_ranks(tmp_path, QUICK + script)
    assert [item.returncode for item in done] == [0, 0], done
    assert any(line.endswith(" s for rank 1 (of 2)") for line in done[0].stdout.splitlines())
    assert done[1].stdout.splitlines()[-1] == "2"  # rank 1 may have waited too, for the store


def test_a_rank_0_that_is_killed_while_others_wait_is_named(tmp_path):
    script, said = QUICK + "with process_group(): pass", tmp_path / "stdout-0"
    with started_ranks(tmp_path, script, environments=torchrun_environments(3)[:2]) as processes:
        wait_until(lambda: said.exists() and "for rank 2 (of 3)" in said.read_text())
        processes[0].kill()
        processes[1].join(60)
        assert processes[1].exitcode == 1
    assert "ConnectionError: rank 0 ended while rank 1 on " in (tmp_path / "stderr-1").read_text()


def test_ranks_count_those_of_their_host_where_no_launcher_says_how_many(tmp_path):
    """Else each of eight would take the cores, the memory and the shards of all."""
    environments = [
        {**one, "SM_CURRENT_HOST": f"algo-{1 + rank // 2}"} for rank, one in enumerate(torchrun_environments(3))
    ]
    code = "with process_group():\n    print(os.environ['LOCAL_WORLD_SIZE'])"
    assert [done.stdout for done in run_ranks(tmp_path, code, environments=environments)] == ["2\n", "2\n", "1\n"]


def test_two_processes_of_one_rank_are_reported(tmp_path):
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
    assert text.startswith("two processes have rank 1, this one and process "), done
    assert text.endswith(": gloo of 2: give each host its own --node_rank\n") and not done[0].stdout


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
            "ValueError: the ranks do not match: rank 0 on gloo of 2; rank 1 on nccl of 2. "
            "Give every host the same image, devices and command"
        )


def unreached(monkeypatch, host: str, port: int, capsys) -> tuple[str, str]:
    """What rank 1 says while it does not reach rank 0, and in the end."""
    monkeypatch.setattr(rendezvous, "ANNOUNCE_EVERY", 0.0)
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(TimeoutError) as raised:
        roll_call(Place(1, 2, 1, "environment"), "gloo", Wait("rank 1 on algo-2", 3))
    return capsys.readouterr().out, str(raised.value)


def test_a_name_that_is_not_known_is_reported(monkeypatch, capsys):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # a resolver may take its time to say so
    said, raised = unreached(monkeypatch, "algo-9", 7777, capsys)
    cause = "the name algo-9 cannot be resolved, because that host is not up, or MASTER_ADDR is wrong"
    assert said.splitlines()[0] == f"rank 1 on algo-2: waiting 0 s for rank 0 at algo-9:7777: {cause}"
    assert raised == f"after 3 s rank 1 on algo-2 has not reached rank 0 at algo-9:7777: {cause}"


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
        with pytest.raises(
            ConnectionError, match="rank 0 could not open the store at 127.0.0.1:.*Another run may hold the port"
        ):
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
                    print(world.all_reduce_sum(torch.ones(1)).item())
            if world.is_first:  # who was there then is not there now
                try:
                    roll_call(read_place(), "gloo", Wait("rank 0", 2))
                except TimeoutError as error:
                    print(str(error).partition(". ")[0])
            """,
            environments=[{**environment, **agent} for environment in environments],
        )
        said = [item.stdout.splitlines() for item in done]
        assert said == [["2.0", "2.0", "after 2 s still missing: rank 1 (of 2)"], ["2.0", "2.0"]], done
    del store

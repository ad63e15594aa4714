"""smddp: taken where the job asks and the image has it, and checked before training: a stand-in for its module."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist
from training.distributed import smddp
from training.distributed import world as distributed
from training.distributed.rendezvous import Place

from tests.conftest import ROOT
from tests.entrypoints.ranks import free_port, run_ranks

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
            "this image's smddp cannot do what the scripts need: sum of float64: unsupported data type. Set distribution"
            in rank.stderr
        )


def test_an_smddp_that_gives_no_handle_of_a_collective_is_refused_too(tmp_path):
    ranks = run_ranks(
        tmp_path,
        """
        sys.path.insert(0, os.environ["SMDDP"])
        import torch.distributed as dist
        add_up = dist.all_reduce
        def at_once(tensor, async_op=False, **options):
            add_up(tensor, **options)
        dist.all_reduce = at_once
        with process_group() as world:
            pass
        """,
        environments=mpirun_environments(2, "smddp"),
    )
    for rank in ranks:
        assert rank.returncode == 1
        assert "this image's smddp cannot do what the scripts need: asynchronous sum:" in rank.stderr


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
    reason = "the job asks for it, and its version is before 1.4" if older else "the job asks for it"
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
        assert (
            refused[-1].startswith("gradient_compression: bf16 does not work with smddp") and "torchrun" in refused[-1]
        )
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
    assert chosen[0] == "gloo" and chosen[1].endswith("not used: RuntimeError: ml.g5.xlarge is not supported")


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

"""The loop and what it stands on, one process and two: exact evaluation, one step by hand, stops and failures of one rank."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from training.data.batches import EvaluationBatches
from training.distributed import World
from training.evaluation import evaluate
from training.failure import LIMIT, describe, failure_file
from training.reporting import Reporter, metric_line

from launcher.metric_lines import parse_line
from tests.conftest import ROOT

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")


def two_ranks(tmp_path, text: str) -> list[subprocess.CompletedProcess]:
    """Runs a script's text as two gloo ranks; it finds `world`, `torch`, `nn` and `out`, a folder."""
    script = tmp_path / "script.py"
    head = f"""
        import json, os, pathlib, signal, sys, time
        sys.path.insert(0, {str(ROOT / "entrypoints")!r})
        import torch
        from torch import nn
        from training.distributed import process_group
        from training.failure import failure_file
        out = pathlib.Path({str(tmp_path)!r})
    """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    port = str(20000 + os.getpid() % 10000)
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [subprocess.CompletedProcess(item.args, item.wait(90), *item.communicate()) for item in processes]


def test_evaluation_counts_by_hand_with_dropout_off():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9))
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]).view(3, 1, 1, 2)
    loader = [(logits[:2], torch.tensor([0, 0])), (logits[2:], torch.tensor([0]))]
    model.train()
    found = evaluate(model, loader, ALONE)
    loss = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1)) + math.log(1 + math.exp(-3))) / 3
    assert found == pytest.approx({"validation_accuracy": 2 / 3, "validation_loss": loss}, rel=1e-6)
    assert model.training


def test_two_ranks_with_uneven_shares_evaluate_one_model_exactly(tmp_path):
    """Seven images over two ranks, and a BatchNorm whose running statistics differ between them until they are averaged."""
    done = two_ranks(
        tmp_path,
        """
        from training.data.batches import EvaluationBatches
        from training.evaluation import evaluate
        with process_group() as world:
            torch.manual_seed(0)
            images, labels = torch.randn(7, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0])
            model = nn.BatchNorm1d(3)
            model.running_mean.fill_(float(world.rank))
            world.average_buffers(model)
            draws = [[number for _, number in batch] for batch in EvaluationBatches(7, 2, world)]
            found = evaluate(model, [(images[numbers], labels[numbers]) for numbers in draws], world)
            (out / f"{world.rank}.json").write_text(json.dumps([found, model.running_mean.tolist()]))
        """,
    )
    assert [item.returncode for item in done] == [0, 0], done
    torch.manual_seed(0)
    images, labels = torch.randn(7, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(0.5)
    numbers = [[number for _, number in batch] for batch in EvaluationBatches(7, 2, ALONE)]
    expected = evaluate(model, [(images[batch], labels[batch]) for batch in numbers], ALONE)
    for rank in range(2):
        found, mean = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(expected) and mean == [0.5] * 3


def test_a_signal_to_one_rank_stops_both_after_the_same_step(tmp_path):
    done = two_ranks(
        tmp_path,
        """
        from training.stopping import StopSignal
        with process_group() as world:
            stop, step = StopSignal(world), 0
            while True:
                step += 1
                if world.rank == 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop.agreed():
                    break
            print(step)
        """,
    )
    assert [item.stdout.strip() for item in done] == ["5", "5"], done


def test_the_rank_that_failed_is_the_one_that_is_heard(tmp_path):
    done = two_ranks(
        tmp_path,
        """
        with process_group() as world, failure_file(out / "failure"):
            if world.rank == 1:
                time.sleep(0.2)
                raise ValueError("a broken image")
            world.total(torch.zeros(1))
        """,
    )
    assert all(item.returncode for item in done)
    assert (tmp_path / "failure").read_text().startswith("rank 1: ValueError: a broken image\n")


def test_a_failure_fits_what_sagemaker_shows():
    try:
        raise RuntimeError("x" * 5000)
    except RuntimeError as error:
        text = describe(error, "3")
    assert len(text) <= LIMIT and text.startswith("rank 3: RuntimeError: xxx") and "raise RuntimeError" in text


def test_the_first_failure_of_a_host_is_kept(tmp_path):
    for message in ("first", "second"):
        with pytest.raises(ValueError), failure_file(tmp_path / "output/failure"):
            raise ValueError(message)
    assert (tmp_path / "output/failure").read_text().startswith("rank 0: ValueError: first")


@pytest.mark.parametrize(
    "value", [0, 1e-12, -1e-12, 1e-5, -1e-5, 0.0999, 0.1, 1, -7.25, 999.99, 1e6, 1e22, float("nan"), float("-inf")]
)
def test_every_number_can_be_read_from_a_metric_line(value):
    metric = parse_line(metric_line(1, 2, 3, 4, {"loss": value, "images/s": 1.0}))
    assert metric is not None and (metric.epoch, metric.epochs, metric.step, metric.steps) == (1, 2, 3, 4)
    assert metric.values["loss"] == pytest.approx(value, rel=1e-3, abs=1e-12, nan_ok=True)


def test_a_reporter_starts_anew_and_only_rank_0_writes(tmp_path, capsys):
    for _ in range(2):
        Reporter(tmp_path, active=True).metrics(1, 1, 1, 1, {"loss": 0.5})
    Reporter(tmp_path / "other", active=False).metrics(1, 1, 1, 1, {"loss": 0.5})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1 and not (tmp_path / "other").exists()
    assert capsys.readouterr().out == "epoch 1/1 step 1/1 loss 0.5000\n" * 2

"""The loop, with a small real model and real images in memory: steps and parts, resumption, stops, and what it tells."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate
from training.data.batches import LabelledBatch
from training.data.loaders import Data, open_loaders
from training.distributed.world import World
from training.engine.loop import train
from training.engine.run import open_run, total_steps
from training.engine.state import prepare
from training.measure.timeline import Timeline
from training.models.compiled import StaticBatch
from training.models.timm_models import Normalized
from training.runtime.environment import Environment
from training.runtime.reporting import Reporter, metric_line
from training.settings.scripts import TrainingSettings
from training.tasks.classification import Classification

from launcher.record.metric_lines import parse_line
from tests.conftest import ROOT
from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.torch_versions import fp16_on_cpu

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")


class Views(Dataset):
    """Forty images of noise; the view changes their brightness."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 200, (40, 3, 4, 4), generator=generator, dtype=torch.uint8)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, draw):
        view, number = draw
        return self.images[number] + view, number % 3, number % 3, 1.0, number, view


def collate(items, images=None) -> LabelledBatch:
    alone, labels, others, shares, numbers, views = default_collate(items)
    images = alone if images is None else images
    return LabelledBatch(images, labels, others, shares.float(), numbers, views)


DATA = Data(["a", "b", "c"], Views(), Views(), collate)


def network(plain: bool) -> Normalized:
    """A small model; plain: without BatchNorm and dropout, so that an image's result does not depend on who else is there."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 3)]
    if plain:
        layers = [layer for layer in layers if not isinstance(layer, (nn.BatchNorm2d, nn.Dropout))]
    return Normalized(nn.Sequential(*layers), [0.5] * 3, [0.5] * 3)


@dataclass
class Trained:
    outcome: object
    model: nn.Module
    metrics: list[dict]


def run(
    folder: Path, *, world: World = ALONE, plain: bool = False, task=Classification, begin_evaluation=None, **values
) -> Trained:
    """Trains in a folder, where a run before this one may have left checkpoints."""
    settings = TrainingSettings(
        **{"epochs": 3, "global_batch_size": 8, "log_every": 1, "learning_rate": 0.01, **values}
    )
    environment = Environment(
        "algo-1", folder / "model", folder / "data", folder / "failure", {}, folder / "checkpoints"
    )
    torch.manual_seed(1)
    _, made = open_run(settings, environment, world)
    steps = total_steps(settings, len(DATA.training))
    state = prepare(network(plain), settings, steps, world)
    share = settings.global_batch_size // world.size
    loaders = open_loaders(DATA, settings, world, batch_size_per_device=settings.batch_size_per_device or share)
    method = task(state.trained, 0.0, made.timeline)

    def evaluate(evaluated: nn.Module) -> dict[str, float]:
        if begin_evaluation is not None:
            begin_evaluation()
        evaluated.eval()
        with torch.no_grad():
            total = evaluated(Views().images.to(world.device)).double().abs().sum().item()
        evaluated.train()
        return {"validation_loss": total}

    outcome = train(method, evaluate, [state], loaders, steps, made)
    lines = (folder / "data/metrics.jsonl").read_text().splitlines() if world.is_first else []
    return Trained(outcome, state.model, [json.loads(line) for line in lines])


def losses(trained: Trained) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in trained.metrics if "loss" in line}


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(mine, other) for mine, other in pairs)


class StopsAt(Classification):
    """Asks for a stop, as SageMaker does, in a given step."""

    step = 7

    def __call__(self, batch):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__call__(batch)


def test_parts_of_a_batch_add_up_to_the_step_of_the_whole(tmp_path):
    whole = run(tmp_path / "whole", plain=True)
    parts = run(tmp_path / "parts", plain=True, batch_size_per_device=2)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    for mine, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {},
        pytest.param({"precision": "fp16", "ema_decay": 0.9}, marks=fp16_on_cpu),
        {"optimizer": "sgd", "precision": "bf16"},
    ],
)
def test_a_stopped_run_resumed_in_the_middle_of_an_epoch_continues_bit_for_bit(tmp_path, values):
    undisturbed = run(tmp_path / "undisturbed", **values)
    stopped = run(tmp_path / "resumed", task=StopsAt, **values)
    assert stopped.outcome.stopped and stopped.outcome.steps == 7
    resumed = run(tmp_path / "resumed", **values)
    assert (resumed.outcome.resumed_from, resumed.outcome.steps, resumed.outcome.stopped) == (7, 15, False)
    assert {**losses(stopped), **losses(resumed)} == losses(undisturbed)
    assert set(losses(resumed)) == set(range(8, 16))
    assert same(resumed.model, undisturbed.model)
    assert resumed.outcome.validation == undisturbed.outcome.validation


@pytest.mark.parametrize("stop", [True, False])
def test_a_run_that_ended_between_a_step_and_its_evaluation_evaluates_first(tmp_path, stop):
    """An epoch has five steps; in the first case a stop comes after the fifth, in the second the process is lost there."""

    class AtTheEnd(StopsAt):
        step = 5

    class Lost(Classification):
        def begin_epoch(self, epoch, batches):
            assert epoch == 1, "lost"

    undisturbed = run(tmp_path / "undisturbed")
    if stop:
        first = run(tmp_path / "resumed", task=AtTheEnd)
        assert first.outcome.steps == 5 and first.outcome.validation == {}
    else:
        with pytest.raises(AssertionError, match="lost"):
            run(tmp_path / "resumed", task=Lost)
    resumed = run(tmp_path / "resumed")
    assert resumed.outcome.resumed_from == 5
    validations = [
        [(line["step"], line["validation_loss"]) for line in trained.metrics if "validation_loss" in line]
        for trained in (undisturbed, resumed)
    ]
    assert validations[1] == validations[0]


@pytest.mark.parametrize("every", [None, 1000])
def test_an_epoch_is_saved_before_its_evaluation_which_a_stop_may_not_wait_for(tmp_path, every):
    saved: list[list[str]] = []
    places = tmp_path / "checkpoints"

    def look() -> None:
        saved.append(sorted(place.name for place in places.iterdir()))

    run(tmp_path, epochs=2, begin_evaluation=look, checkpoint_every=every)
    assert saved == [["step-00000005"], ["step-00000005", "step-00000010"]]


def test_a_stop_in_an_evaluation_ends_the_run_after_it(tmp_path):
    stopped = run(
        tmp_path / "run", begin_evaluation=lambda: os.kill(os.getpid(), signal.SIGTERM), checkpoint_every=1000
    )
    assert stopped.outcome.stopped and stopped.outcome.steps == 5 and stopped.outcome.validation
    resumed = run(tmp_path / "run", checkpoint_every=1000)
    assert (resumed.outcome.resumed_from, resumed.outcome.steps, resumed.outcome.stopped) == (5, 15, False)
    assert losses(run(tmp_path / "undisturbed"))[15] == losses(resumed)[15]


def test_a_run_resumes_from_the_steps_it_was_told_to_keep(tmp_path):
    run(tmp_path, checkpoint_every=4, keep_checkpoints=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000012", "step-00000015"]


def test_a_finished_run_started_again_only_measures(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path)
    assert again.outcome.resumed_from == 15 and losses(again) == {}
    assert again.outcome.validation == first.outcome.validation and same(again.model, first.model)


def test_shorter_training_than_is_done_only_measures_and_says_so(tmp_path, capfd):
    """Also where what is done ends in the middle of an epoch."""
    assert run(tmp_path, task=StopsAt).outcome.steps == 7
    again = run(tmp_path, epochs=1)
    assert again.outcome.steps == 7 and again.outcome.validation[""]["validation_loss"] > 0
    assert "nothing is left to train: the checkpoint is from step 7, and the job has 5" in capfd.readouterr().out


def test_longer_training_goes_on_and_other_training_is_refused(tmp_path):
    run(tmp_path, epochs=1)
    assert run(tmp_path, epochs=2, log_every=2).outcome.resumed_from == 5
    with pytest.raises(ValueError, match="learning_rate is 0.01 there and 0.02 here"):
        run(tmp_path, learning_rate=0.02)


RANKS = """
    import pathlib, sys
    sys.path.insert(0, {root!r})
    from tests.entrypoints.test_loop import Classification, StopsAt, losses, run
    class Stops(StopsAt):
        step = 4
    with process_group() as world:
        task = Stops if {stop} and world.rank == 1 else Classification
        trained = run(pathlib.Path({folder!r}), world=world, task=task, **{values!r})
        torch.save([losses(trained), trained.model.state_dict(), trained.outcome.steps], out / f"rank-{{world.rank}}.pt")
"""


def two_ranks(tmp_path: Path, folder: Path, *, stop: bool = False, **values) -> list:
    code = RANKS.format(root=str(ROOT), folder=str(folder), stop=stop, values=values)
    done = run_ranks(tmp_path, code)
    assert [item.returncode for item in done] == [0, 0], done[0].stderr + done[1].stderr
    return [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_ranks_resume_bit_for_bit_with_zero_and_their_own_batch_statistics(tmp_path):
    undisturbed = two_ranks(tmp_path, tmp_path / "undisturbed", zero=True)
    stopped = two_ranks(tmp_path, tmp_path / "resumed", stop=True, zero=True)
    assert stopped[0][2] == stopped[1][2] < 15
    resumed = two_ranks(tmp_path, tmp_path / "resumed", zero=True)
    assert {**stopped[0][0], **resumed[0][0]} == undisturbed[0][0]
    for name, value in undisturbed[0][1].items():
        assert torch.equal(value, resumed[0][1][name]), name


def test_another_number_of_processes_continues_the_same_order(tmp_path):
    undisturbed = two_ranks(tmp_path, tmp_path / "undisturbed", plain=True)[0]
    stopped = two_ranks(tmp_path, tmp_path / "resumed", stop=True, plain=True)[0]
    alone = run(tmp_path / "resumed", plain=True)
    assert alone.outcome.resumed_from == stopped[2] < 15
    assert {**stopped[0], **losses(alone)} == pytest.approx(undisturbed[0], rel=1e-4)


def test_a_loss_that_is_not_finite_ends_the_run_with_the_fix(tmp_path):
    class Overflows(Classification):
        def __call__(self, batch):
            [losses] = super().__call__(batch)
            yield {name: value * math.inf for name, value in losses.items()}

    with pytest.raises(FloatingPointError, match="the loss is inf at step 1: lower learning_rate"):
        run(tmp_path, task=Overflows)


def test_weights_that_are_not_finite_take_no_good_checkpoints_place(tmp_path):
    """Between two log lines nobody looks at the loss."""

    class Diverges(Classification):
        seen = 0

        def __call__(self, batch):
            self.seen += 1
            [losses] = super().__call__(batch)
            yield {name: value * (math.nan if self.seen == 7 else 1) for name, value in losses.items()}

    with pytest.raises(FloatingPointError, match="statistics that are not finite after step 10: lower learn"):
        run(tmp_path, task=Diverges, log_every=20)
    assert [place.name for place in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert run(tmp_path, log_every=20).outcome.resumed_from == 5


def test_neither_do_statistics_of_a_batch_that_overflowed(tmp_path):
    """In fp16 such a step is skipped, and the losses after it are finite again."""

    class Overflows(Classification):
        seen = 0

        def __call__(self, batch):
            self.seen += 1
            if self.seen == 7:
                next(one for name, one in self.model.named_buffers() if name.endswith("running_var")).fill_(math.inf)
            yield from super().__call__(batch)

    with pytest.raises(FloatingPointError, match="weights or BatchNorm statistics that are not finite after step 10"):
        run(tmp_path, task=Overflows)
    assert [place.name for place in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_step_line_tells_where_its_time_went(tmp_path, capsys):
    trained = run(tmp_path, log_every=5)
    phases = ("data_wait_s", "host_to_device_s", "student_forward_s", "loss_s", "backward_s", "optimizer_s")
    steps = [line for line in trained.metrics if "loss" in line]
    shares = []
    for line in steps:
        whole, timed = 8 / line["images/s"], [line[phase] for phase in phases]
        assert min(timed) > 0 and sum(timed) <= whole
        shares.append(sum(timed) / whole)
    assert len(shares) == 3 and max(shares) > 0.3, "a step may wait for a core between two phases"
    said = [parse_line(line) for line in capsys.readouterr().out.splitlines()]
    said = [metric.values for metric in said if metric and "loss" in metric.values]
    assert [metric["step"] for metric in said] == [5, 10, 15]
    assert {"data_wait_s", "student_forward_s", "backward_s", "memory_gib"} < set(
        said[0]
    ) and "optimizer_s" not in said[0]
    assert {"evaluate_s", "checkpoint_s"} <= {name for line in trained.metrics for name in line}


def test_a_timeline_leaves_out_the_first_steps_and_the_pauses(monkeypatch):
    clock = iter(range(0, 1000))
    monkeypatch.setattr("training.measure.timeline.time.perf_counter", lambda: float(next(clock)))
    timeline = Timeline(torch.device("cpu"))  # 0
    timeline.start()  # 1
    with timeline.phase("backward"):  # 2, 3
        pass
    timeline.step()  # 4: three seconds
    timeline.start()  # 5
    timeline.step()  # 6: one second
    window = timeline.window()
    assert (window.phases, window.step, window.slowest_step, window.steps) == ({"backward": 0.5}, 2.0, 3.0, 2)
    assert 0 <= window.worker_cpu <= window.cpu
    assert timeline.seconds_per_step() is None
    for _ in range(5):
        timeline.step()  # 7 … 11
    assert timeline.seconds_per_step() == 1.0


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


def test_evaluations_are_compiled_where_training_is(tmp_path, monkeypatch):
    """What torch.compile gives stands aside here: it is the model itself."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    seen, forward = [], StaticBatch.forward

    def counted(model: StaticBatch, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return forward(model, images)

    monkeypatch.setattr(StaticBatch, "forward", counted)
    plain = run(tmp_path / "plain", ema_decay=0.9)
    assert not seen
    compiled = run(tmp_path / "compiled", ema_decay=0.9, compile=True)
    assert seen == [40] * 3 and compiled.outcome.validation == plain.outcome.validation


def test_a_loader_process_trains_the_same_model(tmp_path):
    plain, beside = run(tmp_path / "plain"), run(tmp_path / "beside", worker_type="loader", num_workers=2)
    assert losses(beside) == losses(plain) and same(beside.model, plain.model)


def test_cudnn_times_its_algorithms_only_where_the_settings_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # whatever it was, it is that again after the test
    run(tmp_path / "without", max_steps=1)
    assert not torch.backends.cudnn.benchmark
    run(tmp_path / "with", max_steps=1, cudnn_benchmark=True)
    assert torch.backends.cudnn.benchmark

"""What is known of a run whose script prints no metric lines: the observer's steps, and the loss in the forms that scripts print."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from launcher.commands.live import follow
from launcher.record import metrics_file
from launcher.record.metrics_file import ObservedMetrics
from launcher.record.progress import RunProgress
from launcher.record.records import RunFolder
from launcher.record.script_output import training_loss
from launcher.runner.run import Run


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("loss: 0.31", 0.31),
        ("epoch=3 loss=3.1e-01 lr=0.1", 0.31),
        ("{'loss': 0.31, 'grad_norm': 2.5, 'epoch': 1.0}", 0.31),
        ("{'loss': '0.3100', 'learning_rate': '5e-05'}", 0.31),
        ("Epoch: [0][ 10/5004]\tTime  0.3 ( 0.5)\tLoss 0.3100 (0.3500)\tAcc@1   5.00 (  4.00)", 0.31),
        ("Epoch: [0]  [ 10/94]  eta: 0:01:02  lr: 0.02  loss: 0.3100 (0.3500)  acc1: 12.5", 0.31),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.300000", 2.3),
        ("train_loss: 0.31 val_loss: 0.5", 0.31),
        ("val_loss: 0.5, train/loss: 0.31", 0.31),
        ("step 10: train loss 4.1234, val loss 4.3210", 4.1234),
        ("Training loss = nan", float("nan")),
        ("loss: tensor(0.3100, grad_fn=<NllLossBackward0>)", 0.31),
        ("Epoch 0:  10%|#  | 3/32 [00:00<00:01, 20.1it/s, v_num=0, train_loss_step=0.31]", 0.31),
        (
            "  45%|## | 450/1000 [00:10<00:12, 43.2it/s, loss=0.5]\r  46%|## | 460/1000 [00:11, 43.2it/s, loss=0.31]",
            0.31,
        ),
        ("Test set: Average loss: 0.0562, Accuracy: 9815/10000 (98%)", None),
        ("{'eval_loss': 0.4, 'epoch': 1.0}", None),
        ("Val Loss: 0.6", None),
        ("loss_classifier: 0.1 aux_loss: 0.2", None),
        ("we lose the loss 5 times", None),
        ("loss 1.2.3", None),
        ("lossless: 1", None),
    ],
)
def test_a_training_loss_is_found_in_its_usual_forms(line, loss):
    assert training_loss(line) == pytest.approx(loss, nan_ok=True)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run under way, whose timeline is the observer's."""
    folder = RunFolder(tmp_path / "run-20261122-100000-aaaa")
    folder.log("algo-1").parent.mkdir(parents=True)
    timeline(folder).parent.mkdir(parents=True)
    record(folder, {"kind": "start", "observed": True})
    return folder


def timeline(folder: RunFolder):
    return folder.host("algo-1") / "output/data/launcher-observer/algo-1/timeline-0.jsonl"


def record(folder: RunFolder, *events) -> None:
    with open(timeline(folder), "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def window(step: int, epoch_step: int, **extra):
    extra = {"epoch_step": epoch_step, "images_per_second": 64.0, **extra}
    return {"kind": "steps", "epoch": 2, "step": step, "seconds": {"step": 0.125, "data_wait": 0.1}, "extra": extra}


def log(folder: RunFolder, text: str) -> None:
    with open(folder.log("algo-1"), "a", newline="") as file:
        file.write(text)


def lines(folder: RunFolder):
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_steps_come_with_the_loss_that_was_printed_last(run):
    observed = ObservedMetrics(run, "algo-1")
    record(run, window(100, 20, epoch_steps=80))
    log(run, "\r 10%| loss=0.9\r 20%| loss=0.8\r 30%| lo")
    observed.update()
    record(run, window(108, 28), window(116, 36))
    log(run, "ss=0.7\n")
    observed.update()
    observed.update()
    assert [(line["step"], line.get("loss")) for line in lines(run)] == [(100, 0.8), (108, None), (116, 0.7)]
    assert lines(run)[0]["steps/s"] == 8 and lines(run)[0]["data_wait_s"] == 0.1 and lines(run)[0]["epoch"] == 2
    record(run, window(124, 44))
    metrics_file.merge(run, ["algo-1"])  # by another process, once the run is over
    assert [line["step"] for line in lines(run)] == [100, 108, 116, 124]


def test_a_script_that_prints_metric_lines_or_writes_its_own_file_needs_no_counting(run):
    observed = ObservedMetrics(run, "algo-1")
    record(run, window(100, 20))
    observed.update()
    log(run, "epoch 1/2 step 3/9 loss 0.5\n")
    observed.update()
    assert not run.metrics.exists()
    own = run.host("algo-1") / "output/data/algo-1/metrics.jsonl"
    own.parent.mkdir()
    own.write_text('{"rank": 0, "step": 3}\n{"cut')
    metrics_file.merge(run, ["algo-1"])
    assert lines(run) == [{"rank": 0, "step": 3}]


def test_a_training_that_ended_between_two_looks_is_counted_to_its_end(run):
    observed = ObservedMetrics(run, "algo-1")
    record(run, window(8, 8))
    observed.update()
    record(run, window(16, 16))
    for attempt, steps in ((1, (8, 30)), (2, (8,))):
        later = [{"kind": "start", "observed": True}, *(window(step, step) for step in steps)]
        file = timeline(run).with_name(f"timeline-0.{attempt}.jsonl")
        file.write_text("".join(json.dumps(event) + "\n" for event in later))
    observed.update()
    metrics_file.merge(run, ["algo-1"])
    counted = [(line.get("attempt", 0), line["step"]) for line in lines(run)]
    assert counted == [(0, 8), (0, 16), (1, 8), (1, 30), (2, 8)]


def test_the_kits_own_timeline_is_not_counted_twice(run):
    timeline(run).write_text("")
    record(run, {"kind": "start"}, window(100, 20))
    ObservedMetrics(run, "algo-1").update()
    assert not run.metrics.exists()


def test_damaged_lines_cost_nothing_but_themselves(run):
    record(run, {"kind": "steps"}, [1], {"kind": "steps", "step": 5, "seconds": {"step": 0}, "extra": {}}, window(8, 8))
    record(
        run, {**window(9, 9), "extra": []}, {**window(10, 10), "seconds": {"step": 1e-320}}, window(float("inf"), 11)
    )
    record(run, {**window(12, 12), "epoch": "two"}, window(13, 13, epoch_steps="many", images_per_second=[64]))
    with open(timeline(run), "a") as file:
        file.write("[" * 100_000 + "\n")
    log(run, "\xff\x00 loss: no number\n")
    ObservedMetrics(run, "algo-1").update()
    assert [line["step"] for line in lines(run)] == [8, 13]
    progress = RunProgress(run)
    assert progress.read_observed(1.0) and progress.seconds_left(1.0) is None
    assert progress.line() == "epoch 2  step 13  64 images/s  8 steps/s", "the last good value of each"
    run.metrics.write_text('{"observed": true}\nnull\n{"observed": true, "rank": 0, "epoch": 1, "step": 4}\n')
    [(metric, _)] = metrics_file.observed_metrics(run)
    assert (metric.step, metric.steps) == (4, None)


def test_progress_shows_the_epoch_that_the_loader_knows(run):
    progress = RunProgress(run)
    assert progress.read_line("loss: 0.9", 0.0) and progress.line() == "loss 0.9000"
    record(run, window(100, 20, epoch_steps=80))
    ObservedMetrics(run, "algo-1").update()
    assert progress.read_observed(1.0) and not progress.read_observed(2.0)
    shown = "epoch 2  step 100  20 of 80  loss 0.9000  64 images/s  8 steps/s  0:07 left of the epoch"
    assert progress.line(progress.seconds_left(1.0)) == shown and progress.share == 0.25
    assert not progress.read_line("loss: 0.7", 3.0), "the file has it with its step"
    assert progress.read_line("epoch 1/2 step 3/9 loss 0.5", 4.0) and progress.line().startswith("epoch 1/2  step 3/9")


def test_progress_without_a_length_has_no_time_left(run):
    record(run, window(100, 20))
    ObservedMetrics(run, "algo-1").update()
    progress = RunProgress(run)
    progress.read_observed(1.0)
    assert progress.seconds_left(1.0) is None and progress.share == 0 and "step 100  64 images/s" in progress.line()


def test_what_was_logged_before_says_nothing_about_the_time_left(run, capsys, monkeypatch):
    """Also where it takes seconds to read it; and it is drawn once."""
    now = 0.0
    monkeypatch.setattr("launcher.commands.live.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    class Goes(Run):
        hosts, spend = ["algo-1"], None

        def logs(self, *, idle, **_):
            nonlocal now
            for step, seconds, last in (
                (100, 2.0, False),
                (200, 2.0, False),
                (300, 2.0, True),
                (390, 9.0, False),
                (400, 0.0, True),
                (410, 10.0, True),
            ):
                now += seconds
                yield "algo-1", f"epoch 1/1 step {step}/1000 loss 0.5"
                if last:
                    idle()

    assert not follow(Goes(run))
    drawn = [text.split("  ", 1)[1].strip() for text in capsys.readouterr().out.split("\r\x1b[K")[1:]]
    *first, last = [f"step {step}/1000  loss 0.5000" for step in (300, 390, 400, 410)]
    assert drawn == [*first, f"{last}  9:50 left"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.9, "0:05"), (3599.9, "59:59"), (3600, "1:00:00"), (108_061, "30:01:01")]
)
def test_the_time_left_has_hours(run, seconds, text):
    assert RunProgress(run).line(seconds) == f"{text} left"


def test_without_a_terminal_the_last_steps_are_reported_at_the_end(run, capsys):
    class Ends(Run):
        def logs(self, *, idle, **_):
            idle()
            for step in (100, 108, 116):
                record(run, window(step, step))
                ObservedMetrics(run, "algo-1").update()
                idle()
            return iter(())

    assert not follow(Ends(run))
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == ["100", "116"]

"""The drill on scripts that resume rightly and on such that do not: real runs, really killed; the kit's own script too."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

import launcher
from launcher.runner import kills
from launcher.runner.curves import _checksum, compare, curve, missing, other_file
from launcher.runner.drill import Drill, _Series, drill
from launcher.runner.kills import HOST, MACHINE, SERVER, STOP, WORKERS, Kill, kill, wait_for_a_checkpoint_under_way
from tests.conftest import SLEEPER, assert_nothing_left, has_ended, processes_of, wait_for_ready, wait_until
from tests.launcher.test_store import recorded

COUNTS = """
    import json, os, pathlib, random, signal, sys, time
    base, hosts = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"]), json.loads(os.environ["SM_HOSTS"])
    output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"])
    output.mkdir(parents=True)
    stopping, rng, step, weight = [], random.Random(3), 0, 0.0
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    place = base / "checkpoints/state.json"
    if place.exists():
        step, weight, state = json.loads(place.read_text())
        rng.setstate((state[0], tuple(state[1]), state[2]))  # where its random numbers were
        print(f"resuming from the checkpoint of step {step}", flush=True)
    stop = False
    while step < 50 and not stop:
        time.sleep(0.04)
        stop = bool(stopping)
        step, weight = step + 1, weight + rng.random()
        loss = weight * (1 + 1e-6 * (len(hosts) - 1))
        with open(output / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"rank": 0, "epoch": 1, "step": step, "loss": loss, "images/s": time.time()}) + chr(10))
        print(f"epoch 1/1 step {step}/50 loss {loss:.4f}", flush=True)
        if step % 5 == 0 or stop:
            place.with_name(".writing").write_text(json.dumps([step, weight, rng.getstate()]))
            time.sleep(0.01)
            place.with_name(".writing").replace(place)
    (base / "model/weights.bin").write_text(str(weight))
"""


QUIET = COUNTS.replace('print(f"resuming from the checkpoint of step {step}", flush=True)', "pass")
assert QUIET != COUNTS


@pytest.mark.parametrize("printed", ["True", "step % 10 == 0", "step > 7"])
def test_a_script_that_does_not_print_from_where_it_resumes_lost_the_steps_that_it_printed_again(
    script_job, said, printed
):
    """Where it prints a line for each step. Else nobody knows, and no goodput is stated."""
    text = QUIET.replace('print(f"epoch', f'({printed}) and print(f"epoch')
    found = drill(script_job(text), kills=1, seed=3, log=said.append)
    assert found.difference == "", found
    [kill] = found.kills
    [row] = [line for line in str(found).splitlines() if WORKERS in line]
    if printed == "True":
        assert (
            kill.resumed_from >= 5
            and kill.resumed_from % 5 == 0
            and 0 <= kill.steps_lost == kill.at_step - kill.resumed_from
        )
    else:
        assert kill.resumed_from is None and re.split(" {2,}", row.strip())[3:5] == ["-", "-"]
        assert "goodput: not measured (the script does not print from which step it resumes)" in str(found)
        assert found.to_dict()["kills"][0]["resumed_from"] is None


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.mark.slow
def test_a_script_that_resumes_exactly_passes_kills_of_every_kind(script_job, said):
    found = drill(script_job(COUNTS), kills=4, seed=3, log=said.append)
    assert found.difference == "", found
    assert {kill.how for kill in found.kills} == {WORKERS, STOP, HOST, MACHINE}
    stopped = {kill.resumed_from for kill in found.kills if kill.how == STOP}  # it saves its last step, whichever it is
    others = [kill.resumed_from for kill in found.kills if kill.how != STOP]
    assert len(others) == 3 and all(step % 5 == 0 or step in stopped for step in others)
    assert all(0 <= kill.at_step - kill.resumed_from <= (0 if kill.how == STOP else 9) for kill in found.kills)
    assert any(kill.resumed_from for kill in found.kills), "some run went on from a checkpoint"
    assert all(kill.seconds > 0 for kill in found.kills)
    head, _, *rows, goodput, verdict = str(found).splitlines()
    assert re.split(" {2,}", head)[:4] == ["kill", "how", "at step", "resumed from"] and len(rows) == 4
    assert goodput == "goodput: not measured (the script's steps were not timed)", "it imports no torch"
    assert verdict.startswith("the metrics of all 50 steps and the weights (weights.bin ") and "bit for bit" in verdict
    assert {run.name for run in found.runs} < {run.name for run in launcher.runs()}, "they are runs as any others"
    for run in found.runs:
        assert_nothing_left(run)


@pytest.mark.slow
def test_a_script_that_resumes_almost_exactly_is_found_out_at_its_first_wrong_step(script_job, tmp_path):
    """By the command: a difference is exit code 1."""
    file = tmp_path / "config.yaml"
    job = script_job(COUNTS.replace("        print(f", "        weight *= 1 + 1e-12\n        print(f", 1))
    file.write_text(json.dumps(job.model_dump(exclude_none=True)))
    command = [sys.executable, "-m", "launcher", "drill", str(file), "--kills", "1", "--seed", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    undisturbed, *_, resumed = launcher.runs()  # on a busy machine a run may be over before it can be killed
    wrong = min(curve(resumed))
    assert wrong > 1, "the kill of this seed comes after a checkpoint"
    last = f"DIFFERENT: step {wrong}: loss is {curve(undisturbed)[wrong]['loss']!r} undisturbed and "
    described = json.loads(done.stdout)
    assert f"DIFFERENT: {described['difference']}".startswith(last)
    assert described["undisturbed"] == undisturbed.name and described["runs"][-1] == resumed.name and described["exact"]
    assert [kill["how"] for kill in described["kills"]] == ["SIGKILL to the script"]
    assert "kill 1: SIGKILL to the script at step" in done.stderr


@pytest.mark.slow
def test_on_another_number_of_hosts_values_may_differ_by_rounding(script_job, said):
    found = drill(script_job(COUNTS), kills=1, hosts_after=2, seed=0, log=said.append)
    hosts = [len(run.hosts) for run in found.runs]
    assert found.difference == "" and hosts == [1 + number % 2 for number in range(len(hosts))] and len(hosts) > 1
    assert 0 < found.furthest < 1e-5 and "to within 1e-06 of each metric's largest value" in str(found)


@pytest.mark.parametrize("how", [WORKERS, HOST])
def test_a_kill_finds_the_processes_of_a_store_behind_a_symbolic_link(script_job, store, tmp_path, how):
    (tmp_path / "disk").mkdir()
    store.symlink_to(tmp_path / "disk")
    run = launcher.run(launcher.plan(script_job(SLEEPER)))
    wait_for_ready(run, 1)
    kill(run, how, random.Random(0))
    assert run.wait(60) == "Failed"
    assert_nothing_left(run)


def test_a_tree_whose_root_has_ended_meanwhile_leaves_nobody_suspended(monkeypatch):
    with subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE) as tree:
        root, below = psutil.Process(tree.pid), psutil.Process(int(tree.stdout.readline()))
        children, looks = psutil.Process.children, []

        def once(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
            looks.append(process)
            if len(looks) > 1:
                raise psutil.NoSuchProcess(process.pid)
            return children(process, recursive)

        monkeypatch.setattr(psutil.Process, "children", once)
        try:
            with pytest.raises(psutil.NoSuchProcess):
                kills._kill_tree(root)
            wait_until(lambda: has_ended(below), what="the end of what it started")
        finally:
            for process in (tree, below):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    kills._kill(root)  # it is no error that somebody was quicker


def test_a_kill_that_finds_no_process_of_a_run_that_goes_on_says_so(script_job, monkeypatch):
    monkeypatch.setattr("launcher.runner.kills.ENDING_SECONDS", 0)
    text = "import os, sys\nif os.environ['SM_CURRENT_HOST'] == '127.0.0.2':\n    sys.exit(0)\n" + dedent(SLEEPER)
    run = launcher.run(launcher.plan(script_job(text, compute={"instance_count": 2})))
    wait_for_ready(run, 1)
    ended = run.folder.host("algo-2") / "output/success"
    wait_until(ended.exists, what="the end of algo-2's script")
    wait_until(lambda: not processes_of(run.folder.host("algo-2")), what="the end of its toolkit")
    monkeypatch.setattr(run, "hosts", ["algo-2"])
    with pytest.raises(
        launcher.UserError, match=f"{run.name} goes on, and algo-2 has no process to kill\n.*launcher stop"
    ):
        kill(run, HOST, random.Random(0))
    run.stop()
    assert run.wait(60) == "Stopped"


def test_a_checkpoint_under_way_is_seen_where_the_job_keeps_them(monkeypatch):
    monkeypatch.setattr("launcher.runner.kills.WRITING_SECONDS", float("inf"))
    folder = recorded("kept-20260101-000000-abcd", state="")
    checkpoints = {"s3": "s3://amzn-s3-demo-bucket/kept", "path": "/opt/ml/kept"}
    folder.job.write_text(json.dumps({"name": "kept", "script": "train.py", "checkpoints": checkpoints}))
    writing = folder.host("algo-1") / "kept/.writing"
    looks: list[Path] = []
    hidden = kills._hidden

    def begins_after_a_look(place: Path) -> set[tuple[str, int]]:
        found = hidden(place)
        looks.append(place)
        writing.mkdir(parents=True, exist_ok=True)
        return found

    monkeypatch.setattr(kills, "_hidden", begins_after_a_look)
    wait_for_a_checkpoint_under_way(launcher.Run(folder))
    assert looks == [writing.parent] * 2, "it did not end before there was one"


REFERENCE = {1: {"loss": 4.0, "rate": 0.0}, 2: {"loss": 2.0, "rate": 0.5}, 3: {"loss": float("nan"), "note": "end"}}


@pytest.mark.parametrize(("found", "tolerance", "furthest", "difference"), [
    (REFERENCE, 0.0, 0.0, ""),
    ({2: {"loss": 2.0}, 7: {"loss": 1.0}}, 0.0, 0.0, ""),  # a step that only a stopped run reports
    ({1: {"loss": 4.000000000000001}}, 0.0, 2e-16, "step 1: loss is 4.0 undisturbed and 4.000000000000001"),
    ({1: {"loss": 4.03}, 2: {"loss": 2.01}}, 0.01, 0.0075, ""),  # of the largest loss, 4
    ({2: {"loss": 2.05}}, 0.01, 0.0125, "step 2: loss is 2.0 undisturbed and 2.05"),
    ({1: {"loss": float("nan")}}, 0.01, float("inf"), "step 1: loss is 4.0 undisturbed and nan"),
    ({3: {"loss": 1.0}}, 0.01, float("inf"), "step 3: loss is nan undisturbed and 1.0"),
    ({3: {"note": "other"}}, 0.01, float("inf"), "step 3: note is 'end' undisturbed and 'other'"),
])  # fmt: skip
def test_two_curves_are_compared_value_by_value(found, tolerance, furthest, difference):
    assert compare(REFERENCE, found, tolerance) == (pytest.approx(furthest, rel=0.2), difference)


def test_a_step_or_a_metric_that_no_resumed_run_reported_is_missed():
    assert missing(REFERENCE, REFERENCE) == ""
    assert missing(REFERENCE, {**REFERENCE, 2: {"loss": 2.0}}) == "step 2: only the undisturbed run reported rate"
    assert missing(REFERENCE, {1: REFERENCE[1]}) == "step 2: only the undisturbed run reported loss"


def test_other_weights_are_found_out():
    assert other_file({"a.bin": "1", "b.bin": "2"}, {"a.bin": "1", "b.bin": "2"}) == ""
    assert other_file({"a.bin": "1", "b.bin": "2"}, {"a.bin": "1", "b.bin": "3"}) == "b.bin"
    assert other_file({"a.bin": "1"}, {}) == other_file({}, {"a.bin": "1"}) == "a.bin"


@pytest.mark.parametrize(("one", "other", "equal"), [
    (b'{"__metadata__":{"a":"1","b":"2"}}', b'{"__metadata__":{"b":"2","a":"1"}}', True),
    (b'{"__metadata__":{"a":"1","b":"2"}}', b'{"__metadata__":{"b":"2","a":"3"}}', False),
    (b'{"a":', b'{"b":', False),
    (b'{"a":', b'{"a":', True),
])  # fmt: skip
def test_the_order_of_a_safetensors_header_is_no_difference(tmp_path, one, other, equal):
    for name, header in (("one", one), ("other", other)):
        for suffix in (".safetensors", ".bin"):
            (tmp_path / f"{name}{suffix}").write_bytes(len(header).to_bytes(8, "little") + header + b"weights")
    assert (_checksum(tmp_path / "one.safetensors") == _checksum(tmp_path / "other.safetensors")) == equal
    assert (_checksum(tmp_path / "one.bin") == _checksum(tmp_path / "other.bin")) == (one == other)
    (tmp_path / "more.safetensors").write_bytes(len(one).to_bytes(8, "little") + one + b"weightx")
    assert _checksum(tmp_path / "more.safetensors") != _checksum(tmp_path / "one.safetensors")


def test_goodput_by_hand():
    """20 steps of half a second; two kills, which cost 3 steps each; twice to the end."""
    planned = launcher.Run(recorded("done-20260101-000000-abcd"))
    kills = [Kill(WORKERS, 8, resumed_from=5, seconds=1.0), Kill(STOP, 13, resumed_from=10, seconds=1.0)]
    found = Drill(
        planned,
        exact=True,
        steps=20,
        kills=kills,
        step_seconds=0.5,
        undisturbed_seconds=12.5,
        seconds=40.0,
        trainings=2,
    )
    assert found.goodput.to_dict() == pytest.approx(
        {"share": 0.5, "seconds": 40.0, "useful": 20.0, "redone": 3.0, "undisturbed": 0.8}
    )
    assert (
        "goodput 50 %, undisturbed 80 %: of 40.0 s, 20.0 s for steps that count, 3.0 s for steps done again, 17.0 s for starts, "
        "checkpoints, evaluations and ends\n" in str(found)
    )
    assert found.to_dict()["goodput"]["redone"] == 3.0
    untimed = Drill(planned, exact=True, steps=20, seconds=40.0, trainings=2)
    assert untimed.goodput is None and untimed.to_dict()["goodput"] is None
    assert "goodput: not measured (the script's steps were not timed)" in str(untimed)
    other = Drill(planned, exact=False, steps=20, seconds=40.0, trainings=1, step_seconds=0.5)
    assert "goodput: not measured (on another number of hosts a step takes another time)" in str(other)
    found.kills = [Kill(STOP, 10, resumed_from=12, seconds=1.0)]
    assert found.goodput.redone == 0, "its last steps were not logged"
    found.difference = "it is another"
    assert found.goodput is None and found.to_dict()["goodput"] is None and "goodput" not in str(found)


def test_a_job_with_nothing_to_compare_is_refused(script_job, said):
    with pytest.raises(launcher.UserError, match="reported no metric"):
        drill(script_job("print('done')"), log=said.append)
    with pytest.raises(launcher.UserError, match="--kills: 0"):
        drill(script_job("print('done')"), kills=0)
    with pytest.raises(launcher.UserError, match="global_batch_size: 3 images do not divide evenly among 2 processes"):
        drill(script_job("x = 1", hyperparameters={"global_batch_size": 3}), hosts_after=2, log=pytest.fail)
    gpus, cpus = ({"name": name, "instance_type": "ml.c5.large", "instance_count": 1} for name in ("gpus", "cpus"))
    several = {"instance_groups": [cpus, gpus]}
    odd = {"distribution": "torchrun", "hyperparameters": {"global_batch_size": 3}}
    with pytest.raises(launcher.UserError, match="3 images do not divide evenly among 2 processes"):
        drill(
            script_job("x = 1", compute={**several, "training_groups": ["gpus"]}, **odd), hosts_after=2, log=pytest.fail
        )
    with pytest.raises(launcher.UserError, match="--hosts-after: 2, but the groups cpus, gpus all train"):
        drill(script_job("x = 1", compute=several), hosts_after=2, log=pytest.fail)
    failed = drill(script_job("raise ValueError('no')"), log=said.append)
    assert failed.difference.endswith("without a kill") and "is Failed" in failed.difference
    _Series([], failed, {}, 0, said.append).judge(failed.undisturbed, {}, None)
    assert failed.difference.endswith(", not Completed"), "as one that cannot go on from a checkpoint"


def test_a_job_that_is_over_at_once_cannot_be_killed(script_job, said, monkeypatch):
    monkeypatch.setattr("launcher.runner.drill.TRIES", 1)
    with pytest.raises(launcher.UserError, match="its 2 steps ended before it could be killed"):
        drill(script_job("print('epoch 1/1 step 1/2 loss 1.0\\nepoch 1/1 step 2/2 loss 1.0')"), log=said.append)


def test_servers_can_be_killed_only_where_there_are_some(script_job):
    with pytest.raises(launcher.UserError, match="--servers: worker_type is auto") as raised:
        drill(script_job(COUNTS), servers=True)
    assert "hyperparameters.worker_type=remote" in str(raised.value)
    remote = script_job(COUNTS).model_copy(update={"hyperparameters": {"worker_type": "remote"}})
    with pytest.raises(launcher.UserError, match="--hosts-after: 2, beside --servers"):
        drill(remote, servers=True, hosts_after=2)
    with pytest.raises(launcher.UserError, match="3 mistakes"):
        drill(script_job(COUNTS), servers=True, kills=0, hosts_after=2)


@pytest.mark.timeout(900)  # two trainings, beside whatever else the machine does
@pytest.mark.slow
def test_a_run_whose_servers_are_killed_goes_on_and_is_the_same(prepared, said):
    group = {"instance_type": "ml.c5.xlarge", "instance_count": 1}
    job = launcher.from_values({
        "name": "served",
        "script": "train_classifier.py",
        "inputs": {name: {"folder": str(prepared("digits") / name)} for name in ("train", "validation")},
        "compute": {"instance_groups": [{"name": "trains", **group}, {"name": "serves", **group}], "training_groups": ["trains"]},
        "hyperparameters": {
            "model": "mobilenetv3_small_050", "model_options": {"in_chans": 1}, "image_size": 32, "global_batch_size": 64,
            "augmentation_load": 10, "epochs": 2, "evaluate_every": 2, "worker_type": "remote",
        },
    })  # fmt: skip
    found = drill(job, kills=2, servers=True, seed=1, log=said.append)
    assert found.difference == "" and found.steps == 42, found
    assert len(curve(found.undisturbed)) == 42, "every step is compared, whatever the job logs"
    assert [kill.how for kill in found.kills] == [SERVER] * 2 and all(kill.seconds > 0 for kill in found.kills)
    assert all(0 < kill.at_step == kill.resumed_from < 42 for kill in found.kills), "no run ended"
    for run in found.runs:
        log = "\n".join(line for _, line in run.logs())
        assert "server 0 on" in log and " failed: " in log, "and it was noticed"
        assert_nothing_left(run)


@pytest.mark.timeout(900)  # four trainings, beside whatever else the machine does
@pytest.mark.slow
@pytest.mark.parametrize("workers", [{}, {"worker_type": "loader", "num_workers": 2}], ids=["auto", "loader process"])
def test_the_kits_classifier_resumes_bit_for_bit(prepared, said, workers):
    """With dropout, moved images, an average of the weights and two epochs; killed between two checkpoints, then stopped."""
    tiny = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 1,
        "num_heads": 2,
        "in_chans": 1,
        "proj_drop_rate": 0.2,
    }
    job = launcher.from_values({
        "name": "kit",
        "script": "train_classifier.py",
        "inputs": {name: {"folder": str(prepared("digits") / name)} for name in ("train", "validation")},
        "hyperparameters": {
            "model": "vit_tiny_patch16_224", "model_options": tiny, "image_size": 16, "global_batch_size": 64, "max_shift_pixels": 2,
            "ema_decay": 0.9, "epochs": 2, "checkpoint_every": 4, "log_every": 10, **workers,
        },
    })  # fmt: skip
    found = drill(job, kills=2, seed=4, log=said.append)
    assert found.difference == "" and found.steps == 42, found
    assert len(curve(found.undisturbed)) == 42, "every step is compared, whatever the job logs"
    assert [kill.how for kill in found.kills] == [WORKERS, STOP] and found.kills[1].resumed_from > 0
    lost = sum(kill.at_step - kill.resumed_from for kill in found.kills)
    assert 0 < found.goodput.share < 1 and 0 < found.goodput.undisturbed < 1, found.goodput
    assert found.goodput.redone == pytest.approx(lost * found.step_seconds)
    assert found.trainings >= 1, "on a busy machine a run may be over before it can be killed"
    assert list(found.weights) == ["model.safetensors"] and "validation_accuracy" in curve(found.undisturbed)[42]

"""Probes: what follows from measured speeds, the three scripts measuring for real, and what keeps a run from being probed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import train_classifier
import train_kd
import train_segmentation
import yaml
from training.data.sources import folders
from training.engine import probe as probe_module
from training.models import export, timm_models
from training.settings import check
from training.settings.distillation import DistillationSettings
from training.settings.scripts import ClassifierSettings
from training.settings.segmentation import SegmentationSettings
from training.tasks import classification
from training.teacher import frozen as teachers

import launcher
from launcher.config.issues import UserError
from launcher.insight.measurements import Measurements
from launcher.insight.probe import Probe
from launcher.record import records
from launcher.runner import probe as probing
from launcher.runner import start_record
from launcher.runner.probe import INTERRUPTED
from tests.conftest import as_in_a_terminal, assert_nothing_left
from tests.insight.planted import plant, write
from tests.insight.test_rules import CPU, PLANTED

VIT = "vit_tiny_patch16_224"
TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "in_chans": 1}
FEW = {"image_size": 16, "global_batch_size": 8, "num_workers": 0, "worker_type": "threads", "system_monitor": False}
PYRAMID = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "mlp_ratios": [2, 2, 2, 2]}


# -- the scripts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for source in ("digits", "shapes"):
        (folder / source).symlink_to(prepared(source))
    return folder


@pytest.fixture
def measured(data, tmp_path, monkeypatch):
    """Runs a script in this process as a probe of a few seconds, and gives what it wrote."""
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where the machine is busy, longer than what is planted here
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe_module, "process_started", time.time)
    monkeypatch.setattr(probe_module, "cores_per_process", lambda world, environ: (2.0, "two"))
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()

    def run(script, kind, values, source="digits", seconds=4.0, finished=True) -> Probe:
        for name in ("train", "validation"):
            monkeypatch.setenv(f"SM_CHANNEL_{name.upper()}", str(data / source / name))
        settings, problems = check(kind, {**FEW, **values, "probe_seconds": seconds})
        assert not problems
        script.main(settings)
        assert not [*(tmp_path / "checkpoints").iterdir()] and not (tmp_path / "output/model").exists()
        assert not (tmp_path / "output/data/algo-1/result.json").exists()
        found = json.loads((tmp_path / "output/data/algo-1/probe.json").read_text())
        assert found["finished"] == finished
        return Probe.from_file("here", found)

    yield run
    signal.signal(signal.SIGTERM, before)
    torch.set_num_threads(threads)


CLASSIFIER = (train_classifier, ClassifierSettings, {"model": VIT, "model_options": TINY})


@pytest.mark.slow
def test_images_that_come_slowly_are_found_and_so_is_the_number_of_workers_that_helps(measured, monkeypatch):
    read = folders.LabelledFolder.image

    def slow(self, number):
        time.sleep(0.025)  # which frees the core: more workers sleep side by side
        return read(self, number)

    monkeypatch.setattr(folders.LabelledFolder, "image", slow)
    probe = measured(*CLASSIFIER, seconds=12.0)
    assert probe.bound == "input" and probe.workers == 0 and [one.workers for one in probe.input_alone] == [0, 1, 2]
    assert probe.input_share > 0.5 and probe.with_workers[0] == 2 == probe.best_workers and probe.gained > 1.3
    assert probe.at_most >= probe.gained * 0.8 and len(probe.as_it_is) == 2 and not probe.left_out
    assert probe.busy(probe.fastest) < 0.5


def test_a_slow_model_is_found_and_no_worker_is_tried_in_vain(measured, monkeypatch):
    call = classification.Classification.__call__

    def slow(self, batch):
        time.sleep(0.5)
        return call(self, batch)

    monkeypatch.setattr(classification.Classification, "__call__", slow)
    probe = measured(*CLASSIFIER, seconds=12.0)
    assert probe.bound == "model" and not probe.helped and probe.input_share < 0.1
    assert min(one.images_per_second for one in probe.input_alone) > probe.speed


def test_a_teacher_whose_logits_come_slowly_is_found_and_its_cache_is_left_alone(measured, monkeypatch, tmp_path):
    call = teachers.Teacher.__call__

    def slow(self, images):
        time.sleep(1.0)  # beside which preparing the images is little, also on a busy machine
        return call(self, images)

    monkeypatch.setattr(teachers.Teacher, "__call__", slow)
    folder = tmp_path / "teacher"
    export.save(
        timm_models.build(VIT, TINY, 10, pretrained=False),
        folder,
        name=VIT,
        options=TINY,
        classes=[str(n) for n in range(10)],
        image_size=16,
    )
    monkeypatch.setenv("SM_CHANNEL_TEACHER", str(folder))
    values = {"student": VIT, "student_options": TINY, "hard_label_weight": 0.1, "teacher_cache": {"views": 2}}
    probe = measured(train_kd, DistillationSettings, values, seconds=20.0)
    assert probe.bound == "teacher" and probe.teacher_share > 0.5
    assert probe.one_batch_without_teacher > 1.5 * probe.one_batch


@pytest.mark.slow
def test_segmentation_is_probed_too_and_says_what_it_had_no_time_for(measured):
    values = {
        "model": "pvt_v2_b0",
        "model_options": PYRAMID,
        "classes": 4,
        "image_size": [32, 32],
        "worker_type": "processes",
        "num_workers": 1,
    }
    probe = measured(train_segmentation, SegmentationSettings, values, source="shapes", seconds=0.01)
    assert probe.speed > 0 and probe.one_batch > 0 and probe.bound and probe.worker_kind == "processes"
    assert probe.one_batch_without_teacher is None and "again" in probe.left_out


def test_the_stop_that_ctrl_c_asks_for_ends_a_probe_with_what_it_has(measured, monkeypatch):
    alone = probe_module._Bench.input_alone

    def stop(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return alone(self, *arguments)

    monkeypatch.setattr(probe_module._Bench, "input_alone", stop)
    probe = measured(*CLASSIFIER, finished=False)
    assert probe.one_batch > 0 and probe.input_alone == () and probe.at_most is None and probe.best_workers is None


# -- runs --------------------------------------------------------------------------------------------------------------


def recorded(job: dict, on: str = "process", measured: Measurements | None = None) -> launcher.Run:
    """A run as it lies in the store when it is over, with planted measurements, without having run."""
    plan = launcher.plan(launcher.from_values(job), on=on)
    folder = records.RunFolder(records.store() / plan.name)
    folder.path.mkdir(parents=True)
    start_record.write(plan, folder)
    records.write_json(folder.outcome, {"state": "Completed"})
    write(measured or plant(phases=CPU), folder.host("algo-1") / "output/data")
    return launcher.Run(folder)


@pytest.fixture
def quick(data) -> dict:
    return {
        "name": "quick",
        "script": "train_classifier.py",
        "inputs": {name: {"folder": str(data / "digits" / name)} for name in ("train", "validation")},
        "hyperparameters": {**FEW, "model": VIT, "model_options": TINY},
    }


def typed(*arguments: object, **more) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "launcher", "diagnose", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, **more)


@pytest.mark.slow
def test_a_run_of_two_processes_is_probed_by_its_own_record(quick):
    job = {
        **quick,
        "distribution": "torchrun",
        "compute": {"processes_per_host": 2},
        "checkpoints": "s3://amzn-s3-demo-bucket/kept",
    }
    run = recorded(job, measured=plant(phases=CPU, ranks=2, settings={"global_batch_size": 8}))
    before = {file: file.stat().st_mtime_ns for file in run.folder.path.rglob("*")}
    done = typed(run.name, "--probe", "--json", "--with", "hyperparameters.probe_seconds=9")
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)["probe"]
    assert reported["images_per_second"]["one_batch"] > 0 and reported["images_per_second"]["as_it_is"], done.stdout
    probe = launcher.attach(reported["run"])
    assert probe.name.startswith("quick-probe-") and f"run {probe.name}" in done.stderr
    assert launcher.attach("quick").name == run.name, "the job's latest run is still the one that trained"
    assert [*probe.artifacts()] == ["output 127.0.0.1", "log 127.0.0.1"] or "model" not in probe.artifacts()
    assert yaml.safe_load(probe.folder.job.read_text())["hyperparameters"]["probe_seconds"] == 9
    assert any("2 processes on cpu" in line for _, line in probe.logs())
    assert before == {file: file.stat().st_mtime_ns for file in run.folder.path.rglob("*")}, "the run is as it was"
    assert_nothing_left(probe)


@pytest.mark.slow
def test_where_the_probe_fails_the_diagnosis_is_reported_with_the_reason(quick):
    run = recorded(quick, measured=plant(**PLANTED["data_bound", "harsh"]))
    (run.folder.code / "training/engine/probe.py").write_text("raise RuntimeError('no probe today')\n")
    done = typed(run.name, "--probe")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Preparing the images needs more cores than there are" in done.stdout.splitlines()[0]
    assert "probe: not done: quick-probe-" in done.stdout and "no probe today" in " ".join(done.stdout.split())


def test_ctrl_c_stops_the_probe_and_the_diagnosis_is_reported(quick):
    run = recorded(quick, measured=plant(**PLANTED["data_bound", "harsh"]))
    words = [sys.executable, "-m", "launcher", "diagnose", run.name, "--probe"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal
    )
    assert "probing for at most two minutes" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    reported, said = process.communicate(timeout=170)
    assert process.returncode == 130 and "stopping the probe" in said
    assert f"probe: not done: {INTERRUPTED}" in reported and "Preparing the images" in reported.splitlines()[0]
    assert launcher.attach("quick-probe").state in records.OVER


def test_a_run_whose_data_are_elsewhere_says_how_to_tell_where_they_are(quick, data):
    job = yaml.safe_load(Path("configs/quickstart.yaml").read_text())
    job = {name: value for name, value in job.items() if name in ("role", "region", "output", "image")}
    job |= {**quick, "inputs": {name: {"s3": f"s3://amzn-s3-demo-bucket/{name}/"} for name in ("train", "validation")}}
    job |= {"distribution": "torchrun", "compute": {"instance_type": "ml.g5.xlarge", "instance_count": 2}}
    run = recorded(job, on="aws")
    with pytest.raises(UserError) as raised:
        run.diagnose(probe=True)
    reported = str(raised.value)
    assert "s3, which exists on SageMaker only" in reported and "--with 'inputs.train={folder: FOLDER}'" in reported
    assert "2 hosts, which would share this machine" in reported and "instance_count=1" in reported
    here = [f"inputs.{name}={{folder: {data / 'digits' / name}}}" for name in ("train", "validation")]
    made = probing.planned(run.name, [*here, "compute.instance_count=1"])
    assert made.backend == "process" and not made.errors and made.replay_of == run.name


ARGUMENTS = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--depth', type=int)\n"


@pytest.mark.parametrize(
    "main",
    [
        "print('trained')\n",
        "from own_settings import Own\ndef main(settings: Own):\n    pass\n",
        f"{ARGUMENTS}parser.parse_args()\n",
        f"{ARGUMENTS}parser.parse_known_args()\n",
    ],
)
def test_a_script_of_the_users_own_is_told_what_it_lacks(tmp_path, main):
    source = tmp_path / "source"
    source.mkdir()
    (source / "own_settings.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Own:\n    depth: int = 1\n"
    )
    (source / "own.py").write_text(main)
    run = recorded({"name": "own", "script": "own.py", "source": str(source)})
    with pytest.raises(
        UserError, match="own.py of own-(.|\n)*has no setting probe_seconds(.|\n)*train_classifier.py"
    ) as raised:
        run.diagnose(probe=True)
    [issue] = raised.value.issues
    assert issue.key == "--probe" and issue.fix.endswith("See docs/your-own-script.md#probes")


def test_what_cannot_be_probed_is_reported_before_anything_starts(quick, tmp_path, typed_here):
    place = write(plant(phases=CPU), tmp_path / "found")
    for words, reported in (
        ((place, "--probe"), "holds measurements, but not the job"),
        (("s3://amzn-s3-demo-bucket/profiler-output", "--probe"), "holds measurements, but not the job"),
        (("nobody", "--probe"), "no such run"),
        ((place, place, "--probe"), "probe one of them"),
        ((place, "--with", "hyperparameters.epochs=1"), "add --probe"),
        ((place, "--probe", "--on", "aws"), "process or docker"),
    ):
        done = typed_here("diagnose", *words)
        assert done.returncode == 2 and reported in done.stderr and "Traceback" not in done.stderr, (words, done.stderr)
    assert not launcher.runs()
    run = recorded(quick)
    run.folder.outcome.unlink()
    with open(run.folder.lock, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is InProgress on this machine"):
            launcher.Run(run.folder).diagnose(probe=True)
    assert len(launcher.runs()) == 1

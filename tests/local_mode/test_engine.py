"""Local mode with a real engine: how runs in containers end, stop, fail and are killed, and that nothing stays behind."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest
from PIL import Image

import launcher
from launcher.backends import docker, docker_containers, local_hosts, supervision
from launcher.insight.measurements import read
from launcher.record.records import RunFolder
from tests.conftest import ROOT, SLEEPER, TORCH_LOOP, processes_of, wait_for_ready, wait_until
from tests.local_mode.conftest import assert_nothing_left, left, wait_for_state

TWO_HOSTS = {"distribution": "torchrun", "compute": {"instance_count": 2}}

ALL_REDUCE = """
    import json, os, pathlib, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    seen = {"total": int(total), "hosts": json.loads(os.environ["SM_HOSTS"]), "host": os.environ["SM_CURRENT_HOST"]}
    pathlib.Path(os.environ["SM_MODEL_DIR"], f"{seen['host']}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
"""

NASTY = """it's "q" $HOME ${X} a:b #c %20 ü"""
"""A folder name with everything that a shell, a URL, YAML or Compose would take for its own."""


def test_one_host_from_a_folder_with_a_nasty_name_leaves_what_a_process_run_leaves(docker_job, tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / NASTY / "runs"))
    monkeypatch.setenv("DECLARED", "hunter2 $HOME ${X}")
    data = tmp_path / NASTY / "data"
    data.mkdir(parents=True)
    (data / "image.txt").write_text("pixels")
    (data / "it's $1.bin").write_text("weights")
    job = docker_job(
        """
        import json, os, pathlib
        train = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"])
        seen = {"train": (train / "image.txt").read_text(), "teacher": os.listdir(os.environ["SM_CHANNEL_TEACHER"])}
        seen |= {"mine": os.environ["MINE"], "token": os.environ["HF_TOKEN"], "uid": os.getuid()}
        seen["declared"] = os.environ["DECLARED"]
        seen["aws"] = sorted(name for name in os.environ if name.startswith("AWS_"))
        seen["shm_mb"] = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize / 2**20
        try:
            (train / "mine").touch()
        except OSError:
            seen["read_only"] = True
        pathlib.Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps(seen))
        host = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"])
        host.mkdir()
        (host / "result.json").write_text('{"accuracy": 1}')
        (host / "metrics-0.jsonl").write_text('{"step": 1}\\n')
        pathlib.Path("/opt/ml/checkpoints/step-1").write_text("kept")
        """,
        folder=NASTY,
        inputs={"train": {"folder": str(data)}, "teacher": {"file": str(data / "it's $1.bin")}},
        environment={"MINE": "it's $HOME; $$ ${X}", "HF_TOKEN": "hunter2 $HOME"},
        secrets={"DECLARED": "env"},
        checkpoints="s3://bucket/checkpoints",
        compute={"shm_gb": 0.5},
    )
    run = launcher.run(launcher.plan(job, on="docker"))
    wait_for_state(run, "Completed")
    seen = json.loads((run.folder.host("algo-1") / "model/seen.json").read_text())
    assert seen == {
        "train": "pixels", "teacher": ["it's $1.bin"], "mine": "it's $HOME; $$ ${X}", "token": "hunter2 $HOME",
        "declared": "hunter2 $HOME ${X}",
        "uid": os.getuid(), "aws": sorted(name for name in local_hosts.NO_CREDENTIALS if "AWS" in name), "shm_mb": 512, "read_only": True,
    }  # fmt: skip
    assert (run.folder.host("algo-1") / "checkpoints/step-1").read_text() == "kept"
    assert run.result() == {"accuracy": 1} and run.metrics() == [{"step": 1}]
    with tarfile.open(run.folder.model) as tar:
        assert tar.getnames() == ["seen.json"]
    assert run.outcome()["toolkit_exit_codes"] == {"algo-1": 0}
    channel = run.folder.host("algo-1") / "input/data"
    assert (channel / "train").readlink() == data and (channel / "teacher/it's $1.bin").readlink().parent == data
    assert set(run.artifacts()) >= {"model", "metrics", "output algo-1", "checkpoints algo-1", "log algo-1"}
    texts = {file: file.read_text(errors="replace") for file in run.folder.path.rglob("*") if file.is_file()}
    holding = {file for file, text in texts.items() if "hunter2" in text}
    written = run.folder.host("algo-1") / "model/seen.json"  # which the archive holds as it is: it is not compressed
    assert holding == {written, run.folder.model}, "only the script itself wrote the secret down"
    assert {file.stat().st_uid for file in run.folder.path.rglob("*")} == {os.getuid()}
    assert launcher.attach(run.name).state == "Completed"
    assert not left(run)
    wait_until(lambda: not processes_of(run))


def test_a_script_that_knows_nothing_of_the_kit_is_followed_and_its_container_sampled(docker_job):
    run = launcher.run(launcher.plan(docker_job(TORCH_LOOP), on="docker"))
    wait_for_state(run, "Completed")
    measured = read(run.name)
    assert [(steps.rank, steps.host) for steps in measured.ranks] == [(0, "algo-1")]
    assert measured.hosts["algo-1"].cores and not left(run)


def test_two_runs_of_two_hosts_reduce_at_the_same_time_and_never_meet(docker_job):
    runs = [launcher.run(launcher.plan(docker_job(ALL_REDUCE, **TWO_HOSTS), on="docker")) for _ in range(2)]
    for run in runs:
        wait_for_state(run, "Completed", 180)
        for host in ("algo-1", "algo-2"):
            seen = json.loads((run.folder.host(host) / f"model/{host}.json").read_text())
            assert seen == {"total": 2, "hosts": ["algo-1", "algo-2"], "host": host}
            assert run.folder.log(host).stat().st_size
        with tarfile.open(run.folder.model) as tar:
            assert sorted(tar.getnames()) == ["algo-1.json", "algo-2.json"]
        assert not left(run)


def test_a_failing_host_gives_its_own_exit_code_and_text_and_ends_the_other(docker_job):
    job = docker_job(
        """
        import os, time
        if os.environ["SM_CURRENT_HOST"] == "algo-2":
            print("no images in shard 7", flush=True)
            raise SystemExit(42)
        time.sleep(100)
        """,
        **TWO_HOSTS,
    )
    run = launcher.run(launcher.plan(job, on="docker"))
    wait_for_state(run, "Failed")
    outcome = run.outcome()
    assert (outcome["failed_host"], outcome["exit_code"]) == ("algo-2", 42), outcome
    assert outcome["failure"] == "the last lines of its output:\nno images in shard 7"
    assert ("algo-2", "no images in shard 7") in list(run.logs())
    assert not run.folder.model.exists() and not left(run)


def test_stop_reaches_the_scripts_on_all_hosts_and_the_run_is_stopped_not_failed(docker_job):
    run = launcher.run(launcher.plan(docker_job(SLEEPER, **TWO_HOSTS), on="docker"))
    wait_for_ready(run, 2)
    assert run.state == "InProgress"
    run.stop("enough")
    wait_for_state(run, "Stopped")
    assert len(list(run.folder.path.glob("hosts/*/opt/ml/output/data/told-*"))) == 2
    assert run.outcome()["stop_reason"] == "enough"
    assert not left(run)


def test_any_user_may_own_a_run_also_one_that_the_image_does_not_know(docker_job, monkeypatch):
    start = supervision.start_supervisor

    def with_open_folders(module: str, plan: launcher.Plan, folder: RunFolder, *inherited) -> None:
        for path in folder.path.rglob("*"):  # they are ours: a stranger in the container needs them open
            path.chmod(0o777)
        start(module, plan, folder, *inherited)

    with monkeypatch.context() as stranger:
        stranger.setattr(supervision, "start_supervisor", with_open_folders)
        stranger.setattr(os, "getuid", lambda: 4321)
        stranger.setattr(os, "getgid", lambda: 4321)
        text = "import getpass, os, pathlib; print(f'{getpass.getuser()} {pathlib.Path.home()}'); open(os.environ['SM_MODEL_DIR'] + '/m', 'w')"
        run = launcher.run(launcher.plan(docker_job(text), on="docker"))
    wait_for_state(launcher.Run(run.folder), "Completed")
    assert (run.folder.host("algo-1") / "model/m").stat().st_uid == 4321
    assert ("algo-1", "sagemaker /tmp") in list(run.logs())


def test_an_image_without_train_fails_with_the_engines_own_words(engine, script_job):
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("nothing"))
    tag = "vision-launcher-test-empty"
    subprocess.run(["docker", "import", "-", tag], input=empty.getvalue(), check=True, capture_output=True)
    try:
        run = launcher.run(launcher.plan(script_job("print(1)", image={"uri": tag}), on="docker"))
        wait_for_state(run, "Failed")
    finally:
        subprocess.run(["docker", "rmi", tag], capture_output=True)
    assert "executable file not found" in run.outcome()["failure"], run.outcome()
    assert not left(run)


# -- confined ----------------------------------------------------------------------------------------------------------

CONFINED = """
    import json, os, pathlib, signal
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    seen = {name: status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")}
    bomb = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while len(bomb) < 20_000:
        try:
            child = os.fork()
        except OSError as error:
            seen["stopped_by"] = error.strerror
            break
        if not child:
            signal.pause()
        bomb.append(child)
    for child in bomb:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    seen["children"] = len(bomb)
    pathlib.Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps(seen))
"""


def test_a_script_has_no_capability_can_gain_none_and_its_fork_bomb_ends(docker_job, monkeypatch):
    monkeypatch.setattr(docker, "MIN_PROCESSES", 300)
    monkeypatch.setattr(docker, "PROCESSES_PER_CORE", 1)
    run = launcher.run(launcher.plan(docker_job(CONFINED), on="docker"))
    wait_for_state(run, "Completed")
    seen = json.loads((run.folder.host("algo-1") / "model/seen.json").read_text())
    assert 200 < seen.pop("children") < 300
    none = "0" * 16
    expected = {"CapEff": none, "CapPrm": none, "CapBnd": none, "NoNewPrivs": "1"}
    assert seen == {**expected, "stopped_by": "Resource temporarily unavailable"}


def test_a_host_that_takes_more_memory_than_it_may_is_killed_and_the_failure_says_so(docker_job):
    text = """
        hoard = []
        while len(hoard) < 2000:
            hoard.append(b"x" * 2**20)
    """
    run = launcher.run(launcher.plan(docker_job(text, compute={"memory_gb": 0.5}), on="docker"))
    wait_for_state(run, "Failed")
    failure = run.outcome()["failure"]
    assert "killed by SIGKILL" in failure and "reached its limit of memory; raise compute.memory_gb" in failure


# -- killed -----------------------------------------------------------------------------------------------------------

START = """
import launcher, sys, time
run = launcher.run(launcher.plan(launcher.load(sys.argv[1]), on="docker"))
print(run.folder.path, flush=True)
time.sleep(100)
"""


def test_a_killed_starter_leaves_no_container_no_network_and_no_process(docker_job, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(docker_job(SLEEPER, **TWO_HOSTS).model_dump(exclude_none=True)))
    starter = subprocess.Popen([sys.executable, "-c", START, str(config)], text=True, stdout=subprocess.PIPE)
    run = launcher.attach(Path(starter.stdout.readline().strip()).name)
    wait_for_ready(run, 2)
    starter.kill()
    starter.wait()
    wait_for_state(run, "Stopped")
    assert len(list(run.folder.path.glob("hosts/*/opt/ml/output/data/told-*"))) == 2, "in order, not by force"
    assert not left(run)
    wait_until(lambda: not processes_of(run))


@pytest.mark.parametrize("moment", ["while it prepares", "while it trains"])
def test_a_killed_supervisor_leaves_no_container_and_a_truthful_record(docker_job, moment):
    run = launcher.run(launcher.plan(docker_job(SLEEPER), on="docker"))
    if moment == "while it trains":
        wait_for_ready(run, 1)
    else:
        wait_until(
            lambda: "Creating" in run.folder.supervisor_log.read_text() or left(run), 60, "a network or container"
        )
    psutil.Process(run.folder.read(run.folder.supervisor)["pid"]).send_signal(signal.SIGKILL)
    assert run.wait(10) == "Failed"
    assert_nothing_left(run, 30)
    assert "was killed" in run.outcome()["failure"]


def test_what_a_dead_janitor_left_is_removed_by_the_next_run(engine, tmp_path):
    name, folder = "left-20261121-000000-abcd", tmp_path / "left"
    folder.mkdir()
    labels = [
        "--label",
        f"{docker_containers.RUN_LABEL}={name}",
        "--label",
        f"{docker_containers.FOLDER_LABEL}={folder}",
    ]
    subprocess.run(["docker", "network", "create", *labels, name], check=True, capture_output=True)
    docker.sweep()  # a run that another test starts meanwhile may have been first
    assert not left(name)


def test_containers_of_another_group_prepare_the_images_of_the_one_that_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part, label, number in itertools.product(("train", "validation"), "ab", range(24)):
        file = tmp_path / "data/photos" / part / label / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((80, 70), 40).convert("RGB").save(file)
    steps = ["hyperparameters.max_steps=3", "hyperparameters.log_every=1"]
    one_group = ["compute={instance_type: ml.g5.2xlarge}", "hyperparameters.worker_type=threads"]
    one_group += [f"inputs.{part}.instance_groups=null" for part in ("train", "validation")]
    config, found = ROOT / "configs/remote_preprocessing.yaml", {}
    for name, changes in (("together", []), ("alone", one_group)):
        run = launcher.run(launcher.plan(launcher.load(config, [*steps, *changes], smoke=True), on="docker"))
        wait_for_state(run, "Completed", 240)
        found[name] = [values["loss"] for values in run.metrics() if "loss" in values]
        if name == "together":
            assert "algo-2 prepares images for algo-1" in run.folder.log("algo-2").read_text()
            assert "rank 0:" not in run.folder.log("algo-1").read_text(), "no server failed"
        assert not left(run)
    assert len(found["alone"]) == 3 and found["together"] == pytest.approx(found["alone"], rel=1e-4)

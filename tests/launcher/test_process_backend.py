"""The process backend, with AWS's real toolkit and torchrun: how runs end, stop, fail and are killed."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

import launcher
from launcher import backends
from launcher.backends import docker_engine, local_hosts
from launcher.config.issues import Issue
from launcher.runner import run as running
from launcher.runner.recorded_plan import plan_again
from tests.conftest import SLEEPER, WEIRD_NAMES, assert_nothing_left, job_of, shared_store, wait_for_ready, wait_until

TWO_HOSTS = {"distribution": "torchrun", "compute": {"instance_count": 2}}


def output(run: launcher.Run, host: str = "algo-1") -> Path:
    return run.folder.host(host) / "output/data"


def test_a_script_runs_under_the_container_contract_and_leaves_its_model(script_job, tmp_path, store):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/image.txt").write_text("pixels")
    (tmp_path / "weights.bin").write_text("w")
    job = script_job(
        """
        import json, os, pathlib
        seen = {name: os.environ[name] for name in os.environ if name.startswith("SM_")}
        seen["train"] = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"], "image.txt").read_text()
        seen["teacher"] = os.listdir(os.environ["SM_CHANNEL_TEACHER"])
        seen["mine"] = os.environ["MINE"]
        pathlib.Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps(seen))
        """,
        inputs={"train": {"folder": str(tmp_path / "data")}, "teacher": {"file": str(tmp_path / "weights.bin")}},
        environment={"MINE": "it's; here"},
    )
    run = launcher.run(launcher.plan(job))
    assert run.wait(60) == "Completed"
    seen = json.loads((run.folder.host("algo-1") / "model/seen.json").read_text())
    assert (seen["train"], seen["teacher"], seen["mine"]) == ("pixels", ["weights.bin"], "it's; here")
    assert json.loads(seen["SM_HOSTS"]) == ["127.0.0.1"] and json.loads(seen["SM_CHANNELS"]) == ["teacher", "train"]
    assert run.folder.model.is_file()
    assert {"state": "Completed", "toolkit_exit_codes": {"algo-1": 0}}.items() <= run.outcome().items()
    for file in (run.folder.job, run.folder.plan, run.folder.files, run.folder.git, run.folder.versions):
        assert file.read_text()
    assert launcher.load(run.folder.job) == job
    assert launcher.attach(run.name).state == launcher.attach("test").state == "Completed"
    assert [item.name for item in launcher.runs()] == [run.name]
    assert_nothing_left(run)


@pytest.fixture(scope="module", params=["none", "torchrun"])
def ends_with_42(request, tmp_path_factory) -> tuple[launcher.Plan, launcher.Run]:
    """A plan with hyperparameters of each kind, and its run, whose script ends with 42."""
    place = tmp_path_factory.mktemp("ends-with-42")
    settings = {"a": 1, "name": "it's", "table": {"x": [1]}, "none": None}
    with shared_store(place):
        job = job_of(place / "source", "raise SystemExit(42)", distribution=request.param, hyperparameters=settings)
        plan = launcher.plan(job)
        run = launcher.run(plan)
        run.wait(60)
    return plan, run


def test_the_planned_command_is_the_one_that_the_toolkit_runs(ends_with_42):
    plan, run = ends_with_42
    lines = [line for _, line in run.logs() if line]
    ran = lines[lines.index("Invoking script with the following command:") + 1]
    assert ran == " ".join(plan.hosts[0].command)


def test_the_scripts_true_exit_code_comes_back(ends_with_42):
    _, run = ends_with_42
    assert run.state == "Failed"
    assert run.outcome()["exit_code"] == 42
    assert run.outcome()["failed_host"] == "algo-1"
    assert not run.folder.model.exists()


def test_a_scripts_own_failure_file_is_kept(script_job):
    job = script_job(
        "import os, pathlib; pathlib.Path(os.environ['SM_OUTPUT_DIR'], 'failure').write_text('no images'); raise SystemExit(3)"
    )
    run = launcher.run(launcher.plan(job))
    assert run.wait(60) == "Failed"
    assert (run.outcome()["failure"], run.outcome()["exit_code"]) == ("no images", 3)


def test_one_failing_host_ends_the_other_and_is_the_one_named(script_job):
    job = script_job(
        "import os, time\nif os.environ['SM_CURRENT_HOST'].endswith('2'): raise ValueError('bad shard')\ntime.sleep(100)",
        compute={"instance_count": 2},
    )
    run = launcher.run(launcher.plan(job))
    assert run.wait(120) == "Failed"
    assert run.outcome()["failed_host"] == "algo-2" and "bad shard" in "\n".join(
        line for host, line in run.logs() if host == "algo-2"
    )
    assert_nothing_left(run)


@pytest.mark.parametrize(
    ("values", "ranks"), [({}, 1), ({**TWO_HOSTS, "compute": {"instance_count": 2, "processes_per_host": 2}}, 4)]
)
def test_stop_reaches_every_training_process_and_the_run_is_stopped_not_failed(script_job, values, ranks):
    run = launcher.run(launcher.plan(script_job(SLEEPER, **values)))
    wait_for_ready(run, ranks)
    assert run.state == "InProgress"
    run.stop("enough")
    assert run.wait(60) == "Stopped"
    assert len(list(run.folder.path.glob("hosts/*/opt/ml/output/data/told-*"))) == ranks
    assert run.outcome()["stop_reason"] == "enough"
    assert set(run.outcome()["toolkit_exit_codes"].values()) == {0}, (
        "the script left in order, so the toolkit reports success"
    )
    assert_nothing_left(run)


def test_a_script_that_does_not_listen_is_recorded_as_stopped_too(script_job):
    run = launcher.run(
        launcher.plan(script_job("import time; print('up', flush=True); time.sleep(100)", distribution="torchrun"))
    )
    wait_until(lambda: any(line == "up" for _, line in run.logs()))
    run.stop()
    assert run.wait(60) == "Stopped"
    assert_nothing_left(run)


def pipes() -> set[str]:
    """The pipes that this process holds open."""
    gc.collect()  # of earlier tests' processes
    files = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return {file for file in files if file.startswith("pipe:")}


def test_a_run_that_is_over_or_never_started_leaves_no_pipe_open(script_job, monkeypatch):
    plans, before = [launcher.plan(script_job("print('done')")) for _ in range(2)], pipes()
    run = launcher.run(plans[0])
    assert len(pipes() - before) == 1, "which tells the supervisor that this process lives"
    assert run.wait(60) == "Completed" and pipes() == before
    run.detach()  # too late, and no mistake
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(launcher.UserError, match="the supervisor ended with status 1"):
        launcher.run(plans[1])
    assert pipes() == before


def test_a_run_that_nobody_holds_goes_on(script_job):
    name = launcher.run(launcher.plan(script_job(SLEEPER))).name
    gc.collect()
    run = launcher.attach(name)
    wait_for_ready(run, 1)
    assert run.state == "InProgress"
    run.stop()
    assert run.wait(60) == "Stopped"


def test_a_run_that_takes_too_long_is_stopped(script_job):
    run = launcher.run(launcher.plan(script_job(SLEEPER, compute={"max_hours": 5 / 3600})))
    assert run.wait(60) == "Stopped"
    assert "max_hours" in run.outcome()["stop_reason"]


@pytest.mark.slow
def test_two_runs_at_the_same_time_do_not_collide(script_job):
    text = """
    import os, pathlib, torch.distributed as dist, torch
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    pathlib.Path(os.environ["SM_MODEL_DIR"], "total").write_text(str(int(total)))
    dist.destroy_process_group()
    """
    runs = [
        launcher.run(launcher.plan(script_job(text, **TWO_HOSTS))),
        launcher.run(launcher.plan(script_job(text, distribution="torchrun", compute={"processes_per_host": 3}))),
        launcher.run(launcher.plan(script_job(text, distribution="torchrun", compute={"processes_per_host": 3}))),
    ]
    assert [run.wait(120) for run in runs] == ["Completed"] * 3
    assert [(run.folder.host("algo-1") / "model/total").read_text() for run in runs] == ["2", "3", "3"]


def test_a_run_store_its_data_and_its_code_may_lie_below_folders_of_any_name(script_job, tmp_path, monkeypatch):
    place, code = tmp_path.joinpath(*WEIRD_NAMES), Path("source", *WEIRD_NAMES)
    monkeypatch.setenv("LAUNCHER_RUNS", str(place))
    data = place / "data"
    data.mkdir(parents=True)
    (data / "x").write_text("here")
    text = "import os, pathlib; print(pathlib.Path(os.environ['SM_CHANNEL_TRAIN'], 'x').read_text())"
    run = launcher.run(launcher.plan(script_job(text, folder=str(code), inputs={"train": {"folder": str(data)}})))
    assert run.wait(60) == "Completed", "".join(line for _, line in run.logs())
    assert any(line == "here" for _, line in run.logs())
    assert run.folder.path.parent == place


SHADOWING = ("launcher", "psutil", "yaml", "signal")
"""Modules of the current folder that would end a run which imported them."""


@pytest.fixture(scope="module")
def secluded(tmp_path_factory) -> launcher.Run:
    """A run of a job with a secret, which its script found, started by a shell with secrets of its own in a folder of SHADOWING."""
    place = tmp_path_factory.mktemp("secluded")
    for name in SHADOWING:
        (place / f"{name}.py").write_text("raise SystemExit('shadowed')")
    text = """
        import os
        print("KEYS", sorted(os.environ))
        raise SystemExit(0 if os.environ["HF_TOKEN"] == "hf_hunter2" else 9)
    """
    with shared_store(place) as patch:
        job = job_of(place / "source", text, environment={"HF_TOKEN": "hf_hunter2"})
        patch.setenv("AWS_SECRET_ACCESS_KEY", "swordfish")
        patch.setenv("WORLD_SIZE", "64")
        patch.setenv("PYTHONPATH", "/nowhere")
        patch.chdir(place)
        run = launcher.run(launcher.plan(job))
        run.wait(60)
    return run


def test_nothing_of_this_shell_leaks_into_the_script(secluded):
    [line] = [line for _, line in secluded.logs() if line.startswith("KEYS")]
    assert "AWS_SECRET_ACCESS_KEY" not in line and "WORLD_SIZE" not in line
    files = [file for file in secluded.folder.path.rglob("*") if file.is_file()]
    assert files and not any("swordfish" in file.read_text(errors="replace") for file in files)


def test_requirements_are_not_installed_into_the_users_environment(script_job, tmp_path):
    job = script_job("print('ran')")
    (tmp_path / "source/requirements.txt").write_text("a-package-that-does-not-exist-anywhere==1.0\n")
    plan = launcher.plan(job)
    assert any(issue.level == "warning" and "requirements.txt" in issue.found for issue in plan.issues)
    run = launcher.run(plan)
    assert run.wait(60) == "Completed"
    assert not (run.folder.host("algo-1") / "code/requirements.txt").exists()
    again = plan_again(run.folder, [], "aws")
    assert "requirements.txt" in {file.path for file in again.files}, "a replay elsewhere installs them"


@pytest.mark.parametrize("visible", ["0, 1", "-1", "NoDevFiles", "1,-1,0", "", "GPU-1234, MIG-5"])
def test_gpus_are_those_that_cuda_shows(monkeypatch, visible):
    listing = subprocess.CompletedProcess("nvidia-smi", 0, "GPU 0: A10G\nGPU 1: A10G\n", "")
    monkeypatch.setattr(local_hosts.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(local_hosts.subprocess, "run", lambda *_, **__: listing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    local_hosts.gpus.cache_clear()
    known = {"0, 1": ("0", "1"), "1,-1,0": ("1",), "GPU-1234, MIG-5": ("GPU-1234", "MIG-5")}
    assert local_hosts.gpus() == known.get(visible, ())
    if visible not in known:
        assert local_hosts.share(0, 1, 1)["CUDA_VISIBLE_DEVICES"] == visible  # with none set it would see all of them
    local_hosts.gpus.cache_clear()


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        (None, ""),
        ("0,1", ""),
        ("1", ", GPUs 1 alone visible"),
        ("1,0", ", GPUs 1,0 alone visible"),
        ("", ", no GPU visible"),
    ],
)
@pytest.mark.parametrize("on", ["process", "docker"])
def test_trials_that_see_other_gpus_are_on_another_machine(monkeypatch, script_job, on, visible, said):
    job, backend = script_job("x = 1"), backends.get(on)
    monkeypatch.setattr(docker_engine, "look", lambda: (None, []))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    local_hosts.gpus.cache_clear()
    without = backend.machine(job)
    listing = subprocess.CompletedProcess("nvidia-smi", 0, "GPU 0: A10G\nGPU 1: A10G\n", "")
    monkeypatch.setattr(local_hosts.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(local_hosts.subprocess, "run", lambda *_, **__: listing)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    local_hosts.gpus.cache_clear()
    assert backend.machine(job) == without + said
    local_hosts.gpus.cache_clear()


def test_without_nvidia_smi_one_host_has_the_gpus_that_are_shown_and_others_none(monkeypatch):
    """How many there are is not known: two hosts would both take the first."""
    monkeypatch.setattr(local_hosts.shutil, "which", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    local_hosts.gpus.cache_clear()
    shares = [local_hosts.share(rank, count, 1)["CUDA_VISIBLE_DEVICES"] for rank, count in ((0, 1), (1, 2), (None, 1))]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert shares == ["0,1", "", ""] and "CUDA_VISIBLE_DEVICES" not in local_hosts.share(0, 1, 1)
    local_hosts.gpus.cache_clear()


def test_a_secret_reaches_the_script_and_no_file(secluded):
    assert secluded.state == "Completed", secluded.outcome()
    kept = [file for file in secluded.folder.path.rglob("*") if file.is_file() and "code" not in file.parts]
    assert len(kept) > 10 and not any(b"hunter2" in file.read_bytes() for file in kept)


def test_a_script_finds_no_credentials_of_this_machines_user(script_job, tmp_path, monkeypatch):
    keys = "aws_access_key_id = AKIDEXAMPLE\naws_secret_access_key = example\n"
    for file, section in ((".aws/credentials", "default"), (".aws/config", "default"), (".boto", "Credentials")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(f"[{section}]\nregion = us-west-2\n{keys}")
    monkeypatch.setenv("HOME", str(tmp_path))
    text = """
        import boto3, os, pathlib
        assert pathlib.Path("~/.aws/credentials").expanduser().is_file()
        session = boto3.Session()
        assert session.get_credentials() is None and session.region_name is None
    """
    assert launcher.run(launcher.plan(script_job(text))).wait(60) == "Completed"
    text = "import boto3; assert boto3.Session().get_credentials().access_key == 'AKIDEXAMPLE'"
    job = script_job(text, environment={"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / ".aws/credentials")})
    assert launcher.run(launcher.plan(job)).wait(60) == "Completed", "unless the job says so"


def test_odd_outputs_cost_neither_the_record_nor_the_store(script_job):
    run = launcher.run(launcher.plan(script_job(
        """
        import os, pathlib
        output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "x")
        output.mkdir()
        (output / "metrics.jsonl").write_bytes(b'{"step": 1}\\n\\xff\\xfe\\n{"step": 2}\\n{"step": ')
        (output / "result.json").write_text("[1")
        target = pathlib.Path(os.environ["SM_OUTPUT_DIR"], "weights.bin")
        target.write_text("weights")
        os.symlink(target, os.path.join(os.environ["SM_MODEL_DIR"], "best.bin"))
        os.symlink(".", os.path.join(os.environ["SM_MODEL_DIR"], "latest"))
        """
    )))  # fmt: skip
    assert run.wait(60) == "Completed"
    assert run.metrics() == [{"step": 1}, {"step": 2}] and run.result() == {}
    with tarfile.open(run.folder.model) as archive:
        assert archive.getnames() == ["best.bin"] and archive.extractfile("best.bin").read() == b"weights"
    (run.folder.path.parent / "foreign").mkdir()
    (run.folder.path.parent / "foreign/code").write_text("no run's")
    assert [item.name for item in launcher.runs()] == [run.name]


def test_the_same_plan_is_not_run_twice(script_job):
    plan = launcher.plan(script_job("print(1)"))
    assert launcher.run(plan).wait(60) == "Completed"
    with pytest.raises(launcher.UserError, match="has already started"):
        launcher.run(plan)


def test_modules_in_the_current_folder_do_not_stand_in_for_the_launchers(secluded):
    assert secluded.state == "Completed", secluded.outcome()
    logs = [secluded.folder.supervisor_log, secluded.folder.log("algo-1")]
    assert not any("shadowed" in log.read_text() for log in logs)


def test_the_uncommitted_patch_can_be_applied(script_job, tmp_path):
    job = script_job("print(1)")
    git = ["git", "-C", job.source, "-c", "user.name=a", "-c", "user.email=a@b"]
    (Path(job.source) / "latin.txt").write_bytes(b"caf\xe9\r\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "x"],
        ["config", "color.ui", "always"],
        ["config", "diff.noprefix", "true"],
    ):
        subprocess.run([*git, *command], check=True)
    (Path(job.source) / "latin.txt").write_bytes(b"th\xe9\r\n")
    run = launcher.run(launcher.plan(job))
    assert run.wait(60) == "Completed" and not run.folder.read(run.folder.git)["clean"]
    subprocess.run([*git, "stash", "-q"], check=True)
    subprocess.run([*git, "apply", "--check", str(run.folder.git_patch)], check=True)


def test_logs_can_be_followed_while_they_are_written(script_job):
    run = launcher.run(
        launcher.plan(
            script_job("import time\nfor number in range(5):\n    print('line', number)\n    time.sleep(0.2)")
        )
    )
    lines = [line for _, line in run.logs(follow=True) if re.match(r"line \d|^\d$|^line$", line)]
    assert " ".join(lines).split() == [word for number in range(5) for word in ("line", str(number))]
    assert run.state == "Completed"


def test_what_only_a_start_finds_is_a_warning_at_the_line_that_starts_it(script_job, monkeypatch):
    """Whoever calls `launcher.run` with a plan that was not checked reads no plan of what the check found."""
    plan = launcher.plan(script_job("pass"))
    doubt = Issue(key="compute", level="warning", found="only a check sees it", fix="look")
    monkeypatch.setattr(running, "check", lambda plan: dataclasses.replace(plan, issues=(*plan.issues, doubt)))
    with pytest.warns(UserWarning, match="warning: compute: only a check sees it") as seen:
        run = launcher.run(plan)
    assert [one.filename for one in seen] == [__file__] and run.wait(60) == "Completed"

"""Scripts that name /opt/ml, as AWS's samples do, on a machine that has none, or another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher.backends import opt_ml
from launcher.backends.host_folders import names_opt_ml
from launcher.planner.source_package import COMMIT_FILE
from tests.conftest import ROOT, SLEEPER, assert_nothing_left, wait_for_ready

SAMPLE = """
    import json, os, sys

    prefix = "/opt/ml/"
    training = os.path.join(prefix, "input/data", "training")
    output, model = os.path.join(prefix, "output"), os.path.join(prefix, "model")
    with open(prefix + "input/config/hyperparameters.json") as settings:
        depth = int(json.load(settings)["depth"])
    with open(os.path.join(training, "table.csv")) as table:
        rows = len(table.readlines())
    with open(prefix + "input/config/resourceconfig.json") as resources:
        host = json.load(resources)["current_host"]
    with open(os.path.join(model, f"of-{host}.json"), "w") as saved:
        json.dump({"rows": rows, "depth": depth, "opt": sorted(os.listdir("/opt"))}, saved)
    with open("/opt/ml/output/data/same", "w") as file:
        assert os.path.samefile(file.name, os.environ["SM_OUTPUT_DATA_DIR"] + "/same")
"""
"""A training script in the style of AWS's own samples for a container of the user's."""

TWO_HOSTS = {"compute": {"instance_count": 2}}


def sample_values(folder: Path) -> dict:
    folder.mkdir(exist_ok=True)
    (folder / "table.csv").write_text("1\n2\n3\n")
    return {"inputs": {"training": {"folder": str(folder)}}, "hyperparameters": {"depth": 5}}


@pytest.fixture
def allowed(tmp_path):
    """Only where this machine allows private mounts."""
    why = opt_ml.why_not(tmp_path)
    if why:
        pytest.skip(why)


def outside() -> tuple[list[str], list[str]]:
    """What is seen of /opt, and of the mounts there, from here; other tests and Docker mount elsewhere meanwhile."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted(os.listdir("/opt")), [line for line in mounts if line.split()[4].startswith("/opt")]


def test_each_host_finds_its_own_folder_there_and_nothing_changes_outside(script_job, tmp_path, allowed):
    before = outside()
    run = launcher.run(launcher.plan(script_job(SAMPLE, **TWO_HOSTS, **sample_values(tmp_path / "data"))))
    assert run.wait(60) == "Completed", run.outcome()
    for host, address in (("algo-1", "127.0.0.1"), ("algo-2", "127.0.0.2")):
        [saved] = (run.folder.host(host) / "model").iterdir()
        assert saved.name == f"of-{address}.json"
        assert json.loads(saved.read_text()) == {"rows": 3, "depth": 5, "opt": sorted({*before[0], "ml"})}
    assert outside() == before


@pytest.mark.slow
def test_a_run_there_is_stopped_in_order_and_leaves_no_process(script_job, allowed):
    text = SLEEPER.replace('os.environ["SM_OUTPUT_DATA_DIR"]', '"/opt/ml/output/data"')
    run = launcher.run(launcher.plan(script_job(text, distribution="torchrun", **TWO_HOSTS)))
    wait_for_ready(run, 2)
    run.stop()
    assert run.wait(60) == "Stopped"
    assert len(list(run.folder.path.glob("hosts/*/opt/ml/output/data/told-*"))) == 2
    assert_nothing_left(run)


@pytest.fixture
def config(script_job, tmp_path) -> Path:
    """A folder with a config of SAMPLE, `job.yaml`; its runs are in `runs`."""
    job = script_job(SAMPLE, **sample_values(tmp_path / "data"))
    (tmp_path / "job.yaml").write_text(json.dumps(job.model_dump(exclude_unset=True)))
    return tmp_path


def typed(folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """The launcher in a process of its own, after other words of a command."""
    environment = {**os.environ, "LAUNCHER_RUNS": str(folder / "runs")}
    return subprocess.run(
        [*before, sys.executable, "-m", "launcher", *words, str(folder / "job.yaml")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip


def test_an_ordinary_user_has_it_too(config, allowed):
    """Without the right to mount, also root needs a user namespace around its mounts; to map its own id there, SETFCAP."""
    ordinary = ("setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all") if os.geteuid() == 0 else ()
    done = typed(config, "run", before=ordinary)
    assert done.returncode == 0, done.stdout + done.stderr
    [saved] = config.glob("runs/*/hosts/algo-1/opt/ml/model/of-127.0.0.1.json")
    assert json.loads(saved.read_text())["rows"] == 3 and saved.stat().st_uid == os.geteuid()


NO_NAMESPACES = ("unshare", "--user", "--map-root-user", "sh", "-c")
LIMITED = 'echo 0 > /proc/sys/user/max_mnt_namespaces && exec "$@"'
"""A user namespace in which no mount namespace may be made."""


def test_where_the_kernel_forbids_it_the_plan_says_so_and_names_docker(config, allowed):
    forbidden = (*NO_NAMESPACES, LIMITED, "sh")
    planned = typed(config, "plan", before=forbidden)
    assert planned.returncode == 0, planned.stderr
    assert (
        "script.py:4 names /opt/ml, which does not exist for processes of this machine: the limit of namespaces"
        in planned.stdout
    )
    assert "--on docker" in planned.stdout
    done = typed(config, "run", before=forbidden)
    assert done.returncode == 1 and "'/opt/ml/input/config/hyperparameters.json'" in done.stdout
    [log] = config.glob("runs/*/logs/algo-1.log")
    assert log.read_text().startswith(
        "launcher: a script that names /opt/ml does not find this host's folder: the limit of namespaces"
    )


def test_a_plan_of_a_machine_that_allows_it_says_nothing(script_job, tmp_path, allowed):
    assert not [
        issue for issue in launcher.plan(script_job("open('/opt/ml/model/x')")).issues if "/opt/ml" in issue.found
    ]


def test_what_lies_in_opt_ml_itself_is_not_hidden(tmp_path):
    assert opt_ml.tried("/opt/ml/runs") == "/opt/ml/runs would be hidden"
    channel = tmp_path / "input/data/train"
    channel.parent.mkdir(parents=True)
    channel.symlink_to("/opt/ml/data")
    assert opt_ml.tried(str(tmp_path)) == f"{channel} would be hidden"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a = 1\nmodel = '/opt/ml/model'", "script.py:2"),
        ("import os\nos.path.join('/opt', 'ml', 'model')", "script.py:2"),
        ("import pathlib\npathlib.Path('/') / 'opt' / 'ml'", "script.py:2"),
        ("'/opt/mlflow', 'opt', 'html'", ""),
    ],
)
def test_what_names_the_folder_is_found(script_job, text, named):
    plan = launcher.plan(script_job(text))
    files = [(file.path, file.source) for file in plan.files if file.source is not None]
    assert any(path.startswith("training/") for path, _ in files), "this kit's files, which name it, do not count"
    assert names_opt_ml(plan.job, [*files, (COMMIT_FILE, ROOT / "Makefile")]) == named


def test_settings_that_name_the_folder_are_found(script_job):
    assert (
        names_opt_ml(script_job("1", hyperparameters={"model_dir": "/opt/ml/model"}), []) == "hyperparameters.model_dir"
    )
    assert names_opt_ml(script_job("1", environment={"CACHE": "/opt/ml/cache"}), []) == "environment.CACHE"

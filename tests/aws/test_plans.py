"""Planning for SageMaker is pure: every config, without a socket, a written file or an imported SDK."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import launcher
from launcher.aws import prices, upload
from launcher.backends.aws import Aws
from tests.aws.jobs import GROUPED, GROUPS, P4D, REMOTE, changed
from tests.conftest import ROOT, write_batch

CONFIGS = ["kt_food_tag", "hyundai_segmentation", "dali_imagenette", "quickstart"]

PLAN_ALL = """
import json, os, sys
opened = []
def watch(event, arguments):
    if event.startswith("socket.") and event != "socket.__new__":
        raise OSError(f"{event}: planning uses no network")
    if event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        opened.append(os.fsdecode(arguments[0]))
sys.addaudithook(watch)
import launcher
errors = {}
for config in sys.argv[1:]:
    overrides = ["inputs.teacher={s3: s3://amzn-s3-demo-bucket/teacher/}"] if config == "quickstart" else []
    plan = launcher.plan(launcher.load(f"configs/{config}.yaml", overrides), on="aws")
    assert str(plan) and json.loads(plan.to_json())["request"]
    errors[config] = [str(issue) for issue in plan.errors]
heavy = ("sagemaker", "boto3", "botocore", "torch", "numpy", "timm", "moto", "sagemaker_training")
print(json.dumps({"errors": errors, "heavy": [name for name in heavy if name in sys.modules], "opened": [path for path in opened if path != os.devnull]}))
"""


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and time; without what other tests and tools keep there."""
    beside = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "runs"}
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in beside]
        for name in names:
            facts = (Path(place) / name).stat()
            found[f"{place}/{name}"] = (facts.st_size, facts.st_mtime_ns)
    return found


@pytest.fixture
def home(tmp_path) -> Path:
    """A home and a working folder in which only what the configs name lies."""
    for split in ("train", "validation"):
        write_batch(tmp_path / "data/digits" / split)
        (tmp_path / "data/digits" / split / "0/1.png").write_bytes(b"1")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


def test_planning_every_config_for_sagemaker_has_no_effect_and_imports_no_sdk(home):
    kit, mine = tree(ROOT / "launcher") | tree(ROOT / "entrypoints") | tree(ROOT / "configs"), tree(home)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "XDG_", "LAUNCHER_"))},
        "HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", PLAN_ALL, *CONFIGS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"errors": {config: [] for config in CONFIGS}, "heavy": [], "opened": []}
    assert tree(home) == mine
    assert tree(ROOT / "launcher") | tree(ROOT / "entrypoints") | tree(ROOT / "configs") == kit


def test_the_tests_own_block_of_sockets_works():
    code = PLAN_ALL.partition("import launcher")[0] + "import socket; socket.create_connection(('127.0.0.1', 9))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "planning uses no network" in done.stderr


def test_a_plan_says_which_group_starts_what(good):
    planned = changed(good, {"compute": {**GROUPED, "instance_groups": GROUPS[::-1]}})
    plan = launcher.plan(launcher.from_values(planned), on="aws")
    assert [(host.group, host.command[0]) for host in plan.hosts] == [
        ("gpus", "mpirun"),
        ("gpus", "sshd"),
        ("cpus", "python"),
    ]
    assert "algo-1      cpus: python train.py" in str(plan) and "gpus: mpirun --host algo-2:8,algo-3:8 -np 16" in str(
        plan
    )


def test_torchrun_spans_the_training_group_alone_and_the_request_says_so(good):
    planned = changed(good, {"compute": {**GROUPED, "instance_groups": GROUPS[::-1]}, "distribution": "torchrun"})
    plan = launcher.plan(launcher.from_values(planned), on="aws")
    assert [(host.name, " ".join(host.command)) for host in plan.hosts] == [
        ("algo-2", "torchrun --nnodes 2 --nproc_per_node 8 --master_addr algo-2 --master_port 7777 --node_rank 0 train.py"),
        ("algo-3", "torchrun --nnodes 2 --nproc_per_node 8 --master_addr algo-2 --master_port 7777 --node_rank 1 train.py"),
        ("algo-1", "python train.py"),
    ]  # fmt: skip
    assert plan.request["HyperParameters"]["sagemaker_distribution_instance_groups"] == '["gpus"]'
    assert Aws().world_size(plan.job) == 16


def test_a_plan_shows_each_group_with_its_hosts_what_they_do_and_their_price(good):
    prices.cache_file().parent.mkdir(parents=True, exist_ok=True)
    known = {P4D: {"usd": 32.0, "read": "2026-11-02"}, "ml.c5.4xlarge": {"usd": 0.8, "read": "2026-11-02"}}
    prices.cache_file().write_text(json.dumps({"us-west-2": known}))
    counts = [{**group, "instance_count": count} for group, count in zip(GROUPS, (1, 4))]
    for kind, does in (({"distribution": "torchrun"}, "runs the script"), (REMOTE, "preprocesses")):
        values = {**kind, "compute": {**GROUPED, "instance_groups": counts, "max_hours": 2.0}}
        plan = launcher.plan(launcher.from_values(changed(good, values)), on="aws")
        assert plan.errors == ()
        said = [line.strip() for line in str(plan).splitlines() if line.startswith("  group ")]
        assert said == [
            "group       gpus trains: 1 host of ml.p4d.24xlarge (algo-1); at most $65.07, at $32.00 an hour",
            f"group       cpus {does}: 4 hosts of ml.c5.4xlarge (algo-2 to algo-5); at most $6.51, at $3.20 an hour",
        ]
        assert plan.price.ceiling == pytest.approx((32 + 3.2) * (2 + 2 / 60))
        [_, cpus] = json.loads(plan.to_json())["groups"]
        hosts = [f"algo-{number}" for number in range(2, 6)]
        assert cpus == {
            "name": "cpus",
            "instance_type": "ml.c5.4xlarge",
            "hosts": hosts,
            "does": does,
            "usd_per_hour": 3.2,
        }
        assert f"cpus {does}: 4 hosts" in plan._repr_html_()


def test_a_group_with_an_unknown_price_says_so(good):
    plan = launcher.plan(launcher.from_values(changed(good, {"compute": GROUPED, "region": "eu-central-1"})), on="aws")
    assert "gpus trains: 2 hosts of ml.p4d.24xlarge (algo-1, algo-2); price not known" in str(plan)


@pytest.mark.parametrize("folder", ["/", "~", "~/.."])
def test_a_folder_that_holds_the_home_is_not_uploaded(good, home, monkeypatch, folder):
    monkeypatch.setenv("HOME", str(home))
    [issue] = launcher.plan(
        launcher.from_values(changed(good, {"inputs": {"train": {"folder": folder}}})), on="aws"
    ).errors
    assert issue.key == "inputs.train" and "holds your home folder" in issue.found, issue


def test_a_user_without_a_home_plans_and_reads_prices(good, tmp_path, monkeypatch):
    """As in a CI container: HOME is not set, and /etc/passwd does not know the user."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    with pytest.raises(RuntimeError):
        Path.home()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/image").touch()
    values = changed(good, {"inputs": {"train": {"folder": str(tmp_path / "data")}}, "region": "eu-central-1"})
    plan = launcher.plan(launcher.from_values(values), on="aws")
    assert plan.errors == () and plan.uploads[0].files == 1 and "price not known" in plan.price.text
    entry = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": "2.5"}}}}}}}
    client = SimpleNamespace(get_products=lambda **_: {"PriceList": [json.dumps(entry)]})
    assert prices.read_price_list(client, "eu-central-1", ["ml.m5.large"]) == {"ml.m5.large": 2.5}, "not kept"


def test_a_folder_without_a_file_is_not_called_uploaded(good, tmp_path):
    """SageMaker would find no objects, once the hosts have come."""
    (tmp_path / "data/class/below").mkdir(parents=True)
    (tmp_path / "data/class/link").symlink_to(tmp_path / "gone")
    job = launcher.from_values(changed(good, {"inputs": {"train": {"folder": str(tmp_path / "data")}}}))
    [issue] = launcher.plan(job, on="aws").errors
    assert issue.key == "inputs.train" and issue.found.startswith(f"no file in {tmp_path}/data")


def test_a_folder_with_too_many_files_or_one_that_cannot_be_read_is_refused_under_its_channel(
    good, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = tmp_path / "data"
    data.mkdir()
    for name in "abc":
        (data / name).touch()
    job = launcher.from_values(changed(good, {"inputs": {"train": {"folder": str(data)}}}))
    assert launcher.plan(job, on="aws").uploads[0].files == 3
    with monkeypatch.context() as fewer:
        fewer.setattr(upload, "MAX_FILES", 2)
        [issue] = launcher.plan(job, on="aws").errors
    assert (issue.key, issue.found) == ("inputs.train", f"{data} holds more than 2 files")
    inner = os.open(data, os.O_RDONLY)
    for _ in range(20):  # a path longer than the system opens
        os.mkdir("x" * 250, dir_fd=inner)
        outer, inner = inner, os.open("x" * 250, os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
    [issue] = launcher.plan(job, on="aws").errors
    assert issue.key == "inputs.train" and "File name too long" in issue.found, issue


def test_two_links_to_one_folder_are_both_uploaded_and_a_cycle_is_not(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/1.jpg").write_bytes(b"12345")
    (tmp_path / "data").mkdir()
    for name, target in {"train": "../real", "validation": "../real", "round": ".", "up": ".."}.items():
        (tmp_path / "data" / name).symlink_to(target)
    found = [relative for relative, _ in upload._files(tmp_path / "data", "inputs.train")]
    assert found == ["train/1.jpg", "validation/1.jpg"]

"""Plans: complete, readable, and without any effect."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher.backends import BACKENDS
from launcher.config.entrypoints import entrypoints_folder
from launcher.planner import made_folders, source_package
from launcher.prepare import published_weights
from tests.conftest import write_batch
from tests.launcher.test_store import recorded

ROOT = Path(__file__).parents[2]

WATCH = """
import os, sys
events = []
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and os.fspath(path) != os.devnull:
            events.append(f"wrote {path}")
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "shutil.copyfile", "os.link", "os.truncate"):
        events.append(f"{event} {arguments}")
    elif event.startswith("socket.") and event != "socket.__new__":
        events.append(f"{event} {arguments}")
sys.addaudithook(watch)
sys.dont_write_bytecode = True
from launcher.commands.main import main
status = main(sys.argv[1:])
heavy = sorted(name for name in ("torch", "sagemaker", "boto3", "botocore", "timm", "numpy", "PIL", "sagemaker_training") if name in sys.modules)
sys.stderr.write(repr((status, events, heavy)))
"""


def digits(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        write_batch(tmp_path / "data" / split)
    return tmp_path / "data"


CACHES = (".git", "__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache")
"""Folders to which other tests write meanwhile."""


def files_here() -> set[str]:
    """The repository's files and folders."""
    found = set()
    for place, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in CACHES and not name.startswith(".venv")]
        found |= {os.path.join(place, name) for name in (*folders, *names)}
    return found


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_planning_opens_no_socket_writes_nothing_and_imports_nothing_heavy(tmp_path, json_flag):
    data = digits(tmp_path)
    command = [
        "plan",
        str(ROOT / "configs/quickstart_teacher.yaml"),
        f"inputs.train.folder={data}/train",
        f"inputs.validation.folder={data}/validation",
    ]
    before = files_here()
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *command, *json_flag], capture_output=True, text=True, cwd=tmp_path
    )
    status, events, heavy = eval(done.stderr)
    assert (status, events, heavy) == (0, [], [])
    assert files_here() == before
    assert not (tmp_path / "store").exists()


def test_importing_the_launcher_imports_no_torch_and_no_sdk():
    """With all of its names but those that need numpy."""
    code = (
        "import launcher, sys\n"
        "for name in {*launcher.__all__} - {'Comparison', 'Diagnosis', 'tune'}: getattr(launcher, name)\n"
        "print([name for name in ('torch', 'sagemaker', 'boto3', 'tqdm', 'psutil', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip() == "[]"


def test_the_launcher_alone_imports_nothing_of_its_own():
    code = "import launcher, sys; print([name for name in sys.modules if name.startswith(('launcher.', 'pydantic'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip() == "[]"


def test_every_public_name_is_what_its_annotation_says():
    """Type checkers read the imports under TYPE_CHECKING, programs the table."""
    [block] = [one for one in ast.parse((ROOT / "launcher/__init__.py").read_text()).body if isinstance(one, ast.If)]
    reported = {name.asname or name.name: f"{one.module}:{name.name}" for one in block.body for name in one.names}
    assert reported.pop("study") == "launcher:study" and launcher.study.__name__ == "launcher.study"
    assert reported == launcher._PLACES and {*launcher.__all__} == {*reported, "study"} <= {*dir(launcher)}
    for name in launcher.__all__:
        assert getattr(launcher, name) is not None
    with pytest.raises(AttributeError, match="module 'launcher' has no attribute 'nothing'"):
        _ = launcher.nothing


def test_a_plan_says_the_command_the_channels_and_the_files(tmp_path, script_job):
    data = digits(tmp_path)
    job = script_job(
        "x = 1",
        inputs={"train": {"folder": str(data)}},
        distribution="torchrun",
        compute={"instance_count": 2, "processes_per_host": 3},
    )
    plan = launcher.plan(job)
    text = str(plan)
    assert (
        "torchrun --nnodes 2 --nproc_per_node 3 --master_addr 127.0.0.1 --master_port '<free port>' --node_rank 1 script.py"
        in text
    )
    assert f"train: {data}" in text
    assert "  code        2 files, " in text and "and this kit's launcher_observer and training (" in text
    assert "script.py " in plan.text("files") and "training/settings/__init__.py" in plan.text("files")
    assert json.loads(plan.to_json())["hosts"][1]["address"] == "127.0.0.2"


def test_the_name_is_fixed_when_planned_and_fits_sagemakers_limit(script_job):
    job = script_job("x = 1").model_copy(update={"name": "a" * 42})
    plan = launcher.plan(job)
    assert len(plan.name) == 63 and plan.name == plan.to_dict()["name"] == plan.hosts[0].environment.get(
        "TRAINING_JOB_NAME", plan.name
    )
    assert launcher.plan(job).name != plan.name


def issues(job) -> str:
    return "\n".join(f"{issue.level} {issue}" for issue in launcher.plan(job).issues)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"inputs": {"train": {"folder": "nowhere"}}}, "no such folder"),
        ({"inputs": {"train": {"file": "nowhere.tar.gz"}}}, "no such file"),
        ({"inputs": {"train": {"folder": __file__}}}, "is a file\n  fix:   write {file:"),
        ({"inputs": {"train": {"file": str(ROOT)}}}, "is a folder\n  fix:   write {folder:"),
        ({"inputs": {"teacher": {"run": "quickstart-teacher"}}}, "launcher run quickstart_teacher"),
        ({"inputs": {"a b": {"folder": str(ROOT)}}}, "not a valid channel name"),
        ({"script": "scrip.py"}, "did you mean script.py?"),
        ({"source": "/nowhere"}, "/nowhere: no such folder"),
        ({"compute": {"instance_count": 2}}, "none, with 2 hosts"),
        ({"compute": {"processes_per_host": 2}}, "none, with 2 processes a host"),
        ({"compute": {"instance_count": 17}, "distribution": "torchrun"}, "valid: at most 16"),
        ({"compute": {"instance_count": 3}, "distribution": "torchrun", "hyperparameters": {"global_batch_size": 64}}, "write global_batch_size: 63 or 66"),
        ({"compute": {"instance_count": 3}, "distribution": "torchrun", "hyperparameters": {"global_batch_size": "65"}}, "write global_batch_size: 63 or 66"),
        ({"distribution": "smddp"}, "warning distribution: smddp exists on SageMaker only"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_job_is_found_before_it_starts(script_job, values, expected):
    job = script_job("def main(): ...")
    assert expected in issues(launcher.from_values({**job.model_dump(exclude_none=True), **values}))


def test_several_processes_without_a_group_are_told_to_wrap_the_model_in_a_script_of_ones_own_only(script_job):
    compute = {"instance_count": 2}
    kit = launcher.from_values({"name": "kit", "script": "train_classifier.py", "compute": compute})
    for job, wraps in ((script_job("def main(): ...", compute=compute), True), (kit, False)):
        [issue] = [one for one in launcher.plan(job).issues if one.key == "distribution"]
        assert issue.fix.startswith("write distribution: torchrun")
        assert ("torchrun and wrap the model in DistributedDataParallel, unless" in issue.fix) == wraps


def test_a_misspelt_script_lists_those_that_a_config_names():
    [found] = [
        issue
        for issue in launcher.plan(launcher.from_values({"name": "a", "script": "train_clasifier.py"})).errors
        if issue.key == "script"
    ]
    assert found.valid == "train_classifier.py, train_kd.py, train_segmentation.py"
    assert found.fix == "did you mean train_classifier.py?"


@pytest.mark.parametrize(
    ("script", "fix"),
    [
        ("src/train.py", "write source: src and script: train.py"),
        ("train.py", "write source: . and script: train.py"),
        ("src/gone.py", "name a script in that folder, or set source to your own folder"),
    ],
)
def test_a_script_of_ones_own_without_its_source_is_answered_with_both(tmp_path, monkeypatch, script, fix):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "src/train.py", "train.py")
    [found] = launcher.plan(launcher.from_values({"name": "a", "script": script})).errors
    assert (found.key, found.fix) == ("script", fix)
    assert ("is in the current folder" in found.found) == Path(script).is_file()


@pytest.mark.parametrize("on", BACKENDS)
def test_a_checkpoint_folder_that_the_kits_scripts_do_not_write_to_is_refused(on):
    values = {"name": "kit", "script": "train_classifier.py", "checkpoints": {"s3": "s3://amzn-s3-demo-bucket/kept"}}
    for path, found in (("/opt/ml/state", 1), ("/opt/ml/model/state", 1), ("/opt/ml/checkpoints/", 0)):
        values["checkpoints"]["path"] = path
        refused = [
            one for one in launcher.plan(launcher.from_values(values), on=on).errors if one.key == "checkpoints.path"
        ]
        assert len(refused) == found and all("scripts write to /opt/ml/checkpoints\n" in str(one) for one in refused)


@pytest.mark.parametrize(
    ("run", "fix"),
    [
        ("quickstart-bank-labels", "fix:   run it first: launcher label quickstart_bank"),
        ("cutouts-bank-labels", "fix:   run it first: launcher label cutouts_bank"),
        ("cutouts", "fix:   run it first: launcher run cutouts_segmentation"),
        (
            "quickstart_teacher",
            "did you mean quickstart-teacher? Run it first: launcher run quickstart_teacher; or for",
        ),
        ("my-studnet-labels", "fix:   did you mean my-student-labels?"),
        ("my-studnet", "fix:   did you mean my-student?"),
        ("my-own", "fix:   run it first: launcher run CONFIG, the config whose name is my-own; launcher runs"),
    ],
)
def test_a_run_that_does_not_exist_is_named_with_the_command_that_starts_it_or_a_near_one(script_job, run, fix):
    recorded("my-student-20261121-031500-abcd")
    recorded("my-student-labels-20261121-031500-abce")
    assert fix in issues(script_job("x = 1", inputs={"teacher": {"run": run}}))


def test_no_command_starts_a_run_that_is_named_in_full(script_job):
    reported = issues(script_job("x = 1", inputs={"teacher": {"run": "mine-20261121-031500-abcd"}}))
    assert "fix:   launcher runs lists them" in reported


def test_a_label_banks_run_is_not_taken_for_its_own_jobs(script_job):
    recorded("mobile-20261121-031500-abcd")
    reported = issues(script_job("x = 1", inputs={"cache": {"run": "mobile-labels"}}))
    assert "run it first: launcher label CONFIG, the config whose name is mobile;" in reported


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("data/dinov2-small", "launcher weights dinov2-small data/dinov2-small"),
        ("data/stamps/train", "launcher prepare SOURCE data/stamps"),
        ("data/cutouts/validation", "launcher prepare cutouts data/cutouts"),
        ("my data/unlabelled", "launcher prepare SOURCE 'my data' --unlabelled"),
    ],
)
def test_a_folder_that_the_kit_can_make_is_named_with_the_command(script_job, tmp_path, monkeypatch, folder, command):
    monkeypatch.chdir(tmp_path)
    reported = issues(script_job("x = 1", inputs={"given": {"folder": folder}}))
    assert f"relative to the current folder, or create it: {command}\n" in f"{reported}\n"


def test_a_folder_that_the_kit_cannot_make_is_named_without_a_command(script_job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "launcher prepare" not in issues(script_job("x = 1", inputs={"teacher": {"folder": "models/teacher"}}))


def test_commands_that_validation_names_do_what_it_says():
    assert {*made_folders.WEIGHTS} == {*published_weights.KNOWN}


def test_an_empty_folder_is_no_input(tmp_path, script_job):
    (tmp_path / "empty").mkdir()
    assert "is empty" in issues(script_job("x = 1", inputs={"train": {"folder": str(tmp_path / "empty")}}))


def test_a_plan_with_errors_is_shown_and_never_run(script_job, store):
    plan = launcher.plan(script_job("x = 1", inputs={"train": {"folder": "nowhere"}}))
    assert "errors\n" in str(plan) or "error\n" in str(plan)
    with pytest.raises(launcher.UserError, match="nowhere"):
        launcher.run(plan)
    assert not store.exists()


def test_an_unknown_backend_is_refused(script_job):
    with pytest.raises(launcher.UserError, match="did you mean process"):
        launcher.plan(script_job("x = 1"), on="proces")


# -- the source package -----------------------------------------------------------------------------------------------


def write(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("x")


def test_ignored_files_stay_and_the_kits_training_package_comes_along(tmp_path):
    write(tmp_path, "train.py", "sub/helper.py", "big.bin", "sub/__pycache__/x.pyc", "notes/a.md")
    (tmp_path / source_package.IGNORE_FILE).write_text("# large\n*.bin\nnotes/\n")
    paths = [file.path for file in source_package.source_files(tmp_path)[0]]
    assert [path for path in paths if not path.startswith(("training/", "launcher_observer/"))] == [
        "sub/helper.py",
        "train.py",
    ]
    assert {"training/settings/__init__.py", "launcher_observer/contract.py"} <= {*paths}


def test_a_users_own_training_package_is_not_replaced(tmp_path):
    write(tmp_path, "train.py", "training/mine.py")
    assert [file.path for file in source_package.source_files(tmp_path)[0]] == ["train.py", "training/mine.py"]


def test_what_git_ignores_stays(tmp_path):
    write(tmp_path, "train.py", "new.py", "secret.env", "training/x.py")
    (tmp_path / ".gitignore").write_text("*.env\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "train.py"], check=True)
    assert [file.path for file in source_package.source_files(tmp_path)[0]] == [
        ".gitignore",
        "new.py",
        "train.py",
        "training/x.py",
    ]


def test_the_kits_own_scripts_are_packaged_without_a_requirements_file():
    paths = [file.path for file in source_package.source_files(entrypoints_folder())[0]]
    assert "train_kd.py" in paths and "training/engine/loop.py" in paths
    assert "requirements.txt" not in paths and not any("__pycache__" in path for path in paths)


def test_copied_files_keep_their_executable_bit(tmp_path):
    write(tmp_path / "from", "run.sh", "train.py", "training/x.py")
    (tmp_path / "from/run.sh").chmod(0o700)
    source_package.copy_files(source_package.source_files(tmp_path / "from")[0], tmp_path / "to")
    assert os.access(tmp_path / "to/run.sh", os.X_OK) and not os.access(tmp_path / "to/train.py", os.X_OK)


def test_a_repository_that_git_refuses_is_an_error_not_a_folder_without_git(tmp_path, script_job):
    job = script_job("x = 1")
    source = Path(job.source)
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    (source / ".git/config").write_text("not a config [")
    assert "git cannot list" in issues(job)


def test_a_kit_that_git_refuses_is_the_users_error_too(tmp_path, script_job, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path / "kit")], check=True)
    (tmp_path / "kit/.git/config").write_text("not a config [")
    monkeypatch.setattr(source_package, "entrypoints_folder", lambda: tmp_path / "kit")
    with pytest.raises(launcher.UserError, match="git cannot list"):
        launcher.plan(script_job("x = 1"))


def test_a_script_that_is_excluded_from_the_source_package_is_refused(script_job):
    job = script_job("x = 1")
    (Path(job.source) / source_package.IGNORE_FILE).write_text("*.py\n")
    assert "script.py is excluded from the source package" in issues(job)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"environment": {"A=B": "c"}}, "not a valid variable name"),
        ({"environment": {"": "c"}}, "not a valid variable name"),
        ({"environment": {"A": "x" * 513}}, "513 characters"),
        ({"environment": {"A": "a\0b"}}, "a NUL character"),
        ({"environment": {"A": "***"}}, "a run's record does not hold its secrets"),
        ({"environment": {"PATH": "/x"}}, "set by the container toolkit"),
        ({"environment": {"SAGEMAKER_BASE_DIR": "/x"}}, "set by the container toolkit"),
        ({"script": "../script.py"}, "refuses . and .."),
        ({"inputs": {"donn\u00e9es": {"folder": "/"}}}, "not a valid channel name"),
        ({"inputs": {"train": {"folder": "~nosuchuser/x"}}}, "check the path"),
        ({"source": __file__}, "a file"),
        ({"hyperparameters": {"api_key": "sk-123"}}, "add API_KEY: env under secrets"),
        ({"hyperparameters": {"a=b": 1}}, "a name with ="),
        ({"hyperparameters": {"rate": float("nan")}}, "finite number"),
        ({"compute": {"instance_count": 1000}, "distribution": "torchrun"}, "valid: at most 16"),
        ({"compute": {"processes_per_host": 1024}, "distribution": "torchrun"}, "1024 processes on"),
    ],
)  # fmt: skip
def test_what_no_run_could_carry_is_refused(script_job, values, expected):
    job = script_job("def main(): ...")
    assert expected in issues(launcher.from_values({**job.model_dump(exclude_none=True), **values}))


def test_words_that_only_look_like_secrets_pass(script_job):
    job = script_job(
        "x = 1", hyperparameters={"num_tokens": 3, "token_size": "a", "class_token": True, "key_frames": "x"}
    )
    assert launcher.plan(job).errors == ()


def test_a_secret_is_in_no_printout_and_no_plan(script_job):
    plan = launcher.plan(script_job("x = 1", environment={"HF_TOKEN": "hf_hunter2", "PLAIN": "shown"}))
    for text in (plan.text("env"), plan.to_json()):
        assert "hunter2" not in text and "HF_TOKEN" in text and "shown" in text


def test_planning_leaves_the_users_random_numbers_alone(script_job):
    import random

    job = script_job("x = 1")
    random.seed(0)
    expected = random.random()
    random.seed(0)
    names = {launcher.plan(job).name[-4:] for _ in range(3)}
    assert random.random() == expected and len(names) > 1


@pytest.mark.parametrize(
    ("channel", "asks", "fix"),
    [
        ("unlabelled", {"unlabelled": {}}, "write hyperparameters.unlabelled={}, or remove it"),
        ("weights", {"pretrained": "channel"}, "write hyperparameters.pretrained=channel, or remove it"),
    ],
)
def test_a_channel_that_the_script_would_not_read_is_reported(tmp_path, channel, asks, fix):
    data = digits(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more/1.png").touch()
    folders = {
        "train": data / "train",
        "validation": data / "validation",
        "teacher": tmp_path,
        channel: tmp_path / "more",
    }
    for hyperparameters in ({}, asks):
        job = launcher.from_values({
            "name": "x", "script": "train_kd.py", "inputs": {name: {"folder": str(folder)} for name, folder in folders.items()},
            "hyperparameters": {"student": "resnet18", **hyperparameters},
        })  # fmt: skip
        reported = [issue for issue in launcher.plan(job).issues if issue.key == f"inputs.{channel}"]
        assert [(issue.level, issue.fix) for issue in reported] == ([] if hyperparameters else [("warning", fix)])


@pytest.mark.parametrize("address", ["s3://b/runs/first/output/model.tar.gz", "s3://b/runs/first/output/model/"])
def test_a_model_that_is_in_s3_only_is_one_mistake_here(script_job, address):
    earlier = recorded("first-20260101-000000-abcd")
    earlier.outcome.write_text(json.dumps({"state": "Completed", "model_uri": address}))
    plan = launcher.plan(script_job("print(1)", inputs={"teacher": {"run": "first"}}))
    [issue] = plan.errors
    assert issue.key == "inputs.teacher" and issue.found.endswith(f"is in S3 only: {address}")
    copied = f"aws s3 cp {address} {earlier.model}"
    assert issue.fix == (
        copied if address.endswith("gz") else f"aws s3 cp --recursive {address} FOLDER, and write {{folder: FOLDER}}"
    )

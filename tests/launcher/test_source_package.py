"""The source package: the same bytes wherever it is made, a size limit, and no secrets in it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import launcher
from launcher.backends import BACKENDS
from launcher.config.entrypoints import entrypoints_folder
from launcher.planner import source_package
from tests.conftest import ROOT, WEIRD_NAMES
from tests.launcher.conftest import commit, write


def packed(folder: Path) -> bytes:
    files, issues = source_package.source_files(folder)
    assert issues == []
    return source_package.archive(files)


def members(archive: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: member for member in tar}


def refusals(folder: Path) -> list[str]:
    return [str(issue) for issue in source_package.check_archive(source_package.source_files(folder)[0])]


def test_the_archive_is_the_same_bytes_twice(source):
    assert packed(source) == packed(source)


@pytest.mark.parametrize("name", WEIRD_NAMES)
def test_the_archive_is_the_same_from_another_folder(source, tmp_path, name):
    other = tmp_path / name / "copy"
    shutil.copytree(source, other)
    assert packed(other) == packed(source)


def test_times_owners_and_umask_leave_no_trace(source, tmp_path):
    expected = packed(source)
    other = tmp_path / "other"
    before = os.umask(0o077)
    try:
        for path in ("training/own.py", "sub/ünï.py", "run.sh", "train.py"):
            write(other, {path: (source / path).read_bytes()})
        (other / "run.sh").chmod(0o700)
    finally:
        os.umask(before)
    for file in other.rglob("*"):
        os.utime(file, (0, 0))
    assert packed(other) == expected
    for member in members(expected).values():
        assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")


def test_the_archive_is_the_same_from_another_process(source):
    code = "import sys; from pathlib import Path; from launcher.planner import source_package as p; sys.stdout.buffer.write(p.archive(p.source_files(Path(sys.argv[1]))[0]))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC{seed}", "LC_ALL": "C"}
        done = subprocess.run([sys.executable, "-c", code, source], capture_output=True, cwd=ROOT, env=environment)
        assert done.stdout == packed(source), done.stderr.decode()


def test_a_script_keeps_its_executable_bit_and_nothing_else_of_its_mode(source):
    (source / "train.py").chmod(0o600)
    (source / "run.sh").chmod(0o4750)
    modes = {name: oct(member.mode) for name, member in members(packed(source)).items()}
    assert modes == {"run.sh": "0o755", "sub/ünï.py": "0o644", "train.py": "0o644", "training/own.py": "0o644"}


def test_a_change_of_one_byte_or_of_a_mode_changes_the_archive(source):
    first = packed(source)
    (source / "run.sh").chmod(0o644)
    second = packed(source)
    (source / "train.py").write_text("print(2)\n")
    assert len({first, second, packed(source)}) == 3


def test_a_link_is_packaged_as_the_file_that_it_names(source):
    (source / "linked.py").symlink_to(source / "train.py")
    (source / "broken.py").symlink_to(source / "nowhere")
    found = members(packed(source))
    assert found["linked.py"].isfile() and found["linked.py"].size == len("print(1)\n")
    assert "broken.py" not in found


def test_what_the_toolkit_unpacks_is_what_lay_there(source, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(packed(source)), mode="r:gz") as tar:
        tar.extractall(tmp_path / "unpacked")
    for path in ("train.py", "run.sh", "sub/ünï.py"):
        assert (tmp_path / "unpacked" / path).read_bytes() == (source / path).read_bytes()


# -- what stays -------------------------------------------------------------------------------------------------------


def test_the_ignore_file_takes_names_folders_and_patterns(source):
    write(source, {"a.bin": "", "sub/b.bin": "", "notes/c.txt": "", "sub/deep/d.py": "", "keep.py": ""})
    (source / source_package.IGNORE_FILE).write_text("# large files\n\n*.bin\nnotes/\n  sub/deep  \n")
    assert list(members(packed(source))) == ["keep.py", "run.sh", "sub/ünï.py", "train.py", "training/own.py"]


def test_the_ignore_file_adds_to_git(source):
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    write(source, {".gitignore": "*.log\n", "a.log": "", "b.bin": "", source_package.IGNORE_FILE: "*.bin\n"})
    assert {"a.log", "b.bin", source_package.IGNORE_FILE}.isdisjoint(members(packed(source)))


def test_a_folder_of_data_is_refused_with_its_largest_files(source):
    large = source / "data"
    large.mkdir()
    for number, megabytes in enumerate((60, 50, 1)):
        with (large / f"{number}.bin").open("wb") as file:
            file.truncate(megabytes * 2**20)
    [issue] = source_package.check_archive(source_package.source_files(source)[0])
    assert issue.key == "source" and issue.valid == "at most 100 MiB"
    assert "111.0 MiB, most of it data/0.bin (60.0 MiB), data/1.bin (50.0 MiB)" in issue.found
    assert source_package.IGNORE_FILE in issue.fix and "data as an input" in issue.fix
    (source / source_package.IGNORE_FILE).write_text("data\n")
    assert refusals(source) == []


SECRET_FILES = (
    *(".env", ".env.local", "sub/prod.env", "keys/server.pem", "keys/server.key", "id_rsa", "sub/ID_ECDSA", "certificate.p12"),
    *(".aws/credentials", ".ssh/config", ".git-credentials", ".pgpass", ".npmrc", "sub/.netrc", "sub/.docker/config.json"),
    *(".docker/config.json", "kaggle.json", "secrets.yaml", "client_secret_7.json", "infra/terraform.tfstate"),
)  # fmt: skip


@pytest.mark.parametrize("repository", [False, True])
def test_files_that_hold_secrets_by_their_name_stay_and_are_named(source, repository):
    if repository:
        commit(source)
    write(source, dict.fromkeys(SECRET_FILES, "x"))
    files, [issue] = source_package.source_files(source)
    assert [file.path for file in files] == ["run.sh", "sub/ünï.py", "train.py", "training/own.py"]
    assert issue.level == "warning" and ".env" in issue.found and f"and {len(SECRET_FILES) - 5} more" in issue.found
    (source / source_package.IGNORE_FILE).write_text("\n".join(SECRET_FILES))
    assert source_package.source_files(source)[1] == [], "what the user excludes needs no word"


def test_a_link_out_of_the_folder_or_to_a_secret_file_stays(source, tmp_path):
    (tmp_path / "outside.txt").write_text("private")
    (tmp_path / "source-2").mkdir()
    (tmp_path / "source-2/beside.txt").write_text("private")
    write(source, {"sub/.env": "KEY=1"})
    for name, target in {
        "a.txt": "../outside.txt",
        "b.txt": "../source-2/beside.txt",
        "c.txt": "sub/.env",
        "d.py": "train.py",
        "e": "e",
    }.items():
        (source / name).symlink_to(target)
    files, [issue] = source_package.source_files(source)
    assert [file.path for file in files] == ["d.py", "run.sh", "sub/ünï.py", "train.py", "training/own.py"]
    assert "a.txt, b.txt (a link to outside the folder)" in issue.found
    assert "c.txt" in issue.found and "sub/.env" in issue.found


def test_a_link_to_a_file_that_git_ignores_stays_and_is_named(source):
    write(source, {".gitignore": "private\n", "private/notes.txt": "private", "shared.txt": "", "sub/kept.py": ""})
    for name, target in {"a.txt": "private/notes.txt", "sub/b.txt": "../a.txt", "c.txt": "shared.txt"}.items():
        (source / name).symlink_to(target)
    (source / "folder").symlink_to("private")
    commit(source, "add", "-A")
    files, [issue] = source_package.source_files(source)
    assert {"c.txt", "shared.txt"} <= {file.path for file in files}
    assert not any(file.source and b"private" in file.read() for file in files if file.path != ".gitignore")
    assert f"a.txt, sub/b.txt ({source_package.LINK_TO_UNLISTED})" in issue.found and "copy" in issue.fix


SECRETS = [
    ("a private key", "-----BEGIN " + "PRIVATE KEY-----"),
    ("a private key", "-----BEGIN RSA " + "PRIVATE KEY-----"),
    ("a private key", "-----BEGIN OPENSSH " + "PRIVATE KEY-----"),
    ("an AWS access key", "access key AKIA" + "QF7X2PL5MZ3KW6TD"),
    ("an AWS access key", "ASIA" + "QF7X2PL5MZ3KW6TD"),
    ("a Hugging Face token", "HF_TOKEN=hf_" + "a" * 34),
    ("a GitHub token", "https://ghp_" + "a" * 36 + "@github.com"),
    ("a GitHub token", "github_pat_" + "a" * 82),
]


@pytest.mark.parametrize(("kind", "text"), SECRETS, ids=[f"{kind} {text[:14]}" for kind, text in SECRETS])
def test_what_looks_like_a_secret_is_refused_with_file_and_line_and_is_not_repeated(source, kind, text):
    write(source, {"sub/settings.py": f"a = 1\n\nb = '''{text}'''\n"})
    [issue] = source_package.check_archive(source_package.source_files(source)[0])
    assert issue.key == "source: sub/settings.py:3" and kind in issue.found
    assert "under `secrets`" in issue.fix
    assert text not in str(issue)
    (source / source_package.IGNORE_FILE).write_text("settings.py\n")
    assert refusals(source) == []


def test_a_secret_in_a_binary_file_is_found_too(source):
    write(source, {"notebook.bin": b"\xff\0\n" + SECRETS[3][1].encode()})
    assert "notebook.bin:2" in refusals(source)[0]


def test_every_file_with_a_secret_is_named_at_once(source):
    write(source, {"a.py": SECRETS[0][1], "b.py": SECRETS[5][1]})
    assert [text.partition(" looks")[0] for text in refusals(source)] == ["source: a.py:1:", "source: b.py:1:"]


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----",
        "AKIAIOSFODNN7",
        "AKIA" + "IOSFODNN7EXAMPLE",
        "XAKIA" + "QF7X2PL5MZ3KW6TD",
        "arn:aws:iam::123456789012:role/SageMakerTraining",
        "hf_hub_download(repo_id='a/b', filename='model.safetensors')",
        "sha256 = '" + "a" * 64 + "'",
    ],
)
def test_words_that_only_look_like_secrets_are_packaged(source, text):
    write(source, {"words.py": text})
    assert refusals(source) == []


def test_this_kits_own_scripts_may_be_packaged():
    assert refusals(entrypoints_folder()) == []


@pytest.mark.parametrize("in_git", [False, True])
def test_the_run_store_and_the_schema_for_editors_do_not_travel(source, monkeypatch, in_git):
    write(source, {"runs/mine-20260101-000000-abcd/code/train.py": "", "runs.py": "", "launcher.schema.json": "{}"})
    if in_git:
        commit(source)
    assert "runs/mine-20260101-000000-abcd/code/train.py" in {
        file.path for file in source_package.source_files(source)[0]
    }, "no store"
    monkeypatch.setenv("LAUNCHER_RUNS", str(source / "runs"))
    kept = {file.path for file in source_package.source_files(source)[0]}
    assert "runs.py" in kept and "train.py" in kept and not any(path.startswith("runs/") for path in kept)
    assert "launcher.schema.json" not in kept
    stored = source / "runs/mine-20260101-000000-abcd/code"
    assert "train.py" in {file.path for file in source_package.source_files(stored)[0]}, (
        "a run's own code, which a replay packages"
    )


@pytest.mark.parametrize("in_git", [False, True])
def test_runs_of_another_store_do_not_travel_and_code_beside_them_does(source, monkeypatch, in_git):
    monkeypatch.setenv("LAUNCHER_RUNS", str(source.parent / "elsewhere"))
    run = "mine-20260101-000000-abcd"
    of_run = {f"{run}/plan.json": "{}", f"{run}/code/train.py": "", f"{run}/logs/algo-1.log": ""}
    write(source, {f"old/{path}": text for path, text in {**of_run, "studies/mine.csv": ""}.items()})
    write(source, {f"lab/{path}": text for path, text in {**of_run, "model.py": "", f"{run[:-1]}z/a.py": ""}.items()})
    write(source, of_run)
    if in_git:
        commit(source)
    others = [file.path for file in source_package.source_files(source)[0]]
    assert others == [
        "lab/mine-20260101-000000-abcz/a.py",
        "lab/model.py",
        "run.sh",
        "sub/ünï.py",
        "train.py",
        "training/own.py",
    ]
    assert [file.path for file in source_package.source_files(source / run / "code")[0] if "/" not in file.path] == [
        "train.py"
    ]


def job_with_inputs(source: Path, **inputs: dict[str, str]) -> launcher.Job:
    return launcher.from_values({"name": "job", "source": str(source), "script": "train.py", "inputs": inputs})


@pytest.mark.parametrize("in_git", [False, True])
def test_the_jobs_own_inputs_do_not_travel_as_code_and_are_named_once(source, monkeypatch, in_git):
    monkeypatch.setattr(source_package, "MAX_FILES", 20)
    write(source, {f"images/{label}/{number}.jpg": "x" for label in "ab" for number in range(30)})
    write(source, {"images/reader.py": "", "teacher.pt": "x", "images-2/c.jpg": "x", "images/.env": "A=1"})
    if in_git:
        commit(source)
    images = {"folder": str(source / "images")}
    job = job_with_inputs(source, train=images, validation=images, teacher={"file": str(source / "teacher.pt")})
    files, [issue] = source_package.source_files(source, job)
    own = ["run.sh", "sub/ünï.py", "train.py", "training/own.py"]
    assert [file.path for file in files] == ["images-2/c.jpg", "images/reader.py", *own], "Python files are code"
    assert issue.level == "warning"
    assert issue.found == (
        "left out: images (the data of inputs.train and validation); teacher.pt (the data of inputs.teacher)"
    )
    assert "SM_CHANNEL_TRAIN, SM_CHANNEL_VALIDATION and SM_CHANNEL_TEACHER" in issue.fix
    write(source, {source_package.IGNORE_FILE: "images\nteacher.pt\n"})
    assert source_package.source_files(source, job)[1] == [], "what the user excludes needs no word"


def test_a_script_that_names_the_channels_variable_needs_no_word_of_its_data(source):
    write(source, {"images/a/1.jpg": "x", "train.py": "import os; images = os.environ['SM_CHANNEL_TRAIN']"})
    images = {"folder": str(source / "images")}
    files, issues = source_package.source_files(source, job_with_inputs(source, train=images))
    assert issues == [] and not any(file.path.startswith("images") for file in files)
    _, [issue] = source_package.source_files(source, job_with_inputs(source, train=images, validation=images))
    assert "SM_CHANNEL_VALIDATION" in issue.fix, "it may read the other one where it lies"


@pytest.mark.parametrize("own", [None, "training/own.py", "training.py"])
def test_the_kits_package_travels_beside_a_folder_of_data_with_its_name_and_not_beside_a_module(source, own):
    shutil.rmtree(source / "training")
    write(source, {"train.py": "import training.settings; 'SM_CHANNEL_TRAINING'", "training/a/1.jpg": "x"})
    write(source, {own: ""} if own else {})
    job = job_with_inputs(source, training={"folder": str(source / "training")})
    files, issues = source_package.source_files(source, job)
    paths = {file.path for file in files}
    assert ("training/settings/__init__.py" in paths) == (own is None) == (source_package.COMMIT_FILE in paths)
    assert own is None or own in paths
    assert "training/a/1.jpg" not in paths and issues == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_packages_the_jobs_own_inputs(source, backend):
    write(source, {"images/a/1.jpg": "x"})
    with (source / "images/a/large.jpg").open("wb") as file:
        file.truncate(101 * 2**20)
    plan = launcher.plan(job_with_inputs(source, train={"folder": str(source / "images")}), on=backend)
    assert not any(file.path.startswith("images") for file in plan.files)
    reported = [issue.found for issue in plan.issues if issue.key == "source"]
    assert reported == ["left out: images (the data of inputs.train)"], "and no archive above 100 MiB"


def test_an_input_that_is_the_source_folder_or_holds_the_script_travels(source):
    write(source, {"sub/train.py": "", "sub/settings.json": ""})
    for folder, script in ((source, "train.py"), (source / "sub", "sub/train.py"), (source.parent, "train.py")):
        job = job_with_inputs(source, train={"folder": str(folder)}).model_copy(update={"script": script})
        files, issues = source_package.source_files(source, job)
        assert "sub/settings.json" in {file.path for file in files} and issues == []


def test_an_input_behind_a_link_is_named_as_the_jobs_data(source, tmp_path):
    write(tmp_path / "disk", {"a/1.jpg": "x"})
    (source / "images").symlink_to(tmp_path / "disk")
    job = job_with_inputs(source, train={"folder": str(source / "images")})
    files, [issue] = source_package.source_files(source, job)
    assert issue.found == "left out: images (the data of inputs.train)"
    assert not any(file.path.startswith("images") for file in files)


@pytest.mark.parametrize("tracked", [False, True])
def test_folders_that_stay_behind_are_named(source, tracked):
    """Of links to folders, submodules and repositories in the folder nothing travels."""
    write(source, {"real/a.py": "", "nested/b.py": ""})
    (source / "lib").symlink_to("real")
    (source / "gone").symlink_to("nowhere")
    if tracked:
        subprocess.run(["git", "init", "-q", str(source / "nested")], check=True)
        commit(source / "nested", "add", "-A")
        commit(source, "add", "lib", "real")
    files, [issue] = source_package.source_files(source)
    assert f"lib ({source_package.LINK_TO_FOLDER})" in issue.found and issue.level == "warning"
    assert ("nested/ (a repository of its own)" in issue.found) == tracked and "gone" not in issue.found
    assert not any(file.path.startswith(("lib", "gone")) for file in files)
    write(source, {source_package.IGNORE_FILE: "lib\nnested\n"})
    assert source_package.source_files(source)[1] == []


def test_a_listing_that_fails_is_one_mistake(source):
    write(source, {source_package.IGNORE_FILE: "!kept.log\n"})
    plan = launcher.plan(launcher.from_values({"name": "job", "source": str(source), "script": "train.py"}))
    assert [issue.key for issue in plan.errors] == ["source"]


def test_git_that_trusts_the_folder_not_gets_a_command_that_names_its_repository(source, monkeypatch):
    def doubtful(folder):
        raise source_package.git.GitError("fatal: detected dubious ownership in repository at '/a b/top'")

    monkeypatch.setattr(source_package.git, "tracked_or_new", doubtful)
    _, [issue] = source_package.source_files(source)
    assert issue.fix == "git config --global --add safe.directory '/a b/top'"

"""A source folder in git: the patch of a run's record, and no program that the repository names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import launcher
from launcher.planner import git, source_package
from tests.launcher.conftest import commit, write


def test_the_patch_holds_what_the_archive_may_hold_and_nothing_else(source, tmp_path):
    token = "ghp_" + "a1B2" * 9
    private = {".env": "A=1", "old.key": "private-1", "notes/mine.txt": "private-2", "leaky.py": "", "blob.bin": b"\0"}
    write(source, {**private, source_package.IGNORE_FILE: "notes\n", "ünï 'q'.py": "x = 1\n"})
    commit(source)
    write(source, {".env": "A=private-3", "notes/mine.txt": "private-4", "leaky.py": f"t = '{token}'\n"})
    write(source, {"ünï 'q'.py": "x = 2\n", "blob.bin": b"\0" + token.encode(), "train.py": "print(2)\n"})
    (source / "old.key").unlink()
    (source / "run.sh").rename(source / ".envrc")
    state, patch = source_package.uncommitted(source)
    assert b"private" not in patch and b"token" not in patch and b"blob.bin" not in patch
    assert set(state["left_out"]) == {".env", "old.key", "notes/mine.txt", "leaky.py", "blob.bin"}
    assert state["left_out"]["leaky.py"] == "looks like a GitHub token" and state["clean"] is False
    applied = tmp_path / "applied"
    subprocess.run(["git", "clone", "-q", str(source), str(applied)], check=True)
    subprocess.run(["git", "-C", str(applied), "apply"], input=patch, check=True)
    assert (applied / "train.py").read_text() == "print(2)\n" and (applied / "ünï 'q'.py").read_text() == "x = 2\n"
    assert (
        (applied / ".env").read_text() == "A=1" and (applied / "old.key").exists() and not (applied / "run.sh").exists()
    )


def test_a_run_of_a_folder_with_a_changed_secret_file_keeps_none_of_it(script_job):
    job = script_job("print('ran')")
    write(Path(job.source), {".env": "A=1"})
    commit(Path(job.source))
    write(Path(job.source), {".env": "A=of-nobody-else", "script.py": "print('changed')\n"})
    run = launcher.run(launcher.plan(job))
    assert run.wait(60) == "Completed"
    assert b"changed" in run.folder.git_patch.read_bytes()
    assert run.folder.read(run.folder.git)["left_out"] == {".env": source_package.SECRET_BY_NAME}
    assert not any(file.is_file() and b"of-nobody-else" in file.read_bytes() for file in run.folder.path.rglob("*"))


def configure(folder: Path, **settings: str) -> None:
    """Git settings of a repository itself; a `__` in a name stands for a dot."""
    for key, value in settings.items():
        subprocess.run(["git", "-C", str(folder), "config", key.replace("__", "."), value], check=True)


@pytest.fixture
def program(tmp_path) -> Path:
    """A program that passes its input on and leaves the file `ran` beside itself."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'ran'}'\ncat\n")
    program.chmod(0o755)
    return program


def git_runs(source: Path, program: Path) -> bool:
    """Whether plain git runs the program; its trace is removed."""
    words = ["git", "-C", str(source), "diff", "HEAD"]
    subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    ran = program.with_name("ran").exists()
    program.with_name("ran").unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize(
    "key", ["core.fsmonitor", "diff.external", "diff.words.textconv", "filter.words.clean", "filter.words.process"]
)
@pytest.mark.parametrize("place", ["own", "included", "worktree"])
def test_git_runs_no_program_that_the_repository_names(source, program, key, place):
    write(source, {".gitattributes": "*.py diff=words filter=words\n"})
    commit(source)
    if place == "included":
        configure(source, include__path="../included")
    if place == "worktree":
        configure(source, extensions__worktreeConfig="true")
    where = {"own": ["--local"], "included": ["--file", str(source / "included")], "worktree": ["--worktree"]}[place]
    required = {"filter.words.required": "true"} if key.startswith("filter.") else {}
    for name, value in {key: str(program), **required}.items():
        subprocess.run(["git", "-C", str(source), "config", *where, name, value], check=True)
    write(source, {"train.py": "print(2)\n"})
    assert git_runs(source, program)
    assert source_package.source_files(source)[0]
    assert b"print(2)" in source_package.uncommitted(source)[1]
    assert not program.with_name("ran").exists()


def test_a_filter_with_an_equals_sign_in_its_name_does_not_run(source, program):
    write(source, {".gitattributes": "*.py filter=a=b\n"})
    commit(source)
    configure(source, **{"filter.a=b.clean": str(program)})
    write(source, {"train.py": "print(2)\n"})
    assert git_runs(source, program)
    assert b"print(2)" in source_package.uncommitted(source)[1]
    assert not program.with_name("ran").exists()


def test_a_partial_clone_fetches_nothing_when_planned(source, program, tmp_path):
    commit(source)
    configure(
        source, core__repositoryFormatVersion="1", extensions__partialClone="origin", remote__origin__promisor="true"
    )
    configure(source, remote__origin__url=str(tmp_path), remote__origin__uploadpack=f"{program} < /dev/null;")
    words = ["git", "-C", str(source), "rev-parse", "HEAD:train.py"]
    blob = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    (source / ".git/objects" / blob[:2] / blob[2:]).unlink()
    write(source, {"train.py": "print(2)\n"})
    assert git_runs(source, program)
    state, patch = source_package.uncommitted(source)
    assert patch == b"" and "transport 'file' not allowed" in state["left_out"]["."]
    assert not program.with_name("ran").exists()


def test_a_filter_of_the_user_runs_whatever_the_repository_says_of_it(source, program, tmp_path, monkeypatch):
    write(source, {".gitattributes": "*.py filter=words\n"})
    commit(source)
    upper = tmp_path / "upper"
    upper.write_text("#!/bin/sh\ntr a-z A-Z\n")
    upper.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    subprocess.run(["git", "config", "--global", "filter.words.clean", str(upper)], check=True)
    configure(source, filter__words__clean=str(program))
    write(source, {"train.py": "print(2)\n"})
    assert git_runs(source, program)
    assert b"PRINT(2)" in source_package.uncommitted(source)[1]
    assert not program.with_name("ran").exists()


def test_a_program_that_the_repository_names_to_git_lfs_does_not_run(source, program, tmp_path, monkeypatch):
    """git-lfs reads `lfs.extension` from git's settings, whatever the case of its letters; a script stands for it here."""
    write(source, {".gitattributes": "*.py filter=lfs\n"})
    commit(source)
    lfs = tmp_path / "lfs"
    lfs.write_text('#!/bin/sh\nsh -c "$(git config lfs.Extension.words.clean)"\ncat\n')
    lfs.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    subprocess.run(["git", "config", "--global", "filter.lfs.clean", str(lfs)], check=True)
    configure(source, lfs__Extension__words__clean=f"{program} < /dev/null")
    write(source, {"train.py": "print(2)\n"})
    assert git_runs(source, program)
    assert b"print(2)" in source_package.uncommitted(source)[1]
    assert not program.with_name("ran").exists()


def submodule(source: Path, tmp_path: Path) -> Path:
    """A submodule at `sub/module` of a folder, both committed; it holds an .env and module.py."""
    origin = tmp_path / "origin"
    write(origin, {".env": "A=1\n", "module.py": "x = 1\n", ".gitattributes": "*.py filter=words\n"})
    commit(origin)
    commit(source)
    add = ["-c", "protocol.file.allow=always", "submodule", "add", "-q", str(origin), "sub/module"]
    subprocess.run(["git", "-C", str(source), *add], check=True, capture_output=True)
    commit(source)
    return source / "sub/module"


def test_git_runs_no_filter_of_a_submodule(source, program, tmp_path):
    module = submodule(source, tmp_path)
    configure(module, filter__words__clean=str(program))
    write(module, {"module.py": "x = 2\n"})
    assert git_runs(source, program)
    assert source_package.uncommitted(source) == (source_package.git.state(source), b"")
    assert not program.with_name("ran").exists()


def test_the_users_settings_of_diff_change_nothing_in_the_patch(source, tmp_path):
    module = submodule(source, tmp_path)
    lines = [f"line_{number} = {number}\n" for number in range(12)]
    write(source, {"train.py": "".join(lines)})
    commit(source)
    write(source, {"train.py": "".join(lines).replace("6", "7"), "run.sh": "exit 1\n"})
    write(module, {".env": "A=private\n"})
    commit(module)
    patch = source_package.uncommitted(source)[1]
    assert b"Subproject commit" in patch and b"line_3 =" in patch
    write(source, {".git/order": "train.py\nsub\n"})
    configure(source, diff__submodule="diff", diff__noprefix="true", diff__mnemonicPrefix="true", diff__context="0")
    configure(source, diff__ignoreSubmodules="all", diff__orderFile=str(source / ".git/order"), color__ui="always")
    assert source_package.uncommitted(source)[1] == patch
    configure(source, diff__orderFile=str(tmp_path / "missing"))
    assert source_package.uncommitted(source)[1] == patch


def test_a_file_with_a_conflict_is_listed_once(source):
    commit = ("-c", "user.name=x", "-c", "user.email=x@y.z", "commit", "--quiet", "--all", "--message=x")
    (source / "train.py").write_text("x = 1\n")
    for words in (["init", "--quiet"], ["add", "train.py"], commit, ["branch", "other"]):
        subprocess.run(["git", "-C", source, *words], check=True)
    (source / "train.py").write_text("x = 2\n")
    subprocess.run(["git", "-C", source, *commit], check=True)
    subprocess.run(["git", "-C", source, "checkout", "--quiet", "other"], check=True)
    (source / "train.py").write_text("x = 3\n")
    subprocess.run(["git", "-C", source, *commit], check=True)
    merge = ["git", "-C", source, *commit[:4], "merge", "--quiet", "-"]
    assert subprocess.run(merge, capture_output=True).returncode == 1, "a conflict"
    assert git.tracked_or_new(source).count("train.py") == 1


def test_a_git_that_is_too_old_is_named(source, tmp_path, monkeypatch):
    """As 2.25 says it, and 2.30 of --config-env."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text('#!/bin/sh\necho "error: unknown option \\`show-scope\'" >&2\nexit 129\n')
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(git.OldGitError, match=r"git is older than 2.31 \(error: unknown option `show-scope'\)"):
        git.tracked_or_new(source)

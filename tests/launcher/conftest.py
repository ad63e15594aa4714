"""What the tests of the launcher share: a source folder, its files and its commits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    write(folder, {"train.py": "print(1)\n", "run.sh": "exit 0\n", "sub/ünï.py": "x = 1\n", "training/own.py": ""})
    (folder / "run.sh").chmod(0o755)
    return folder


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)


def commit(folder: Path, *add: str) -> None:
    for words in (["init", "-q"], add or ["add", "-Af"], ["commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True)

"""A tree of control groups as the kernel shows it, in a folder."""

from __future__ import annotations

from pathlib import Path


def groups(root: Path, own: str, **files: str) -> dict[str, Path]:
    """A tree of control groups, and the file that says in which of them this process is."""
    for name, text in files.items():
        file = root / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (root / "own").write_text(own)
    return {"root": root / "groups", "own": root / "own"}

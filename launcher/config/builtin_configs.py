"""The configs that come with the kit, by name: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.config.entrypoints import beside_or_inside
from launcher.config.issues import mistake, near


def folder() -> Path:
    """The folder of the kit's own configs."""
    return beside_or_inside("configs")


def names() -> list[str]:
    """The names of the built-in configs, in alphabetical order."""
    return sorted(file.stem for file in folder().glob("*.yaml"))


def located(config: str | Path) -> Path:
    """The file of a config: the file of that path, or else the built-in config of that name.

    Raises:
        UserError: there is neither. It lists the existing configs.
    """
    path = Path(config)
    is_built_in = str(config) in names()
    # a folder of data or runs is no config; a broken link is the user's own file, and is reported as missing
    if (path.exists() or path.is_symlink()) and not (is_built_in and path.is_dir()):
        return path
    if is_built_in:
        return folder() / f"{config}.yaml"
    beside = sorted(str(file) for file in path.parent.glob("*.yaml"))[:8]
    meant = near(path.stem, names()) or near(str(path), beside)
    valid = [f"the files {', '.join(beside)}"] if beside else []
    raise mistake(
        str(path),
        "no such file, and no built-in config of that name",
        f"did you mean {meant}?" if meant else "check the path; launcher init writes a config",
        valid="; ".join([*valid, f"the built-in configs {', '.join(names())}"]),
    )


def opening(file: Path) -> str:
    """The first sentence of a config's header comment: what it is. Empty if it has none."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or re.match(r"# [A-Z][a-z]+: ", line):  # `# Data: …` begins the rest of the head
            break
        lines.append(line.removeprefix("# "))
    return re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])", " ".join(lines))[0]

"""Executes the notebooks, each in a folder of its own, and with --store keeps their outputs and pictures. `make notebooks`.

.venv/bin/python -m tests.notebooks.executing --store quickstart kt_journey
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.notebooks import stories

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
PICTURES = NOTEBOOKS / "pictures"
NAMES = tuple(sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb")))

CELL_SECONDS = 900
"""A cell that takes longer has failed."""

MAX_BYTES = 300_000
"""Of a notebook with its outputs."""

SOMEWHERE = "~/vision-launcher"
"""What stored outputs call the kit's folder: whose machine it was is nobody's business."""


def execute(name: str, folder: Path, trials: int | None = None) -> nbformat.NotebookNode:
    """Run a notebook from top to bottom.

    Args:
        name: of a file in notebooks/, without its ending.
        folder: stands for the kit's folder: the configs are there, data/ and runs/ come to lie there.
        trials: in place of those that the notebook allows a search, where only whether it runs is asked.

    Returns:
        The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    (folder / "notebooks").mkdir(parents=True)
    for script in NOTEBOOKS.glob("*.py"):
        (folder / "notebooks" / script.name).symlink_to(script)
    (folder / "configs").symlink_to(ROOT / "configs")
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    if trials is not None:
        for cell in book.cells:
            cell.source = re.sub(r"\btrials=\d+", f"trials={trials}", cell.source)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "LAUNCHER_RUNS"))}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    client = NotebookClient(
        book,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder / "notebooks")}},
    )
    client.execute(env=environment)
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return book


def store(book: nbformat.NotebookNode, name: str, folder: Path) -> None:
    """Keep a notebook that was executed there, and the picture that it made. The folder is called SOMEWHERE in its outputs.

    Raises:
        ValueError: it is too large, or its outputs do not bear out its text.
    """
    if found := stories.contradictions(name, book):
        raise ValueError("\n".join([f"{name} is not stored, for its outputs do not bear out its text:", *found]))
    text = nbformat.writes(book, version=nbformat.NO_CONVERT) + "\n"
    for place in (folder, ROOT):
        text = text.replace(str(place), SOMEWHERE)
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{name}: {len(text.encode())} bytes, at most {MAX_BYTES}: let it show less")
    (NOTEBOOKS / f"{name}.ipynb").write_text(text, encoding="utf-8")
    picture = folder / "runs" / f"{name}.svg"
    if picture.is_file():
        PICTURES.mkdir(exist_ok=True)
        shutil.copyfile(picture, PICTURES / picture.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--store", action="store_true", help="keep outputs and pictures")
    options = parser.parse_args()
    total = 0.0
    for name in options.names:
        with tempfile.TemporaryDirectory(prefix="notebooks-") as place:
            began = time.monotonic()
            book = execute(name, Path(place) / "kit")
            seconds = time.monotonic() - began
            total += seconds
            if options.store:
                store(book, name, Path(place) / "kit")
        print(f"{name:<22} {seconds:6.1f} s", flush=True)
    print(f"{'all':<22} {total:6.1f} s")


if __name__ == "__main__":
    sys.exit(main())

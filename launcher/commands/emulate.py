"""`launcher emulate`: the SageMaker emulator."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher.commands import options as arguments
from launcher.config.issues import mistake


def add(to: arguments.Add) -> None:
    made = to("emulate", "start the SageMaker emulator on this machine, for tests and trials", carry_out)
    made.add_argument(
        "configs",
        metavar="CONFIG",
        nargs="*",
        help="create the buckets, roles and file systems that these configs name",
    )
    made.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")
    made.add_argument(
        "--price", action="append", default=[], metavar="TYPE=USD", help="price of an instance-hour in US dollars"
    )
    made.add_argument(
        "--file-system",
        action="append",
        default=[],
        metavar="ID=FOLDER",
        help="the local folder that stands for a file system's root",
    )
    made.add_argument("--folder", metavar="FOLDER", help="keep the hosts' /opt/ml in this folder")
    made.usage = "launcher emulate [CONFIG ...] [options] [-- COMMAND ...]"


def carry_out(options: argparse.Namespace) -> int:
    if not 0 <= options.port <= 65535:
        raise mistake("--port", str(options.port), "leave it out for a free one", valid="1 to 65535")
    try:
        from launcher.emulator.serving import serve
    except ModuleNotFoundError as error:
        fix = "make, or pip install -e '.[emulator]', in this kit's folder"
        raise mistake("emulate", f"not installed: {error.name}", fix) from None

    return serve(
        options.configs,
        options.behind,
        port=options.port,
        prices={name: _dollars(name, usd) for name, usd in _pairs("--price", options.price)},
        file_systems={name: Path(folder) for name, folder in _pairs("--file-system", options.file_system)},
        folder=Path(options.folder) if options.folder else None,
    )


def _pairs(option: str, words: Sequence[str]) -> list[tuple[str, str]]:
    """Split NAME=VALUE words."""
    for word in words:
        if not all(word.partition("=")):
            raise mistake(option, f"{word!r}", "write NAME=VALUE")
    return [(word.partition("=")[0], word.partition("=")[2]) for word in words]


def _dollars(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise mistake("--price", f"{name}={text}", f"write {name}=1.23", valid="US dollars an hour") from None

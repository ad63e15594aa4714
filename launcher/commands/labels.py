"""`launcher labels …`: what label banks hold, whether they are whole, several as one, and as files for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, RUN_FAILED
from launcher.commands.json_text import as_json

KINDS = ("npz", "safetensors", "huggingface")
"""Formats a bank is exported to; named here too, since the exporter needs numpy."""


def add(to: arguments.Add) -> None:
    """`labels show`, `labels verify`, `labels merge` and `labels export` are commands of their own."""
    action = arguments.adding_to(
        to("labels", "show, verify, merge or export what launcher label kept", None), "ACTION", "labels "
    )
    made = action("show", "whose answers a label bank holds, of what, and how many", show)
    _folder(made)
    arguments.json(
        made,
        "{folder, labels of, created, bytes of a record, images a view, views, digest}; views is a list of {view, labels, complete}",
    )
    made = action("verify", "read every record; exit code 1 where something is damaged or was exchanged", verify)
    _folder(made)
    made.add_argument("--digest", metavar="HEX", help="the digest that launcher label noted when it was complete")
    made = action("merge", "several banks of one teacher, data set and transform as one", merge)
    made.add_argument("folders", metavar="FOLDER", nargs="+", help="a label bank")
    made.add_argument("--into", required=True, metavar="TARGET", help="the bank to write, new or begun")
    made = action("export", "write the labels for other programs, one file a view", export)
    _folder(made)
    made.add_argument("target", metavar="TARGET", help="the folder to create")
    made.add_argument(
        "--as",
        dest="kind",
        choices=KINDS,
        metavar="|".join(KINDS),
        default="npz",
        help="the kind of files (default: npz)",
    )


def _folder(made: argparse.ArgumentParser) -> None:
    made.add_argument("folder", metavar="FOLDER", help="a label bank")


def show(options: argparse.Namespace) -> int:
    from launcher.labels import description
    from launcher.labels.bank import Bank

    bank = Bank(options.folder)
    print(as_json(description.description(bank)) if options.json else description.as_text(bank))
    return DONE


def verify(options: argparse.Namespace) -> int:
    from launcher.labels import verification
    from launcher.labels.bank import Bank

    found = verification.verify(Bank(options.folder), options.digest)
    print(found)
    return RUN_FAILED if found.problems else DONE


def merge(options: argparse.Namespace) -> int:
    from launcher.labels import merging
    from launcher.labels.bank import Bank

    print(merging.merge([Bank(folder) for folder in options.folders], Path(options.into)))
    return DONE


def export(options: argparse.Namespace) -> int:
    from launcher.labels import export as exporting
    from launcher.labels.bank import Bank

    print(exporting.export(Bank(options.folder), Path(options.target), options.kind))
    return DONE

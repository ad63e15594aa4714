"""`launcher diagnose`: why a run is slow, and what to change."""

from __future__ import annotations

import argparse
import sys

import launcher
from launcher import backends
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, INTERRUPTED, RUN_FAILED
from launcher.commands.json_text import as_json
from launcher.config.issues import mistake
from launcher.runner import probe


def add(to: arguments.Add) -> None:
    made = to("diagnose", "explain why a run is slow and what to change, or compare two runs", carry_out)
    arguments.run(
        made, "source", "a run, its folder, or system metrics: a folder or s3:// prefix named profiler-output"
    )
    made.add_argument("other", metavar="OTHER", nargs="?", help="a second run, after a change, to compare with")
    made.add_argument(
        "--probe",
        action="store_true",
        help="also measure what observation cannot separate, for up to two minutes on this machine",
    )
    made.add_argument(
        "--with",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key for the probe only, for example 'inputs.train={folder: data/train}'",
    )
    made.add_argument(
        "--on", default=backends.DEFAULT, metavar="BACKEND", help="where the probe runs: process or docker"
    )
    made.add_argument("--html", metavar="FILE", help="also write a page with charts")
    arguments.json(
        made, "{headline, findings, not_measured, phases, …}; of two runs {before, after, speedup, comparable, …}"
    )


def carry_out(options: argparse.Namespace) -> int:
    if (options.changes or options.on != backends.DEFAULT) and not options.probe:
        raise mistake(
            "--with" if options.changes else "--on", "given without --probe", "add --probe, which it applies to"
        )
    page = arguments.page(options)
    found: launcher.Diagnosis | launcher.Comparison = launcher.diagnose(
        options.source, options.other, probe=options.probe, overrides=options.changes, on=options.on, log=arguments.note
    )
    print(as_json(found.to_dict()) if options.json else found)
    if page is not None:
        print(f"page: {found.save_html(page)}", file=sys.stderr)
    if not options.probe or isinstance(found, launcher.Comparison) or not isinstance(found.probe, str):
        return DONE
    return INTERRUPTED if found.probe == probe.INTERRUPTED else RUN_FAILED

"""`launcher stop`: stop a run after its current step, or end the warm pool that a finished run left."""

from __future__ import annotations

import argparse
import sys

import launcher
from launcher.commands import foreground
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.record.records import OVER


def add(to: arguments.Add) -> None:
    arguments.run(
        to("stop", "stop a run after its current step; of one that is over, end the warm pool that it left", carry_out)
    )


def carry_out(options: argparse.Namespace) -> int:
    chosen = launcher.attach(options.run)
    if chosen.state in OVER:
        print(chosen.release() or f"{chosen.name} is over: {chosen.state}")
        return DONE
    chosen.stop("launcher stop")
    print(f"asked {chosen.name} to stop after its current step; waiting", flush=True)
    trouble = ""
    while chosen.wait(1) not in OVER:
        if chosen.trouble != trouble:
            trouble = chosen.trouble
            print(trouble or "AWS answers again", file=sys.stderr, flush=True)
    foreground.print_end(chosen)
    return DONE

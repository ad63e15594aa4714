"""`launcher drill`: does a run survive being killed?"""

from __future__ import annotations

import argparse

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, RUN_FAILED
from launcher.commands.json_text import as_json


def add(to: arguments.Add) -> None:
    made = to(
        "drill", "kill a local run at random moments, resume it, and compare it with an undisturbed run", carry_out
    )
    arguments.config(made)
    arguments.hosts(made)
    made.add_argument("--kills", type=int, default=3, metavar="N", help="number of kills (default: 3)")
    made.add_argument("--hosts-after", type=int, metavar="N", help="use N hosts that train for every other run")
    made.add_argument(
        "--servers",
        action="store_true",
        help="kill servers of a job with worker_type remote, which goes on; nothing is resumed",
    )
    made.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the times and hosts of the kills (default: 0)"
    )
    arguments.json(
        made,
        "{undisturbed, runs, exact, steps, weights, furthest, difference, kills: [{how, at_step, resumed_from (null: not known), "
        "seconds}], goodput: null (not measured, or there is a difference) or {share, seconds, useful, redone, undisturbed}}",
    )


def carry_out(options: argparse.Namespace) -> int:
    from launcher.runner.drill import drill

    job = launcher.load(options.config, arguments.overrides_of(options), smoke=options.smoke)
    found = drill(
        job,
        kills=options.kills,
        hosts_after=options.hosts_after,
        servers=options.servers,
        seed=options.seed,
        log=arguments.progress_printer(options),
    )
    print(as_json(found.to_dict()) if options.json else found)
    return RUN_FAILED if found.difference else DONE

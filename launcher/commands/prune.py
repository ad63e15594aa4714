"""`launcher prune`: remove old runs."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta, timezone

from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE
from launcher.commands.rm import confirmed_removal, remaining_costs
from launcher.config.issues import mistake
from launcher.record import records, removal

UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def add(to: arguments.Add) -> None:
    made = to("prune", "remove runs that started long ago; failed ones stay unless --state says otherwise", carry_out)
    made.add_argument("--older-than", metavar="AGE", required=True, help="hours, days or weeks: 12h, 30d, 8w")
    made.add_argument(
        "--state",
        metavar="STATE",
        action="append",
        choices=records.OVER,
        help="Completed, Stopped or Failed, and again for another (default: Completed and Stopped)",
    )
    arguments.yes(made)


def carry_out(options: argparse.Namespace) -> int:
    day = datetime.now(timezone.utc) - _age(options.older_than)
    before = f"{day.year:04}{day:%m%d-%H%M%S}"  # %Y alone has no leading zeros
    wanted = options.state or [records.COMPLETED, records.STOPPED]
    runs = records.all_runs()
    used = removal.in_use(runs)
    chosen, left = [], {"in use": 0, "damaged": 0}
    for run in runs:
        if not run.time or run.time >= before:
            continue
        try:
            state = run.state()
        except records.DamagedRecord:
            state = "damaged"
        state = "in use" if run.name in used or remaining_costs(run) else state
        if state in wanted:
            chosen.append(run)
        else:
            left[state] = left.get(state, 0) + 1
    stays = ", ".join(f"{number} {state}" for state, number in left.items() if number)
    if stays:
        print(f"of the runs that are older, these stay: {stays}")
    if not chosen:
        print(f"no run to remove, older than {options.older_than}, in {records.store()}")
        return DONE
    return confirmed_removal(chosen, yes=options.yes)


def _age(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,5})([hdw])", text)
    if found is None:
        raise mistake(
            "--older-than", text, "write --older-than 30d", valid="a number of hours, days or weeks: 12h, 30d, 8w"
        )
    return timedelta(**{UNITS[found[2]]: int(found[1])})

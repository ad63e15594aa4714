"""`launcher tune`: the fastest settings of a job or a command, each change proven and the training unchanged."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

import launcher
from launcher.commands import options as arguments
from launcher.commands.exit_codes import DONE, RUN_FAILED
from launcher.commands.json_text import as_json
from launcher.config import builtin_configs
from launcher.config.issues import mistake


def add(to: arguments.Add) -> None:
    made = to("tune", "find the fastest settings of a job or a command, each proven by a measurement", carry_out)
    made.usage = "launcher tune CONFIG [KEY=VALUE …] [options]\n       launcher tune [options] -- COMMAND ..."
    made.add_argument(
        "overrides", metavar="CONFIG", nargs="*", help="a YAML file; KEY=VALUE words behind it override its keys"
    )
    arguments.smoke(made)
    arguments.on(made)
    arguments.hosts(made)
    made.add_argument(
        "--allow",
        metavar="NAME,…",
        default="",
        help="settings that may change the training's numbers, for example precision,compile",
    )
    made.add_argument("--minutes", type=float, metavar="N", help="how long all trials may take (default: 30)")
    made.add_argument("--trials", type=int, metavar="N", help="how many runs there may be (default: 20)")
    arguments.trials(made)
    made.add_argument("--write", metavar="FILE", help="write the config with the changes that were kept")
    made.add_argument(
        "--html", metavar="FILE", help="also write a page with each change, its evidence and both diagnoses"
    )
    arguments.json(
        made,
        "{name, table, changes, overrides, speedup, ended, limit, steps: [{change, gain, kept, verdict, why}], trials}",
    )


def carry_out(options: argparse.Namespace) -> int:
    """Exit code 1 if the unchanged job failed, or an error ended the search."""
    given, command = options.overrides, options.behind
    if bool(given) == bool(command):
        both = f"{given[0]} and a command" if given else "neither a config nor a command"
        raise mistake("tune", both, "launcher tune CONFIG, or launcher tune -- COMMAND ...")
    if given and _is_a_program(given[0]):
        fix = f"put the command after --: {shlex.join(['launcher', 'tune', '--', *given])}"
        raise mistake("tune", f"{given[0]}: a program, not a config", fix)
    if command and (options.smoke or options.write or options.hosts is not None):
        raise mistake("tune", "a config's option beside a command", "leave out --smoke, --hosts and --write")
    page = arguments.page(options)
    if options.write is not None:
        arguments.new_file("--write", options.write, "tuned.yaml")
    arguments.end_like_ctrl_c()
    budget = {name: value for name in ("minutes", "trials") if (value := getattr(options, name)) is not None}
    found = launcher.tune(
        command or given[0],
        [] if command else arguments.overrides_of(options)[1:],
        on=options.on,
        smoke=options.smoke,
        allow=[name for name in options.allow.split(",") if name],
        max_cost=options.max_cost,
        table=options.table,
        log=arguments.progress_printer(options),
        **budget,
    )
    if options.json:
        print(as_json(found.to_dict()), flush=True)  # before what may fail
    tell = arguments.progress_printer(options)
    tell(f"\n{found}\n\ntable   {found.file}")
    if page is not None:
        print(f"page    {found.save_html(page)}", file=sys.stderr)
    if options.write is not None:
        unchanged = "" if found.changes else ", the unchanged job: no change was kept"
        tell(f"config  {found.write(options.write)}{unchanged}")
    return RUN_FAILED if found.failed or found.search.cut_off else DONE


def _is_a_program(word: str) -> bool:
    """Whether a word that stands for a config is the first one of a command."""
    is_a_config = word in builtin_configs.names() or Path(word).suffix in (".yaml", ".yml")
    executable = shutil.which(word) is not None  # of a word with a slash, whether that file may be executed
    return executable and not is_a_config and (os.sep in word or not Path(word).exists())

"""Scripts and settings classes with changed syntax trees: planning ends in no uncaught exception, and refuses no script that would run."""

from __future__ import annotations

import ast
import json
import random
import shlex
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from launcher.config import hyperparameters
from launcher.config.entrypoints import entrypoints_folder
from tests.launcher.test_script_arguments import HEAD, PLAIN, TOLERANT

SPLIT = """
import os
def add_data(parser, group="data"):
    data = parser.add_argument_group(group)
    data.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    data.add_argument("--root", default=os.environ.get("SM_CHANNEL_TRAIN", "."))
    return parser
def get_parser():
    parser = argparse.ArgumentParser(description="trains", add_help=False)
    parser.add_argument("--learning-rate", "--lr", type=float, required=True)
    parser.add_argument("--model", choices=["small", "large"], default="small")
    add_data(parser)
    if "SEED" in os.environ:
        print("seeded")
    return parser
def main(args):
    if args.learning_rate > 1:
        return 1
    print(args)
if __name__ == "__main__":
    ap = get_parser()
    ap.add_argument("--epochs", type=int, default=3)
    main(ap.parse_args())
"""

SCRIPTS = [HEAD + code for code in (PLAIN, TOLERANT, SPLIT)]

VALUES: dict[str, Any] = {"learning-rate": 0.1, "epochs": 2, "model": "small", "sizes": 3}

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


CONSTANTS = (None, 0, -1, 5, 1.5, "", "x", "--x", b"x", True, ..., 10**8)

BLOCKS = (
    "if len('') > 0: pass",
    "try: pass\nexcept SystemExit: pass",
    "for _ in (): pass",
    "def inner(): pass",
    "class Inner: pass",
)


def mutated(text: str, rng: random.Random) -> str:
    """A module with one to three nodes of its syntax tree dropped, doubled, moved, replaced, or put into a block."""
    tree = ast.parse(text)
    for _ in range(rng.randint(1, 3)):
        nodes = list(ast.walk(tree))
        constant = ast.Constant(rng.choice(CONSTANTS))
        other: ast.expr = rng.choice([constant, rng.choice([each for each in nodes if isinstance(each, ast.expr)])])
        node = rng.choice(
            [each for each in nodes if any(isinstance(value, (list, ast.expr)) for value in vars(each).values())]
        )
        name, value = rng.choice(
            [(name, value) for name, value in vars(node).items() if isinstance(value, (list, ast.expr))]
        )
        if isinstance(value, list):
            at = rng.randrange(len(value) + 1)
            before, first, after = value[:at], value[at : at + 1], value[at + 1 :]
            if first and isinstance(first[0], ast.stmt):
                [block] = ast.parse(rng.choice(BLOCKS)).body
                block.body = first  # type: ignore[attr-defined]
                statement = rng.choice([each for each in nodes if isinstance(each, ast.stmt)])
                first = [rng.choice([block, block, statement])]
            elif first and isinstance(first[0], ast.expr):
                first = [other]
            changed: Any = rng.choice(
                [before + after, before + first + first + after, after + first + before, before + first + after]
            )
        else:
            changed = other
        setattr(node, name, deepcopy(changed))
    return ast.unparse(tree)


def texts(seeds: list[str], count: int) -> list[str]:
    """Mutated modules that are Python."""
    found, number = [], 0
    while len(found) < count:
        number += 1
        try:
            text = mutated(seeds[number % len(seeds)], random.Random(number))
            compile(text, "script.py", "exec")
        except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, IndexError):
            continue  # no Python any more
        found.append(text)
    return found


RUNS = """
import contextlib, io, json, os, runpy, sys
for file in sys.argv[1].split(chr(10)):
    sys.argv[:] = [file, *json.loads(os.environ["LINE"])]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0): print(file)
    except BaseException:
        pass
    else:
        print(file)
"""
"""Runs scripts one after another and prints those that end well."""


@pytest.mark.parametrize(
    "given", [VALUES, {"learning-rate": 0.1, "epochz": 2}, {"lr": 0.1, "epochs": "x"}], ids=range(3)
)
def test_a_script_is_judged_without_an_exception_and_refused_only_where_it_fails(tmp_path, given):
    levels: dict[str, list[Path]] = {"error": [], "not checked": [], "warning": [], "": []}
    for number, text in enumerate(texts(SCRIPTS, 150)):
        script = tmp_path / f"{number}.py"
        script.write_text(text)
        try:
            issues = hyperparameters.check(tmp_path, script.name, given, [])
        except Exception as error:
            raise AssertionError(f"{error!r}\n{text}") from error
        levels[min((issue.level for issue in issues), default="")].append(script)
    assert levels["error"] and levels["not checked"]
    line = json.dumps([text for name in sorted(given) for text in hyperparameters.argument(name, given[name])])
    command = [sys.executable, "-c", RUNS, "\n".join(map(str, levels["error"]))]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"LINE": line}, timeout=240, cwd=tmp_path
    )
    assert ran.stdout.split() == [], [shlex.quote(Path(file).read_text()) for file in ran.stdout.split()]


def test_a_settings_class_is_judged_without_an_exception(tmp_path):
    folder = entrypoints_folder() / "training/settings"
    seeds = [(folder / name).read_text() for name in ("scripts.py", "segmentation.py")]
    (tmp_path / "script.py").write_text(
        "from mine import ClassifierSettings\ndef main(settings: ClassifierSettings): ...\n"
    )
    levels = set()
    for text in texts(seeds, 40):
        (tmp_path / "mine.py").write_text(text.replace("SegmentationSettings", "ClassifierSettings"))
        try:
            issues = hyperparameters.check(tmp_path, "script.py", {"model": "resnet18", "epochs": 2}, [])
        except Exception as error:
            raise AssertionError(f"{error!r}\n{text}") from error
        levels.add(min((issue.level for issue in issues), default=""))
    assert levels >= {"error", "not checked"}

"""A foreign script's argparse parser: what it would refuse is refused while planning, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.config import hyperparameters
from launcher.config.issues import Issue

HEAD = "import argparse\nimport sys\n"
PLAIN = """
parser = argparse.ArgumentParser(description="trains")
parser.add_argument("--learning-rate", "--lr", type=float, required=True)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--model", choices=["small", "large"], default="small")
group = parser.add_argument_group("data")
group.add_argument("--sizes", type=int, nargs="+")
group.add_argument("--amp", action="store_true")
parser.add_argument("--shuffle", type=bool, default=True)
parser.add_argument("--out", type=lambda text: text.upper(), default="x")
parser.add_argument("--seed", type=int, choices=range(3))
parser.add_argument("-j", type=int)
args = parser.parse_args()
"""
TOLERANT = PLAIN.replace("parse_args", "parse_known_args")


def check(folder: Path, code: str, values: dict[str, Any]) -> list[Issue]:
    (folder / "script.py").write_text(HEAD + code)
    return hyperparameters.check(folder, "script.py", values, [])


def runs(folder: Path, values: dict[str, Any]) -> bool:
    """Whether the script itself takes them, as the container toolkit passes them."""
    line = [text for name in sorted(values) for text in hyperparameters.argument(name, values[name])]
    return subprocess.run([sys.executable, folder / "script.py", *line], capture_output=True).returncode == 0


GOOD = {"learning-rate": 0.1}


@pytest.mark.parametrize(
    ("code", "values", "key", "expected"),
    [
        (PLAIN, {}, "learning-rate", "missing; script.py requires it"),
        (PLAIN, {**GOOD, "epochz": 1}, "epochz", "did you mean epochs?"),
        (PLAIN, {**GOOD, "learning_rate": 1}, "learning_rate", "did you mean learning-rate?"),
        (PLAIN, {**GOOD, "epochs": 1.5}, "epochs", "invalid int value: '1.5'"),
        (PLAIN, {**GOOD, "epochs": None}, "epochs", "invalid int value: ''"),
        (PLAIN, {**GOOD, "model": "tiny"}, "model", "invalid choice: 'tiny'"),
        (PLAIN, {**GOOD, "sizes": [1, 2]}, "sizes", "invalid int value: '[1, 2]'"),
        (PLAIN, {**GOOD, "amp": True}, "amp", "takes --amp without a value"),
        (PLAIN, {**GOOD, "out": "--x"}, "out", "expected one argument"),
        (PLAIN, {**GOOD, "j": "x"}, "j", "invalid int value: 'x'"),
        (PLAIN.replace("-j", "--j"), {**GOOD, "j": 1}, "j", "also call it -j in the script"),
        (TOLERANT, {}, "learning-rate", "missing"),
        (TOLERANT, {**GOOD, "epochs": "x"}, "epochs", "invalid int value"),
        ("from argparse import ArgumentParser as P\ndef main():\n    p = P()\n    p.add_argument('--depth', type=int)\n"
         "    return p.parse_args()\nif __name__ == '__main__':\n    main()\n", {"depht": 1}, "depht", "did you mean depth?"),
        ("from argparse import ArgumentParser, Namespace\ndef main(args: Namespace): ...\np = ArgumentParser()\n"
         "p.add_argument('--depth', type=int)\nmain(p.parse_args())\n", {"depth": "x"}, "depth", "invalid int value"),
        ("def add(p):\n    p.add_argument('--depth', type=int)\np = argparse.ArgumentParser()\nadd(p)\n"
         "p.parse_args(sys.argv[1:])\n", {"depth": "x"}, "depth", "invalid int value"),
        ("def add(p):\n    p.add_argument('--a', required=True)\np = argparse.ArgumentParser()\np.parse_args()\n", {"zz": 1}, "zz",
         "no argument --zz"),
        ("def get_args_parser():\n    parser = argparse.ArgumentParser(add_help=False)\n    parser.add_argument('--depth', type=int)\n"
         "    return parser\nclass Run:\n    def go(self, parser):\n        return parser\nif __name__ == '__main__':\n"
         "    args = get_args_parser()\n    args = args.parse_args()\n", {"depth": "x"}, "depth", "invalid int value"),
        ("def main(args):\n    if args.depth > 3:\n        return 1\ndef parsed():\n    p: object = argparse.ArgumentParser()\n"
         "    p.add_argument('--depth', type=int)\n    return vars(p.parse_args())\nsys.exit(main(parsed()))\n", {"depth": "x"}, "depth",
         "invalid int value"),
    ],
)  # fmt: skip
def test_what_the_parser_refuses_is_refused(tmp_path, code, values, key, expected):
    issues = check(tmp_path, code, values)
    assert [(issue.key, issue.level) for issue in issues] == [(f"hyperparameters.{key}", "error")], issues
    assert expected in str(issues[0])
    assert not runs(tmp_path, values)


def test_all_mistakes_come_at_once(tmp_path):
    issues = check(tmp_path, PLAIN, {"epochs": "x", "model": "tiny", "amp": True, "nope": 1})
    assert sorted(issue.key.partition(".")[2] for issue in issues) == [
        "amp",
        "epochs",
        "learning-rate",
        "model",
        "nope",
    ]


@pytest.mark.parametrize(
    ("code", "values"),
    [
        (PLAIN, {"lr": "1e-3", "epochs": 4, "model": "large", "sizes": 3, "out": "None", "seed": 7 - 5, "j": 2}),
        (PLAIN, {**GOOD, "sizes": -3}),
        (TOLERANT, {**GOOD, "anything": "x", "amp": True}),
        ("p = argparse.ArgumentParser()\np.add_argument('data', nargs='*')\np.add_argument('--amp', action='store_true')\n"
         "p.parse_args()\n", {"amp": True}),
        ("p = argparse.ArgumentParser()\np.add_argument('--xx', type=int, choices=sorted([1, 2]))\np.parse_args()\n", {"xx": 1}),
        ("p = argparse.ArgumentParser()\np.add_argument('--x', required='SM_X' == '', type=str)\np.parse_args()\n", {}),
        ("def int(text): return text\np = argparse.ArgumentParser()\np.add_argument('--xx', type=int)\np.parse_args()\n", {"xx": "a"}),
        ("from shlex import quote as int\np = argparse.ArgumentParser()\np.add_argument('--xx', type=int)\np.parse_args()\n", {"xx": "a"}),
        ("p = argparse.ArgumentParser()\np.add_argument('-V', action='version', version='1')\np.parse_args()\n", {}),
        ("p = argparse.ArgumentParser()\np.add_argument('--xx')\np.parse_args()\nclass Other:\n    def add_argument(self, *_, **__): ...\n"
         "Other().add_argument('--y', required=True)\n", {"xx": 1}),
        ("p = argparse.ArgumentParser()\np.add_argument('--flag', action=argparse.BooleanOptionalAction)\np.parse_args()\n", {}),
    ],
)  # fmt: skip
def test_what_the_parser_takes_is_not_refused(tmp_path, code, values):
    assert check(tmp_path, code, values) == []
    assert runs(tmp_path, values)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("p = argparse.ArgumentParser()\nfor n in ['--a']:\n    p.add_argument(n)\np.parse_args()\n", "in a loop"),
        ("p = argparse.ArgumentParser()\nif sys.platform:\n    p.add_argument('--a')\np.parse_args()\n", "a condition"),
        ("p = argparse.ArgumentParser()\np.add_subparsers()\np.parse_args()\n", "p.add_subparsers"),
        ("p = argparse.ArgumentParser(parents=[])\np.parse_args()\n", "more than names"),
        ("p = argparse.ArgumentParser()\nq = argparse.ArgumentParser()\np.parse_args()\n", "several parsers"),
        ("p = argparse.ArgumentParser()\np.parse_args(['--a'])\n", "other than the command line"),
        ("p = argparse.ArgumentParser()\nsys.argv.append('--a')\np.parse_args()\n", "sys.argv itself"),
        ("import other\np = argparse.ArgumentParser()\nother.add(p)\np.parse_args()\n", "passes its parser on"),
        ("p = argparse.ArgumentParser()\nadd = p.add_argument\nadd('--a')\np.parse_args()\n", "p.add_argument is no plain use"),
        ("p = argparse.ArgumentParser()\np.add_argument('--a', **{'type': int})\np.parse_args()\n", "add_argument with"),
        ("p = argparse.ArgumentParser()\np.add_argument('--' + 'a')\np.parse_args()\n", "worked out by the script"),
        ("p = argparse.ArgumentParser()\np.add_argument('--a', action=print)\np.parse_args()\n", "worked out by the script"),
        ("p = argparse.ArgumentParser()\n", "does not parse"),
        ("import lib\np: argparse.ArgumentParser = argparse.ArgumentParser()\nlib.add(p)\np.parse_args()\n", "lib.add(p) passes its parser on"),
        ("import lib\ndef get_parser():\n    parser = argparse.ArgumentParser()\n    return parser\nap = get_parser()\nlib.add(ap)\n"
         "ap.parse_args()\n", "lib.add(ap) passes its parser on"),
        ("import lib\ndef make():\n    return argparse.ArgumentParser()\nap = make()\nlib.add(ap)\nap.parse_args()\n", "lib.add(ap)"),
        ("import lib\ndef add_args(p):\n    lib.add(p)\n    return p\nparser = argparse.ArgumentParser()\nparser = add_args(parser)\n"
         "parser.parse_args()\n", "lib.add(p)"),
        ("import lib\np = lib.add(argparse.ArgumentParser())\np.parse_args()\n", "lib.add(argparse.ArgumentParser())"),
        ("import lib\nclass O: pass\no = O()\no.parser = argparse.ArgumentParser()\nlib.add(o.parser)\no.parser.parse_args()\n", "o.parser"),
        ("import lib\n(p := argparse.ArgumentParser()).add_argument('--lr')\nlib.add(p)\np.parse_args()\n", "p :="),
        ("import os\ndef kd(p):\n    p.add_argument('--t', required=True)\np = argparse.ArgumentParser()\nif os.environ.get('KD'):\n"
         "    kd(p)\np.parse_args()\n", "a condition"),
        ("import os\ndef get():\n    p = argparse.ArgumentParser()\n    if not os.environ.get('X'):\n        return p\n"
         "    p.add_argument('--t', required=True)\n    return p\nget().parse_args()\n", "a condition"),
        ("import os\np = argparse.ArgumentParser()\nmatch os.environ.get('M'):\n    case 'kd':\n        p.add_argument('--t', required=True)\n"
         "p.parse_args()\n", "another block"),
        ("import os\np = argparse.ArgumentParser()\nos.environ.get('KD') and p.add_argument('--t', required=True)\np.parse_args()\n", "no plain use"),
        ("import os\np = argparse.ArgumentParser()\nif os.environ.get('SM_HPS'):\n    args = argparse.Namespace()\nelse:\n"
         "    args = p.parse_args()\n", "a condition"),
        ("import os\ndef main():\n    if 'SM_HPS' in os.environ:\n        return 0\n    p = argparse.ArgumentParser()\n    p.parse_args()\nmain()\n",
         "may end before"),
        ("import os\nif 'SM_HPS' in os.environ:\n    sys.exit()\np = argparse.ArgumentParser()\np.parse_args()\n", "may end before"),
        ("p = argparse.ArgumentParser()\ntry:\n    p.parse_args()\nexcept SystemExit:\n    pass\n", "another block"),
        ("p = argparse.ArgumentParser()\na = p.add_argument('--lr', required=True)\na.required = False\np.parse_args()\n", "p.add_argument"),
        ("p = argparse.ArgumentParser()\nb = p.add_argument('--epochs', type=int)\nb.type = str\np.parse_args()\n", "p.add_argument"),
        ("p = argparse.ArgumentParser()\np.add_argument('--bands', choices='rgb')\np.parse_args()\n", "is one text"),
        ("import lib\nr = lib.Runner()\nr.add_argument('--t', required=True)\np = argparse.ArgumentParser()\np.parse_args()\n", "something else"),
        ("import lib\nhook = lambda: lib.add(p)\np = argparse.ArgumentParser()\nhook()\np.parse_args()\n", "no plain use"),
        ("import lib\np = argparse.ArgumentParser()\ndef hook():\n    lib.add(p)\nlib.run(hook)\np.parse_args()\n", "no plain use"),
        ("import lib\np = argparse.ArgumentParser()\nclass C:\n    def go(self): lib.add(p)\nC().go()\np.parse_args()\n", "no plain use"),
        ("def add(p):\n    p.add_argument('--a')\n    yield\np = argparse.ArgumentParser()\nadd(p)\np.parse_args()\n", "cannot be followed"),
        ("def add(p):\n    p.add_argument('--a')\nfrom lib import add\np = argparse.ArgumentParser()\nadd(p)\np.parse_args()\n", "takes the name"),
        ("try:\n    import lib as argparse\nexcept ImportError:\n    import argparse\np = argparse.ArgumentParser()\np.parse_args()\n", "gives argparse's name"),
        ("p = argparse.ArgumentParser()\np.parse_known_args()\np.add_argument('--a')\np.parse_args()\n", "parses more than once"),
        ("p = argparse.ArgumentParser()\np.add_argument('')\np.parse_args()\n", "line 4: string index out of range"),
        ("p = argparse.ArgumentParser()\np.add_argument('--zzz', dest=5)\np.parse_args()\n", "must be string"),
        ("p = argparse.ArgumentParser()\np.add_argument(['--a'])\np.parse_args()\n", "must be string"),
        ("p = argparse.ArgumentParser()\np.add_argument('--a', nargs=30000000)\np.parse_args()\n", "nargs=30000000"),
        ("p = argparse.ArgumentParser()\nx = p" + ".b()" * 300 + "\np.parse_args()\n", "p.b is no plain use"),
    ],
)  # fmt: skip
def test_where_the_tree_leaves_something_open_nothing_is_judged(tmp_path, code, why):
    [issue] = check(tmp_path, code, {"zzz": 1})
    assert issue.level == "not checked" and why in issue.found


@pytest.mark.parametrize(
    ("code", "values", "key", "meant"),
    [
        (PLAIN, {"learning": -0.5}, "learning", "learning-rate"),
        (PLAIN, {**GOOD, "epochs": 1, "epoch": 3}, "epoch", "epochs"),
        (PLAIN, {**GOOD, "epoch": "x"}, "epoch", "epochs"),
        (PLAIN, {**GOOD, "shuf": False}, "shuf", "shuffle"),
        (TOLERANT, {**GOOD, "epoch": 3}, "epoch", "epochs"),
    ],
)
def test_an_abbreviation_that_argparse_would_expand_is_refused(tmp_path, code, values, key, meant):
    [issue] = check(tmp_path, code, values)
    assert (issue.key, issue.level, issue.fix) == (f"hyperparameters.{key}", "error", f"did you mean {meant}?")
    assert f"script.py has no argument --{key}, and argparse would take it for --{meant}" in issue.found


def test_a_name_is_no_abbreviation_where_the_parser_expands_none(tmp_path):
    strict = TOLERANT.replace('description="trains"', "allow_abbrev=False")
    assert check(tmp_path, strict, {**GOOD, "epoch": 3}) == []
    [issue] = check(tmp_path, strict.replace("parse_known_args", "parse_args"), {**GOOD, "epoch": 3})
    assert issue.found == "script.py has no argument --epoch"


def test_the_start_of_several_arguments_is_ambiguous_and_that_of_one_whole_name_is_that_name(tmp_path):
    code = PLAIN.replace("group.add_argument", 'group.add_argument("--epochs-warm")\ngroup.add_argument', 1)
    assert check(tmp_path, code, {**GOOD, "epochs": 3}) == []
    [issue] = check(tmp_path, code, {**GOOD, "epoch": 3})
    assert "ambiguous option: --epoch" in issue.found


@pytest.mark.parametrize("code", ["x = " + "-" * 60_000 + "1\n", "x = " + "1 + " * 60_000 + "1\n"])
def test_an_expression_too_deep_for_the_parser_is_named_with_a_fix(tmp_path, code):
    [issue] = check(tmp_path, code, {"zzz": 1})
    assert (issue.key, issue.level, issue.fix) == ("script", "error", "split the expression up")
    assert issue.found == "script.py: an expression is nested too deeply to be read"


def test_false_for_the_type_bool_is_a_warning(tmp_path):
    [issue] = check(tmp_path, PLAIN, {**GOOD, "shuffle": False})
    assert (issue.key, issue.level) == ("hyperparameters.shuffle", "warning") and "bool('False')" in issue.found
    assert check(tmp_path, PLAIN, {**GOOD, "shuffle": True}) == []


SEVERAL = """
p = argparse.ArgumentParser()
p.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
p.add_argument("--range", type=float, nargs=2)
p.add_argument("--seed", type=int, action="append")
p.add_argument("--names", nargs="*")
p.parse_args()
"""


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ({"sizes": [1, 2]}, "error"),
        ({"range": 0.5}, "error"),
        ({"seed": [1]}, "error"),
        ({"names": ["a", "b"]}, "warning"),
    ],
)
def test_a_list_for_an_argument_of_several_values_is_answered_with_what_can_be_done(tmp_path, values, level):
    [issue] = check(tmp_path, SEVERAL, values)
    [name] = values
    assert issue.level == level and "SageMaker passes a list as one text" in issue.found
    assert issue.fix.startswith(f"leave {name} out here and write it as the default in script.py, or ")
    assert runs(tmp_path, values) == (level == "warning")


def test_one_value_for_an_argument_of_several_is_judged_as_any(tmp_path):
    assert check(tmp_path, SEVERAL, {"sizes": 3, "seed": 4, "names": "a"}) == []
    [issue] = check(tmp_path, SEVERAL, {"sizes": "x"})
    assert issue.fix == "correct sizes" and "one text" not in issue.found


def test_the_parser_is_read_and_the_script_does_not_run(tmp_path):
    check(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n" + PLAIN, GOOD)
    assert not (tmp_path / "ran").exists()

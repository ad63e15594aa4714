"""The argparse parser of a script, rebuilt from its syntax tree without running the script, and what it says to a job's hyperparameters."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from launcher.config.expressions import NotPlain
from launcher.config.issues import Issue, did_you_mean

PARSER_WORDS = (
    "prog",
    "usage",
    "description",
    "epilog",
    "formatter_class",
    "add_help",
    "allow_abbrev",
    "argument_default",
)
"""Keywords of ArgumentParser that leave alone what the command line means, or are rebuilt."""

ARGUMENT_WORDS = (
    "help",
    "metavar",
    "dest",
    "default",
    "const",
    "deprecated",
    "action",
    "nargs",
    "type",
    "choices",
    "required",
)
"""Keywords of add_argument."""

ACTIONS = (
    "store",
    "store_true",
    "store_false",
    "store_const",
    "append",
    "append_const",
    "count",
    "extend",
    "help",
    "version",
)

TYPES = {"int": int, "float": float, "str": str, "bool": bool}
"""Types that convert here as they do there. A function of the script's own is not called: any text passes."""

GROUPS = ("add_argument_group", "add_mutually_exclusive_group")

HARMLESS = ("parse_args", "parse_known_args", "set_defaults", "get_default", "error", "exit", "format_help", "format_usage",
            "print_help", "print_usage")  # fmt: skip
"""Methods that change nothing about which arguments there are."""


def check(script: Path, hyperparameters: Mapping[str, tuple[str, str]]) -> list[Issue] | None:
    """Check hyperparameters against the one argparse parser of a script.

    The verdict is argparse's own, about a parser with the same options. Where the tree leaves anything open, nothing is judged.

    Args:
        hyperparameters: name -> (option, value) as the container toolkit writes them on the command line.

    Returns:
        None where the script makes no parser.

    Raises:
        NotPlain: the parser cannot be known without running the script.
    """
    tree = ast.parse(script.read_bytes(), script.name)
    makers = _makers(tree)
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in makers]
    if not made:
        return None
    if len(made) > 1:
        raise NotPlain("it makes several parsers")
    _require_plain(tree, makers)
    parser = _rebuilt(tree, made[0])
    tolerant = any(isinstance(node, ast.Attribute) and node.attr == "parse_known_args" for node in ast.walk(tree))
    line = [text for option, value in hyperparameters.values() for text in (option, value)]
    try:
        _, rest = parser.parse_known_args(line)
        refusal = ""
    except _RefusedError as error:
        rest, refusal = [], str(error)
    found = list(_always_true(parser, script.name, hyperparameters))
    if refusal or (rest and not tolerant):
        causes = list(_causes(parser, script.name, hyperparameters, tolerant))
        found += causes or [
            Issue(key="hyperparameters", found=f"{script.name} refuses them: {refusal}", fix="correct them")
        ]
    return found


class _RefusedError(Exception):
    """What argparse would have printed before it ended the script."""


class _Parser(argparse.ArgumentParser):
    """A parser that neither prints nor ends the process."""

    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _RefusedError(message or "it prints its help and ends")

    def _print_message(self, message: str, file: Any = None) -> None:
        pass


def _makers(tree: ast.Module) -> set[str]:
    """How the script may write the call that makes a parser: argparse.ArgumentParser, and other names of it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {f"{item.asname or item.name}.ArgumentParser" for item in node.names if item.name == "argparse"}
        elif isinstance(node, ast.ImportFrom) and node.module == "argparse":
            found |= {item.asname or item.name for item in node.names if item.name == "ArgumentParser"}
    return found


def _require_plain(tree: ast.Module, makers: set[str]) -> None:
    """Raise NotPlain where anything but plain calls of `add_argument` may decide about the arguments."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    parsers = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
        if ast.unparse(node.value.func) in makers or ast.unparse(node.value.func).rpartition(".")[2] in GROUPS
    }
    parsed = False
    for node, above in _with_parents(tree):
        parent = above[-1] if above else tree
        if isinstance(node, ast.Attribute) and node.attr in ("parse_args", "parse_known_args"):
            parsed = True
            given = parent.args + parent.keywords if isinstance(parent, ast.Call) and parent.func is node else [node]
            if [ast.unparse(one) for one in given] not in ([], ["sys.argv[1:]"]):
                raise NotPlain("it parses something other than the command line")
        elif isinstance(node, ast.Attribute) and node.attr == "argv":
            whole = ast.unparse(parent)
            if (
                whole != "sys.argv[1:]"
                or not isinstance(above[-2], ast.Call)
                or "parse" not in ast.unparse(above[-2].func)
            ):
                raise NotPlain("it uses sys.argv itself")
        elif isinstance(node, ast.Attribute) and node.attr == "add_argument":
            if not (isinstance(parent, ast.Call) and parent.func is node):
                raise NotPlain("it passes add_argument on")
            for outer in above:
                if isinstance(outer, (ast.For, ast.While, ast.Try, ast.ClassDef, ast.Lambda, ast.comprehension)) or (
                    isinstance(outer, ast.If) and "__name__" not in ast.unparse(outer.test)
                ):
                    raise NotPlain("it adds arguments in a loop, a condition or a class")
                if isinstance(outer, ast.FunctionDef) and outer.name not in called:
                    raise NotPlain(f"it adds arguments in {outer.name}, which it does not call itself")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in parsers:
            if node.attr not in (*GROUPS, *HARMLESS) or not isinstance(parent, ast.Call):
                raise NotPlain(f"it uses {ast.unparse(node)}")
        elif isinstance(node, ast.Name) and node.id in parsers and isinstance(node.ctx, ast.Load):
            own = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in functions
            if not (own or isinstance(parent, (ast.Attribute, ast.Return))):
                raise NotPlain("its parser is passed on to code outside the script")
    if not parsed:
        raise NotPlain("it does not parse the arguments itself")


def _with_parents(tree: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Every node, with those that it lies in, the outermost first."""
    waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while waiting:
        node, above = waiting.pop()
        yield node, above
        waiting += [(child, (*above, node)) for child in ast.iter_child_nodes(node)]


def _rebuilt(tree: ast.Module, made: ast.Call) -> _Parser:
    words = {word.arg: word.value for word in made.keywords}
    if made.args or any(name not in PARSER_WORDS for name in words):
        raise NotPlain("its parser is made with more than names and texts")
    chosen = {name: _literal(words[name]) for name in ("add_help", "allow_abbrev") if name in words}
    parser = _Parser(prog="script", **chosen)
    shadowed = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    shadowed |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            try:
                parser.add_argument(*map(_literal, call.args), **_keywords(call, shadowed))
            except (argparse.ArgumentError, TypeError, ValueError) as error:
                raise NotPlain(f"line {call.lineno}: {error}") from None
    return parser


def _keywords(call: ast.Call, shadowed: set[str]) -> dict[str, Any]:
    """The keywords of an add_argument that decide what it takes."""
    words = {word.arg: word.value for word in call.keywords}
    if any(name not in ARGUMENT_WORDS for name in words):
        raise NotPlain(f"line {call.lineno}: add_argument with {ast.unparse(call)}")
    kept: dict[str, Any] = {"default": argparse.SUPPRESS}
    if "action" in words:
        plain = ast.unparse(words["action"]).rpartition(".")[2] == "BooleanOptionalAction"
        kept["action"] = argparse.BooleanOptionalAction if plain else _literal(words["action"])
        if not plain and kept["action"] not in ACTIONS:
            raise NotPlain(f"line {call.lineno}: an action of its own")
    if kept.get("action") == "version":
        kept["version"] = ""
    if kept.get("action") in ("store_const", "append_const"):
        kept["const"] = None
    for name in ("nargs", "dest"):
        if name in words:
            kept[name] = _literal(words[name])
    if "required" in words and _literal(words["required"], otherwise=False) is True:
        kept["required"] = True
    kind = ast.unparse(words["type"]) if "type" in words else "str"
    known = kind in TYPES and kind not in shadowed
    if "type" in words and known:
        kept["type"] = TYPES[kind]
    if "choices" in words and known and (choices := _literal(words["choices"], otherwise=None)) is not None:
        kept["choices"] = list(choices)
    return kept


_NOTHING = object()


def _literal(node: ast.expr, otherwise: Any = _NOTHING) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        if otherwise is not _NOTHING:
            return otherwise
        raise NotPlain(f"line {node.lineno}: {ast.unparse(node)[:60]} is worked out by the script") from None


def _causes(
    parser: _Parser, script: str, hyperparameters: Mapping[str, tuple[str, str]], tolerant: bool
) -> Iterator[Issue]:
    """Why the command line is refused: hyperparameter by hyperparameter, and what is missing."""
    options = [option for action in parser._actions for option in action.option_strings]
    required = [action for action in parser._actions if action.required]
    for action in required:
        action.required = False
    given = set()
    for name, (option, value) in hyperparameters.items():
        issue = partial(Issue, key=f"hyperparameters.{name}")
        try:
            parsed, rest = parser.parse_known_args([option, value])
        except _RefusedError as error:
            text = str(error)
            found = text.partition(": ")[2] if text.startswith("argument ") else text
            yield issue(found=f"{script} refuses it: {found}", fix=f"correct {name}")
            given.add(name)
            continue
        given |= vars(parsed).keys()
        if rest[:1] == [option] and not tolerant:
            names = [each.lstrip("-") for each in options if each.startswith("--") and each != "--help"]
            fix = did_you_mean(name, names)
            if name in names:  # of one letter
                fix = f"also call it {option} in the script: the container toolkit writes one hyphen before one letter"
            yield issue(found=f"{script} has no argument {option}", valid=", ".join(names), fix=fix)
        elif rest and not tolerant:
            found = f"{script} takes {option} without a value, and SageMaker always passes one: {option} {value}"
            yield issue(found=found, fix="give the argument a type and a value in the script, or remove it here")
    for action in required:
        name = action.option_strings[0].lstrip("-") if action.option_strings else action.dest
        if action.dest not in given and name not in given:
            yield Issue(key=f"hyperparameters.{name}", found=f"missing; {script} requires it", fix=f"add {name}")


def _always_true(parser: _Parser, script: str, hyperparameters: Mapping[str, tuple[str, str]]) -> Iterator[Issue]:
    """False for an argument of the type bool, which takes every text but the empty one for true."""
    booleans = {option for action in parser._actions if action.type is bool for option in action.option_strings}
    for name, (option, value) in hyperparameters.items():
        if option in booleans and value.lower() in ("false", "0", "no"):
            yield Issue(
                key=f"hyperparameters.{name}",
                level="warning",
                found=f"{value}, which {script} takes for true: argparse's type=bool calls bool({value!r})",
                fix="give the argument another type in the script, or leave it out here",
            )

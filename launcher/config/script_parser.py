"""The argparse parser of a script, rebuilt from its syntax tree without running the script."""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from launcher.config.expressions import NotPlain

PARSER_WORDS = (
    "prog", "usage", "description", "epilog", "formatter_class", "add_help", "allow_abbrev",
    "argument_default",
)  # fmt: skip
"""Keywords of ArgumentParser that do not change what the command line means, or are rebuilt."""

ARGUMENT_WORDS = (
    "help", "metavar", "dest", "default", "const", "deprecated", "action", "nargs", "type", "choices",
    "required", "version",
)  # fmt: skip
"""Keywords of add_argument."""

ACTIONS = (
    "store", "store_true", "store_false", "store_const", "append", "append_const", "count", "extend", "help",
    "version",
)  # fmt: skip

TYPES = {"int": int, "float": float, "str": str, "bool": bool}
"""Types that convert here as in the script. The script's own functions are not called: any text passes."""

MAX_NARGS = 1000
"""Most values that one argument takes here: argparse makes a pattern of that length."""

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

GROUP_WORDS = ("title", "description", "required")
"""Keywords of the methods that make a group."""

GROUPS = ("add_argument_group", "add_mutually_exclusive_group")

PARSES = ("parse_args", "parse_known_args")

HARMLESS = ("set_defaults", "get_default", "format_help", "format_usage", "print_help", "print_usage")
"""Methods that change nothing about which arguments there are."""

ENDS = {"exit", "_exit", "quit", "SystemExit"}
"""Names by which a script ends itself."""


class RefusedError(Exception):
    """What argparse would have printed before it ended the script."""


class SilentParser(argparse.ArgumentParser):
    """A parser that neither prints nor ends the process."""

    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise RefusedError(message or "it prints its help and ends")

    def _print_message(self, message: str, file: Any = None) -> None:
        pass


def parser_of(script: Path) -> tuple[SilentParser, bool] | None:
    """The one parser of a script, and whether it takes unknown arguments; None if the script makes none.

    Raises:
        NotPlain: the parser cannot be known without running the script.
    """
    tree = ast.parse(script.read_bytes(), script.name)
    makers = _makers(tree)
    made = sum(isinstance(node, ast.Call) and _dotted(node.func) in makers for node in ast.walk(tree))
    if made > 1:
        raise NotPlain("it makes several parsers")
    return _Script(tree, makers).parser() if made else None


def _dotted(node: ast.expr) -> str:
    """`name` or `name.attribute`; empty for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _makers(tree: ast.Module) -> set[str]:
    """How the script may write the call that makes a parser: argparse.ArgumentParser, and its aliases."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {f"{item.asname or item.name}.ArgumentParser" for item in node.names if item.name == "argparse"}
        elif isinstance(node, ast.ImportFrom) and node.module == "argparse":
            found |= {item.asname or item.name for item in node.names if item.name == "ArgumentParser"}
    return found


def _words(node: ast.AST) -> set[str]:
    """Every name in a piece of code: of variables, attributes, functions, arguments and imports."""
    found: set[str] = set()
    for each in ast.walk(node):
        if not isinstance(each, ast.Constant):
            for _, value in ast.iter_fields(each):
                found |= {text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)}
    return found


def _bound(tree: ast.AST) -> set[str]:
    """Every name that a piece of code binds, except imports from argparse."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            found |= {item.asname or item.name for item in node.names if "argparse" not in (module, item.name)}
        elif isinstance(node, DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
    return found


class _ParsedError(Exception):
    """The script has parsed its command line: nothing that follows affects the arguments."""


class _Script:
    """Follows a script, statement by statement, from its first line to the one call that parses its command line.

    Statements that concern no parser are passed over. Those that do must be plain: assignments to names, calls of the parser's
    methods, and calls of the script's own functions, each once and outside any loop, condition or other block.
    """

    def __init__(self, tree: ast.Module, makers: set[str]):
        self.tree, self.makers = tree, makers
        self.bound = _bound(tree)
        self.made: SilentParser | None = None
        self.accepts_unknown = False
        self.functions: dict[str, ast.FunctionDef] = {}
        self.called: set[str] = set()
        self.globals: dict[str, SilentParser | None] = {}
        self.users: dict[str, set[str]] = defaultdict(set)
        """word -> names of the functions, lambdas and classes that contain it."""
        self.concerned: set[str] = set()
        """Names that lead to a parser: its variables, its methods, and functions and classes that contain one of these."""
        starts = ["add_argument", *GROUPS, *PARSES, *(maker.rpartition(".")[2] for maker in makers)]
        for node in ast.walk(tree):
            if isinstance(node, DEFINITIONS):
                for word in _words(node) - {node.name}:
                    self.users[word].add(node.name)
            elif isinstance(node, ast.Assign):
                targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
                if isinstance(node.value, ast.Call) and _dotted(node.value.func) in makers:
                    starts += targets
                if any(isinstance(each, ast.Lambda) for each in ast.walk(node.value)):
                    for word in _words(node.value):
                        self.users[word].update(targets)
        for word in starts:
            self._concern(word)

    def parser(self) -> tuple[SilentParser, bool]:
        """The parser as it is when it parses the command line, and whether it takes unknown arguments. Raises NotPlain."""
        if self.bound & {maker.partition(".")[0] for maker in self.makers}:
            raise NotPlain("it gives argparse's name to something else")
        nodes = list(ast.walk(self.tree))
        parses = sum(isinstance(node, ast.Attribute) and node.attr in PARSES for node in nodes)
        if parses > 1:
            raise NotPlain("it parses more than once")
        allowed = [
            node.args[0]
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PARSES
            if len(node.args) == 1 and not node.keywords and ast.dump(node.args[0]) == COMMAND_LINE
        ]
        uses = sum("argv" in (getattr(node, name, "") for name in ("attr", "name", "id")) for node in nodes)
        if uses > len(allowed):
            raise NotPlain("it uses sys.argv itself")
        try:
            self._run(self.tree.body, self.globals)
        except _ParsedError:
            assert self.made
            return self.made, self.accepts_unknown
        raise NotPlain("it does not parse the arguments itself, or not where the script can be followed")

    def _concern(self, word: str) -> None:
        waiting = [word]
        while waiting:
            name = waiting.pop()
            if name not in self.concerned:
                self.concerned.add(name)
                waiting += self.users[name]

    def _concerns(self, *nodes: ast.AST) -> bool:
        return any(_words(node) & self.concerned for node in nodes)

    def _run(self, body: Sequence[ast.stmt], names: dict[str, SilentParser | None]) -> SilentParser | None:
        """What a function returns, or None at the end of the body."""
        top = names is self.globals
        for node in body:
            if isinstance(node, ast.Return):
                return self._value(node.value, names) if node.value else None
            if isinstance(node, DEFINITIONS):
                self._define(node, top)
            elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
                self._assign(node.targets, node.value, names)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self._assign([node.target], node.value, names)
            elif isinstance(node, ast.Assign) and not self._concerns(*node.targets):
                if self._value(node.value, names):
                    raise _not_plain(node, "keeps its parser in something other than a name")
            elif isinstance(node, ast.Expr):
                if not self._adds_argument(node.value, names):
                    self._value(node.value, names)
            elif isinstance(node, ast.If) and top and ast.dump(node.test) == AS_A_SCRIPT:
                self._run(node.body, names)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                if _bound(node) & self.concerned:
                    raise _not_plain(node, "takes the name of something that uses its parser")
            elif self._concerns(node):
                raise _not_plain(node, "uses its parser in a loop, a condition or another block")
            elif _words(node) & ENDS or any(isinstance(each, ast.Return) for each in ast.walk(node)):
                raise _not_plain(node, "may end before the arguments are parsed")
        return None

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, top: bool) -> None:
        """Note a function. Of a function or class, nothing that runs while it is defined may concern the parser."""
        if isinstance(node, ast.ClassDef):
            runs = [*node.bases, *node.keywords, *(each for each in node.body if not isinstance(each, DEFINITIONS))]
        else:
            runs = [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
        if self._concerns(*node.decorator_list, *runs) or (node.name in self.concerned and not top):
            raise _not_plain(node, "is made with its parser")
        if isinstance(node, ast.FunctionDef) and top:
            self.functions[node.name] = node
        else:
            self.functions.pop(node.name, None)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, names: dict[str, SilentParser | None]) -> None:
        found = self._value(value, names)
        for target in targets:
            assert isinstance(target, ast.Name)
            names[target.id] = found
            if found:
                self._concern(target.id)

    def _value(self, node: ast.expr, names: dict[str, SilentParser | None]) -> SilentParser | None:
        """The parser that an expression gives, or None for anything else."""
        if not self._concerns(node):
            return None
        if isinstance(node, ast.Name) and (node.id in names or node.id in self.globals):
            return names[node.id] if node.id in names else self.globals[node.id]
        if isinstance(node, ast.Call):
            return self._call(node, names)
        if isinstance(node, ast.Attribute) and node.attr not in self.concerned and not self._value(node.value, names):
            return None
        raise _not_plain(node, "is no plain use of its parser")

    def _call(self, node: ast.Call, names: dict[str, SilentParser | None]) -> SilentParser | None:
        if _dotted(node.func) in self.makers:
            self.made = _made(node)
            return self.made
        own = None
        if isinstance(node.func, ast.Name) and node.func.id not in names | self.globals:
            own = self.functions.get(node.func.id)
        if isinstance(node.func, ast.Attribute) and node.func.attr in (*GROUPS, *PARSES, *HARMLESS):
            if parser := self._value(node.func.value, names):
                return self._method(node, node.func.attr, parser)
            raise _not_plain(node, "is no plain use of its parser")
        if not own and self._value(node.func, names):
            raise _not_plain(node, "is no plain use of its parser")
        values = [self._value(argument, names) for argument in node.args]
        words = {word.arg: self._value(word.value, names) for word in node.keywords}
        if own and (own.name in self.concerned or any([*values, *words.values()])):
            return self._function(node, own, values, words)
        if any([*values, *words.values()]):
            raise _not_plain(node, "passes its parser on to code outside the script")
        return None

    def _method(self, node: ast.Call, name: str, parser: SilentParser) -> SilentParser | None:
        """What a method of the parser or of a group returns; a group's arguments are the parser's."""
        if name in PARSES:
            if node.keywords or [ast.dump(given) for given in node.args] not in ([], [COMMAND_LINE]):
                raise NotPlain("it parses something other than the command line")
            self.accepts_unknown = name == "parse_known_args"
            raise _ParsedError
        odd = name in GROUPS and any(word.arg not in GROUP_WORDS for word in node.keywords)
        if odd or self._concerns(*node.args, *node.keywords):
            raise _not_plain(node, "is no plain use of its parser")
        return parser if name in GROUPS else None

    def _adds_argument(self, node: ast.expr, names: dict[str, SilentParser | None]) -> bool:
        """Whether an expression adds an argument; it is then added. A result that is used could be changed later."""
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            return False
        parser = self._value(node.func.value, names)
        if not parser or self._concerns(*node.args, *node.keywords):
            raise _not_plain(node, "adds an argument to something else, or with the parser itself")
        try:
            parser.add_argument(*map(_literal, node.args), **_keywords(node, self.bound))
        except (argparse.ArgumentError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise NotPlain(f"line {node.lineno}: {error}") from None
        return True

    def _function(
        self, node: ast.Call, function: ast.FunctionDef, values: list[SilentParser | None], words: dict[str | None, Any]
    ) -> SilentParser | None:
        """What one of the script's functions returns."""
        inside = list(ast.walk(function))
        plain = not function.decorator_list and function.name not in self.called
        parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if (
            not plain
            or any(isinstance(each, (ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)) for each in inside)
            or any(isinstance(each, ast.Starred) for each in node.args)
            or None in words
            or len(values) > len(parameters)
        ):
            raise _not_plain(node, "calls a function that cannot be followed, or that is called twice")
        self.called.add(function.name)
        local: dict[str, SilentParser | None] = {
            each.arg: None for each in ast.walk(function.args) if isinstance(each, ast.arg)
        }
        local |= dict(zip(parameters, values)) | {str(name): value for name, value in words.items()}
        for name, value in local.items():
            if value:
                self._concern(name)
        return self._run(function.body, local)


def _not_plain(node: ast.stmt | ast.expr, why: str) -> NotPlain:
    text = " ".join(ast.unparse(node).split())
    return NotPlain(f"line {node.lineno}: {text if len(text) <= 60 else text[:57] + '...'} {why}")


def _expression(text: str) -> str:
    return ast.dump(ast.parse(text, mode="eval").body)


COMMAND_LINE, AS_A_SCRIPT = _expression("sys.argv[1:]"), _expression("__name__ == '__main__'")


def _made(call: ast.Call) -> SilentParser:
    words = {word.arg: word.value for word in call.keywords}
    if call.args or any(name not in PARSER_WORDS for name in words):
        raise NotPlain("its parser is made with more than names and texts")
    chosen = {name: _literal(words[name]) for name in ("add_help", "allow_abbrev") if name in words}
    return SilentParser(prog="script", **chosen)


def _keywords(call: ast.Call, bound: set[str]) -> dict[str, Any]:
    """The keywords of an add_argument that decide what it accepts."""
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
    if isinstance(kept.get("nargs"), int) and kept["nargs"] > MAX_NARGS:
        raise NotPlain(f"line {call.lineno}: nargs={kept['nargs']}")
    if "required" in words and _literal(words["required"], otherwise=False) is True:
        kept["required"] = True
    kind = ast.unparse(words["type"]) if "type" in words else "str"
    known = kind in TYPES and not bound & {kind, "*"}
    if "type" in words and known:
        kept["type"] = TYPES[kind]
    if "choices" in words and known and (choices := _literal(words["choices"], otherwise=None)) is not None:
        if isinstance(choices, (str, bytes)):  # any part of it is a choice
            raise NotPlain(f"line {call.lineno}: choices={choices!r:.60} is one text")
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

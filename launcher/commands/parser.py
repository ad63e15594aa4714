"""The command line's parser: commands in groups, the nearest known word for an unknown one, and the version."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from launcher.config.issues import near


class Parser(argparse.ArgumentParser):
    """An argparse parser that names the nearest command for an unknown one. Its commands are parsers of this class too."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            meant = near(str(value), action.choices)
            what = str(action.metavar).lower()
            fix = f"did you mean {self.prog} {meant}?" if meant else f"{self.prog} --help lists them"
            raise argparse.ArgumentError(None, f"no {what} is called {value!r}; {fix}")
        super()._check_value(action, value)

    def unknown_options(self, names: Sequence[str]) -> str:
        """The fix for options that this command does not have: the nearest that it has, or where they are listed."""
        known = {option.lstrip("-"): option for action in self._actions for option in action.option_strings}
        found = [near(name.lstrip("-"), known, likeness=0.7) for name in names]  # --json is not like --on
        meant = dict.fromkeys(known[one] for one in found if one)
        return f"did you mean {' '.join(meant)}?" if meant else f"{self.prog} --help lists what it takes"

    def surplus_words(self, words: Sequence[str], options: argparse.Namespace) -> str:
        """The fix for words that argparse did not accept: it takes those that may be left out only before the first option.

        Args:
            options: what was parsed.
        """
        open_to = [action for action in self._actions if not action.option_strings and action.nargs in ("?", "*", "+")]
        free = sum(getattr(options, action.dest) is None for action in open_to)
        if len(words) <= free or any(action.nargs != "?" for action in open_to):
            return f"put {shlex.join(words)} before the options"
        return self.unknown_options([])


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands directly below a parser, by name; none if it has none."""
    return next(
        (dict(action.choices) for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {}
    )


def every_command(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, argparse.ArgumentParser]:
    """Every command that does something, by name; for those with subcommands, one each, such as `study scaling`."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name, inner in commands_of(parser).items():
        found |= every_command(inner, f"{prefix}{name} ") or {prefix + name: inner}
    return found


def in_groups(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]]) -> str:
    """Help text that lists commands in groups.

    Args:
        groups: title -> names of commands.
    """
    commands = commands_of(parser)
    widest = max(map(len, commands))
    lines: list[str] = []
    for title, names in groups.items():
        lines += ["", title, *(f"  {name:<{widest}}  {commands[name].description}" for name in names)]
    return "\n".join(lines[1:])


class ShowVersion(argparse.Action):
    """`--version`: the installed package's, looked up on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            version = metadata.version("vision-launcher")
        except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
            version = "(not installed)"
        print(f"{parser.prog} {version}")
        parser.exit()

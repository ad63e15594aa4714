"""Check a job's hyperparameters against a script's argparse parser, without running the script."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from launcher.config.issues import Issue, did_you_mean
from launcher.config.script_parser import RefusedError, SilentParser, parser_of

ONE_TEXT = "SageMaker passes a list as one text"


def check(script: Path, hyperparameters: Mapping[str, tuple[str, str]]) -> list[Issue] | None:
    """Check hyperparameters against the one argparse parser of a script.

    argparse itself decides, with a parser of the same options; only an abbreviation, which it would take, is refused. If the tree
    leaves anything open, nothing is judged.

    Args:
        hyperparameters: name -> (option, value) as the container toolkit writes them on the command line.

    Returns:
        None if the script makes no parser.

    Raises:
        NotPlain: the parser cannot be known without running the script.
        AttributeError, IndexError, OverflowError, RecursionError, TypeError, ValueError: argparse itself fails on an argument.
    """
    found_parser = parser_of(script)
    if found_parser is None:
        return None
    parser, accepts_unknown = found_parser
    line = [text for option, value in hyperparameters.values() for text in (option, value)]
    try:
        _, rest = parser.parse_known_args(line)
        refusal = ""
    except RefusedError as error:
        rest, refusal = [], str(error)
    found = []
    if refusal or (rest and not accepts_unknown):
        found = list(_causes(parser, script.name, hyperparameters, accepts_unknown)) or [
            Issue(key="hyperparameters", found=f"{script.name} refuses them: {refusal}", fix="correct them")
        ]
    abbreviated = list(_abbreviated(parser, script.name, hyperparameters))
    short = {issue.key for issue in abbreviated}
    found = [*abbreviated, *(issue for issue in found if issue.key not in short)]
    wrong = {issue.key for issue in found}
    doubtful = [
        *_always_true(parser, script.name, hyperparameters),
        *_lists_for_one(parser, script.name, hyperparameters),
    ]
    return [*(issue for issue in doubtful if issue.key not in wrong), *found]


def takes_several(action: argparse.Action) -> bool:
    """Whether an argument is made for several values. The container toolkit passes one text for each name."""
    many = (argparse.ZERO_OR_MORE, argparse.ONE_OR_MORE, argparse.REMAINDER)
    return isinstance(action, argparse._AppendAction) or action.nargs in many or needs_several(action)


def needs_several(action: argparse.Action) -> bool:
    """Whether one value is too few for an argument."""
    return isinstance(action.nargs, int) and action.nargs > 1


def _several(parser: SilentParser, option: str, value: str) -> bool:
    """Whether a value stands, or should stand, for several values of an argument that takes several."""
    return any(
        takes_several(action) and (needs_several(action) or value.startswith("["))
        for action in parser._actions
        if option in action.option_strings
    )


def _fix_for_several(script: str, name: str) -> str:
    return f"leave {name} out here and write it as the default in {script}, or have {script} split one text, as 1,2"


def _causes(
    parser: SilentParser, script: str, hyperparameters: Mapping[str, tuple[str, str]], accepts_unknown: bool
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
        except RefusedError as error:
            text = str(error)
            found = text.partition(": ")[2] if text.startswith("argument ") else text
            if _several(parser, option, value):
                fix = _fix_for_several(script, name)
                yield issue(found=f"{script} refuses it: {found}; {ONE_TEXT}", fix=fix)
            else:
                yield issue(found=f"{script} refuses it: {found}", fix=f"correct {name}")
            given.add(name)
            continue
        given |= vars(parsed).keys()
        if rest[:1] == [option] and not accepts_unknown:
            names = _names(options)
            fix = did_you_mean(name, names)
            if name in names:  # of one letter
                fix = f"also call it {option} in the script: the container toolkit writes one hyphen before one letter"
            yield issue(found=f"{script} has no argument {option}", valid=", ".join(names), fix=fix)
        elif rest and not accepts_unknown:
            found = f"{script} takes {option} without a value, and SageMaker always passes one: {option} {value}"
            yield issue(found=found, fix="give the argument a type and a value in the script, or remove it here")
    for action in required:
        name = action.option_strings[0].lstrip("-") if action.option_strings else action.dest
        if action.dest not in given and name not in given:
            yield Issue(key=f"hyperparameters.{name}", found=f"missing; {script} requires it", fix=f"add {name}")


def _names(options: Iterable[str]) -> list[str]:
    """The hyperparameters that reach the options of a parser, except those of one letter."""
    return [each.lstrip("-") for each in options if each.startswith("--") and each != "--help"]


def _abbreviated(parser: SilentParser, script: str, hyperparameters: Mapping[str, tuple[str, str]]) -> Iterator[Issue]:
    """Names that argparse would expand. The whole name may be given too, and the later one would silently win."""
    of_option = {option: action for action in parser._actions for option in action.option_strings}
    for name, (option, _) in hyperparameters.items():
        meant = [one for one in of_option if one.startswith(option)]
        if not parser.allow_abbrev or option in of_option or len({of_option[one] for one in meant}) != 1:
            continue  # of several arguments, argparse says itself that the name is ambiguous
        yield Issue(
            key=f"hyperparameters.{name}",
            found=f"{script} has no argument {option}, and argparse would take it for {meant[0]}",
            valid=", ".join(_names(of_option)),
            fix=f"did you mean {meant[0].lstrip('-')}?",
        )


def _always_true(parser: SilentParser, script: str, hyperparameters: Mapping[str, tuple[str, str]]) -> Iterator[Issue]:
    """False values for an argument of type bool, which takes every text but the empty one for true."""
    booleans = {option for action in parser._actions if action.type is bool for option in action.option_strings}
    for name, (option, value) in hyperparameters.items():
        if option in booleans and value.lower() in ("false", "0", "no"):
            yield Issue(
                key=f"hyperparameters.{name}",
                level="warning",
                found=f"{value}, which {script} takes for true: argparse's type=bool calls bool({value!r})",
                fix="give the argument another type in the script, or leave it out here",
            )


def _lists_for_one(
    parser: SilentParser, script: str, hyperparameters: Mapping[str, tuple[str, str]]
) -> Iterator[Issue]:
    """Lists for an argument of several texts, which takes the whole list for one of them."""
    for name, (option, value) in hyperparameters.items():
        if _several(parser, option, value):
            yield Issue(
                key=f"hyperparameters.{name}",
                level="warning",
                found=f"{value}, which {script} takes for a single value: {ONE_TEXT}",
                fix=_fix_for_several(script, name),
            )

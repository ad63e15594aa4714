"""The reference pages of docs/, made from the code: `.venv/bin/python -m tests.docs.reference --write`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from training import settings
from training.runtime import metrics
from training.settings import scripts, segmentation

from launcher.commands import main as command_line
from launcher.commands.options import adding_to
from launcher.config import job, sections
from tests.conftest import ROOT

FOLDER = ROOT / "docs/reference"

MADE = "<!-- made from the code: .venv/bin/python -m tests.docs.reference --write -->"

SCRIPTS = {
    "train_classifier.py": scripts.ClassifierSettings,
    "train_kd.py": scripts.DistillationSettings,
    "train_segmentation.py": segmentation.SegmentationSettings,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages; else only name those that differ")
    write = parser.parse_args().write
    FOLDER.mkdir(parents=True, exist_ok=True)
    differing = [name for name, text in pages().items() if not _is(name, text)]
    for name in differing:
        print(f"{'written' if write else 'differs'}: docs/reference/{name}")
        if write:
            (FOLDER / name).write_text(pages()[name])
    sys.exit(1 if differing and not write else 0)


def pages() -> dict[str, str]:
    """Every page's text by its file's name."""
    return {
        "commands.md": commands(),
        "config.md": config(),
        "hyperparameters.md": hyperparameters(),
        "metrics.md": metric_names(),
    }


def config() -> str:
    """Every key of a config."""
    lines = ["# Config keys", "", MADE, ""]
    lines += ["A config is one YAML file; [Run a job](../run.md) has an example. Unknown keys are refused.", ""]
    for title, model in _sections(job.Job, ""):
        lines += [f"## {title}" if title else "## The job", "", *([_doc(model), ""] if title else [])]
        lines += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for name, item in model.model_fields.items():
            default = "required" if item.is_required() else _value(item.get_default(call_default_factory=True))
            lines.append(
                _row(f"`{name}`", item.description or "", default, _sentences(model).get(name, ""), _example(item))
            )
        lines.append("")
    return "\n".join(lines)


def hyperparameters() -> str:
    """Every hyperparameter of the kit's scripts."""
    lines = ["# Hyperparameters of the kit's scripts", "", MADE, ""]
    lines += [
        "The launcher checks them before anything starts. A run that resumes from a checkpoint may change those marked",
        "*resume*; all others must stay as they were.",
        "",
        "| script | sections |",
        "| --- | --- |",
    ]
    bases = {
        name: [one for one in reversed(cls.__mro__) if dataclasses.is_dataclass(one)] for name, cls in SCRIPTS.items()
    }
    order = list(dict.fromkeys(cls for found in bases.values() for cls in found))
    for name, found in bases.items():
        lines.append(f"| `{name}` | {', '.join(f'[{_title(cls)}](#{_anchor(_title(cls))})' for cls in found)} |")
    for cls in [*order, scripts.TeacherCacheSettings, scripts.FeatureSettings]:
        lines += ["", f"## {_title(cls)}", "", _doc(cls), ""]
        lines += ["| name | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for item in dataclasses.fields(cls):
            if item.name not in cls.__dict__.get("__annotations__", {}):
                continue
            resume = " *resume*" if item.metadata.get("on_resume") == "may change" else ""
            meaning = _sentences(cls).get(item.name, "").replace("None:", "null:")  # as a config says it
            lines.append(_row(f"`{item.name}`{resume}", _takes(cls, item), _default(item), meaning))
    return "\n".join([*lines, ""])


def commands() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", MADE, ""]
    lines += [
        "`launcher COMMAND --help` says the same. `--debug`, before or behind the command, shows the traceback of an error."
    ]
    for name, parser in every_command():
        lines += ["", f"## launcher {name}", "", f"{_sentence(parser.description or '')}", ""]
        lines += ["```", *_usage(name, parser), "```"]
        rows = [action for action in parser._actions if action.dest not in ("help", "debug")]
        if rows:
            lines += ["", "| argument | meaning |", "| --- | --- |"]
        for action in rows:
            metavar = [] if action.nargs == 0 else [str(action.metavar)]
            given = ", ".join(f"`{' '.join([option, *metavar])}`" for option in action.option_strings or [""])
            lines.append(_row(given.replace("` ", "`"), (action.help or "").replace("%%", "%")))
    return "\n".join([*lines, ""])


def metric_names() -> str:
    """Every metric of the kit's scripts, and every phase of a step."""
    lines = ["# Metrics and phases of the kit's scripts", "", MADE, ""]
    lines += ["A log line has them as `epoch 3/60 step 40/1260 loss 0.1234 images/s 512.3 …`, `metrics.jsonl` too.", ""]
    lines += ["| metric | unit | on SageMaker | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics.METRICS:
        asked = "" if metric.sagemaker is None else f"`{metric.sagemaker or metric.name}`"
        lines.append(_row(f"`{metric.name}`", metric.unit, asked, metric.meaning))
    lines += ["", "## Phases of a step", "", "Each rank's timeline has their seconds.", ""]
    lines += ["| phase | part of | meaning |", "| --- | --- | --- |"]
    lines += [
        _row(f"`{phase.name}`", f"`{phase.inside}`" * bool(phase.inside), phase.meaning) for phase in metrics.PHASES
    ]
    return "\n".join([*lines, ""])


def every_command() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of every command; of those with questions, as `study scaling`, one each."""
    parser = argparse.ArgumentParser(prog="launcher")
    to = adding_to(parser, "COMMAND")
    for command in command_line.COMMANDS:
        command.add(to)
    return _commands(parser, "")


def _is(name: str, text: str) -> bool:
    return (FOLDER / name).is_file() and (FOLDER / name).read_text() == text


# The config


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(key of the section, its model), outermost first."""
    yield path, model
    for name, item in model.model_fields.items():
        if inner := _part(item.annotation):
            many = ".NAME" if "dict" in str(item.annotation) else "[]" if "list" in str(item.annotation) else ""
            yield from _sections(inner, f"{path}.{name}{many}".removeprefix("."))


def _part(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, where it holds one."""
    if isinstance(annotation, type) and issubclass(annotation, sections.Part):
        return annotation
    return next(filter(None, map(_part, typing.get_args(annotation))), None)


def _example(item: Any) -> str:
    return f"For example `{item.examples[0]}`." if item.examples else ""


# The hyperparameters


def _title(cls: type) -> str:
    return {
        "TrainingSettings": "Every script",
        "LabelledImageSettings": "One class an image",
        "TeacherSettings": "With a teacher",
        "TeacherCacheSettings": "teacher_cache",
        "FeatureSettings": "features",
    }.get(cls.__name__) or next(name for name, found in SCRIPTS.items() if found is cls)


def _takes(cls: type, item: dataclasses.Field[Any]) -> str:
    """A setting's type, range and conditions in words."""
    annotation = typing.get_type_hints(cls)[item.name]
    kind, range_ = settings.describe(annotation), item.metadata.get("limits")
    if range_ is not None:
        number = next((word for word in ("a whole number", "a number") if kind.startswith(word)), "")
        kind = f"{number} {range_.describe(annotation)}".strip()
    return "; ".join(filter(None, [kind, _conditions(cls).get(item.name, "")]))


@functools.cache
def _conditions(cls: type) -> dict[str, str]:
    """What settings must hold together, in words."""
    if not hasattr(cls, "conditions"):
        return {}
    missing = [name for name, found, _ in settings.check(cls, {})[1] if found == "missing"]
    made = cls(**{name: 2 for name in missing})
    ranges = {name for name, _, _ in settings.limits(made)}
    return {
        name: valid.replace("the 2 classes", "the classes")
        for name, _, valid in made.conditions()
        if name not in ranges
    }


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return _value(item.default)
    return "required" if item.default_factory is dataclasses.MISSING else _value(item.default_factory())


# The commands


def _commands(parser: argparse.ArgumentParser, prefix: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                deeper = list(_commands(inner, f"{prefix}{name} "))
                yield from deeper or [(prefix + name, inner)]


def _usage(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """A command's usage, the same whatever the terminal and the version of Python."""
    if parser.usage:
        return [line.strip() for line in parser.usage.splitlines()]
    words = [f"launcher {name}"]
    for action in parser._actions:
        if not action.option_strings:
            mark = {"?": "[{}]", "*": "[{} …]", "+": "{} …"}.get(str(action.nargs), "{}")
            words.append(mark.format(action.metavar))
    return [" ".join([*words, "[options]"])]


# Text


@functools.cache
def _sentences(cls: type) -> dict[str, str]:
    """The docstring under each field of a class."""
    [body] = [
        node.body
        for node in ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
        if isinstance(node, ast.ClassDef)
    ]
    found = {}
    for field, text in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _doc(cls: type) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "." * (not text.endswith("."))


def _value(value: Any) -> str:
    """A default as YAML says it."""
    if isinstance(value, (tuple, set)):
        value = list(value)
    return (
        ""
        if value in ({}, [], "") or isinstance(value, sections.Part)
        else f"`{json.dumps(value) if not isinstance(value, str) else value}`"
    )


def _row(*cells: str) -> str:
    """A row of a table; what follows the fourth cell is joined to it."""
    joined = [*cells[:3], " ".join(filter(None, cells[3:]))] if len(cells) > 3 else cells
    return f"| {' | '.join(_escaped(cell) for cell in joined)} |".replace("|  |", "| |")


def _escaped(text: str) -> str:
    """Text for a cell: < and | are themselves, and addresses are links."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [
        re.sub(r"https?://[^\s),;]*[^\s),;.]", r"<\g<0>>", piece.replace("<", r"\<")) for piece in pieces[::2]
    ]
    return "".join(pieces).replace("|", r"\|")


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    main()

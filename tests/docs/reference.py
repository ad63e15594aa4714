"""The reference pages of docs/, made from the code: `.venv/bin/python -m tests.docs.reference --write`."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys

from training import settings
from training.runtime import metrics
from training.settings import distillation, features, scripts, segmentation

from launcher.commands import parser
from launcher.commands.main import command_line
from launcher.config import descriptions
from tests.conftest import ROOT

FOLDER = ROOT / "docs/reference"

MADE = "<!-- made from the code: .venv/bin/python -m tests.docs.reference --write -->"

SCRIPTS = {
    "train_classifier.py": scripts.ClassifierSettings,
    "train_kd.py": distillation.DistillationSettings,
    "train_segmentation.py": segmentation.SegmentationSettings,
}

GROUPS = (
    distillation.LabelBankSettings,
    distillation.TeacherCacheSettings,
    segmentation.PixelCacheSettings,
    features.FeatureSettings,
)
"""Settings below a setting; each has those of the ones it is made of."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true", help="write the pages; else only name those that differ")
    write = options.parse_args().write
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
    for title, model in descriptions.config_sections():
        lines += [f"## {title}" if title else "## The job", ""]
        lines += [descriptions.first_paragraph(model), ""] if title else []
        lines += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for key in descriptions.config_keys(model):
            example = f"For example `{key.example}`." if key.example else ""
            lines.append(_row(f"`{key.name}`", key.takes, _default(key), key.sentence, example))
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
    for cls in [*order, *GROUPS]:
        lines += ["", f"## {_title(cls)}", "", descriptions.first_paragraph(cls), ""]
        lines += ["| name | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for item in descriptions.settings_of(cls, settings, inherited=False):
            resume = " *resume*" * item.on_resume
            lines.append(_row(f"`{item.name}`{resume}", item.takes, _default(item), item.sentence))
    return "\n".join([*lines, ""])


def commands() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", MADE, ""]
    lines += [
        "`launcher COMMAND --help` says the same. `--debug`, before or behind the command, shows the traceback of an error."
    ]
    for name, one in every_command().items():
        lines += ["", f"## launcher {name}", "", f"{_sentence(one.description or '')}", ""]
        lines += ["```", *_usage(name, one), "```"]
        rows = [action for action in one._actions if action.dest not in ("help", "debug")]
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
    lines += [
        "",
        "## Phases of a step",
        "",
        "Each rank's timeline has their seconds. The kit's scripts have no `augment`,",
    ]
    lines += [
        "`buffer_sync` and `forward`; observed ones have `forward`, and `buffer_sync` with DistributedDataParallel.",
        "",
    ]
    lines += ["| phase | part of | meaning |", "| --- | --- | --- |"]
    lines += [
        _row(f"`{phase.name}`", f"`{phase.inside}`" * bool(phase.inside), phase.meaning) for phase in metrics.PHASES
    ]
    lines += ["", "## Until the first step", "", "A rank's timeline has their seconds, from its process's start.", ""]
    lines += ["| part | what passes |", "| --- | --- |"]
    lines += [_row(f"`{name}`", f"{meaning[0].upper()}{meaning[1:]}") for name, meaning in metrics.START.items()]
    return "\n".join([*lines, ""])


def every_command() -> dict[str, argparse.ArgumentParser]:
    """Name -> parser of every command."""
    return parser.every_command(command_line())


def _is(name: str, text: str) -> bool:
    return (FOLDER / name).is_file() and (FOLDER / name).read_text() == text


# The hyperparameters


def _title(cls: type) -> str:
    return {
        "TrainingSettings": "Every script",
        "LabelledImageSettings": "One class per image",
        "TeacherSettings": "With a teacher",
        "LabelBankSettings": "teacher_cache",
        "TeacherCacheSettings": "teacher_cache of train_kd.py",
        "PixelCacheSettings": "teacher_cache of train_segmentation.py",
        "FeatureSettings": "features",
    }.get(cls.__name__) or next(name for name, found in SCRIPTS.items() if found is cls)


def _default(item: descriptions.Described) -> str:
    text = item.default_text
    return f"`{text}`" if text and not item.required else text


# The commands


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


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "." * (not text.endswith("."))


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

"""A run folder with any of its files damaged: every command ends with a message, and the other runs are shown."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.commands import main
from launcher.record.records import RunFolder
from tests.insight.planted import plant, write

SCRIPT = """
import json, os, pathlib, shutil
output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"])
shutil.copytree(os.environ["SM_CHANNEL_MEASURED"], output, dirs_exist_ok=True)
(output / "algo-1").mkdir(exist_ok=True)
(output / "algo-1/metrics.jsonl").write_text('{"epoch": 1, "step": 1, "loss": 0.5}\\n')
(output / "algo-1/result.json").write_text(json.dumps(
    {"model": "x", "parameters": 7, "steps": 3, "validation_accuracy": 0.5, "settings": {"hard_label_weight": 0.5}}))
(pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"]) / "checkpoints/one").write_text("1")
print("epoch 1/1 step 3/3 loss 0.5 images/s 100.0")
"""

OPERATORS = {"operators": [{"name": "conv", "calls": 1.0, "seconds": 0.1, "share": 0.5}]}

OF_SAGEMAKER = {
    "outcome.json": {
        "cost_usd": 1.5,
        "billable_seconds": 60,
        "saving": 0.5,
        "interruptions": 1,
        "model_uri": "s3://b/m",
    },
    "remote.json": {
        "TrainingJobStatus": "Completed",
        "SecondaryStatusTransitions": [
            {"Status": "Starting", "StartTime": "2026-11-22T10:00:00+00:00", "StatusMessage": "x"}
        ],
        "TrainingStartTime": "2026-11-22T10:00:00+00:00",
        "asked": "2026-11-22T10:00:00+00:00",
    },
    "request.json": {"OutputDataConfig": {"S3OutputPath": "s3://b/o"}, "ProfilerConfig": {"DisableProfiler": True}},
    "stop.json": {"reason": "asked to", "time": 1.0},
}
"""What the folder of a run on SageMaker holds beside that of a local one."""

COMMANDS: dict[str, list[str]] = {
    "runs": ["runs"],
    "runs --json": ["runs", "--json"],
    "show": ["show", "RUN"],
    "logs": ["logs", "RUN"],
    "compare": ["compare", "OTHER", "RUN"],
    "diff": ["diff", "OTHER", "RUN"],
    "diagnose": ["diagnose", "RUN"],
    "diagnose --json --html": ["diagnose", "RUN", "--json", "--html", "PAGE"],
    "diagnose two": ["diagnose", "OTHER", "RUN"],
    "attach": ["attach", "RUN"],
    "stop": ["stop", "RUN"],
    "rm": ["rm", "RUN"],  # without --yes nothing is removed
    "prune": ["prune", "--older-than", "0h"],
    "resume": ["resume", "RUN", "compute.instance_count=99"],  # the plan has an error, so that nothing starts
    "replay": ["replay", "RUN", "compute.instance_count=99"],
}

ENDLESS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a link to itself": lambda file: file.symlink_to(file),
}
"""What is put in a file's place, and has no end or no beginning."""

WHOLE_FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a list": lambda content: b"[1, 2]",
    "null": lambda content: b"null",
    "a number": lambda content: b"7",
    "an object": lambda content: b"{}",
    "text": lambda content: b'"text"',
    "no UTF-8": lambda content: b"\xff\xfe" + content,
    "zeros": lambda content: bytes(len(content)),
    "too deep": lambda content: b"[" * 100_000,
}

VALUES = [
    None,
    [],
    {},
    "x",
    "1.5",
    "",
    -1,
    0,
    1,
    1.5,
    True,
    10**400,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    [None],
    {"x": None},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[RunFolder, RunFolder, RunFolder]:
    """Of one real run: its folder, that of another, and one as SageMaker leaves it."""
    place = tmp_path_factory.mktemp("runs")
    measured = plant(
        phases={"data_wait": 0.2, "forward": 0.1, "backward": 0.2, "optimizer": 0.05}, steps=40, ranks=2, seconds=5
    )
    write(measured, place / "measured")
    (place / "measured/algo-1/operators.json").write_text(json.dumps(OPERATORS))
    (place / "source").mkdir()
    (place / "source/script.py").write_text(SCRIPT)
    values = {"name": "test", "script": "script.py", "source": str(place / "source")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHER_RUNS", str(place / "store"))
        job = launcher.from_values({**values, "inputs": {"measured": {"folder": str(place / "measured")}}})
        run = launcher.run(launcher.plan(job))
        assert run.wait(60) == "Completed", [*run.logs()]
    folders = (
        run.folder,
        RunFolder(place / "store/other-20261122-100000-abcd"),
        RunFolder(place / "store/sent-20261122-100000-abcd"),
    )
    for other in folders[1:]:
        shutil.copytree(run.folder.path, other.path, symlinks=True)
    sent = folders[2].path
    for name, values in OF_SAGEMAKER.items():
        before = json.loads((sent / name).read_text()) if (sent / name).exists() else {}
        (sent / name).write_text(json.dumps({**before, **values}))
    plan = json.loads((sent / "plan.json").read_text())
    plan |= {"backend": "aws", "price": {"text": "at most $1", "usd_per_hour": 1.0}}
    plan["job"]["region"] = "us-west-2"
    (sent / "plan.json").write_text(json.dumps(plan))
    return folders


@pytest.fixture(autouse=True)
def in_their_store(runs, monkeypatch):
    monkeypatch.setenv("LAUNCHER_RUNS", str(runs[0].path.parent))


def replaced(values: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy of nested values with one of them replaced; with Ellipsis as the new one, without it."""
    made = copy.deepcopy(values)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return made


def paths(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each of nested values lies; of a list the first."""
    items = values.items() if isinstance(values, dict) else enumerate(values[:1]) if isinstance(values, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from paths(value, (*at, key))


def files(run: RunFolder) -> list[Path]:
    """What a run folder holds, one of each kind."""
    ours = [*run.path.glob("*"), *run.path.glob("logs/*"), *run.path.glob("hosts/*/opt/ml/checkpoints")]
    data = run.host("algo-1") / "output/data"
    measured = [data / "algo-1" / name for name in ("result.json", "timeline-0.jsonl", "operators.json")]
    return sorted([*ours, *measured, next(data.rglob("profiler-output/**/*.json"))])


def damages(run: RunFolder) -> Iterator[tuple[Path, str, Callable[[], None]]]:
    """(file, damage, what does it) for every file of a run's folder. Whoever calls it puts the file back."""
    for file in files(run):
        yield file, "missing", lambda: None
        if file.is_dir():
            yield file, "a file in its place", functools.partial(file.write_text, "x")
            continue
        yield file, "a folder in its place", file.mkdir
        for name, make in ENDLESS.items():
            yield file, f"{name} in its place", functools.partial(make, file)
        content = file.read_bytes()
        for name, change in WHOLE_FILES.items():
            yield file, name, functools.partial(file.write_bytes, change(content))


def changed_values(run: RunFolder, rng: random.Random, most: int) -> Iterator[tuple[Path, str, Callable[[], None]]]:
    """The same with a single value of a file replaced or removed: `most` of each file."""
    for file in files(run):
        if file.suffix not in (".json", ".jsonl"):
            continue
        content = file.read_bytes()
        lines = (
            [json.loads(line) for line in content.splitlines()] if file.suffix == ".jsonl" or b"\n{" in content else []
        )
        values = lines or json.loads(content)
        kinds = [0, 1, 2] if lines else [None]  # of lines, some kinds come first
        places = [((*([kind] if kind is not None else []), *at), new) for kind in kinds if kind is None or kind < len(lines)
                  for at in paths(values if kind is None else values[kind]) for new in [*VALUES, ...]]  # fmt: skip
        for at, new in rng.sample(places, min(most, len(places))):
            made = replaced(values, at, new)
            text = "\n".join(map(json.dumps, made)) + "\n" if lines else json.dumps(made)
            yield file, f"{'.'.join(map(str, at))}={new!r}"[:80], functools.partial(file.write_text, text)


class Trial:
    """Runs commands on damaged folders, and collects what they should not have done."""

    def __init__(self, page: Path):
        self.page = page
        self.done, self.wrong = 0, []

    def damage(self, other: RunFolder, run: RunFolder, file: Path, what: str, do: Callable[[], None], commands) -> None:
        """Damage a file, run the commands, and put it back."""
        aside = file.with_name(f"{file.name}.aside")
        file.rename(aside)
        try:
            if what != "missing" and not what.endswith("in its place"):
                shutil.copy2(aside, file)
            do()
            for name in commands:
                self.type(name, [{"RUN": run.name, "OTHER": other.name, "PAGE": str(self.page)}.get(word, word)
                                 for word in COMMANDS[name]], other, f"{file.relative_to(run.path)} {what}")  # fmt: skip
        finally:
            if file.is_dir():
                shutil.rmtree(file)
            file.unlink(missing_ok=True)
            aside.rename(file)

    def type(self, name: str, words: list[str], other: RunFolder, about: str) -> None:
        self.done += 1
        streams = [
            io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)
        ]  # as `logs` writes them, bytes that are no text too
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                code = main.main(words)
        except (Exception, SystemExit):
            self.wrong.append(f"{name} | {about}: {traceback.format_exc().splitlines()[-3:]}")
            return
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in streams)
        if code not in (0, 1, 2) or (code == 2 and "fix:" not in err) or "Traceback" in err:
            self.wrong.append(f"{name} | {about}: {code} {err[-300:]}")
        if name.startswith("runs") and (code or other.name not in out):
            self.wrong.append(f"{name} | {about}: {code} without the others")


def tried(runs, tmp_path, rng: random.Random, values: int, commands_each: int) -> Trial:
    """Every damage of every file, and as many changed values; each with some of the commands."""
    local, other, sent = runs
    trial = Trial(tmp_path / "page.html")
    for run in (local, sent):
        for file, what, do in (*damages(run), *changed_values(run, rng, values)):
            possible = [*COMMANDS]
            if run is sent and what == "missing" and file.name in ("outcome.json", "hosts"):
                continue  # such a run is asked for in SageMaker
            trial.damage(other, run, file, what, do, rng.sample(possible, commands_each))
    return trial


def test_no_damage_of_a_run_folder_ends_a_command_with_a_traceback(runs, tmp_path):
    trial = tried(runs, tmp_path, random.Random(0), values=3, commands_each=1)
    assert trial.done >= 400 and not trial.wrong, f"{len(trial.wrong)} of {trial.done}:\n" + "\n".join(trial.wrong)


def test_a_result_that_says_what_no_measurement_does_is_reported_and_left_out(runs, capsys):
    [result] = runs[1].path.glob("hosts/*/opt/ml/output/data/*/result.json")
    operators = result.with_name("operators.json")
    before = result.read_text(), operators.read_text()
    result.write_text(json.dumps({"operators": [1], "training_images": "many", "anything": "x"}))
    operators.unlink()
    try:
        assert main.main(["diagnose", runs[1].name]) == 0
    finally:
        result.write_text(before[0])
        operators.write_text(before[1])
    reported = " ".join(capsys.readouterr().out.split())
    assert (
        "could not be read: result operators: input should be a valid dictionary, not [1]; result training_images: input "
        in reported
    )
    assert "should be a valid integer, not 'many'" in reported and "anything" not in reported


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_damage_of_a_run_folder_ends_a_command_with_a_traceback_in_many_more_trials(runs, tmp_path):
    trial = tried(runs, tmp_path, random.Random(1), values=8, commands_each=3)
    assert trial.done >= 1000 and not trial.wrong, f"{len(trial.wrong)} of {trial.done}:\n" + "\n".join(trial.wrong)

"""Every example runs: the Python of the documents and of the docstrings, and the commands of the documents as far as they can be told offline."""

from __future__ import annotations

import doctest
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher import emulator, study
from launcher.backends.plans import plan_config
from launcher.commands.main import read
from launcher.config import builtin_configs
from tests.conftest import ROOT, copy_few
from tests.docs.documents import YOURS, blocks, commands
from tests.entrypoints.teacher_caches import fill_pixels, filled

CONFIG = "configs/quickstart.yaml"

PRINTED = {
    "hyperparameters.epochs=5": r"Completed 0\.\d+ .*",
    "launcher.insight.measurements": r"\d+ % at \d+\.\d, of \d+ samples",
    "plan.estimator()": r"Completed \d+",
}
"""What stands in a block of Python -> the last line that it prints. Of others only that they end well is known."""

FAR_AWAY = ("check", "upload")
"""Examples that talk to AWS."""

MANY_RUNS = ("PreprocessingStudy", "ScalingStudy", "preprocessing", "scaling", "tune")
"""Examples that start several runs, or one that is measured."""


FIRST = "first.txt"
"""What does not hold of the package's own example."""


@pytest.fixture(scope="module")
def place(prepared, made_once, tmp_path_factory) -> Path:
    """A folder with the configs, some of their data, and the run of the package's own example, which other examples show."""

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "configs").symlink_to(ROOT / "configs")
        for source, keep in (("digits", 12), ("photos", 16), ("shapes", 16)):  # a batch and few more
            copy_few(prepared(source), folder / "data" / source, keep)
        (folder / "data" / "cutouts").symlink_to("shapes")  # whose pictures a package of Debian's brings
        (folder / "data" / "stamps").symlink_to("photos")  # as these
        (folder / "data" / "dinov2-small").mkdir()
        (folder / "data" / "dinov2-small" / "model.safetensors").touch()  # a package's, of 90 MB
        (folder / "data" / "stamps-unlabelled").mkdir()
        (folder / "data" / "stamps-unlabelled" / "unlabelled").symlink_to("../stamps/train")
        filled(folder / "bank", precision="int8")
        fill_pixels(folder / "pixel_bank")
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LAUNCHER_DEFAULTS", raising=False)
            patch.setenv("LAUNCHER_RUNS", str(folder / "runs"))
            patch.chdir(folder)
            (folder / FIRST).write_text(tried("launcher"))

    folder = tmp_path_factory.mktemp("examples") / "place"
    return shutil.copytree(made_once("examples", make), folder, symlinks=True)


@pytest.fixture
def there(place, monkeypatch, tmp_path) -> Path:
    """That folder as the current one, a run of the quickstart's teacher, and no credentials of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    monkeypatch.chdir(place)
    monkeypatch.setenv("LAUNCHER_RUNS", str(place / "runs"))
    return place


def tried(name: str) -> str:
    """Run the example in the docstring of a public name.

    Returns:
        What does not hold of it; "" if all does.
    """
    thing = launcher
    for part in name.split(".")[1:]:
        thing = emulator if part == "emulator" else getattr(thing, part)
    examples = doctest.DocTestParser().get_doctest(thing.__doc__ or "", {"launcher": launcher}, name, None, None)
    assert examples.examples, f"{name} is public and its docstring has no example"
    reported: list[str] = []
    found = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=reported.append)
    return "".join(reported) if found.failed else ""


def public() -> list:
    """Every public name, and the ones that they lead to."""
    names = [f"launcher.{name}" for name in launcher.__all__ if name != "study"]
    names += ["launcher", *(f"launcher.study.{name}" for name in study.__all__), "launcher.emulator.start"]
    return [pytest.param(name, marks=[pytest.mark.slow] * (name.rpartition(".")[2] in MANY_RUNS)) for name in names]


@pytest.mark.parametrize("name", public())
def test_the_example_in_a_docstring_runs(name, there, monkeypatch, tmp_path):
    for variable in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "LAUNCHER_DEFAULTS"):
        monkeypatch.setenv(variable, "")  # which is put back afterwards, whatever the example sets
        monkeypatch.delenv(variable)
    emulated = emulator.start([CONFIG], tmp_path) if name.split(".")[-1] in FAR_AWAY else None
    try:
        for variable, value in emulated.environment.items() if emulated is not None else ():
            monkeypatch.setenv(variable, value)
        logging.disable(logging.INFO)  # the SDK's, which says where it found no settings
        failed = (there / FIRST).read_text() if name == "launcher" else tried(name)
    finally:
        logging.disable(logging.NOTSET)
        if emulated is not None:
            emulated.close()
    assert failed == "", failed


@pytest.mark.parametrize(
    "document, text",
    [
        pytest.param(*block, marks=[pytest.mark.slow] * ('on="aws"' in block[1]))
        for block in blocks("python")
        if not re.match(r"# \w+\.py\n", block[1]) and "model_trainer" not in block[1]  # tests/aws/sdk_v3 runs that
    ],
)
def test_the_python_of_a_document_runs(document, text, there):
    command = [sys.executable, "-c", text]
    if 'on="aws"' in text:
        command = [sys.executable, "-m", "launcher", "emulate", CONFIG, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    for piece, line in PRINTED.items():
        assert piece not in text or re.fullmatch(line, done.stdout.splitlines()[-1]), done.stdout


def test_a_script_of_ones_own_as_in_the_documents_runs_and_is_checked(tmp_path):
    for document, text in blocks("python"):
        if match := re.match(r"# (\w+\.py)\n", text):
            assert document == "docs/your-own-script.md"
            (tmp_path / match[1]).write_text(text)
    job = {"name": "mine", "script": "train.py", "source": str(tmp_path), "hyperparameters": {"depth": 7}}
    run = launcher.run(launcher.plan(launcher.from_values(job)))
    assert run.wait(60) == "Completed" and "7" in [line for _, line in run.logs()]
    with pytest.raises(launcher.UserError, match="did you mean depth"):
        launcher.run(launcher.plan(launcher.from_values({**job, "hyperparameters": {"depht": 7}})))


@pytest.mark.parametrize("document, command", commands())
def test_a_command_of_a_document_is_one_and_its_job_has_no_mistake(document, command, there):
    options = read(shlex.split(command))
    if options.command == "emulate" and "launcher" in options.behind:
        options = read(options.behind[options.behind.index("launcher") + 1 :])
    for config in [options.config] if hasattr(options, "config") else getattr(options, "configs", []):
        known = config in YOURS or config in builtin_configs.names() or (ROOT / config).is_file()
        assert known, f"{document}: {config}"
    if options.command in ("plan", "run") and options.config not in YOURS:
        hosts = [f"compute.instance_count={options.hosts}"] if options.hosts else []
        made = plan_config(options.config, [*options.overrides, *hosts], on=options.on, smoke=options.smoke)
        assert [str(issue) for issue in made.errors if "no such run" not in issue.found] == []

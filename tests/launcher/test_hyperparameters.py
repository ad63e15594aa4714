"""Hyperparameters: the class that a script declares, and the trip of every type through the real toolkit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training.settings import read_settings

import launcher
from launcher.config import hyperparameters
from launcher.config.entrypoints import entrypoints_folder

KIT = entrypoints_folder()


def check(
    source: Path, values: dict, channels=("train", "validation", "teacher"), script="script.py"
) -> list[launcher.Issue]:
    return hyperparameters.check(source, script, values, channels)


@pytest.fixture
def user_source(tmp_path) -> Path:
    """A user's own folder: a script that needs torch, and its settings in a module of their own."""
    (tmp_path / "my_settings.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import Literal\n"
        "from training.settings import require\n"
        "@dataclass(frozen=True)\n"
        "class Mine:\n"
        "    depth: int\n"
        "    mode: Literal['fast', 'slow'] = 'fast'\n"
        "    rate: float = 0.1\n"
        "    def __post_init__(self):\n"
        "        require(('rate', self.rate > 0, 'above 0'))\n"
    )
    (tmp_path / "script.py").write_text(
        "import torch_that_is_not_here\nfrom my_settings import Mine\ndef main(settings: Mine): ...\n"
    )
    return tmp_path


def test_the_kits_scripts_declare_their_settings():
    assert hyperparameters.declared_settings(KIT / "train_kd.py") == (
        "training.settings.distillation",
        "DistillationSettings",
    )
    for script, module, name in (
        ("train_classifier.py", "settings.scripts", "ClassifierSettings"),
        ("train_segmentation.py", "settings.segmentation", "SegmentationSettings"),
    ):
        assert hyperparameters.declared_settings(KIT / script) == (f"training.{module}", name)


def test_a_users_own_class_is_checked_in_the_same_way_and_all_at_once(user_source):
    found = {issue.key: str(issue) for issue in check(user_source, {"dept": 3, "mode": "quick", "rate": -1})}
    assert "did you mean depth?" in found["hyperparameters.dept"]
    assert "missing" in found["hyperparameters.depth"]
    assert "one of fast, slow" in found["hyperparameters.mode"]
    assert "valid: above 0" in found["hyperparameters.rate"]
    assert check(user_source, {"depth": 3, "mode": "slow", "rate": 1}) == []


def test_checking_leaves_no_trace(user_source):
    before = sorted(path.name for path in user_source.rglob("*")), list(sys.path), set(sys.modules)
    check(user_source, {"depth": 3})
    assert (sorted(path.name for path in user_source.rglob("*")), list(sys.path), set(sys.modules)) == before


@pytest.mark.parametrize("text", ["1 / 0", "import sys; sys.exit(0)", "class Mine: ...", "raise ValueError('x')"])
def test_a_settings_module_without_the_dataclass_is_a_mistake(user_source, text):
    (user_source / "my_settings.py").write_text(text + "\n")
    [issue] = check(user_source, {"depth": 1})
    assert issue.level == "error" and issue.key == "script"


def test_a_script_that_is_not_utf_8_is_a_mistake_not_a_crash(user_source):
    (user_source / "script.py").write_bytes(b"x = '\xe9'\n")
    [issue] = check(user_source, {})
    assert issue.level == "error" and "script.py" in issue.found


def test_a_script_without_settings_passes_through_and_says_so(user_source):
    (user_source / "script.py").write_text("print(1)\n")
    [issue] = check(user_source, {"anything": 1})
    assert issue.level == "not checked" and issue.fix.endswith("see docs/your-own-script.md")


def test_a_script_without_settings_in_a_job_without_hyperparameters_leaves_nothing_unchecked(user_source):
    (user_source / "script.py").write_text("print(1)\n")
    assert check(user_source, {}) == []


def test_a_script_that_is_not_python_is_refused_with_its_line(user_source):
    (user_source / "script.py").write_text("x = 1\ndef main(:\n")
    [issue] = check(user_source, {})
    assert issue.level == "error" and "line 2" in issue.found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"epoch": 1}, "did you mean epochs?"),
        ({"epochs": 0}, "valid: at least 1"),
        ({"epochs": "many"}, "valid: a whole number"),
        ({"epochs": 1.5}, "valid: a whole number"),
        ({"epochs": True}, "valid: a whole number"),
        ({"horizontal_flip": "yes"}, "valid: true or false"),
        ({"max_grad_norm": "none"}, "a number or null"),
        ({"student_options": [1]}, "valid: a mapping"),
        ({"hard_label_weight": 1.2}, "from 0 to 1"),
        ({"teacher_options": {"depth": 1}}, "empty unless `teacher` names one model"),
        ({"x" * 257: 1}, "a name of 257 characters"),
        ({"teacher": "x" * 2500}, "2502 characters as JSON"),
        ({"teacher": "a\0b"}, "a NUL character"),
        ({"teacher": "\ud800"}, "half of a surrogate pair"),
        ({"sagemaker_program": "x"}, "begins with sagemaker_"),
        ({f"x{number}": 1 for number in range(101)}, "at most 100"),
        ({"temperature": math.nan}, "NaN, not a number\n  valid: a finite number\n  fix:   write a finite number"),
        ({"temperature": -math.inf}, "an infinite number (-inf)\n  valid: a finite number"),
        ({"student_options": {"scales": [1.0, math.inf]}}, "an infinite number (inf)\n  valid: a finite number"),
        ({"student_options": {"place": Path("x")}}, "quote it"),
    ],
)
def test_a_wrong_hyperparameter_says_what_is_valid(values, expected):
    found = check(KIT, {"student": "vit_tiny_patch16_224", **values}, script="train_kd.py")
    assert expected in "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"precision": "fp61"}, "did you mean fp16?"),
        ({"precision": "BF16"}, "did you mean bf16?"),
        ({"precision": "x"}, "correct precision"),
        ({"compile": "ture"}, "did you mean true?"),
        ({"trained_layers": "head"}, "write pretrained: true or channel, or trained_layers: all"),
    ],
)
def test_a_wrong_word_is_answered_with_the_one_that_is_meant(values, fix):
    [issue] = check(KIT, {"model": "resnet18", **values}, script="train_classifier.py")
    assert (issue.key, issue.fix) == (f"hyperparameters.{next(iter(values))}", fix)


def test_a_setting_in_a_group_gets_a_similar_word_too():
    values = {"student": "x", "teacher_cache": {"views": 2, "precision": "fp61"}}
    [issue] = check(KIT, values, script="train_kd.py")
    assert (issue.key, issue.fix) == ("hyperparameters.teacher_cache.precision", "did you mean fp16?")


def test_a_missing_setting_is_answered_with_the_example_of_its_docstring(user_source):
    [issue] = check(KIT, {}, script="train_classifier.py")
    assert issue.fix == "write model: vit_small_patch16_224"
    [issue] = check(user_source, {})
    assert issue.fix == "add depth"


def test_a_default_is_known_of_the_kits_settings_and_of_a_class_derived_from_them(user_source):
    name = "global_batch_size"
    assert hyperparameters.kit_default(KIT, "train_classifier.py", name) == 64
    assert hyperparameters.kit_default(user_source, "script.py", "mode") is None
    (user_source / "my_settings.py").write_text(
        "from dataclasses import dataclass\n"
        "from training.settings.scripts import TrainingSettings\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(TrainingSettings):\n"
        "    global_batch_size: int = 48\n"
    )
    assert hyperparameters.kit_default(user_source, "script.py", name) == 48
    (user_source / "script.py").write_text("print(1)\n")
    assert hyperparameters.kit_default(user_source, "script.py", name) is None


def test_a_channel_that_the_script_reads_must_be_there():
    found = check(KIT, {"student": "x"}, channels=["train"], script="train_kd.py")
    assert [issue.key for issue in found] == ["inputs.validation", "inputs.teacher"]
    assert (
        check(KIT, {"student": "x", "hard_label_weight": 1}, channels=["train", "validation"], script="train_kd.py")
        == []
    )


# -- the round trip ---------------------------------------------------------------------------------------------------

TOOLKIT = """
import json, sys
from sagemaker_training import environment
for line in sys.stdin:
    with open(environment.hyperparameters_file_dir, "w") as file:
        file.write(line)
    env = environment.Environment()
    print(json.dumps({"arguments": env.to_cmd_args(), "environment": env.to_env_vars()}), flush=True)
"""


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory):
    """AWS's toolkit in a process of its own: takes the text of hyperparameters.json, gives arguments and environment."""
    base = tmp_path_factory.mktemp("base")
    (base / "input/config").mkdir(parents=True)
    (base / "input/config/resourceconfig.json").write_text('{"current_host": "algo-1", "hosts": ["algo-1"]}')
    (base / "input/config/inputdataconfig.json").write_text("{}")
    process = subprocess.Popen(
        [sys.executable, "-c", TOOLKIT], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(base), "AWS_DEFAULT_REGION": "us-east-1"},
    )  # fmt: skip

    def ask(values: dict[str, Any]) -> dict[str, Any]:
        process.stdin.write(json.dumps(hyperparameters.encode(values)) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.wait(60)


@dataclass(frozen=True, kw_only=True)
class Everything:
    flag: bool
    count: int
    ratio: float
    name: str
    maybe: str | None
    limit: int | None
    names: list[str]
    numbers: list[float]
    table: dict[str, Any]
    mode: Literal["fast", "slow"]
    anything: Any = field(default=None)


text = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40
) | st.sampled_from(
    [
        "",
        "it's",
        '"',
        "'; echo foo",
        "-1",
        "--flag",
        "None",
        "null",
        "True",
        "1e-3",
        "[1]",
        "{}",
        " padded ",
        "ünï-码",
        "a\nb",
        "\\",
        "$HOME",
        "1_000",
    ]
)
number = st.floats(allow_nan=False, allow_infinity=False, width=64)  # no configuration may hold the others
whole = st.integers(-(2**62), 2**62)
json_value = st.recursive(
    st.none() | st.booleans() | whole | number | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.builds(
        Everything, flag=st.booleans(), count=whole, ratio=number, name=text, maybe=st.none() | text, limit=st.none() | whole,
        names=st.lists(text, max_size=5), numbers=st.lists(number, max_size=5), table=st.dictionaries(text, json_value, max_size=4),
        mode=st.sampled_from(["fast", "slow"]), anything=json_value,
    )
)  # fmt: skip
def test_every_type_survives_the_real_toolkit(toolkit, given_settings):
    answer = toolkit(vars(given_settings))
    assert read_settings(Everything, answer["arguments"], answer["environment"]) == given_settings


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.builds(
        lambda flag, count, ratio, name: {"flag": flag, "count": count, "ratio": ratio, "name": name},
        st.booleans(),
        whole,
        number,
        text,
    )
)
def test_scalars_survive_the_toolkits_command_line_too(toolkit, values):
    @dataclass(frozen=True, kw_only=True)
    class Scalars:
        flag: bool
        count: int
        ratio: float
        name: str

    Scalars.__annotations__ = {"flag": bool, "count": int, "ratio": float, "name": str}
    assert vars(read_settings(Scalars, toolkit(values)["arguments"], {})) == values


def test_values_reach_a_script_through_a_whole_run(script_job):
    values = {
        "text": "it's \"quoted\" '; echo foo",
        "negative": -1,
        "flag": False,
        "nothing": None,
        "list": ["a", 1, None],
        "unicode": "ünï-码",
    }
    job = script_job(
        """
        import json, os, pathlib, sys
        pathlib.Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps([sys.argv[1:], json.loads(os.environ["SM_HPS"])]))
        """,
        hyperparameters=values,
    )
    plan = launcher.plan(job)
    run = launcher.run(plan)
    assert run.wait(60) == "Completed"
    arguments, seen = json.loads((run.folder.host("algo-1") / "model/seen.json").read_text())
    assert seen == values
    assert list(plan.hosts[0].command[3:]) == arguments

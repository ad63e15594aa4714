"""Settings classes are read from the syntax tree: what the class itself would say, and nothing of the user's runs."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.config import hyperparameters
from launcher.config.entrypoints import entrypoints_folder, kit_modules
from launcher.config.settings_class import SettingsClasses

KIT = entrypoints_folder()

CLASSES = {
    "ClassifierSettings": ("my_scripts", {"model": "resnet18"}),
    "DistillationSettings": ("my_distillation", {"student": "resnet18"}),
    "SegmentationSettings": ("my_segmentation", {"model": "resnet18", "classes": 4}),
}
"""This kit's class -> the module of the user's that holds a copy of it, and the settings that it requires."""

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 31, 32, 224, 255, 256, 300, 301, 2**32, 2**70, 0.0, 0.1, 0.5, 1.0, 1.5, -0.5, 1e-9),
    *(float("inf"), "", "0", "1", "-1", "0.5", "1e3", "nan", "null", "None", "true", "False", "auto", "none", "fp16", "bf16"),
    *("dali", "cpu", "kl", "resnet18", "channel:", "channel:cache", "[]", "[1, 2]", "{}", '{"views": 2}', "{", " 1 ", "1_000", "ü"),
    *([], [1], [64, 64], [32, 31], [1, 2, 3], ["a"], ["a", "a", "b", "c"], ["a", "b", "c", "d"], ["a", " ", "c", "d"], [[1, 2, 3]]),
    *([[1, 2, 3]] * 4, [[0, 0, 300]] * 4, {}, {"views": 0}, {"views": 3, "top_k": "x"}, {"views": 1, "where": "channel:"}),
    *({"views": 1, "where": "channel:c"}, {"views": 1, "where": "channel:c", "complete": True}, {"depth": 1}, {"nope": 1}, {"in_chans": 1}, {"in_chans": 4}),
]  # fmt: skip

TOGETHER: list[dict[str, Any]] = [
    {},
    {"hard_label_weight": 1},
    {"hard_label_weight": 3, "teacher_loss_weight": 2},
    {"teacher": "resnet50", "teacher_pretrained": True},
    {"preprocessing": "dali"},
]
"""Settings that others' conditions look at."""


@pytest.fixture
def users_copy(tmp_path) -> Path:
    """This kit's settings in modules of the user's, which are read and not imported."""
    scripts = (KIT / "training/settings/scripts.py").read_text()
    (tmp_path / "my_scripts.py").write_text(scripts)
    for name in ("distillation", "segmentation"):
        text = (KIT / f"training/settings/{name}.py").read_text()
        (tmp_path / f"my_{name}.py").write_text(text.replace("training.settings.scripts", "my_scripts"))
    return tmp_path


def outcome(settings_module: Any, settings_class: type, values: dict[str, Any]) -> Any:
    """Everything that a check says: its problems, and the settings with the channels that they need."""
    made, problems = settings_module.check(settings_class, values)
    return problems, None if made is None else (dataclasses.asdict(made), made.channels())


@pytest.mark.parametrize(
    ("name", "share"),
    [*((name, 6) for name in CLASSES), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in CLASSES)],
)
def test_a_class_that_is_read_says_what_the_imported_one_says(users_copy, name, share):
    """One in `share` values of each field, another one from field to field."""
    module, required = CLASSES[name]
    compared = 0
    with kit_modules("training.settings") as (settings_module,):
        own = getattr(importlib.import_module(module.replace("my_", "training.settings.")), name)
        for index, field in enumerate(dataclasses.fields(own)):
            classes = SettingsClasses([users_copy, KIT], KIT)
            read = classes.get(module, name)
            assert read is not own and read.__module__ == SettingsClasses.__module__
            assert [each.name for each in dataclasses.fields(read)] == [each.name for each in dataclasses.fields(own)]
            for value in VALUES[index % share :: share]:
                for others in TOGETHER[
                    : 1 if field.name not in ("hard_label_weight", "teacher", "compose_augmentation") else None
                ]:
                    known = {key: given for key, given in others.items() if hasattr(own, key)}
                    values = {**required, **known, field.name: value}
                    expected = outcome(settings_module, own, values)
                    assert outcome(settings_module, read, values) == expected, values
                    compared += 1
            assert outcome(settings_module, read, {}) == outcome(settings_module, own, {})
            assert classes.unread == []
    assert compared > 3000 / share


def user_script(folder: Path, settings: str, script: str = "") -> Path:
    """A script whose settings class lies in a module beside it."""
    (folder / "my_settings.py").write_text("from dataclasses import dataclass, field\n" + settings)
    (folder / "script.py").write_text(script or "from my_settings import Mine\ndef main(settings: Mine): ...\n")
    return folder


def check(folder: Path, values: dict[str, Any]) -> list[launcher.Issue]:
    return hyperparameters.check(folder, "script.py", values, [])


MARK = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
"""Code that leaves a file where it runs."""


@pytest.mark.parametrize(
    "settings",
    [
        MARK + "@dataclass\nclass Mine:\n    depth: int = 1\n",
        "@dataclass\nclass Mine:\n    depth: int = 1\n    exec({MARK!r})\n",
        "@dataclass\nclass Mine:\n    depth: int = exec({MARK!r})\n",
        "@dataclass\nclass Mine:\n    depth: int = field(default_factory=lambda: exec({MARK!r}))\n",
        "@dataclass\nclass Mine:\n    depth: exec({MARK!r}) = 1\n",
        "@dataclass\nclass Mine:\n    depth: 'exec({MARK!r})' = 1\n",
        "@exec({MARK!r})\n@dataclass\nclass Mine:\n    depth: int = 1\n",
        "@dataclass\nclass Mine(exec({MARK!r})):\n    depth: int = 1\n",
        "@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n        exec({MARK!r})\n",
        "@dataclass\nclass Mine:\n    depth: int = 1\n    def channels(self):\n        return exec({MARK!r})\n",
        "@dataclass\nclass Mine:\n    depth: int = 1\n    @property\n    def size(self):\n        return exec({MARK!r})\n"
        "    def __post_init__(self):\n        self.size\n",
        "@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n"
        "        ().__class__.__base__.__subclasses__()[0].__init__.__globals__['__builtins__']['exec']({MARK!r})\n",
        "@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n        [e for e in [exec]][0]({MARK!r})\n",
        "@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n        print(open(__file__, 'w'))\n",
    ],
)
def test_nothing_of_the_users_runs(tmp_path, settings):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    folder = user_script(tmp_path, settings.replace("{MARK!r}", repr(code)))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    check(folder, {"depth": 3})
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ("import torch\n@dataclass\nclass Mine:\n    depth: int = 1\n", {"depth": "x"}, "valid: a whole number"),
        ("@dataclass\nclass Mine:\n    seconds: int = 60 * 60\n", {"second": 3}, "did you mean seconds?"),
        ("DEPTHS = (1, 2)\n@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n"
         "        if self.depth not in DEPTHS:\n            raise ValueError(f'depth: one of {len(DEPTHS)} depths')\n",
         {"depth": 3}, "valid: one of 2 depths"),
        ("from typing import Optional, Union\n@dataclass\nclass Mine:\n    rate: Optional[Union[int, float]] = None\n",
         {"rate": "x"}, "a whole number or a number or null"),
        ("import typing as t\n@dataclass\nclass Mine:\n    mode: 't.Literal[\"a\", \"b\"]' = 'a'\n", {"mode": "c"}, "one of a, b"),
        ("from training.settings.scripts import ClassifierSettings\n@dataclass(frozen=True, kw_only=True)\n"
         "class Mine(ClassifierSettings):\n    depth: int = 1\n", {"model": "x", "epochs": 0, "depth": 1}, "valid: at least 1"),
        ("from training.settings import limits, require, setting\n@dataclass\nclass Mine:\n    rate: float = setting(0.1, above=0)\n"
         "    def __post_init__(self):\n        require(*limits(self))\n", {"rate": 0}, "valid: above 0"),
    ],
)  # fmt: skip
def test_a_class_of_the_users_is_checked(tmp_path, settings, values, expected):
    [*_, issue] = check(user_script(tmp_path, settings), values)
    assert issue.level == "error" and expected in str(issue)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("import os\n@dataclass\nclass Mine:\n    depth: int = os.cpu_count()\n", "os"),
        ("from pydantic import BaseModel\nclass Mine(BaseModel):\n    depth: int = 1\n", "pydantic is not beside the script"),
        ("try:\n    from fast import Mine\nexcept ImportError:\n    from slow import Mine\n", "Mine cannot be read"),
        ("@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n        for _ in range(3): pass\n", "for _ in range(3)"),
        ("@dataclass\nclass Mine:\n    depth: int = 9 * 9 * 10**19\n", "10 ** 19"),
        ("A = [0] \nB = A + A\n" + "".join(f"B = B + B  # {i}\n" for i in range(3)) + "@dataclass\nclass Mine:\n    b: list = B\n", "B"),
        ("@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n"
         "        x = [1]\n" + "        x = x + x\n" * 40, "is too large"),
        ("@dataclass\nclass Mine:\n    a: 'Mine' = None\n", "Mine cannot be read"),
        ("@dataclass\nclass Mine:\n    depth: int = " + "-" * 5000 + "1\n", "my_settings.py"),
        ("@dataclass\nclass Mine:\n    depth: int = " + " + ".join("1" * 900) + "\n", "recursion"),
        ("@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n        x = " + " + ".join("1" * 900), "recursion"),
        ("@dataclass\nclass Mine:\n    depth: int = 1\n    def __post_init__(self):\n        x = sum([[1]], [])\n", "sum([[1]], [])"),
        ("def __getattr__(name):\n    return dataclass(type(name, (), {}))\n", "Mine cannot be read"),
        ("@dataclass\nclass Mine:\n    if True:\n        depth: int = 1\n", "my_settings.py:4: If in the body of Mine"),
        ("@dataclass\nclass Mine:\n    depth: int = 1\n    def channels(self): return 5\n", "channels() gives int"),
    ],
    ids=range(15),
)  # fmt: skip
def test_what_cannot_be_read_is_not_checked_and_says_why(tmp_path, settings, why):
    issues = check(user_script(tmp_path, settings), {"depth": 1})
    assert [issue.level for issue in issues] == ["not checked"], issues
    assert why in issues[0].found and "runs nothing of yours" in issues[0].fix


PLAIN = "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    depth: int = 1\n"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"configs/__init__.py": "from .base import Mine\n", "configs/base.py": PLAIN, "base.py": ""}, "from configs import Mine"),
        ({"configs/__init__.py": "", "configs/a.py": "from . import b\nMine = b.Mine\n", "configs/b.py": PLAIN}, "from configs.a import Mine"),
        ({"a/__init__.py": "", "a/b/__init__.py": "from ..c import Mine\n", "a/c.py": PLAIN, "c.py": ""}, "from a.b import Mine"),
        ({"conf.py": "", "conf/__init__.py": PLAIN}, "from conf import Mine"),
        ({"conf.py": PLAIN + '    "the depth"\n    ...\n    pass\n    channels: int = 3\n'}, "from conf import Mine"),
    ],
    ids=range(5),
)  # fmt: skip
def test_a_class_is_found_where_python_finds_it(tmp_path, files, line):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "script.py").write_text(f"{line}\ndef main(settings: Mine): ...\nprint(Mine(depth=2))\n")
    assert check(tmp_path, {"depth": 2}) == []
    [issue] = check(tmp_path, {"depth": "x"})
    assert issue.level == "error" and "whole number" in str(issue)
    subprocess.run([sys.executable, tmp_path / "script.py"], check=True, capture_output=True)


def test_a_changed_copy_of_the_kits_settings_is_not_taken_for_the_kits(tmp_path):
    own = tmp_path / "training/settings"
    own.mkdir(parents=True)
    (own / "__init__.py").write_bytes((KIT / "training/settings/__init__.py").read_bytes() + MARK.encode())
    text = "from training.settings import setting\n@dataclass\nclass Mine:\n    depth: int = setting(1)\n"
    [issue] = check(user_script(tmp_path, text), {"depth": 1})
    assert issue.level == "not checked" and not (own / "ran").exists()

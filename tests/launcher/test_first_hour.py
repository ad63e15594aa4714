"""The first hour with an installed wheel: built-in configs by name, a first config of one's own, and what explains both."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import yaml
from PIL import Image

import launcher
from launcher.commands import main, schema
from launcher.config import builtin_configs, settings_class, yaml_file
from launcher.config.schema import config_schema
from launcher.planner import starter
from launcher.prepare import prepare
from tests.conftest import ROOT

SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3, help="passes over the %(default)s images")
parser.add_argument("--kind", choices=["small", "large"], default="small")
parser.add_argument("--train", default=os.environ.get("SM_CHANNEL_TRAIN"))
print(parser.parse_args())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the built wheel's content, as pip lays it."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(place)]
    subprocess.run([*command, str(ROOT)], check=True)
    [wheel] = place.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(place / "installed")
    return place / "installed"


@pytest.fixture
def typed(installed, tmp_path):
    """Types a command of the wheel's in an empty folder."""
    here = tmp_path / "empty"
    here.mkdir()

    def run(*words: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "100"}
        return subprocess.run(
            [sys.executable, "-m", "launcher", *words],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    run.here = here
    return run


def images(folder: Path, split: bool = True) -> Path:
    """Two classes of three images each."""
    for part in ("train", "validation") if split else ("",):
        for label in ("cat", "dog"):
            (folder / part / label).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (16, 16), (40 * number, 90, 0)).save(folder / part / label / f"{number}.png")
    return folder


@pytest.mark.slow
def test_a_wheel_runs_its_built_in_configs_by_name_in_an_empty_folder(typed):
    refused = typed("run", "quickstart")
    assert refused.returncode == 2 and "launcher run quickstart_teacher" in refused.stderr
    assert "launcher prepare digits data/digits" in refused.stderr, "the fix is the command itself"
    assert typed("prepare", "digits", "data/digits").returncode == 0
    planned = json.loads(typed("plan", "quickstart_teacher", "--json").stdout)
    assert planned["job"]["name"] == "quickstart-teacher" and not planned["issues"]
    assert planned["channels"]["train"] == str(typed.here / "data/digits/train"), "relative to the current folder"
    done = typed("run", "quickstart_teacher", "--smoke")
    assert done.returncode == 0 and "Completed" in done.stdout, done.stdout + done.stderr


def test_a_wrong_name_of_a_config_names_the_nearest_and_all_there_are(typed):
    for wrong in ("quickstrt", "configs/quickstart.yaml"):
        done = typed("plan", wrong)
        assert done.returncode == 2 and "did you mean quickstart?" in done.stderr
        assert all(name in done.stderr for name in builtin_configs.names())


def test_a_file_goes_before_the_built_in_config_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("name: mine\n")
    assert yaml_file.read("quickstart").values == {"name": "mine"}
    Path("quickstart").unlink()
    assert yaml_file.read("quickstart").values["name"] == "quickstart"


def test_the_list_of_built_in_configs_has_the_first_sentence_of_each_head(typed):
    listed = json.loads(typed("explain", "--json").stdout)
    assert set(listed["configs"]) == set(builtin_configs.names()) and "train_kd.py" in listed["scripts"]
    assert all(text.endswith((".", '"', '."')) for text in listed["configs"].values())
    heads = {name: (ROOT / f"configs/{name}.yaml").read_text().replace("\n# ", " ") for name in listed["configs"]}
    assert all(text in heads[name] for name, text in listed["configs"].items())


def test_explain_says_what_a_setting_takes_what_it_means_and_what_a_config_sets(typed):
    found = json.loads(
        typed("explain", "quickstart", "temperature", "compute.max_hours", "spot", "--json").stdout or "{}"
    )
    assert found == {}, "spot is compute.spot"
    found = json.loads(typed("explain", "quickstart", "temperature", "compute.max_hours", "seed", "--json").stdout)
    [hours] = found["keys"]
    seed, temperature = found["settings"]
    assert (hours["value"], hours["default"], "672" in hours["takes"]) == (1.0, 24.0, True)
    assert (temperature["value"], temperature["takes"]) == (4, "a number above 0")
    assert "value" not in seed and seed["default"] == 0 and "augmentation" in seed["sentence"]
    [smoke] = json.loads(typed("explain", "quickstart", "smoke", "--json").stdout)["keys"]
    assert smoke["value"] == {"hyperparameters": {"max_steps": 3}} and "--smoke" in smoke["sentence"]
    text = typed("explain", "train_kd.py").stdout
    assert "teacher_cache.views" in text and "may change on resume" in text
    wrong = typed("explain", "quickstart", "temprature")
    assert wrong.returncode == 2 and "did you mean temperature?" in wrong.stderr


def test_explain_reads_a_script_of_ones_own_without_running_it(typed):
    (typed.here / "mine.py").write_text(SCRIPT + "open('ran', 'w')\n")
    found = {one["name"]: one for one in json.loads(typed("explain", "mine.py", "--json").stdout)["settings"]}
    assert found["epochs"]["default"] == 3 and found["epochs"]["sentence"] == "passes over the 3 images"
    assert found["kind"]["takes"] == "one of small, large"
    assert found["train"]["default_expression"] == "os.environ.get('SM_CHANNEL_TRAIN')"
    assert not (typed.here / "ran").exists()
    (typed.here / "mine.py").write_text("import training\nprint(1)\n")
    assert "neither a settings class nor an argparse parser" in typed("explain", "mine.py").stderr


def test_a_key_is_explained_without_a_config(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def explained(*words: str) -> tuple[int, str]:
        code = main.main(["explain", *words])
        return code, "".join(capsys.readouterr())

    code, text = explained("compute.spot", "name")
    assert code == 0 and text.startswith("compute.spot: keys of the config\n  name\n") and "lower price" in text
    assert "  compute.spot\n      true or false; default false\n" in text
    assert json.loads(explained("compute", "--json")[1])["keys"][0]["name"] == "compute"
    code, text = explained("compute.spott")
    assert code == 2 and "did you mean compute.spot?" in text
    assert "fix:   launcher explain quickstart lists them" in explained("compute.spot", "zzz")[1]
    for word in ("temperature", "hyperparameters.temperature"):
        code, text = explained(word)
        assert code == 2 and "launcher explain train_kd.py temperature" in text
    assert "no such file, and no built-in config" in explained("nowhere")[1]
    Path("compute").write_text("name: x\nscript: train_kd.py\n")
    assert explained("compute", "name")[1].startswith('compute: keys of the config\n  name: "x"\n'), "a file goes first"


def test_what_no_job_can_give_is_said_by_explain_and_left_out_by_init(tmp_path):
    several = (
        'parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="edges, %(default)s")\n'
        'parser.add_argument("--range", type=float, nargs=2)\n'
        'parser.add_argument("--layers", type=int, action="append", required=True)\n'
    )
    (tmp_path / "train.py").write_text(SCRIPT.replace("print", several + "print"))
    script = starter.look_at_script(tmp_path / "train.py")
    found = {one.name: one for one in script.settings}
    assert found["sizes"].takes == "a whole number, no list: SageMaker passes a list as one text"
    assert (found["sizes"].default_text, found["sizes"].sentence) == ("[1, 2]", "edges, [1, 2]")
    assert found["range"].takes.startswith("a number, 2 of them, which no job can give: SageMaker passes")
    text = starter.config_text(tmp_path / "job.yaml", script, None, "{uri: x}")
    assert "#   epochs: 3 " in text and "sizes" not in text and "range" not in text
    assert "#   layers:     # a whole number, no list: SageMaker passes a list as one text; required" in text


def test_each_class_is_read_once_for_the_schema_and_the_schema_is_made_once(monkeypatch):
    """Its docstrings were read field by field: 1,401 times, which took 7 s."""
    read = Counter[str]()
    getsource = inspect.getsource

    def counted(of: type) -> str:
        read[of.__qualname__] += 1
        return getsource(of)

    monkeypatch.setattr(settings_class.inspect, "getsource", counted)
    text = json.dumps(config_schema(), indent=1) + "\n"
    assert read["DistillationSettings"] == 1 == max(read.values())
    schema.text.cache_clear()
    assert text == schema.text() is schema.text(), "init compares it, then writes it"


def test_the_schema_takes_every_config_of_the_kit_and_no_wrong_key():
    made = config_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    judge = jsonschema.Draft202012Validator(made)
    for name in builtin_configs.names():
        values = yaml_file.read(name).values
        assert [error.message for error in judge.iter_errors(values)] == [], name
    good = yaml_file.read("quickstart").values
    for key, value in (
        ("compute", {"max_hour": 1}),
        ("comput", {}),
        ("distribution", "horovod"),
        ("hyperparameters", {**good["hyperparameters"], "temprature": 4}),
        ("hyperparameters", {**good["hyperparameters"], "temperature": 0}),
        ("hyperparameters", {**good["hyperparameters"], "student": 4}),
        ("smoke", {"hyperparameters": {"max_step": 3}}),
        ("inputs", {"train": {"folder": "a", "s3": "s3://bucket/b"}}),
        ("secrets", {"TOKEN": "the value itself"}),
    ):
        assert list(judge.iter_errors({**good, key: value})), (key, value)
    own = {"name": "own", "script": "train_kd.py", "source": "mine", "hyperparameters": {"anything": 1}}
    assert not list(judge.iter_errors(own)), "a script of one's own has its own settings"
    assert not list(judge.iter_errors({**good, "secrets": {"A": "env", "B": {"secretsmanager": "team/b"}}}))
    assert "softmax" in made["$defs"]["settings of train_kd.py"]["properties"]["temperature"]["description"]


def test_init_writes_a_config_for_a_folder_of_images_that_runs_as_it_is(typed):
    images(typed.here / "data/pets")
    done = typed("init")
    assert done.returncode == 0, done.stderr
    assert "plans without mistakes" in done.stdout and done.stdout.endswith("next: launcher run job.yaml\n")
    assert "SageMaker still needs role, region, output, image and compute.instance_type" in done.stdout
    text = (typed.here / "job.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=launcher.schema.json\n") and "6 images in 2 classes" in text
    written = json.loads((typed.here / "launcher.schema.json").read_text())
    assert not list(jsonschema.Draft202012Validator(written).iter_errors(yaml.safe_load(text.replace("1e-3", "0.001"))))
    again = typed("init")
    assert again.returncode == 2 and "--force" in again.stderr and (typed.here / "job.yaml").read_text() == text
    assert typed("init", "--force").returncode == 0
    ran = typed("run", "job.yaml", "--smoke", "hyperparameters.image_size=32")
    assert ran.returncode == 0 and "Completed" in ran.stdout, ran.stdout + ran.stderr


def test_images_that_a_script_does_not_name_are_an_input_all_the_same_and_no_part_of_its_code(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    images(Path("."))
    Path("train.py").write_text('import os, torch\nos.environ["SM_CHANNEL_TRAIN"]\n')
    assert main.main(["init"]) == 0, capsys.readouterr().err
    inputs = yaml.safe_load(Path("job.yaml").read_text())["inputs"]
    assert inputs == {name: {"folder": name} for name in ("train", "validation")}
    assert [file for file in launcher.plan(launcher.load("job.yaml")).files if file.path.startswith("validation")] == []


def test_images_elsewhere_that_a_script_does_not_name_are_no_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images(Path("pets"))
    Path("mine").mkdir()
    Path("mine/train.py").write_text('import os, torch\nos.environ["SM_CHANNEL_TRAIN"]\n')
    assert main.main(["init", "--script", "mine/train.py", "--images", "pets"]) == 0
    assert [*yaml.safe_load(Path("job.yaml").read_text())["inputs"]] == ["train"]


def test_a_config_for_the_images_of_this_folder_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images(Path("."))
    assert main.main(["init", "."]) == 2 and "launcher init --images .\n" in capsys.readouterr().err
    assert (
        main.main(["init"]) == 0
        and "# A classifier for the images in the current folder. " in Path("job.yaml").read_text()
    )


def test_init_counts_the_images_that_the_scripts_find_in_linked_folders_and_of_every_kind(tmp_path):
    for name in ("cats/0.gif", "cats/1.JPG", "dogs/2.gif"):
        file = tmp_path / "elsewhere" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "pets").mkdir()
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).symlink_to(tmp_path / "elsewhere" / name)
    (tmp_path / "elsewhere/dogs/all").symlink_to(".")
    found = starter.look_at_images(tmp_path / "pets")
    assert (found.classes, found.count) == (2, 3)
    with pytest.raises(launcher.UserError, match=r"valid: .*\.gif"):
        (tmp_path / "empty").mkdir()
        starter.look_at_images(tmp_path / "empty")


def test_what_init_leaves_as_comments_for_sagemaker_is_all_that_sagemaker_needs(typed):
    images(typed.here / "pets")
    assert typed("init", "pets.yaml", "--images", "pets").returncode == 0
    file = typed.here / "pets.yaml"
    kept = [line for line in file.read_text().splitlines() if not line.startswith("# For")]
    keys = ("# role:", "# region:", "# output:", "# image:", "  # instance_type:")
    file.write_text("\n".join(line.replace("# ", "", 1) if line.startswith(keys) else line for line in kept))
    planned = json.loads(typed("plan", "pets.yaml", "--on", "aws", "--json").stdout)
    assert [issue for issue in planned["issues"] if issue["level"] == "error"] == []
    assert planned["request"]["ResourceConfig"]["InstanceType"] == "ml.g5.xlarge"


def test_init_reads_a_script_of_ones_own_and_gives_it_the_images(typed):
    images(typed.here / "a folder/it's", split=False)
    (typed.here / "mine").mkdir()
    (typed.here / "mine/train.py").write_text(SCRIPT)
    done = typed("init", "own.yaml", "--script", "mine/train.py", "--images", "a folder/it's")
    assert done.returncode == 0, done.stderr + done.stdout
    values = yaml.safe_load((typed.here / "own.yaml").read_text())
    assert values["inputs"] == {"train": {"folder": "a folder/it's"}} and values["distribution"] == "none"
    assert "#   epochs: 3     # a whole number; passes over the 3 images" in (typed.here / "own.yaml").read_text()
    required = SCRIPT.replace("print", 'parser.add_argument("--mean", type=float, required=True)\nprint')
    (typed.here / "mine/train.py").write_text(required)
    done = typed("init", "own.yaml", "--script", "mine/train.py", "--force")
    assert (
        done.returncode == 2 and "hyperparameters.mean: missing" in done.stdout and "next: launcher plan" in done.stdout
    )


def not_to_start_from(here: Path) -> None:
    """Images that nobody has split, and scripts of which one has a name that SageMaker does not take."""
    for name in ("unsplit", "un split", "data"):
        images(here / name, split=False)
    for name in ("träin ing.py", "train_ing.py"):
        (here / name).write_text(SCRIPT)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--script", "nowhere.py"], "nowhere.py: no such file"),
        (["--images", "nowhere"], "nowhere: no such folder"),
        (["--images", "empty"], "empty: no images"),
        (["--images", "unsplit"], "launcher prepare unsplit data/unsplit-split"),
        (["--images", "unsplit/cat"], "cannot tell the classes"),
        (["--images", "un split"], "launcher prepare 'un split' 'data/un split-split', which"),
        (["--images", "un split"], "then launcher init --images 'data/un split-split'"),
        (["--images", "data"], "launcher prepare data data-split, which"),
        (["--script", "träin ing.py"], "träin ing.py\n    valid: a file name of letters, digits and . _ + -\n"),
        (["--script", "träin ing.py"], "fix:   rename it: mv 'träin ing.py' train_ing_2.py\n"),
        (["no such/job.yaml", "--images", "unsplit"], "mkdir -p 'no such'"),
        (["job.json", "--images", "unsplit"], "write job.json.yaml"),
        (["no/job.yaml", "--images", "unsplit"], "mkdir -p no"),
        ([], "neither one training script nor one folder of images"),
    ],
)
def test_init_refuses_what_it_cannot_start_from_and_writes_nothing(typed_here, tmp_path, monkeypatch, words, said):
    (tmp_path / "empty").mkdir()
    if words:
        not_to_start_from(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = typed_here("init", *words)
    assert done.returncode == 2 and said in done.stderr, done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.yaml")) and not list(tmp_path.rglob("*.schema.json"))


def test_a_wheel_refuses_what_init_cannot_start_from_too(typed):
    done = typed("init")
    assert done.returncode == 2 and "neither one training script nor one folder of images" in done.stderr, done.stderr
    not_to_start_from(typed.here)
    done = typed("init", "--script", "träin ing.py")
    assert done.returncode == 2 and "fix:   rename it: mv 'träin ing.py' train_ing_2.py\n" in done.stderr, done.stderr
    assert not list(typed.here.rglob("*.yaml")) and not list(typed.here.rglob("*.schema.json"))


def test_init_never_offers_to_overwrite_a_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    for words in (["train.py"], ["train.py", "--force"]):
        assert main.main(["init", *words]) == 2
        reported = capsys.readouterr().err
        assert "fix:   launcher init --script train.py\n" in reported and "--force" not in reported
    assert Path("train.py").read_text() == SCRIPT
    assert main.main(["init", "--script", "train.py"]) == 0


@pytest.mark.parametrize("given", ["data", ".", "link", "my pics"])
def test_init_suggests_a_target_that_prepare_takes(tmp_path, monkeypatch, given):
    here = tmp_path / "here"
    images(here / ("" if given == "." else "my pics" if given == "my pics" else "data"), split=False)
    (here / "link").symlink_to("data")
    monkeypatch.chdir(here)
    with pytest.raises(launcher.UserError) as refused:
        starter.config_text(Path("job.yaml"), None, starter.look_at_images(Path(given)), "{uri: x}")
    words = shlex.split(refused.value.issues[0].fix.partition(", which")[0])
    assert words[:3] == ["launcher", "prepare", given]
    assert "4 training and 2 validation images in 2 classes" in prepare(*words[2:])
    assert sorted(starter.look_at_images(Path(words[3])).channels) == ["train", "validation"]


def test_init_names_the_scripts_and_folders_among_which_to_choose(typed):
    for name in ("train.py", "eval it.py"):
        (typed.here / name).write_text(SCRIPT)
    done = typed("init")
    assert "is here; 2 training scripts are: eval it.py, train.py\n" in done.stderr
    assert "fix:   choose one: launcher init --script 'eval it.py'\n" in done.stderr
    for name in ("a", "b"):
        images(typed.here / name, split=False)
    assert "train.py; 2 folders of images are: a, b\n" in typed("init").stderr


def test_init_suggests_a_folder_of_images_that_it_takes_or_how_to_split_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("imgs", "more"):
        images(Path(name), split=False)
    fix = starter.nothing_found(Path(".")).fix
    assert fix.startswith(
        "none has held-out images; choose one: launcher prepare imgs data/imgs-split, which holds out"
    )
    images(Path("pets"))
    assert starter.nothing_found(Path(".")).fix == "choose one: launcher init --images pets"


def test_the_commands_that_init_suggests_can_be_pasted(typed):
    (typed.here / "train.py").write_text(SCRIPT)
    done = typed("init", "a b.yaml")
    assert done.stdout.endswith("next: launcher run 'a b.yaml'\n"), done.stdout + done.stderr
    text = (typed.here / "a b.yaml").read_text()
    assert "# Plan:   launcher plan 'a b.yaml' " in text and "# Run:    launcher run 'a b.yaml'\n" in text
    assert "`launcher explain 'a b.yaml'`" in text


def test_init_tells_every_mistake_that_keeps_the_job_from_sagemaker(typed):
    (typed.here / "train.py").write_text(SCRIPT)
    with (typed.here / "weights.bin").open("wb") as file:
        file.truncate(101 * 2**20)
    done = typed("init")
    assert done.returncode == 0 and "it plans without mistakes on this machine\n" in done.stdout, done.stderr
    reported = done.stdout.partition("before it runs on SageMaker:\n")[2]
    assert reported.startswith("  source: 10") and "MiB, most of it weights.bin (101.0 MiB)" in reported, done.stdout
    assert "role: missing" not in reported, "which `still needs` says"


@pytest.mark.parametrize(
    "name", ["2024", "1e-3", "0x1F", "no", "on", "null", "2024-01-01", "2024-99-99", "True", "cats"]
)
def test_init_writes_a_name_that_loads_as_it_is(tmp_path, name):
    images(tmp_path / "pets")
    text = starter.config_text(Path(f"{name}.yaml"), None, starter.look_at_images(tmp_path / "pets"), "{uri: x}")
    assert yaml_file.parse(text, "x").values["name"] == name == yaml.safe_load(text)["name"]
    assert ('name: "' in text) == (name != "cats")


def test_init_finds_the_script_beside_what_editors_leave_and_folders_of_its_kind(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / ".#train.py").symlink_to("me@host.1234")
    (tmp_path / ".old.py").write_text(SCRIPT)
    (tmp_path / "package.py").mkdir()
    assert starter.find_script(tmp_path) == tmp_path / "train.py"


def test_settings_that_no_class_can_have_are_a_mistake_and_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine_settings.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Mine:\n    rate: float = 0.1\n    steps: int\n"
    )
    Path("mine.py").write_text("from mine_settings import Mine\n\n\ndef main(settings: Mine):\n    pass\n")
    for words in (["explain", "mine.py"], ["init", "job.yaml", "--script", "mine.py"]):
        assert main.main(words) == 2
        reported = capsys.readouterr().err
        assert "Mine cannot be made: TypeError: non-default argument 'steps' follows default argument" in reported
    assert not Path("job.yaml").exists()


def test_a_folder_of_data_hides_no_built_in_config_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").mkdir()
    assert launcher.load("quickstart").name == "quickstart"


def test_a_setting_is_explained_by_the_key_that_messages_have(capsys):
    assert main.main(["explain", "quickstart", "hyperparameters.temperature"]) == 0
    assert "temperature" in capsys.readouterr().out

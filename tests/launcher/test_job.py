"""Jobs: what a config may say, and what every mistake in it is answered with."""

import pytest
from pydantic import ValidationError

import launcher

GOOD = """
name: test
script: train_kd.py
inputs:
  train: {folder: data}
hyperparameters: {student: vit_tiny_patch16_224}
"""


def load(tmp_path, text, *overrides, smoke=False):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return launcher.load(file, overrides, smoke=smoke)


def test_a_job_is_frozen(tmp_path):
    job = load(tmp_path, GOOD)
    with pytest.raises(ValidationError):
        job.name = "other"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nam: x", ["nam (line 7): unknown key", "did you mean name?"]),
        (
            "compute: {instance_cout: 2}",
            ["compute.instance_cout (line 7): unknown key", "did you mean instance_count?"],
        ),
        ("compute: {instance_count: two}", ["'two' (text)", "valid: a whole number from 1", "write instance_count: 2"]),
        ("compute: {instance_count: 0}", ["0 (a whole number)", "a whole number from 1"]),
        ("compute: {instance_count: 1.5}", ["1.5 (a number)"]),
        ("compute: {max_hours: 1000}", ["at most 672"]),
        ("compute: 2", ["compute (line 7): 2 (a whole number)", "valid: a mapping"]),
        ("distribution: torchrn", ["did you mean torchrun?"]),
        ("distribution: 3", ["smddp, torchrun or none"]),
        ("distribution: ddp", ["did you mean torchrun?"]),
        ("image: {framework_version: 2.10, python: py312}", ['framework_version: "2.1", or "2.10" if that is meant']),
        ("image: {framework_version: 2.8.0, python: 3.10}", ["write python: py310"]),
        ("image: {framework_version: 2.8.0, python: 3.12}", ["write python: py312"]),
        ("image: {framework_version: 2.8.0, python: '3.9'}", ["write python: py39"]),
        ("output: s3://b/c", ["valid: an s3:// address; a bucket's name has 3 to 63 characters"]),
        (
            "profiling: {rules: {A: 3}}",
            ["profiling.rules.A (line 7): 3 (a whole number)", "valid: a mapping", "write under A: one key"],
        ),
        ("temperature: 2", ["temperature (line 7): unknown key", "write it under hyperparameters: temperature: 2"]),
        ("max_hours: 2", ["max_hours (line 7): unknown key", "did you mean compute.max_hours?"]),
        ("temprature: 2", ["did you mean hyperparameters.temperature?"]),
        ("environment: {DEBUG: 1}", ['quote it: DEBUG: "1"']),
        ("environment: {DEBUG: true}", ['quote it: DEBUG: "true"']),
        ("hyperparameters: [1]", ["given twice"]),
        ("source: ''", ["source (line 7): ''"]),
        ("smoke: 3", ["list the keys that --smoke changes under smoke"]),
        ("smoke: {compute: {instance_count: none}}", ["smoke.compute.instance_count (line 7): 'none'"]),
        ("smoke: {epochs: 1}", ["smoke.epochs (line 7): unknown key", "write it under hyperparameters: epochs: 1"]),
    ],
)
def test_a_mistake_names_the_key_what_is_valid_and_the_fix(tmp_path, line, expected):
    with pytest.raises(launcher.UserError) as error:
        load(tmp_path, GOOD + line + "\n")
    for text in expected:
        assert text in str(error.value)
    assert all(issue.fix for issue in error.value.issues)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("inputs.train=data", "write train: {folder: data}"),
        ("inputs.train=", "valid: folder; file; run; s3; fsx; efs\n    fix:   write train: {folder: data/train}"),
        (
            "inputs.validation=3",
            "valid: folder; file; run; s3; fsx; efs\n    fix:   write validation: {folder: data/validation}",
        ),
        ("inputs.train={foldr: data}", "did you mean folder?"),
        ("epochs=2", "fix:   write hyperparameters.epochs=2"),
        ("student=resnet18", "fix:   write hyperparameters.student=resnet18"),
        ("student=password=hunter22", "fix:   write hyperparameters.student=…"),
        (
            "smoke.x=1",
            "smoke: a section of config files only, which no override changes\n    fix:   override the key itself",
        ),
        (
            "inputs.train={folder: a, run: b}",
            "folder and run given\n    fix:   give exactly one",
        ),
        ("inputs.train={}", "none of folder, file, run, s3, fsx, efs given"),
        ("name=-x", "letters, digits and hyphens"),
        ("name=under_score", "letters, digits and hyphens"),
        (f"name={'x' * 43}", "42 characters at most"),
        ("script=train.sh", "a .py file"),
        (
            "script='mein träin ing.py'",
            "has other characters than letters, digits and . _ + - /\n    fix:   rename the file",
        ),
        ("script='sub/träin ing.py'", "and write script: sub/train_ing.py"),
        ("script='日本.py'", "and write script: train.py"),
        (
            "script=/home/me/train.py",
            "begins at /, not in the source folder\n    fix:   write its folder as source, and script: train.py",
        ),
        ("compute.max_hours=0", "above 0"),
        ("compute.spot='yes'", "write spot: true or spot: false"),
        ("network=[a]", "write under network: subnets or security_groups or isolation or encrypt_traffic"),
        ("tags={a: 1}", "valid: text"),
        (
            "image.framework_version=2.1",
            """quote it: image.framework_version='"2.1"', or '"2.10"' if that is meant""",
        ),
        ("image.python=3.10", "fix:   write image.python=py310"),
        ("environment.DEBUG=1", """fix:   quote it: environment.DEBUG='"1"'"""),
        ("image={python: py310}", "python without framework_version\n    fix:   add framework_version"),
    ],
)
def test_a_wrong_override_is_answered_like_a_wrong_line(tmp_path, override, expected):
    with pytest.raises(launcher.UserError) as error:
        load(tmp_path, GOOD, override)
    assert expected in str(error.value)


def test_a_bound_is_suggested_as_people_write_it(tmp_path):
    for key, value, fix in (("max_hours", 1000, "672"), ("instance_count", 0, "1")):
        with pytest.raises(launcher.UserError) as error:
            load(tmp_path, GOOD, f"compute.{key}={value}")
        assert [issue.fix for issue in error.value.issues] == [f"write {key}: {fix}"]


def test_what_a_wrong_section_leaves_can_still_be_checked(tmp_path):
    """Without its version the image is no image, so that it goes as a whole."""
    with pytest.raises(launcher.UserError) as error:
        load(tmp_path, GOOD, "image={framework_version: 2.0, python: py310}", "inputs.train={}", "compute.spot=3")
    assert len(error.value.issues) == 3
    rest = error.value.rest
    assert rest.image is None and "train" not in rest.inputs and not rest.compute.spot and rest.script


def test_all_mistakes_come_at_once(tmp_path):
    text = "nme: x\nscript: 3\ncompute: {instance_count: -1, volume: 3}\ndistribution: mpi\nenvironment: {A: 1}\n"
    with pytest.raises(launcher.UserError) as error:
        load(tmp_path, text, "plain", "x.y=1")
    keys = [issue.key.split(" ")[0] for issue in error.value.issues]
    assert sorted(keys) == [
        "compute.instance_count",
        "compute.volume",
        "distribution",
        "environment.A",
        "name",
        "nme",
        "plain",
        "script",
        "x",
    ]


def test_smoke_changes_what_its_section_says_and_overrides_come_last(tmp_path):
    text = GOOD + "smoke: {compute: {instance_count: 1}, hyperparameters: {epochs: 1, seed: 3}}\n"
    job = load(tmp_path, text, "hyperparameters.seed=7", smoke=True)
    assert job.hyperparameters == {"student": "vit_tiny_patch16_224", "epochs": 1, "seed": 7}
    assert load(tmp_path, text).hyperparameters == {"student": "vit_tiny_patch16_224"}


def test_smoke_without_a_section_is_refused(tmp_path):
    with pytest.raises(launcher.UserError, match="no smoke section"):
        load(tmp_path, GOOD, smoke=True)


def test_from_values_takes_a_plain_mapping():
    assert launcher.from_values({"name": "a", "script": "b.py"}).compute.instance_count == 1
    with pytest.raises(launcher.UserError, match="did you mean script"):
        launcher.from_values({"name": "a", "scrpt": "b.py"})

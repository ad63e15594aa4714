"""Several students of one job, on the launcher's side: checked offline, planned, shown side by side, one of them an input."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.aws import request
from launcher.commands.main import main
from launcher.runner.labelling import labelling
from tests.conftest import job_of, shared_store, write_batch

SCRIPT = """
    import json, os, pathlib, shutil
    output, model = (pathlib.Path(os.environ[name]) for name in ("SM_OUTPUT_DATA_DIR", "SM_MODEL_DIR"))
    students = json.loads(os.environ["SM_HPS"]).get("students")
    (output / "algo-1").mkdir(parents=True, exist_ok=True)
    for name in students or [""]:
        (model / name).mkdir(exist_ok=True)
        (model / name / "config.json").write_text(json.dumps({"architecture": name or "alone"}))
    of_each = {name: {"model": "vit", "parameters": 1234, "validation_accuracy": accuracy}
               for name, accuracy in zip(students or [], (0.5, 0.75))}
    result = {"students": of_each} if students else {"model": "vit", "parameters": 1234, "validation_accuracy": 0.9}
    settings = {"hard_label_weight": 0.5, "students": students}
    (output / "algo-1/result.json").write_text(json.dumps({**result, "steps": 3, "settings": settings}))
    if "SM_CHANNEL_TEACHER" in os.environ:
        shutil.copytree(os.environ["SM_CHANNEL_TEACHER"], output / "seen")
"""

TWO = {"tiny": {"hard_label_weight": 1}, "wide": {}}


def distillation(tmp_path: Path, **hyperparameters: Any) -> launcher.Job:
    write_batch(tmp_path / "train")
    for part in ("validation", "teacher"):
        (tmp_path / part / "0").mkdir(parents=True, exist_ok=True)
    return launcher.from_values(
        {
            "name": "many",
            "script": "train_kd.py",
            "inputs": {part: {"folder": str(tmp_path / part)} for part in ("train", "validation", "teacher")},
            "hyperparameters": hyperparameters,
        }
    )


def ran(job: launcher.Job) -> launcher.Run:
    run = launcher.run(launcher.plan(job))
    assert run.wait(60) == "Completed", "\n".join(line for _, line in run.logs())
    return run


def test_every_mistake_in_a_students_settings_is_found_by_its_name_before_anything_starts(tmp_path):
    students = {
        "tiny": {"student": "vit_tiny_patch16_224", "image_size": 32, "epochs": 3, "lr": 0.1},
        "wide": {"student": "resnet81", "method": "dkt", "learning_rate": -1},
        "Bad-Name": {},
    }
    planned = launcher.plan(distillation(tmp_path, students=students, weight_decay=-1, tempreature=3))
    found = {issue.key: issue for issue in planned.errors}
    where = "hyperparameters.students"
    assert found.keys() == {
        *(f"{where}.tiny.{name}" for name in ("image_size", "epochs", "lr")),
        *(f"{where}.wide.{name}" for name in ("student", "method", "learning_rate")),
        *(f"{where}.Bad-Name", f"{where}.Bad-Name.student"),
        *("hyperparameters.weight_decay", "hyperparameters.tempreature"),
    }
    assert found[f"{where}.tiny.image_size"].found == "one for all students"
    assert "learning_rate" in (found[f"{where}.tiny.image_size"].valid or "")
    assert found[f"{where}.Bad-Name.student"].found == "missing"
    assert "resnet" in found[f"{where}.wide.student"].fix


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"students": {}}, "students"),
        ({"students": {f"s{number}": {} for number in range(25)}}, "students"),
        ({"students": {"a": {"student_options": {"in_chans": 1}}, "b": {}}}, "students"),
        ({"students": {"a": {"hard_label_weight": 1}, "b": {}}, "unlabelled": {}}, "students.a.unlabelled"),
        ({"students": {"a": {"hard_label_weight": 1}}, "teacher_cache": {"views": 1}}, "students.a.teacher_cache"),
        (
            {
                "students": {"a": {}, "b": {}},
                "teacher_cache": {"views": 1},
                "copy_stream": True,
                "teacher_stream": True,
            },
            "teacher_cache",
        ),
        ({"students": {"a": {"seed": -1}, "b": {}}}, "students.a.seed"),
        ({"students": {"a": 3}}, "students"),
    ],
)
def test_what_students_cannot_be_is_refused(tmp_path, changes, key):
    planned = launcher.plan(distillation(tmp_path, student="resnet18", **changes))
    assert f"hyperparameters.{key}" in [issue.key for issue in planned.errors]


def test_a_teacher_is_asked_for_where_any_student_learns_from_one(tmp_path):
    def missing(**hyperparameters: Any) -> list[str]:
        job = distillation(tmp_path, student="resnet18", **hyperparameters)
        inputs = {
            name: given for name, given in job.model_dump(exclude_none=True)["inputs"].items() if name != "teacher"
        }
        without = launcher.from_values({**job.model_dump(exclude_none=True, exclude={"secrets"}), "inputs": inputs})
        return [issue.key for issue in launcher.plan(without).errors]

    assert missing(students=TWO) == ["inputs.teacher"]
    assert missing(students={"tiny": {"hard_label_weight": 1}}) == []
    assert missing(students={"tiny": {}}, hard_label_weight=1) == []
    complete = {"views": 1, "where": "channel:bank", "complete": True}
    assert missing(students={**TWO, "labels": {"hard_label_weight": 1}}, teacher_cache=complete) == ["inputs.bank"]
    assert missing(students={"tiny": {"pretrained": "channel", "hard_label_weight": 1}}) == ["inputs.weights"]


def test_a_plan_shows_each_student_and_asks_sagemaker_for_its_metrics(tmp_path):
    job = distillation(tmp_path, student="resnet18", students=TWO)
    planned = launcher.plan(job)
    assert "  student     tiny: hard_label_weight 1\n  student     wide: as the others\n" in str(planned)
    assert "student tiny" in planned._repr_html_()
    asked = request.metrics(job)
    assert asked["tiny:validation_accuracy"] == " tiny/validation_accuracy ([0-9.]+)" and "wide:loss" in asked
    assert len(asked) <= 40
    alone = distillation(tmp_path, student="resnet18")
    assert not any(":" in name for name in request.metrics(alone)) and "  student " not in str(launcher.plan(alone))


@pytest.fixture(scope="module")
def store_of_three(tmp_path_factory) -> Path:
    """The store with the runs of `trained`."""
    place = tmp_path_factory.mktemp("trained")
    students = {"hyperparameters": {"students": TWO}}
    (place / "source").mkdir()
    (place / "source/train_kd.py").write_text(textwrap.dedent(SCRIPT))
    with shared_store(place):
        ran(job_of(place / "source", SCRIPT, name="many", script="train_kd.py", **students))
        ran(job_of(place / "source", SCRIPT, name="single"))
        with_features = SCRIPT.replace('0.5, "students"', '0.5, "features": 128, "students"')
        ran(job_of(place / "source", with_features, name="school", **students))
    return place / "store"


@pytest.fixture
def trained(store_of_three, monkeypatch) -> None:
    """Three runs are there: `many`, students of this kit's script, or of a copy as a replay's; `single`, without students; `school`, of
    another script that gives words of ours a meaning of its own."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(store_of_three))


def test_the_students_of_a_run_stand_side_by_side(trained, capsys):
    assert main(["compare", "many", "single"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: [cell.strip() for cell in row if cell.strip()] for row in rows if row[0]}
    assert rows["many/tiny"][2] == "labels" and "50.00 %" in rows["many/tiny"]
    assert rows["many/wide"][2] == "labels 0.5 + teacher 0.5" and "75.00 %" in rows["many/wide"]
    assert "90.00 %" in rows["single"]
    assert main(["show", "many"]) == 0
    shown = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(shown) if line.startswith("  student "))
    assert shown[head].split() == ["student", "model", "parameters", "accuracy"]
    assert [line.split() for line in shown[head + 2 : head + 4]] == [
        ["tiny", "vit", "1234", "0.5000"],
        ["wide", "vit", "1234", "0.7500"],
    ]
    assert main(["runs"]) == 0
    assert "50.00 % to 75.00 %" in capsys.readouterr().out


def test_one_student_of_a_run_is_anothers_input_and_one_that_it_has_not_trained_is_refused(script_job, trained):
    job = script_job(SCRIPT, name="next", inputs={"teacher": {"run": "many", "student": "wide"}})
    planned, many = launcher.plan(job), launcher.attach("many")
    assert planned.kept_job()["inputs"]["teacher"] == {"run": many.name, "student": "wide"}
    for given, found, fix in (
        ({"run": "many"}, "trained several students", "{run: many, student: tiny}; they are tiny, wide"),
        ({"run": "many", "student": "wid"}, "trained no student wid", "did you mean wide?"),
        ({"run": "single", "student": "tiny"}, "no such folder", "{run: single}"),
    ):
        [issue] = launcher.plan(script_job(SCRIPT, name="next", inputs={"teacher": given})).errors
        assert issue.key == "inputs.teacher" and found in issue.found and fix in issue.fix
    run = ran(job)
    assert (run.folder.host("algo-1") / "output/data/seen/config.json").read_text() == '{"architecture": "wide"}'


def test_a_student_is_found_on_the_host_that_trained_whatever_its_number(script_job, tmp_path):
    """Preprocessing hosts come first, and write no model."""
    ends = "import os\nif os.environ['SM_CURRENT_INSTANCE_GROUP'] == 'cpus': raise SystemExit\n"
    (tmp_path / "source").mkdir()
    (tmp_path / "source/train_kd.py").write_text(ends + textwrap.dedent(SCRIPT))
    groups = [{"name": name, "instance_type": "ml.c5.xlarge", "instance_count": 1} for name in ("cpus", "gpus")]
    compute = {"instance_groups": groups, "training_groups": ["gpus"]}
    job = {"name": "many", "script": "train_kd.py", "compute": compute, "hyperparameters": {"students": TWO}}
    many = ran(script_job("", **job))
    planned = launcher.plan(script_job(SCRIPT, name="next", inputs={"teacher": {"run": "many", "student": "wide"}}))
    assert planned.errors == ()
    assert planned.channels["teacher"] == str(many.folder.host("algo-2") / "model/wide")


def test_what_another_script_calls_students_is_not_asked_for(script_job, trained):
    assert not launcher.plan(script_job(SCRIPT, name="next", inputs={"teacher": {"run": "school"}})).errors


def test_results_of_another_script_are_compared_whatever_it_calls_its_settings(trained, capsys):
    assert launcher.attach("school").result()["settings"]["features"] == 128
    assert main(["compare", "school"]) == 0 and "labels 0.5 + teacher 0.5  " in capsys.readouterr().out


def test_a_teacher_for_students_of_other_channels_labels_for_them(tmp_path):
    about = {"architecture": "resnet18", "pretrained_cfg": {"input_size": [1, 32, 32]}}
    grey = {"student": "resnet18", "student_options": {"in_chans": 1}}
    job = labelling(distillation(tmp_path, students={"tiny": grey, "wide": grey}, teacher_cache={"views": 1}))
    (tmp_path / "teacher/0").rmdir()
    (tmp_path / "teacher/config.json").write_text(json.dumps(about))
    channels = [issue.found for issue in launcher.plan(job).errors if "channels" in issue.found]
    assert job.script == "label_images.py" and channels == []
    assert not any(":" in name for name in request.metrics(job)), "labelling measures no student"


@pytest.mark.parametrize("given", [{"folder": "x", "student": "tiny"}, {"run": "many", "student": "../x"}])
def test_a_student_is_a_name_of_a_run(script_job, given):
    with pytest.raises(launcher.UserError, match="student"):
        script_job(SCRIPT, inputs={"teacher": given})

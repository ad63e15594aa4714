"""`launcher label` plans a job's labelling: the same job without a student, whose bank its training runs find."""

from __future__ import annotations

import pytest

import launcher
from launcher.commands.main import main
from launcher.runner.labelling import labelling
from tests.conftest import write_batch

VALUES = {
    "name": "student",
    "script": "train_kd.py",
    "inputs": {"cache": {"run": "student-labels"}, "train": {"folder": "."}},
    "hyperparameters": {"student": "x", "teacher_cache": {"views": 2, "top_k": 3, "where": "channel:cache"}},
}


def test_a_bank_that_a_run_leaves_is_no_input_of_that_run():
    job = labelling(launcher.from_values(VALUES))
    assert (job.name, job.script, set(job.inputs)) == ("student-labels", "label_images.py", {"train"})
    assert job.hyperparameters == {"student": "x", "teacher_cache": {"views": 2, "top_k": 3}}


def test_students_of_labels_alone_are_none_of_the_labellings():
    own = {"tiny": {}, "labels": {"hard_label_weight": 1}, "wide": {"features": 3}}
    settings = {**VALUES["hyperparameters"], "students": {name: own[name] for name in ("tiny", "labels")}}
    job = labelling(launcher.from_values({**VALUES, "hyperparameters": settings}))
    assert job.hyperparameters["students"] == {"tiny": {}}
    wrong = {**settings, "students": own}
    kept = labelling(launcher.from_values({**VALUES, "hyperparameters": wrong})).hyperparameters["students"]
    assert kept == own, "the plan reports its mistakes"


def test_a_bank_in_a_folder_stays_where_it_is():
    inputs = {"cache": {"folder": "bank"}}
    job = labelling(launcher.from_values({**VALUES, "inputs": inputs}))
    assert job.inputs["cache"].folder == "bank" and job.hyperparameters == VALUES["hyperparameters"]


def test_one_config_serves_labelling_with_the_teacher_and_training_on_the_complete_bank_without(tmp_path):
    write_batch(tmp_path / "train")
    for name in ("bank", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    inputs = {name: {"folder": str(tmp_path / name)} for name in ("train", "teacher")}
    inputs |= {"validation": inputs["train"], "cache": {"folder": str(tmp_path / "bank")}}
    cache = {"views": 2, "where": "channel:cache", "complete": True}
    values = {**VALUES, "inputs": inputs, "hyperparameters": {"student": "resnet18", "teacher_cache": cache}}
    job = launcher.from_values(values)
    assert labelling(job).hyperparameters["teacher_cache"] == {"views": 2, "where": "channel:cache"}
    of_a_run = launcher.from_values({**values, "inputs": {**inputs, "cache": {"run": "student-labels"}}})
    assert labelling(of_a_run).hyperparameters["teacher_cache"] == {"views": 2}
    plan = launcher.plan(job)
    [warned] = [issue for issue in plan.issues if issue.key == "inputs.teacher"]
    assert (
        not plan.errors and warned.level == "warning" and "does not read it with teacher_cache.complete" in warned.found
    )
    without = launcher.from_values({**values, "inputs": {name: inputs[name] for name in inputs if name != "teacher"}})
    assert not launcher.plan(without).errors
    assert [issue.key for issue in launcher.plan(labelling(without)).errors] == ["inputs.teacher"]


def test_a_plan_names_all_that_does_not_go_with_a_complete_bank(tmp_path):
    (tmp_path / "a").mkdir()
    inputs = {name: {"folder": str(tmp_path)} for name in ("train", "validation", "cache")}
    cache = {"views": 2, "where": "channel:cache", "complete": True}
    settings = {"student": "resnet18", "teacher_cache": cache, "features": {}, "min_teacher_accuracy": 0.9}
    given = {**settings, "compile_teacher": True, "teacher_servers": {}}
    found = {
        issue.key: issue
        for issue in launcher.plan(launcher.from_values({**VALUES, "inputs": inputs, "hyperparameters": given})).errors
    }
    names = ("features", "min_teacher_accuracy", "compile_teacher", "teacher_servers", "teacher_cache")
    assert {f"hyperparameters.{name}" for name in names} <= found.keys()
    accuracy = found["hyperparameters.min_teacher_accuracy"]
    assert (accuracy.found, accuracy.fix) == ("0.9", "correct min_teacher_accuracy")
    assert accuracy.valid == "0 with teacher_cache.complete: the label bank replaces the teacher"


@pytest.mark.parametrize("changes", [{"script": "train_classifier.py"}, {"source": "mine"}])
def test_a_job_without_a_teacher_of_this_kit_is_refused(changes):
    with pytest.raises(launcher.UserError, match="of this kit's own train_kd.py or train_segmentation.py"):
        labelling(launcher.from_values({**VALUES, **changes}))


def test_a_plan_shows_what_labelling_would_do_and_its_mistakes(tmp_path, capsys):
    write_batch(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/model.pt").touch()
    here = [f"inputs.{name}={{folder: {tmp_path}}}" for name in ("train", "validation", "teacher")]
    assert main(["plan", "configs/quickstart_bank.yaml", "--label", *here]) == 0
    said = capsys.readouterr().out
    assert "plan quickstart-bank-labels-" in said and "--nproc_per_node 1 label_images.py" in said
    assert main(["plan", "configs/quickstart_bank.yaml", "--label", *here, "hyperparameters.teacher_cache=null"]) == 2
    assert "it names the label bank" in "".join(capsys.readouterr())


def test_a_segmenters_job_is_labelled_by_a_script_of_its_own():
    hyperparameters = {
        "model": "x",
        "classes": 3,
        "hard_label_weight": 0.5,
        "teacher_cache": {"views": 2, "where": "channel:cache"},
    }
    values = {**VALUES, "script": "train_segmentation.py", "hyperparameters": hyperparameters}
    job = labelling(launcher.from_values(values))
    assert (job.name, job.script, set(job.inputs)) == ("student-labels", "label_pixels.py", {"train"})
    assert job.hyperparameters == {**hyperparameters, "teacher_cache": {"views": 2}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hard_label_weight": 1.0}, "null if there is no teacher"),
        ({"teacher_cache": None}, "it names the label bank"),
        ({"teacher_cache": {"views": 2, "precision": "fp16"}}, "one of int8, int4"),
        ({"teacher_cache": {"views": 2, "top_k": None}}, "a whole number"),
        ({"teacher_cache": {"views": 0}}, "at least 1"),
        (
            {"teacher_cache": {"views": 2, "complete": True}},
            "label_pixels.py has no such hyperparameter",
        ),
    ],
)
def test_mistakes_of_a_segmenters_bank_are_found_while_planning(tmp_path, changes, said):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/model.pt").touch()
    inputs = {name: {"folder": str(tmp_path)} for name in ("train", "validation", "teacher")}
    settings = {"model": "resnet10t", "classes": 3, "hard_label_weight": 0.5, "teacher_cache": {"views": 2}, **changes}
    job = launcher.from_values(
        {"name": "x", "script": "train_segmentation.py", "inputs": inputs, "hyperparameters": settings}
    )
    assert any(said in str(issue) for issue in launcher.plan(labelling(job)).errors), launcher.plan(
        labelling(job)
    ).errors

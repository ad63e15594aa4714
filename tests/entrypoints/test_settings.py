"""Settings: how texts and JSON values become the types that a class declares."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest
from launcher_observer.contract import contract_value
from training.distributed import smddp
from training.runtime.environment import is_streamed
from training.settings import check, convert, fixed_on_resume, limits, read_settings, require, setting
from training.settings.distillation import (
    DistillationSettings,
    LabellingSettings,
    TeacherCacheSettings,
    UnlabelledSettings,
)
from training.settings.entries import variants
from training.settings.scripts import ClassifierSettings, TeacherSettings, TrainingSettings
from training.settings.segmentation import SegmentationSettings

REQUIRED = {
    TrainingSettings: {},
    TeacherSettings: {},
    ClassifierSettings: {"model": "x"},
    DistillationSettings: {"student": "x"},
    SegmentationSettings: {"model": "x", "classes": 4},
}


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("3", int, 3), (3, int, 3), ("-3", int, -3), ("1e-3", float, 1e-3), (1, float, 1.0), ("True", bool, True), ("false", bool, False),
        ("x", str, "x"), (5, str, "5"), ("None", int | None, None), (None, int | None, None), ("4", int | None, 4), ("None", str | None, "None"),
        ("[1, 2]", list[int], [1, 2]), ([1, 2], tuple[int, ...], (1, 2)), ([1, "a"], tuple[int, str], (1, "a")), ('{"a": 1}', dict[str, Any], {"a": 1}),
        ("fast", Literal["fast", 2], "fast"), ("2", Literal["fast", 2], 2), ({"a": [None]}, Any, {"a": [None]}), ("5", int | str, "5"), (5, str | int, 5),
    ],
)  # fmt: skip
def test_a_value_becomes_the_annotated_type(value, annotation, expected):
    converted = convert(value, annotation)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("3.5", int), (3.0, int), (True, int), (True, float), (True, str), ("yes", bool), (1, bool), (None, int), (None, str), ("x", float),
        ("x", list[int]), ([1.5], list[int]), ({}, list), ([1], tuple[int, int]), ("slow", Literal["fast"]), (True, Literal[1]), ("x", int | None),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_and_nothing_is_rounded(value, annotation):
    with pytest.raises(ValueError):
        convert(value, annotation)


def test_the_command_line_of_a_plain_shell_takes_negative_numbers_and_dashes():
    @dataclass(frozen=True)
    class Mine:
        low: float
        text: str = ""

    Mine.__annotations__ = {"low": float, "text": str}
    assert read_settings(Mine, ["--low", "-1e-3", "--text", "--not-a-flag"], {}) == Mine(-1e-3, "--not-a-flag")


@pytest.mark.parametrize("arguments", [["--help"], ["--epochs"], ["epochs", "1"]])
def test_a_malformed_command_line_shows_the_names(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        read_settings(ClassifierSettings, arguments, {})
    assert end.value.code == 2
    assert "global_batch_size" in capsys.readouterr().err


def test_wrong_values_end_the_script_with_one_line_each(capsys):
    with pytest.raises(SystemExit) as end:
        read_settings(ClassifierSettings, ["--epochs", "0", "--sede", "1", "--model", "x"], {})
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "epochs: '0' (valid: at least 1)" in error and "sede: unknown hyperparameter" in error


def test_names_that_sdks_add_are_not_the_scripts():
    environ = {"SM_HPS": '{"model": "x", "sagemaker_program": "y", "_tuning_objective_metric": "z", "epochs": 2}'}
    assert read_settings(ClassifierSettings, ["ignored"], environ).epochs == 2


@pytest.mark.parametrize("settings_class", REQUIRED)
def test_every_setting_has_a_docstring_and_a_default_that_holds(settings_class):
    for item in fields(settings_class):
        declaring = next(kind for kind in settings_class.__mro__ if item.name in kind.__annotations__)
        [body] = ast.parse(inspect.getsource(declaring)).body
        names = [getattr(getattr(node, "target", None), "id", "") for node in body.body]
        after = body.body[names.index(item.name) + 1]
        assert isinstance(after, ast.Expr), f"{item.name} has no docstring"
    made, problems = check(settings_class, REQUIRED[settings_class])
    assert made is not None and problems == []


WRONG = {
    "epochs": 0, "max_steps": 0, "global_batch_size": 0, "learning_rate": 0, "weight_decay": -1, "warmup_fraction": 1.1, "max_grad_norm": 0,
    "label_smoothing": 1, "shuffle_window_shards": 0, "shard_cache_gb": 0, "images_per_class": 0, "image_size": 7, "min_crop_area": 0, "max_shift_pixels": 500, "max_rotation_degrees": 181,
    "seed": -1, "probe_seconds": -1, "profile_steps": 301, "profile_after": -1, "num_workers": -1, "log_every": 0, "evaluate_every": 0, "temperature": 0, "hard_label_weight": -0.1, "teacher_options": {"a": 1},
    "batch_size_per_device": 0, "ema_decay": 1, "checkpoint_every": 0, "keep_checkpoints": 0, "process_group_minutes": 0, "mixup": -1, "cutmix": -1,
    "mix_probability": 1.1, "random_erasing": -0.1, "teacher_loss_weight": -1, "teacher_pretrained": True, "min_teacher_accuracy": 1.1,
    "dkd_alpha": -1, "dkd_beta": -1, "dist_beta": -1, "dist_gamma": -1, "view_size": 7, "augmentation_load": -1,
    "student": "", "student_options": {"in_chans": 4}, "views_per_decode": 0,
}  # fmt: skip

WRONG_SEGMENTATION = {
    "decoder_channels": 30, "classes": 1, "ignore_index": 256, "image_size": [64, 31], "crop_size": [16, 64], "min_scale": 1.5, "max_scale": 11,
    "class_names": ["road", "sky", "car", "road"], "class_colours": [[0, 0, 0]] * 3 + [[0, 0, 256]], "dice_weight": -0.1, "overlays": -1, "min_teacher_miou": 1.1,
    "model_options": {"in_chans": 0},
}  # fmt: skip

CASES = [(DistillationSettings, name, value) for name, value in WRONG.items()]
CASES += [(SegmentationSettings, name, value) for name, value in WRONG_SEGMENTATION.items()]
CASES += [(SegmentationSettings, "teacher_cache", {"views": 1})]
CASES += [(DistillationSettings, "teacher_stream", True)]
CASES += [(ClassifierSettings, "probe_input_images", -1), (ClassifierSettings, "probe_image_size", 4)]
CASES += [(ClassifierSettings, "model_options", {"in_chans": channels}) for channels in (2, 4, "three")]


@pytest.mark.parametrize(("settings_class", "name", "value"), CASES)
def test_every_condition_refuses_what_it_says(settings_class, name, value):
    made, problems = check(settings_class, {**REQUIRED[settings_class], name: value})
    assert made is None and [problem[0] for problem in problems] == [name]


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [("preprocessing", "dali", "worker_type"), ("probe_image_size", 64, "probe_image_size")],
)
def test_other_hosts_make_images_neither_by_dali_nor_of_another_size(name, value, refused):
    assert check(ClassifierSettings, {"model": "x", name: value})[1] == []
    made, problems = check(ClassifierSettings, {"model": "x", "worker_type": "remote", name: value})
    assert made is None and [problem[0] for problem in problems] == [refused]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"hard_label_weight": 1}, "teacher_servers"),
        ({"worker_type": "auto"}, "teacher_servers"),
        ({"teacher_cache": {"views": 1}}, "teacher_cache"),
        ({"without_servers": "go_on"}, "without_servers"),
        ({"compile_teacher": True}, "compile_teacher"),
    ],
)
def test_servers_run_a_teacher_where_nothing_else_does(changes, refused):
    served = {"student": "x", "worker_type": "remote", "without_servers": "fail", "teacher_servers": {"top_k": 5}}
    assert check(DistillationSettings, served)[1] == []
    made, problems = check(DistillationSettings, {**served, **changes})
    assert made is None and [problem[0] for problem in problems] == [refused]


def test_a_head_alone_is_trained_on_weights_that_are_given():
    assert check(ClassifierSettings, {"model": "x", "trained_layers": "head", "pretrained": "channel"})[1] == []
    made, problems = check(ClassifierSettings, {"model": "x", "trained_layers": "head"})
    assert made is None and [problem[0] for problem in problems] == ["trained_layers"]


@pytest.mark.parametrize("pretrained", [False, True, "channel"])
def test_weights_come_by_a_channel_where_the_settings_say_so(pretrained):
    wanted = ["weights"] if pretrained == "channel" else []
    assert ClassifierSettings(model="x", pretrained=pretrained).channels() == ["train", "validation", *wanted]
    assert DistillationSettings(student="x", pretrained=pretrained).channels()[3:] == wanted
    asked = check(ClassifierSettings, {"model": "x", "pretrained": str(pretrained).lower()})[0]
    assert asked.pretrained == pretrained


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"hard_label_weight": 0.5}, "hard_label_weight"),
        ({"images_per_class": 5}, "images_per_class"),
        ({"unlabelled": {"alone": True, "per_labelled": 2}}, "unlabelled.per_labelled"),
        ({"unlabelled": {"per_labelled": 0}}, "unlabelled.per_labelled"),
        ({"unlabelled": {}, "hard_label_weight": 1}, "unlabelled"),
    ],
)
def test_images_without_labels_have_a_teacher_and_where_they_are_alone_nothing_else(changes, refused):
    alone = {"student": "x", "unlabelled": {"alone": True}, "hard_label_weight": 0}
    assert check(DistillationSettings, alone)[1] == []
    made, problems = check(DistillationSettings, {**alone, **changes})
    assert made is None and [problem[0] for problem in problems] == [refused]


def test_every_condition_has_a_case_above():
    common = {name for name, *_ in TeacherSettings().conditions()}  # copy_stream has a case below
    assert {name for name, *_ in DistillationSettings(student="x").conditions()} == set(WRONG) | {
        "copy_stream",
        "teacher",
        "features",
        "teacher_cache",
        "compose_augmentation",
        "worker_type",
        "teacher_servers",
        "without_servers",
        "compile_teacher",
        "cuda_graphs",
        "teacher_precision",
        "teacher_stream",
        "unlabelled",
    }
    assert {name for name, *_ in SegmentationSettings(model="x", classes=4).conditions()} == common | set(
        WRONG_SEGMENTATION
    ) | {"teacher_cache"}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"copy_stream": False}, ["teacher_stream"]),
        ({"students": {"one": {}, "other": {"hard_label_weight": 1}}}, []),
        ({"teacher_cache": {"views": 1}}, ["teacher_cache"]),
        ({"cuda_graphs": True}, ["cuda_graphs"]),
        ({"preprocessing": "dali"}, ["copy_stream"]),
        ({"worker_type": "remote", "without_servers": "fail", "teacher_servers": {}}, ["teacher_stream"]),
    ],
)
def test_a_teacher_has_a_stream_of_its_own_where_images_come_by_one(changes, wrong):
    asked = {"student": "x", "copy_stream": True, "teacher_stream": True, **changes}
    assert [name for name, *_ in check(DistillationSettings, asked)[1]] == wrong


def test_a_student_that_cannot_use_the_jobs_cache_does_without_and_other_mistakes_stay():
    students = {"one": {}, "labels": {"hard_label_weight": 1}}
    asked = {"student": "x", "teacher_cache": {"views": 1}, "students": students}
    settings, problems = check(DistillationSettings, asked)
    assert problems == [] and [own.teacher_cache is None for own in variants(settings).values()] == [False, True]
    with pytest.raises(ValueError, match="max_steps"):
        variants(replace(settings, max_steps=0))
    problems = check(LabellingSettings, {**asked, "students": {**students}})[1]
    assert [name for name, *_ in problems] == ["students.labels.teacher_cache"]


def test_a_teacher_of_pixels_has_a_cache_or_a_stream():
    asked = {"model": "x", "classes": 3, "hard_label_weight": 0.5, "copy_stream": True, "teacher_stream": True}
    assert check(SegmentationSettings, asked)[1] == []
    assert [name for name, *_ in check(SegmentationSettings, {**asked, "teacher_cache": {"views": 1}})[1]] == [
        "teacher_cache"
    ]


@pytest.mark.parametrize(
    "changes",
    [{"batch_size_per_device": 2}, {"batch_size_per_device": "auto"}, {"students": {"one": {"student": "x"}}}],
)
def test_cuda_graphs_are_for_steps_of_one_pass(changes):
    """torch's graphs overwrite a gradient that waits for another pass: https://github.com/pytorch/pytorch/issues/169545."""
    for asked in (False, "auto"):
        assert check(DistillationSettings, {"student": "x", "cuda_graphs": asked, **changes})[1] == []
    made, problems = check(DistillationSettings, {"student": "x", "cuda_graphs": True, **changes})
    assert made is None and [name for name, *_ in problems] == ["cuda_graphs"]
    assert check(DistillationSettings, {"student": "x", "cuda_graphs": True})[1] == []


@pytest.mark.parametrize(
    ("annotation", "bounds", "good", "wrong", "valid"),
    [
        (int, {"at_least": 1}, [1, 7], [0, -1], "at least 1"),
        (float | None, {"above": 0}, [0.1, None], [0], "above 0, or null"),
        (int | Literal["auto"] | None, {"at_least": 0}, ["auto", None, 0], [-1], "0 or more, auto, or null"),
        (float, {"at_least": 0, "below": 1}, [0, 0.9], [-0.1, 1], "from 0 to below 1"),
        (float, {"above": 0, "at_most": 1}, [0.1, 1], [0, 1.1], "above 0 and at most 1"),
        (int, {"at_most": 3, "why": "no more fit"}, [3], [4], "at most 3: no more fit"),
        (int, {"multiple_of": 4}, [4, 8], [0, 6], "a multiple of 4"),
        (tuple[int, int], {"at_least": 8, "each": "[height, width]"}, [(8, 9)], [(8, 7)], "[height, width], each at least 8"),
    ],
)  # fmt: skip
def test_a_users_class_declares_ranges_and_what_may_change_on_resume_in_its_fields(annotation, bounds, good, wrong, valid):  # fmt: skip
    @dataclass(frozen=True, kw_only=True)
    class Mine:
        value: annotation = setting(**bounds)
        speed: int = setting(1, on_resume="may change")

        def __post_init__(self) -> None:
            require(*limits(self))

    Mine.__annotations__ = {"value": annotation, "speed": int}
    assert all(check(Mine, {"value": value})[0] is not None for value in good)
    for value in wrong:
        made, problems = check(Mine, {"value": value})
        assert made is None and [(name, text) for name, _, text in problems] == [("value", valid)]
    assert fixed_on_resume(Mine) == ["value"]


def test_what_must_stay_on_resume_is_looked_for_in_settings_within_settings_too():
    def job(**bank):
        return DistillationSettings(
            student="resnet18", teacher_cache=TeacherCacheSettings(views=2, **bank)
        ).fingerprint()

    assert job(where="/fsx/bank") == job(where="/other") != job(top_k=3)


def test_a_missing_setting_does_not_hide_the_other_mistakes():
    made, problems = check(SegmentationSettings, {"model": "x", "decoder_channels": 30, "epochs": 0})
    assert made is None and {name for name, *_ in problems} == {"classes", "decoder_channels", "epochs"}


def test_a_number_that_no_float_holds_is_refused():
    assert check(DistillationSettings, {"student": "x", "learning_rate": 10**400})[1][0][0] == "learning_rate"
    assert check(DistillationSettings, {"student": "x", "temperature": float("inf")})[1][0][0] == "temperature"


def test_a_group_of_settings_tells_each_of_its_mistakes_by_its_full_name():
    made, problems = check(
        DistillationSettings, {"student": "x", "teacher_cache": {"views": 0, "topk": 5, "precision": "bf16"}}
    )
    assert made is None
    assert {name: valid for name, _, valid in problems} == {
        "teacher_cache.views": "at least 1",
        "teacher_cache.topk": "views, where, feature_precision, top_k, precision, complete",
        "teacher_cache.precision": "one of fp32, fp16, int8, int4",
    }
    made, problems = check(DistillationSettings, {"student": "x", "teacher_cache": 5})
    assert made is None and [problem[0] for problem in problems] == ["teacher_cache"]
    assert "a mapping with views, where, feature_precision, top_k, precision, complete" in problems[0][2]


@pytest.mark.parametrize("value", [{"views": 3}, '{"views": "3"}'])
def test_a_group_of_settings_comes_as_a_mapping_or_as_its_json(value):
    made, problems = check(DistillationSettings, {"student": "x", "teacher_cache": value})
    assert problems == [] and made.teacher_cache == TeacherCacheSettings(views=3)


def test_a_cache_without_a_teacher_is_refused():
    made, problems = check(
        DistillationSettings, {"student": "x", "hard_label_weight": 1, "teacher_cache": {"views": 1}}
    )
    assert made is None and [problem[0] for problem in problems] == ["teacher_cache"]


COMPLETE = {"views": 1, "where": "channel:kept", "complete": True}


def test_all_that_a_complete_bank_leaves_without_meaning_is_refused_at_once():
    of_a_teacher = {
        "teacher": "resnet18",
        "teacher_options": {"drop_rate": 0.1},
        "teacher_pretrained": True,
        "teacher_precision": "bf16",
        "compile_teacher": True,
        "min_teacher_accuracy": 0.5,
    }
    made, problems = check(DistillationSettings, {"student": "x", "teacher_cache": COMPLETE, **of_a_teacher})
    assert made is None and {name for name, *_ in problems} == {*of_a_teacher}
    assert all("with teacher_cache.complete" in valid for *_, valid in problems)
    served = {"teacher_servers": {}, "worker_type": "remote", "without_servers": "fail"}
    made, problems = check(DistillationSettings, {"student": "x", "teacher_cache": COMPLETE, **served, "features": {}})
    assert made is None and {name for name, *_ in problems} == {"teacher_cache", "features"}
    assert DistillationSettings(student="x", **settings_of({"teacher_cache": COMPLETE})).has_complete_bank


def test_a_complete_bank_lies_where_the_run_does_not_fill_one_and_is_not_labelled():
    made, problems = check(DistillationSettings, {"student": "x", "teacher_cache": {"views": 1, "complete": True}})
    assert made is None and [name for name, *_ in problems] == ["teacher_cache.where"]
    assert "channel:NAME with complete" in problems[0][2]
    made, problems = check(LabellingSettings, {"student": "x", "teacher_cache": COMPLETE})
    assert made is None and problems[0][::2] == ("teacher_cache", "without complete: the teacher fills the bank")


@pytest.mark.parametrize(
    ("values", "channels"),
    [
        ({}, ["train", "validation", "teacher"]),
        ({"hard_label_weight": 1}, ["train", "validation"]),
        ({"hard_label_weight": 1, "teacher_loss_weight": 2}, ["train", "validation", "teacher"]),
        ({"teacher": "resnet18", "teacher_pretrained": True}, ["train", "validation"]),
        ({"teacher_cache": {"views": 1, "where": "channel:kept"}}, ["train", "validation", "teacher", "kept"]),
        ({"teacher_cache": {"views": 1, "where": "/opt/ml/kept"}}, ["train", "validation", "teacher"]),
        (
            {"teacher_cache": {"views": 1, "where": "channel:kept", "complete": True}},
            ["train", "validation", "kept"],
        ),
        ({"unlabelled": {}}, ["train", "unlabelled", "validation", "teacher"]),
        ({"unlabelled": {"alone": True}, "hard_label_weight": 0}, ["unlabelled", "validation", "teacher"]),
    ],
)
def test_the_channels_that_distillation_needs_follow_from_its_settings(values, channels):
    assert DistillationSettings(student="x", **settings_of(values)).channels() == channels


@pytest.mark.parametrize(
    ("values", "channels"),
    [
        ({}, ["train", "validation"]),
        ({"hard_label_weight": 0.5}, ["train", "validation", "teacher"]),
        ({"teacher_loss_weight": 0.5}, ["train", "validation", "teacher"]),
    ],
)
def test_a_segmenter_needs_a_teacher_only_where_it_has_a_weight(values, channels):
    assert SegmentationSettings(model="x", classes=4, **values).channels() == channels


def test_class_names_of_another_number_are_refused_and_say_how_many_there_are():
    made, problems = check(SegmentationSettings, {"model": "x", "classes": 3, "class_names": ["road", "sky"]})
    assert made is None
    [(name, _, valid)] = problems
    assert name == "class_names" and valid.startswith("a distinct name for each of the 3 classes")


def settings_of(values: dict) -> dict:
    groups = {"teacher_cache": TeacherCacheSettings, "unlabelled": UnlabelledSettings}
    return {name: groups[name](**value) if name in groups else value for name, value in values.items()}


def test_variables_that_pam_cut_short_come_from_sagemakers_files(tmp_path):
    """Hosts 2 … n of an mpirun job on Ubuntu 20.04 get 1,023 characters of each variable."""
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    names = [f"class number {number}" for number in range(100)]
    values = {
        "model": "x",
        "epochs": 7,
        "model_options": {"label": names},
        "sagemaker_distributed_dataparallel_enabled": True,
    }
    (config / "hyperparameters.json").write_text(
        json.dumps({name: json.dumps(value) for name, value in values.items()})
    )
    hosts = [f"algo-{number}" for number in range(1, 129)]
    (config / "resourceconfig.json").write_text(json.dumps({"current_host": "algo-2", "hosts": hosts}))
    channels = {f"channel_{number}": {"TrainingInputMode": "FastFile"} for number in range(40)}
    (config / "inputdataconfig.json").write_text(json.dumps(channels))
    cut = {"SM_HPS": json.dumps(values), "SM_HOSTS": json.dumps(hosts), "SM_INPUT_DATA_CONFIG": json.dumps(channels)}
    environ = {name: text[:1023] for name, text in cut.items()} | {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert all(len(text) > 1023 for text in cut.values())
    read = read_settings(ClassifierSettings, ["ignored"], environ)
    assert (read.epochs, read.model_options) == (7, {"label": names})
    assert contract_value(environ, "SM_HOSTS", []) == hosts
    assert is_streamed(tmp_path, {**environ, "SM_CHANNEL_CHANNEL_39": str(tmp_path)})
    assert smddp.is_asked_for({**environ, "SM_FRAMEWORK_PARAMS": '{"sagemaker_distributed_data'})


def test_a_variable_that_is_cut_short_without_sagemakers_file_says_so(tmp_path):
    with pytest.raises(ValueError, match="SM_HPS is truncated or not JSON.*hyperparameters.json cannot be read"):
        read_settings(ClassifierSettings, [], {"SM_HPS": '{"model": "', "SAGEMAKER_BASE_DIR": str(tmp_path)})

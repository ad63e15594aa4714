"""A model that timm does not know is refused while planning, for the version of timm that the job will meet."""

from __future__ import annotations

from importlib.metadata import version

import pytest

import launcher
from launcher.aws import catalog
from launcher.planner import model_names
from launcher.runner.labelling import labelling
from tests.conftest import ROOT

PINNED = catalog.packages().pins["timm"]


def found(name: str, version: str | None = PINNED) -> str:
    return "\n".join(map(str, model_names.check_name("hyperparameters.model", name, version)))


def test_the_list_is_the_installed_timms_own():
    from tests.launcher.timm_models import registered

    assert version("timm") == PINNED  # of .ci/constraints.txt, so that the pinned list is checked too
    same = model_names.models(PINNED) == registered()
    assert same, "run python -m tests.launcher.timm_models"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet19", "did you mean resnet18?"),
        ("Resnet50", "did you mean resnet50?"),
        ("vit_tiny", "did you mean vit_tiny_"),
        ("vit_small_patch16_225", "did you mean vit_small_patch16_224?"),
        ("resnet50.a1_in2k", "has no weights a1_in2k of resnet50"),
        ("resnet50.a1_in2k", "did you mean resnet50.a1_in1k?"),
        ("", "timm.list_models() names all"),
        ("ü" * 300, "timm.list_models() names all"),
    ],
)
def test_an_unknown_name_is_refused_with_near_ones(name, expected):
    assert expected in found(name)


@pytest.mark.parametrize("name", ["resnet18", "pvt_v2_b0", "resnet50.a1_in1k", "hf-hub:someone/model", "local-dir:/x"])
def test_a_name_that_timm_knows_or_that_is_not_its_own_is_not_refused(name):
    assert found(name) == ""


def test_versions_differ_and_an_unlisted_one_is_not_judged():
    late = set(model_names.models(PINNED)) - set(model_names.models("1.0.20"))
    assert len(late) > 50 and all(found(name, "1.0.20") for name in late) and not any(map(found, late))
    assert found("vit_base_patch16_384.augreg2_in21k_ft_in1k", "1.0.23") == ""
    assert "has no weights" in found("vit_base_patch16_384.augreg2_in21k_ft_in1k", "1.0.24")
    assert found("resnet19", "9.9.9") == found("resnet19", None) == ""


@pytest.mark.parametrize(
    ("config", "override", "key"),
    [
        ("kt_food_tag", "hyperparameters.student=vit_small_patch16_225", "hyperparameters.student"),
        ("kt_food_tag", "hyperparameters.teacher=[resnet50, resnet51]", "hyperparameters.teacher"),
        ("hyundai_segmentation", "hyperparameters.model=resnet51", "hyperparameters.model"),
        ("dali_imagenette", "hyperparameters.model=resnet19", "hyperparameters.model"),
    ],
)
def test_a_plan_refuses_an_unknown_model(config, override, key):
    plan = launcher.plan(launcher.load(ROOT / f"configs/{config}.yaml", [override]), on="aws")
    assert [issue.key for issue in plan.errors] == [key] and f"timm {PINNED} has no model" in plan.errors[0].found


def test_an_image_of_the_users_own_and_a_script_of_the_users_are_not_judged(script_job):
    own = ["image={uri: registry.example.com/mine:1}", "hyperparameters.student=my_model", "distribution=torchrun"]
    assert launcher.plan(launcher.load(ROOT / "configs/kt_food_tag.yaml", own), on="aws").errors == ()
    assert launcher.plan(script_job("x = 1", hyperparameters={"model": "my_model"})).errors == ()


@pytest.mark.parametrize(
    ("config", "override", "key", "call"),
    [
        ("dali_imagenette", "hyperparameters.model_options={patchsize: 3}", "model_options", "**{'patchsize': 3}"),
        ("hyundai_segmentation", "hyperparameters.model_options={inchans: 1}", "model_options", "**{'features_only': True, 'inchans': 1}"),
        ("kt_food_tag", "hyperparameters.student_options={token: hf_hunter2}", "student_options", "'***'"),
        ("many_students", "hyperparameters.students.vit.student_options={depht: 2}", "students.vit.student_options", "'vit_tiny_patch16_224', **{"),
    ],
)  # fmt: skip
def test_options_of_a_model_are_reported_as_not_checked_with_the_call_that_checks_them(config, override, key, call):
    job = launcher.load(config, [override])
    [issue] = [one for one in model_names.check(job, PINNED) if one.key.endswith("_options")]
    assert (issue.level, issue.key) == ("not checked", f"hyperparameters.{key}") and call in issue.fix


def test_options_of_a_model_that_is_not_built_or_not_of_this_kit_are_not_reported(script_job):
    labels = labelling(launcher.load("quickstart_bank"))
    own = script_job("x = 1", hyperparameters={"model": "mine", "model_options": {"patchsize": 3}})
    without = launcher.load("quickstart_teacher", ["hyperparameters.model_options={}"])
    assert [
        *model_names.check(labels, PINNED),
        *model_names.check(own, PINNED),
        *model_names.check(without, PINNED),
        *model_names.check(launcher.load("quickstart_teacher"), PINNED),  # whose options many models take
    ] == []


def test_on_this_machine_the_installed_version_counts(script_job):
    job = launcher.load(ROOT / "configs/quickstart.yaml", ["hyperparameters.student=resnet19"])
    assert f"timm {version('timm')} has no model resnet19" in str([str(issue) for issue in launcher.plan(job).errors])

"""Fixes of a run whose images are too costly: only what it does not do yet, and what it can do."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.insight.evidence import Evidence
from launcher.insight.findings import Fix
from launcher.insight.replay import Replay
from launcher.insight.rules.table import judge
from tests.insight.planted import plant
from tests.insight.test_rules import PLANTED


def fixes(kind: str = "data_bound", replay: Replay | None = None, **changed) -> list[Fix]:
    planted = {**PLANTED[kind, "harsh"], **changed}
    [finding] = judge(Evidence(dataclasses.replace(plant(**planted), replay=replay))).findings
    assert finding.kind == kind
    return list(finding.fixes)


def keys(**settings) -> dict[str, object]:
    """The keys that the fixes set, with their values."""
    return {key: value for fix in fixes(settings=settings) for key, value in fix.keys.items()}


def commands(**settings) -> list[str]:
    return [str(fix) for fix in fixes(settings=settings) if "launcher prepare" in str(fix)]


def test_the_reference_pipeline_gives_way_to_the_fast_one():
    for pipeline, first in (
        ("cpu_reference", "hyperparameters.preprocessing=cpu (now cpu_reference)"),
        ("dali", "launcher prepare"),
    ):
        assert str(fixes(settings={"preprocessing": pipeline})[0]).startswith(first)


@pytest.mark.parametrize(
    ("settings", "composed"),
    [
        ({"augmentation_load": 8}, True),
        ({"augmentation_load": 0}, False),
        ({"augmentation_load": 8, "compose_augmentation": True}, False),
        ({"augmentation_load": 8, "preprocessing": "dali"}, False),
    ],
    ids=str,
)
def test_rounds_of_augmentation_become_one_where_there_are_rounds(settings, composed):
    reported = fixes(settings=settings)
    assert any(fix.setting == "hyperparameters.compose_augmentation" for fix in reported) == composed


def test_composing_takes_the_fast_pipeline_with_it_only_where_the_run_has_the_reference():
    for pipeline, also in (("cpu_reference", {"hyperparameters.preprocessing": "cpu"}), ("cpu", {})):
        reported = fixes(settings={"augmentation_load": 8, "preprocessing": pipeline})
        [compose] = [fix for fix in reported if fix.setting == "hyperparameters.compose_augmentation"]
        assert compose.also == also


def test_the_gpu_prepares_images_where_there_is_one_and_it_does_not_do_so_yet():
    assert keys()["hyperparameters.preprocessing"] == "dali"
    assert "hyperparameters.preprocessing" not in keys(preprocessing="dali")
    on_cpu = fixes("too_many_workers", settings={"num_workers": 16})
    assert all(fix.setting != "hyperparameters.preprocessing" for fix in on_cpu)


def test_more_cores_are_for_each_gpu_where_there_are_gpus():
    assert str(fixes()[-1]) == "an instance type with more cores for each GPU"
    assert str(fixes("too_many_workers")[-1]) == "an instance type with more cores"


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"image_size": 224}, "224"),
        ({"image_size": 224, "view_size": 96}, "96"),
        ({"image_size": 224, "min_crop_area": 0.25}, "448"),  # 224 / sqrt(0.25)
        ({"image_size": 224, "min_crop_area": 0.3}, "409"),
        ({"image_size": 224, "min_crop_area": 1}, "224"),
        ({"image_size": 224, "min_crop_area": 1.5}, "PIXELS"),
        ({"image_size": 224, "min_crop_area": 0}, "PIXELS"),
        ({"image_size": 224, "min_crop_area": "little"}, "PIXELS"),
        ({"image_size": "small"}, "PIXELS"),
        ({}, "PIXELS"),
    ],
    ids=str,
)
def test_images_are_scaled_to_what_the_smallest_crop_needs(settings, size):
    [command] = commands(**settings)
    assert command.startswith(f"launcher prepare SOURCE TARGET --size {size}: ")


def test_images_on_this_machine_come_with_the_commands_that_scale_them_and_train_on_them():
    for images, said in (
        ("food", "launcher prepare food food-size-224 --size 224 && launcher replay run-1"),
        (None, None),
    ):
        reported = fixes(settings={"image_size": 224}, replay=Replay(run="run-1", images=images))
        [scaled] = [fix for fix in reported if "launcher prepare" in str(fix)]
        assert (scaled.command or "").startswith(said or "") and (scaled.command is None) == (images is None)

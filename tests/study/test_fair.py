"""What made the DALI post's own comparison unfair is not in this one: every pipeline gets the same work, and nothing else is timed.

Its script compared random mirroring and angles with fixed ones, a canvas that grew with each rotation with one that did not, crops of
224 pixels with crops of 256, nearest pixels with interpolated ones, files in order with shuffled ones, and one run with one run, both
with their first steps, validation and start of workers; it took os.cpu_count() workers, and validated on the training images.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from training.data.batches import LabelledBatch
from training.data.loaders import open_loaders
from training.data.views import open_data
from training.distributed.world import World
from training.settings.scripts import ClassifierSettings

import launcher
from launcher import backends
from launcher.config.job import StudySection
from launcher.prepare import photos
from launcher.study.preprocessing_hosts import REMOTE
from launcher.study.preprocessing_question import PIPELINES, VARIED, PreprocessingQuestion
from tests.conftest import ROOT

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
HERE = [
    name
    for name in PIPELINES
    if name != REMOTE and (name != "dali" or not backends.get("process").lacks("nvidia.dali"))
]
"""Pipelines of one process; tests/entrypoints/test_servers.py compares remote's batches with those of cpu."""

IMAGES, BATCH = 12, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("fair")
    for number in range(IMAGES // 2):
        for label in photos.CLASSES:
            (place / label).mkdir(exist_ok=True)
            photos.draw(label, number).save(place / label / f"{number}.jpg", quality=95)
    return place


def epochs(folder: Path, pipeline: str, load: int, workers: int | str = 2) -> list[list[LabelledBatch]]:
    """The batches of two epochs, as train_classifier.py gets them."""
    settings = ClassifierSettings(
        model="resnet18",
        image_size=112,
        min_crop_area=0.08,
        global_batch_size=BATCH,
        num_workers=workers,
        augmentation_load=load,
        **PIPELINES[pipeline],
    )
    loaders = open_loaders(open_data(folder, folder, settings, 3), settings, ALONE, batch_size_per_device=BATCH)
    found = []
    for epoch in (1, 2):
        loaders.train_batches.start(epoch)
        found.append([*loaders.train])
    return found


def decibels(one: torch.Tensor, other: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of uint8 pixels."""
    return float(10 * torch.log10(255**2 / (one.float() - other.float()).square().mean()))


@pytest.mark.parametrize(
    ("load", "least"), [(1, 28), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 30), (12, 22)))]
)
def test_every_pipeline_makes_the_same_views_of_the_same_shuffled_images(folder, load, least):
    """At load 12 the others' pixels are interpolated twelve times and the composed ones once, so these are sharper."""
    reference = epochs(folder, "cpu_reference", load)
    orders = [[int(number) for batch in batches for number in batch.indices] for batches in reference]
    assert [sorted(order) for order in orders] == [[*range(IMAGES)]] * 2, "an epoch is every image once"
    assert orders[0] != orders[1] and sorted(orders[0]) not in orders, "shuffled anew for each epoch"
    assert decibels(reference[0][0].images, reference[1][0].images) < 20, "other images, or other draws, are far below"
    for pipeline in set(HERE) - {"cpu_reference"}:
        for batch, same in zip(
            itertools.chain(*epochs(folder, pipeline, load)), itertools.chain(*reference), strict=True
        ):
            assert torch.equal(batch.indices.cpu(), same.indices) and torch.equal(batch.labels.cpu(), same.labels)
            assert batch.images.shape == same.images.shape == (BATCH, 3, 112, 112) and batch.images.dtype == torch.uint8
            assert decibels(batch.images.cpu(), same.images) > least, f"{pipeline} does other work"


def test_trials_differ_in_the_pipeline_alone():
    job = launcher.load(ROOT / "configs/dali_imagenette.yaml")
    assert job.study is not None
    grid = StudySection(models=["resnet18"], pipelines=[name for name in PIPELINES if name != REMOTE])
    question = PreprocessingQuestion(job=job, base=job, on="process", small=False, grid=grid)
    for _, cell in itertools.groupby(question.trials(), lambda trial: trial.key["load"]):
        jobs = [trial.job.model_dump() for trial in cell]
        for each in jobs:
            varied = {
                name: each["hyperparameters"].pop(name, None) for name in ("preprocessing", "compose_augmentation")
            }
            assert varied["preprocessing"] in ("cpu_reference", "cpu", "dali")
        assert all(each == jobs[0] for each in jobs)


def test_the_posts_config_repeats_shuffles_validates_apart_and_leaves_the_workers_to_the_cores():
    job = launcher.load(ROOT / "configs/dali_imagenette.yaml")
    assert job.inputs["train"] != job.inputs["validation"] and job.hyperparameters["epochs"] >= 2
    assert job.study is not None and job.study.repeats >= 3
    assert ClassifierSettings(**job.hyperparameters).num_workers == "auto"
    assert "augmentation_load" in VARIED and job.hyperparameters["min_crop_area"] == 0.08

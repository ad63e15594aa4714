"""NVIDIA DALI on the CPU: the batches of the reference pipeline, up to the rounding of its pixels."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training.data import workers
from training.data.augmentation import Augmentation, Turn, Variation
from training.data.batches import LabelledBatch
from training.data.dali import graph as dali_graph
from training.data.dali import pipeline
from training.data.dali.graph import Operations
from training.data.dali.pipeline import DaliBatches
from training.data.dali.views import ViewsByDali, mixed
from training.data.decode.decoding import as_pixels, decode
from training.data.decode.reference import vary
from training.data.loaders import open_loaders
from training.data.mixing import Mixing
from training.data.views import open_data
from training.distributed.world import World
from training.settings.scripts import ClassifierSettings

import launcher
from launcher.backends import process
from tests.entrypoints.dali_batches import (
    ALONE,
    BOTH,
    ONE_THREAD,
    STRONG,
    UPRIGHT,
    batches,
    damaged_png,
    epoch,
    fidelity,
    jpeg,
    photograph,
    reference,
    views,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Eleven photographs in two classes: JPEGs of four orientations, wide and high, a grey one and a PNG."""
    root = tmp_path_factory.mktemp("photographs")
    for number in range(11):
        folder = root / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        image = photograph(number, (160 + 16 * number, 150 + 5 * number) if number % 3 else (90, 130))
        if number == 4:
            image.save(folder / f"{number:02}.png")
        else:
            image = image.convert("L") if number == 7 else image
            (folder / f"{number:02}.jpg").write_bytes(jpeg(image, [1, 3, 6, 8][number % 4]))
    return root


def made(
    encoded: bytes, variation: Variation, augmentation: Augmentation, view: int = 96, channels: int = 3
) -> np.ndarray:
    """One view by DALI, uint8 (channels, view, view)."""
    size = dali_graph.upright_size(encoded)
    warped = bool(augmentation.max_shift_pixels or augmentation.max_rotation_degrees)
    operations = Operations((view, view), channels, augmentation.load, warped)
    graph = dali_graph.build(operations, images=1, threads=1, device_id=None)
    prepared = dali_graph.prepare(encoded, size, variation, operations)
    for _ in range(dali_graph.QUEUED):
        for name, values in dali_graph.inputs([prepared], operations).items():
            graph.feed_input(name, values)
    graph.schedule_run()
    return np.array(graph.share_outputs()[0].as_array())[0]


# -- pixels ------------------------------------------------------------------------------------------------------------

TURNED, BOX = Turn(True, True, 4.2), (200, 120, 460, 330)


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(
    ("augmentation", "variation", "least"),
    [
        (Augmentation(), Variation(), 55),
        (Augmentation(0.5), Variation(box=BOX), 55),
        (Augmentation(0.5), Variation(box=(0, 0, 427, 427)), 55),
        (Augmentation(0.5), Variation(box=(400, 300, 427, 320)), 55),
        (Augmentation(horizontal_flip=True), Variation(mirrored=True), 55),
        (Augmentation(max_shift_pixels=9), Variation(shift=(7, -4)), 55),
        (Augmentation(max_rotation_degrees=20), Variation(degrees=-17.0), 48),
        (Augmentation(0.5, True, 9, 20), Variation((), BOX, 11.0, (-5, 6), True), 48),
        (Augmentation(0.5, load=1), Variation((TURNED,), BOX), 50),
        (Augmentation(0.5, True, 9, 20, load=2), Variation((TURNED, Turn(False, True, -5.0)), BOX, 11.0, (-5, 6), True), 44),
    ],
    ids=["fit", "crop", "crop to the edge", "upsampled", "mirrored", "shifted", "rotated", "all of the view", "turned", "all"],
)  # fmt: skip
def test_every_operation_gives_pillows_pixels(orientation, augmentation, variation, least):
    """But for a rim of a pixel around what a rotation brings in: DALI blends it with the black, Pillow does not."""
    encoded = jpeg(photograph(0), orientation)
    wanted = as_pixels(vary(decode(encoded, "photograph", 3), 96, variation))
    pixels = made(encoded, variation, augmentation)
    assert pixels.dtype == np.uint8 and pixels.shape == (3, 96, 96)
    white = made(jpeg(Image.new("RGB", (640, 427), "white"), orientation), variation, augmentation)
    inside = (white == 0) | (white == 255)

    assert fidelity(pixels[inside], wanted[inside]) > least and inside.mean() > 0.93


def test_pillow_loses_half_a_level_with_each_rotation_and_dali_does_not():
    """The bilinear rotation of Pillow cuts off where DALI rounds; so a load of 12 darkens the reference by some levels."""
    encoded, turns = jpeg(photograph(0)), tuple(Turn(False, False, 3.0 * (-1) ** number) for number in range(12))
    variation = Variation(turns, BOX)
    pixels = made(encoded, variation, Augmentation(0.5, load=12)).astype(float)
    difference = pixels - as_pixels(vary(decode(encoded, "photograph", 3), 96, variation))
    assert 4.5 < difference.mean() < 6.5 and difference.std() < 2


@pytest.mark.parametrize("grey", [False, True])
def test_one_channel_is_pillows_grey(grey):
    image = photograph(1).convert("L") if grey else photograph(1)
    encoded, variation = jpeg(image), Variation(box=BOX)
    wanted = as_pixels(vary(decode(encoded, "photograph", 1), 96, variation))
    assert fidelity(made(encoded, variation, Augmentation(0.5), channels=1), wanted) > 50


@pytest.mark.parametrize("size", [(640, 427), (427, 640), (64, 64), (50, 31), (7, 300)])
def test_without_a_crop_the_middle_square_is_shown(size):
    encoded = jpeg(photograph(1, size), quality=100, subsampling=0)
    wanted = as_pixels(vary(decode(encoded, "photograph", 3), 64, Variation()))
    assert fidelity(made(encoded, Variation(), Augmentation(), 64), wanted) > 50


# -- which pixels, and what goes with them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixing", "augmentation"),
    [(Mixing(), STRONG), (Mixing(mixup=0.8), Augmentation(0.3, True)), (Mixing(cutmix=1.0), Augmentation(0.3)), (BOTH, STRONG)],
    ids=["varied", "mixup", "cutmix", "all"],
)  # fmt: skip
@pytest.mark.parametrize(("size", "accumulation"), [(6, 1), (10, 2)], ids=["even", "odd"])
def test_batches_are_those_of_the_reference_path(root, mixing, augmentation, size, accumulation):
    """Odd batches cut pairs of mixed images apart; then the partner is decoded too."""
    asked, sampler = views(root, augmentation, mixing), batches(size=size, accumulation=accumulation)
    for number in (1, 2):
        found, wanted = epoch(asked, sampler, number), reference(asked, sampler, number)
        assert len(found) == len(wanted) == accumulation
        for one, other in zip(found, wanted, strict=True):
            for name in ("labels", "labels_b", "lam", "indices", "views"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
                assert getattr(one, name).dtype == getattr(other, name).dtype, name
            assert one.images.dtype == torch.uint8 and one.images.shape == other.images.shape
            assert one.images.is_contiguous()
            for image, expected in zip(one.images.numpy(), other.images.numpy(), strict=True):
                assert np.median(np.abs(image.astype(int) - expected)) <= 1 and fidelity(image, expected) > 22


def test_what_is_erased_and_mixed_is_the_same_to_the_bit():
    """The arithmetic of the device against that of the reference path, on the same pixels."""
    pixels = np.random.RandomState(0).randint(0, 256, (40, 3, 17, 23), np.uint8)
    partners = [(place + 1) % 40 for place in range(40)]
    drawn = [BOTH.draw((17, 23), random.Random(place)) if place % 4 else None for place in range(30)]
    found = mixed(torch.from_numpy(pixels), [*range(30)], partners[:30], drawn).numpy()
    kinds = set()
    for place, mix in enumerate(drawn):
        wanted, share = pixels[place], 1.0
        if mix is not None:
            wanted, share = BOTH(pixels[place], pixels[partners[place]], random.Random(place))
            kinds.add(mix.weight < 256)
            assert mix.lam == share
        assert np.array_equal(found[place], wanted)
    assert kinds == {True, False}


def test_an_erased_box_is_the_reference_paths_noise_to_the_bit(root):
    always = Augmentation(random_erasing=1.0)
    asked = views(root, always, Mixing())
    (batch,) = epoch(asked, batches())
    for image, view, number in zip(batch.images.numpy(), batch.views.tolist(), batch.indices.tolist(), strict=True):
        rng = asked.rng(view, number)
        always.draw((1, 1), 64, rng)
        drawn = always.draw_erasing((3, 64, 64), rng)
        assert np.array_equal(image[drawn.place], drawn.noise)


def test_an_epoch_can_be_begun_in_the_middle_and_broken_off(root):
    asked, sampler = views(root), batches(size=2)
    whole = epoch(asked, sampler)
    rest = epoch(asked, sampler, first_step=3)
    assert len(whole) == 5 and len(rest) == 2
    loader = DaliBatches(ViewsByDali(asked), sampler, ALONE, ONE_THREAD)
    sampler.start(1)
    first = iter(loader)
    again = [next(first), next(first)]
    sampler.start(1, 2)
    again += list(loader)  # the first iterator is given up, with batches in flight
    for found in (whole[3:] + rest[:0], whole[:5]):
        for one, other in zip(found, rest if len(found) == 2 else again, strict=True):
            assert torch.equal(one.images, other.images) and torch.equal(one.indices, other.indices)
    assert list(first) == []


def test_two_ranks_share_the_batches_of_one(root):
    asked = views(root)
    (whole,) = epoch(asked, batches(size=6))
    halves = [epoch(asked, batches(World(rank, 2, rank, torch.device("cpu"), "none", "test"), 6)) for rank in (0, 1)]
    for name in LabelledBatch._fields:
        assert torch.equal(torch.cat([getattr(batch, name) for (batch,) in halves]), getattr(whole, name)), name


def test_an_image_that_only_pillow_decodes_does_not_end_an_epoch(root, monkeypatch):
    """DALI stops on a file that seems good; the batches before and after it, in flight with it, stay as they are."""
    asked, sampler = views(root, Augmentation(0.3, True), Mixing()), batches(size=2)
    wanted = epoch(asked, sampler)
    victim, original = int(wanted[1].indices[0]), dali_graph.prepare

    def spoilt(encoded, *rest, **options):
        prepared = original(encoded, *rest, **options)
        file = asked.source.image(victim)
        return prepared._replace(encoded=np.frombuffer(damaged_png(), np.uint8)) if encoded == file else prepared

    monkeypatch.setattr(pipeline.graph, "prepare", spoilt)
    found = epoch(asked, sampler)
    assert len(found) == 5
    for one, expected in zip(found, wanted, strict=True):
        assert torch.equal(one.images, expected.images) and torch.equal(one.indices, expected.indices)


# -- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_learn_from_dalis_batches(prepared):
    run = launcher.run(launcher.plan(launcher.from_values({
        "name": "dali", "script": "train_classifier.py", "distribution": "torchrun", "compute": {"processes_per_host": 2},
        "inputs": {name: {"folder": str(prepared("digits") / name)} for name in ("train", "validation")},
        "hyperparameters": {"model": "resnet10t", "model_options": {"in_chans": 1}, "image_size": 16, "epochs": 1,
                            "global_batch_size": 32, "learning_rate": 0.003, "max_shift_pixels": 1, "min_crop_area": 0.8,
                            "mixup": 0.2, "preprocessing": "dali", "num_workers": 1},
    })))  # fmt: skip
    status = run.wait(240)
    assert status == "Completed", (status, [line for _, line in run.logs()][-20:])
    assert run.result()["world_size"] == 2 and run.result()["validation_accuracy"] > 0.3


def test_its_batches_come_one_by_one_though_processes_make_the_held_out_ones(root):
    chosen = ClassifierSettings(model="x", preprocessing="dali", image_size=32, global_batch_size=4, num_workers=2)
    opened = open_loaders(open_data(root, root, chosen, 3), chosen, ALONE, batch_size_per_device=4)
    assert (opened.workers.kind, opened.workers.count, opened.crowd) == ("processes", 2, 0)


def test_without_the_package_the_script_says_what_to_install(root, monkeypatch):
    chosen = ClassifierSettings(model="x", preprocessing="dali")
    assert open_data(root, root, chosen, 3).recipe is not None
    original = pipeline.importlib.util.find_spec
    monkeypatch.setattr(
        pipeline.importlib.util, "find_spec", lambda name: None if name == "nvidia.dali" else original(name)
    )
    with pytest.raises(
        ValueError, match="preprocessing: dali needs NVIDIA's package: pip install nvidia-dali-cuda1[23]0"
    ):
        open_data(root, root, chosen, 3)
    assert open_data(root, root, replace(chosen, preprocessing="cpu"), 3).recipe is None


def test_without_the_package_the_launcher_says_so_first(monkeypatch):
    job = launcher.from_values({
        "name": "dali", "script": "train_classifier.py", "inputs": {name: {"folder": "."} for name in ("train", "validation")},
        "hyperparameters": {"model": "resnet10t", "preprocessing": "dali"},
    })  # fmt: skip
    assert not [issue for issue in launcher.plan(job).issues if "preprocessing" in issue.key]
    find = process.importlib.util.find_spec
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None if name == "nvidia.dali" else find(name))
    [issue] = [issue for issue in launcher.plan(job).errors if "preprocessing" in issue.key]
    assert "not installed" in issue.found and "[dali]" in issue.fix
    [issue] = [issue for issue in launcher.plan(job, on="docker").errors if "preprocessing" in issue.key]
    assert "vision-launcher-local, which lacks" in issue.found


@pytest.mark.parametrize(
    ("asked", "processes", "threads", "reported"),
    [
        ("auto", 1, 7, r"7 threads \(auto: 8 cores for 1 process, one of them for training itself\)"),
        ("auto", 8, 1, r"1 thread \(auto: 8 cores for 8 processes\)"),
        (0, 1, 1, r"1 thread, as num_workers says \(8 cores for 1 process\)$"),
        (
            3,
            4,
            3,
            r"3 threads, as num_workers says \(8 cores for 4 processes\). WARNING: more workers than cores",
        ),
    ],
)
def test_dalis_threads_are_those_of_the_cores_or_as_asked(monkeypatch, asked, processes, threads, reported):
    monkeypatch.setattr(workers, "usable_cores", lambda: 8)
    chosen = workers.choose_threads(
        ClassifierSettings(model="x", preprocessing="dali", num_workers=asked),
        ALONE,
        {"LOCAL_WORLD_SIZE": str(processes)},
    )
    assert chosen.count == threads and re.match(reported, chosen.about)


def test_processes_that_may_use_different_numbers_of_cores_agree_on_dalis_threads(monkeypatch):
    """A probe tries the same numbers of threads in every process, each by collectives."""
    monkeypatch.setattr(workers, "usable_cores", lambda: 8)
    monkeypatch.setattr(World, "gather_rows", lambda self, rows: torch.cat([rows, torch.tensor([4])]))
    chosen = workers.choose_threads(ClassifierSettings(model="x", preprocessing="dali", num_workers="auto"), ALONE, {})
    assert chosen.count == 4 and chosen.about.endswith("another process can have 4)")

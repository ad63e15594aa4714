"""Labelled folders: the same batches at any number of processes, every held-out image once, augmentation by seed alone."""

import random

import pytest
import torch
from PIL import Image
from training.data.batches import EvaluationBatches, TrainingBatches
from training.data.folders import Augmentation, LabelledFolder, fit, open_data, random_box
from training.distributed import World
from training.script_settings import LabelledImageSettings


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, torch.device("cpu"), "none", "test")


@pytest.fixture
def images(tmp_path):
    """Twelve noisy colour images of different sizes in three classes, JPEG and PNG, in train and validation."""
    for split in ("train", "validation"):
        for label in ("a", "b", "c"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                noise = torch.randint(
                    0, 256, (20 + number * 7, 33, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number)
                )
                Image.fromarray(noise.numpy()).save(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
    return tmp_path


@pytest.mark.parametrize("size", [1, 2, 4])
def test_global_batches_are_the_same_at_any_world_size(size):
    def batches(ranks: int) -> list[list]:
        samplers = [TrainingBatches(50, 8, world(rank, ranks), seed=3) for rank in range(ranks)]
        for sampler in samplers:
            sampler.epoch = 2
        return [[draw for share in shares for draw in share] for shares in zip(*samplers, strict=True)]

    assert batches(size) == batches(1)
    assert len(batches(size)) == 6 and len({number for batch in batches(size) for _, number in batch}) == 48


def test_another_epoch_or_seed_is_another_order():
    def order(seed: int, epoch: int) -> list:
        sampler = TrainingBatches(50, 10, world(), seed)
        sampler.epoch = epoch
        return [number for batch in sampler for _, number in batch]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 1) == order(0, 1)


@pytest.mark.parametrize(("images", "size", "ranks"), [(10, 4, 3), (7, 3, 4), (1, 8, 2), (12, 4, 1)])
def test_every_held_out_image_comes_exactly_once(images, size, ranks):
    drawn = [
        draw for rank in range(ranks) for batch in EvaluationBatches(images, size, world(rank, ranks)) for draw in batch
    ]
    assert sorted(drawn) == [(0, number) for number in range(images)]


def test_a_batch_that_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match="does not divide by 3"):
        TrainingBatches(100, 8, world(0, 3), 0)
    with pytest.raises(ValueError, match="lower global_batch_size"):
        TrainingBatches(5, 8, world(), 0)


def test_augmentation_depends_on_seed_epoch_and_image_alone(images):
    strong = Augmentation(0.3, True, 4, 30)
    folder = LabelledFolder(images / "train", 16, augmentation=strong, seed=1)
    first = folder[(1, 5)][0]
    random.random(), torch.rand(3), folder[(1, 7)]
    assert torch.equal(folder[(1, 5)][0], first)
    assert torch.equal(LabelledFolder(images / "train", 16, augmentation=strong, seed=1)[(1, 5)][0], first)
    assert not torch.equal(folder[(2, 5)][0], first)
    assert not torch.equal(LabelledFolder(images / "train", 16, augmentation=strong, seed=2)[(1, 5)][0], first)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_give_the_same_pixels_with_and_without_workers(images, workers):
    settings = LabelledImageSettings(
        image_size=16, global_batch_size=4, num_workers=workers, max_shift_pixels=3, max_rotation_degrees=20
    )
    data = open_data(images / "train", images / "validation", settings, 3, world())
    batches = []
    for epoch in (1, 2):
        data.train_batches.epoch = epoch
        batches += [(pixels.sum().item(), labels.tolist()) for pixels, labels in data.train]
    assert data.classes == ["a", "b", "c"] and len(batches) == 6
    reference = LabelledFolder(images / "train", 16, augmentation=Augmentation(1.0, False, 3, 20))
    for epoch in (1, 2):
        data.train_batches.epoch = epoch
        expected = [
            (sum(reference[draw][0].sum().item() for draw in batch), [reference[draw][1] for draw in batch])
            for batch in data.train_batches
        ]
        assert batches[(epoch - 1) * 3 : epoch * 3] == expected


@pytest.mark.parametrize(("channels", "shape"), [(1, (1, 16, 16)), (3, (3, 16, 16))])
def test_images_are_bytes_of_the_size_and_channels_asked_for(images, channels, shape):
    pixels, label = LabelledFolder(images / "validation", 16, channels)[(0, 11)]
    assert pixels.dtype == torch.uint8 and tuple(pixels.shape) == shape and label == 2


def test_different_classes_in_the_two_folders_are_named(images):
    (images / "validation/c").rename(images / "validation/d")
    with pytest.raises(ValueError, match="only one of them has c, d"):
        open_data(
            images / "train",
            images / "validation",
            LabelledImageSettings(image_size=16, global_batch_size=4),
            3,
            world(),
        )


def test_a_limit_keeps_the_first_images_of_each_class(images):
    folder = LabelledFolder(images / "train", 16, images_per_class=2)
    assert [(path.rsplit("/", 1)[1], label) for path, label in folder.images] == [
        (name, label) for label in range(3) for name in ("0.jpg", "1.png")
    ]


@pytest.mark.parametrize("size", [(10, 10), (100, 30), (30, 100), (8, 9)])
def test_fit_fills_the_square(size):
    assert fit(Image.new("RGB", size), 16).size == (16, 16)


def test_crops_keep_their_area_and_aspect_and_move_about():
    chance, boxes = random.Random(0), set()
    for _ in range(200):
        left, top, right, bottom = random_box((120, 90), 0.25, chance)
        assert 0 <= left < right <= 120 and 0 <= top < bottom <= 90
        assert 0.24 <= (right - left) * (bottom - top) / (120 * 90) <= 1
        assert 0.72 <= (right - left) / (bottom - top) <= 1.38
        boxes.add((left, top))
    assert len(boxes) > 100
    assert random_box((300, 30), 1.0, chance) == (130, 0, 170, 30), "a strip gives its widest middle"


def test_a_crop_shows_a_part_of_the_image():
    image = Image.linear_gradient("L")
    darkest = [Augmentation(min_crop_area=0.3)(image, 16, random.Random(seed)).getextrema()[0] for seed in range(30)]
    assert max(darkest) > 60 and min(darkest) < 20


def test_fit_takes_the_middle_without_squashing():
    image = Image.linear_gradient("L").resize((64, 64)).transpose(Image.Transpose.ROTATE_90).resize((128, 64))
    middle = fit(image, 64)
    assert middle.getpixel((0, 0)) == pytest.approx(64, abs=6) or middle.getpixel((0, 0)) == pytest.approx(191, abs=6)


def test_rows_and_columns_stay_rows_and_columns(tmp_path):
    (tmp_path / "a").mkdir()
    image = Image.new("L", (16, 16))
    image.putpixel((3, 5), 255)
    image.save(tmp_path / "a/0.png")
    pixels, _ = LabelledFolder(tmp_path, 16, 1)[(0, 0)]
    assert pixels[0, 5, 3] == 255


def test_every_augmentation_setting_reaches_training_images_and_none_the_held_out_ones(images):
    def data(**settings):
        made = open_data(
            images / "train",
            images / "validation",
            LabelledImageSettings(image_size=16, global_batch_size=4, **settings),
            3,
            world(),
        )
        return made.train.dataset, made.validation.dataset

    plain, held_out = data()
    for settings in (
        {"min_crop_area": 0.3},
        {"horizontal_flip": True},
        {"max_shift_pixels": 3},
        {"max_rotation_degrees": 30.0},
    ):
        changed, still = data(**settings)
        assert any(not torch.equal(changed[(1, number)][0], plain[(1, number)][0]) for number in range(12)), settings
        assert all(torch.equal(still[(1, number)][0], held_out[(1, number)][0]) for number in range(12)), settings
    one, two = data(seed=1, max_shift_pixels=3)[0], data(seed=2, max_shift_pixels=3)[0]
    assert any(not torch.equal(one[(1, number)][0], two[(1, number)][0]) for number in range(12))
    assert len(data(images_per_class=2)[0]) == 6


def test_a_shift_moves_and_a_flip_mirrors():
    image = Image.new("L", (16, 16))
    image.putpixel((8, 8), 255)
    moved = {Augmentation(max_shift_pixels=3)(image, 16, random.Random(seed)).getbbox()[:2] for seed in range(60)}
    assert {x - 8 for x, _ in moved} == {y - 8 for _, y in moved} == set(range(-3, 4))
    image.putpixel((0, 0), 128)
    corners = {
        Augmentation(horizontal_flip=True)(image, 16, random.Random(seed)).getpixel((15, 0)) for seed in range(20)
    }
    assert corners == {0, 128}

"""Views: what (seed, view, number) give is the same always and everywhere, and varied and mixed as the papers say."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from training.data.augmentation import Augmentation, decoded_part, random_box
from training.data.batches import TrainingBatches
from training.data.broken import BrokenImages
from training.data.decode.decoding import as_pixels
from training.data.decode.fast import FastPreprocessor
from training.data.decode.reference import ReferencePreprocessor, fit, vary
from training.data.mixing import Mixing, blend, draw_paste, partners
from training.data.orders import FreeOrder
from training.data.sources.folders import LabelledFolder
from training.data.views import TrainingViews, collate_views
from training.distributed.world import World

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
STRONG = Augmentation(0.3, True, 2, 20, 0.5)
BOTH = Mixing(0.8, 1.0, 0.75)


def noise(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """The same bytes on every machine."""
    return np.random.RandomState(seed).randint(0, 256, (height, width, channels), np.uint8)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Eleven images of noise in three classes, 16 × 16 pixels the first of each and larger the others."""
    root = tmp_path_factory.mktemp("images")
    for number in range(11):
        folder = root / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        Image.fromarray(noise(number, 16 + 5 * (number // 3), 16)).save(folder / f"{number:02}.png")
    return root


def views(root: Path, augmentation: Augmentation = STRONG, mixing: Mixing = BOTH, seed: int = 1, preprocessor=FastPreprocessor, **options) -> TrainingViews:  # fmt: skip
    how = {"channels": 3, "preprocessor": preprocessor(), "broken": BrokenImages(fail=True)}
    return TrainingViews(LabelledFolder(root, **options), 16, augmentation, mixing, seed, **how)


def varied(augmentation: Augmentation, image: Image.Image, seed: int) -> np.ndarray:
    rng = random.Random(seed)
    pixels = as_pixels(vary(image, 16, augmentation.draw(image.size, 16, rng)))
    augmentation.erase(pixels, rng)
    return pixels


def same(one, other) -> bool:
    return torch.equal(one.image, other.image) and one[1:] == other[1:]


# -- replay ------------------------------------------------------------------------------------------------------------


def test_a_view_depends_on_seed_view_and_number_alone(root):
    reference = {draw: views(root)[draw] for draw in [(view, number) for view in (1, 2) for number in range(11)]}
    asked = views(root)
    for draw in reversed(reference):
        random.random(), torch.rand(3)
        assert same(asked[draw], reference[draw]), "in another order"
    assert all(not same(reference[1, number], reference[2, number]) for number in range(11)), "another view"
    assert sum(not same(views(root, seed=2)[draw], item) for draw, item in reference.items()) == 22, "another seed"
    together = dict(zip(reference, asked.__getitems__(list(reference)), strict=True))
    assert all(same(together[draw], item) for draw, item in reference.items()), "in one batch"


@pytest.mark.parametrize(
    ("workers", "ranks", "accumulation", "batch"), [(0, 1, 1, 6), (2, 1, 2, 6), (1, 2, 1, 4), (0, 5, 1, 5)]
)
def test_loaders_give_the_same_views_at_any_number_of_workers_and_ranks_and_any_batch_size(root, workers, ranks, accumulation, batch):  # fmt: skip
    asked, seen = views(root), {}
    for rank in range(ranks):
        world = World(rank, ranks, rank, torch.device("cpu"), "none", "test")
        batches = TrainingBatches(11, batch, world, 1, accumulation=accumulation, views=2)
        batches.start(4)  # view 2, for the second time
        for made in DataLoader(asked, batch_sampler=batches, collate_fn=collate_views, num_workers=workers):
            assert made.images.dtype == torch.uint8 and made.lam.dtype == torch.float32
            assert made.images.is_contiguous(), "channels, height, width"
            assert {part.dtype for name, part in made._asdict().items() if name not in ("images", "lam")} == {torch.int64}  # fmt: skip
            for image, *values in zip(*made, strict=True):
                label, label_b, share, number, view = (value.item() for value in values)
                seen[view, number] = (image, label, label_b, share)
    assert len(seen) == 11 // batch * batch and {view for view, _ in seen} == {2}
    for draw, (image, *values) in seen.items():
        expected = views(root)[draw]
        assert torch.equal(image, expected.image)
        assert values == pytest.approx([expected.label, expected.label_b, expected.lam])


@pytest.mark.parametrize("preprocessor", [ReferencePreprocessor, FastPreprocessor])
def test_the_pixels_of_a_view_never_change_by_accident(root, preprocessor):
    """Mirrored, shifted, erased and mixed noise, whose pixels no scaling and no decoder could round otherwise.

    A change here makes every kept view worthless: if it is meant, raise VIEWS_VERSION."""
    pixels = hashlib.sha256()
    for mixing in (Mixing(), Mixing(mixup=0.4), Mixing(cutmix=1.0), Mixing(0.4, 1.0, 0.5)):
        asked = views(root, Augmentation(1.0, True, 3, 0.0, 0.5), mixing, 7, preprocessor, images_per_class=1)
        for draw in [(1, 0), (1, 1), (1, 2), (2, 1), (300, 2)]:
            item = asked[draw]
            pixels.update(item.image.numpy().tobytes() + f"{item.label} {item.label_b} {item.lam}".encode())
    assert pixels.hexdigest() == "7bc3c5cd11a7190e62383e0f38b936c3be9a0ca029d40110361d78c52b57c49f"


@pytest.mark.parametrize("preprocessor", [ReferencePreprocessor, FastPreprocessor])
def test_the_crops_and_rotations_of_a_view_never_change_by_accident(root, preprocessor):
    """Means of quarters: the last bit of a pixel is the libraries' affair."""
    image = views(root, Augmentation(0.3, True, 2, 20), Mixing(), 7, preprocessor)[(3, 9)].image.float()
    quarters = torch.nn.functional.avg_pool2d(image, 8).flatten().tolist()
    wanted = [71.3, 101.3, 86.5, 145.7, 61.2, 103.5, 83.6, 133.6, 77.5, 87.0, 96.0, 112.9]
    assert quarters == pytest.approx(wanted, abs=1.5 if preprocessor is ReferencePreprocessor else 3)
    assert random_box((500, 375), 0.08, random.Random("7/1/0")) == (248, 79, 423, 227)


# -- variation ---------------------------------------------------------------------------------------------------------


def test_crops_keep_their_area_and_aspect_and_move_about():
    rng, boxes = random.Random(0), set()
    for _ in range(200):
        left, top, right, bottom = random_box((120, 90), 0.25, rng)
        assert 0 <= left < right <= 120 and 0 <= top < bottom <= 90
        assert 0.24 <= (right - left) * (bottom - top) / (120 * 90) <= 1
        assert 0.72 <= (right - left) / (bottom - top) <= 1.38
        boxes.add((left, top))
    assert len(boxes) > 100
    assert random_box((300, 30), 1.0, rng) == (130, 0, 170, 30), "a strip gives its widest middle"


def test_a_crop_shows_a_part_of_the_image():
    image = Image.linear_gradient("L")
    darkest = [varied(Augmentation(min_crop_area=0.3), image, seed).min() for seed in range(30)]
    assert max(darkest) > 60 and min(darkest) < 20


@pytest.mark.parametrize("size", [(10, 10), (100, 30), (30, 100), (8, 9)])
def test_fit_fills_the_square(size):
    assert fit(Image.new("RGB", size), 16).size == (16, 16)


@pytest.mark.parametrize("image_size", [(1600, 1200), (427, 641), (1023, 2047)])
def test_a_crop_that_can_be_decoded_smaller_begins_and_ends_where_that_has_pixels(image_size):
    parts = Counter()
    for seed in range(300):
        whole = random_box(image_size, 0.08, random.Random(seed))
        for size in (32, 64, 224):
            variation = Augmentation(0.08).draw(image_size, size, random.Random(seed))
            box, part = variation.box, decoded_part(whole, size)
            parts[part] += 1
            assert variation.part == part and not any(side % part for side in box)
            assert part == 1 or min(box[2] - box[0], box[3] - box[1]) >= part * size
            assert max(abs(drawn - side) for drawn, side in zip(box, whole)) < part
            assert 0 <= box[0] < box[2] <= image_size[0] and 0 <= box[1] < box[3] <= image_size[1]
    assert set(parts) == {1, 2, 4, 8}


def test_fit_takes_the_middle_without_squashing():
    image = Image.linear_gradient("L").resize((64, 64)).transpose(Image.Transpose.ROTATE_90).resize((128, 64))
    middle = fit(image, 64)
    assert middle.getpixel((0, 0)) == pytest.approx(64, abs=6) or middle.getpixel((0, 0)) == pytest.approx(191, abs=6)


def test_a_shift_moves_and_a_flip_mirrors():
    image = Image.new("L", (16, 16))
    image.putpixel((8, 8), 255)
    moved = [varied(Augmentation(max_shift_pixels=3), image, seed) for seed in range(60)]
    places = [tuple(np.argwhere(pixels)[0].tolist()) for pixels in moved]
    assert {x - 8 for _, _, x in places} == {y - 8 for _, y, _ in places} == set(range(-3, 4))
    image.putpixel((0, 0), 128)
    corners = Counter(int(varied(Augmentation(horizontal_flip=True), image, seed)[0, 0, 15]) for seed in range(400))
    assert set(corners) == {0, 128} and 150 < corners[128] < 250


def test_erasing_fills_a_box_of_the_papers_size_with_noise_and_leaves_the_rest():
    areas, aspects, places = [], [], set()
    for seed in range(400):
        pixels = np.full((3, 96, 128), 77, np.uint8)
        Augmentation(random_erasing=1.0).erase(pixels, random.Random(seed))
        changed = (pixels != 77).any(0)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        high, wide = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
        box = pixels[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert changed.sum() >= 0.98 * high * wide, "one box, wholly erased"
        assert abs(box.astype(float).mean() - 127.5) < 12 and box.std() > 60, "of noise from 0 to 255"
        areas.append(high * wide / (96 * 128))
        aspects.append(wide / high)
        places.add((rows[0], columns[0]))
    assert 0.018 < min(areas) < 0.03 and 0.3 < max(areas) < 0.345 and abs(np.mean(areas) - 0.17) < 0.015
    assert 0.28 < min(aspects) < 0.36 and 2.8 < max(aspects) < 3.6 and abs(np.median(aspects) - 1) < 0.15
    assert len(places) > 300


def test_as_many_images_are_erased_as_asked_for():
    image = Image.new("RGB", (16, 16))
    erased = [varied(Augmentation(random_erasing=0.3), image, seed).any() for seed in range(1000)]
    assert 250 < sum(erased) < 350


# -- mixing ------------------------------------------------------------------------------------------------------------

BLACK, WHITE = (np.full((3, 20, 30), value, np.uint8) for value in (0, 255))


def paste(own: np.ndarray, other: np.ndarray, share: float, rng: random.Random) -> tuple[np.ndarray, float]:
    drawn, mixed = draw_paste(own.shape[1:], share, rng), own.copy()
    mixed[:, drawn.rows, drawn.columns] = other[:, drawn.rows, drawn.columns]
    return mixed, drawn.lam


def shares(mixing: Mixing, count: int = 2000) -> tuple[list[float], Counter]:
    """The own shares of mixed images, and how many were blended, pasted or left alone."""
    found, kinds = [], Counter()
    for seed in range(count):
        rng = random.Random(seed)
        if not mixing.happens(rng):
            kinds["alone"] += 1
            continue
        pixels, share = mixing(WHITE, BLACK, rng)
        assert pixels.mean() / 255 == pytest.approx(share, abs=1 / 255)
        kinds["blended" if np.ptp(pixels) == 0 and 0 < share < 1 else "pasted"] += 1
        found.append(share)
    return found, kinds


def test_a_blend_is_the_share_of_every_pixel_rounded():
    own, other = (noise(seed, 40, 50).transpose(2, 0, 1) for seed in (1, 2))
    kept = own.copy(), other.copy()
    for share in (0.0, 0.3, 0.5, 0.9999, 1.0):
        mixed, exact = blend(own, other, share)
        assert exact == round(share * 256) / 256
        wanted = np.floor(exact * own.astype(float) + (1 - exact) * other + 0.5)
        assert mixed.dtype == np.uint8 and np.array_equal(mixed, wanted)
    assert np.array_equal(blend(own, other, 1.0)[0], own) and np.array_equal(blend(own, other, 0.0)[0], other)
    assert np.array_equal(own, kept[0]) and np.array_equal(other, kept[1]), "others may need them too"


def test_a_paste_is_one_box_of_the_other_image_and_its_share_counts_pixels():
    own, other = (noise(seed, 20, 30).transpose(2, 0, 1) for seed in (1, 2))
    other[own == other] ^= 1
    kept, clipped, whole = own.copy(), 0, 0
    for seed in range(300):
        rng = random.Random(seed)
        wanted = rng.random()
        mixed, share = paste(own, other, wanted, rng)
        pasted = (mixed != own).all(0)
        assert np.array_equal(mixed[:, pasted], other[:, pasted]) and np.array_equal(mixed[:, ~pasted], own[:, ~pasted])
        assert share == pytest.approx(1 - pasted.mean())
        if pasted.any():
            rows, columns = np.flatnonzero(pasted.any(1)), np.flatnonzero(pasted.any(0))
            assert pasted.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1), "one box"
        asked = int(20 * (1 - wanted) ** 0.5) * int(30 * (1 - wanted) ** 0.5)
        assert pasted.sum() <= asked
        clipped, whole = clipped + (pasted.sum() < asked), whole + (pasted.sum() == asked)
    assert clipped > 50 and whole > 50, "the middle of a box is anywhere in the image"
    assert np.array_equal(own, kept)
    assert paste(own, other, 1.0, random.Random(0))[1] == 1.0


@pytest.mark.parametrize(
    ("mixing", "alone", "blended"),
    [(Mixing(), 1, 0), (Mixing(0.8), 0, 1), (Mixing(0, 1.0), 0, 0), (Mixing(0.8, 1.0), 0, 0.5), (Mixing(1.0, 1.0, 0.4), 0.6, 0.2)],
)  # fmt: skip
def test_as_many_images_are_mixed_as_asked_for_and_with_both_half_of_them_by_each(mixing, alone, blended):
    _, kinds = shares(mixing)
    assert kinds["alone"] / 2000 == pytest.approx(alone, abs=0.04)
    assert kinds["blended"] / 2000 == pytest.approx(blended, abs=0.04)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_beta_distributed(alpha):
    found, _ = shares(Mixing(mixup=alpha))
    assert np.mean(found) == pytest.approx(0.5, abs=0.03)
    assert np.var(found) == pytest.approx(1 / (8 * alpha + 4), rel=0.12)  # of Beta(alpha, alpha)


@pytest.mark.parametrize("images", [1, 2, 10, 11])
def test_partners_come_in_pairs_that_change_from_view_to_view(images):
    found = [partners(FreeOrder(images), 3, view) for view in range(1, 30)]
    for partner in found:
        alone = [number for number in range(images) if partner[partner[number]] != number]
        assert len(alone) == (images % 2 if images > 1 else 0)
        assert all(partner[number] != number for number in range(images)) or images == 1
    if images > 2:
        assert len({partner[0] for partner in found}) > images / 2
        assert not np.array_equal(partners(FreeOrder(images), 4, 1), found[0])


def test_an_image_is_mixed_with_the_very_view_that_its_partner_would_be(root):
    """Varied and erased first, mixed then; the labels and the share go with the pixels."""
    plain, mixed = views(root, mixing=Mixing()), views(root, mixing=Mixing(mixup=1.0, probability=0.7))
    happened = 0
    for number in range(11):
        own, item = plain[(2, number)], mixed[(2, number)]
        assert (own.label, own.lam, own.image_index, own.view) == (own.label_b, 1.0, number, 2)
        assert (item.label, item.image_index, item.view) == (own.label, number, 2)
        if item.lam == 1.0:
            assert torch.equal(item.image, own.image)
            continue
        partner = plain[(2, int(partners(FreeOrder(11), 1, 2)[number]))]
        assert item.label_b == partner.label
        assert np.array_equal(item.image.numpy(), blend(own.image.numpy(), partner.image.numpy(), item.lam)[0])
        happened += 1
    assert 4 <= happened < 11


@pytest.mark.parametrize("epoch", [1, 2, 7])
def test_mixing_decodes_each_image_of_an_epoch_once(root, monkeypatch, epoch):
    """Partners come in the same batch, also where a view is drawn again."""
    read, original = Counter(), LabelledFolder.image
    monkeypatch.setattr(
        LabelledFolder, "image", lambda self, number: (read.update([number]), original(self, number))[1]
    )
    batches = TrainingBatches(11, 4, ALONE, 1, accumulation=2, views=2)
    batches.start(epoch)
    asked = views(root, mixing=Mixing(mixup=1.0))
    items = [item for batch in batches for item in asked.__getitems__(batch)]
    assert len(items) == 8 and len({item.image_index for item in items}) == 8
    assert read == Counter([item.image_index for item in items])

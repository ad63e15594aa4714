"""Images with masks: pairs, what a mask may hold, both varied together, and a clear word for every mistake in a folder."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from training.data.broken import BrokenImages
from training.data.crops import RandomCrop
from training.data.decode.decoding import BrokenImage
from training.data.decode.reference import ReferencePreprocessor
from training.data.loaders import open_loaders
from training.data.masks import MaskedImages, open_data, read_mask
from training.data.pairs import pair_up
from training.data.same_images import identity
from training.distributed.world import World
from training.runtime.failure import describe
from training.settings.segmentation import SegmentationSettings

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")


def settings(**values) -> SegmentationSettings:
    return SegmentationSettings(model="x", **{"classes": 4, "image_size": (32, 48), "global_batch_size": 4, **values})


def masked(root: Path, chosen: SegmentationSettings, **options) -> MaskedImages:
    return MaskedImages(root, chosen, broken=BrokenImages(fail=True), **options)


def varied(variation: RandomCrop, image: Image.Image, mask: Image.Image, size: tuple[int, int], rng: random.Random):
    """A colour image (height, width, 3) and its mask (height, width) as a variation cuts them."""
    cut = variation.draw(image.size[::-1], size, rng)
    part = ReferencePreprocessor().scaled(np.array(image.crop(cut.box)), cut.size)
    labels = np.array(mask.crop(cut.box).resize(cut.size[::-1], Image.Resampling.NEAREST))
    return (
        cut.on_canvas(part, variation.crop_size, 0).transpose(1, 2, 0),
        cut.on_canvas(labels, variation.crop_size, 255),
    )


def read(file: Path, classes: int, ignore_index: int) -> Image.Image:
    return read_mask(file.read_bytes(), file, classes, ignore_index)


def write_pair(root: Path, stem: str, labels: np.ndarray, ending: str = ".png") -> None:
    """A mask, and an image whose brightness is 60 times the mask's class."""
    for kind, array, end in (("images", np.where(labels < 4, labels * 60, 0), ending), ("masks", labels, ".png")):
        file = root / kind / f"{stem}{end}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array.astype(np.uint8)).save(file)


@pytest.fixture
def root(tmp_path) -> Path:
    """Six pairs of different sizes, in four quarters of classes 0 to 3, in a subfolder too."""
    for number in range(6):
        labels = np.zeros((40 + number * 8, 60), dtype=np.uint8)
        labels[:20, 30:], labels[20:, :30], labels[20:, 30:] = 1, 2, 3
        write_pair(tmp_path, f"{'left' if number % 2 else '.'}/{number}", labels)
    return tmp_path


def test_an_image_and_its_mask_have_the_same_name_below_their_folders(tmp_path):
    for name in ("images/b/x.1.JPG", "images/a.jpeg", "masks/b/x.1.png", "masks/a.PNG", "masks/alone.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for hidden in ("images/.a.jpg", "images/.cache/c.png", "images/readme.txt"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).touch()
    names = [tuple(file.relative_to(tmp_path).as_posix() for file in pair) for pair in pair_up(tmp_path)]
    assert names == [("images/a.jpeg", "masks/a.PNG"), ("images/b/x.1.JPG", "masks/b/x.1.png")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no images. They belong in .*images"),
        (["masks/a.png"], "no images. They belong in .*images"),
        (["images/a.png", "images/b.png", "masks/a.png"], "1 of 2 images have no mask: .*images/b.png needs .*masks/b.png"),
        (["images/sub/a.jpg", "masks/a.png"], "1 of 1 images have no mask: .*a.jpg needs .*masks/sub/a.png"),
        (["images/a.png", "images/a.jpg", "masks/a.png"], "images/a.jpg and a.png would share one mask"),
    ],
)  # fmt: skip
def test_a_folder_without_pairs_says_what_it_lacks(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        pair_up(tmp_path)


def test_a_mask_of_another_size_is_named_with_both_sizes(root):
    Image.new("L", (60, 39)).save(root / "masks/2.png")
    folder = masked(root, settings())
    with pytest.raises(ValueError, match="masks/2.png is 60 × 39 pixels, its image 2.png 60 × 56"):
        [folder[(1, number)] for number in range(6)]


def test_a_class_that_is_out_of_range_is_named_with_its_place(root):
    labels = np.array(Image.open(root / "masks/2.png"))
    labels[5, 7] = labels[6, 0] = 4
    Image.fromarray(labels).save(root / "masks/2.png")
    message = r"masks/2.png: class 4 at row 5, column 7 \(2 such pixels\).* 0 to 3, and 255 .* raise classes"
    with pytest.raises(ValueError, match=message):
        read(root / "masks/2.png", 4, 255)
    assert read(root / "masks/2.png", 5, 255)[5, 7] == 4
    assert read(root / "masks/2.png", 4, 4)[5, 7] == 4, "it is what is ignored"


def test_masks_of_8_bits_a_palette_or_black_and_white_hold_the_same_classes(tmp_path):
    labels = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    grey = Image.fromarray(labels)
    palette = Image.fromarray(labels, "P")
    palette.putpalette([200, 10, 10, 10, 200, 10])
    for name, image in (("grey", grey), ("palette", palette), ("bits", Image.fromarray(labels * 255).convert("1"))):
        image.save(tmp_path / f"{name}.png")
        assert np.array_equal(read(tmp_path / f"{name}.png", 2, 255), labels), name


def grey_png_of_4_bits(file: Path) -> None:
    """Two pixels, classes 1 and 2, which Pillow would read as 17 and 34 (and cannot write)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 2, 1, 4, 0, 0, 0, 0)
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\x12")) + chunk(b"IEND", b""))  # fmt: skip


def test_pixels_that_are_no_class_numbers_are_refused(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "colour.png")
    Image.new("I;16", (4, 4)).save(tmp_path / "deep.png")
    grey_png_of_4_bits(tmp_path / "shallow.png")
    (tmp_path / "text.png").write_text("no image")
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1000])
    cases = {
        "colour": "RGB pixels",
        "deep": "I(;16)? pixels",
        "shallow": "4-bit grey",
        "text": "cannot be read",
        "cut": "cannot be read",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=f"{name}.png.*{message}"):
            read(tmp_path / f"{name}.png", 256, 255)


def test_an_image_that_cannot_be_read_is_named(root):
    (root / "images/left/1.png").write_bytes((root / "images/left/1.png").read_bytes()[:60])
    folder = masked(root, settings())
    with pytest.raises(ValueError, match="images/left/1.png cannot be read as an image"):
        [folder[(1, number)] for number in range(6)]


def test_a_run_may_go_on_with_names_for_its_classes(root):
    unnamed, named = (
        identity(open_data(root, root, settings(class_names=names), 3))
        for names in (None, ["sky", "road", "car", "tree"])
    )
    assert unnamed == named


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_mask_is_the_first_thing_that_the_failure_file_says(root, workers):
    write_pair(root, "0", np.full((40, 60), 7))
    loaders = open_loaders(
        open_data(root, root, settings(), 3), settings(num_workers=workers), ALONE, batch_size_per_device=4
    )
    with pytest.raises(ValueError) as failure:
        list(loaders.train)
    assert describe(failure.value, "0").startswith(
        f"rank 0: ValueError: {root}/masks/0.png: class 7 at row 0, column 0"
    )


def test_training_masks_go_with_their_images_and_held_out_masks_stay_as_they_are(root):
    folder = masked(root, settings(), variation=RandomCrop((32, 48), 0.7, 2.0, True))
    seen = set()
    for epoch in range(20):
        for number in range(6):
            image, mask, *_ = folder[(epoch, number)]
            assert tuple(image.shape) == (3, 32, 48) and tuple(mask.shape) == (32, 48)
            assert image.dtype == mask.dtype == torch.uint8
            inside = mask != 255
            assert (image[:, ~inside] == 0).all(), "what is beyond the image is black and ignored"
            agree = (image[0] / 60).round() == mask
            assert agree[inside].float().mean() > 0.9, "only the seams between classes may differ"
            seen.add((inside.all().item(), mask[0, 0].item()))
    assert len(seen) > 4
    held_out = masked(root, settings())
    for number, (_, file) in enumerate(pair_up(root)):
        image, mask = held_out[(0, number)]
        assert tuple(image.shape) == (3, 32, 48)
        assert np.array_equal(mask.numpy(), np.array(Image.open(file)))


def test_scaling_makes_up_no_class_between_two_others():
    image, mask = Image.new("RGB", (40, 30)), Image.new("L", (40, 30), 0)
    mask.paste(3, (11, 7, 31, 22))
    seen = set()
    for number in range(20):
        vary = RandomCrop((32, 48), 0.5, 2.0, False)
        seen |= set(np.unique(varied(vary, image, mask, (50, 60), random.Random(number))[1]).tolist())
    assert seen == {0, 3, 255}


def test_a_crop_is_a_part_pixel_by_pixel_and_a_flip_mirrors_both(root):
    labels = np.arange(64 * 96, dtype=np.uint32).reshape(64, 96)
    image = Image.fromarray(np.stack([labels // 256, labels % 256, labels * 0], 2).astype(np.uint8))
    mask = Image.fromarray((labels % 256).astype(np.uint8))
    places, mirrored = set(), set()
    for number in range(50):
        cut, cut_mask = varied(RandomCrop((32, 48), 1, 1, True), image, mask, (64, 96), random.Random(number))
        values = cut.astype(int)
        values = values[..., 0] * 256 + values[..., 1]
        step = values[0, 1] - values[0, 0]
        first = values[0, 0] if step == 1 else values[0, -1]
        top, left = divmod(int(first), 96)
        assert np.array_equal(values[:, ::step], labels[top : top + 32, left : left + 48])
        assert np.array_equal(cut_mask, values % 256)
        places.add((top, left))
        mirrored.add(step)
    assert len(places) > 30 and mirrored == {1, -1}


def test_a_crop_beyond_the_image_sees_all_of_it():
    image, mask = Image.new("RGB", (20, 10), (9, 9, 9)), Image.new("L", (20, 10), 1)
    for number in range(20):
        cut, cut_mask = varied(RandomCrop((64, 64), 0.5, 0.5, False), image, mask, (40, 80), random.Random(number))
        assert np.count_nonzero(cut_mask == 1) == 20 * 40
        assert np.array_equal(cut[..., 0] == 9, cut_mask == 1)


def test_what_is_drawn_depends_on_seed_epoch_and_image_alone(root):
    def folder(seed: int) -> MaskedImages:
        return masked(root, settings(seed=seed), variation=RandomCrop((32, 32), 0.5, 2.0, True))

    image, mask, *_ = folder(1)[(1, 4)]
    random.random(), torch.rand(3)
    again = folder(1)
    again[(1, 2)]
    assert torch.equal(again[(1, 4)][0], image) and torch.equal(again[(1, 4)][1], mask)
    assert not torch.equal(folder(1)[(2, 4)][1], mask) and not torch.equal(folder(2)[(1, 4)][1], mask)


@pytest.mark.parametrize(("channels", "micro"), [(1, 4), (3, 2)])
def test_loaders_give_stacked_training_masks_and_held_out_masks_in_their_sizes(root, channels, micro):
    data = open_data(root, root, settings(crop_size=(32, 40), min_scale=0.8, max_scale=1.2), channels)
    loaders = open_loaders(data, settings(), ALONE, batch_size_per_device=micro, views=1)
    loaders.train_batches.start(1)
    batches = list(loaders.train)
    assert len(batches) == loaders.train_batches.accumulation == 4 // micro
    for (images, masks, indices, views), draws in zip(batches, loaders.train_batches, strict=True):
        assert tuple(images.shape) == (micro, channels, 32, 40) and tuple(masks.shape) == (micro, 32, 40)
        assert [*zip(views.tolist(), indices.tolist())] == draws
        for image, mask, draw in zip(images, masks, draws, strict=True):
            assert torch.equal(image, data.training[draw][0]) and torch.equal(mask, data.training[draw][1])
    assert batches[0]._fields == ("images", "masks", "indices", "views")
    held_out = list(loaders.validation)
    sizes = [(min(micro, 6 - first), channels, 32, 48) for first in range(0, 6, micro)]
    assert [tuple(images.shape) for images, _ in held_out] == sizes
    assert sorted(tuple(mask.shape) for _, masks in held_out for mask in masks) == [
        (40 + 8 * number, 60) for number in range(6)
    ]
    assert data.classes == ["0", "1", "2", "3"]


def test_image_and_mask_are_each_turned_as_their_file_says(root):
    """A photo lies on its side in its file, its mask was drawn as a viewer shows it."""
    image, mask = (Image.open(root / kind / "left/1.png") for kind in ("images", "masks"))
    image.load(), mask.load()
    upright = masked(root, settings())[(0, 3)]
    exif = Image.Exif()
    exif[0x0112] = 8  # a viewer turns it a quarter to the left
    image.transpose(Image.Transpose.ROTATE_270).save(root / "images/left/1.png", exif=exif)
    found = masked(root, settings())[(0, 3)]
    assert torch.equal(found[0], upright[0]) and torch.equal(found[1], upright[1])
    mask.transpose(Image.Transpose.ROTATE_270).save(root / "masks/left/1.png", exif=exif)
    assert torch.equal(masked(root, settings())[(0, 3)][1], upright[1])
    mask.transpose(Image.Transpose.ROTATE_270).save(root / "masks/left/1.png")
    with pytest.raises(ValueError, match="1.png is 48 × 60 pixels, its image 1.png 60 × 48, upright as EXIF says"):
        masked(root, settings())[(0, 3)]


def test_a_photograph_and_its_mask_are_cut_alike_by_both_ways_of_preprocessing(tmp_path):
    (tmp_path / "images").mkdir(), (tmp_path / "masks").mkdir()
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    photograph.save(tmp_path / "images/a.jpg", quality=95)
    brightness = np.array(Image.open(tmp_path / "images/a.jpg").convert("L"))
    Image.fromarray((brightness > 128).astype(np.uint8)).save(tmp_path / "masks/a.png")
    vary = RandomCrop((192, 256), 0.8, 1.2, True)
    size = {"image_size": (320, 480)}
    fast, reference = (
        masked(tmp_path, settings(preprocessing=name, **size), variation=vary) for name in ("cpu", "cpu_reference")
    )
    assert fast.preprocessor.name == "cpu" and reference.preprocessor.name == "cpu_reference"
    for view in range(10):
        (pixels, mask), (expected, expected_mask) = fast[(view, 0)][:2], reference[(view, 0)][:2]
        assert torch.equal(mask, expected_mask), "masks are the same to the bit"
        error = (pixels.double() - expected.double()).square().mean()
        assert 10 * torch.log10(255**2 / error) > 43, "PSNR in dB"
        bright = pixels.double().mean(0) > 128
        assert (bright == (mask == 1)).double().mean() > 0.8, "the mask lies on what it labels"
    assert masked(tmp_path, settings(**size)).preprocessor.name == "cpu_reference", "held-out images"


@pytest.mark.parametrize("damaged", ["images", "masks"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_or_mask_is_left_out_and_named_once(root, tmp_path, capfd, damaged, workers):
    file = root / damaged / "left/1.png"
    file.write_bytes(file.read_bytes()[:60])
    chosen = settings(num_workers=workers, global_batch_size=2)
    data = open_data(root, root, chosen, 3, output=tmp_path / "output")
    loaders = open_loaders(data, chosen, ALONE, batch_size_per_device=2)
    loaders.train_batches.start(1)
    images = torch.cat([batch.images for batch in loaders.train])
    assert len(images) == 6, "the next one comes in its place"
    assert sum(len(images) for images, _ in loaders.validation) == 5, "held out, it does not count"
    listing = (tmp_path / "output/broken_images.txt").read_text().splitlines()
    assert len(listing) == 1 and str(file) in listing[0]
    assert capfd.readouterr().out.count("skipped a broken image") == 1
    failing = open_data(root, root, settings(on_broken_image="fail"), 3)
    with pytest.raises(BrokenImage, match="left/1.png cannot be read as"):
        [failing.training[(1, number)] for number in range(6)]


def test_pairs_in_linked_folders_and_of_every_kind_of_image_are_found(tmp_path):
    for name in ("images/more/a.bmp", "masks/more/a.png", "images/b.gif", "masks/b.PNG"):
        file = tmp_path / name.replace("/more", "") if "more" not in name else tmp_path / "elsewhere" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(file)
    for part in ("images", "masks"):
        (tmp_path / part / "more").symlink_to(tmp_path / "elsewhere" / part / "more")
    assert [image.name for image, _ in pair_up(tmp_path)] == ["b.gif", "a.bmp"]
    for part in ("images", "masks"):
        (tmp_path / part / "all").symlink_to(".")
    assert [image.name for image, _ in pair_up(tmp_path)] == ["b.gif", "a.bmp"]


def test_masks_all_over_a_channel_are_looked_at(tmp_path):
    for number in range(30):
        write_pair(tmp_path / "train", f"{number:02d}", np.resize([0, 255] if number > 20 else [0], (8, 8)))
        write_pair(tmp_path / "held out", f"{number:02d}", np.resize([0, 1], (8, 8)))
    [note] = [
        note
        for note in open_data(tmp_path / "train", tmp_path / "held out", settings(classes=2), 3).notes
        if "WARNING" in note
    ]
    assert "the training masks that were looked at hold class 0 and 255 only" in note


@pytest.mark.parametrize(
    ("labels", "classes", "warned"),
    [
        ([0, 255], 2, "class 0 and 255 only"),
        ([1, 255], 2, "write 0 instead"),
        ([0, 1, 255], 2, ""),
        ([0], 2, ""),
        ([0, 255], 3, ""),
    ],
)
@pytest.mark.parametrize("part", ["training", "validation"])
def test_masks_of_0_and_255_are_warned_of_before_training(tmp_path, labels, classes, warned, part):
    for number in range(3):
        write_pair(tmp_path / part, f"{number}", np.resize(labels, (40, 40)))
        write_pair(tmp_path / "others", f"{number}", np.resize([0, 1, 255], (40, 40)))
    train, validation = [tmp_path / (one if one == part else "others") for one in ("training", "validation")]
    notes = open_data(train, validation, settings(classes=classes), 3).notes
    found = [note for note in notes if note.startswith("WARNING: the ")]
    assert len(found) == bool(warned) and all(warned in note and f"the {part} masks" in note for note in found)

"""Labelled folders: which images there are, what is read from each kind of file, and a clear word for every mistake in them."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from training.data import pairs
from training.data.broken import BrokenImage, BrokenImages
from training.data.decode.decoding import decode, read_file
from training.data.loaders import open_loaders
from training.data.sources import folders as found_folders
from training.data.sources.folders import FilePaths, LabelledFolder, UnlabelledFolder, find_images
from training.data.views import HeldOutImages, open_data
from training.distributed.world import World
from training.runtime.failure import describe
from training.settings.scripts import LabelledImageSettings

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")


def read(file: Path, channels: int) -> Image.Image:
    return decode(read_file(file), file, channels)


def settings(**values) -> LabelledImageSettings:
    return LabelledImageSettings(**{"image_size": 16, "global_batch_size": 4, **values})


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def images(tmp_path) -> Path:
    """Twelve noisy colour images of different sizes in three classes, JPEG and PNG, in train and validation."""
    for split in ("train", "validation"):
        for label in ("a", "b", "c"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                noise(20 + number * 7, 33, number).save(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
    return tmp_path


def data(images: Path, channels: int = 3, view_size: int | None = None, **values):
    return open_data(images / "train", images / "validation", settings(**values), channels, view_size=view_size)


# -- which images ------------------------------------------------------------------------------------------------------


def test_folders_of_classes_are_listed_at_once_and_in_order(tmp_path, monkeypatch):
    """As on a network's file system, where each answer comes late: here only once several are asked for together."""
    for number in range(8):
        (tmp_path / f"class-{number}").mkdir()
        noise(4, 4).save(tmp_path / f"class-{number}/0.png")
    together, walk = threading.Barrier(4, timeout=30), os.walk

    def late(*arguments, **options):
        together.wait()
        yield from walk(*arguments, **options)

    monkeypatch.setattr(os, "walk", late)
    assert list(find_images(tmp_path).items()) == [(f"class-{n}", [f"class-{n}/0.png"]) for n in range(8)]


def test_images_are_numbered_by_class_and_path_and_hidden_ones_are_left_out(tmp_path):
    names = ["b/x.JPEG", "b/sub/deep/y.webp", "a/2.png", "a/10.png", "ünï 码/z.tif"]
    hidden = ["a/._2.png", "a/.thumbs/2.png", ".ipynb_checkpoints/2.png", "a/readme.txt", "stray.png"]
    for name in names + hidden:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a/linked").symlink_to(tmp_path / "b/sub")
    folder = LabelledFolder(tmp_path)
    found = [os.path.relpath(folder.name(number), tmp_path) for number in range(len(folder))]
    assert found == ["a/10.png", "a/2.png", "a/linked/deep/y.webp", "b/sub/deep/y.webp", "b/x.JPEG", "ünï 码/z.tif"]
    assert folder.classes == ["a", "b", "ünï 码"] and folder.labels.tolist() == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("a/all", "."),
        ("a/deep/up", ".."),
        ("b/classes", ".."),
        ("b/channels", "../.."),
        ("b/by_another_name", "../../../elsewhere/linked"),
    ],
)
def test_a_link_to_a_folder_above_shows_no_image_twice(tmp_path, link, target):
    channels = tmp_path / "channels"
    for name in ("train/a/0.png", "train/a/deep/1.png", "train/b/2.png", "validation/a/3.png"):
        (channels / name).parent.mkdir(parents=True, exist_ok=True)
        (channels / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/linked").symlink_to("../channels/train")
    (channels / "train" / link).symlink_to(target)
    expected = {"a": ["a/0.png", "a/deep/1.png"], "b": ["b/2.png"]}
    for root in (channels / "train", tmp_path / "elsewhere/linked"):
        assert find_images(root) == expected
        folder = UnlabelledFolder(root)
        assert [os.path.relpath(folder.name(index), root) for index in range(len(folder))] == [
            file for files in expected.values() for file in files
        ]


def test_a_class_may_be_a_link_to_the_folder_of_all(tmp_path):
    """As people make one class of a flat folder."""
    (tmp_path / "0.png").touch()
    (tmp_path / "all").symlink_to(".")
    assert find_images(tmp_path) == {"all": ["all/0.png"]}


def test_links_to_folders_that_show_each_other_end(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.png").touch()
    (tmp_path / "a/b").symlink_to("../b")
    (tmp_path / "b/a").symlink_to("../a")
    assert find_images(tmp_path) == {"a": ["a/a.png", "a/b/b.png"], "b": ["b/a/a.png", "b/b.png"]}


def test_an_image_whose_name_is_no_text_is_read_all_the_same(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a/0.png")
    os.rename(tmp_path / "a/0.png", os.fsencode(tmp_path) + b"/a/caf\xe9.png")
    folder = LabelledFolder(tmp_path)
    assert folder.image(0)[:4] == b"\x89PNG" and len(folder.digest()) == 64


def test_a_folder_that_cannot_be_listed_ends_the_run_by_its_name(tmp_path, monkeypatch):
    """Its images would be missing without a word."""
    for name in ("train/cat/here/1.png", "train/cat/closed/2.png", "images/here/1.png", "images/closed/2.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    scan = os.scandir

    def closed(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(PermissionError, match="train/cat/closed"):
        list(found_folders._images_below(tmp_path / "train"))
    with pytest.raises(PermissionError, match="images/closed"):
        pairs._by_stem(tmp_path / "images", (".png",))


def test_a_limit_keeps_the_first_images_of_each_class(images):
    folder = LabelledFolder(images / "train", images_per_class=2)
    found = [(os.path.basename(folder.name(number)), label) for number, label in enumerate(folder.labels.tolist())]
    assert found == [(name, label) for label in range(3) for name in ("0.jpg", "1.png")]
    assert len(data(images, images_per_class=2).training) == 6 and len(data(images, images_per_class=2).held_out) == 12


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ([], "has no folders: images belong in .*/<class>/<image>"),
        (["a", "b"], r"/a has no images \(nor in 1 other classes\): put some there \(.jpg .*\), or remove the folder"),
        (["lost+found"], "/lost.found has no images: put some there"),
    ],
)
def test_a_folder_without_images_says_what_it_lacks(tmp_path, folders, message):
    for name in folders:
        (tmp_path / name).mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=message):
        find_images(tmp_path)


def test_different_classes_in_the_two_folders_are_named(images):
    (images / "validation/c").rename(images / "validation/d")
    with pytest.raises(ValueError, match="different classes: only .*/train has c; only .*/validation has d$"):
        data(images)
    (images / "train/c").rename(images / "train/d")
    (images / "validation/e").mkdir()
    noise(9, 9).save(images / "validation/e/0.png")
    with pytest.raises(ValueError, match="different classes: only .*/validation has e$"):
        data(images)


def test_one_class_alone_is_a_warning_that_says_how_folders_must_look(images):
    assert not any("class only" in note for note in data(images).notes)
    for split in ("train", "validation"):
        for label in ("a", "b"):
            shutil.rmtree(images / split / label)
    found = [note for note in data(images).notes if "class only" in note]
    expected = "WARNING: {0} has one class only, c, so accuracy is always 1: images belong in {0}/<class>/<image>, one folder per class"
    assert found == [expected.format(images / split) for split in ("train", "validation")]


# -- what is read from a file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_bytes_of_the_size_and_channels_asked_for(images, channels):
    opened = data(images, channels)
    pixels, label = opened.held_out[(0, 11)]
    for found in (pixels, opened.held_out.resized(16)[(0, 11)][0], opened.training[(1, 11)].image):
        assert found.dtype == torch.uint8 and tuple(found.shape) == (channels, 16, 16) and found.is_contiguous()
    assert tuple(opened.held_out.resized(24)[(0, 11)][0].shape) == (channels, 24, 24)
    assert label == 2 and opened.classes == ["a", "b", "c"]


def test_rows_and_columns_and_colours_stay_what_they_are(tmp_path):
    (tmp_path / "a").mkdir()
    image = Image.new("RGB", (16, 16))
    image.putpixel((3, 5), (10, 20, 30))
    image.save(tmp_path / "a/0.png")
    for channels, colour in ((1, [18]), (3, [10, 20, 30])):
        pixels, _ = HeldOutImages(LabelledFolder(tmp_path), 16, channels, BrokenImages(fail=True))[(0, 0)]
        assert pixels[:, 5, 3].tolist() == colour and np.count_nonzero(pixels.numpy()) == channels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tif"])
def test_images_are_turned_upright_for_training_and_validation_alike(tmp_path, orientation, ending):
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "a").mkdir()
    file = tmp_path / f"a/0.{ending}"
    noise(4, 6).resize((48, 32)).save(file, exif=exif)
    wanted = Image.open(file).convert("RGB") if ending == "tif" else ImageOps.exif_transpose(Image.open(file))
    assert np.array_equal(read(file, 3), wanted)
    assert read(file, 3).size == ((48, 32) if orientation < 5 else (32, 48))
    opened = open_data(tmp_path, tmp_path, settings(preprocessing="cpu_reference"), 3)
    assert torch.equal(opened.training[(1, 0)].image, opened.held_out[(0, 0)][0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_good_image_with_bad_exif_data_is_read(tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "description"
    noise(8, 12).save(
        tmp_path / "0.jpg", exif=exif, dpi=(72, 72)
    )  # without it Pillow looks there for one, and swallows the error
    content = (tmp_path / "0.jpg").read_bytes()
    for bad in (
        content.replace(b"Exif\0\0MM", b"Exif\0\0XX"),
        content.replace(b"\x01\x0e\x00\x02", b"\x01\x0e\x00\x05"),
    ):
        assert bad != content
        (tmp_path / "1.jpg").write_bytes(bad)
        assert read(tmp_path / "1.jpg", 3).size in ((12, 8), (8, 12))


@pytest.mark.parametrize("ending", ["png", "webp"])
def test_bad_exif_data_of_other_formats_breaks_no_image_either(tmp_path, ending):
    noise(8, 12).save(
        tmp_path / f"0.{ending}", exif=b"Exif\0\0XX\0*damaged", **({} if ending == "png" else {"lossless": True})
    )
    assert read(tmp_path / f"0.{ending}", 3).size == noise(8, 12).size


@pytest.mark.parametrize("most", [65535, 4095])
def test_of_a_pgm_of_more_than_8_bits_the_upper_8_are_kept(tmp_path, most):
    values = np.array([[0, most // 2, most]], np.uint16)
    (tmp_path / "0.pgm").write_bytes(b"P5 3 1 %d\n" % most + values.astype(">u2").tobytes())
    assert np.asarray(read(tmp_path / "0.pgm", 1)).tolist() == [[0, 127, 255]]


def test_of_16_bits_the_upper_8_are_kept(tmp_path):
    values = np.array([[0, 255, 256, 4369], [32768, 40000, 65279, 65535]], np.uint16)
    for name in ("0.png", "0.tif"):
        Image.fromarray(values).save(tmp_path / name)
        assert np.array_equal(read(tmp_path / name, 1), values // 256), name
        assert np.array_equal(np.asarray(read(tmp_path / name, 3))[..., 2], values // 256), name


def grey_tiff(samples: bytes, width: int, bits: int, photometric: int) -> bytes:
    """An uncompressed TIFF of one row."""
    sizes = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1, 279: len(samples)}
    tags = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in sizes.items())
    return b"II*\0" + struct.pack("<I", 8 + len(samples)) + samples + struct.pack("<H", len(sizes)) + tags + bytes(4)


def test_of_a_tiff_of_12_bits_the_upper_8_are_kept(tmp_path):
    (tmp_path / "0.tif").write_bytes(grey_tiff(bytes.fromhex("0003e8800fff"), 4, bits=12, photometric=1))
    assert np.asarray(read(tmp_path / "0.tif", 1)).tolist() == [[0, 1000 // 16, 128, 255]]


@pytest.mark.parametrize(("photometric", "expected"), [(0, [255, 193, 127, 0]), (1, [0, 62, 128, 255])])
def test_a_tiff_of_16_bits_whose_white_is_zero_is_no_negative(tmp_path, photometric, expected):
    samples = np.array([0, 16000, 32768, 65535], "<u2").tobytes()
    (tmp_path / "0.tif").write_bytes(grey_tiff(samples, 4, bits=16, photometric=photometric))
    assert np.asarray(read(tmp_path / "0.tif", 1)).tolist() == [expected]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_32_bits_are_refused_because_nothing_says_what_is_white(tmp_path, mode):
    Image.new(mode, (4, 4)).save(tmp_path / "0.tif")
    with pytest.raises(ValueError, match=f"0.tif cannot be read as an image: it has 32-bit {mode} pixels: convert"):
        read(tmp_path / "0.tif", 1)


def test_transparent_parts_are_white_whatever_colour_hides_there(tmp_path):
    colours = np.zeros((2, 2, 4), np.uint8)
    colours[0], colours[1] = (200, 30, 40, 255), (9, 99, 9, 0)
    colours[1, 1, 3] = 128
    blended = [round(128 / 255 * value + 127 / 255 * 255) for value in (9, 99, 9)]
    Image.fromarray(colours).save(tmp_path / "rgba.png")
    Image.fromarray(colours).quantize(8).save(tmp_path / "palette and alpha.png")
    for name in ("rgba", "palette and alpha"):
        pixels = np.asarray(read(tmp_path / f"{name}.png", 3)).astype(int)
        assert abs(pixels - [[(200, 30, 40)] * 2, [(255, 255, 255), blended]]).max() <= 2, name
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([200, 30, 40, 9, 99, 9])
    palette.save(tmp_path / "palette and one transparent colour.png", transparency=1)
    Image.fromarray(np.array([[[50, 255], [50, 0]]], np.uint8), "LA").save(tmp_path / "grey and alpha.png")
    assert np.asarray(read(tmp_path / "palette and one transparent colour.png", 3)).tolist() == [[[200, 30, 40], [255] * 3]]  # fmt: skip
    assert np.asarray(read(tmp_path / "grey and alpha.png", 1)).tolist() == [[50, 255]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_every_mode_without_transparency_is_read_as_pillow_converts_it(tmp_path, mode):
    for name in ("0.tif", "0.jpg") if mode == "CMYK" else ("0.tif",):
        noise(8, 9).convert(mode).save(tmp_path / name)
        for channels, target in ((1, "L"), (3, "RGB")):
            assert np.array_equal(read(tmp_path / name, channels), Image.open(tmp_path / name).convert(target))


def damaged() -> dict[str, bytes]:
    """Files that Pillow fails on in different ways."""
    whole = {}
    for kind in ("JPEG", "PNG"):
        noise(64, 64).save(buffer := io.BytesIO(), kind)
        whole[kind] = buffer.getvalue()
    return {
        "empty.jpg": b"",
        "text.jpg": b"no image",
        "cut.jpg": whole["JPEG"][:2000],
        "cut.png": whole["PNG"][:2000],
        "flipped.png": whole["PNG"][:3000] + bytes(8) + whole["PNG"][3008:],
        "bomb.ppm": b"P6 30000 30000 255\n",
        "negative.ppm": b"P6 -3 4 255\n" + bytes(36),
    }


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_image_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(damaged()[name])
    with pytest.raises(ValueError, match=f"{tmp_path}/{name} cannot be read as an image: ."):
        read(tmp_path / name, 3)


@pytest.mark.parametrize(("workers", "kind"), [(0, "auto"), (1, "processes"), (2, "threads"), (2, "loader")])
def test_a_damaged_image_is_the_first_thing_that_the_failure_file_says(images, workers, kind):
    (images / "train/b/2.jpg").write_bytes((images / "train/b/2.jpg").read_bytes()[:300])
    opened = data(images, on_broken_image="fail")
    loaders = open_loaders(opened, settings(num_workers=workers, worker_type=kind), ALONE, batch_size_per_device=4)
    loaders.train_batches.start(1)
    with pytest.raises(ValueError) as failure:
        list(loaders.train)
    assert describe(failure.value, "0").startswith(f"rank 0: BrokenImage: {images}/train/b/2.jpg cannot be read as an image")  # fmt: skip


# -- what is trained on ------------------------------------------------------------------------------------------------

VARIED = [
    {"min_crop_area": 0.3},
    {"horizontal_flip": True},
    {"max_shift_pixels": 3},
    {"max_rotation_degrees": 30.0},
    {"random_erasing": 0.5},
    {"mixup": 0.5},
    {"cutmix": 0.5},
]


@pytest.mark.parametrize("values", VARIED, ids=lambda values: next(iter(values)))
def test_every_augmentation_setting_reaches_training_images_and_none_the_held_out_ones(images, values):
    plain, changed = data(images), data(images, **values)
    draws = [(1, number) for number in range(12)]
    assert any(not torch.equal(changed.training[draw].image, plain.training[draw].image) for draw in draws)
    assert all(torch.equal(changed.held_out[draw][0], plain.held_out[draw][0]) for draw in draws)
    other = data(images, seed=2, **values)
    assert any(not torch.equal(changed.training[draw].image, other.training[draw].image) for draw in draws)


def test_loaders_give_the_views_of_the_batches(images):
    opened = data(images, mixup=0.8, cutmix=1.0, mix_probability=0.7)
    loaders = open_loaders(opened, settings(), ALONE, batch_size_per_device=2, views=3)
    loaders.train_batches.start(4)
    batches = list(loaders.train)
    assert len(batches) == 6 and loaders.train_batches.accumulation == 2
    for batch, draws in zip(batches, loaders.train_batches, strict=True):
        for place, draw in enumerate(draws):
            item = opened.training[draw]
            assert torch.equal(batch.images[place], item.image) and draw[0] == 1
            found = [batch.labels, batch.labels_b, batch.lam, batch.indices, batch.views]
            assert [part[place].item() for part in found] == pytest.approx(
                [item.label, item.label_b, item.lam, draw[1], 1]
            )
    assert 4 <= sum((batch.lam < 1).sum().item() for batch in batches) < 12


def test_views_may_be_larger_than_the_students_images_and_shift_as_far(images):
    small, large = (data(images, view_size=size, max_shift_pixels=4) for size in (None, 32))
    assert tuple(large.training[(1, 0)].image.shape) == (3, 32, 32) and tuple(large.held_out[(0, 0)][0].shape) == (
        3,
        16,
        16,
    )
    assert small.training.augmentation.max_shift_pixels == 4 and large.training.augmentation.max_shift_pixels == 8


# -- what keeps a teacher's logits apart -------------------------------------------------------------------------------


def test_the_digest_is_that_of_names_and_sizes_in_order_wherever_the_folder_lies(images):
    def digest(**options) -> str:
        return LabelledFolder(images / "train", **options).digest()

    first = digest()
    assert first == LabelledFolder(images / "validation").digest()
    found = [first, digest(images_per_class=2)]
    (images / "train/a/0.jpg").rename(images / "train/a/00.jpg")
    found.append(digest())
    (images / "train/c/3.png").write_bytes((images / "train/c/3.png").read_bytes() + b"\0")
    found.append(digest())
    noise(5, 5).save(images / "train/b/4.png")
    found.append(digest())
    (images / "train/c").rename(images / "train/d")
    found.append(digest())
    assert len(set(found)) == 6


def test_the_digest_is_the_same_however_many_sizes_a_thread_queries_in_a_row(images, monkeypatch):
    folder = LabelledFolder(images / "train")
    whole = folder.digest()
    assert len(folder) > 5
    for files in (1, 2, 5):
        monkeypatch.setattr("training.data.sources.folders.FILES_PER_CALL", files)
        assert folder.digest() == whole


def test_the_description_of_views_changes_with_all_that_changes_their_pixels_and_with_nothing_else(images):
    def described(channels: int = 3, view_size: int | None = None, **values) -> str:
        return json.dumps(data(images, channels, view_size, **values).training.view_description(), sort_keys=True)

    same = [{"epochs": 99}, {"num_workers": 2}, {"global_batch_size": 8}, {"label_smoothing": 0.1}, {"view_size": 16}]
    assert {described(**values) for values in same} == {described()}
    other = [{"channels": 1}, {"image_size": 32}, {"seed": 1}, {"mixup": 0.5, "mix_probability": 0.5}]
    assert len({described(**values) for values in [{}, *VARIED, *other]}) == 1 + len(VARIED + other)
    assert described(view_size=32) == described(image_size=32), "whoever asks for views of 32 pixels gets the same"


def test_the_description_of_views_holds_every_field_of_what_varies_them(images):
    views = data(images).training
    text = views.view_description()
    assert set(vars(views.augmentation)) < set(text) and set(text["mixing"]) == set(vars(views.mixing))
    assert text["version"] >= 1 and json.loads(json.dumps(text)) == text


def test_a_broken_image_that_cannot_be_listed_is_named_in_the_log_alone(tmp_path, capsys):
    (tmp_path / "output").touch()  # as on a full disk, nothing can be written there
    broken = BrokenImages(False, tmp_path / "output")
    for _ in range(2):
        broken.handle(BrokenImage("a.png: damaged"))
    assert capsys.readouterr().out.count("skipped a broken image: a.png: damaged") == 1


def test_paths_take_the_room_of_their_letters_however_long_the_longest_is():
    names = [f"a/{number}.jpg" for number in range(1_000)] + ["b/" + "x" * 240 + ".jpg", "c/\udcff.jpg"]
    paths = FilePaths(names)
    assert [os.fsdecode(path) for path in paths] == names and os.fsdecode(paths[-1]) == names[-1]
    assert [os.fsdecode(path) for path in paths[998:1002]] == names[998:]
    assert len(pickle.dumps(paths)) < 1.1 * sum(len(os.fsencode(name)) + 8 for name in names)
    assert FilePaths(["a/bc"]).digest() != FilePaths(["a/b", "c"]).digest() and len(FilePaths([])) == 0


def test_a_file_that_is_not_there_has_no_size_and_storage_that_fails_for_a_moment_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.storage.FIRST_PAUSE", 0.001)
    (tmp_path / "a").mkdir()
    noise(8, 8).save(tmp_path / "a/0.png")
    (tmp_path / "a/1.png").symlink_to("nowhere")
    folder, real, failures = LabelledFolder(tmp_path), os.stat, [OSError(errno.EIO, "Input/output error")]
    digest = folder.digest()

    def stat(path, *rest, **more):
        if failures and os.fspath(path).endswith(b"0.png"):
            raise failures.pop()
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "stat", stat)
    assert folder.digest() == digest and not failures

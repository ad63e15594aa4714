"""Preparing images: every source, repeated, interrupted, verified, and with files that are no images."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

import launcher
from launcher.commands import main
from launcher.prepare import folders, prepare, verify
from launcher.prepare.entry_rules import entry_rules
from tests.conftest import as_in_a_terminal


def tree(folder) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("prepared.json", "broken.txt", ".launcher.lock")
    }


def write_images(folder, *names: str, size=(40, 30)) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number * 20 % 256, 100, 50)).save(folder / name)


def test_digits_become_png_folders_with_a_stratified_split(tmp_path):
    words = prepare("digits", tmp_path)
    assert "1347 training and 450 validation images in 10 classes" in words
    files = tree(tmp_path)
    assert len(files) == 1797 and len({path.rsplit("/", 1)[1] for path in files}) == 1797, "no digit is in both"
    for digit in range(10):
        held_out = sum(path.startswith(f"validation/{digit}/") for path in files)
        assert held_out == pytest.approx(sum(f"/{digit}/" in path for path in files) / 4, abs=1)
    assert Image.open(tmp_path / "train/0" / sorted(os.listdir(tmp_path / "train/0"))[0]).size == (8, 8)


def test_repeating_changes_nothing_and_mends_what_is_missing(tmp_path):
    prepare("digits", tmp_path)
    before = tree(tmp_path)
    assert "0 written, 1797 already there" in prepare("digits", tmp_path)
    (tmp_path / sorted(before)[7]).unlink()
    assert "1 written" in prepare("digits", tmp_path)
    assert tree(tmp_path) == before


def test_an_interrupted_preparation_is_continued(tmp_path):
    command = [sys.executable, "-m", "launcher", "prepare", "digits", str(tmp_path / "data")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=as_in_a_terminal)
    while not list((tmp_path / "data").glob("train/*/*.png")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    if process.returncode != 0:  # it may have been done already
        assert process.returncode == 130
    prepare("digits", tmp_path / "data")
    prepare("digits", tmp_path / "whole")
    assert tree(tmp_path / "data") == tree(tmp_path / "whole")


def test_a_folder_is_split_by_class_and_scaled_down(tmp_path):
    write_images(
        tmp_path / "in",
        *(f"{label}/{number}.{ending}" for label in ("cat", "dog") for number in range(8) for ending in ("jpg", "png")),
    )
    write_images(tmp_path / "in", "cat/small.bmp", size=(10, 10))
    assert "25 training and 8 validation images in 2 classes" in prepare(
        str(tmp_path / "in"), tmp_path / "out", size=15
    )
    sizes = {Image.open(path).size for path in (tmp_path / "out").rglob("*.[jp][pn]g")}
    assert sizes == {(20, 15), (10, 10)}


def test_a_folder_that_is_split_keeps_its_split(tmp_path):
    write_images(tmp_path / "in", "train/a/1.png", "train/b/1.png", "val/a/2.png", "val/b/2.png")
    prepare(str(tmp_path / "in"), tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == [
        "train/a/1.png",
        "train/b/1.png",
        "validation/a/2.png",
        "validation/b/2.png",
    ]


def test_a_tree_of_any_shape_becomes_images_without_labels_but_for_what_it_holds_out(tmp_path):
    write_images(tmp_path / "in", "a.png", "2024/05/a.jpg", "2024/05_a.jpg", "b/c/d.bmp", ".hidden/x.png", "b/._c.png")
    words = prepare(str(tmp_path / "in"), tmp_path / "out", unlabelled=True)
    assert "4 images without labels; 4 written, 0 already there" in words
    assert sorted(tree(tmp_path / "out")) == [
        "unlabelled/2024_05__a.jpg",
        "unlabelled/2024_05_a.jpg",
        "unlabelled/a.png",
        "unlabelled/b_c_d.bmp.png",
    ]
    assert "4 images decoded" in verify(tmp_path / "out")
    write_images(tmp_path / "split", "train/a/1.png", "more/2.png", "val/a/3.png", "test/4.png", "more/test/5.png")
    os.symlink(tmp_path / "in/2024", tmp_path / "split/linked")
    prepare(str(tmp_path / "split"), tmp_path / "of split", unlabelled=True)
    assert sorted(tree(tmp_path / "of split/unlabelled")) == [
        *("linked_05__a.jpg", "linked_05_a.jpg", "more_2.png", "more_test_5.png", "train_a_1.png"),
    ]
    write_images(tmp_path / "masked", "images/1.png", "masks/1.png")
    prepare(str(tmp_path / "masked"), tmp_path / "of masked", unlabelled=True)
    assert sorted(tree(tmp_path / "of masked")) == ["unlabelled/images_1.png"]


def test_another_source_gives_the_images_to_train_on_without_labels(tmp_path):
    assert main.main(["prepare", "digits", str(tmp_path / "out"), "--unlabelled"]) == 0
    prepare("digits", tmp_path / "labelled")
    without, labelled = ({*tree(tmp_path / name).values()} for name in ("out/unlabelled", "labelled/train"))
    assert without == labelled and len(tree(tmp_path / "out")) == 1347
    with pytest.raises(launcher.UserError, match="unlabelled True, now None"):
        prepare("digits", tmp_path / "out")
    with pytest.raises(launcher.UserError, match="name a folder with images, in any tree"):
        (tmp_path / "empty").mkdir()
        prepare(str(tmp_path / "empty"), tmp_path / "none", unlabelled=True)


@pytest.mark.parametrize("how", [{}, {"shard_size": "1MB"}])
@pytest.mark.parametrize("folder", ["in", os.fsdecode(b"in \xff")])
def test_files_that_are_no_images_are_named_and_left_out(tmp_path, folder, how):
    """Whatever their names: those of old cameras and archives are often no UTF-8."""
    source, odd = tmp_path / folder, os.fsdecode(b"empty \xe9.png")
    write_images(source, *(f"a/{number}.png" for number in range(6)), *(f"b/{number}.jpg" for number in range(6)))
    (source / "a" / odd).touch()
    (source / "a/text.jpg").write_text("not an image")
    whole = (source / "b/0.jpg").read_bytes()
    (source / "b/cut.jpg").write_bytes(whole[: len(whole) // 2])
    for written in (12, 0):
        words = prepare(str(source), tmp_path / "out", **how)
        assert f"; {written} written, {12 - written} already there\n3 images could not be read" in words
        assert all(f"/{name}: cannot be read" in words for name in (r"a/empty \xe9.png", "a/text.jpg", "b/cut.jpg"))
        listed = {line.split(b"\t")[0] for line in (tmp_path / "out/broken.txt").read_bytes().splitlines()}
        assert listed == {os.fsencode(source / name) for name in (f"a/{odd}", "a/text.jpg", "b/cut.jpg")}
    assert "12 images decoded" in verify(tmp_path / "out")


def test_postscript_under_an_images_name_is_left_out_and_not_run(tmp_path, monkeypatch):
    write_images(tmp_path / "in", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    (tmp_path / "in/a/3.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f'#!/bin/sh\n[ "$1" = --version ] || touch {tmp_path}/ran\n')
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    assert "a/3.jpg: cannot be read as an image: it is not a JPEG" in prepare(
        str(tmp_path / "in"), tmp_path / "out", size=8
    )
    assert not (tmp_path / "ran").exists() and len(tree(tmp_path / "out")) == 4


def test_nothing_is_written_through_a_planted_link(tmp_path):
    write_images(tmp_path / "in/train", "a/1.png", "a/2.png")
    write_images(tmp_path / "in/validation", "a/3.png")
    (tmp_path / "in/train/a/broken.png").touch()
    mine, target = tmp_path / "mine", tmp_path / "out"
    mine.write_text("mine")
    prepare(str(tmp_path / "in"), target)
    shutil.rmtree(target / "train")
    (target / ".launcher.lock").unlink()
    for link in (".launcher.lock", ".broken.txt.part", "train/a/.1.png.part", "train/a/.2.png.part"):
        (target / link).parent.mkdir(parents=True, exist_ok=True)
        (target / link).symlink_to(mine)
    with pytest.raises(launcher.UserError, match=r".launcher.lock is a link\n.*\n.*rm "):
        prepare(str(tmp_path / "in"), target)
    (target / ".launcher.lock").unlink()
    assert "1 image could not be read" in prepare(str(tmp_path / "in"), target)
    assert mine.read_text() == "mine" and len(list(target.rglob("[1-3].png"))) == 3


def test_names_that_would_collide_stay_apart(tmp_path):
    write_images(tmp_path / "in", "a/x.png", "a/x.jpg", "a/x.bmp", "a/sub/x.png", "a/sub_x.png", "b/x.png", "b/y.png")
    assert "7 written" in prepare(str(tmp_path / "in"), tmp_path / "out")
    assert len(tree(tmp_path / "out")) == 7


def test_each_class_keeps_images_on_both_sides_of_the_split(tmp_path):
    write_images(tmp_path / "in", "a/1.png", "a/2.png", "b/1.png", "b/2.png", "b/3.png")
    assert "2 training and 3 validation" in prepare(str(tmp_path / "in"), tmp_path / "out", validation_fraction=0.9)


@pytest.mark.parametrize("how", [{}, {"shard_size": "1MB"}])
def test_the_same_folder_named_otherwise_is_the_same_source(tmp_path, monkeypatch, how):
    write_images(tmp_path / "in", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    (tmp_path / "in/b/broken.png").touch()
    prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    made = (tmp_path / "out/prepared.json").read_text()
    monkeypatch.chdir(tmp_path)
    words = prepare("./in", "out", **how)
    assert "0 written, 4 already there" in words and "\n  in/b/broken.png: cannot be read" in words
    assert (tmp_path / "out/prepared.json").read_text() == made and "4 images decoded" in verify(tmp_path / "out")


def nasty_images(folder) -> list[str]:
    """What cameras, scanners and drawing programs write, 60 × 40 pixels each; the names of those that can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = Image.effect_noise((60, 40), 60)
    colours = Image.merge("RGB", [noise, noise.rotate(180), noise.transpose(Image.Transpose.FLIP_LEFT_RIGHT)])
    exif = Image.Exif()
    exif[0x0112] = 6
    colours.save(folder / "upright.jpg", quality=90)
    colours.save(folder / "rotated.jpg", quality=90, exif=exif)
    colours.convert("CMYK").save(folder / "print.jpg", quality=90)
    noise.save(folder / "grey.jpg", quality=90)
    clear = colours.convert("RGBA")
    clear.putalpha(noise)
    clear.save(folder / "clear.png")
    clear.save(folder / "clear.webp", lossless=True)
    Image.fromarray(np.asarray(noise).astype(np.uint16) * 257).save(folder / "deep.png")
    colours.quantize(8).save(folder / "palette.png")
    colours.save(folder / "old.bmp")
    colours.save(folder / "scan.tif")
    names = sorted(os.listdir(folder))
    (folder / "empty.jpg").touch()
    (folder / "text.png").write_text("no image")
    (folder / "cut.jpg").write_bytes((folder / "upright.jpg").read_bytes()[:700])
    return names


def as_decoded(file, channels: int) -> Image.Image:
    return entry_rules().decoding.decode(file.read_bytes(), file, channels)


def test_what_is_prepared_looks_as_the_entry_scripts_see_the_original(tmp_path):
    """Transparent, deep, CMYK and rotated images: untouched where they fit, else scaled after the same rules."""
    names = nasty_images(tmp_path / "in/train/a")
    nasty_images(tmp_path / "in/validation/a")
    for size, target in ((None, tmp_path / "whole"), (20, tmp_path / "small")):
        words = prepare(str(tmp_path / "in"), target, size=size)
        assert "10 training and 10 validation images" in words and "6 images could not be read" in words
        listed = [line.split("\t")[0].rsplit("/", 1)[1] for line in (target / "broken.txt").read_text().splitlines()]
        assert sorted(listed) == sorted(["cut.jpg", "empty.jpg", "text.png"] * 2)
    for name in names:
        original, ending = tmp_path / "in/train/a" / name, name.rsplit(".", 1)[1]
        kept = name if ending in ("jpg", "png", "webp") else f"{name}.png"
        whole, small = (tmp_path / target / "train/a" / kept for target in ("whole", "small"))
        if kept == name:
            assert whole.read_bytes() == original.read_bytes(), "nothing had to be done to it"
        seen = as_decoded(original, 3)
        assert as_decoded(whole, 3).tobytes() == seen.tobytes(), name
        expected = seen.resize(
            (20, 30) if name == "rotated.jpg" else (30, 20), Image.Resampling.BILINEAR, reducing_gap=3.0
        )
        found = as_decoded(small, 3)
        assert found.size == expected.size and Image.open(small).getexif().get(0x0112, 1) == 1
        error = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
        assert abs(error).mean() < {"jpg": 4, "webp": 8}.get(ending, 0.6), name  # it is noise, hard to compress
        assert (Image.open(small).mode == "L") == (name in ("grey.jpg", "deep.png"))


def test_images_with_masks_are_scaled_together_and_no_class_is_made_up(tmp_path):
    for number in range(4):
        mask = np.zeros((40, 60), np.uint8)
        mask[10:, 7 + number :] = 3
        for kind, array in (("images", mask * 60), ("masks", mask)):
            (tmp_path / "in" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(tmp_path / "in" / kind / f"{number}.png")
    Image.new("L", (9, 9)).save(tmp_path / "in/images/alone.png")
    Image.new("L", (60, 40)).save(tmp_path / "in/images/other.png")
    Image.new("L", (60, 39)).save(tmp_path / "in/masks/other.png")
    words = prepare(str(tmp_path / "in"), tmp_path / "out", size=20)
    assert "masks/alone.png cannot be read" in words and "the mask has 60 × 39 pixels" in words
    files = tree(tmp_path / "out")
    assert len(files) == 8
    for name in files:
        image = Image.open(tmp_path / "out" / name)
        assert image.size == (30, 20)
        if "/masks/" in name:
            assert set(image.tobytes()) == {0, 3} and name.replace("masks", "images") in files
    assert "4 images decoded" not in verify(tmp_path / "out") and "8 images decoded" in verify(tmp_path / "out")


def test_verification_names_what_was_damaged(tmp_path):
    prepare("digits", tmp_path)
    assert "1797 images decoded" in verify(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*.png"))
    files[3].write_bytes(files[3].read_bytes()[:60])
    with pytest.raises(launcher.UserError, match=rf"{files[3]} cannot be read"):
        verify(tmp_path)
    with pytest.raises(launcher.UserError, match="was not made by launcher prepare"):
        verify(tmp_path / "train")


def test_storage_that_fails_ends_it_and_leaves_no_image_out(tmp_path, monkeypatch, capsys):
    """The first page of /proc/self/mem is nobody's, so that reading it fails as a lost mount does."""
    source = tmp_path / "source"
    write_images(source, "cat/a.png", "dog/b.png")
    (source / "cat/c.png").symlink_to("/proc/self/mem")
    reading = entry_rules().decoding.read_with_retries.__globals__  # a module that its importer has forgotten
    monkeypatch.setitem(reading, "FIRST_PAUSE", 0.001)
    monkeypatch.setitem(reading, "LONGEST_PAUSE", 0.001)
    assert main.main(["prepare", str(source), str(tmp_path / "out"), "--jobs", "1"]) == 2
    words = capsys.readouterr().err
    assert "cat/c.png: Input/output error (EIO)" in words and "start again" in words
    (source / "cat/c.png").unlink()
    write_images(source, "cat/c.png")
    assert "broken" not in prepare(str(source), tmp_path / "out") and len(tree(tmp_path / "out")) == 3


def test_many_processes_make_what_one_makes(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "AT_ONCE", 50)
    for jobs in (1, 3):
        prepare("digits", tmp_path / str(jobs), jobs=jobs)
    assert tree(tmp_path / "1") == tree(tmp_path / "3")


def test_what_is_hidden_is_no_image_and_links_are_followed(tmp_path):
    source = tmp_path / "source"
    write_images(
        source, "cat/a.png", "cat/b.png", "cat/.ipynb_checkpoints/a-checkpoint.png", ".cache/c.png", "cat/._a.png"
    )
    write_images(tmp_path / "elsewhere", "d.png", "e.gif", "f.ppm")
    (source / "cat/more").symlink_to(tmp_path / "elsewhere")
    assert "4 training and 1 validation images in 1 class;" in prepare(str(source), tmp_path / "out")
    assert "5 images without labels" in prepare(str(source), tmp_path / "plain", unlabelled=True)


@pytest.mark.parametrize(
    ("link", "target"), [("train/cat/all", "."), ("train/dog/classes", ".."), ("validation/cat/splits", "../..")]
)
def test_a_link_to_a_folder_above_multiplies_no_image_and_brings_none_into_validation(tmp_path, link, target):
    source = tmp_path / "source"
    write_images(source, "train/cat/a.png", "train/dog/b.png", "validation/cat/c.png", "validation/dog/d.png")
    (source / link).symlink_to(target)
    assert ": 2 training and 2 validation images in 2 classes;" in prepare(str(source), tmp_path / "out")
    assert ": 2 images without labels" in prepare(str(source), tmp_path / "plain", unlabelled=True)


def test_hidden_folders_beside_images_and_masks_change_nothing_and_others_are_named(tmp_path):
    source = tmp_path / "source"
    write_images(source, *(f"images/{number}.png" for number in range(4)))
    for number in range(4):
        (source / "masks").mkdir(exist_ok=True)
        Image.new("L", (40, 30), 1).save(source / f"masks/{number}.PNG", "PNG")
    (source / ".ipynb_checkpoints").mkdir()
    assert "3 training and 1 validation images with masks" in prepare(str(source), tmp_path / "out")
    (source / "previews").mkdir()
    with pytest.raises(launcher.UserError, match="has previews beside images/ and masks/"):
        prepare(str(source), tmp_path / "other")


def test_a_path_of_any_length_is_written(tmp_path):
    deep = "/".join(["a_folder_with_a_long_name"] * 12)
    write_images(tmp_path / "source", f"{deep}/1.png", f"{deep}/2.png")
    assert "2 images without labels; 2 written" in prepare(str(tmp_path / "source"), tmp_path / "out", unlabelled=True)
    assert "0 written" in prepare(str(tmp_path / "source"), tmp_path / "out", unlabelled=True)


def test_a_folder_of_a_drawn_sources_name_is_a_tree_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", *(f"{number}.png" for number in range(8)))
    assert "8 images without labels" in prepare("photos", tmp_path / "out", unlabelled=True)


@pytest.mark.parametrize("how", [{}, {"shard_size": "20KB"}])
def test_verification_compares_how_many_images_there_are_with_the_record(tmp_path, how):
    prepare("digits", tmp_path, **how)
    record = tmp_path / "prepared.json"
    record.write_text(record.read_text().replace('"images in train": 1347', '"images in train": 1348'))
    with pytest.raises(launcher.UserError, match="train has 1,347 images, 1,348 were written"):
        verify(tmp_path)


def test_verification_misses_masks(tmp_path):
    prepare("shapes", tmp_path, size=16)
    verify(tmp_path)
    for mask in sorted((tmp_path / "train/masks").iterdir())[:2]:
        mask.unlink()
    with pytest.raises(launcher.UserError, match=r"train has 298 masks, 300 were written"):
        verify(tmp_path)
    record = tmp_path / "prepared.json"
    record.write_text(record.read_text().replace("/masks", "/other"))
    assert "decoded" in verify(tmp_path), "of a record without them, images alone are compared"
    record.write_text(record.read_text().replace("/other", "/masks"))
    shutil.rmtree(tmp_path / "validation/masks")
    with pytest.raises(launcher.UserError, match=r"validation has 0 masks, 100 were written"):
        verify(tmp_path)


def test_a_class_is_verified_whose_name_is_that_of_an_image_file(tmp_path):
    write_images(tmp_path / "in", "x.jpg/1.png", "x.jpg/2.png")
    prepare(str(tmp_path / "in"), tmp_path / "out")
    assert "2 images decoded" in verify(tmp_path / "out")


@pytest.mark.parametrize("how", [{}, {"shard_size": "20KB"}])
def test_verification_misses_what_is_gone(tmp_path, how):
    prepare("digits", tmp_path, **how)
    verify(tmp_path)
    shutil.rmtree(tmp_path / "train/3") if not how else [shard.unlink() for shard in (tmp_path / "train").glob("*.tar")]
    with pytest.raises(launcher.UserError, match="1,347 were written" if not how else "train-00000.tar cannot be read"):
        verify(tmp_path)


def test_verification_says_that_a_preparation_was_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher.prepare, "_finish", lambda *_: None)
    prepare("digits", tmp_path)
    with pytest.raises(launcher.UserError, match="was not finished\n.*: launcher prepare digits "):
        verify(tmp_path)

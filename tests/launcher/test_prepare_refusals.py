"""Preparing images: the sources, targets and options that are refused, and what the refusal says."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

import launcher
from launcher.commands import main
from launcher.config.file_trees import walk
from launcher.prepare import prepare, verify
from tests.launcher.test_prepare import tree, write_images


def test_another_split_into_the_same_folder_is_refused(tmp_path):
    prepare("digits", tmp_path)
    with pytest.raises(launcher.UserError, match=r"validation_fraction 0.25, now 0.5.*\n.*rm -r"):
        prepare("digits", tmp_path, validation_fraction=0.5)


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\u2028b", "a\u0085b", "a\x1b[2J", os.fsdecode(b"a\xff")])
def test_a_class_whose_name_is_no_line_of_text_is_refused(tmp_path, name):
    write_images(tmp_path / "in", f"{name}/1.png", f"{name}/2.png", "b c\u00a0é 한/1.png")
    with pytest.raises(launcher.UserError) as error:
        prepare(str(tmp_path / "in"), tmp_path / "out", shard_size="1MB")
    (issue,) = error.value.issues
    assert repr(name) in issue.found and "rename the folder" in issue.fix and not (tmp_path / "out").exists()


HOLDER = """
import sys
from launcher.record.folder_lock import alone
with alone(__import__("pathlib").Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_preparation_of_a_folder_names_the_first_and_a_killed_one_holds_nothing(tmp_path):
    write_images(tmp_path / "in", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    target = tmp_path / "out"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    command = [sys.executable, "-m", "launcher", "prepare", str(tmp_path / "in"), str(target)]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2 and "Traceback" not in second.stderr
    who = f"{target} is being written by process {holder.pid} on {socket.gethostname()} since 20"
    assert who in second.stderr and "wait for its end, or name another folder" in second.stderr
    holder.kill()
    holder.communicate()
    assert "4 written" in prepare(str(tmp_path / "in"), target) and "4 images decoded" in verify(target)


@pytest.mark.parametrize("text", ["", '{"source": "in", "si', "[1]", "null", '{"source": {}}', "\xff"])
def test_a_damaged_record_of_a_target_is_named_with_a_fix(tmp_path, text):
    write_images(tmp_path / "in", "a/1.png", "a/2.png")
    prepare(str(tmp_path / "in"), tmp_path / "out")
    (tmp_path / "out/prepared.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(launcher.UserError, match=r"out/prepared.json is damaged: .*\n.*begin anew"):
        prepare(str(tmp_path / "in"), tmp_path / "out")


@pytest.mark.parametrize("how", [{}, {"shard_size": "10KB"}, {"unlabelled": True}])
def test_the_command_that_a_refusal_names_removes_what_was_prepared_and_nothing_else(tmp_path, how):
    """The originals may lie in the target, and beside images without labels those with them."""
    target = tmp_path / "my data"
    write_images(target / "raw", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    if how.get("unlabelled"):
        write_images(target / "train", "a/mine.png")
    (target / "raw/a/broken.png").touch()
    (target / "notes.txt").write_text("mine")
    before = {path for path in target.rglob("*") if path.is_file()}
    prepare(str(target / "raw"), target, **how)
    assert "4 images decoded" in verify(target)
    with pytest.raises(launcher.UserError) as error:
        prepare(str(target / "raw"), target, size=8, **how)
    subprocess.run(error.value.issues[0].fix.partition("remove what was prepared: ")[2], shell=True, check=True)
    assert {path for path in target.rglob("*") if path.is_file()} - before == {target / ".launcher.lock"}
    assert all(path.is_file() for path in before) and "written, 0 already there" in prepare(
        str(target / "raw"), target, size=8, **how
    )


@pytest.mark.parametrize("how", [{}, {"shard_size": "10KB"}])
def test_files_that_are_there_before_the_first_preparation_are_not_taken_for_its_own(tmp_path, how):
    write_images(tmp_path / "in", "a/1.png", "a/2.png")
    write_images(tmp_path / "out/train", "a/1.png", "b/mine.png")
    with pytest.raises(launcher.UserError, match=r"files in .*out/train, and no .*prepared.json.*\n.*another folder"):
        prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    assert not (tmp_path / "out/prepared.json").exists()


@pytest.mark.parametrize("split", [False, True])
def test_a_class_whose_files_are_no_images_by_their_suffix_is_refused_and_single_ones_are_counted(tmp_path, split):
    source = tmp_path / "in"
    for part in ("train", "validation") if split else ("",):
        write_images(source / part, "a/1.png", "a/2.png", "b/1.png", "b/2.png")
        (source / part / "a/3.AVIF").touch()
        (source / part / "c").mkdir()
        for name in ("1.heic", "2.heic", "readme", ".hidden"):
            (source / part / "c" / name).touch()
        (source / part / "empty").mkdir()
    with pytest.raises(launcher.UserError) as error:
        prepare(str(source), tmp_path / "out")
    issue, empty = error.value.issues
    assert empty.found.endswith("/empty has no images") and empty.fix.startswith("put some there, or move")
    assert (
        issue.found.endswith("/c has no images among its files (2 .heic, 1 without suffix)") and ".webp" in issue.valid
    )
    assert issue.fix.startswith("convert its files to one of these, or move the folder elsewhere")
    for part in ("train", "validation") if split else ("",):
        shutil.rmtree(source / part / "c")
        (source / part / "empty").rmdir()
        (source / part / "a/list.csv").touch()
    (source / "a file beside the classes.csv").touch()
    n = 2 if split else 1
    done = prepare(str(source), tmp_path / "out")
    assert f"left out, as no images by their suffix: {n} .avif, {n} .csv" in done


def test_of_many_suffixes_the_most_frequent_are_named(tmp_path):
    write_images(tmp_path / "in", "a/1.png", "a/2.png")
    for number in range(9):
        (tmp_path / f"in/a/IM.{number:04d}").touch()
    (tmp_path / "in/a/x.a\nb").touch()
    (tmp_path / "in/a/y.a\nb").touch()
    done = prepare(str(tmp_path / "in"), tmp_path / "out")
    assert done.endswith(r"suffix: 2 '.a\nb', 1 .0000, 1 .0001, 1 .0002, 1 .0003, 5 others")


def test_a_folder_beside_those_that_are_read_may_be_unlisted(tmp_path, monkeypatch):
    write_images(tmp_path / "in", "train/a/1.png", "val/a/2.png", "lost+found/x.png")
    monkeypatch.setattr("launcher.prepare.image_folders.walk", unlisted("lost+found"))
    assert prepare(str(tmp_path / "in"), tmp_path / "out").endswith("2 written, 0 already there")


def unlisted(name: str):
    """The walk of trees of which one folder cannot be listed, also by root, whom no mode of a folder stops."""

    def walked(root, onerror):
        for place, folders, files in walk(root, onerror):
            if name in (*folders, os.path.basename(place)):
                onerror(PermissionError(errno.EACCES, "Permission denied", name))
            yield place, folders, files

    return walked


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_a_drawn_source_can_be_prepared_into_a_folder_of_its_name_and_again_and_a_users_folder_goes_first(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    assert " already there" in prepare(name, name)
    assert "0 written" in prepare(name, name)
    assert json.loads((tmp_path / name / "prepared.json").read_text())["source"] == name
    shutil.rmtree(name)
    write_images(tmp_path / name, "a/1.png", "a/2.png")
    with pytest.raises(launcher.UserError, match="is inside"):
        prepare(name, name)
    assert "1 training and 1 validation images in 1 class" in prepare(name, "out")
    assert json.loads((tmp_path / "out/prepared.json").read_text())["source"] == str(tmp_path / name)


def test_a_target_inside_the_source_is_refused(tmp_path):
    write_images(tmp_path / "in", "a/1.png", "b/1.png")
    for target in (tmp_path / "in", tmp_path / "in/out"):
        with pytest.raises(launcher.UserError, match="is inside"):
            prepare(str(tmp_path / "in"), target)


@pytest.mark.parametrize("below", ["train", "unlabelled/more"])
def test_images_where_prepared_ones_go_are_no_source(tmp_path, below):
    """Before, held-out ones stayed among those of training too."""
    write_images(tmp_path / "data" / below, "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    with pytest.raises(launcher.UserError, match="some would be in two splits"):
        prepare(str(tmp_path / "data" / below), tmp_path / "data")
    assert len([*(tmp_path / "data").rglob("*.png")]) == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("digts", {}), "did you mean digits?"),
        (("/nowhere", {}), "no such folder"),
        (("", {}), "SOURCE: empty"),
        ((__file__, {}), "a file"),
        (("s3://bucket/images", {}), "download it"),
        (("digits", {"size": 2, "validation_fraction": 2}), "2 mistakes"),
        (("digits", {"shard_size": "100 M", "jpeg_quality": 0, "jobs": 0}), "3 mistakes"),
    ],
)
def test_a_wrong_source_or_option_is_answered(tmp_path, arguments, expected):
    with pytest.raises(launcher.UserError, match=expected):
        prepare(arguments[0], tmp_path / "out", **arguments[1])
    assert not (tmp_path / "out").exists()


def test_an_empty_target_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(launcher.UserError, match="TARGET: empty"):
        prepare("digits", "")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "SOURCE: missing"),
        (["digits"], "TARGET: missing"),
        (["--verify"], "TARGET: missing"),
        (["--verify", "nowhere"], "is no folder"),
    ],
)
def test_a_command_that_lacks_a_folder_names_it(capsys, words, expected):
    assert main.main(["prepare", *words]) == 2
    assert expected in capsys.readouterr().err


def test_what_verify_would_ignore_is_refused_all_at_once(capsys):
    words = ["--size", "0", "--validation-fraction", "0.25", "--shards", "1MB", "--jpeg-quality", "95", "--unlabelled"]
    assert main.main(["prepare", "digits", "a folder", "--verify", *words]) == 2
    printed = capsys.readouterr().err
    assert "6 mistakes" in printed and "--verify: two folders, digits and a folder" in printed
    assert "launcher prepare --verify TARGET takes one folder" in printed and "--verify 'a folder'" in printed
    assert printed.count(": given beside --verify, which only reads") == 5 and "--shards: given" in printed


def test_a_source_of_which_nothing_can_be_read_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "1.png").write_text("no image")
    with pytest.raises(launcher.UserError, match="0 of 2 images can be read"):
        prepare(str(tmp_path / "in"), tmp_path / "out")
    assert len((tmp_path / "out/broken.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize("how", [{}, {"shard_size": "100KB"}])
def test_a_class_of_which_nothing_can_be_read_is_refused_before_the_target_is_finished(tmp_path, monkeypatch, how):
    write_images(tmp_path / "in", "b/1.png", "c/1.png", "c/2.png")
    for name in ("x.jpg", "y.jpg"):
        (tmp_path / "in/a").mkdir(exist_ok=True)
        (tmp_path / "in/a" / name).write_text("garbage")
    target = tmp_path / "a folder"
    monkeypatch.chdir(tmp_path)
    for source in ("in", str(tmp_path / "in")):
        with pytest.raises(launcher.UserError) as error:
            prepare(source, target, validation_fraction=0.5, **how)
        [issue] = error.value.issues
        assert issue.found == f"{source}: of class a, 0 of 1 training image can be read"
        assert f"{target}/broken.txt lists" in issue.fix and f"rm -r '{target}/" in issue.fix
        with pytest.raises(launcher.UserError, match="was not finished"):
            verify(target)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_of_which_nothing_can_be_read_is_refused(tmp_path, split):
    write_images(tmp_path / "in", *(f"{part}/{label}/1.png" for part in ("train", "val") for label in "ab"))
    for label in "ab":
        (tmp_path / "in" / split / label / "1.png").write_text("garbage")
    kind = {"train": "training", "val": "validation"}[split]
    with pytest.raises(launcher.UserError, match=f"in: 0 of 2 {kind} images can be read"):
        prepare(str(tmp_path / "in"), tmp_path / "out")


def test_a_source_that_holds_nothing_out_gets_a_warning_and_one_without_training_images_is_refused(tmp_path):
    write_images(tmp_path / "in", "a/1.png", "b/1.png")
    words = prepare(str(tmp_path / "in"), tmp_path / "out")
    assert (
        "2 training and 0 validation images in 2 classes" in words and "\nwarning: no validation images: add" in words
    )
    write_images(tmp_path / "held", "val/a/1.png")
    (tmp_path / "held/train").mkdir()
    with pytest.raises(launcher.UserError, match="no training images beside the validation images"):
        prepare(str(tmp_path / "held"), tmp_path / "other")


@pytest.mark.parametrize("how", [{}, {"shard_size": "100KB"}])
def test_a_class_that_only_the_held_out_images_have_is_refused_before_anything_is_written(tmp_path, how):
    write_images(
        tmp_path / "in", *(f"train/{label}/1.png" for label in "ab"), *(f"val/{label}/2.png" for label in "abc")
    )
    with pytest.raises(launcher.UserError, match="in: validation images and no training images of class c\n"):
        prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({}, "a run refuses folders of different classes"),
        ({"shard_size": "100KB"}, "no evaluation shows how well it is learned"),
    ],
)
def test_a_class_of_which_nothing_is_held_out_gets_a_warning(tmp_path, how, why):
    """A class of one image, and one whose held-out image is broken."""
    write_images(tmp_path / "in", "a/1.png", "a/2.png", "rare/1.png")
    words = prepare(str(tmp_path / "in"), tmp_path / "out", **how)
    assert f"\nwarning: no validation images of class rare: {why}; add images of each class, or remove it;" in words
    write_images(tmp_path / "split", *(f"{part}/{label}/1.png" for part in ("train", "val") for label in "abc"))
    for label in "bc":
        (tmp_path / "split/val" / label / "1.png").write_text("garbage")
    words = prepare(str(tmp_path / "split"), tmp_path / "out of split", **how)
    assert f"\nwarning: no validation images of 2 classes: b, c: {why}" in words


def test_an_empty_folder_and_a_file_as_target_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(launcher.UserError, match="holds no images"):
        prepare(str(tmp_path / "empty"), tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(launcher.UserError, match="is a file"):
        prepare("digits", tmp_path / "file")


@pytest.mark.parametrize("how", [{}, {"shard_size": "100KB"}])
@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_source_that_has_changed_is_refused_as_another_part_would_be_held_out(tmp_path, how, change):
    source = tmp_path / "source"
    write_images(source, *(f"{label}/{number}.png" for label in ("cat", "dog") for number in range(8)))
    prepare(str(source), tmp_path / "out", **how)
    before = tree(tmp_path / "out")
    if change == "more":
        write_images(source, "cat/8.png")
    else:
        (source / "cat/3.png").unlink()
    with pytest.raises(launcher.UserError, match="it holds other images than at the first run"):
        prepare(str(source), tmp_path / "out", **how)
    assert tree(tmp_path / "out") == before


def test_two_images_for_one_file_are_named(tmp_path):
    write_images(tmp_path / "source", "train/cat/x.jpg", "train/cat/x.JPG", "val/cat/x.jpg")
    with pytest.raises(launcher.UserError, match=r"cat/x\.\w+ and .*cat/x\.\w+ would be written to one file"):
        prepare(str(tmp_path / "source"), tmp_path / "out")


def test_two_images_that_would_share_one_mask_are_named(tmp_path):
    write_images(tmp_path / "in", *(f"train/{kind}/{name}.png" for kind in ("images", "masks") for name in "ab"))
    write_images(tmp_path / "in", "val/images/a.png", "val/masks/a.png", "train/images/a.jpg")
    with pytest.raises(
        launcher.UserError, match=r"images/a.jpg and .*images/a.png would .* one file, train/masks/a.png\n"
    ):
        prepare(str(tmp_path / "in"), tmp_path / "out")


def test_a_split_of_which_a_half_is_missing_is_no_class(tmp_path):
    write_images(tmp_path / "source", "train/cat/1.png", "train/dog/1.png", "valid/cat/2.png")
    with pytest.raises(
        launcher.UserError, match="has train/ with folders in it, and no validation/, val/, test/ beside it"
    ):
        prepare(str(tmp_path / "source"), tmp_path / "out")
    assert "in 2 classes" in prepare(str(tmp_path / "source/train"), tmp_path / "out")


def test_a_folder_that_cannot_be_listed_is_named_and_not_left_out(tmp_path, monkeypatch):
    write_images(tmp_path / "source", "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    real = os.scandir

    def scandir(folder):
        if str(folder).endswith("dog"):
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(launcher.UserError, match=r"source/dog cannot be listed: Input/output error"):
        prepare(str(tmp_path / "source"), tmp_path / "out")
    assert not (tmp_path / "out").exists()

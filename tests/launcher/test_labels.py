"""`launcher labels`: real banks, filled by the entry scripts' own cache, damaged, exchanged, split and read by other programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from training.teacher.feature_format import FeatureFormat

from launcher.commands.main import main
from launcher.config.issues import UserError
from launcher.labels.bank import Bank, rules
from launcher.labels.merging import merge
from launcher.record import folder_lock
from tests.conftest import ROOT
from tests.docs.documents import blocks
from tests.entrypoints.teacher_caches import (
    CLASSES,
    IMAGES,
    PARTS,
    CountedTeacher,
    batch_of,
    fill_pixels,
    filled,
    forget,
    kept,
    opened,
)


def complete(folder: Path, **changes) -> Path:
    """A bank whose first view is complete."""
    filled(folder, **changes)
    file = folder / "view-0001.bin"
    rules().write_checksums(folder, {file.name: rules().sha256_of(file)})
    return folder


def cut_off(*given) -> None:
    """A kill, after the first half of a copy."""
    if len(given) == 2 and isinstance(given[1], Path):
        given[1].write_bytes(given[0].read_bytes()[:50])
    raise RuntimeError("killed")


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_show_says_whose_labels_a_bank_holds_and_how_many(tmp_path, capsys):
    cache = filled(tmp_path / "bank", precision="int4")
    forget(cache, tmp_path / "bank", [3, 4])
    assert main(["labels", "show", str(tmp_path / "bank")]) == 0
    said = capsys.readouterr().out
    assert "the 4 largest of 12 logits in int4" in said and f"58 of {IMAGES}" in said and PARTS["data"] in said
    assert main(["labels", "show", "--json", str(complete(tmp_path / "whole"))]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["views"] == [{"view": 1, "labels": IMAGES, "complete": True}]
    assert about["digest"] == Bank(tmp_path / "whole").digest and about["labels of"]["precision"] == "fp16"


def test_verify_finds_any_wrong_bit_and_a_bank_that_was_exchanged(tmp_path, capsys):
    bank = complete(tmp_path / "bank")
    digest, size = Bank(bank).digest, Bank(bank).records.size
    assert main(["labels", "verify", str(bank), "--digest", digest]) == 0
    assert capsys.readouterr().out.startswith(f"{IMAGES} whole labels, 0 absent, 0 problems")
    flip(bank / "view-0001.bin", 7 * size + 3)
    assert main(["labels", "verify", str(bank)]) == 1
    said = capsys.readouterr().out
    assert "view-0001.bin has 1 damaged record;" in said and "has changed since it was complete" in said
    shutil.rmtree(bank)
    complete(bank, batch_size=IMAGES, precision="fp32")  # whole in itself, and not the one that was noted
    assert main(["labels", "verify", str(bank)]) == 0
    assert main(["labels", "verify", str(bank), "--digest", digest]) == 1
    assert f"and {digest} was expected" in capsys.readouterr().out


def test_verify_finds_a_file_that_was_cut_off_and_one_that_is_missing(tmp_path, capsys):
    bank = complete(tmp_path)
    file = bank / "view-0001.bin"
    file.write_bytes(file.read_bytes()[:-5])
    assert main(["labels", "verify", str(bank)]) == 1
    assert "view-0001.bin has 1,195 bytes instead of 1,200" in capsys.readouterr().out
    for lose in (lambda: file.write_bytes(b""), file.unlink):  # as where a disk was full
        lose()
        assert main(["labels", "verify", str(bank)]) == 1
        assert "view-0001.bin is missing or empty, and was complete" in capsys.readouterr().out
        assert main(["labels", "export", str(bank), str(tmp_path / "exported"), "--as", "npz"]) == 2
        assert (
            "is missing or empty, and was complete" in capsys.readouterr().err and not (tmp_path / "exported").exists()
        )


@pytest.mark.parametrize("kind", ["npz", "safetensors", "huggingface"])
def test_an_export_says_which_labels_it_lacks(tmp_path, capsys, kind):
    bank = complete(tmp_path / "bank")
    assert main(["labels", "export", str(bank), str(tmp_path / "whole"), "--as", kind]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"{IMAGES} labels of 1 view as {kind}")
    forget(filled(bank), bank, [0, 59])
    flip(bank / "view-0001.bin", 7 * Bank(bank).records.size + 3)
    assert main(["labels", "export", str(bank), str(tmp_path / "out"), "--as", kind]) == 0
    lacking = "1 damaged record left out, 2 absent"
    assert f"{IMAGES - 3} labels of 1 view as {kind}; {lacking}" in capsys.readouterr().out
    if kind == "huggingface":
        assert lacking in (tmp_path / "out/README.md").read_text()


def test_two_merges_into_one_bank_at_once_are_refused(tmp_path, capsys):
    bank = complete(tmp_path / "bank")
    words = ["labels", "merge", str(bank), "--into", str(tmp_path / "merged")]
    with folder_lock.alone(tmp_path / "merged"):
        assert main(words) == 2
    assert "is being written by process" in capsys.readouterr().err and not (tmp_path / "merged/manifest.json").exists()
    assert main(words) == 0


def test_a_copy_of_a_views_file_is_no_view(tmp_path, capsys):
    bank = complete(tmp_path / "bank")
    for name in ("view-0001 (copy).bin", "view-0001.bak.bin", "view-2.bin", "view-00003.bin"):
        shutil.copy(bank / "view-0001.bin", bank / name)
    assert Bank(bank).views == [1]
    assert main(["labels", "verify", str(bank)]) == 0 and "0 problems" in capsys.readouterr().out


def test_labels_that_were_never_computed_are_absent_and_no_damage(tmp_path, capsys):
    forget(filled(tmp_path), tmp_path, [0, 59])
    assert main(["labels", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("58 whole labels, 2 absent, 0 problems")


def test_banks_of_parts_become_one_in_which_no_label_is_lost(tmp_path, capsys):
    whole = complete(tmp_path / "whole")
    for name, lost in {"one": range(40), "other": range(20, 60)}.items():
        forget(filled(tmp_path / name), tmp_path / name, [*lost])
    words = ["labels", "merge", str(tmp_path / "one"), str(tmp_path / "other"), "--into", str(tmp_path / "merged")]
    assert main(words) == 0
    assert "40 labels added" in capsys.readouterr().out
    assert main(words) == 0 and "0 labels added" in capsys.readouterr().out, "nothing is left to do"
    assert main(["labels", "merge", str(whole), "--into", str(tmp_path / "merged")]) == 0
    merged = tmp_path / "merged"
    assert "20 labels added" in capsys.readouterr().out and Bank(merged).digest == Bank(whole).digest
    assert (kept(merged) == kept(whole)).all()


def test_a_merge_does_not_bless_a_damaged_view_and_a_whole_source_repairs_it(tmp_path, capsys):
    whole, target = complete(tmp_path / "whole"), complete(tmp_path / "target")
    file, words = target / "view-0001.bin", ["--into", str(tmp_path / "target")]
    noted, content = (target / "SHA256SUMS").read_text(), file.read_bytes()
    file.write_bytes(bytes(400) + content[400:])
    forget(filled(tmp_path / "part"), tmp_path / "part", range(10, 60))
    assert main(["labels", "merge", str(tmp_path / "part"), *words]) == 0
    assert "10 labels added" in capsys.readouterr().out and (target / "SHA256SUMS").read_text() == noted
    assert main(["labels", "verify", str(target)]) == 1
    assert "view-0001.bin has changed since it was complete" in capsys.readouterr().out
    file.write_bytes(bytes(400) + content[400:])
    (whole / "view-0001.bin").write_bytes(content[:-400] + bytes(400))  # no more the one that was complete
    assert main(["labels", "merge", str(whole), *words]) == 0 and (target / "SHA256SUMS").read_text() == noted
    file.write_bytes(bytes(len(content)))
    (whole / "view-0001.bin").write_bytes(content)
    assert main(["labels", "merge", str(whole), *words]) == 0 == main(["labels", "verify", str(target)])
    file.unlink()  # noted, and missing
    assert main(["labels", "merge", str(target), "--into", str(tmp_path / "new")]) == 0
    assert not (tmp_path / "new/SHA256SUMS").exists()


def test_a_merge_that_is_killed_at_any_moment_leaves_a_complete_view_complete_and_goes_on(tmp_path, monkeypatch):
    target, words = complete(tmp_path / "target"), ["labels", "merge", str(tmp_path / "part"), "--into"]
    filled(tmp_path / "part")
    for name in ("write", "sync", "close"):
        with monkeypatch.context() as killed, pytest.raises(RuntimeError, match="killed"):
            killed.setattr(rules().ViewFile, name, cut_off)
            merge([Bank(tmp_path / "part")], target)
        assert Bank(target).checksums == {"view-0001.bin": rules().sha256_of(target / "view-0001.bin")}
    with monkeypatch.context() as killed, pytest.raises(RuntimeError, match="killed"):
        killed.setattr("launcher.labels.merging.shutil.copyfile", cut_off)
        merge([Bank(tmp_path / "part")], tmp_path / "new")
    assert main([*words, str(tmp_path / "new")]) == 0 and Bank(tmp_path / "new").views == [1]


def test_merging_reports_labels_that_differ_and_keeps_the_first_banks(tmp_path, capsys):
    for name in ("one", "other"):
        filled(tmp_path / name)
    other = Bank(tmp_path / "other")
    (piece,) = other.pieces(1)
    records, images = piece.records.copy(), np.arange(5)
    records[:5, 0] += 1  # what another GPU would have said
    own = rules()
    seal = own.Seal(own.key_of(other.identity), other.records.size)
    changed = np.ascontiguousarray(records[:5])
    seal.close(changed, images, 1)
    records[:5] = changed
    (tmp_path / "other/view-0001.bin").write_bytes(records.tobytes())
    expected = kept(tmp_path / "one")
    assert (
        main(
            ["labels", "merge", *(str(tmp_path / name) for name in ("one", "other")), "--into", str(tmp_path / "into")]
        )
        == 0
    )
    assert "5 labels differ between banks, the first one's is kept" in capsys.readouterr().out
    assert (kept(tmp_path / "into") == expected).all()


def test_banks_of_different_teachers_or_transforms_are_not_merged(tmp_path, capsys):
    filled(tmp_path / "one")
    filled(tmp_path / "other", parts={**PARTS, "teacher weights": "another", "transform": "older"})
    assert (
        main(["labels", "merge", str(tmp_path / "one"), str(tmp_path / "other"), "--into", str(tmp_path / "into")]) == 2
    )
    said = capsys.readouterr().err
    assert "differ in teacher weights: another" in said and "differ in transform: older" in said
    assert not (tmp_path / "into").exists()


def test_the_kinds_of_files_are_named_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["labels", "export", "--help"])
    assert "--as npz|safetensors|huggingface" in capsys.readouterr().out


@pytest.mark.parametrize("top_k", [4, None])
@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_every_export_holds_what_training_reads(tmp_path, top_k, precision):
    bank = complete(tmp_path / "bank", top_k=top_k, precision=precision)
    expected = kept(bank, top_k=top_k, precision=precision).numpy()
    for kind in ("npz", "safetensors", "huggingface"):
        assert main(["labels", "export", str(bank), str(tmp_path / kind), "--as", kind]) == 0
    rows = [json.loads(line) for line in (tmp_path / "huggingface/data/view-0001.jsonl").read_text().splitlines()]
    assert {row["view"] for row in rows} == {1}
    names = ("image", "logits") if top_k is None else ("image", "logits", "classes", "residual")
    in_lines = {name: np.array([row[name] for row in rows], np.float32) for name in names}
    for found in (
        dict(np.load(tmp_path / "npz/view-0001.npz")),
        load_file(tmp_path / "safetensors/view-0001.safetensors"),
        in_lines,
    ):
        assert {*found} == {*names} and np.array_equal(found["image"], np.arange(IMAGES))
        if top_k is None:
            assert np.array_equal(found["logits"], expected)
        else:
            classes = found["classes"].astype(int)
            assert np.array_equal(found["logits"], np.take_along_axis(expected, classes, 1))
            tail = found["residual"] - np.float32(np.log(CLASSES - top_k))
            others = np.ones(expected.shape, bool)
            np.put_along_axis(others, classes, False, 1)
            assert np.allclose(expected[others].reshape(IMAGES, -1), tail[:, None], atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_the_documents_ten_lines_of_numpy_read_what_training_reads(tmp_path, monkeypatch, precision):
    expected = kept(complete(tmp_path / "bank", precision=precision), precision=precision).numpy()
    text, _ = [text for document, text in blocks("python") if document == "docs/label-bank.md"]
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(text, found)
    assert np.array_equal(np.take_along_axis(expected, found["classes"], 1), found["logits"])
    (piece,) = Bank(tmp_path / "bank").pieces(1)
    assert np.array_equal(found["residual"], Bank(tmp_path / "bank").records.logits_of(piece.records).residual)


@pytest.mark.parametrize(("level", "shape"), [("pooled", (7,)), ("tokens", (2, 3, 5))])
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_a_bank_with_features_is_shown_verified_merged_exported_and_read_by_the_documents_lines(
    tmp_path, monkeypatch, capsys, level, shape, precision
):
    how, width = FeatureFormat(level, shape, precision), int(np.prod(shape))
    bank, cache, model = tmp_path / "bank", opened(tmp_path / "bank", features=how), CountedTeacher()
    cache.begin_epoch([1], np.arange(IMAGES))
    batch = batch_of(np.arange(IMAGES))
    _, features = cache.answers(
        batch, lambda images: (model(images), images.flatten(1)[:, :width].float().reshape(-1, *shape))
    )
    cache.close()
    assert main(["labels", "show", str(bank)]) == 0
    said = capsys.readouterr().out
    assert f"the 4 largest of 12 logits in fp16 and {level} features of" in said and f"numbers in {precision}:" in said
    for command in (["verify", str(bank)], ["merge", str(bank), "--into", str(tmp_path / "into")]):
        assert main(["labels", *command]) == 0
    flip(bank / "view-0001.bin", 7 * cache.layout.size + cache.layout.feature_bytes.stop - 1)
    assert main(["labels", "verify", str(bank)]) == 1, "a bit of a feature"
    with pytest.raises(UserError, match="differ in feature precision"):
        merge([Bank(tmp_path / "into"), other_features(tmp_path / "other", how)], tmp_path / "both")
    for kind in ("npz", "huggingface"):
        assert main(["labels", "export", str(tmp_path / "into"), str(tmp_path / kind), "--as", kind]) == 0
    assert np.array_equal(np.load(tmp_path / "npz/view-0001.npz")["features"], features.numpy())
    row = json.loads((tmp_path / "huggingface/data/view-0001.jsonl").read_text().splitlines()[5])
    assert np.array_equal(np.array(row["features"], np.float32), features[5].numpy())
    assert f"{level} features of" in (tmp_path / "huggingface/README.md").read_text()
    (tmp_path / "into").rename(tmp_path / "elsewhere")
    bank.rename(tmp_path / "damaged")
    (tmp_path / "elsewhere").rename(bank)
    text, _ = [text for document, text in blocks("python") if document == "docs/label-bank.md"]
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(text, found)
    assert np.array_equal(found["features"], features.numpy())


def other_features(folder: Path, how: FeatureFormat) -> Bank:
    """An empty bank of features in another precision."""
    opened(folder, features=replace(how, precision="int4" if how.precision == "int8" else "int8"))
    return Bank(folder)


@pytest.mark.parametrize(("top_k", "precision"), [(1, "int4"), (2, "int8"), (0, "int4")])
def test_a_bank_of_pixels_is_shown_verified_merged_exported_and_read_by_the_documents_lines(
    tmp_path, monkeypatch, capsys, top_k, precision
):
    bank = tmp_path / "bank"
    cache, logits = fill_pixels(bank, top_k=top_k, precision=precision)
    layout = cache.layout
    assert main(["labels", "show", str(bank)]) == 0
    said = capsys.readouterr().out
    assert f"all 6 logits for 2 × 3 places in {precision}" in said and ("3 × 5 places" in said) == (top_k > 0)
    for command in (["verify", str(bank)], ["merge", str(bank), "--into", str(tmp_path / "into")]):
        assert main(["labels", *command]) == 0
    assert main(["labels", "export", str(bank), str(tmp_path / "npz")]) == 0
    exported = dict(np.load(tmp_path / "npz/view-0001.npz"))
    assert {*exported} == {"image", "coarse", *(("logits", "classes", "residual") if top_k else ())}
    if top_k:
        largest = logits.topk(top_k, dim=1).indices.permute(0, 2, 3, 1).numpy()
        assert np.array_equal(exported["classes"], largest) and exported["logits"].shape == largest.shape
    _, text = [text for document, text in blocks("python") if document == "docs/label-bank.md"]
    (tmp_path / "pixel_bank").symlink_to(bank)
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(text, found)
    for name in {*exported} - {"image"}:
        assert np.array_equal(found[name], exported[name]), name
    flip(bank / "view-0001.bin", 7 * layout.size + layout.answer_bytes - 1)
    assert main(["labels", "verify", str(bank)]) == 1
    opened(tmp_path / "other", layout=replace(layout, rows=4))
    with pytest.raises(UserError, match=r"differ in pixel grid: \[4, 5\], \[3, 5\]"):
        merge([Bank(tmp_path / "into"), Bank(tmp_path / "other")], tmp_path / "both")


def test_an_export_overwrites_nothing_and_a_cut_off_bank_is_not_exported(tmp_path, capsys):
    bank = complete(tmp_path / "bank")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    assert main(["labels", "export", str(bank), str(tmp_path / "there")]) == 2
    assert "is not empty" in capsys.readouterr().err
    (bank / "view-0001.bin").write_bytes(b"short")
    assert main(["labels", "export", str(bank), str(tmp_path / "new")]) == 2
    assert "has 5 bytes instead of 1,200" in capsys.readouterr().err


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"logits of": {"record format": 1}}'])
def test_a_folder_that_is_no_bank_is_refused_with_what_to_do(tmp_path, capsys, manifest):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    assert main(["labels", "verify", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "launcher label" in said


def test_reading_a_bank_imports_no_torch(tmp_path):
    filled(tmp_path)
    code = f"import sys\nfrom launcher.commands.main import main\nassert main(['labels', 'verify', {str(tmp_path)!r}]) == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)

"""What cannot be a teacher, and published weights: each mistake is reported with its fix."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile

import numpy as np
import pytest
import torch
import torch._dynamo  # torch 2.0 does not bring it by itself
from safetensors.torch import save_file
from training.models import timm_models
from training.models.files import SMALL, unpack
from training.teacher.acceptance import require

from tests.entrypoints.teachers import CLASSES, IMAGES, NAME, OPTIONS, archive, channel, exported, load

# --- published weights


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hugging Face hub as its client's folder of downloads has it, with OWNER/tiny in it; and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "downloads/models--owner--tiny/snapshots/0123456789abcdef0123456789abcdef01234567"
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs/main").write_text(snapshot.name)
    snapshot.mkdir(parents=True)
    torch.manual_seed(1)
    model = timm_models.create("test_resnet", {}, num_classes=3, in_chans=1)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, snapshot / "model.safetensors")
    published = {"input_size": [1, 32, 32], "mean": [0.4], "std": [0.2]}
    config = {"architecture": "test_resnet", "num_classes": 3, "label_names": CLASSES, "model_args": {"in_chans": 1}}
    config["pretrained_cfg"] = {**published, "first_conv": "conv1", "classifier": "fc", "num_classes": 3}
    (snapshot / "config.json").write_text(json.dumps(config))
    return {"cache_dir": str(tmp_path / "downloads"), "in_chans": 1}, timm_models.Normalized(
        model.eval(), [0.4], [0.2], 32
    )


def test_a_model_of_the_hub_comes_with_its_head_its_normalisation_and_its_size(hub):
    options, model = hub
    loaded = load(None, name="hf-hub:owner/tiny", options=options)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IMAGES), model(IMAGES))


def test_a_published_head_for_other_classes_is_refused(hub):
    options, _ = hub
    with pytest.raises(ValueError, match="published for 3 classes, the training images have 4: train it on them first"):
        load(None, [*CLASSES, "d"], name="hf-hub:owner/tiny", options=options)
    with pytest.raises(ValueError, match="the teacher knows the classes a, b, c, the training images have c, b, a"):
        load(None, CLASSES[::-1], name="hf-hub:owner/tiny", options=options)


def test_published_weights_out_of_reach_are_reported_with_the_fix(hub, tmp_path):
    for name in ("hf-hub:owner/none", "test_vit.r160_in1k"):
        with pytest.raises(ValueError, match=f"the published weights of {name} cannot be loaded .*channel teacher"):
            load(None, name=name, options={"cache_dir": str(tmp_path / "nothing")})


def test_a_folder_named_local_dir_is_a_teacher_without_a_channel(tmp_path, trained):
    exported(tmp_path / "second", 2)
    single = load(None, name=f"local-dir:{tmp_path / 'model'}")
    assert torch.equal(single(IMAGES), load(tmp_path / "model")(IMAGES))
    both = load(None, name=[f"local-dir:{tmp_path / 'model'}", f"local-dir:{tmp_path / 'second'}"])
    assert len(both.members) == 2
    with pytest.raises(ValueError, match="is not a folder on the training machine"):
        load(None, name=f"local-dir:{tmp_path / 'nowhere'}")


def test_without_a_channel_and_a_name_there_is_no_teacher():
    with pytest.raises(ValueError, match="give the channel teacher, or the hyperparameter teacher"):
        load(None)


# --- accuracy


def test_a_teacher_below_the_least_accuracy_is_refused():
    require("validation_accuracy", 0.8, 0.8, NAME)
    with pytest.raises(
        ValueError, match="vit_tiny_patch16_224 has an accuracy of 0.7999 .* below min_teacher_accuracy 0.8"
    ):
        require("validation_accuracy", 0.79994, 0.8, NAME)


# --- what cannot be a teacher


def test_other_classes_are_refused_with_both_lists(tmp_path, trained):
    with pytest.raises(ValueError, match="the teacher knows the classes a, b, c, the training images have a, b, d"):
        load(tmp_path / "model", ["a", "b", "d"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds 0 weights files"),
        (["a.pt", "b.safetensors"], r"holds 2 weights files \(a.pt, b.safetensors\)"),
        (["a.pt"], "set the hyperparameter teacher"),
        (["a.tar.gz"], "a.tar.gz is damaged: copy it again"),
    ],
)
def test_a_channel_without_one_teacher_says_what_it_holds(tmp_path, files, message):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "archive", "ddp checkpoint"])
def test_a_file_that_broke_off_is_told_to_be_damaged(tmp_path, trained, kind):
    place = channel(tmp_path, kind, trained)
    file = next(file for file in place.iterdir() if file.suffix in (".safetensors", ".gz", ".pth"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"{file.name} is damaged: copy it again"):
        load(place, name=NAME, options=OPTIONS)


def test_an_archive_with_one_wrong_bit_is_refused_wherever_it_is(tmp_path, trained):
    archive(tmp_path / "model", tmp_path / "channel/model.tar.gz")
    file = tmp_path / "channel/model.tar.gz"
    whole = file.read_bytes()
    begin = whole.index(b"\0", 10) + 1  # after gzip's own header, whose date and name matter to nobody
    for place in np.linspace(begin, len(whole) - 1, 60).astype(int):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="model.tar.gz is damaged: copy it again .*gzip -t"):
            load(tmp_path / "channel")
    file.write_bytes(whole)
    assert torch.equal(load(tmp_path / "channel")(IMAGES), load(tmp_path / "model")(IMAGES))


@pytest.mark.parametrize("kind", ["folder", "ddp checkpoint"])
def test_weights_with_one_wrong_bit_are_refused_outside_an_archive_too(tmp_path, trained, kind):
    place = channel(tmp_path, kind, trained)
    file = next(file for file in place.iterdir() if file.suffix in (".safetensors", ".pth"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file.name} is damaged: copy it again .*(SHA-256|checksum)"):
        load(place, name=NAME, options=OPTIONS)


@pytest.mark.parametrize("member", ["weights", "header"])
def test_an_archive_that_inflates_is_refused_at_its_limit(tmp_path, member):
    (tmp_path / "channel").mkdir()
    with tarfile.open(tmp_path / "channel/model.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as opened:
        entry = tarfile.TarInfo("model.safetensors")
        if member == "weights":
            entry.size = 80 << 20
            opened.addfile(entry, io.BytesIO(bytes(entry.size)))
        else:
            entry.pax_headers = {"comment": "x" * (80 << 20)}
            opened.addfile(entry)
    with pytest.raises(ValueError, match="model.tar.gz unpacks to more than 67,108,864 bytes, .*give the folder"):
        load(tmp_path / "channel")


def test_a_label_bank_of_which_little_is_written_has_the_limit_of_a_full_one(tmp_path):
    archive, full = tmp_path / "model.tar.gz", 80 << 20
    with tarfile.open(archive, "w:gz") as opened:
        entry = tarfile.TarInfo("view-0001.bin")
        entry.size = full
        opened.addfile(entry, io.BytesIO(bytes(full)))
    assert (unpack(archive, tmp_path / "bank", SMALL + full) / "view-0001.bin").stat().st_size == full
    with pytest.raises(ValueError, match=r"unpacks to more than 83,886,079 bytes, which no archive of a run does"):
        unpack(archive, tmp_path / "less", full - 1)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"epoch": 1}, torch.zeros(2)])
def test_a_file_without_a_state_dict_is_told_so(tmp_path, content):
    torch.save(content, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="last.pt holds no state dict: save one with"):
        load(tmp_path, name=NAME, options=OPTIONS)


def test_a_checkpoint_that_inflates_is_refused_at_the_same_limit(tmp_path):
    torch.save({"head.bias": torch.zeros(20 << 20)}, tmp_path / "stored.zip")
    with zipfile.ZipFile(tmp_path / "stored.zip") as stored:
        (tmp_path / "channel").mkdir()
        with zipfile.ZipFile(tmp_path / "channel/last.pt", "w", zipfile.ZIP_DEFLATED) as deflated:
            for member in stored.infolist():
                deflated.writestr(member.filename, stored.read(member))
    with pytest.raises(ValueError, match="last.pt unpacks to more than 67,108,864 bytes"):
        load(tmp_path / "channel", name=NAME, options=OPTIONS)


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    (tmp_path / "evil").write_text("x")
    (tmp_path / "channel").mkdir()
    with tarfile.open(tmp_path / "channel/model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "evil", "../../outside")
    with pytest.raises(ValueError, match="points outside it"):
        load(tmp_path / "channel")
    assert not (tmp_path / "outside").exists()


def test_an_unknown_model_names_near_ones():
    with pytest.raises(ValueError, match="has no model vit_tny.*similar: "):
        timm_models.build("vit_tny", {}, 3)
    with pytest.raises(ValueError, match="cannot be created with"):
        timm_models.build(NAME, {"no_such_option": 1}, 3)


def test_weight_decay_spares_biases_and_norms():
    model = timm_models.build(NAME, OPTIONS, 3)
    decayed = {
        id(parameter)
        for group in timm_models.parameter_groups(model, 0.1)
        if group["weight_decay"]
        for parameter in group["params"]
    }
    assert all(
        (id(parameter) in decayed) == (parameter.ndim > 1 and "pos_embed" not in name and "cls_token" not in name)
        for name, parameter in model.named_parameters()
    )


def test_the_same_classes_in_another_order_are_refused(tmp_path, trained):
    with pytest.raises(ValueError, match="the teacher knows the classes a, b, c"):
        load(tmp_path / "model", ["b", "a", "c"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 3}, "made for channels 1, the student sees 3"),
        ({"name": NAME, "options": {**OPTIONS, "depth": 2}}, "does not fit vit_tiny_patch16_224 with"),
    ],
)
def test_a_teacher_that_does_not_fit_the_student_is_refused(tmp_path, trained, options, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "model", **options)


def test_naming_the_teachers_own_model_keeps_its_saved_options(tmp_path, trained):
    assert load(tmp_path / "model", name=NAME).name == NAME


def test_loading_a_teacher_does_not_move_the_students_random_numbers(tmp_path, trained):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load(tmp_path / "model")
    assert torch.equal(torch.rand(1), expected)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="evil.pt is not a weights-only file"):
        load(tmp_path, name=NAME, options=OPTIONS)
    assert not (tmp_path / "ran").exists()


def test_a_model_scales_bytes_and_normalises_with_its_own_numbers():
    model = timm_models.Normalized(torch.nn.Identity(), [0.5, 0.25, 0.0], [0.5, 1.0, 2.0])
    pixels = torch.tensor([255, 51, 102], dtype=torch.uint8).view(1, 3, 1, 1)
    assert torch.allclose(model(pixels).flatten(), torch.tensor([1.0, -0.05, 0.2]))
    with pytest.raises(ValueError, match="a model for 3 channels got images with 1"):
        model(pixels[:, :1])

"""Teachers: from every kind of file to the same frozen logits, and clear words where that cannot be."""

import tarfile

import pytest
import torch
from training import export, models, teacher

OPTIONS = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 1,
    "num_heads": 2,
    "in_chans": 1,
    "drop_rate": 0.5,
}
NAME, CLASSES = "vit_tiny_patch16_224", ["a", "b", "c"]


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(1)
    model = models.build(NAME, OPTIONS, 3)
    export.save(model, tmp_path / "model", name=NAME, options=OPTIONS, classes=CLASSES, image_size=16)
    return model.eval()


IMAGES = torch.randint(0, 256, (4, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def channel(tmp_path, kind: str, model):
    """A channel's folder that holds the teacher as a folder's content, an archive, or a bare weights file."""
    folder = tmp_path / kind
    if kind == "folder":
        return tmp_path / "model"
    folder.mkdir()
    if kind == "archive":
        with tarfile.open(folder / "model.tar.gz", "w:gz") as archive:
            for file in (tmp_path / "model").iterdir():
                archive.add(file, file.name)
    elif kind == "ddp checkpoint":
        torch.save(
            {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in model.model.state_dict().items()}},
            folder / "last.pth",
        )
    else:
        (tmp_path / "model/model.safetensors").rename(folder / "weights.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["folder", "archive", "bare weights", "ddp checkpoint"])
def test_every_kind_of_file_gives_the_same_logits(tmp_path, trained, kind):
    place = channel(tmp_path, kind, trained)
    named = {"name": NAME, "options": OPTIONS} if kind in ("bare weights", "ddp checkpoint") else {}
    loaded = teacher.load(place, CLASSES, **named)
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), trained(IMAGES))


def test_a_teacher_is_frozen_in_eval_mode_and_without_gradients(tmp_path, trained):
    loaded = teacher.load(tmp_path / "model", CLASSES)
    assert not loaded.model.training and not any(module.training for module in loaded.model.modules())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded(IMAGES).requires_grad
    assert torch.equal(loaded(IMAGES), loaded(IMAGES)), "dropout is off"


def test_the_teachers_own_normalisation_comes_with_it(tmp_path, trained):
    trained.mean.fill_(0.3)
    export.save(trained, tmp_path / "model", name=NAME, options=OPTIONS, classes=CLASSES, image_size=16)
    assert teacher.load(tmp_path / "model", CLASSES).model.mean.flatten().tolist() == pytest.approx([0.3])


def test_other_classes_are_refused_with_both_lists(tmp_path, trained):
    with pytest.raises(ValueError, match="the teacher knows the classes a, b, c, the training images have a, b, d"):
        teacher.load(tmp_path / "model", ["a", "b", "d"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds 0 weights files"),
        (["a.pt", "b.safetensors"], r"holds 2 weights files \(a.pt, b.safetensors\)"),
        (["a.tar.gz", "b.tar.gz"], "several archives: a.tar.gz, b.tar.gz"),
        (["a.pt"], "set the hyperparameter teacher"),
    ],
)
def test_a_channel_without_one_teacher_says_what_it_holds(tmp_path, files, message):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        teacher.load(tmp_path, CLASSES)


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    (tmp_path / "evil").write_text("x")
    (tmp_path / "channel").mkdir()
    with tarfile.open(tmp_path / "channel/model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "evil", "../../outside")
    with pytest.raises(ValueError, match="lies outside of it"):
        teacher.load(tmp_path / "channel", CLASSES)
    assert not (tmp_path / "outside").exists()


def test_an_unknown_model_names_near_ones():
    with pytest.raises(ValueError, match="knows no model vit_tny.*near: "):
        models.build("vit_tny", {}, 3)
    with pytest.raises(ValueError, match="cannot be made with"):
        models.build(NAME, {"no_such_option": 1}, 3)


def test_weight_decay_spares_biases_and_norms():
    model = models.build(NAME, OPTIONS, 3)
    decayed = {
        id(parameter)
        for group in models.parameter_groups(model, 0.1)
        if group["weight_decay"]
        for parameter in group["params"]
    }
    assert all(
        (id(parameter) in decayed) == (parameter.ndim > 1 and "pos_embed" not in name and "cls_token" not in name)
        for name, parameter in model.named_parameters()
    )

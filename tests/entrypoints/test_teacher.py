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


def load(folder, classes=CLASSES, **options):
    return teacher.load(folder, classes, **{"channels": 1, "image_size": 16, **options})


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


@pytest.mark.parametrize("kind", ["folder", "archive", "bare weights", "ddp checkpoint", "ema checkpoint"])
def test_every_kind_of_file_gives_the_same_logits(tmp_path, trained, kind):
    place = channel(tmp_path, kind, trained)
    named = {"name": NAME, "options": OPTIONS} if kind not in ("folder", "archive") else {}
    loaded = load(place, **named)
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), trained(IMAGES))


def test_a_teacher_is_frozen_in_eval_mode_and_without_gradients(tmp_path, trained):
    loaded = load(tmp_path / "model")
    assert not loaded.model.training and not any(module.training for module in loaded.model.modules())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded(IMAGES).requires_grad
    assert torch.equal(loaded(IMAGES), loaded(IMAGES)), "dropout is off"


def test_the_teachers_own_normalisation_comes_with_it(tmp_path, trained):
    trained.mean.fill_(0.3)
    trained.std.fill_(0.7)
    export.save(trained, tmp_path / "model", name=NAME, options=OPTIONS, classes=CLASSES, image_size=16)
    loaded = load(tmp_path / "model").model
    assert (loaded.mean.item(), loaded.std.item()) == pytest.approx((0.3, 0.7))


def test_other_classes_are_refused_with_both_lists(tmp_path, trained):
    with pytest.raises(ValueError, match="the teacher knows the classes a, b, c, the training images have a, b, d"):
        load(tmp_path / "model", ["a", "b", "d"])


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
        load(tmp_path)


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    (tmp_path / "evil").write_text("x")
    (tmp_path / "channel").mkdir()
    with tarfile.open(tmp_path / "channel/model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "evil", "../../outside")
    with pytest.raises(ValueError, match="lies outside of it"):
        load(tmp_path / "channel")
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


def test_the_same_classes_in_another_order_are_refused(tmp_path, trained):
    with pytest.raises(ValueError, match="the teacher knows the classes a, b, c"):
        load(tmp_path / "model", ["b", "a", "c"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 3}, "made for channels 1, the student sees 3"),
        ({"image_size": 32}, "made for image size 16, the student sees 32"),
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
    with pytest.raises(ValueError, match="evil.pt is no file of weights alone"):
        load(tmp_path, name=NAME, options=OPTIONS)
    assert not (tmp_path / "ran").exists()


def test_a_model_scales_bytes_and_normalises_with_its_own_numbers():
    model = models.Normalized(torch.nn.Identity(), [0.5, 0.25, 0.0], [0.5, 1.0, 2.0])
    pixels = torch.tensor([255, 51, 102], dtype=torch.uint8).view(1, 3, 1, 1)
    assert torch.allclose(model(pixels).flatten(), torch.tensor([1.0, -0.05, 0.2]))
    with pytest.raises(ValueError, match="a model for 3 channels got images with 1"):
        model(pixels[:, :1])

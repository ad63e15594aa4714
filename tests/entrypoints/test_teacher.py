"""Teachers: from every kind of file to the same frozen logits, and clear words where that cannot be."""

import copy
import json
import shutil
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo  # torch 2.0 does not bring it by itself
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from training.models import export, timm_models
from training.teacher import frozen
from training.teacher.acceptance import require

from tests.entrypoints.torch_versions import compiling

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
IMAGES = torch.randint(0, 256, (4, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def exported(folder: Path, seed: int = 1, name: str = NAME, image_size: int = 16, **options) -> timm_models.Normalized:
    """A trained model, and its files in a folder."""
    options = {**(OPTIONS if name == NAME else {"in_chans": 1}), **options}
    torch.manual_seed(seed)
    model = timm_models.build(name, options, 3)
    save(model, folder, name=name, options=options, image_size=image_size)
    return model.eval()


def save(model: timm_models.Normalized, folder: Path, **described) -> None:
    values = {"name": NAME, "options": OPTIONS, "classes": CLASSES, "image_size": 16}
    export.save(model, folder, **{**values, **described})


@pytest.fixture
def trained(tmp_path):
    return exported(tmp_path / "model")


def load(folder, classes=CLASSES, **options):
    return frozen.load(folder, classes, **{"channels": 1, "image_size": 16, **options})


def archive(folder: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    with tarfile.open(target, "w:gz") as opened:
        for file in folder.iterdir():
            opened.add(file, file.name)


def channel(tmp_path, kind: str, model):
    """A channel's folder that holds the teacher as a folder's content, an archive, or a bare weights file."""
    folder = tmp_path / kind
    if kind == "folder":
        return tmp_path / "model"
    folder.mkdir()
    if kind == "archive":
        archive(tmp_path / "model", folder / "model.tar.gz")
    elif kind == "ddp checkpoint":
        torch.save(
            {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in model.model.state_dict().items()}},
            folder / "last.pth",
        )
    elif kind == "ema checkpoint":
        other = {name: torch.zeros_like(value) for name, value in model.model.state_dict().items()}
        torch.save({"state_dict": other, "state_dict_ema": model.model.state_dict()}, folder / "last.pth.tar.pt")
    elif kind == "hub's older file":
        torch.save(model.model.state_dict(), folder / "pytorch_model.bin")
    else:
        shutil.copy(tmp_path / "model/model.safetensors", folder / "weights.safetensors")
    return folder


KINDS = ["folder", "archive", "bare weights", "ddp checkpoint", "ema checkpoint", "hub's older file"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_logits_and_digest(tmp_path, trained, kind):
    place = channel(tmp_path, kind, trained)
    named = {"name": NAME, "options": OPTIONS} if kind not in ("folder", "archive") else {}
    loaded = load(place, **named)
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), trained(IMAGES))
    assert loaded.digest() == load(tmp_path / "model").digest()
    assert (loaded.name, loaded.parameters) == (NAME, timm_models.parameter_count(trained))


# --- frozen


class Noisy(nn.Module):
    """A model that training mode would change: by dropout at once, and by BatchNorm for good."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 3)
        )

    def forward(self, images):
        return self.layers(images)


def freeze(model: nn.Module, **options) -> frozen.Teacher:
    return frozen.Teacher([frozen.FrozenModel(timm_models.Normalized(model, [0.5], [0.5]), "noisy", {}, **options)])


def test_whoever_calls_train_a_teacher_stays_in_eval_mode_and_keeps_its_statistics():
    model = Noisy()
    teaching = freeze(model)
    assert not any(module.training for module in model.modules())
    expected, statistics = teaching(IMAGES), copy.deepcopy(model.state_dict())
    for meddle in (model.train, model.layers[1].train, model.layers[2].train, teaching.members[0].model.train):
        meddle()
        assert torch.equal(teaching(IMAGES), expected)
        torch.testing.assert_close(teaching(IMAGES[:1]), expected[:1])  # its batch mates do not count
    assert all(torch.equal(value, statistics[name]) for name, value in model.state_dict().items())


def test_a_teacher_is_out_of_reach_of_everything_that_walks_a_models_parts():
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(2, 2), freeze(Noisy())

    task = Task()
    assert len([*task.modules()]) == 2 and len([*task.parameters()]) == 2
    assert {*task.state_dict()} == {"student.weight", "student.bias"}
    task.train().requires_grad_(True)
    assert not any(parameter.requires_grad for parameter in task.teacher.members[0].model.parameters())


def test_a_students_loss_keeps_the_logits_for_its_backward_pass():
    student, teaching = nn.Linear(256, 3), freeze(Noisy())
    logits = teaching(IMAGES)
    assert not logits.requires_grad
    F.mse_loss(student(IMAGES.flatten(1).float()) * logits, logits).backward()
    assert student.weight.grad.abs().sum() > 0


# --- number formats


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_teacher_computes_in_its_own_number_format_whatever_surrounds_it(precision):
    torch.manual_seed(0)
    model = Noisy()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    by_hand = timm_models.Normalized(copy.deepcopy(model).to(dtype), [0.5], [0.5]).eval()
    teaching = freeze(model, precision=precision)
    with torch.no_grad():
        expected = by_hand(IMAGES).float()
    with torch.autocast("cpu", torch.bfloat16):
        surrounded = teaching(IMAGES)
    assert surrounded.dtype == torch.float32
    assert torch.equal(surrounded, expected) and torch.equal(teaching(IMAGES), expected)
    assert teaching.members[0].model.mean.dtype == torch.float32, "pixels are normalised in full"


def test_a_bf16_teacher_takes_half_the_memory():
    full, half = freeze(Noisy()), freeze(Noisy(), precision="bf16")
    assert 0.49 < half.memory_bytes / full.memory_bytes < 0.52
    assert full.memory_bytes == sum(4 * value.numel() for value in Noisy().state_dict().values()) + 2 * 4 + 4


def test_convolutions_lie_in_channels_last_order(tmp_path):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)

        def forward(self, images):
            assert images.dtype == torch.float32
            features = self.second(self.first(images))
            assert features.is_contiguous(memory_format=torch.channels_last)
            return self.head(features.mean((2, 3)))

    teaching = freeze(Plain())
    assert teaching.members[0].model.model.second.weight.is_contiguous(memory_format=torch.channels_last)
    assert teaching(IMAGES).shape == (4, 3)


# --- torch.compile


def with_backend(monkeypatch, backend):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


@compiling
def test_a_trial_of_batch_sizes_leaves_a_compiled_teacher_no_shapes(monkeypatch):
    graphs = []
    with_backend(monkeypatch, lambda graph, _: graphs.append(graph) or graph.forward)
    teaching = freeze(Noisy(), compile=True)
    tried = teaching.eager()(IMAGES)
    assert not graphs and torch.equal(teaching(IMAGES), tried) and graphs


@compiling
def test_a_compiled_teacher_gives_the_same_logits_in_eval_mode(monkeypatch):
    graphs = []
    with_backend(monkeypatch, lambda graph, _: graphs.append(graph) or graph.forward)
    model = Noisy()
    expected, teaching = freeze(copy.deepcopy(model))(IMAGES), freeze(model, compile=True)
    assert not graphs, "nothing is compiled before the first batch"
    assert torch.equal(teaching(IMAGES), expected) and graphs
    model.train()
    assert torch.equal(teaching(IMAGES), expected)


@compiling
def test_a_teacher_that_cannot_be_compiled_says_so_once_and_runs_as_it_is(monkeypatch, recwarn):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    with_backend(monkeypatch, broken)
    model = Noisy()
    expected, teaching = freeze(copy.deepcopy(model))(IMAGES), freeze(model, compile=True)
    with pytest.warns(UserWarning, match="noisy cannot be compiled and runs eagerly; compile_teacher: false .*no C"):
        assert torch.equal(teaching(IMAGES), expected)
    recwarn.clear()
    assert torch.equal(teaching(IMAGES), expected) and not recwarn.list


@compiling
def test_an_error_of_the_model_is_no_error_of_the_compiler(monkeypatch, recwarn):
    with_backend(monkeypatch, "eager")
    with pytest.raises(ValueError, match="a model for 1 channels got images with 3"):
        freeze(Noisy(), compile=True)(IMAGES.expand(-1, 3, -1, -1))
    assert not any("cannot be compiled" in str(warning.message) for warning in recwarn)


# --- normalisation and resolution


def test_the_teachers_own_normalisation_comes_with_it(tmp_path, trained):
    trained.mean.fill_(0.3)
    trained.std.fill_(0.7)
    save(trained, tmp_path / "model")
    loaded = load(tmp_path / "model").members[0].model
    assert (loaded.mean.item(), loaded.std.item()) == pytest.approx((0.3, 0.7))


def test_a_teacher_scales_the_students_images_to_its_own_size(tmp_path, trained):
    large = torch.randint(0, 256, (4, 1, 24, 24), dtype=torch.uint8)
    scaled = F.interpolate(large.float(), (16, 16), mode="bilinear", antialias=True) / 255
    with torch.no_grad():
        expected = trained.model((scaled - trained.mean) / trained.std)
    for place, named in (
        (tmp_path / "model", {}),
        (channel(tmp_path, "bare weights", trained), {"name": NAME, "options": OPTIONS}),
    ):
        torch.testing.assert_close(load(place, image_size=24, **named)(large), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_any_size_sees_what_the_student_sees_where_nothing_says_otherwise(tmp_path):
    exported(tmp_path / "model", name="test_resnet")
    shutil.copy(tmp_path / "model/model.safetensors", tmp_path / "weights.safetensors")
    (tmp_path / "bare").mkdir()
    (tmp_path / "weights.safetensors").rename(tmp_path / "bare/weights.safetensors")
    bare = load(tmp_path / "bare", name="test_resnet", options={"in_chans": 1}, image_size=40)
    assert bare.members[0].model.image_size == 40
    assert load(tmp_path / "model", image_size=40).members[0].model.image_size == 16


# --- several models


def test_an_ensemble_is_the_mean_of_its_models_logits_each_in_its_own_way(tmp_path):
    """Which is the geometric mean of their distributions."""
    first = exported(tmp_path / "channel/first", 1)
    second = exported(tmp_path / "made", 2, "test_resnet", image_size=32)
    archive(tmp_path / "made", tmp_path / "channel/second/model.tar.gz")
    ensemble = load(tmp_path / "channel")
    with torch.no_grad():
        one = first(IMAGES)
        second.image_size = 32
        two = second(IMAGES)
    torch.testing.assert_close(ensemble(IMAGES), (one + two) / 2, rtol=1e-4, atol=1e-5)
    geometric = (one.softmax(1) * two.softmax(1)).sqrt()
    torch.testing.assert_close(
        ensemble(IMAGES).softmax(1), geometric / geometric.sum(1, keepdim=True), rtol=1e-4, atol=1e-5
    )
    assert ensemble.name == f"{NAME} + test_resnet"
    assert ensemble.parameters == timm_models.parameter_count(first) + timm_models.parameter_count(second)


def test_several_archives_are_an_ensemble_too(tmp_path):
    for seed in (1, 2):
        exported(tmp_path / f"model{seed}", seed)
        archive(tmp_path / f"model{seed}", tmp_path / f"channel/{seed}.tar.gz")
    assert len(load(tmp_path / "channel").members) == 2


def test_names_are_matched_with_subfolders_in_the_order_of_their_names(tmp_path):
    exported(tmp_path / "made/a", 1)
    exported(tmp_path / "made/b", 2, "test_resnet")
    for name in "ab":
        (tmp_path / "channel" / name).mkdir(parents=True)
        shutil.copy(tmp_path / f"made/{name}/model.safetensors", tmp_path / "channel" / name / "weights.safetensors")
    with pytest.raises(ValueError, match=r"names 3 models \(x, y, z\), the channel teacher holds 2 \(a, b\)"):
        load(tmp_path / "channel", name=["x", "y", "z"])
    with pytest.raises(ValueError, match="b: weights.safetensors does not fit test_vit.*") as error:
        load(tmp_path / "channel", name=["test_resnet", "test_vit"], options={"in_chans": 1})
    assert "a: weights.safetensors does not fit test_resnet" in str(error.value), "both are told"


def test_all_mistakes_of_all_models_are_told_at_once(tmp_path):
    for name, classes, channels in (("one", CLASSES, 3), ("two", ["x", "y", "z"], 3), ("three", CLASSES, 1)):
        options = {**OPTIONS, "in_chans": channels}
        save(timm_models.build(NAME, options, 3), tmp_path / "channel" / name, options=options, classes=classes)
    (tmp_path / "channel/empty").mkdir()
    with pytest.raises(ValueError, match="empty: the channel teacher holds 0 weights files") as error:
        load(tmp_path / "channel")
    said = str(error.value)
    assert "one: the teacher was made for channels 3, the student sees 1" in said
    assert "two: the teacher knows the classes x, y, z" in said and said.count("made for channels 3") == 2
    assert "three" not in said


# --- digest


def test_the_digest_changes_with_all_that_the_logits_depend_on_and_nothing_else(tmp_path, trained):
    first = load(tmp_path / "model").digest()
    assert first == load(tmp_path / "model").digest() and len(first) == 64

    def changed(**described) -> str:
        model = copy.deepcopy(trained)
        described.pop("change", lambda _: None)(model)
        save(model, tmp_path / "other", **described)
        return load(tmp_path / "other").digest()

    assert changed() == first
    different = [
        changed(change=lambda model: model.model.head.bias.data[-1:].add_(1e-6)),
        changed(change=lambda model: model.mean.add_(0.01)),
        changed(change=lambda model: model.std.add_(0.01)),
        changed(options={**OPTIONS, "drop_rate": 0.1}),
        load(tmp_path / "model", precision="bf16").digest(),
        changed(image_size=24),
        changed(name="vit_small_patch16_224"),
    ]
    assert len({first, *different}) == 1 + len(different)


def test_an_ensembles_digest_does_not_depend_on_the_order_of_its_models(tmp_path):
    for folder, seeds in (("forth", (1, 2)), ("back", (2, 1)), ("other", (1, 3))):
        for seed, name in zip(seeds, "ab"):
            exported(tmp_path / folder / name, seed)
    assert load(tmp_path / "forth").digest() == load(tmp_path / "back").digest() != load(tmp_path / "other").digest()


def test_memory_order_does_not_move_the_digest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, 3))
    teaching = freeze(model)
    lying = teaching.digest()
    model.to(memory_format=torch.contiguous_format)
    assert teaching.digest() == lying


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


def test_published_weights_out_of_reach_are_told_with_the_fix(hub, tmp_path):
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


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"epoch": 1}, torch.zeros(2)])
def test_a_file_without_a_state_dict_is_told_so(tmp_path, content):
    torch.save(content, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="last.pt holds no state dict: save one with"):
        load(tmp_path, name=NAME, options=OPTIONS)


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    (tmp_path / "evil").write_text("x")
    (tmp_path / "channel").mkdir()
    with tarfile.open(tmp_path / "channel/model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "evil", "../../outside")
    with pytest.raises(ValueError, match="points outside it"):
        load(tmp_path / "channel")
    assert not (tmp_path / "outside").exists()


def test_an_unknown_model_names_near_ones():
    with pytest.raises(ValueError, match="knows no model vit_tny.*near: "):
        timm_models.build("vit_tny", {}, 3)
    with pytest.raises(ValueError, match="cannot be made with"):
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

"""What a run leaves of its model: files that timm alone can load, an ONNX file that computes the same, and a card."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import ExifTags, Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from training.data.decode.reference import fit
from training.distributed.world import World
from training.engine import delivery
from training.engine.loop import Outcome
from training.models import card as model_card
from training.models import export, onnx_export, segmenter, timm_models
from training.settings.scripts import LabelledImageSettings, TrainingSettings

from launcher.config.entrypoints import entrypoints_folder
from launcher.planner.source_package import COMMIT_FILE

CLASSES = ["apple", "pear", 'a\'; echo "plum"']

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}

MODELS = {
    "vit_tiny_patch16_224": ({**VIT, "in_chans": 1, "drop_rate": 0.1}, 16),
    "vit_small_patch16_224": ({**VIT, "img_size": 32, "dynamic_img_size": True}, 48),
    "vit_tiny_patch16_384": ({"embed_dim": 24, "depth": 1, "num_heads": 2}, 384),
    "resnet10t": ({"in_chans": 1}, 32),
    "mobilenetv3_small_050": ({}, 32),
    "convnext_atto": ({"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}, 40),
    "pvt_v2_b0": ({"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}, 64),
    "swin_tiny_patch4_window7_224": (
        {"img_size": [32, 64], "window_size": 2, "depths": [1, 1, 1, 1], "embed_dim": 24},
        [32, 64],
    ),
}
"""Each a timm name: its options, and the image size: conv, attention, both; one size, any size, another than published."""


def made(name: str) -> timm_models.Normalized:
    """A model whose running statistics and normalisation are not those that it started with."""
    torch.manual_seed(0)
    options, size = MODELS[name]
    model = timm_models.build(name, options, len(CLASSES))
    height, width = (size, size) if isinstance(size, int) else size
    model.train()(torch.randint(0, 256, (4, model.mean.numel(), height, width), dtype=torch.uint8))
    model.mean.sub_(0.125)
    return model.eval()


def saved(name: str, folder, **more) -> timm_models.Normalized:
    model = made(name)
    export.save(model, folder, name=name, options=MODELS[name][0], classes=CLASSES, image_size=MODELS[name][1], **more)
    return model


def pixels(model: timm_models.Normalized, size, count: int = 3) -> torch.Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randint(0, 256, (count, model.mean.numel(), height, width), dtype=torch.uint8)


# -- timm's own folder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_timm_alone_loads_the_model_with_its_classes_and_normalisation(name, tmp_path):
    model = saved(name, tmp_path)
    alone = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(alone) is type(model.model) and alone.num_classes == 3
    config = timm.data.resolve_model_data_config(alone)
    images = pixels(model, MODELS[name][1])
    assert tuple(config["input_size"]) == tuple(images.shape[1:])
    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        assert torch.equal(alone((images / 255 - mean) / std), model(images))


@pytest.mark.parametrize(("name", "mode"), [("resnet10t", "L"), ("mobilenetv3_small_050", "RGB")])
@pytest.mark.parametrize("size", [(32, 32), (96, 64), (64, 128), (20, 25), (50, 33), (33, 75)])
def test_timms_transform_gives_the_pixels_that_the_model_was_evaluated_on(name, mode, size, tmp_path):
    model = saved(name, tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(
        mode
    )
    alone = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(alone))
    evaluated = torch.from_numpy(np.array(fit(image, 32)).reshape(1, 32, 32, -1)).permute(0, 3, 1, 2)
    with torch.no_grad():
        assert torch.allclose(alone(transform(image)[None]), model(evaluated), rtol=1e-4, atol=1e-5)


def test_timm_can_start_from_it_for_other_classes_and_channels(tmp_path):
    model = saved("resnet10t", tmp_path)
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7, in_chans=3)
    assert other.num_classes == 7 and other.conv1[0].in_channels == 3
    assert torch.equal(other.layer1[0].conv1.weight, model.model.layer1[0].conv1.weight)


def test_the_names_of_the_classes_and_the_metrics_stand_in_the_description(tmp_path):
    saved("resnet10t", tmp_path, validation_accuracy=0.5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["label_names"] == CLASSES and config["training"] == {"validation_accuracy": 0.5}
    assert config["pretrained_cfg"]["std"] == [0.226], "shortest decimals"
    alone = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert alone.pretrained_cfg["label_names"] == CLASSES


@pytest.mark.parametrize(
    ("name", "fixed"), [("vit_tiny_patch16_224", True), ("vit_small_patch16_224", False), ("resnet10t", False)]
)
def test_only_a_model_for_images_of_one_size_is_said_to_be_so(name, fixed, tmp_path):
    """An older timm does not see by itself that dynamic_img_size takes any."""
    saved(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["pretrained_cfg"]["fixed_input_size"] is fixed


@pytest.mark.parametrize("name", MODELS)
def test_a_description_is_read_as_it_was_written(name, tmp_path):
    model = saved(name, tmp_path)
    found = export.read_description(tmp_path)
    size = MODELS[name][1]
    assert (found.name, found.options, found.classes, found.decoder) == (name, MODELS[name][0], CLASSES, None)
    assert found.image_size == (size if isinstance(size, int) else tuple(size))
    assert torch.equal(torch.tensor(found.mean), model.mean.flatten())
    assert torch.equal(torch.tensor(found.std), model.std.flatten())


# -- descriptions of others ---------------------------------------------------------------------------------------------


def test_a_model_that_timm_saved_can_be_read_and_built(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **VIT, in_chans=1).eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    found = export.read_description(tmp_path)
    assert found.classes is None and found.image_size == 16 and len(found.mean) == 1
    again = timm_models.build(found.name, found.options, 3).model.eval()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images = torch.rand(2, 1, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("nested", [True, False], ids=["today's", "timm's first"])
def test_what_only_the_preprocessing_says_becomes_an_option(nested, tmp_path):
    """timm's own reader builds a model for the channels and the fixed size of input_size."""
    given = {"input_size": [1, 384, 384], "fixed_input_size": True, "mean": [0.5], "std": [0.25], "num_classes": 2}
    config = {"architecture": "vit_tiny_patch16_224", **({"pretrained_cfg": given} if nested else given)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = export.read_description(tmp_path)
    assert found.options == {"in_chans": 1, "img_size": [384, 384]} and found.image_size == 384
    alone = timm.create_model(f"local-dir:{tmp_path}")
    assert alone.patch_embed.img_size == (384, 384) and alone.patch_embed.proj.in_channels == 1


@pytest.mark.parametrize("content", [None, "{}", '{"architectures": ["ViTForImageClassification"]}'])
def test_no_description_and_that_of_another_program_are_none(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert export.read_description(tmp_path) is None


def test_a_damaged_description_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "resn')
    with pytest.raises(ValueError, match="config.json is damaged: copy it again"):
        export.read_description(tmp_path)


def test_timm_does_not_take_a_segmenter_for_one_of_its_own(tmp_path):
    export.save(
        made("resnet10t"), tmp_path, name="resnet10t", options={}, classes=CLASSES, image_size=(32, 48), decoder={"channels": 8}
    )  # fmt: skip
    found = export.read_description(tmp_path)
    assert (found.decoder, found.image_size, found.classes) == ({"channels": 8}, (32, 48), CLASSES)
    with pytest.raises(KeyError, match="architecture"):
        timm.create_model(f"local-dir:{tmp_path}")


@pytest.mark.parametrize("side", [128, 288])
def test_a_segmenter_whose_encoder_takes_any_size_is_read_back_as_the_same_model(side, tmp_path):
    """Swin's windows follow img_size, which this encoder was not built with."""
    name, options = "swin_tiny_patch4_window7_224", {"strict_img_size": False, "depths": [2, 2, 2, 2], "embed_dim": 24}
    torch.manual_seed(0)
    model = segmenter.build(name, options, 3, decoder_channels=8).eval()
    export.save(
        model, tmp_path, name=name, options=options, classes=CLASSES, image_size=side, decoder={"decoder_channels": 8}
    )
    found = export.read_description(tmp_path)
    assert found.options == options
    assert json.loads((tmp_path / "config.json").read_text())["preprocessing"]["fixed_input_size"] is False
    again = segmenter.build(found.name, found.options, 3, **found.decoder).eval()
    again.model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images = pixels(model, side, 1)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


def test_an_option_that_allows_any_size_outweighs_a_preprocessing_of_one_size(tmp_path):
    given = {"input_size": [3, 288, 288], "fixed_input_size": True, "mean": [0.5] * 3, "std": [0.25] * 3}
    for option in ({"strict_img_size": False}, {"dynamic_img_size": True}):
        config = {"architecture": "vit_tiny_patch16_224", "model_args": option, "pretrained_cfg": given}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert export.read_description(tmp_path).options == option


# -- the files ----------------------------------------------------------------------------------------------------------


def test_files_are_whole_and_readable_for_all(tmp_path):
    before = os.umask(0o077)
    try:
        saved("resnet10t", tmp_path)
        model_card.write(tmp_path, {})
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "model.safetensors": 0o644,
        "config.json": 0o644,
        "README.md": 0o644,
    }


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path):
    (tmp_path / "config.json").write_text("before")
    with pytest.raises(OSError, match="disk full"), export.atomic_write(tmp_path / "config.json") as place:
        place.write_text("half")
        raise OSError("disk full")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.json", "before")]


def test_weights_that_share_memory_or_lie_in_another_order_are_saved_as_they_are(tmp_path):
    model = made("mobilenetv3_small_050").to(memory_format=torch.channels_last)
    model.model.tied = nn.Parameter(model.model.bn1.weight.detach())
    export.save(model, tmp_path, name="mobilenetv3_small_050", options={}, classes=CLASSES, image_size=32)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.model.state_dict().items())


def test_equal_models_make_equal_files(tmp_path):
    for number in range(8):  # in half of them safetensors would have put the metadata the other way round
        saved("resnet10t", tmp_path / str(number))
    files = [folder / "model.safetensors" for folder in tmp_path.iterdir()]
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], "pt") as file:
        assert file.metadata()["format"] == "pt" and len(file.metadata()["sha256"]) == 64


# -- ONNX ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnx")
    return pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_onnx_takes_pixels_in_any_number_and_gives_the_same_logits(name, tmp_path, onnxruntime):
    model = made(name)
    size = MODELS[name][1]
    assert onnx_export.save_onnx(model, tmp_path, size, model.mean.numel()) < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 7):
        images = pixels(model, size, count)
        with torch.no_grad():
            expected = model(images).numpy()
        [found] = session.run(["logits"], {"pixels": images.numpy()})
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_onnx_leaves_the_model_as_it_is(tmp_path, onnxruntime):
    model = made("mobilenetv3_small_050").train().to(torch.bfloat16, memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    onnx_export.save_onnx(model, tmp_path, 32, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and next(model.parameters()).dtype == torch.bfloat16
    assert model.model.conv_stem.weight.is_contiguous(memory_format=torch.channels_last)


class Brightest(nn.Module):
    """Does in Python what tracing makes constant."""

    def forward(self, images):
        return images.mean((2, 3)) * float(images[-1].max())


def test_an_onnx_file_that_computes_something_else_is_not_left(tmp_path, onnxruntime):
    model = timm_models.Normalized(Brightest(), [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="ONNX Runtime's logits differ from PyTorch's by .* set export_onnx: false"):
        onnx_export.save_onnx(model, tmp_path, 1, 3)
    assert [*tmp_path.iterdir()] == []


def test_what_onnx_lacks_is_reported_before_training(monkeypatch):
    onnx_export.require_packages()
    monkeypatch.setattr(onnx_export, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(
        ValueError, match="there is no no_such_package here: install them .pip install no_such_package., or set"
    ):
        onnx_export.require_packages()


def test_a_model_too_large_for_onnx_is_reported_before_training(monkeypatch):
    state = SimpleNamespace(evaluated=made("resnet10t").to(torch.bfloat16))
    asked = LabelledImageSettings(export_onnx=True)
    delivery.require_exportable(asked, [state])
    monkeypatch.setattr(onnx_export, "MAX_BYTES", 3 * timm_models.parameter_count(state.evaluated))
    with pytest.raises(ValueError, match="GiB of weights do not fit into one ONNX file of 2 GiB: set export_onnx"):
        delivery.require_exportable(asked, [state])
    delivery.require_exportable(LabelledImageSettings(), [state])


def test_a_model_without_an_onnx_file_is_delivered_all_the_same(monkeypatch, tmp_path):
    """Hours of training do not fail for a file that can be made later."""

    def fails(*_, **__):
        raise ValueError("ONNX Runtime's logits differ")

    monkeypatch.setattr(onnx_export, "save_onnx", fails)
    settings, logged, results = LabelledImageSettings(export_onnx=True), [], []
    model = made("resnet10t")
    state = SimpleNamespace(name="small", evaluated_at=8, model=model, evaluated=model, settings=settings)
    run = SimpleNamespace(
        world=World(0, 1, 0, torch.device("cpu"), "none", "test"),
        environment=SimpleNamespace(model_dir=tmp_path),
        report=SimpleNamespace(result=results.append, log=logged.append),
        arithmetic=SimpleNamespace(overall=lambda: None, about=lambda: None),
        settings=settings,
    )
    data = SimpleNamespace(epoch_images=4, held_out=[0], classes=CLASSES)
    outcome = Outcome(8, None, True, 1.0, {})
    trained = delivery.Trained(state, "resnet10t", {"in_chans": 1})
    delivery.deliver(outcome, [trained], data, run, image_size=32)
    assert [file.name for file in tmp_path.glob("small/*.safetensors")] and results[0]["steps"] == 8
    assert logged == [
        f"WARNING: no {tmp_path / 'small/model.onnx'} of resnet10t: ValueError: ONNX Runtime's logits differ"
    ]


# -- the card -----------------------------------------------------------------------------------------------------------

FACTS = {
    "data": {"train": {"images": 60000, "digest": "ab12"}, "validation": {"images": 10000}},
    "teacher": {"model": "vit_small_patch14_dinov2", "validation_accuracy": 0.91},
    "metrics": {"validation_accuracy": 0.8765},
    "settings": {"learning_rate": 0.001, "student": "a|b `c`\nnext <b>", "teacher_cache": None},
}


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_cards_own_lines_load_the_model_and_classify_an_image(tmp_path, monkeypatch, orientation):
    """Also a phone's, which is stored as the sensor lay."""
    model = saved("resnet10t", tmp_path)
    model_card.write(tmp_path, FACTS)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    stored = Image.Exif()
    stored[ExifTags.Base.Orientation] = orientation
    image.save(tmp_path / "image.jpg", exif=stored)
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    upright = Image.open("image.jpg").rotate(-90 if orientation == 6 else 0)
    grey = torch.from_numpy(np.array(upright.convert("L")))[None, None]
    with torch.no_grad():
        assert torch.allclose(names["logits"], model(grey), rtol=1e-4, atol=1e-6)


def test_a_card_tells_data_teacher_metrics_settings_commit_and_versions(tmp_path):
    saved("resnet10t", tmp_path)
    commit = {"commit": "83c7ef9", "clean": False}
    text = model_card.text(export.read_description(tmp_path), FACTS, commit, model_card.versions())
    rows = dict(re.findall(r"^\| (\S.*?) \| (.*) \|$", text, re.MULTILINE))
    assert rows["train.images"] == "60000" and rows["train.digest"] == "ab12" and rows["validation.images"] == "10000"
    assert rows["model"] == "vit_small_patch14_dinov2" and rows["learning_rate"] == "0.001"
    assert rows["commit"] == "83c7ef9" and rows["clean"] == "false"
    assert rows["torch"] == torch.__version__ and rows["timm"] == timm.__version__
    assert rows["student"] == r"a\|b \`c\` next &lt;b>", "whatever a value holds, it stays in its cell"
    assert rows["architecture"] == "resnet10t" and rows["image size"] == "32 × 32 pixels"


def test_hugging_face_reads_the_front_matter(tmp_path):
    saved("resnet10t", tmp_path)
    model_card.write(tmp_path, FACTS)
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("timm", "image-classification")
    assert card.data.tags == ["image-classification", "timm", "knowledge-distillation"]
    model_card.write(tmp_path, {**FACTS, "teacher": None})
    text = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["tags"] == ["image-classification", "timm"]
    assert "## Teacher" not in text


def test_what_nobody_recorded_is_said_to_be_so(tmp_path):
    saved("resnet10t", tmp_path)
    model_card.write(tmp_path, {})
    text = (tmp_path / "README.md").read_text()
    assert re.findall(r"## (.*)\n\nNot recorded\.", text) == [*model_card.SECTIONS.values(), "Code"]


def test_a_gpu_without_cuda_has_no_version_of_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # torch for ROCm says so too
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "cuda" not in model_card.versions()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert model_card.versions()["cuda"] == "13.0"


def test_the_commit_is_what_the_launcher_left_beside_the_package(tmp_path):
    (tmp_path / "source.json").write_text('{"commit": "83c7ef9", "clean": true}')
    assert model_card.source(tmp_path / "source.json") == {"commit": "83c7ef9", "clean": True}
    assert model_card.source(tmp_path / "none.json") == {}
    assert entrypoints_folder() / COMMIT_FILE == model_card.SOURCE


def test_a_segmenters_card_does_not_promise_that_timm_loads_it(tmp_path):
    export.save(
        made("resnet10t"), tmp_path, name="resnet10t", options={}, classes=CLASSES, image_size=(32, 48), decoder={"channels": 8}
    )  # fmt: skip
    model_card.write(tmp_path, FACTS)
    text = (tmp_path / "README.md").read_text()
    assert "create_model" not in text and "training.models.segmenter.build" in text and "32 × 48" in text
    assert yaml.safe_load(text.split("---\n")[1])["pipeline_tag"] == "image-segmentation"


def test_a_card_needs_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="save the model first"):
        model_card.write(tmp_path, FACTS)


@pytest.mark.parametrize(("steps", "reported"), [(8, {}), (10, {"evaluated_after_steps": 8})])
def test_figures_of_an_earlier_step_than_the_weights_say_so(monkeypatch, steps, reported):
    """A run that is stopped leaves at once, with the numbers of its last evaluation."""
    written, results = [], []
    monkeypatch.setattr(delivery, "_write_model", lambda trained, found, *_: written.append(found))
    state = SimpleNamespace(name="", evaluated_at=8, model=torch.nn.Linear(2, 1), settings=None)
    outcome = Outcome(steps, None, steps == 10, 1.0, {"": {"validation_loss": 0.5}})
    run = SimpleNamespace(
        world=World(0, 1, 0, torch.device("cpu"), "none", "test"),
        report=SimpleNamespace(result=results.append),
        arithmetic=SimpleNamespace(overall=lambda: None, about=lambda: None),
        settings=TrainingSettings(),
    )
    data = SimpleNamespace(epoch_images=4)
    delivery.deliver(outcome, [delivery.Trained(state, "small", {})], data, run, image_size=8)
    assert written == [{"validation_loss": 0.5, **reported}]
    assert {name: results[0][name] for name in reported} == reported and (
        "evaluated_after_steps" in results[0]
    ) == bool(reported)

"""Segmentation: its loss and metrics by hand, on one rank and two, its models, and its script through the toolkit."""

from __future__ import annotations

import json
import math
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch import nn
from training.data.loaders import open_loaders
from training.data.masks import open_data
from training.distributed.world import World
from training.models import export, segmenter, timm_models
from training.models.features import WithFeatures, parameter_groups
from training.settings.segmentation import SegmentationSettings
from training.tasks import evaluation
from training.tasks.evaluation import class_ious, describe_classes, evaluate_pixels
from training.tasks.losses import pixel_cross_entropy

import launcher
from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.script_runs import script_run
from tests.entrypoints.test_training_runs import finished, weights

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")
TINY = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "mlp_ratios": [2, 2, 2, 2]}

# -- the loss ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_labelled_pixels_by_hand():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [5.0, 5.0]]).T.reshape(1, 2, 1, 3)
    masks = torch.tensor([[[0, 0, 255]]])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert pixel_cross_entropy(logits, masks, 255).item() == pytest.approx(expected, rel=1e-6)


def test_a_batch_of_ignored_pixels_has_no_loss_and_no_gradient():
    logits = torch.randn(2, 3, 4, 5, requires_grad=True)
    for labelled in (None, torch.tensor(0) / 2):
        loss = pixel_cross_entropy(logits, torch.full((2, 4, 5), 7), 7, labelled)
        loss.backward()
        assert loss.item() == 0 and not logits.grad.any()


def test_processes_that_average_their_gradients_weigh_every_pixel_the_same():
    """One process's pixels are mostly ignored, the other's are not."""
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    masks = torch.randint(0, 3, (2, 4, 4))
    masks[0, 1:] = 255
    [whole] = torch.autograd.grad(pixel_cross_entropy(logits, masks, 255), logits)
    labelled = (masks != 255).sum() / 2
    shares = [pixel_cross_entropy(logits[rank : rank + 1], masks[rank : rank + 1], 255, labelled) for rank in range(2)]
    [averaged] = torch.autograd.grad(sum(shares) / 2, logits)
    assert torch.allclose(averaged, whole)


# -- the metrics -------------------------------------------------------------------------------------------------------


def test_iou_by_hand_leaves_out_what_never_occurs_and_what_is_ignored():
    confusion = torch.tensor([[3, 1, 0, 0], [2, 4, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    ious = [3 / 6, 4 / 8, math.nan, 0 / 1]  # class 2 occurs nowhere; class 3 is labelled once and never found
    assert class_ious(confusion, 255).tolist() == pytest.approx(ious, nan_ok=True)
    assert class_ious(confusion, 3).tolist() == pytest.approx([*ious[:3], math.nan], nan_ok=True)


class Brightness(nn.Module):
    """Gives pixels of value v the class v, as logits of 10 and 0."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return 10 * nn.functional.one_hot(images[:, 0].long(), 3).permute(0, 3, 1, 2).float()


class Twofold(Brightness):
    """The same with two classes."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images)[:, :2]


def numbers_of(metrics: dict) -> dict[str, float]:
    """Without those of each class."""
    return {name: value for name, value in metrics.items() if isinstance(value, float)}


def test_evaluation_counts_pixels_by_hand_in_the_masks_own_size():
    images = torch.tensor([[0, 1], [2, 0]], dtype=torch.uint8).view(1, 1, 2, 2)
    mask = torch.tensor([[0, 2], [2, 255]], dtype=torch.uint8)
    model = Brightness().train()
    found = evaluate_pixels(model, [(images, [mask])], ALONE, classes=["sky", "road", "car"], ignore_index=255)
    right = math.log(1 + 2 * math.exp(-10))
    assert numbers_of(found) == pytest.approx(
        {
            "validation_miou": (1 + 0 + 1 / 2) / 3,
            "validation_pixel_accuracy": 2 / 3,
            "validation_loss": right + 10 / 3,
        },
        rel=1e-5,
    )
    assert found["validation_iou"] == {"sky": 1, "road": 0, "car": 1 / 2}
    assert found["validation_majority"] == {"class": "car", "miou": pytest.approx(2 / 3 / 2), "pixel_accuracy": 2 / 3}
    assert describe_classes(found).startswith("IoU: sky 1.0000, road 0.0000, car 0.5000; with car for every pixel")
    assert model.training
    large = torch.zeros(20, 30, dtype=torch.uint8)
    large[:, 15:], large[10:, :15], large[10:, 15:] = 1, 2, 0
    twice = evaluate_pixels(model, [(images, [large])], ALONE, classes=["0", "1", "2"], ignore_index=255)
    assert twice["validation_pixel_accuracy"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("given", [(16, 20), (40, 50), (23, 7), (1, 1), (90, 130)])
def test_logits_of_a_large_mask_are_scaled_in_bands(given, monkeypatch):
    """With 1,000 at once, of three classes: bands of a few rows, together as interpolate gives them whole, at any two sizes."""
    monkeypatch.setattr(evaluation, "VALUES_AT_ONCE", 1_000)
    logits, size = torch.randn(3, *given), (83, 61)
    found = list(evaluation.bands(logits, size))
    assert max(band.numel() for _, band in found) <= 1_000 and len(found) >= 17
    assert [rows.start for rows, _ in found[1:]] == [rows.stop for rows, _ in found[:-1]]
    whole = evaluation.resized(logits[None], size)[0]
    torch.testing.assert_close(torch.cat([band for _, band in found], 1), whole, atol=1e-5, rtol=1e-5)


def test_a_mask_evaluated_in_bands_counts_as_it_does_whole(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 3, (2, 1, 9, 12), generator=generator, dtype=torch.uint8)
    masks = [torch.randint(0, 3, size, generator=generator, dtype=torch.uint8) for size in ((70, 90), (5, 6))]
    masks[0][:40] = 255  # all of the first bands is ignored

    def found() -> dict:
        return evaluate_pixels(Brightness(), [(images, masks)], ALONE, classes=["0", "1", "2"], ignore_index=255)

    whole = found()
    monkeypatch.setattr(evaluation, "VALUES_AT_ONCE", 3 * 90 * 8)
    assert numbers_of(found()) == pytest.approx(numbers_of(whole), rel=1e-6)


def test_masks_without_a_label_cannot_be_measured():
    batch = (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), [torch.full((4, 4), 255)])
    with pytest.raises(ValueError, match="every pixel of the readable validation masks is ignored"):
        evaluate_pixels(Brightness(), [batch], ALONE, classes=["0", "1", "2"], ignore_index=255)


@pytest.mark.parametrize("ignored", [0, 1], ids=["all labelled", "one ignored"])
def test_held_out_masks_without_an_object_can_be_measured(ignored):
    """With two classes too, where masks of 0 and 255 look the same: the run warns of those before it trains."""
    mask = torch.zeros(2, 2, dtype=torch.uint8)
    mask[0, :ignored] = 255
    batch = (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), [mask])
    found = evaluate_pixels(Twofold(), [batch], ALONE, classes=["background", "vessel"], ignore_index=255)
    assert found["validation_miou"] == 1 and found["validation_iou"] == {"background": 1, "vessel": None}
    assert found["validation_majority"] == {"class": "background", "miou": 1, "pixel_accuracy": 1}


def test_two_ranks_with_uneven_shares_measure_what_one_does(tmp_path):
    """Seven images of three sizes over two ranks: one has four of them and alone sees class 2; labels are wrong here and there."""
    setup = """
        import torch
        from torch import nn
        from training.data.batches import EvaluationBatches
        from training.tasks.evaluation import evaluate_pixels
        rng = torch.Generator().manual_seed(0)
        images = torch.randint(0, 2, (7, 1, 8, 8), generator=rng, dtype=torch.uint8)
        masks = [torch.randint(0, 2, (8, 8 + 4 * (number % 3)), generator=rng) for number in range(7)]
        masks[6][:4], masks[1][:] = 2, 255
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1))
        def evaluate(world):
            batches = [[number for _, number in batch] for batch in EvaluationBatches(7, 2, world)]
            loader = [(images[numbers].float(), [masks[number] for number in numbers]) for numbers in batches]
            return evaluate_pixels(model, loader, world, classes=["0", "1", "2"], ignore_index=255)
    """
    body = """
        with process_group() as world:
            (out / f"{world.rank}.json").write_text(json.dumps(evaluate(world)))
    """
    done = run_ranks(tmp_path, setup + body)
    assert [item.returncode for item in done] == [0, 0], done
    names: dict = {}
    exec(compile(textwrap.dedent(setup), "setup", "exec"), names)
    expected = names["evaluate"](ALONE)
    assert 0.1 < expected["validation_miou"] < 0.9
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert numbers_of(found) == pytest.approx(numbers_of(expected), rel=1e-6)
        for name in ("validation_iou", "validation_majority"):
            assert found[name] == expected[name], "these are of whole numbers of pixels"


# -- the models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("resnet10t", {"in_chans": 1, "output_stride": 16}, (64, 96)),
        ("mobilenetv3_small_050", {}, (50, 70)),
        ("pvt_v2_b0", TINY, (64, 64)),
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1), "embed_dim": 24}, (64, 64)),
    ],
)  # fmt: skip
def test_every_kind_of_encoder_gives_logits_of_the_images_size_and_gradients_everywhere(name, options, size):
    model = segmenter.build(name, options, 5, decoder_channels=8)
    images = torch.randint(0, 256, (2, options.get("in_chans", 3), *size), dtype=torch.uint8)
    logits = model(images)
    assert tuple(logits.shape) == (2, 5, *size)
    logits.square().mean().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == [], (
        "DDP would wait for them"
    )


def test_the_decoder_uses_all_scales_of_the_encoder():
    model = segmenter.build("pvt_v2_b0", TINY, 2, decoder_channels=8)
    assert len(model.model.lateral) == 4
    images = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        before = model(images)
        for level in range(4):
            model.model.lateral[level].bias.add_(1)
            after = model(images)
            assert not torch.allclose(after, before)
            before = after


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vit_tiny_patch16_224",
            "all features of vit_tiny_patch16_224 are 16 times smaller than the image: take an encoder",
        ),
        ("resnt50", "timm .* has no model resnt50"),
        ("resnet10t", "resnet10t cannot be created with {'depth': 2}"),
    ],
)
def test_an_encoder_that_cannot_be_used_says_why(name, message):
    with pytest.raises(ValueError, match=message):
        segmenter.build(name, {"depth": 2} if name == "resnet10t" else {}, 4, decoder_channels=8)


SWIN = {"img_size": 64, "window_size": 2, "embed_dim": 12, "num_heads": (2, 2, 2, 2)}


@pytest.mark.parametrize(
    ("name", "options", "exempt"),
    [
        ("swin_tiny_patch4_window7_224", {}, "relative_position_bias_table"),
        ("swin_tiny_patch4_window7_224", {**SWIN, "out_indices": (0, 1, 2)}, "relative_position_bias_table"),
        ("hiera_tiny_224", {}, "pos_embed"),
        ("nest_tiny", {}, "pos_embed"),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_weight_decay_spares_what_the_encoder_exempts(name, options, exempt, beside):
    model = segmenter.build(name, options, 3, decoder_channels=8)
    trained = WithFeatures(model, "tokens", nn.Linear(4, 2)) if beside else model
    decayed = {
        id(parameter)
        for group in parameter_groups(trained, 0.05)
        if group["weight_decay"]
        for parameter in group["params"]
    }
    named = dict(model.named_parameters())
    spared = {key for key, value in named.items() if value.ndim > 1 and id(value) not in decayed}
    assert spared and spared == {key for key in named if key.endswith(exempt)}


def test_a_start_is_the_same_whatever_is_asked_of_the_whole_model():
    """The decoder's weights are drawn after the encoder's: what lies between must draw nothing."""
    torch.manual_seed(1)
    encoder = timm_models.create("swin_tiny_patch4_window7_224", SWIN, features_only=True)
    expected = segmenter.Segmenter(encoder, 3, 8).state_dict()
    torch.manual_seed(1)
    found = segmenter.build("swin_tiny_patch4_window7_224", SWIN, 3, decoder_channels=8).model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def rebuilt(folder) -> timm_models.Normalized:
    """A segmenter from the files that a run leaves, as its config.json says."""
    description = export.read_description(folder)
    model = segmenter.build(
        description.name,
        description.options,
        len(description.classes),
        decoder_channels=description.decoder["channels"],
    )
    model.model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def test_a_saved_model_is_built_again_with_the_same_logits(tmp_path):
    options = {**TINY, "in_chans": 1}
    model = segmenter.build("pvt_v2_b0", options, 4, decoder_channels=8).eval()
    export.save(
        model, tmp_path, name="pvt_v2_b0", options=options, classes=["0", "1", "2", "3"], image_size=(32, 48), decoder={"channels": 8}
    )  # fmt: skip
    images = torch.randint(0, 256, (2, 1, 32, 48), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(rebuilt(tmp_path)(images), model(images))


# -- the script --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A red or a green block on grey, its outline ignored; the first training images have hardly a label."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, count in (("train", 48), ("validation", 13)):
        for number in range(count):
            image, mask = Image.new("RGB", (64, 64), (120, 120, 120)), Image.new("L", (64, 64), 0)
            left, top = (int(value) for value in rng.integers(0, 28, 2))
            box, label = (left, top, left + 35, top + 31), 1 + number % 2
            ImageDraw.Draw(image).rectangle(box, ((200, 40, 40), (40, 200, 40))[label - 1])
            ImageDraw.Draw(mask).rectangle(box, label, outline=255, width=2)
            if split == "train" and number < 8:
                mask.paste(255, (0, 4, 64, 64))
            for kind, picture in (("images", image), ("masks", mask)):
                (root / split / kind).mkdir(parents=True, exist_ok=True)
                picture.save(root / split / kind / f"{number}.png")
    return root


VALUES = {"model": "pvt_v2_b0", "model_options": TINY, "decoder_channels": 16, "classes": 3, "image_size": [64, 64],
          "global_batch_size": 8, "learning_rate": 0.01}  # fmt: skip


def segmentation(blocks, hyperparameters: dict, teacher: dict | None = None, **values) -> launcher.Job:
    inputs = {name: {"folder": str(blocks / name)} for name in ("train", "validation")}
    inputs |= {"teacher": teacher} if teacher else {}
    return launcher.from_values(
        {"name": "blocks", "script": "train_segmentation.py", "inputs": inputs, "hyperparameters": {**VALUES, **hyperparameters}, **values}
    )  # fmt: skip


@pytest.fixture(scope="module")
def learned(blocks, tmp_path_factory):
    """A run of six epochs, and the store in which it lies."""
    store = tmp_path_factory.mktemp("store")
    values = {
        "epochs": 6,
        "evaluate_every": 6,
        "horizontal_flip": True,
        "min_scale": 0.9,
        "max_scale": 1.2,
        "dice_weight": 0.5,
        "class_names": ["grey", "red", "green"],
        "class_colours": [[0, 0, 0], [250, 0, 0], [0, 250, 0]],
        "overlays": 3,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCHER_RUNS", str(store))
        yield finished(segmentation(blocks, values))


def test_a_run_learns_and_leaves_a_model_that_does_as_well(blocks, learned):
    result = learned.result()
    assert result["validation_miou"] > 0.9 and result["validation_pixel_accuracy"] > 0.95
    assert result["settings"]["image_size"] == [64, 64] and result["steps"] == 36 and not result["stopped"]
    [*_, shown] = (metric.values for metric in learned.progress() if "validation_miou" in metric.values)
    for name in ("validation_miou", "validation_pixel_accuracy", "validation_loss"):
        assert shown[name] == pytest.approx(result[name], abs=1e-4)
    assert {"cross_entropy", "dice_loss"} < {name for metric in learned.progress() for name in metric.values}
    settings = SegmentationSettings(**{**VALUES, "image_size": (64, 64)})
    data = open_data(blocks / "train", blocks / "validation", settings, 3)
    validation = open_loaders(data, settings, ALONE, batch_size_per_device=8).validation
    model = rebuilt(learned.folder.host("algo-1") / "model")
    again = numbers_of(evaluate_pixels(model, validation, ALONE, classes=["0", "1", "2"], ignore_index=255))
    assert again == pytest.approx({name: result[name] for name in again}, rel=1e-4)


def test_a_run_tells_each_class_by_its_name(learned):
    result, model = learned.result(), learned.folder.host("algo-1") / "model"
    assert sum(result["validation_iou"].values()) / 3 == pytest.approx(result["validation_miou"])
    assert list(result["validation_iou"]) == ["grey", "red", "green"]
    assert result["validation_majority"]["class"] == "grey" and result["validation_majority"]["miou"] < 0.3
    assert "| validation_iou.red | 0." in (model / "README.md").read_text()
    assert any(line.startswith("IoU: grey 0.") for _, line in learned.logs())
    description = export.read_description(model)
    assert description.classes == ["grey", "red", "green"]
    assert description.decoder["class_colours"] == [[0, 0, 0], [250, 0, 0], [0, 250, 0]]
    assert any("validation_iou/red" in metrics for metrics in learned.metrics()), (
        "after each evaluation, not only the last"
    )


def test_a_run_leaves_a_picture_of_what_its_model_sees(learned):
    [file] = learned.folder.path.rglob("overlays.png")
    assert file.parent.parent == learned.folder.host("algo-1") / "output/data", (
        "in the host's folder of what comes back"
    )
    with Image.open(file) as picture:
        pixels = np.array(picture)
    third = pixels.shape[1] // 3
    for column in range(
        3
    ):  # the middle of a block: its colour beside grey in the image, mixed with its class's in the others
        seen = {tuple(pixel) for pixel in pixels[:, column * third : (column + 1) * third].reshape(-1, 3).tolist()}
        expected = (200, 40, 40) if column == 0 else (230, 16, 16)
        assert expected in seen


@pytest.mark.slow
def test_a_student_learns_from_a_teachers_answers_alone(blocks, learned):
    """Its masks have no weight: what it knows of them, the teacher told."""
    values = {
        "epochs": 6,
        "evaluate_every": 6,
        "decoder_channels": 8,
        "class_names": ["grey", "red", "green"],
        "overlays": 0,
    }
    values |= {"hard_label_weight": 0, "min_teacher_miou": 0.8}
    run = finished(segmentation(blocks, values, teacher={"file": str(learned.folder.path / "model.tar.gz")}))
    result = run.result()
    assert result["validation_miou"] > 0.8
    assert result["teacher"]["validation_miou"] == pytest.approx(learned.result()["validation_miou"], rel=1e-4)
    [*_, shown] = (metric.values for metric in run.progress() if "teacher_loss" in metric.values)
    assert 0 < shown["teacher_share"] < 1 and shown["loss"] == pytest.approx(shown["teacher_loss"], abs=1e-4)
    assert not [*run.folder.path.rglob("overlays.png")]
    assert "knowledge-distillation" in (run.folder.host("algo-1") / "model/README.md").read_text()


@pytest.mark.slow
def test_two_hosts_train_the_same_model_as_one(blocks):
    """Thirteen held-out images do not divide by two, and labels lie unevenly in the batches."""
    values = {"max_steps": 6, "max_grad_norm": None, "log_every": 1, "dice_weight": 1, "overlays": 0}
    one = finished(segmentation(blocks, values))
    two = finished(segmentation(blocks, values, distribution="torchrun", compute={"instance_count": 2}))
    assert (one.result()["world_size"], two.result()["world_size"]) == (1, 2)
    torch.manual_seed(0)
    start = segmenter.build("pvt_v2_b0", TINY, 3, decoder_channels=16).model.state_dict()
    moved = max((value - start[name]).abs().max().item() for name, value in weights(one).items())
    for name, value in weights(one).items():
        assert torch.allclose(value, weights(two)[name], atol=moved / 100), name
    for name in ("validation_miou", "validation_pixel_accuracy", "validation_loss"):
        assert two.result()[name] == pytest.approx(one.result()[name], rel=1e-2)


def test_a_run_on_a_bad_mask_fails_with_the_masks_name(blocks, tmp_path):
    for kind, value in (("images", 0), ("masks", 9)):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for number in range(8):
            Image.new("L", (64, 64), value).save(tmp_path / "data" / kind / f"{number}.png")
    inputs = {"train": {"folder": str(tmp_path / "data")}, "validation": {"folder": str(blocks / "validation")}}
    job = launcher.from_values(
        {"name": "bad", "script": "train_segmentation.py", "inputs": inputs, "hyperparameters": {**VALUES, "num_workers": 1}}
    )  # fmt: skip
    run = script_run(tmp_path / "run", job)
    assert run.returncode == 1
    failure = run.failure()
    assert failure.startswith("rank 0: ValueError: /") and ".png: class 9 at row 0, column 0" in failure.splitlines()[0]

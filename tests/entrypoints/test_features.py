"""Features of a student and its teacher: what timm's models give, what is projected, what trains, is kept, measured and exported."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from training.data.batches import LabelledBatch
from training.distributed.world import World
from training.engine import memory
from training.engine.memory import Footprint
from training.engine.state import TrainingState, prepare
from training.measure.timeline import Timeline
from training.models import export, segmenter, timm_models
from training.models.features import WithFeatures
from training.settings.distillation import DistillationSettings
from training.settings.features import FeatureSettings
from training.tasks import features
from training.tasks.distillation import Distillation
from training.tasks.feature_losses import feature_loss
from training.tasks.students import Student
from training.teacher import frozen

from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.torch_versions import compiling

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU, "none", "test")
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
RESNET = {"channels": (8, 8, 16, 16), "stem_width": 8}
LIGHT = {"img_size": 32, "patch_size": 16, "embed_dim": 12, "depth": 1, "num_heads": 2, "drop_rate": 0.2}
IMAGES = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def built(name: str = "vit_tiny_patch16_224", **options) -> timm_models.Normalized:
    torch.manual_seed(1)
    return timm_models.build(name, options, 3)


def teacher(level: str = "pooled", name: str = "vit_tiny_patch16_224", **options) -> frozen.Teacher:
    given = options or VIT
    return frozen.Teacher([frozen.FrozenModel(built(name, **given), name, given, features=level)])


def batch_of(images: torch.Tensor) -> LabelledBatch:
    numbers = torch.arange(len(images))
    return LabelledBatch(images, numbers % 3, numbers % 3, torch.ones(len(images)), numbers, numbers)


def settings(loss: str = "cosine", level: str = "pooled", **values) -> DistillationSettings:
    return DistillationSettings(student="any", features=FeatureSettings(loss=loss, level=level, weight=2), **values)


def state(student: timm_models.Normalized, teaching: frozen.Teacher, given: DistillationSettings) -> TrainingState:
    return prepare(student, given, 10, ALONE, beside=features.learner(student, teaching, given, IMAGES[:1]))


def step(trained: TrainingState, task: Distillation, images: torch.Tensor = IMAGES) -> dict[str, torch.Tensor]:
    [losses] = task(batch_of(images))
    losses["loss"].backward()
    nn.utils.clip_grad_norm_(trained.trainable.parameters(), 1.0)
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    trained.schedule.step()
    trained.step += 1
    if trained.average is not None:
        trained.average.update(trained.model, trained.step)
    return losses


# -- what a model gives ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", VIT),
        ("vit_tiny_patch16_224", {**VIT, "reg_tokens": 4}),
        ("vit_tiny_patch16_224", {**VIT, "class_token": False, "global_pool": "avg"}),
        ("deit_tiny_distilled_patch16_224", VIT),
        ("resnet10t", RESNET),
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}),
        ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (4, 8, 12, 16)}),
        ("mobilenetv3_small_050", {}),
        ("mixer_s32_224", {"img_size": 64}),
    ],
)  # fmt: skip
def test_features_come_with_the_models_own_logits_and_lie_where_timm_says(name, options):
    model = built(name, **options).eval()
    side = options.get("img_size", 64)
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    with torch.no_grad():
        (logits, pooled), (again, tokens) = (
            WithFeatures(model, level).eval()(images) for level in ("pooled", "tokens")
        )
        _, [maps] = model.model.forward_intermediates(model.normalized(images), indices=1, norm=True)
    assert torch.equal(logits, model(images)) and torch.equal(again, logits)
    assert torch.allclose(tokens, maps.permute(0, 2, 3, 1), atol=1e-6) and maps.shape[2] > 1
    assert pooled.shape == (2, model.model.head_hidden_size)


def test_a_model_without_a_grid_is_refused_and_says_what_to_set():
    model = built("coat_lite_tiny", img_size=64)
    with pytest.raises(ValueError, match="features of CoaT are not a grid .*: set features.level to pooled"):
        WithFeatures(model, "tokens")(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))


def test_a_model_that_hides_its_features_is_refused():
    model = timm_models.Normalized(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), [0.5] * 3, [0.5] * 3)
    with pytest.raises(ValueError, match="Sequential lacks the forward_features .* or features: null"):
        WithFeatures(model, "pooled")


def test_a_segmenters_features_are_its_encoders_coarsest_ones():
    model = segmenter.build("resnet10t", RESNET, 3, decoder_channels=8).eval()
    with torch.no_grad():
        logits, tokens = WithFeatures(model, "tokens").eval()(IMAGES)
        _, pooled = WithFeatures(model, "pooled").eval()(IMAGES)
        coarsest = model.model.encoder(model.normalized(IMAGES))[-1]
        assert torch.equal(logits, model(IMAGES)) and torch.equal(tokens, coarsest.permute(0, 2, 3, 1))
    assert torch.allclose(pooled, coarsest.mean((2, 3)), atol=1e-6)


def test_asking_for_the_shape_of_features_leaves_no_trace():
    model = built("resnet10t", **RESNET).train()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert WithFeatures(model, "tokens").feature_shape(IMAGES[:1]) == (1, 1, 16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and model.training
    assert torch.equal(torch.get_rng_state(), generator)


@compiling
def test_a_compiled_teacher_gives_the_same_features_of_a_ragged_batch_too(monkeypatch):
    torch._dynamo.reset()
    graphs = []
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    )
    compiled = frozen.FrozenModel(built(**VIT), "vit", VIT, compile=True, features="tokens")
    expected = teacher("tokens").with_features(IMAGES)
    for count in (6, 4):
        for found, wanted in zip(compiled.with_features(IMAGES[:count]), expected, strict=True):
            assert torch.equal(found, wanted[:count])
    assert len(graphs) == 1 and torch.equal(compiled(IMAGES), expected[0])


def test_features_of_several_teachers_are_refused(tmp_path):
    for name in ("one", "other"):
        export.save(
            built(**VIT),
            tmp_path / name,
            name="vit_tiny_patch16_224",
            options=VIT,
            classes=["a", "b", "c"],
            image_size=32,
        )
    with pytest.raises(ValueError, match=r"features of 2 teachers \(one, other\) have no mean: give one"):
        frozen.load(tmp_path, ["a", "b", "c"], channels=3, image_size=32, features="pooled")


# -- what is learned ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "loss", "level"),
    [
        ("vit_tiny_patch16_224", {**LIGHT, "drop_rate": 0.0}, "cosine", "tokens"),
        ("resnet10t", RESNET, "smooth_l1", "tokens"),
        ("resnet10t", RESNET, "relational", "pooled"),
        ("vit_tiny_patch16_224", {**LIGHT, "drop_rate": 0.0, "img_size": 48, "patch_size": 8}, "smooth_l1", "pooled"),
    ],
)
def test_a_student_of_any_kind_width_grid_and_image_size_comes_closer_to_its_teachers_features(
    name, options, loss, level
):
    student = built(name, **options)
    student.image_size = options.get("img_size")
    teaching, given = teacher(level), settings(loss, level, hard_label_weight=1, learning_rate=0.01)
    trained = state(student, teaching, given)
    task = Distillation([Student(trained.trained, given)], teaching, timeline=Timeline(CPU))
    trained.trainable.train()
    first, *_, last = (step(trained, task)["feature_loss"].item() for _ in range(8))
    assert last < 0.9 * first


class Counted(nn.Module):
    """Counts its forward passes."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, images: torch.Tensor):
        self.passes += 1
        return self.model(images)


def test_one_pass_of_each_model_gives_logits_and_features_whose_losses_add_up():
    teaching = teacher()
    given = settings("smooth_l1", temperature=2, teacher_loss_weight=0.5, hard_label_weight=0.25)
    trained = state(built(**{**LIGHT, "drop_rate": 0.0}), teaching, given)
    student, [member] = Counted(trained.trained), teaching.members
    member._called = asked = Counted(member._called)
    [losses] = Distillation([Student(student, given)], teaching, timeline=Timeline(CPU))(batch_of(IMAGES))
    assert (student.passes, asked.passes) == (1, 1)
    assert [*losses] == ["loss", "label_loss", "teacher_loss", "feature_loss"]
    parts = 0.25 * losses["label_loss"] + 0.5 * losses["teacher_loss"] + 2 * losses["feature_loss"]
    assert losses["loss"].item() == pytest.approx(parts.item(), rel=1e-6)
    own, taught = trained.trainable(IMAGES)[1], teaching.with_features(IMAGES)[1]
    assert losses["feature_loss"].item() == pytest.approx(feature_loss(own, taught, given.features).item(), rel=1e-6)


def test_features_alone_ask_nothing_of_the_teachers_logits():
    given, teaching = settings(hard_label_weight=1), teacher()
    trained = state(built(**LIGHT), teaching, given)
    [losses] = Distillation([Student(trained.trained, given)], teaching, timeline=Timeline(CPU))(batch_of(IMAGES))
    assert [*losses] == ["loss", "label_loss", "feature_loss"] and given.has_teacher


def test_the_projection_is_as_wide_as_the_teacher_and_relations_need_none():
    student, teaching = built(**LIGHT), teacher("tokens")
    projection = features.learner(student, teaching, settings(level="tokens"), IMAGES[:1]).projection
    assert (projection.in_features, projection.out_features) == (12, 24)
    assert features.learner(student, teacher(), settings("relational"), IMAGES[:1]).projection is None
    assert features.learner(student, None, DistillationSettings(student="any"), IMAGES[:1]) is None


def test_an_interrupted_student_goes_on_bit_for_bit_with_its_projection_and_the_average_has_none():
    given, teaching = settings(level="tokens", ema_decay=0.9, precision="fp32"), teacher("tokens")
    first, again = (state(built(**LIGHT), teaching, given) for _ in range(2))
    tasks = [Distillation([Student(one.trained, given)], teaching, timeline=Timeline(CPU)) for one in (first, again)]
    before = first.trainable.projection.weight.detach().clone()
    for _ in range(3):
        step(first, tasks[0])
    again.restore(copy.deepcopy(first.capture()))
    assert not torch.equal(first.trainable.projection.weight, before)
    generator = torch.get_rng_state()
    for one, task in zip((first, again), tasks, strict=True):
        torch.set_rng_state(generator)  # dropout
        for _ in range(3):
            step(one, task)
    for one, other in ((first.trainable, again.trainable), (first.evaluated, again.evaluated)):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert not any("projection" in name for name in first.evaluated.state_dict())


RANKS = """
    from training.engine.state import prepare
    from training.tasks import features
    from training.tasks.distillation import Distillation
    from training.tasks.students import Student
    from tests.entrypoints import test_features as here
    with process_group() as world:
        given = here.settings("smooth_l1", "tokens", zero=True, learning_rate=0.01, optimizer="sgd")
        teaching, student = here.teacher("tokens"), here.built(**{**here.LIGHT, "drop_rate": 0.0})
        beside = features.learner(student, teaching, given, here.IMAGES[:1])
        state = prepare(student, given, 10, world, beside=beside)
        share = here.IMAGES.chunk(world.size)[world.rank]
        untaught, task = (Distillation([Student(state.trained, given)], one, timeline=here.Timeline(here.CPU)) for one in (None, teaching))
        for _ in range(2):  # as a probe does
            next(untaught(here.batch_of(share)))["loss"].backward()
        state.optimizer.zero_grad()
        losses = [here.step(state, task, share)["feature_loss"].item() for _ in range(3)]
        torch.save((losses, state.trainable.state_dict()), out / f"{world.size}-{world.rank}.pt")
"""


def test_two_processes_with_zero_train_student_and_projection_as_one_does_and_untaught_steps_wait_for_nothing(tmp_path):
    for size in (1, 2):
        done = run_ranks(tmp_path, RANKS, size=size)
        assert [rank.returncode for rank in done] == [0] * size, done[0].stderr
    alone, *ranks = (torch.load(tmp_path / name, weights_only=False) for name in ("1-0.pt", "2-0.pt", "2-1.pt"))
    means = torch.tensor([losses for losses, _ in ranks]).mean(0)
    assert torch.allclose(torch.tensor(alone[0]), means, rtol=1e-4)
    for name, value in alone[1].items():
        assert torch.allclose(value, ranks[0][1][name], rtol=1e-3, atol=1e-5), name
        assert torch.equal(ranks[0][1][name], ranks[1][1][name])


# -- what it takes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cosine", "smooth_l1", "relational"])
def test_what_a_loss_keeps_is_predicted_for_more_images_than_were_tried(loss):
    given, teaching = settings(loss), teacher()
    trained = state(built(**LIGHT), teaching, given)
    now, _ = memory_of(trained, teaching, given)

    def kept(images: int) -> float:
        width = 12 if loss == "relational" else 24  # no projection
        student, target = torch.randn(images, width, requires_grad=True) * 1, torch.randn(images, 24)
        return memory._kept(lambda _: feature_loss(student, target, given.features), images)

    counts = (20, 40)
    predicted = [now.step(count) - now.fixed for count in counts]
    assert predicted[1] - predicted[0] == pytest.approx(kept(40) - kept(20), rel=1e-3)
    assert (now.pairs > 0 and now.triples > 0) == (loss == "relational")


def memory_of(trained: TrainingState, teaching: frozen.Teacher, given: DistillationSettings):
    nothing = Footprint(weights=0, optimizer=0, average=0, activations=0)
    return features.with_feature_loss(nothing, {"zero": nothing}, [trained], teaching, given, IMAGES[:1])


def test_every_footprint_has_what_the_loss_keeps():
    given, teaching = settings("relational"), teacher()
    now, without = memory_of(state(built(**LIGHT), teaching, given), teaching, given)
    assert without == {"zero": now}


def test_relations_let_fewer_images_fit():
    """3 N + 2 N² + N³ bytes in 900: 9 images take 27 + 162 + 729 = 918, 8 take 24 + 128 + 512 = 664."""
    alike = Footprint(weights=0, optimizer=0, average=0, activations=3, pairs=2, triples=1)
    assert alike.step(8) == 664 and alike.largest_batch(1000) == 8


@pytest.mark.parametrize(
    ("loss", "images", "refused"), [("relational", 2, True), ("relational", 3, False), ("cosine", 1, False)]
)
def test_too_few_images_at_once_for_a_relation_are_refused(loss, images, refused):
    if not refused:
        return features.require_enough(settings(loss), images)
    with pytest.raises(
        ValueError, match="compares at least 3 images, but a process has 2 at once: raise global_batch_size"
    ):
        features.require_enough(settings(loss), images)

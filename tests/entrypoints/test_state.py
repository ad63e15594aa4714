"""What training changes: one optimizer step as by hand, ZeRO's state that any number of processes can take over, averages."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from training.distributed.world import World
from training.engine import optimizers
from training.engine.state import prepare
from training.models import timm_models
from training.models.features import WithFeatures
from training.models.timm_models import Normalized
from training.settings.scripts import TrainingSettings

from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.torch_versions import fp16_on_cpu

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")


def model() -> Normalized:
    torch.manual_seed(0)
    return Normalized(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)), [0.5] * 3, [0.5] * 3)


def step(state, images: torch.Tensor) -> None:
    state.trained(images).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.schedule.step()
    state.step += 1
    if state.average is not None:
        state.average.update(state.model, state.step)


IMAGES = torch.arange(4 * 12, dtype=torch.uint8).reshape(4, 3, 2, 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "exempt"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1}, {"cls_token", "pos_embed"}),
        ("beit_base_patch16_224", {"img_size": 32, "depth": 1}, {"cls_token", "relative_position_bias_table"}),
    ],
)
def test_weight_decay_spares_what_a_classifier_exempts_whatever_stands_around_it(
    name, options, exempt, beside, compiled
):
    classifier = timm_models.build(name, options, 3)
    around = WithFeatures(classifier, "pooled", nn.Linear(4, 2)) if beside else None
    settings = TrainingSettings(weight_decay=0.5, compile=compiled)
    state = prepare(classifier, settings, 10, ALONE, beside=around)
    decayed = {id(item) for group in state.optimizer.param_groups if group["weight_decay"] for item in group["params"]}
    spared = {key for key, item in classifier.named_parameters() if item.ndim > 1 and id(item) not in decayed}
    assert {key.split(".")[-1] for key in spared} == exempt


@pytest.mark.parametrize("name", optimizers.CLASSES)
def test_each_optimizer_does_what_torchs_own_does(name):
    kind = optimizers.CLASSES[name]
    if name in ("nadam", "radam") and "decoupled_weight_decay" not in inspect.signature(kind).parameters:
        pytest.skip("torch 2.0 has it without decoupled weight decay, and it is refused there")
    settings = TrainingSettings(optimizer=name, learning_rate=0.1, weight_decay=0.5)
    ours, theirs = model(), model()
    built = optimizers.build(ours, settings, ALONE)
    weights = [item for item in theirs.parameters() if item.ndim > 1]
    groups = [
        {"params": [item for item in theirs.parameters() if item.ndim == 1], "weight_decay": 0.0},
        {"params": weights, "weight_decay": 0.5},
    ]
    options = {"sgd": {"momentum": 0.9, "nesterov": True}, "adamw": {}}.get(name, {"decoupled_weight_decay": True})
    reference = kind(groups, lr=0.1, **options)
    for _ in range(3):
        for network, optimizer in ((ours, built), (theirs, reference)):
            network(IMAGES).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["nadam", "radam"])
def test_an_optimizer_that_would_decay_weights_in_another_way_is_refused(monkeypatch, name):
    class OfTorch20(optimizers.CLASSES[name]):
        def __init__(self, params, lr=1e-3, weight_decay=0.0):
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    monkeypatch.setitem(optimizers.CLASSES, name, OfTorch20)
    with pytest.raises(ValueError, match=f"optimizer {name}: torch .* lacks its decoupled weight decay: set adamw"):
        optimizers.build(model(), TrainingSettings(optimizer=name), ALONE)


def test_zero_is_refused_where_torch_holds_no_group():
    older = World(0, 2, 0, torch.device("cpu"), "smddp", "test", collectives=torch)
    with pytest.raises(ValueError, match="zero: smddp before 1.4"):
        optimizers.build(model(), TrainingSettings(zero=True), older)


@fp16_on_cpu
@pytest.mark.parametrize("name", optimizers.CLASSES)
def test_a_first_step_whose_gradients_overflow_in_fp16_leaves_no_trace(name):
    """Memory that torch allocates and never writes holds whatever was there before: filled here, it would be seen in the weights."""
    ours, plain = model(), model()
    built = optimizers.build(ours, TrainingSettings(optimizer=name, precision="fp16"), ALONE)
    reference = optimizers.build(plain, TrainingSettings(optimizer=name, precision="fp16"), ALONE)
    scaler = torch.amp.GradScaler("cpu")
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    for size in (float("inf"), 1.0):
        junk = [torch.full_like(parameter, 7e9) for parameter in ours.parameters() for _ in range(50)]
        del junk
        for parameter in ours.parameters():
            parameter.grad = torch.full_like(parameter, size) * scaler.scale(torch.ones(()))
        scaler.step(built)
        scaler.update()
        if size != 1.0:
            assert all(torch.equal(now, then) for now, then in zip(ours.parameters(), before))
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    reference.step()
    for own, usual in zip(ours.parameters(), plain.parameters()):
        assert torch.allclose(own, usual, rtol=1e-5)


def test_adamw_is_fused_where_torch_has_it():
    built = optimizers.build(model(), TrainingSettings(), ALONE)
    assert bool(built.param_groups[0]["fused"]) is (torch.__version__ >= "2.4"), "on the CPU since 2.4"


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=fp16_on_cpu)])
def test_a_state_set_up_again_goes_on_bit_for_bit(precision):
    settings = TrainingSettings(ema_decay=0.9, precision=precision, warmup_fraction=0.5)
    first = prepare(model(), settings, 10, ALONE)
    for _ in range(3):
        step(first, IMAGES)
    kept = copy.deepcopy(first.capture())
    second = prepare(model(), settings, 10, ALONE)
    second.restore(kept)
    assert second.step == 3
    for _ in range(3):
        step(first, IMAGES)
        step(second, IMAGES)
    for mine, other in ((first.model, second.model), (first.evaluated, second.evaluated)):
        assert all(
            torch.equal(a, b) for a, b in zip(mine.state_dict().values(), other.state_dict().values(), strict=True)
        )
    assert first.schedule.get_last_lr() == second.schedule.get_last_lr()


def test_in_a_world_of_another_size_a_rank_takes_the_means_and_its_own_random_numbers():
    """And what no training changes, as an attention's mask, is in no checkpoint of each rank."""
    of = model()
    of.model.append(nn.BatchNorm1d(3))
    of.model.register_buffer("mask", torch.zeros(3), persistent=False)
    state = prepare(of, TrainingSettings(), 10, ALONE)
    own = state.own()
    assert any("running_var" in name for name in own) and not any("mask" in name for name in own)
    means = {name: torch.full_like(value, 0.25) for name, value in own.items() if value.is_floating_point()}
    random = {name: value.clone() for name, value in own.items() if name not in means}
    state.step = 4
    state.restore_own(means, same_world=False)
    assert all(torch.equal(value, means[name]) for name, value in state.own().items() if name in means)
    assert any(not torch.equal(state.own()[name], value) for name, value in random.items())
    state.restore_own({**means, **random}, same_world=True)
    assert all(torch.equal(state.own()[name], value) for name, value in random.items())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("then", [True, False])
def test_a_run_may_go_on_in_another_memory_format(name, then):
    """A kernel that goes through memory would give the averages of one weight to another."""

    def convolutional() -> Normalized:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
        return Normalized(layers, [0.5] * 3, [0.5] * 3)

    def prepared(channels_last: bool):
        settings = TrainingSettings(optimizer=name, channels_last=channels_last, learning_rate=0.1, warmup_fraction=0.0)
        return prepare(convolutional(), settings, 100, ALONE)

    images = torch.arange(2 * 3 * 16, dtype=torch.uint8).reshape(2, 3, 4, 4)
    states = [prepared(then), prepared(not then), prepared(not then)]
    for _ in range(3):
        step(states[0], images)
        step(states[1], images)
    states[2].restore(copy.deepcopy(states[0].capture()))
    for _ in range(3):
        step(states[1], images)
        step(states[2], images)
    for stayed, changed in zip(states[1].model.parameters(), states[2].model.parameters(), strict=True):
        assert torch.allclose(stayed, changed, atol=1e-3), (stayed - changed).abs().max()


def test_a_run_that_goes_on_for_longer_has_its_own_learning_rate_from_the_first_step_on():
    settings = TrainingSettings(warmup_fraction=0.0)
    short = prepare(model(), settings, 4, ALONE)
    for _ in range(4):
        step(short, IMAGES)
    assert short.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
    longer = prepare(model(), settings, 8, ALONE)
    longer.restore(copy.deepcopy(short.capture()))
    assert longer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * settings.learning_rate)
    assert longer.schedule.get_last_lr() == [group["lr"] for group in longer.optimizer.param_groups]


def test_the_average_is_what_is_evaluated_and_follows_its_decay():
    state = prepare(model(), TrainingSettings(ema_decay=0.75, learning_rate=0.1), 10, ALONE)
    expected = None
    for _ in range(3):
        step(state, IMAGES)
        weight = state.model.model[1].weight.detach().clone()
        expected = weight if expected is None else 0.75 * expected + 0.25 * weight  # the first step's weights begin it
    assert state.evaluated is not state.model
    assert torch.allclose(state.evaluated.model[1].weight, expected, atol=1e-7)
    assert prepare(model(), TrainingSettings(), 10, ALONE).evaluated is not None


def test_convolutional_models_train_channels_last_unless_told_otherwise():
    def layout(**values) -> bool:
        convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(3))
        network = Normalized(convolutions, [0.5] * 3, [0.5] * 3)
        network(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
        state = prepare(network, TrainingSettings(**values), 10, ALONE)
        return state.model.model[0].weight.is_contiguous(memory_format=torch.channels_last)

    assert layout() and not layout(channels_last=False)


ZERO = """
    import torch.distributed as dist
    from training.settings.scripts import TrainingSettings
    from training.engine.state import prepare
    from training.models.timm_models import Normalized
    from training.engine import optimizers
    def made():
        torch.manual_seed(0)
        return Normalized(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)), [0.5] * 3, [0.5] * 3)
    images = torch.arange(4 * 12, dtype=torch.uint8).reshape(4, 3, 2, 2)
    with process_group() as world:
        results = {}
        for zero in (False, True):
            state = prepare(made(), TrainingSettings(zero=zero, optimizer="adamw"), 10, world)
            for _ in range(3):
                share = images.chunk(world.size)[world.rank]
                state.trained(share).square().mean().backward()
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.schedule.step()
                state.step += 1
            inner = state.optimizer.optim if zero else state.optimizer
            kept = sum(value.numel() for entry in inner.state.values() for value in entry.values() if value.ndim)
            captured = state.capture()
            if zero:  # resumed, it keeps as much as before, and is captured alike
                everyones = [captured]
                dist.broadcast_object_list(everyones)
                state.restore(everyones[0])
                assert not state.optimizer.state, "nobody reads a second copy"
                captured = state.capture()
            results[zero] = (captured, kept, [item.detach().clone() for item in state.model.parameters()])
        torch.save({"kept": [results[zero][1] for zero in (False, True)], "captured": results[True][0], "plain": results[False][0],
                    "weights": [results[zero][2] for zero in (False, True)]}, out / f"rank-{world.rank}.pt")
"""


def test_zero_shares_the_state_computes_the_same_and_any_world_size_goes_on_from_it(tmp_path):
    done = run_ranks(tmp_path, ZERO)
    assert [item.returncode for item in done] == [0, 0], done[0].stderr + done[1].stderr
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    parameters = sum(item.numel() for item in model().parameters())
    assert [rank["kept"][0] for rank in ranks] == [2 * parameters] * 2
    assert (
        sum(rank["kept"][1] for rank in ranks) == 2 * parameters
        and max(rank["kept"][1] for rank in ranks) < 2 * parameters
    )
    assert ranks[1]["captured"] is None
    for plain, zero in zip(*ranks[0]["weights"], strict=True):
        assert torch.equal(plain, zero)
    alone = [prepare(model(), TrainingSettings(), 10, ALONE) for _ in range(2)]
    for state, name in zip(alone, ("captured", "plain"), strict=True):
        state.restore(ranks[0][name])
        step(state, IMAGES)
    for sharded, whole in zip(alone[0].model.parameters(), alone[1].model.parameters(), strict=True):
        assert torch.equal(sharded, whole)


def test_zero_sends_buckets_or_parameters_whichever_are_fewer(tmp_path):
    """On two ranks. Twelve parameters in two groups, those with weight decay and those without: at most four broadcasts. A single one: a
    buffer for each rank would be two broadcasts, one of them of nothing."""
    done = run_ranks(
        tmp_path,
        """
        import torch.distributed as dist
        from training.settings.scripts import TrainingSettings
        from training.engine.state import prepare
        with process_group() as world:
            torch.manual_seed(0)
            layers = [layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.ReLU())]
            for name, model in (("many", nn.Sequential(*layers)), ("single", nn.Linear(4, 4, bias=False))):
                state = prepare(model, TrainingSettings(zero=True), 10, world)
                sent, broadcast = [], dist.broadcast
                def count(tensor, *args, **options):
                    sent.append(tensor.numel())
                    return broadcast(tensor, *args, **options)
                dist.broadcast = count
                state.trained(torch.rand(2, 4)).sum().backward()
                state.optimizer.step()
                dist.broadcast = broadcast
                total = sum(parameter.numel() for parameter in state.model.parameters())
                (out / f"{name}-{world.rank}").write_text(f"{len(sent)} {sum(sent)} {total}")
        """,
    )
    assert [rank.returncode for rank in done] == [0, 0], done
    for rank in range(2):
        for name, most in (("many", 4), ("single", 1)):
            broadcasts, numbers, total = map(int, (tmp_path / f"{name}-{rank}").read_text().split())
            assert (2 if name == "many" else 1) <= broadcasts <= most and numbers == total

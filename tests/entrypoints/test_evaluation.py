"""Evaluation: counts by hand, agreement with a teacher, and the same numbers at any number of processes."""

from __future__ import annotations

import json
import math
import textwrap
from functools import partial

import pytest
import torch
from torch import nn
from training.distributed.world import World
from training.tasks.evaluation import evaluate, evaluate_pixels

from tests.entrypoints.ranks import run_ranks

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")


def of(logits: torch.Tensor, labels: list[int], batch: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A loader whose images are the logits that a model that changes nothing gives."""
    return list(zip(logits.split(batch), torch.tensor(labels).split(batch)))


def test_accuracies_and_loss_by_hand():
    """Seven classes: the label has the largest logit, the fifth, and the sixth."""
    row = torch.tensor([7.0, 6, 5, 4, 3, 2, 1])
    found = evaluate(nn.Identity(), of(torch.stack([row, row, row]), [0, 4, 5]), ALONE)
    total = math.log(sum(math.exp(value) for value in row.tolist()))
    assert found == pytest.approx(
        {"validation_accuracy": 1 / 3, "validation_top5_accuracy": 2 / 3, "validation_loss": total - (7 + 3 + 2) / 3},
        rel=1e-6,
    )


@pytest.mark.parametrize(("classes", "reported"), [(5, False), (6, True)])
def test_top_5_is_told_of_more_than_five_classes_only(classes, reported):
    logits = torch.randn(3, classes)
    found = evaluate(nn.Identity(), of(logits, [0, 1, 2]), ALONE, teacher_logits=logits.split(2))
    assert ("validation_top5_accuracy" in found) == ("teacher_top5_agreement" in found) == reported


def test_agreement_with_a_teacher_by_hand():
    """The teacher's first class is the student's first, fifth, sixth, and first."""
    row = torch.arange(7.0, 0, -1)
    student = torch.stack([row] * 4)
    teacher = torch.zeros(4, 7)
    teacher[range(4), [0, 4, 5, 0]] = 2.0
    found = evaluate(nn.Identity(), of(student, [6] * 4), ALONE, teacher_logits=teacher.half().split(2))
    assert (found["teacher_top1_agreement"], found["teacher_top5_agreement"]) == (0.5, 0.75)
    p, q = teacher.double().softmax(1), student.double().softmax(1)
    assert found["teacher_kl"] == pytest.approx((p * (p / q).log()).sum(1).mean().item(), rel=1e-6)
    assert found["validation_accuracy"] == 0


def test_what_a_teacher_leaves_is_what_its_student_is_compared_with():
    torch.manual_seed(0)
    logits, kept = 30 + 10 * torch.randn(5, 8), []
    first = evaluate(nn.Identity(), of(logits, [0] * 5), ALONE, keep=kept)
    assert [(item.dtype, tuple(item.shape)) for item in kept] == [(torch.float16, (size, 8)) for size in (2, 2, 1)]
    again = evaluate(nn.Identity(), of(logits, [0] * 5), ALONE, teacher_logits=kept)
    assert {name: again[name] for name in first} == first
    assert again["teacher_top1_agreement"] == again["teacher_top5_agreement"] == 1
    assert abs(again["teacher_kl"]) < 1e-6


def test_a_loader_in_another_order_than_the_teachers_is_noticed():
    logits = torch.randn(3, 4)
    with pytest.raises(AssertionError, match="differ from those that the teacher got"):
        evaluate(nn.Identity(), of(logits, [0] * 3, batch=3), ALONE, teacher_logits=logits.split(1))


def test_a_module_is_in_eval_mode_and_comes_back_as_it_was():
    model = nn.Sequential(nn.Dropout(0.9))
    for training in (True, False):
        model.train(training)
        assert evaluate(model, of(torch.eye(3), [0, 1, 2]), ALONE)["validation_accuracy"] == 1
        assert model.training is model[0].training is training
    model.train()
    with pytest.raises(IndexError):
        evaluate(model, of(torch.eye(3), [0, 1, 9]), ALONE)
    assert model.training


def test_a_model_that_is_no_module_is_called_as_it_is():
    assert evaluate(lambda images: -images, of(torch.eye(3), [1, 0, 0]), ALONE)["validation_accuracy"] == 1


def test_the_model_computes_in_the_given_context_and_the_metrics_do_not():
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    seen = []

    class Product(nn.Module):
        def forward(self, images):
            logits = images @ torch.eye(3)
            seen.append(logits.dtype)
            return logits

    logits = torch.tensor([[1.0, 0.0, 0.0]])
    found = evaluate(Product(), of(logits, [0]), ALONE, autocast=autocast)
    assert found["validation_loss"] == pytest.approx(math.log(math.e + 2) - 1, rel=1e-6)
    pixels = (torch.zeros(1, 3, 2, 3), [torch.zeros(2, 3, dtype=torch.uint8)])
    evaluate_pixels(Product(), [pixels], ALONE, classes=["0", "1", "2"], ignore_index=255, autocast=autocast)
    assert seen == [torch.bfloat16] * 2


def test_two_ranks_with_uneven_shares_agree_with_one(tmp_path):
    """Seven images over two ranks, and one over two: a rank without an image has the same metrics."""
    setup = """
        import torch
        from torch import nn
        from training.data.batches import EvaluationBatches
        from training.tasks.evaluation import evaluate
        torch.manual_seed(0)
        images, labels = torch.randn(7, 8), torch.tensor([0, 1, 2, 0, 1, 2, 7])
        teacher, student = nn.Linear(8, 8), nn.Linear(8, 8)
        def measure(world, count):
            batches = [[number for _, number in batch] for batch in EvaluationBatches(count, 2, world)]
            loader, kept = [(images[numbers], labels[numbers]) for numbers in batches], []
            evaluate(teacher, loader, world, keep=kept)
            return evaluate(student, loader, world, teacher_logits=kept)
    """
    body = """
        with process_group() as world:
            (out / f"{world.rank}.json").write_text(json.dumps([measure(world, 7), measure(world, 1)]))
    """
    done = run_ranks(tmp_path, textwrap.dedent(setup) + textwrap.dedent(body))
    assert [item.returncode for item in done] == [0, 0], done
    names: dict = {}
    exec(compile(textwrap.dedent(setup), "setup", "exec"), names)
    expected = [names["measure"](ALONE, count) for count in (7, 1)]
    assert len(expected[0]) == 6 and expected[0]["teacher_kl"] > 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [pytest.approx(item, rel=1e-5) for item in expected]

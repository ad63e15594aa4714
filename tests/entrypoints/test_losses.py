"""Losses against values worked out by other means than the ones they use."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from training.losses import label_cross_entropy, temperature_kl
from training.schedules import warmup_cosine

logits = numpy_strategies.arrays(np.float64, (4, 5), elements=st.floats(-20, 20))


def probabilities(values: np.ndarray) -> np.ndarray:
    exponents = np.exp(values - values.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


@settings(max_examples=50, deadline=None)
@given(logits, logits, st.floats(0.5, 10))
def test_temperature_kl_is_the_formula_of_the_paper(student, teacher, temperature):
    p, q = probabilities(teacher / temperature), probabilities(student / temperature)
    expected = (
        temperature**2 * sum(p[i, j] * np.log(p[i, j] / q[i, j]) for i in range(4) for j in range(5) if p[i, j] > 0) / 4
    )
    assert temperature_kl(torch.tensor(student), torch.tensor(teacher), temperature).item() == pytest.approx(
        expected, rel=1e-3, abs=1e-4
    )


def test_temperature_kl_of_two_classes_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.130812
    student, teacher = torch.zeros(1, 2), torch.tensor([[np.log(3.0), 0.0]])
    assert temperature_kl(student, teacher, 1.0).item() == pytest.approx(0.130812, abs=1e-6)


def test_the_gradient_keeps_its_scale_at_high_temperature():
    """Hinton et al. 2015, section 2.1: at high T the gradient tends to (z_i - v_i) / N for zero-mean logits, whatever T."""
    student = torch.tensor([[1.0, -2.0, 1.0]], requires_grad=True)
    teacher = torch.tensor([[0.5, 0.5, -1.0]])
    temperature_kl(student, teacher, 1000.0).backward()
    assert torch.allclose(student.grad, (student.detach() - teacher) / 3, atol=1e-2)


def test_smoothed_labels_mix_in_the_uniform_distribution():
    scores, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    logs = torch.log_softmax(scores, 1)[0]
    expected = -(0.9 * logs[0] + 0.1 * logs.mean())
    assert label_cross_entropy(scores, labels, 0.1).item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_schedule_rises_then_falls_to_zero():
    factors = [warmup_cosine(step, 100, 0.1) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1 and factors[100] == pytest.approx(0)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert warmup_cosine(55, 100, 0.1) == pytest.approx(0.5)
    assert warmup_cosine(0, 1, 0) == 1

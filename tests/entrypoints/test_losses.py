"""Losses against values worked out by other means than the ones they use."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from scipy.stats import zscore
from training.data.batches import LabelledBatch
from training.engine.schedules import warmup_cosine
from training.settings.distillation import DistillationSettings
from training.tasks import losses
from training.tasks.losses import distillation_loss, label_cross_entropy, temperature_kl

logits = numpy_strategies.arrays(np.float64, (4, 5), elements=st.floats(-20, 20))

STUDENT = torch.tensor(np.round(3 * np.sin(1 + 2 * np.arange(20)), 3).reshape(4, 5))
TEACHER = torch.tensor(np.round(5 * np.cos(0.5 + 3 * np.arange(20)), 3).reshape(4, 5))
LABELS, OTHERS, SHARES = torch.tensor([0, 3, 1, 1]), torch.tensor([0, 4, 2, 1]), torch.tensor([1, 0.75, 0.4, 0.5])
METHODS = ["kl", "hard", "dkd", "dist"]


def batch(labels=LABELS, others=OTHERS, shares=SHARES) -> LabelledBatch:
    unused = torch.zeros(0)
    return LabelledBatch(unused, labels, others, shares, unused, unused)


def parts(student, teacher, method: str, labelled=None, **options) -> dict[str, torch.Tensor]:
    configured = DistillationSettings(student="any", method=method, **options)
    return distillation_loss(student, teacher, labelled or batch(), configured)


def loss(*arguments, **options) -> torch.Tensor:
    return sum(parts(*arguments, **options).values())


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


# -- against the papers, in numpy ---------------------------------------------------------------------------------------


def test_smoothed_labels_mix_in_the_uniform_distribution():
    scores, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    logs = torch.log_softmax(scores, 1)[0]
    expected = -(0.9 * logs[0] + 0.1 * logs.mean())
    assert label_cross_entropy(scores, labels, smoothing=0.1).item() == pytest.approx(expected.item(), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(logits, st.floats(0, 0.9))
def test_a_mixed_label_counts_as_both_by_their_shares(scores, smoothing):
    targets = np.full((4, 5), smoothing / 5)
    for image in range(4):
        targets[image, LABELS[image]] += (1 - smoothing) * SHARES[image].item()
        targets[image, OTHERS[image]] += (1 - smoothing) * (1 - SHARES[image].item())
    expected = -(targets * np.log(probabilities(scores))).sum() / 4
    found = label_cross_entropy(torch.tensor(scores), LABELS, OTHERS, SHARES, smoothing=smoothing)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_unmixed_labels_give_the_same_with_and_without_their_shares():
    assert label_cross_entropy(STUDENT, LABELS, OTHERS, torch.ones(4)) == label_cross_entropy(STUDENT, LABELS)


def test_hard_distillation_learns_the_teachers_class_by_hand():
    student, teacher = torch.tensor([[0.0, np.log(3.0)], [5.0, 5.0]]), torch.tensor([[2.0, 1.0], [-1.0, 3.0]])
    assert parts(student, teacher, "hard") == {"hard_loss": pytest.approx((np.log(4) + np.log(2)) / 2, rel=1e-6)}


def dkd(student: np.ndarray, teacher: np.ndarray, label: int, temperature: float) -> np.ndarray:
    """TCKD and NCKD of one image, as section 3 of the paper defines them."""
    p, q = (probabilities(values[None] / temperature)[0] for values in (teacher, student))
    rest = [k for k in range(len(p)) if k != label]
    two_way = [(p[label], q[label]), (sum(p[rest]), sum(q[rest]))]
    others = [(p[k] / sum(p[rest]), q[k] / sum(q[rest])) for k in rest]
    return temperature**2 * np.array([sum(a * np.log(a / b) for a, b in pairs) for pairs in (two_way, others)])


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_dkd_is_the_formula_of_the_paper_and_mixes_by_share(temperature):
    expected = np.zeros(2)
    for image in range(4):
        own, other = (
            dkd(STUDENT[image].numpy(), TEACHER[image].numpy(), labels[image].item(), temperature)
            for labels in (LABELS, OTHERS)
        )
        expected += (SHARES[image].item() * own + (1 - SHARES[image].item()) * other) / 4
    found = parts(STUDENT, TEACHER, "dkd", temperature=temperature, dkd_alpha=0.5, dkd_beta=3.0)
    assert list(found) == ["dkd_target", "dkd_nontarget"]
    assert [value.item() for value in found.values()] == pytest.approx([0.5 * expected[0], 3 * expected[1]], rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_dist_is_one_minus_numpys_correlation_of_rows_and_columns(temperature):
    p, q = (probabilities(values.numpy() / temperature) for values in (TEACHER, STUDENT))
    rows = np.mean([1 - np.corrcoef(p[i], q[i])[0, 1] for i in range(4)])
    columns = np.mean([1 - np.corrcoef(p[:, j], q[:, j])[0, 1] for j in range(5)])
    found = parts(STUDENT, TEACHER, "dist", temperature=temperature, dist_beta=2.0, dist_gamma=0.5)
    assert list(found) == ["dist_inter", "dist_intra"]
    expected = [2 * temperature**2 * rows, 0.5 * temperature**2 * columns]
    assert [value.item() for value in found.values()] == pytest.approx(expected, rel=1e-6)


def test_standardised_logits_are_scipys_z_scores():
    expected = zscore(STUDENT.numpy(), axis=1, ddof=1)
    assert losses.standardized(STUDENT).numpy() == pytest.approx(expected, rel=1e-6)


# -- against torchdistill 1.1.5 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "temperature", "options", "expected"),
    [
        # torchdistill.losses.mid_level: T² times KDLoss(alpha=0) and LogitStdKDLoss(alpha=0), and DISTLoss, of STUDENT and TEACHER in float64
        ("kl", 1.0, {}, 1.5468542349428112),
        ("kl", 4.0, {}, 5.650620994318855),
        ("kl", 1.0, {"standardize_logits": True}, 0.5399628721291883),
        ("kl", 4.0, {"standardize_logits": True}, 0.6940444079315111),
        ("dist", 1.0, {"dist_gamma": 0.0}, 0.8641781416318439),
        ("dist", 1.0, {"dist_beta": 0.0}, 0.9231974546444154),
        ("dist", 4.0, {"dist_gamma": 0.0}, 14.310232912799934),
        ("dist", 4.0, {"dist_beta": 0.0}, 14.965647438858449),
    ],
)
def test_the_losses_are_torchdistills(method, temperature, options, expected):
    found = loss(STUDENT, TEACHER, method, temperature=temperature, **options)
    assert found.item() == pytest.approx(expected, rel=1e-6)


# -- what must hold -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kl", "dkd", "dist"])
def test_a_student_that_is_its_teacher_has_no_loss(method):
    assert loss(TEACHER, TEACHER, method).item() == pytest.approx(0, abs=1e-5)


def test_dkd_with_the_papers_weights_is_the_kl():
    """Equation 6: KL = TCKD + (1 - p_label) NCKD, image by image, whatever the label is and however it is mixed."""
    for image in range(4):
        one = (STUDENT[image : image + 1], TEACHER[image : image + 1])
        for label in range(5):
            target, nontarget = losses.decoupled_kl(
                *one, 2.0, *(torch.tensor([value]) for value in (label, label, 1.0))
            )
            weight = 1 - probabilities(one[1].numpy() / 2)[0, label]
            assert (target + weight * nontarget).item() == pytest.approx(temperature_kl(*one, 2.0).item(), rel=1e-6)


def test_a_linear_relation_of_probabilities_has_no_distance_and_a_reversed_one_two():
    values = torch.softmax(TEACHER, 1)
    scales, shifts = torch.tensor([[2.0], [0.1], [30.0], [1.0]]), torch.tensor([[0.0], [-1.0], [5.0], [0.3]])
    assert losses.pearson_distance(values * scales + shifts, values).abs().max().item() < 1e-6
    assert (losses.pearson_distance(-values, values) - 2).abs().max().item() < 1e-6


@pytest.mark.parametrize("method", ["kl", "dkd"])
def test_standardised_losses_see_neither_scale_nor_shift(method):
    expected = loss(STUDENT, TEACHER, method, standardize_logits=True)
    scales, shifts = torch.tensor([[2.0], [0.1], [30.0], [1.0]]), torch.tensor([[0.0], [-1.0], [5.0], [0.3]])
    moved = loss(STUDENT * scales + shifts, TEACHER / scales - shifts, method, standardize_logits=True)
    assert moved.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss(STUDENT * scales, TEACHER, method).item() != pytest.approx(
        loss(STUDENT, TEACHER, method).item(), rel=0.1
    )


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_finite_differences(method, standardize):
    student = STUDENT.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda values: loss(values, TEACHER, method, standardize_logits=standardize, temperature=2.0), student
    )


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (torch.zeros(4, 5), TEACHER.float()),  # a head that starts at zero
        (STUDENT.float(), torch.ones(4, 5)),
        (torch.full((4, 5), 3.7), torch.full((4, 5), -3.7)),
        (STUDENT.float(), 1e4 * TEACHER.float()),
        (1e4 * STUDENT.float(), -1e4 * STUDENT.float()),
        (STUDENT[:1].float(), TEACHER[:1].float()),  # one image: a class has no relation
        (STUDENT[:, :2].float(), TEACHER[:, :2].float()),
    ],
    ids=[
        "constant student",
        "constant teacher",
        "both constant",
        "sure teacher",
        "both sure",
        "one image",
        "two classes",
    ],
)
def test_no_logits_give_a_loss_or_gradient_that_is_not_finite(student, teacher, method, standardize):
    student, count = student.clone().requires_grad_(), len(student)
    labels = torch.zeros(count, dtype=torch.int64)
    found = loss(student, teacher, method, batch(labels, labels + 1, SHARES[:count]), standardize_logits=standardize)
    found.backward()
    assert torch.isfinite(found) and torch.isfinite(student.grad).all()


@pytest.mark.parametrize("method", ["kl", "dkd", "dist"])
def test_a_teacher_may_exclude_a_class(method):
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone()
    teacher[:, 4] = -torch.inf
    labels = torch.tensor([0, 3, 1, 1])
    found = loss(student, teacher, method, batch(labels, labels, torch.ones(4)))
    found.backward()
    assert torch.isfinite(found) and torch.isfinite(student.grad).all()
    teacher[:, 4] = -300
    assert found.item() == pytest.approx(loss(student, teacher, method, batch(labels, labels, torch.ones(4))).item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_losses_are_worked_out_in_float32_whatever_the_logits_are(method, dtype):
    student, teacher = STUDENT.to(dtype), TEACHER.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = parts(student, teacher, method)
        labels = label_cross_entropy(student, LABELS, OTHERS, SHARES)
    expected = parts(student.float(), teacher.float(), method)
    assert all(value.dtype == torch.float32 for value in [labels, *found.values()])
    assert found == expected and labels == label_cross_entropy(student.float(), LABELS, OTHERS, SHARES)


# -- the schedule -------------------------------------------------------------------------------------------------------


def test_the_schedule_rises_then_falls_to_zero():
    factors = [warmup_cosine(step, 100, 0.1) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1 and factors[100] == pytest.approx(0)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert warmup_cosine(55, 100, 0.1) == pytest.approx(0.5)
    assert warmup_cosine(0, 1, 0) == 1

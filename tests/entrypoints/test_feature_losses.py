"""The losses of features against their papers' formulas, written out in numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from training.settings.features import FeatureSettings
from training.tasks.feature_losses import cosine_distance, feature_loss, relational_loss, whitened_smooth_l1

STUDENT, TEACHER = (np.round(4 * wave(1 + 2 * np.arange(20)), 3).reshape(5, 4) for wave in (np.sin, np.cos))
WIDER = np.round(9 * np.cos(0.3 + 1.7 * np.arange(35)), 3).reshape(5, 7)


def huber(difference: float, delta: float = 1.0) -> float:
    size = abs(difference)
    return size**2 / (2 * delta) if size < delta else size - delta / 2


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(array) for array in arrays]


def test_the_cosine_distance_is_the_mean_over_images_of_one_minus_the_cosine():
    cosines = [s @ t / (np.linalg.norm(s) * np.linalg.norm(t)) for s, t in zip(STUDENT, TEACHER)]
    assert cosine_distance(*tensors(STUDENT, TEACHER)).item() == pytest.approx(1 - np.mean(cosines), rel=1e-9)
    assert cosine_distance(*tensors(3 * TEACHER, TEACHER)).item() == pytest.approx(0, abs=1e-9)


def test_smooth_l1_compares_with_the_whitened_features():
    white = (TEACHER - TEACHER.mean(1, keepdims=True)) / np.sqrt(TEACHER.var(1, keepdims=True) + 1e-5)
    expected = np.mean([huber(difference, 2.0) for difference in (STUDENT - white).flat])
    assert (np.abs(STUDENT - white) < 2).any() and (np.abs(STUDENT - white) > 2).any()
    assert whitened_smooth_l1(*tensors(STUDENT, TEACHER)).item() == pytest.approx(expected, rel=1e-9)
    assert whitened_smooth_l1(*tensors(STUDENT, 100 * TEACHER)).item() == pytest.approx(expected, rel=1e-4)


def relations(features: np.ndarray) -> tuple[dict, dict]:
    """Park et al. 2019, equations 4, 5 and 8: of each two different images, and of each three."""
    pairs = [*itertools.permutations(range(len(features)), 2)]
    distance = {(i, j): np.linalg.norm(features[i] - features[j]) for i, j in pairs}
    mean = np.mean([*distance.values()])

    def towards(i: int, j: int) -> np.ndarray:
        return (features[i] - features[j]) / distance[i, j]

    triples = itertools.permutations(range(len(features)), 3)
    angle = {(i, j, k): towards(i, j) @ towards(k, j) for i, j, k in triples}
    return {pair: value / mean for pair, value in distance.items()}, angle


def test_relations_are_those_of_all_pairs_and_all_triples_of_different_images():
    (distance, angle), (taught_distance, taught_angle) = relations(STUDENT), relations(WIDER)
    distances = np.mean([huber(distance[pair] - taught_distance[pair]) for pair in distance])
    angles = np.mean([huber(angle[triple] - taught_angle[triple]) for triple in angle])
    assert len(distance) == 20 and len(angle) == 60
    assert relational_loss(*tensors(STUDENT, WIDER)).item() == pytest.approx(distances + 2 * angles, rel=1e-9)


def test_a_student_that_is_turned_enlarged_and_moved_has_its_teachers_relations():
    turned, _ = np.linalg.qr(np.sin(np.arange(49)).reshape(7, 7))
    assert relational_loss(*tensors(5 * WIDER @ turned + 3, WIDER)).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("count", [1, 2])
def test_relations_of_fewer_images_than_an_angle_takes_are_finite(count):
    student = torch.tensor(STUDENT[:count]).requires_grad_()
    loss = relational_loss(student, torch.tensor(WIDER[:count]))
    loss.backward()
    assert loss.item() < 1e-12 and student.grad.abs().max() < 1e-12  # two images are as far apart as the mean


def test_two_images_with_the_same_features_have_finite_gradients():
    student = torch.tensor(STUDENT)
    student[3] = student[1]
    student.requires_grad_()
    relational_loss(student, torch.tensor(WIDER)).backward()
    assert student.grad.isfinite().all() and student.grad.abs().max() < 10


@pytest.mark.parametrize(
    ("loss", "formula"),
    [("cosine", cosine_distance), ("smooth_l1", whitened_smooth_l1), ("relational", relational_loss)],
)
def test_every_loss_is_exact_under_autocast(loss, formula):
    settings, (student, teacher) = FeatureSettings(loss=loss), tensors(STUDENT, TEACHER)
    student, teacher = student.bfloat16(), teacher.float()
    with torch.autocast("cpu", torch.bfloat16):
        found = feature_loss(student, teacher, settings)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(formula(student.float(), teacher).item(), rel=1e-6)


def test_a_finer_teacher_is_averaged_over_the_students_places():
    """Four columns on two: the first is 1 wide of 4, so a triangle of half width 2 about its centre weighs them 3 : 3 : 1 : 0."""
    columns = np.eye(4)[None, :, :].repeat(4, 0)[None]  # (1, rows, columns, width): a column's number as a direction
    weights = np.array([[3, 3, 1, 0], [0, 1, 3, 3]]) / 7
    expected = np.stack([weights, weights])[None]
    student = np.round(np.sin(np.arange(16)), 3).reshape(1, 2, 2, 4)
    found, written_out = (
        feature_loss(*tensors(student, teacher), FeatureSettings(level="tokens")).item()
        for teacher in (columns, expected)
    )
    assert found == pytest.approx(written_out, rel=1e-9)
    mirrored = feature_loss(*tensors(student, columns[:, :, ::-1].copy()), FeatureSettings(level="tokens")).item()
    assert mirrored != pytest.approx(written_out, rel=1e-3)

"""Ranges of ratios of times: they hold the true ratio as often as they say, also where neighbouring windows are alike."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.insight.ratio import CONFIDENCE, Measured, Ratio, added, ratio, student, total


def windows(rng: np.random.Generator, number: int, alike: float, spread: float = 0.2) -> np.ndarray:
    """(number,) seconds a step around 1; `alike` is the correlation of neighbours."""
    noise = rng.normal(size=number)
    for at in range(1, number):
        noise[at] = alike * noise[at - 1] + np.sqrt(1 - alike**2) * noise[at]
    return 1 + spread * noise


@pytest.mark.parametrize(("number", "alike"), [(6, 0.0), (20, 0.0), (20, 0.3), (60, 0.5), (300, 0.7)])
def test_a_range_holds_the_true_ratio_about_as_often_as_it_says(number, alike):
    rng, trials, held = np.random.default_rng(number), 400, 0
    counts = np.full(number, 10.0)
    for _ in range(trials):
        before, after = (total(windows(rng, number, alike), counts) for _ in range(2))
        found = ratio(before, after)
        held += found.low <= 1 <= found.high
    assert held / trials >= CONFIDENCE - 0.12, held / trials
    assert number < 20 or held < trials, "a range that always holds it says nothing"


def test_windows_that_are_alike_make_the_range_wider():
    rng, counts = np.random.default_rng(0), np.ones(300)
    single, alike = (
        np.median([total(windows(rng, 300, correlation), counts).variance for _ in range(50)])
        for correlation in (0, 0.7)
    )
    assert alike > 2 * single


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"), [(2, 4.303), (3, 3.182), (5, 2.571), (9, 2.262), (30, 2.042)]
)
def test_students_t_is_that_of_the_tables(degrees_of_freedom, expected):
    assert student(degrees_of_freedom, CONFIDENCE) == pytest.approx(expected, rel=0.01)


def test_a_total_weighs_windows_by_their_steps_and_needs_three_of_them():
    assert total(np.array([1.0, 3.0]), np.array([3.0, 1.0])) == Measured(6.0, 0.0, 0)
    whole = total(np.array([1.0, 1.0, 4.0]), np.array([4.0, 4.0, 1.0]))
    assert whole.value == 12 and whole.degrees_of_freedom == 2
    excess = np.array([4.0, 4.0, 4.0]) - 12 / 9 * np.array([4, 4, 1])
    assert whole.variance == pytest.approx(3 / 2 * (excess**2).sum())


def test_errors_of_a_sum_add_up_and_the_larger_one_says_how_sure_they_are():
    found = added([Measured(10, 4.0, 5), Measured(1, 0.01, 50), Measured(7, 0.0, 0)])
    assert (
        found.value == 18
        and found.variance == pytest.approx(4.01)
        and found.degrees_of_freedom == pytest.approx(5, rel=0.01)
    )


def test_a_ratio_of_too_few_windows_has_no_range():
    few = total(np.array([1.0, 1.1]), np.ones(2))
    assert ratio(few, few) == Ratio(1.0, None, None) and str(ratio(few, few)) == "1.00"
    assert not ratio(few, few).differs and ratio(few, few).widened(2) == ratio(few, few)


def test_a_drift_widens_a_range_beyond_itself_and_leaves_the_figure():
    exact = Ratio(1.5, 1.5, 1.5)
    assert exact.widened(1.2) == Ratio(1.5, pytest.approx(1.25), pytest.approx(1.8))
    assert exact.widened(1 / 1.2) == exact.widened(1.2), "whichever run was slower"
    assert Ratio(1.5, 1.2, 1.8).widened(1.2).high > 1.8 and str(Ratio(1.31, 1.24, 1.39)) == "1.31 (1.24 to 1.39)"

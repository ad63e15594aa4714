"""The model of scaling against numbers worked out apart from it: planted parameters, hand-made sums, and scipy's own solver."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import nnls

from launcher.study import scaling_model
from launcher.study.scaling_model import (
    Point,
    buckets,
    extrapolated_efficiency,
    fit,
    held_out,
    hosts_held_out,
    ring,
)

MIB = 2**20
RESNET50 = 4 * 25_557_032
"""Bytes of its gradients."""


@pytest.mark.parametrize(
    ("hosts", "turns", "volume"), [(1, 0, 0.0), (2, 2, 1.0), (4, 6, 1.5), (5, 8, 1.6), (64, 126, 1.96875)]
)
def test_a_ring_takes_twice_the_hosts_turns_and_sends_nearly_twice_the_bytes(hosts, turns, volume):
    assert ring(hosts) == (turns, volume)


@pytest.mark.parametrize(
    ("size", "count", "last"), [(MIB, 1, 1.0), (MIB / 2, 1, 1.0), (26 * MIB, 2, 25 / 26), (27 * MIB, 3, 1 / 27), (100 * MIB, 5, 0.24)]
)  # fmt: skip
def test_buckets_are_one_mebibyte_and_then_25_each(size, count, last):
    assert buckets(size) == (count, pytest.approx(last))


@pytest.mark.parametrize(
    ("other", "by_bytes", "by_turns"),
    [(8, 0.93, 0.93), (5, 1 / (1 + 0.0752688 * 1.6 / 1.75), 1 / (1 + 0.0752688 * 8 / 14)), (1, 1.0, 1.0), (16, 0.9254, 0.8611)],
)  # fmt: skip
def test_an_efficiency_elsewhere_lies_between_bytes_and_turns(other, by_bytes, by_turns):
    assert extrapolated_efficiency(0.93, 8, other) == pytest.approx((by_bytes, by_turns), abs=1e-4)


def planted(
    hosts: int, batch: float, size: float, *, bandwidth: float, latency: float, fixed=0.02, image=0.004, feed=0.0
) -> float:
    """Seconds of a step by the formulas, written anew with two thirds of computing in backward."""
    computing = fixed + image * batch
    if hosts == 1:
        return max(computing, feed * batch)
    mebibytes = size / MIB
    whole, rest = divmod(mebibytes - 1, 25)
    count, last = (1 + whole + 1, rest) if rest else (1 + whole, 25)
    sent = 2 * (hosts - 1) / hosts * size / bandwidth + 2 * (hosts - 1) * count * latency
    return max(computing, feed * batch) + max(sent * last / mebibytes, sent - computing * 2 / 3)


GRID = [(1, 8), (1, 16), (2, 8), (2, 16), (4, 8), (4, 16)]


@pytest.mark.parametrize("bandwidth", [5e9, 4e8, 5e7], ids=["hidden", "partly", "exposed"])
def test_planted_numbers_are_found_and_sizes_that_were_not_run_predicted(bandwidth):
    """With a fast network only the last bucket shows, with a slow one all that backward does not hide."""
    truth = {"size": 97.49 * MIB, "bandwidth": bandwidth, "latency": 2e-4}
    points = [
        Point(hosts=hosts, batch=batch, seconds=planted(hosts, batch, **truth), backward=(0.02 + 0.004 * batch) * 2 / 3,
              exposed=planted(hosts, batch, **truth) - planted(1, batch, **truth))
        for hosts, batch in GRID
    ]  # fmt: skip
    model = fit(points, truth["size"])
    assert (model.fixed, model.compute_seconds_per_image, model.backward) == pytest.approx(
        (0.02, 0.004, 2 / 3), rel=1e-6
    )
    assert (model.bandwidth, model.latency) == pytest.approx((bandwidth, 2e-4), rel=1e-6)
    for hosts, batch in ((8, 8), (16, 32), (3, 5)):
        assert model.step(hosts, batch).seconds == pytest.approx(planted(hosts, batch, **truth), rel=1e-6)
    assert model.assumptions == () and model.crowding == 0
    assert [each.error for each in held_out(points, truth["size"])] == [pytest.approx(0, abs=1e-6)] * 6
    assert [each.error for each in hosts_held_out(points, truth["size"]) if each.point.hosts == 1] == [
        pytest.approx(0, abs=1e-6)
    ] * 2


def test_an_input_that_was_waited_for_limits_larger_batches_too():
    """10 ms an image of input beside 6 of computing: the exchange comes on top of the slower of them."""
    points = [
        Point(hosts=1, batch=10, seconds=0.1, waited=0.04),
        Point(hosts=1, batch=20, seconds=0.2, waited=0.08),
        Point(hosts=2, batch=10, seconds=0.13, waited=0.04, exposed=0.03),
    ]
    model = fit(points, 10 * MIB)
    assert model.input_seconds_per_image == pytest.approx(0.01) and model.compute_seconds_per_image == pytest.approx(
        0.006
    )
    step = model.step(2, 30)
    assert (step.input, step.computing) == pytest.approx((0.3, 0.18)) and step.seconds == pytest.approx(0.33)
    between = [Point(hosts=1, batch=10, seconds=0.1, waited=0.04, side_by_side=False)]
    assert fit(between, MIB).input_seconds_per_image == 0, "what is made between two steps is a part of them"
    assert fit(between, MIB).step(1, 20).seconds == pytest.approx(0.2)


def test_neighbours_on_one_machine_slow_each_other_and_hosts_of_their_own_do_not():
    """4 ms an image alone and 5 beside another; the exchange takes 10 ms. A single other size has no latency to tell apart."""
    points = [Point(hosts=1, batch=batch, seconds=0.004 * batch) for batch in (5, 10, 20)]
    points += [
        Point(hosts=2, batch=batch, seconds=0.005 * batch + 0.01, exposed=0.01, neighbours=1) for batch in (5, 10, 20)
    ]
    model = fit(points, MIB)
    assert model.crowding == pytest.approx(0.001) and model.predict(points[-1]).seconds == pytest.approx(0.11)
    assert model.step(2, 20).seconds == pytest.approx(0.09), "each with its own machine"
    assert model.latency == 0 and "only the size of 2 hosts exchanges gradients" in model.assumptions[0]
    assert max(abs(each.error) for each in held_out(points, MIB)) < 1e-6
    assert hosts_held_out(points, MIB) == [], "two numbers of hosts are too few"


def test_what_the_sizes_cannot_tell_is_assumed_in_words():
    alone = fit([Point(hosts=1, batch=8, seconds=0.4)], RESNET50)
    assert alone.step(1, 16).seconds == pytest.approx(0.8) and alone.step(4, 8).exposed == 0
    assert [words.partition(":")[0] for words in alone.assumptions] == [
        "one batch per process",
        "no size has several hosts",
        "backward was not measured",
    ]
    with pytest.raises(ValueError, match="nothing was measured"):
        fit([], RESNET50)


def test_what_no_other_size_can_tell_is_not_predicted():
    one, two = Point(hosts=1, batch=8, seconds=0.4), Point(hosts=2, batch=8, seconds=0.5, exposed=0.1)
    first, second = held_out([one, two], RESNET50)
    assert first.predicted == pytest.approx(0.4), "what was measured of the exchange is no computing"
    assert second.predicted is second.error is None and "no other size exchanges gradients" in second.why
    assert held_out([one], RESNET50)[0].why == "it is the only size"


def test_the_error_is_above_zero_where_the_model_is_slower():
    points = [Point(hosts=1, batch=batch, seconds=seconds) for batch, seconds in ((10, 1.0), (20, 2.0), (40, 3.2))]
    errors = [each.error for each in held_out(points, MIB)]
    assert errors[2] == pytest.approx(4 / 3.2 - 1) and errors[0] > 0


def test_numbers_below_zero_are_never_taken_and_none_fits_better():
    """Against scipy's own non-negative least squares (Lawson and Hanson), on problems in which the plain solution is negative."""
    rng = np.random.default_rng(0)
    negative = 0
    for _ in range(60):
        rows, targets = rng.normal(size=(9, 5)) * [1, 30, 1e8, 1, 10], rng.normal(size=9)
        free = [True, *(rng.random(4) < 0.8)]
        found = np.array(scaling_model._non_negative(rows.tolist(), targets.tolist(), free))
        expected, residual = nnls(rows * np.array(free) / [1, 30, 1e8, 1, 10], targets)
        negative += bool((np.linalg.lstsq(rows, targets, rcond=None)[0] < 0).any())
        assert (found >= 0).all() and not found[~np.array(free)].any()
        assert np.linalg.norm(rows @ found - targets) == pytest.approx(residual, rel=1e-9)
        assert found * [1, 30, 1e8, 1, 10] == pytest.approx(expected, abs=1e-9)
    assert negative > 30


def test_measurements_with_noise_are_predicted_within_a_tenth():
    """3 % of noise a size, 20 times: of the sizes left out, the errors are of the noise's kind."""
    rng, errors = np.random.default_rng(1), []
    truth = {"size": 20e6, "bandwidth": 3e8, "latency": 1e-3}
    for _ in range(20):
        points = []
        for hosts, batch in itertools.product((1, 2, 4), (4, 8, 16)):
            alone, step = planted(1, batch, **truth), planted(hosts, batch, **truth)
            noisy = step * rng.normal(1, 0.03)
            points.append(Point(hosts=hosts, batch=batch, seconds=noisy, exposed=(step - alone) * noisy / step))
        errors += [abs(each.error) for each in held_out(points, truth["size"])]
    assert np.median(errors) < 0.04 and np.quantile(errors, 0.95) < 0.10

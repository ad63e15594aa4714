"""Texts for people: two that are long are cut so that one sees where they differ."""

from __future__ import annotations

import pytest

from launcher.show.text import shortened_apart

IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{IMAGE}2.1.0-gpu-py310", f"{IMAGE}2.2.0-gpu-py310"),
        ("a" * 100, "a" * 120),
        (f"{'a' * 90}b{'c' * 90}", f"{'a' * 90}d{'c' * 90}"),
        ("b" * 100, "c" * 100),
    ],
    ids=["images", "one longer", "in the middle", "at once"],
)
def test_what_is_cut_still_differs(first, second):
    cut = shortened_apart(first, second, 40)
    assert cut[0] != cut[1] and min(map(len, cut)) > 0 and max(map(len, cut)) == 40


def test_short_ones_stay():
    assert shortened_apart("same-1", "same-2", 40) == ("same-1", "same-2")

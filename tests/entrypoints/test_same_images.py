"""Hosts that have different images: every rank refuses them before its first step, and says what differs."""

from __future__ import annotations

import numpy as np
import pytest
from training.data.loaders import Data
from training.data.orders import FreeOrder, ShardOrder
from training.data.same_images import identity

from .ranks import run_ranks

RANKS = """
    from training.data.loaders import Data
    from training.data.same_images import refuse_other_images

    class Images(list):
        def listing(self):
            return " ".join(self)

    training, held_out, classes = {cases}[int(os.environ["RANK"])]
    with process_group() as world:
        try:
            refuse_other_images(Data(classes, Images(training), Images(held_out), None), world)
            print("the same")
        except ValueError as error:
            print(error)
"""

SAME = ("abc", "xy", ["cat", "dog"])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (SAME, "the same"),
        (
            ("ab", "xy", SAME[2]),
            "rank 1 has 2 training images instead of 3 and 2 held-out images instead of 2. Every host",
        ),
        (
            ("abc", "x", SAME[2]),
            "rank 1 has 3 training images instead of 3 and 1 held-out images instead of 2. Every host",
        ),
        (
            ("abd", "xy", SAME[2]),
            "2 held-out images instead of 2 with other names or classes. Every host needs the same files",
        ),
        (("abc", "xz", SAME[2]), "with other names or classes"),
        (("abc", "xy", ["cat", "cow"]), "with other names or classes"),
    ],
)
def test_hosts_with_other_images_are_refused_on_every_rank(tmp_path, other, said):
    for done in run_ranks(tmp_path, RANKS.format(cases=[SAME, other])):
        assert said in done.stdout and done.returncode == 0, done.stderr


class Images(list):
    def listing(self) -> str:
        return " ".join(self)


def test_images_are_told_from_others_by_their_number_names_and_classes():
    def of(training, classes=("cat", "dog"), **more):
        return identity(Data([*classes], Images(training), Images("xy"), lambda items: items, **more))

    ours = of("abc")
    assert ours["training images"].startswith("3 (") and ours["classes"].startswith("2 (")
    assert of("abc") == ours and of("abd")["training images"] != ours["training images"]
    assert of("abc", ("cat", "cow")) | {"classes": ours["classes"]} == ours != of("abc", ("cat", "cow"))
    masks = of("abc", ("0", "1"), numbered=True)
    assert masks["classes"] == "2" and of("abc", ("road", "car"), numbered=True) == masks, (
        "names are only what people read"
    )


def test_images_in_another_order_are_others():
    """A run that goes on would draw some of them twice, and others never."""
    shards = [
        identity(Data(["a"], [1] * 12, [], None, order=ShardOrder(np.array([5, 7]), window))) for window in (1, 2)
    ]
    assert shards[0] != shards[1] and "order" in shards[0]
    assert "order" not in identity(Data(["a"], [1] * 12, [], None, order=FreeOrder(12))), "of files there is one"

"""Broken configs without end: values, keys and texts of a good config changed at random, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import yaml

VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([0, -1, 1, 2, 17, 10**6, 2**31, 2**63, 10**30, -(10**30)]),
    lambda rng: rng.choice([0.0, -0.5, 1.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]),
    lambda rng: rng.choice(["", " ", "x", "null", "0", "-", "--on", "a b", "..", "~", "~nobody/x", "*", "%", "{}", "[]", ":", "x" * 5000]),
    lambda rng: rng.choice(["ünï", "码", "\u202e", "\u2028", "\u0085", "\0", "\ud800", "\x1b[31m", "\ufeff", "🙂", "a\nb", "'; echo", "\\"]),
    lambda rng: rng.choice(["s3://", "s3://x", "s3://Bucket", "s3://bucket/../x", "arn:aws:iam::1:role/x", "fs-1", "ml.p4d", "g5.2xlarge"]),
    lambda rng: rng.choice([[], [[]], [None], [1, "a", {}], [[[[[1]]]]], list(range(200)), ["x"] * 3]),
    lambda rng: rng.choice([{}, {"": 1}, {"x": None}, {"a": {"b": {"c": {}}}}, {1: 2}, {None: 1}, {"run": "x", "s3": "s3://b"}]),
    lambda rng: rng.choice([{"folder": "."}, {"folder": "/nowhere"}, {"file": "/dev/null"}, {"folder": "\0"}, {"folder": "x" * 5000}]),
]  # fmt: skip
"""Kinds of wrong values, and some that are right elsewhere."""

KEYS = ["", " ", "x", "script", "name", "compute", "inputs", "train", "teacher", "model", "epochs", "instance_count", "s3", "ü", "a.b", "a=b",
        "sagemaker_x", "\0", "\u2028", "__class__", "smoke", 1, None, True, 3.5]  # fmt: skip
"""Keys that are put where they do not belong, and others that do not exist."""

TEXTS = ["\t", "\0", "\ufeff", "\r", "{", "}", "[", "]", "&a ", "*a", "!!python/object:os.system ", "!!binary x", "!x ", "<<: *a\n", "? ", "- ",
         ": ", "|\n", ">-\n", "%TAG ! x\n", "---\n", "...\n", "#", "'", '"', "\\", "@", "`", "\u0085", "\u2028", "0x", "0o7", "1_000", "1e3",
         ".inf", ".nan", "yes", "2024-01-01", "12:30:45", "name: again\n", "compute: {compute: {compute: }}\n"]  # fmt: skip
"""What is put into a config's text anywhere: YAML's own signs and its surprises."""


def mutated(text: str, rng: random.Random) -> str:
    """A config's text with one to three changes."""
    if rng.random() < 0.3:
        return _text_mutated(text, rng)
    values = yaml.safe_load(text)
    for _ in range(rng.randint(1, 3)):
        _mutate(values, rng)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=rng.random() < 0.5)


def _mutate(values: Any, rng: random.Random) -> None:
    """Change one place of a tree of mappings and lists."""
    holders = [values]
    for holder in holders:
        items = holder.values() if isinstance(holder, dict) else holder
        holders += [item for item in items if isinstance(item, (dict, list)) and item]
    holder = rng.choice(holders)
    places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    place, value = rng.choice(places), rng.choice(VALUES)(rng)
    kind = rng.randrange(5)
    if kind == 0:
        del holder[place]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = value
    elif kind == 2 and isinstance(holder, dict):
        holder[_misspelt(str(place), rng)] = holder.pop(place)
    elif kind == 3:
        holder[place] = rng.choice([[deepcopy(holder[place])], {"x": deepcopy(holder[place])}, str(holder[place])])
    else:
        holder[place] = value


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) + 1)
    return rng.choice([word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word.upper(), f" {word}", word[::-1]])


def _text_mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice([0, 0, 1, 5, 80]))
        text = text[:at] + rng.choice(TEXTS) + text[end:]
    return text

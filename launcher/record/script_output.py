"""The training loss that scripts print in the usual forms."""

from __future__ import annotations

import re

_NUMBER = r"(-?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|nan|inf)(?![\w.])"
_NAME = r"(?<!\w)(?:(?:train(?:ing)?|batch|step|running|total|avg|average|mean)[ _/.-]?)*loss(?:_step|_epoch)?"
_LOSS = re.compile(
    rf"{_NAME}[\"']?(?:\s*[:=]+\s*[\"']?(?:tensor\()?{_NUMBER}|\s+(?=-?\d*\.\d|nan|inf){_NUMBER})", re.IGNORECASE
)
_HELD_OUT = re.compile(r"(?:\b|_)(?:val|valid|validation|test|eval|evaluation|dev)(?:_|\b)[^,;|]*$", re.IGNORECASE)
"""A word before a loss, in the same part of the line, that marks it as one of held-out data."""

LONGEST_LINE = 4096
"""Characters searched of a line, its last."""


def training_loss(line: str) -> float | None:
    """The training loss in a line of a script's output; None if it names none, or only that of held-out data.

    `loss: 0.31`, `loss=0.31`, `'loss': 0.31`, `Loss 0.3100 (0.3500)` (the first of the two), `train_loss: 0.31`, `train_loss_step=0.31`,
    `Training loss = 3.1e-1` and `loss: tensor(0.31)`. A progress bar that is rewritten in place is one line; what it shows last counts.
    """
    shown = line.rstrip("\r\n").rpartition("\r")[2][-LONGEST_LINE:]
    for found in _LOSS.finditer(shown):
        if "train" in found[0].lower() or not _HELD_OUT.search(shown[: found.start()]):
            return float(found[1] or found[2])
    return None

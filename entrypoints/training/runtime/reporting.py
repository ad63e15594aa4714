"""What a run reports, from rank 0: metric lines, metrics.jsonl and result.json. Standard library only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any


class Reporter:
    """Writes a run's numbers on rank 0, and nothing on other ranks."""

    def __init__(self, folder: Path, *, active: bool):
        self._folder, self._active, self._lost_some = folder, active, False
        if active:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.jsonl").write_text("", encoding="utf-8")  # an earlier run's, in a plain shell

    def log(self, text: str) -> None:
        """One line for the log."""
        if self._active:
            write_line(text)

    def log_all(self, texts: Iterable[str]) -> None:
        """A line each."""
        for text in texts:
            self.log(text)

    def metrics(
        self,
        epoch: int,
        epochs: int,
        step: int,
        steps: int,
        values: Mapping[str, float],
        unprinted: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """One metric line, and the same numbers at full precision in metrics.jsonl, with `unprinted` ones that no line needs."""
        if not self._active:
            return
        write_line(metric_line(epoch, epochs, step, steps, values))
        try:
            with open(self._folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"rank": 0, "epoch": epoch, "step": step, **values, **unprinted}) + "\n")
        except OSError as error:  # no reason to end training: its lines have the numbers too
            if not self._lost_some:
                write_line(f"metrics.jsonl lacks step {step}, and maybe later ones: {error}")
            self._lost_some = True

    def result(self, values: Mapping[str, Any]) -> None:
        """The run's summary, as result.json."""
        if self._active:
            temporary = self._folder / ".result.json"
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, self._folder / "result.json")


def metric_line(epoch: int, epochs: int, step: int, steps: int, values: Mapping[str, float]) -> str:
    """`epoch 1/10 step 20/400 loss 0.1234 …`: plain decimals, so that SageMaker's metric regexes match them."""
    pairs = " ".join(f"{name} {_decimal(value)}" for name, value in values.items())
    return f"epoch {epoch}/{epochs} step {step}/{steps} {pairs}"


def write_line(text: str) -> None:
    """Write a line in one call: the toolkit reads the stream in chunks, and a line in two writes can arrive as two.

    Characters that the stream cannot encode, as in a file's name, are escaped: a name must not end a run.
    """
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def _decimal(value: float) -> str:
    """A number without an exponent: four decimals, more if it is small, one if it is large."""
    if value != value or abs(value) == float("inf"):
        return str(value)
    if abs(value) >= 0.1:
        return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4f}"
    return (
        f"{value:.12f}".rstrip("0").ljust(len("-0.0" if value < 0 else "0.0"), "0")
        if abs(value) < 1e-4
        else f"{value:.7f}"
    )
